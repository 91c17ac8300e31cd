//! cuBLASLt: descriptors, the heuristic, and matmuls as stream work. Modelled: COL and ROW
//! layouts of f32, f64, f16 and bf16; COMPUTE_32F, 32F_FAST_TF32 and 64F; every documented epilogue
//! except those of the scaled types; strided batches. Anything else is refused, and stderr says
//! why, because a status code does not.

pub mod algorithm;
mod attributes;
mod element;
mod entry;
mod epilogue;
mod matmul;
mod matrix;
pub mod objects;
mod overlap;
mod problem;
#[cfg(test)]
mod tests;
pub mod variant;

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::sys::{cublasLtMatmulAlgo_t, cublasStatus_t as Status};
use cudarc::driver::sys::CUstream;

use self::algorithm::{Algorithm, WIDEST_BYTES, fits};
use self::element::Type;
use self::entry::{Refused, call, invalid};
use self::matmul::{Matmul, Scalar};
use self::objects::{Object, library, problem};
use self::overlap::overlap;
use self::problem::{Compute, Problem};
use crate::error::CUresult;
use crate::machine::{self, Machine, Out, threads};
use crate::report::{self, FindingKind};
use crate::stream;
use crate::work::{Address, Work};

/// Creates the library's handle for the current device.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtCreate(handle: Out<'_, usize>) -> Status {
    call("cublasLtCreate", |machine| {
        let device = machine::current_device(machine).map_err(|_| Refused {
            status: Status::CUBLAS_STATUS_NOT_INITIALIZED,
            why: Some("no context is current on this thread".into()),
        })?;
        objects::create(handle, Object::Library(device))
    })
}

/// Destroys the library's handle.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtDestroy(handle: usize) -> Status {
    call("cublasLtDestroy", |_| {
        objects::destroy(handle, |object| matches!(object, Object::Library(_)))
    })
}

/// 13.0.0, unless the environment has another.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    machine::LockedMachine::take().config.cublaslt_version
}

/// 13.0.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetCudartVersion() -> usize {
    13_000
}

fn status_name(status: u32) -> &'static CStr {
    match status {
        0 => c"CUBLAS_STATUS_SUCCESS",
        1 => c"CUBLAS_STATUS_NOT_INITIALIZED",
        3 => c"CUBLAS_STATUS_ALLOC_FAILED",
        7 => c"CUBLAS_STATUS_INVALID_VALUE",
        8 => c"CUBLAS_STATUS_ARCH_MISMATCH",
        11 => c"CUBLAS_STATUS_MAPPING_ERROR",
        13 => c"CUBLAS_STATUS_EXECUTION_FAILED",
        14 => c"CUBLAS_STATUS_INTERNAL_ERROR",
        15 => c"CUBLAS_STATUS_NOT_SUPPORTED",
        16 => c"CUBLAS_STATUS_LICENSE_ERROR",
        _ => c"CUBLAS_STATUS_UNKNOWN",
    }
}

/// The name of a status.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetStatusName(status: u32) -> *const c_char {
    status_name(status).as_ptr()
}

/// The text of a status.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetStatusString(status: u32) -> *const c_char {
    let text = match status {
        0 => c"success",
        1 => c"the library was not initialized",
        3 => c"the resource allocation failed",
        7 => c"an invalid value was used as an argument",
        8 => c"an absent device architectural feature is required",
        11 => c"an access to GPU memory space failed",
        13 => c"the GPU program failed to execute",
        14 => c"an internal operation failed",
        15 => c"an operation is not supported",
        16 => c"the functionality requires a license",
        _ => c"unknown status",
    };
    text.as_ptr()
}

