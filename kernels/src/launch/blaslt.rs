//! Matmuls on a GPU, by cuBLASLt.
//!
//! Our matrices are row-major and the library's are column-major, so a row-major `[m, n]` is its
//! `[n, m]`. `out = left·right` is passed as `outᵀ = rightᵀ·leftᵀ`, which moves nothing: A is
//! `right`, B is `left`, and a `t()` view is read with op T. The library's bias along rows is ours
//! along columns.
//!
//! * Sums are in f32 for every dtype. f32 operands are multiplied as f32, or as TF32 if
//!   `with_f32_math` says so.
//! * The heuristic runs once per kind of matmul (`plan.rs`). Nothing is timed: timing may choose
//!   other algorithms, and so other bits, in another run.
//! * Not every epilogue is left to the library (`epilogue.rs`).
//! * Each stream has its own workspace, because two matmuls would overwrite each other's. It is
//!   made at the stream's first matmul (`stream_memory.rs`). A graph uses the workspaces of the
//!   streams it was captured from: such a stream must not run other matmuls beside the graph
//!   without an event between them.

mod epilogue;
mod library;
mod plan;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, RwLock};

use super::GpuLaunch;
use crate::DType;
use crate::cuda::calls;
use crate::cuda::devices::GPUS_MAX;
use crate::cuda::nodes::{self, NodeKind, NodeWork};
use crate::cuda::queue::is_capturing;
use crate::error::{Error, Result};
use crate::launch::{F32Math, f32_math};
use crate::panics::{lock, read, write};
use library::{Blas, BlasFault};
pub(crate) use library::{Epilogue, MatmulFunction};
use plan::{BlasArgs, MatmulKind, MatmulPlan};
pub use plan::{WORKSPACE_BYTES, multiprocessors};

/// A matrix to read: `[rows, columns]` as the matmul sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GpuMatrix {
    pub(crate) address: u64,
    /// Memory holds its transpose.
    pub(crate) transposed: bool,
}

/// `out = epilogue(alpha * left·right + beta * existing)`, all row-major and non-empty.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matmul {
    /// How many matrices of these shapes each operand has, one after the other. A batch has no
    /// epilogue.
    pub(crate) batch: usize,
    /// Rows of `out`, its columns, and the length of the sums.
    pub(crate) mnk: [usize; 3],
    /// `[m, k]`.
    pub(crate) left: GpuMatrix,
    /// `[k, n]`.
    pub(crate) right: GpuMatrix,
    /// `[m, n]`.
    pub(crate) out: u64,
    /// `[m, n]`; may be `out`. Not read when `beta` is 0.
    pub(crate) existing: u64,
    /// Of `left` and `right`.
    pub(crate) dtype: DType,
    /// Of `out`, `existing`, bias and aux.
    pub(crate) out_dtype: DType,
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
    pub(crate) epilogue: Epilogue,
}

impl Matmul {
    /// `out = left·right`, all in f32.
    pub(crate) fn new(mnk: [usize; 3], left: GpuMatrix, right: GpuMatrix, out: u64) -> Matmul {
        Matmul {
            batch: 1,
            mnk,
            left,
            right,
            out,
            existing: out,
            dtype: DType::F32,
            out_dtype: DType::F32,
            alpha: 1.0,
            beta: 0.0,
            epilogue: Epilogue::default(),
        }
    }
}

/// cuBLASLt on one device.
struct DeviceBlas {
    blas: Blas,
    /// None for a kind that the library has no algorithm for.
    plans: RwLock<HashMap<MatmulKind, Option<Arc<MatmulPlan>>>>,
    /// Held while a matmul is given to any stream of the device: it may be several kernels, between
    /// which another thread's, of the same stream and workspace, must not come.
    turn: Mutex<()>,
}

impl GpuLaunch {
    /// Gives a matmul to the launcher's stream.
    pub(crate) fn multiply(&self, matmul: &Matmul) -> Result<()> {
        if self.multiply_if_supported(matmul)? {
            return Ok(());
        }
        let functions = &DeviceBlas::of(self)?.blas.functions;
        let (name, _) = functions.describe(library::NOT_SUPPORTED);
        let function = "cublasLtMatmulAlgoGetHeuristic";
        Err(self.refusal(function, &name, "no algorithm", matmul))
    }

