//! The search for an algorithm: one serves everything modelled, with a workspace where allowed. Its
//! variants have faults (`SIMCUDA_ALGORITHMS`).

use std::ffi::c_int;
use std::ptr::NonNull;

use cudarc::cublaslt::sys::{
    cublasLtMatmulAlgo_t, cublasLtMatmulHeuristicResult_t, cublasStatus_t as Status,
};

use super::entry::{Refused, call, invalid};
use super::matrix::Refusal;
use super::objects;
use super::problem::Problem;
use super::variant::Variant;
use crate::faults::HeuristicEffect;
use crate::machine::{Machine, Out};

/// The meaning of an algorithm's eight words here; other libraries' algorithms are refused.
#[derive(Clone, Copy, Debug)]
pub(super) struct Algorithm {
    pub(super) workspace_bytes: u64,
    /// Of the problem: see [`Problem::key`].
    key: u64,
    /// What A, B, C and D are multiples of, in bytes.
    pub(super) alignments: [u64; 4],
    /// Which of the variants.
    variant: u64,
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
            variant: 0,
        }
    }

    pub(super) fn raw(self) -> cublasLtMatmulAlgo_t {
        let [a, b, c, d] = self.alignments;
        cublasLtMatmulAlgo_t {
            data: [
                MAGIC,
                self.workspace_bytes,
                self.key,
                a,
                b,
                c,
                d,
                self.variant,
            ],
        }
    }

    pub(super) fn from_raw(raw: &cublasLtMatmulAlgo_t) -> Result<Self, Refused> {
        let [magic, workspace_bytes, key, a, b, c, d, variant] = raw.data;
        if magic != MAGIC {
            return Err(invalid(
                "the algorithm did not come from cublasLtMatmulAlgoGetHeuristic",
            ));
        }
        Ok(Self {
            workspace_bytes,
            key,
            alignments: [a, b, c, d],
            variant,
        })
    }

    /// Its variant, unless that refuses to run.
    pub(super) fn variant(self, machine: &Machine) -> Result<Variant, Refused> {
        let variant = machine.config.algorithms.get(self.variant as usize);
        let variant = variant.ok_or_else(|| invalid("the library has no such algorithm"))?;
        match variant {
            Variant::Refused => {
                Err(Refusal::Unsupported("SIMCUDA_ALGORITHMS refuses it".into()).into())
            }
            Variant::Sound | Variant::HidesNan => Ok(*variant),
        }
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
            "a minimal alignment of {wrong} bytes is not a power of two"
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

/// The algorithms for a matmul, or CUBLAS_STATUS_NOT_SUPPORTED.
///
/// # Safety
/// `results` is null or has room for `requested` results.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    handle: usize,
    operation: usize,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    preference: usize,
    requested: c_int,
    results: Option<NonNull<cublasLtMatmulHeuristicResult_t>>,
    count: Out<'_, c_int>,
) -> Status {
    call("cublasLtMatmulAlgoGetHeuristic", |machine| {
        let count = count.ok_or_else(|| invalid("the place for the count is null"))?;
        count.write(0);
        let results = results.ok_or_else(|| invalid("the place for the results is null"))?;
        let mut found = heuristic((handle, operation, [a, b, c, d], preference), requested)?;
        let problem = objects::problem(operation, [a, b, c, d])?;
        let shape = [problem.d.rows, problem.d.columns, problem.a.columns];
        let device = objects::library(handle)?;
        match machine.faults.strike_heuristic(shape, device) {
            None => {}
            Some(HeuristicEffect::None) => return Ok(()),
            Some(HeuristicEffect::Workspace(bytes))
                if bytes <= objects::preference(preference)?.workspace_bytes_max =>
            {
                let algorithm = Algorithm {
                    workspace_bytes: bytes,
                    ..Algorithm::from_raw(&found.algo)?
                };
                found = heuristic_result(algorithm);
            }
            Some(HeuristicEffect::Workspace(_) | HeuristicEffect::Refused) => {
                return Err(Refusal::Unsupported("refused by the plan of faults".into()).into());
            }
        }
        let found = Algorithm::from_raw(&found.algo)?;
        let returned = machine.config.algorithms.len().min(requested as usize);
        for number in 0..returned {
            let variant = number as u64;
            // SAFETY: the caller has room for `requested` results, and there are no more.
            unsafe {
                results
                    .add(number)
                    .write(heuristic_result(Algorithm { variant, ..found }))
            };
        }
        count.write(returned as c_int);
        Ok(())
    })
}

/// Whether an algorithm is for such a matmul.
pub(super) fn fits(problem: &Problem, algorithm: Algorithm) -> Result<(), Refused> {
    if algorithm.key == problem.key() {
        return Ok(());
    }
    Err(Refusal::Unsupported(
        "the algorithm is for another matmul: its shape, types, transposes, orders or epilogue differ"
            .into(),
    )
    .into())
}