/// Queues a matmul. It runs when its turn in `stream` comes.
///
/// # Safety
/// `alpha` and `beta` are null, or point to a value of the operation's scale type, on the host or
/// (with that pointer mode) on the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmul(
    handle: usize,
    operation_handle: usize,
    alpha: *const c_void,
    a: Address,
    a_layout: usize,
    b: Address,
    b_layout: usize,
    beta: *const c_void,
    c: Address,
    c_layout: usize,
    d: Address,
    d_layout: usize,
    algorithm: Option<&cublasLtMatmulAlgo_t>,
    workspace: Address,
    workspace_bytes: usize,
    stream: CUstream,
) -> Status {
    let in_call = InCall::begin(workspace, workspace_bytes);
    call("cublasLtMatmul", |machine| {
        let device = library(handle)?;
        let problem = problem(operation_handle, [a_layout, b_layout, c_layout, d_layout])?;
        let algorithm = match algorithm {
            Some(raw) => Algorithm::from_raw(raw)?,
            // Documented: an implicit search. It knows the pointers, so it finds an algorithm that
            // fits them.
            None => Algorithm::new(
                &problem,
                workspace_bytes as u64,
                [a, b, c, d].map(alignment),
            ),
        };
        fits(&problem, algorithm).inspect_err(|refused| {
            let message = format!(
                "cublasLtMatmul {}: {}\n  help: ask cublasLtMatmulAlgoGetHeuristic for this matmul",
                problem.describe(),
                refused.why.as_deref().unwrap_or_default()
            );
            report::finding(machine, FindingKind::ForeignAlgorithm, message);
        })?;
        let variant = algorithm.variant(machine)?;
        // SAFETY: the caller vouches for alpha and beta; the problem's scale type was checked.
        let (alpha, beta) = unsafe { (scalar(&problem, alpha)?, scalar(&problem, beta)?) };
        let matmul = Matmul {
            problem,
            variant,
            alpha,
            beta,
            a,
            b,
            c,
            d,
            workspace: workspace..workspace,
        };
        let matmul = with_workspace(matmul, algorithm, workspace_bytes as u64)?;
        if in_call.shares_workspace {
            let message = format!(
                "{}: another thread is giving a matmul with the workspace {workspace:#x}: each may be several kernels, and those of the two may alternate\n  help: one call at a time for each workspace",
                matmul.describe()
            );
            report::finding(machine, FindingKind::Race, message);
        }
        check_pointers(&matmul, algorithm)?;
        check_overlap(machine, &matmul)?;
        let driver = |code: CUresult| Refused {
            status: Status::CUBLAS_STATUS_EXECUTION_FAILED,
            why: Some(format!("the driver says {code:?}")),
        };
        let stream = stream::resolve(machine, stream).map_err(driver)?;
        let of_stream = stream::device_of(machine, stream);
        if of_stream != device {
            return Err(invalid(format!(
                "the handle is of device {device}, the stream of device {of_stream}"
            )));
        }
        stream::check_current(machine, device, || matmul.describe()).map_err(driver)?;
        stream::enqueue(machine, stream, Arc::new(matmul)).map_err(driver)
    })
}

/// A call of `cublasLtMatmul` under way.
struct InCall {
    workspace: Address,
    /// Whether another thread was in one with the same workspace when it began.
    shares_workspace: bool,
}

/// The workspaces of the calls under way.
static IN_CALLS: Mutex<Vec<Address>> = Mutex::new(Vec::new());

impl InCall {
    fn begin(workspace: Address, bytes: usize) -> InCall {
        /// Calls from the start of the process of which each waits for the other threads.
        const FIRST: usize = 8;
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        let workspace = if bytes > 0 { workspace } else { 0 };
        let shares_workspace = {
            let mut all = IN_CALLS.lock().unwrap_or_else(PoisonError::into_inner);
            let is_shared = workspace != 0 && all.contains(&workspace);
            all.push(workspace);
            is_shared
        };
        // Others may come, as between two kernels of a real one.
        if workspace != 0 {
            threads::let_others_run(&CALLS, FIRST);
        }
        InCall {
            workspace,
            shares_workspace,
        }
    }
}