    /// As `multiply`, but returns false and does nothing if the library has no algorithm for it.
    pub(crate) fn multiply_if_supported(&self, matmul: &Matmul) -> Result<bool> {
        debug_assert!(matmul.mnk.iter().all(|&length| length > 0));
        let engine = DeviceBlas::of(self)?;
        let kind = matmul.kind();
        let known = read(&engine.plans).get(&kind).cloned();
        let mut plan = match known {
            Some(plan) => plan,
            None => self.plan(engine, &kind, matmul, 0)?,
        };
        for refused in 1.. {
            let Some(known) = plan else { return Ok(false) };
            let turn = lock(&engine.turn);
            let operands = self.operands(&known, matmul)?;
            self.bind()?;
            // SAFETY: the context is current. The operation entered its operands and checked their
            // shapes against this matmul. The workspace belongs to this stream and has the size
            // that the plan allows.
            let run = || unsafe { known.run(&operands) };
            let launched = nodes::launch(&self.queue, run).map_err(|fault| self.failed(fault))?;
            drop(turn);
            match launched {
                Ok(()) => break,
                // The library may refuse what its heuristic returned; then nothing was queued.
                Err(fault) if fault.code == library::NOT_SUPPORTED && !is_capturing() => {
                    plan = self.plan(engine, &kind, matmul, refused)?;
                }
                Err(fault) => return Err(self.refused(engine, fault, matmul)),
            }
        }
        let Epilogue { bias, aux, .. } = matmul.epilogue;
        let sides = [Some(matmul.left.address), Some(matmul.right.address)];
        let existing = (matmul.beta != 0.0).then_some(matmul.existing);
        let used = [sides[0], sides[1], existing, Some(matmul.out), bias, aux];
        let used = used.map(Option::unwrap_or_default);
        let multiplied = matmul.mnk.map(|length| length as f64);
        let work = NodeWork {
            flop: 2.0 * matmul.batch as f64 * multiplied.iter().product::<f64>(),
            ..NodeWork::default()
        };
        nodes::node(NodeKind::Matmul, matmul, self.by.op, &used, work);
        Ok(true)
    }

    /// The addresses of a matmul for a plan.
    fn operands(&self, plan: &MatmulPlan, matmul: &Matmul) -> Result<BlasArgs> {
        Ok(BlasArgs {
            a: matmul.right.address,
            b: matmul.left.address,
            c: matmul.existing,
            d: matmul.out,
            alpha: matmul.alpha,
            beta: matmul.beta,
            bias: matmul.epilogue.bias,
            aux: matmul.epilogue.aux,
            workspace: match plan.algorithm.workspace_bytes {
                0 => 0,
                _ => self.workspace()?,
            },
            stream: self.queue.raw().cast(),
        })
    }

    /// The version of cuBLASLt.
    pub(crate) fn cublaslt_version(&self) -> Result<usize> {
        // SAFETY: takes no arguments and needs no context.
        Ok(unsafe { (DeviceBlas::of(self)?.blas.functions.cublasLtGetVersion)() })
    }

    fn bind(&self) -> Result<()> {
        self.gpu.bind().map_err(|fault| self.failed(fault))
    }

    fn failed(&self, fault: calls::DriverFault) -> Error {
        fault.of(self.by, self.gpu.device())
    }

    /// Asks cuBLASLt for a plan, without its first `refused` algorithms. The answer is stored, even
    /// if it has none, so that it is asked once.
    fn plan(
        &self,
        engine: &'static DeviceBlas,
        kind: &MatmulKind,
        matmul: &Matmul,
        refused: usize,
    ) -> Result<Option<Arc<MatmulPlan>>> {
        // The first matmul of a kind loads code, which may wait for the whole device.
        self.not_captured("a matmul of this kind was not made before")?;
        if kind.dtypes[0] == DType::F32 && kind.math == F32Math::Strict {
            self.refuse_emulation()?;
        }
        let plan = if self.leaves(kind)? {
            None
        } else {
            MatmulPlan::make(&engine.blas, kind, refused)
                .map_err(|fault| self.refused(engine, fault, matmul))?
        };
        let plan = match plan {
            Some(plan) => {
                // It may make a matmul, with the stream's workspace.
                let _turn = lock(&engine.turn);
                let operands = self.operands(&plan, matmul)?;
                self.keeps_nan(&plan, kind, &operands)?.then_some(plan)
            }
            None => None,
        };
        let plan = plan.map(Arc::new);
        let mut plans = write(&engine.plans);
        if refused > 0 {
            plans.insert(kind.clone(), plan.clone());
            return Ok(plan);
        }
        // Another thread may have stored one since; all threads use that one.
        Ok(plans.entry(kind.clone()).or_insert(plan).clone())
    }

