//! The search for an algorithm: one algorithm serves everything modelled, with a workspace where
//! allowed.

use std::ffi::c_int;

use cudarc::cublaslt::sys::{
    cublasLtMatmulAlgo_t, cublasLtMatmulHeuristicResult_t, cublasStatus_t as Status,
};

use super::entry::{Refused, call, invalid, put};
use super::objects;
use super::problem::{Problem, Refusal};
use crate::machine::Out;

/// The meaning of an algorithm's eight words here; other libraries' algorithms are refused.
#[derive(Clone, Copy, Debug)]
pub(super) struct Algorithm {
    pub(super) workspace_bytes: u64,
    /// Of the problem's kind.
    key: u64,
    /// What A, B, C and D are multiples of, in bytes.
    pub(super) alignments: [u64; 4],
}

/// Marks an algorithm as the simulator's.
const MAGIC: u64 = 0x7369_6d63_7564_6121;
/// The size of the workspace that the algorithm overwrites if allowed.
const WORKSPACE_BYTES: u64 = 1 << 20;
/// No access is wider: no algorithm needs more alignment.
pub(super) const WIDEST_BYTES: u64 = 16;

impl Algorithm {
    pub(super) fn new(problem: &Problem, workspace_bytes_max: u64, alignments: [u64; 4]) -> Self {
        Self {
            workspace_bytes: if workspace_bytes_max >= WORKSPACE_BYTES {
                WORKSPACE_BYTES
            } else {
                0
            },
            key: problem.key(),
            alignments: alignments.map(|alignment| alignment.min(WIDEST_BYTES)),
        }
    }

    pub(super) fn raw(self) -> cublasLtMatmulAlgo_t {
        let [a, b, c, d] = self.alignments;
        cublasLtMatmulAlgo_t {
            data: [MAGIC, self.workspace_bytes, self.key, a, b, c, d, 0],
        }
    }

    pub(super) fn from_raw(raw: &cublasLtMatmulAlgo_t) -> Result<Self, Refused> {
        let [magic, workspace_bytes, key, a, b, c, d, _] = raw.data;
        if magic != MAGIC {
            return Err(invalid(
                "the algorithm did not come from cublasLtMatmulAlgoGetHeuristic",
            ));
        }
        Ok(Self {
            workspace_bytes,
            key,
            alignments: [a, b, c, d],
        })
    }
}

fn heuristic(
    handles: (usize, usize, [usize; 4], usize),
    requested: c_int,
) -> Result<cublasLtMatmulHeuristicResult_t, Refused> {
    let (library_handle, operation, layouts, preference_handle) = handles;
    objects::library(library_handle)?;
    if requested < 1 {
        return Err(invalid(format!("{requested} algorithms were asked for")));
    }
    let preference = objects::preference(preference_handle)?;
    if let Some(wrong) = preference
        .alignments
        .iter()
        .find(|alignment| !alignment.is_power_of_two())
    {
        return Err(invalid(format!(
            "a minimal alignment of {wrong} bytes is no power of two"
        )));
    }
    let problem = objects::problem(operation, layouts)?;
    let kinds = [
        problem.a.kind,
        problem.b.kind,
        problem.c.kind,
        problem.d.kind,
    ];
    let alignments = preference.alignments.map(u64::from);
    for ((operand, kind), alignment) in ["A", "B", "C", "D"].iter().zip(kinds).zip(alignments) {
        if alignment < kind.bytes() {
            return Err(Refusal::Unsupported(format!(
                "{operand} of {} is promised to be aligned to {alignment} bytes only",
                kind.name()
            ))
            .into());
        }
    }
    let algorithm = Algorithm::new(&problem, preference.workspace_bytes_max, alignments);
    Ok(heuristic_result(algorithm))
}

fn heuristic_result(algorithm: Algorithm) -> cublasLtMatmulHeuristicResult_t {
    cublasLtMatmulHeuristicResult_t {
        algo: algorithm.raw(),
        workspaceSize: algorithm.workspace_bytes as usize,
        state: Status::CUBLAS_STATUS_SUCCESS,
        wavesCount: 1.0,
        reserved: [0; 4],
    }
}

/// The algorithms for a product: here exactly one, or CUBLAS_STATUS_NOT_SUPPORTED.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    handle: usize,
    operation: usize,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    preference: usize,
    requested: c_int,
    results: Out<'_, cublasLtMatmulHeuristicResult_t>,
    count: Out<'_, c_int>,
) -> Status {
    call("cublasLtMatmulAlgoGetHeuristic", |_| {
        let count = count.ok_or_else(|| invalid("the place for the count is null"))?;
        count.write(0);
        let results = results.ok_or_else(|| invalid("the place for the results is null"))?;
        results.write(heuristic(
            (handle, operation, [a, b, c, d], preference),
            requested,
        )?);
        count.write(1);
        Ok(())
    })
}

/// Whether an algorithm can do a product.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulAlgoCheck(
    handle: usize,
    operation: usize,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    algorithm: Option<&cublasLtMatmulAlgo_t>,
    result: Out<'_, cublasLtMatmulHeuristicResult_t>,
) -> Status {
    call("cublasLtMatmulAlgoCheck", |_| {
        objects::library(handle)?;
        let problem = objects::problem(operation, [a, b, c, d])?;
        let algorithm =
            Algorithm::from_raw(algorithm.ok_or_else(|| invalid("the algorithm is null"))?)?;
        fits(&problem, algorithm)?;
        put(result, heuristic_result(algorithm))
    })
}

/// Whether an algorithm is for such a product.
pub(super) fn fits(problem: &Problem, algorithm: Algorithm) -> Result<(), Refused> {
    if algorithm.key == problem.key() {
        return Ok(());
    }
    Err(Refusal::Unsupported(
        "the algorithm is for other types, transposes, orders or another epilogue".into(),
    )
    .into())
}
