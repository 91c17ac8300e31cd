//! How one kind of matmul is computed: descriptors, layouts, and an algorithm, which is the first
//! one from the library's heuristic that the library does not refuse to run. The heuristic is asked
//! once per kind: so a kind has the same algorithm, and the same bits, in the whole run.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Mutex, OnceLock};

use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtMatmulDescAttributes_t as Attribute,
    cublasLtMatmulPreferenceAttributes_t as Preference,
    cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cudaDataType_t,
};

use super::library::{BIAS, HAS_AUX};
use super::library::{Blas, BlasFault, Heuristic, NOT_SUPPORTED, Opaque, blaslt, outcome};
use crate::DType;
use crate::launch::F32Math;
use crate::panics::lock;

/// All that the choice of an algorithm depends on, in the library's terms: column-major, `D[rows ×
/// columns] = op(A)·op(B)`, with sums of `inner` elements.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct MatmulKind {
    pub(super) rows: u64,
    pub(super) columns: u64,
    pub(super) inner: u64,
    /// How many matrices A, B, C and D each have, one after the other.
    pub(super) batch: u64,
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
pub const WORKSPACE_BYTES: usize = 32 << 20;

/// How many multiprocessors a matmul may plan for, if `DDP_MATMUL_MULTIPROCESSORS` says so: fewer
/// than the GPU has leave the others to collectives that run at the same time.
pub fn multiprocessors() -> Option<i32> {
    static COUNT: OnceLock<Option<i32>> = OnceLock::new();
    *COUNT.get_or_init(|| {
        let value = std::env::var("DDP_MATMUL_MULTIPROCESSORS").ok()?;
        let count = value.parse().ok().filter(|count| *count > 0);
        if count.is_none() {
            tracing::warn!(
                "DDP_MATMUL_MULTIPROCESSORS={value:?} is ignored: expected a whole number from 1"
            );
        }
        count
    })
}

/// What the matmuls of one kind use.
pub(super) struct MatmulPlan {
    blas: &'static Blas,
    /// The operation's descriptor. It holds the pointers of bias and aux, which are set and used
    /// under the lock.
    operation: Mutex<BlasObject>,
    /// Layouts of A, B, and of both C and D.
    layouts: [BlasObject; 3],
    /// Its workspace has at most what the preference allowed.
    pub(super) algorithm: Heuristic,
}

/// The addresses and factors of one matmul.
#[derive(Clone, Copy)]
pub(super) struct BlasArgs {
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
struct BlasObject {
    thing: Opaque,
    setter: &'static str,
    set: unsafe extern "C" fn(Opaque, u32, *const c_void, usize) -> c_int,
    destroy: unsafe extern "C" fn(Opaque) -> c_int,
}

impl BlasObject {
    fn set<T>(&self, attribute: u32, value: T) -> Result<(), BlasFault> {
        // SAFETY: the object is alive, and the value has the attribute's type (the library checks
        // its size).
        let code = unsafe { (self.set)(self.thing, attribute, address_of(&value), size_of::<T>()) };
        outcome(self.setter, code)
    }
}

// SAFETY: descriptors and layouts are plain memory of the library and tied to no thread. Whoever
// changes one holds the lock around it.
unsafe impl Send for BlasObject {}
// SAFETY: as above.
unsafe impl Sync for BlasObject {}

impl Drop for BlasObject {
    fn drop(&mut self) {
        // SAFETY: made by the function that belongs to `destroy`, and destroyed only here.
        unsafe { (self.destroy)(self.thing) };
    }
}

fn data_type(dtype: DType) -> u32 {
    (match dtype {
        DType::BF16 => cudaDataType_t::CUDA_R_16BF,
        DType::F32 => cudaDataType_t::CUDA_R_32F,
        other => unreachable!("no matmul of {other} on a GPU"),
    }) as u32
}

fn address_of<T>(value: &T) -> *const c_void {
    ptr::from_ref(value).cast()
}

impl MatmulPlan {
    /// The first algorithm of the heuristic after those `refused`; None if it has none.
    pub(super) fn make(
        blas: &'static Blas,
        kind: &MatmulKind,
        refused: usize,
    ) -> Result<Option<MatmulPlan>, BlasFault> {
        let (rows, columns, inner) = (kind.rows, kind.columns, kind.inner);
        let turned = |[rows, columns]: [u64; 2], turn: bool| {
            if turn {
                return [columns, rows];
            }
            [rows, columns]
        };
        let ([a, b], [operands, result]) = (kind.transposed, kind.dtypes);
        let layout = |dtype, shape| layout(blas, dtype, shape, kind.batch);
        let mut plan = MatmulPlan {
            blas,
            operation: Mutex::new(operation(blas, kind)?),
            layouts: [
                layout(operands, turned([rows, inner], a))?,
                layout(operands, turned([inner, columns], b))?,
                layout(result, [rows, columns])?,
            ],
            algorithm: Heuristic::NONE,
        };
        let found = plan.candidates(kind, refused + 1)?;
        Ok(found.get(refused).map(|next| {
            plan.algorithm = *next;
            plan
        }))
    }