    fn refuse_emulation(&self) -> Result<()> {
        const VARIABLE: &str = "CUBLAS_EMULATE_SINGLE_PRECISION";
        match std::env::var_os(VARIABLE) {
            Some(value) if !value.is_empty() && value != "0" => Err(self.by.value(
                format!("the environment's {VARIABLE}"),
                "unset or 0, since matmuls of f32 are in f32 unless asked otherwise. Unset it, or \
                 ask for TF32 by ops::with_f32_math",
                value.to_string_lossy(),
            )),
            _ => Ok(()),
        }
    }

    /// The address of this stream's workspace, which the first call allocates.
    fn workspace(&self) -> Result<u64> {
        const NAME: &str = "cuBLASLt workspace";
        if let Some(address) = self.known_stream_memory(NAME) {
            return Ok(address);
        }
        self.not_captured("no matmul was made on this stream before")?;
        self.stream_memory(NAME, WORKSPACE_BYTES, None)
    }

    fn not_captured(&self, what: &str) -> Result<()> {
        if !is_capturing() {
            return Ok(());
        }
        let help = "run the step once before you capture it";
        Err(self.by.capture(self.gpu.device(), what, help))
    }

    fn refused(&self, engine: &DeviceBlas, fault: BlasFault, matmul: &Matmul) -> Error {
        // Of a lost device cuBLASLt says only that it failed; the driver says why.
        if let Err(mut why) = self.queue.record(false)
            && why.is_of_a_lost_device()
        {
            why.function = fault.function;
            return self.failed(why);
        }
        let (name, meaning) = engine.blas.functions.describe(fault.code);
        self.refusal(fault.function, &name, &meaning, matmul)
    }

    fn refusal(&self, function: &str, name: &str, meaning: &str, matmul: &Matmul) -> Error {
        let (device, meaning) = (self.gpu.device(), format!("{meaning}: {matmul}"));
        self.by.cuda(device, function, [name, &meaning], "")
    }
}

impl DeviceBlas {
    /// The engine of the launcher's device, made at the first call.
    fn of(launcher: &GpuLaunch) -> Result<&'static DeviceBlas> {
        static ENGINES: [OnceLock<DeviceBlas>; GPUS_MAX] = [const { OnceLock::new() }; GPUS_MAX];
        static MAKING: Mutex<()> = Mutex::new(());
        let place = &ENGINES[launcher.gpu.index];
        if let Some(engine) = place.get() {
            return Ok(engine);
        }
        let _making = lock(&MAKING);
        if let Some(engine) = place.get() {
            return Ok(engine);
        }
        launcher.not_captured("no matmul was made on this device before")?;
        launcher.bind()?;
        let gpu = launcher.gpu;
        let blas = library::load().map_err(|why| launcher.by.absent(gpu.device(), why))?;
        // SAFETY: takes no arguments and needs no context.
        let version = unsafe { (blas.functions.cublasLtGetVersion)() };
        tracing::debug!("cuBLASLt {version} on {}", gpu.device());
        Ok(place.get_or_init(|| DeviceBlas {
            blas,
            plans: RwLock::default(),
            turn: Mutex::default(),
        }))
    }
}

impl Matmul {
    fn kind(&self) -> MatmulKind {
        let [m, n, k] = self.mnk;
        let addresses = [
            self.right.address,
            self.left.address,
            self.existing,
            self.out,
        ];
        // In a batch, also the distance from one matrix to the next.
        let apart = |elements: usize, dtype: DType| match self.batch {
            1 => 0,
            _ => (elements * dtype.bytes()) as u64,
        };
        let (operand, result) = (self.dtype, apart(m * n, self.out_dtype));
        let strides = [apart(k * n, operand), apart(m * k, operand), result, result];
        MatmulKind {
            rows: n as u64,
            columns: m as u64,
            inner: k as u64,
            batch: self.batch as u64,
            transposed: [self.right.transposed, self.left.transposed],
            dtypes: [self.dtype, self.out_dtype],
            math: match self.dtype {
                DType::F32 => f32_math(),
                _ => F32Math::Strict,
            },
            epilogue: self.epilogue.number(),
            beta_is_zero: self.beta == 0.0,
            alignments: [0, 1, 2, 3].map(|index| alignment(addresses[index] | strides[index])),
        }
    }
}