impl Drop for InCall {
    fn drop(&mut self) {
        let mut all = IN_CALLS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = all.iter().position(|&it| it == self.workspace) {
            all.swap_remove(at);
        }
    }
}

/// Operands that share bytes leave the result undefined.
fn check_overlap(machine: &mut Machine, matmul: &Matmul) -> Result<(), Refused> {
    let Some(([first, second], range)) = overlap(matmul) else {
        return Ok(());
    };
    let message = format!(
        "{}: {first} and {second} share bytes, which leaves the result undefined\n  bytes: {}\n  help: separate memory; only C may be D, with beta and the same layout",
        matmul.describe(),
        machine.memory.describe(&range)
    );
    report::finding(machine, FindingKind::Race, &message);
    Err(invalid(message))
}

/// The largest power of two that divides an address.
fn alignment(address: Address) -> u64 {
    1 << address.trailing_zeros().min(8)
}

fn with_workspace(matmul: Matmul, algorithm: Algorithm, bytes: u64) -> Result<Matmul, Refused> {
    let start = matmul.workspace.start;
    if algorithm.workspace_bytes == 0 {
        return Ok(matmul);
    }
    if bytes < algorithm.workspace_bytes || start == 0 {
        return Err(invalid(format!(
            "the algorithm needs a workspace of {} bytes, got {bytes} at {start:#x}",
            algorithm.workspace_bytes
        )));
    }
    if !start.is_multiple_of(256) {
        return Err(invalid(format!(
            "the workspace at {start:#x} is not aligned to 256 bytes"
        )));
    }
    Ok(Matmul {
        workspace: start..start + algorithm.workspace_bytes,
        ..matmul
    })
}

/// # Safety
/// `from` is null, or points to a value of the problem's scale type, on the device if the problem
/// says so.
unsafe fn scalar(problem: &Problem, from: *const c_void) -> Result<Scalar, Refused> {
    if from.is_null() {
        return Err(invalid("alpha or beta is null"));
    }
    if problem.scalars_on_device {
        return Ok(Scalar::At(from as Address));
    }
    let kind = if problem.compute == Compute::F64 {
        Type::F64
    } else {
        Type::F32
    };
    // SAFETY: the caller vouches for a value of the scale type there.
    Ok(Scalar::Value(unsafe {
        <f64 as element::Real>::load(kind, from.cast())
    }))
}

/// Pointers that are null or less aligned than the algorithm requires. Whether they are live is
/// checked by the stream.
fn check_pointers(matmul: &Matmul, algorithm: Algorithm) -> Result<(), Refused> {
    let operands = [
        ("A", matmul.a),
        ("B", matmul.b),
        ("C", matmul.c),
        ("D", matmul.d),
    ];
    for ((operand, address), alignment) in operands.into_iter().zip(algorithm.alignments) {
        // C is not checked if it is not read.
        if operand == "C" && matches!(matmul.beta, Scalar::Value(beta) if beta == 0.0) {
            continue;
        }
        if address == 0 {
            return Err(invalid(format!("{operand} is null")));
        }
        if !address.is_multiple_of(alignment) {
            return Err(invalid(format!(
                "{operand} at {address:#x} is not aligned to the {alignment} bytes that the algorithm was chosen for"
            )));
        }
    }
    let element = matmul.problem.d.kind.bytes();
    if let Some(bias) = matmul.problem.bias
        && (bias.address == 0 || !bias.address.is_multiple_of(element))
    {
        return Err(invalid(format!("the bias pointer is {:#x}", bias.address)));
    }
    if let Some(aux) = matmul.problem.aux
        && (aux.address == 0 || !aux.address.is_multiple_of(WIDEST_BYTES))
    {
        return Err(invalid(format!(
            "the aux pointer is {:#x}: not a multiple of {WIDEST_BYTES}",
            aux.address
        )));
    }
    Ok(())
}