    /// Up to `count` algorithms of the heuristic, which expects the first to be the fastest.
    fn candidates(&self, kind: &MatmulKind, count: usize) -> Result<Vec<Heuristic>, BlasFault> {
        let preference = preference(self.blas, kind)?;
        let mut found = vec![Heuristic::NONE; count];
        let mut returned = 0;
        let (Blas { functions, handle }, [a, b, d]) = (self.blas, self.things());
        let (operation, preferred) = (lock(&self.operation), preference.thing);
        let (count, results) = (count as c_int, found.as_mut_ptr());
        // SAFETY: all objects are alive; `found` has room for the results requested.
        let asked = unsafe {
            blaslt!(
                functions,
                cublasLtMatmulAlgoGetHeuristic(
                    handle.0,
                    operation.thing,
                    a,
                    b,
                    d,
                    d,
                    preferred,
                    count,
                    results,
                    &mut returned
                )
            )
        };
        match asked {
            Err(BlasFault {
                code: NOT_SUPPORTED,
                ..
            }) => return Ok(Vec::new()),
            other => other?,
        }
        found.truncate(returned.max(0) as usize);
        found.retain(|candidate| candidate.fits(WORKSPACE_BYTES));
        Ok(found)
    }

    /// The layouts of A, B and D.
    fn things(&self) -> [Opaque; 3] {
        self.layouts.each_ref().map(|layout| layout.thing)
    }

