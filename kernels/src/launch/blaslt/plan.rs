//! How one kind of product is computed: descriptors, layouts, and an algorithm. Usually that is the
//! first of the library's heuristic, which is asked once per kind: so a kind has the same
//! algorithm, and the same bits, in the whole run.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard};

use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtMatmulDescAttributes_t as Attribute,
    cublasLtMatmulPreferenceAttributes_t as Preference, cudaDataType_t,
};

use serde::{Deserialize, Serialize};

use super::epilogue::{BIAS, HAS_AUX};
use super::library::{Candidate, Fault, Functions, NOT_SUPPORTED, Opaque, blaslt};
use crate::DType;
use crate::precision::F32Math;
use crate::sync::lock;

/// All that the choice of an algorithm depends on, in the library's terms: column-major, `D[rows ×
/// columns] = op(A)·op(B)`, with sums of `inner` elements.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kind {
    pub(super) rows: u64,
    pub(super) columns: u64,
    pub(super) inner: u64,
    /// Whether A and B are read transposed.
    pub(super) transposed: [bool; 2],
    /// The dtype of A and B, and that of C, D, bias and aux.
    pub(super) dtypes: [DType; 2],
    pub(super) math: F32Math,
    /// The library's number of the epilogue.
    pub(super) epilogue: u32,
    /// Whether C is not read.
    pub(super) beta_is_zero: bool,
    /// Of the addresses of A, B, C and D, in bytes: the largest power of two, up to 256, that
    /// divides each.
    pub(super) alignments: [u32; 4],
}

/// NVIDIA's recommendation: the fastest algorithms of sm_90 and later use up to 32 MiB.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// What the products of one kind use.
pub(super) struct Plan {
    /// The operation's descriptor. It holds the pointers of bias and aux, which are set and used
    /// under the lock.
    operation: Mutex<Owned>,
    /// Layouts of A, B, and of both C and D.
    a: Owned,
    b: Owned,
    d: Owned,
    /// Its workspace has at most what the preference allowed.
    pub(super) algorithm: Candidate,
}

/// The addresses and factors of one product.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub(super) a: u64,
    pub(super) b: u64,
    pub(super) c: u64,
    pub(super) d: u64,
    pub(super) alpha: f32,
    pub(super) beta: f32,
    pub(super) bias: Option<u64>,
    pub(super) aux: Option<u64>,
    pub(super) workspace: u64,
    pub(super) stream: Opaque,
}

/// An object of the library, destroyed when dropped.
struct Owned {
    thing: Opaque,
    destroy: unsafe extern "C" fn(Opaque) -> c_int,
}

// SAFETY: descriptors and layouts are plain memory of the library and tied to no thread. Whoever
// changes one holds the lock around it.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: made by the function that belongs to `destroy`, and destroyed only here.
        unsafe { (self.destroy)(self.thing) };
    }
}

fn data_type(dtype: DType) -> u32 {
    (match dtype {
        DType::BF16 => cudaDataType_t::CUDA_R_16BF,
        _ => cudaDataType_t::CUDA_R_32F,
    }) as u32
}

/// The address and size of a value, in the form that attributes take.
fn bytes_of<T>(value: &T) -> (*const c_void, usize) {
    (ptr::from_ref(value).cast(), size_of::<T>())
}

impl Plan {
    /// The first algorithm of the heuristic after those `refused`; None if it has none.
    pub(super) fn make(
        functions: &Functions,
        handle: Opaque,
        kind: &Kind,
        refused: usize,
    ) -> Result<Option<Plan>, Fault> {
        let mut plan = Plan::without_algorithm(functions, kind)?;
        let found = plan.candidates(functions, handle, kind, refused + 1)?;
        Ok(found.get(refused).map(|next| {
            plan.algorithm = *next;
            plan
        }))
    }

    /// To be used once `algorithm` is set.
    pub(super) fn without_algorithm(functions: &Functions, kind: &Kind) -> Result<Plan, Fault> {
        let (rows, columns, inner) = (kind.rows, kind.columns, kind.inner);
        let [a, b] = kind.transposed;
        let a = if a { [inner, rows] } else { [rows, inner] };
        let b = if b {
            [columns, inner]
        } else {
            [inner, columns]
        };
        let [operands, result] = kind.dtypes;
        Ok(Plan {
            operation: Mutex::new(operation(functions, kind)?),
            a: layout(functions, operands, a)?,
            b: layout(functions, operands, b)?,
            d: layout(functions, result, [rows, columns])?,
            algorithm: Candidate::NONE,
        })
    }