impl std::fmt::Display for Matmul {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ([m, n, k], dtype) = (self.mnk, self.dtype);
        let t = |side: GpuMatrix| if side.transposed { ".t()" } else { "" };
        // `transposed` says how memory is laid out; the shapes are those of the matmul.
        write!(
            f,
            "{dtype}[{m}, {k}]{} · {dtype}[{k}, {n}]{} to {}",
            t(self.left),
            t(self.right),
            self.out_dtype
        )?;
        let MatmulKind {
            epilogue,
            alignments,
            ..
        } = self.kind();
        if self.batch > 1 {
            write!(f, ", batch of {}", self.batch)?;
        }
        write!(f, ", epilogue {epilogue}, alignments {alignments:?} bytes")
    }
}

/// The largest power of two, up to 256, that divides the address.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epilogues_have_the_librarys_numbers() {
        use cudarc::cublaslt::sys::cublasLtEpilogue_t as Number;
        let number = |function, bias: bool, aux: bool| {
            Epilogue {
                function,
                bias: bias.then_some(1),
                aux: aux.then_some(1),
            }
            .number()
        };
        for (ours, theirs) in [
            (
                number(MatmulFunction::Identity, false, false),
                Number::CUBLASLT_EPILOGUE_DEFAULT,
            ),
            (
                number(MatmulFunction::Identity, true, false),
                Number::CUBLASLT_EPILOGUE_BIAS,
            ),
            (
                number(MatmulFunction::Relu, false, false),
                Number::CUBLASLT_EPILOGUE_RELU,
            ),
            (
                number(MatmulFunction::Relu, true, false),
                Number::CUBLASLT_EPILOGUE_RELU_BIAS,
            ),
            (
                number(MatmulFunction::Gelu, false, true),
                Number::CUBLASLT_EPILOGUE_GELU_AUX,
            ),
            (
                number(MatmulFunction::Gelu, true, true),
                Number::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            ),
            (
                number(MatmulFunction::Gelu, true, false),
                Number::CUBLASLT_EPILOGUE_GELU_BIAS,
            ),
            (
                number(MatmulFunction::GeluGradient, false, true),
                Number::CUBLASLT_EPILOGUE_DGELU,
            ),
        ] {
            assert_eq!(ours, theirs as u32, "{theirs:?}");
        }
    }

    #[test]
    fn a_matmul_is_described_with_all_that_an_algorithm_is_chosen_by() {
        let side = |transposed| GpuMatrix {
            address: 0x1010,
            transposed,
        };
        let matmul = Matmul {
            batch: 1,
            mnk: [2, 3, 4],
            left: side(false),
            right: side(true),
            out: 0x1100,
            existing: 0x1100,
            dtype: DType::BF16,
            out_dtype: DType::F32,
            alpha: 1.0,
            beta: 0.0,
            epilogue: Epilogue {
                bias: Some(1),
                ..Epilogue::default()
            },
        };
        let expected =
            "bf16[2, 4] · bf16[4, 3].t() to f32, epilogue 4, alignments [16, 16, 256, 256] bytes";
        assert_eq!(matmul.to_string(), expected);
        // Matrices of 2 × 4 elements of 2 bytes are 16 bytes apart; those of 2 × 3 of 4 bytes, 24.
        let batch = Matmul {
            batch: 5,
            epilogue: Epilogue::default(),
            ..matmul
        };
        let expected = "bf16[2, 4] · bf16[4, 3].t() to f32, batch of 5, epilogue 1, \
                        alignments [8, 16, 8, 8] bytes";
        assert_eq!(batch.to_string(), expected);
    }

    #[test]
    fn alignment_is_a_power_of_two_of_at_most_256() {
        assert_eq!(
            [0x1000, 0x1100, 0x1080, 0x1004, 0x1002, 0x1001].map(alignment),
            [256, 256, 128, 4, 2, 1]
        );
    }
}