    /// Gives the matmul to the stream.
    ///
    /// # Safety
    /// The context of the handle's device is current. The addresses are of this device's memory,
    /// large enough for the plan's shapes, and no other work uses them at that point of the stream.
    /// The addresses of the plan's epilogue are present.
    pub(super) unsafe fn run(&self, operands: &BlasArgs) -> Result<(), BlasFault> {
        let operation = lock(&self.operation);
        for (attribute, address) in [
            (Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias),
            (
                Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
                operands.aux,
            ),
        ] {
            if let Some(address) = address {
                operation.set(attribute as u32, address)?;
            }
        }
        let (Blas { functions, handle }, [a, b, d]) = (self.blas, self.things());
        let address = |address: u64| ptr::without_provenance_mut::<c_void>(address as usize);
        let [alpha, beta] = [&operands.alpha, &operands.beta].map(address_of);
        // SAFETY: the library checks its objects against each other; the rest is the caller's
        // promise. Factors are read before the call returns.
        unsafe {
            blaslt!(
                functions,
                cublasLtMatmul(
                    handle.0,
                    operation.thing,
                    alpha,
                    address(operands.a),
                    a,
                    address(operands.b),
                    b,
                    beta,
                    address(operands.c),
                    d,
                    address(operands.d),
                    d,
                    &self.algorithm.algorithm,
                    address(operands.workspace),
                    self.algorithm.workspace_bytes,
                    operands.stream,
                )
            )
        }
    }
}

/// A new object of one of the library's types.
macro_rules! owned {
    ($blas:expr, [$create:ident, $set:ident, $destroy:ident] $(, $argument:expr)*) => {{
        let (functions, mut thing) = (&$blas.functions, ptr::null_mut());
        // SAFETY: the pointer is to a local variable.
        let made = unsafe { blaslt!(functions, $create(&mut thing $(, $argument)*)) };
        made.map(|()| BlasObject {
            thing,
            setter: stringify!($set),
            set: functions.$set,
            destroy: functions.$destroy,
        })
    }};
}

fn operation(blas: &Blas, kind: &MatmulKind) -> Result<BlasObject, BlasFault> {
    let compute = match kind.math {
        F32Math::Tf32 if kind.dtypes[0] == DType::F32 => {
            cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32
        }
        F32Math::Strict | F32Math::Tf32 => cublasComputeType_t::CUBLAS_COMPUTE_32F,
    };
    let operation = owned!(
        blas,
        [
            cublasLtMatmulDescCreate,
            cublasLtMatmulDescSetAttribute,
            cublasLtMatmulDescDestroy
        ],
        compute as u32,
        data_type(DType::F32)
    )?;
    let [a, b] = kind.transposed.map(i32::from);
    operation.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA as u32, a)?;
    operation.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB as u32, b)?;
    operation.set(
        Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE as u32,
        kind.epilogue,
    )?;
    if let Some(count) = multiprocessors() {
        let attribute = Attribute::CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET as u32;
        operation.set(attribute, count)?;
    }
    // The heuristic refuses an epilogue without a pointer; each matmul sets its own.
    let pointer = 256u64;
    if kind.epilogue & BIAS != 0 {
        let dtype = data_type(kind.dtypes[1]);
        operation.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE as u32, dtype)?;
        operation.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER as u32, pointer)?;
    }
    if kind.epilogue & HAS_AUX != 0 {
        let rows = kind.rows as i64;
        operation.set(
            Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER as u32,
            pointer,
        )?;
        operation.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD as u32, rows)?;
    }
    Ok(operation)
}

/// Column-major matrices without gaps.
fn layout(
    blas: &Blas,
    dtype: DType,
    [rows, columns]: [u64; 2],
    batch: u64,
) -> Result<BlasObject, BlasFault> {
    let layout = owned!(
        blas,
        [
            cublasLtMatrixLayoutCreate,
            cublasLtMatrixLayoutSetAttribute,
            cublasLtMatrixLayoutDestroy
        ],
        data_type(dtype),
        rows,
        columns,
        rows as i64
    )?;
    if batch > 1 {
        let (count, stride) = (batch as i32, (rows * columns) as i64);
        layout.set(
            LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT as u32,
            count,
        )?;
        layout.set(
            LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET as u32,
            stride,
        )?;
    }
    Ok(layout)
}

fn preference(blas: &Blas, kind: &MatmulKind) -> Result<BlasObject, BlasFault> {
    /// If a sum is split, its parts are added in f32: in the workspace, or in outputs that are f32.
    /// Both use a fixed order.
    const IN_PLACE: u32 = 1;
    const COMPUTE_TYPE: u32 = 2;
    let preference = owned!(
        blas,
        [
            cublasLtMatmulPreferenceCreate,
            cublasLtMatmulPreferenceSetAttribute,
            cublasLtMatmulPreferenceDestroy
        ]
    )?;
    let reductions = match kind.dtypes[1] {
        DType::F32 => IN_PLACE | COMPUTE_TYPE,
        _ => COMPUTE_TYPE,
    };
    let workspace = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as u32;
    preference.set(workspace, WORKSPACE_BYTES as u64)?;
    let mask = Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK as u32;
    preference.set(mask, reductions)?;
    for (attribute, alignment) in [
        Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
        Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
    ]
    .into_iter()
    .zip(kind.alignments)
    {
        preference.set(attribute as u32, alignment)?;
    }
    Ok(preference)
}