    /// Up to `count` algorithms of the heuristic, which expects the first to be the fastest.
    pub(super) fn candidates(
        &self,
        functions: &Functions,
        handle: Opaque,
        kind: &Kind,
        count: usize,
    ) -> Result<Vec<Candidate>, Fault> {
        let preference = preference(functions, kind)?;
        let mut found = vec![Candidate::NONE; count];
        let mut returned = 0;
        let (a, b, d) = (self.a.thing, self.b.thing, self.d.thing);
        let operation = self.operation();
        // SAFETY: all objects are alive; `found` has room for the results requested.
        let asked = unsafe {
            blaslt!(
                functions,
                cublasLtMatmulAlgoGetHeuristic(
                    handle,
                    operation.thing,
                    a,
                    b,
                    d,
                    d,
                    preference.thing,
                    count as c_int,
                    found.as_mut_ptr(),
                    &mut returned,
                )
            )
        };
        match asked {
            Err(Fault {
                code: NOT_SUPPORTED,
                ..
            }) => return Ok(Vec::new()),
            other => other?,
        }
        found.truncate(returned.max(0) as usize);
        found.retain(|candidate| candidate.fits(WORKSPACE_BYTES));
        Ok(found)
    }

    /// An algorithm that another process chose, if this library can use it here.
    pub(super) fn check(
        &self,
        functions: &Functions,
        handle: Opaque,
        words: [u64; 8],
    ) -> Option<Candidate> {
        let mut checked = Candidate::NONE;
        checked.algorithm.data = words;
        let algorithm = checked.algorithm;
        let (a, b, d) = (self.a.thing, self.b.thing, self.d.thing);
        let operation = self.operation();
        // SAFETY: all objects are alive; the library reads any words as an algorithm, and refuses
        // those that are none.
        let answer = unsafe {
            blaslt!(
                functions,
                cublasLtMatmulAlgoCheck(
                    handle,
                    operation.thing,
                    a,
                    b,
                    d,
                    d,
                    &algorithm,
                    &mut checked,
                )
            )
        };
        // The library need not repeat the algorithm in its answer.
        checked.algorithm = algorithm;
        (answer.is_ok() && checked.fits(WORKSPACE_BYTES)).then_some(checked)
    }

    fn operation(&self) -> MutexGuard<'_, Owned> {
        lock(&self.operation)
    }

    /// Whether the algorithm needs workspace.
    pub(super) fn needs_workspace(&self) -> bool {
        self.algorithm.workspace_bytes > 0
    }

    /// Gives the product to the stream.
    ///
    /// # Safety
    /// The context of the handle's device is current. The addresses are of this device's memory,
    /// large enough for the plan's shapes, and no other work uses them at that point of the stream.
    /// The addresses of the plan's epilogue are present.
    pub(super) unsafe fn run(
        &self,
        functions: &Functions,
        handle: Opaque,
        operands: &Operands,
    ) -> Result<(), Fault> {
        let operation = self.operation();
        for (attribute, address) in [
            (Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias),
            (
                Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
                operands.aux,
            ),
        ] {
            if let Some(address) = &address {
                set(functions, &operation, attribute, address)?;
            }
        }
        let address = |address: u64| ptr::without_provenance_mut::<c_void>(address as usize);
        let (alpha, beta) = (bytes_of(&operands.alpha).0, bytes_of(&operands.beta).0);
        // SAFETY: the library checks its objects against each other; the rest is the caller's
        // promise. Factors are read before the call returns.
        unsafe {
            blaslt!(
                functions,
                cublasLtMatmul(
                    handle,
                    operation.thing,
                    alpha,
                    address(operands.a),
                    self.a.thing,
                    address(operands.b),
                    self.b.thing,
                    beta,
                    address(operands.c),
                    self.d.thing,
                    address(operands.d),
                    self.d.thing,
                    &self.algorithm.algorithm,
                    address(operands.workspace),
                    self.algorithm.workspace_bytes,
                    operands.stream,
                )
            )
        }
    }
}

fn set<T>(
    functions: &Functions,
    operation: &Owned,
    attribute: Attribute,
    value: &T,
) -> Result<(), Fault> {
    let (value, bytes) = bytes_of(value);
    // SAFETY: the descriptor is alive, and the value has the attribute's type (the library checks
    // its size).
    unsafe {
        blaslt!(
            functions,
            cublasLtMatmulDescSetAttribute(operation.thing, attribute as u32, value, bytes)
        )
    }
}

fn operation(functions: &Functions, kind: &Kind) -> Result<Owned, Fault> {
    let compute = match kind.math {
        F32Math::Tf32 if kind.dtypes[0] == DType::F32 => {
            cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32
        }
        _ => cublasComputeType_t::CUBLAS_COMPUTE_32F,
    };
    let mut thing = ptr::null_mut();
    // SAFETY: the pointer is to a local variable.
    unsafe {
        blaslt!(
            functions,
            cublasLtMatmulDescCreate(&mut thing, compute as u32, data_type(DType::F32))
        )
    }?;
    let operation = Owned {
        thing,
        destroy: functions.cublasLtMatmulDescDestroy,
    };
    let [a, b] = kind.transposed.map(i32::from);
    set(
        functions,
        &operation,
        Attribute::CUBLASLT_MATMUL_DESC_TRANSA,
        &a,
    )?;
    set(
        functions,
        &operation,
        Attribute::CUBLASLT_MATMUL_DESC_TRANSB,
        &b,
    )?;
    set(
        functions,
        &operation,
        Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE,
        &kind.epilogue,
    )?;
    if kind.epilogue & BIAS != 0 {
        let dtype = data_type(kind.dtypes[1]);
        set(
            functions,
            &operation,
            Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
            &dtype,
        )?;
        // The heuristic refuses an epilogue without a pointer; each product sets its own.
        set(
            functions,
            &operation,
            Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER,
            &256u64,
        )?;
    }
    if kind.epilogue & HAS_AUX != 0 {
        set(
            functions,
            &operation,
            Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
            &256u64,
        )?;
        set(
            functions,
            &operation,
            Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD,
            &(kind.rows as i64),
        )?;
    }
    Ok(operation)
}

/// A column-major matrix without gaps.
fn layout(functions: &Functions, dtype: DType, [rows, columns]: [u64; 2]) -> Result<Owned, Fault> {
    let mut thing = ptr::null_mut();
    // SAFETY: the pointer is to a local variable.
    unsafe {
        blaslt!(
            functions,
            cublasLtMatrixLayoutCreate(&mut thing, data_type(dtype), rows, columns, rows as i64)
        )
    }?;
    Ok(Owned {
        thing,
        destroy: functions.cublasLtMatrixLayoutDestroy,
    })
}

fn preference(functions: &Functions, kind: &Kind) -> Result<Owned, Fault> {
    /// If a sum is split, its parts are added in f32: in the workspace, or in outputs that are f32.
    /// Both use a fixed order.
    const IN_PLACE: u32 = 1;
    const COMPUTE_TYPE: u32 = 2;
    let mut thing = ptr::null_mut();
    // SAFETY: the pointer is to a local variable.
    unsafe { blaslt!(functions, cublasLtMatmulPreferenceCreate(&mut thing)) }?;
    let preference = Owned {
        thing,
        destroy: functions.cublasLtMatmulPreferenceDestroy,
    };
    let set = |attribute: Preference, (value, bytes): (*const c_void, usize)| {
        // SAFETY: the preference is alive, and the value has the attribute's type.
        unsafe {
            blaslt!(
                functions,
                cublasLtMatmulPreferenceSetAttribute(thing, attribute as u32, value, bytes)
            )
        }
    };
    let reductions = if kind.dtypes[1] == DType::F32 {
        IN_PLACE | COMPUTE_TYPE
    } else {
        COMPUTE_TYPE
    };
    set(
        Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
        bytes_of(&(WORKSPACE_BYTES as u64)),
    )?;
    set(
        Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        bytes_of(&reductions),
    )?;
    for (attribute, alignment) in [
        Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
        Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
    ]
    .into_iter()
    .zip(&kind.alignments)
    {
        set(attribute, bytes_of(alignment))?;
    }
    Ok(preference)
}
