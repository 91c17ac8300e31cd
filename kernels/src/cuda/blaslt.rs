//! Matrix products on a GPU, by cuBLASLt.
//!
//! Matrices here are row-major; the library's are column-major, and a row-major `[m, n]` is a column-major `[n, m]`. So
//! `out = left·right` is given to it as `outᵀ = rightᵀ·leftᵀ`, which moves nothing: A is `right`, B is `left`, and whatever is
//! `t()` here is read with op T there. Rows and columns change places, so its bias "along rows" is ours along columns.
//!
//! * Sums are in f32 whatever is stored. f32 operands are multiplied as f32, or in TF32 where `with_f32_math` says so.
//! * The heuristic is asked once a kind of product (`plan.rs`). Nothing is timed: that would choose other algorithms, and other
//!   bits, from run to run.
//! * Workspace belongs to one stream: two products at once in one would write over each other. It is made at the stream's first
//!   product and kept. A graph uses those of the streams it was captured from: a stream that joined a capture must not
//!   make products of its own while the graph runs, unless an event orders them.

mod library;
mod plan;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use super::Gpu;
use super::capture;
use super::fault::driver;
use super::gpu::{GPUS_MAX, Handle};
use super::launch::Launcher;
use crate::error::{CudaFailure, Error, Result};
use crate::ops::{F32Math, f32_math};
use crate::{DType, Tensor};
use library::{Fault, Functions, Opaque, blaslt};
use plan::{Key, Operands, Plan};

/// A matrix to be read: `[rows, columns]` as the product sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Side {
    pub(crate) address: u64,
    /// Its elements lie in memory as those of its transpose.
    pub(crate) transposed: bool,
}

impl Side {
    pub(crate) fn t(self) -> Side {
        Side { transposed: !self.transposed, ..self }
    }
}

/// What is done to the sums before they are stored.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Epilogue {
    pub(crate) function: Function,
    /// One element a column is added first.
    pub(crate) bias: Option<u64>,
    /// `Gelu`: also stores what it is given here. `GeluGradient`: reads that.
    pub(crate) aux: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Function {
    #[default]
    Identity,
    Relu,
    /// The tanh form, as the library approximates it: off by up to 2e-4.
    Gelu,
    /// Times the derivative of the tanh form at `aux`.
    GeluGradient,
}

// The library's numbers: CUBLASLT_EPILOGUE_RELU and so on are sums of these.
const NOTHING: u32 = 1;
const RELU: u32 = 2;
const BIAS: u32 = 4;
const GELU: u32 = 32;
const GELU_GRADIENT: u32 = 64;
const HAS_AUX: u32 = 128;

impl Epilogue {
    fn number(&self) -> u32 {
        let function = match self.function {
            Function::Identity => 0,
            Function::Relu => RELU,
            Function::Gelu => GELU,
            Function::GeluGradient => GELU_GRADIENT,
        };
        let bias = if self.bias.is_some() { BIAS } else { 0 };
        let aux = if self.aux.is_some() { HAS_AUX } else { 0 };
        match function | bias | aux {
            0 => NOTHING,
            number => number,
        }
    }
}

/// `out = epilogue(alpha * left·right + beta * existing)`, all sides row-major, none of them empty.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    /// Rows of `out`, its columns, and the length of the sums.
    pub(crate) mnk: [usize; 3],
    /// `[m, k]`.
    pub(crate) left: Side,
    /// `[k, n]`.
    pub(crate) right: Side,
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

/// cuBLASLt on one device.
struct Engine {
    functions: &'static Functions,
    handle: Handle<Opaque>,
    workspace_bytes: usize,
    /// None for a kind that the library has no algorithm for.
    plans: RwLock<HashMap<Key, Option<Arc<Plan>>>>,
    /// By stream.
    workspaces: Mutex<HashMap<u64, Workspace>>,
    /// Whether `Function::Relu` of NaN is NaN, for f32, bf16 and f16.
    relu_keeps_nan: [OnceLock<bool>; 3],
}

/// Memory that products of one stream work in.
struct Workspace {
    address: u64,
    /// Keeps the memory: graphs have the address in them, so it stays to the end of the process.
    _tensor: Tensor,
}

impl Launcher {
    /// Gives a product to the launcher's stream.
    pub(crate) fn multiply(&self, product: &Product) -> Result<()> {
        if self.multiply_if_supported(product)? {
            return Ok(());
        }
        let (name, _) = Engine::of(self)?.functions.describe(library::NOT_SUPPORTED);
        Err(self.refusal("cublasLtMatmulAlgoGetHeuristic", name, "no algorithm", product))
    }

    /// As `multiply`; gives false, and does nothing, where the library has no algorithm for it.
    pub(crate) fn multiply_if_supported(&self, product: &Product) -> Result<bool> {
        debug_assert!(product.mnk.iter().all(|&length| length > 0));
        let engine = Engine::of(self)?;
        let key = product.key();
        let known = read(&engine.plans).get(&key).cloned();
        let plan = match known {
            Some(plan) => plan,
            None => self.plan(engine, key, product)?,
        };
        let Some(plan) = plan else { return Ok(false) };
        let workspace = if plan.needs_workspace() { self.workspace(engine)? } else { 0 };
        let operands = Operands {
            a: product.right.address,
            b: product.left.address,
            c: product.existing,
            d: product.out,
            alpha: product.alpha,
            beta: product.beta,
            bias: product.epilogue.bias,
            aux: product.epilogue.aux,
            workspace,
            stream: self.queue.raw().cast(),
        };
        self.gpu.bind().map_err(|fault| fault.of(self.op, self.gpu.device(), self.at))?;
        // SAFETY: the context is current. The operation entered its operands, whose shapes it checked against this product;
        // the workspace is this stream's alone and as large as the plan may use.
        let given = unsafe { plan.run(engine.functions, engine.handle.0, &operands) };
        given.map_err(|fault| self.refused(engine.functions, fault, product))?;
        Ok(true)
    }

    /// Looks for a plan and keeps it, or that there is none.
    fn plan(&self, engine: &Engine, key: Key, product: &Product) -> Result<Option<Arc<Plan>>> {
        // The library would load code at the first product of a kind, which may wait for the whole device.
        self.not_captured("a product of this kind was not made before")?;
        if key.dtypes[0] == DType::F32 && key.math == F32Math::Strict {
            self.refuse_emulation()?;
        }
        let plan = Plan::make(engine.functions, engine.handle.0, &key, engine.workspace_bytes)
            .map_err(|fault| self.refused(engine.functions, fault, product))?;
        let mut plans = engine.plans.write().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have been first: one plan for all.
        Ok(plans.entry(key).or_insert_with(|| plan.map(Arc::new)).clone())
    }

    fn refuse_emulation(&self) -> Result<()> {
        const VARIABLE: &str = "CUBLAS_EMULATE_SINGLE_PRECISION";
        match std::env::var_os(VARIABLE) {
            Some(value) if !value.is_empty() && value != "0" => Err(Error::Value {
                op: self.op,
                what: format!("the environment's {VARIABLE}"),
                expected:
                    "unset or 0, since products of f32 are in f32 unless asked otherwise. Unset it, or ask for TF32 by \
                           ops::with_f32_math"
                        .to_string(),
                got: value.to_string_lossy().into_owned(),
                at: self.at,
            }),
            _ => Ok(()),
        }
    }

    /// The address of this stream's workspace, made at the first call.
    fn workspace(&self, engine: &Engine) -> Result<u64> {
        let mut workspaces = lock(&engine.workspaces);
        if let Some(workspace) = workspaces.get(&self.queue.id) {
            return Ok(workspace.address);
        }
        self.not_captured("no product was made on this stream before")?;
        // On the current stream, which is the launcher's: the memory is this stream's from the start.
        let tensor =
            Tensor::empty(&[engine.workspace_bytes], DType::U8, self.gpu.device())?.named("cuBLASLt workspace");
        let address = tensor.enter("workspace", true, self.op, self.at)?.address();
        workspaces.insert(self.queue.id, Workspace { address, _tensor: tensor });
        Ok(address)
    }

    /// Whether `Function::Relu` of NaN is NaN. NVIDIA does not say, and a 0 in its place would hide that training went wrong: so
    /// the library is tried once, before the first use.
    pub(crate) fn relu_keeps_nan(&self, dtype: DType) -> Result<bool> {
        let engine = Engine::of(self)?;
        let place = match dtype {
            DType::BF16 => 1,
            DType::F16 => 2,
            _ => 0,
        };
        if let Some(&known) = engine.relu_keeps_nan[place].get() {
            return Ok(known);
        }
        self.not_captured("no layer with relu was computed on this device before")?;
        let keeps = self.try_relu_of_nan(dtype)?;
        tracing::debug!(
            "relu of NaN is {} in cuBLASLt for {dtype}",
            if keeps { "NaN" } else { "0, so it is not used" }
        );
        Ok(*engine.relu_keeps_nan[place].get_or_init(|| keeps))
    }

    /// Waits for the stream.
    fn try_relu_of_nan(&self, dtype: DType) -> Result<bool> {
        const SIDE: usize = 16;
        let matrix = Tensor::empty(&[2, SIDE, SIDE], dtype, self.gpu.device())?;
        let entered = matrix.enter("matrix", true, self.op, self.at)?;
        let (nan, out) = (entered.address(), entered.address() + (matrix.bytes() / 2) as u64);
        let failed = |fault: super::fault::Fault| fault.of(self.op, self.gpu.device(), self.at);
        let cleared = self.gpu.bind().and_then(|()| {
            // SAFETY: the context is current, and the memory is ours, made on this stream. All ones are NaN in each of the types.
            unsafe { driver!(cuMemsetD8Async(nan, 0xff, matrix.bytes() / 2, self.queue.raw())) }
        });
        cleared.map_err(failed)?;
        let side = Side { address: nan, transposed: false };
        let supported = self.multiply_if_supported(&Product {
            mnk: [SIDE; 3],
            left: side,
            right: side,
            out,
            existing: out,
            dtype,
            out_dtype: dtype,
            alpha: 1.0,
            beta: 0.0,
            epilogue: Epilogue { function: Function::Relu, ..Epilogue::default() },
        })?;
        if !supported {
            return Ok(false);
        }
        let mut bytes = Box::new([0u8; 4]);
        // SAFETY: as above; the host's memory is ours and outlives the wait, or whatever comes of it where that fails.
        let read =
            unsafe { driver!(cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), out, dtype.bytes(), self.queue.raw())) }
                .and_then(|()| self.queue.synchronize());
        if let Err(fault) = read {
            // The device may still write to it.
            Box::leak(bytes);
            return Err(failed(fault));
        }
        Ok(bytes[..dtype.bytes()].iter().any(|&byte| byte != 0))
    }

    fn not_captured(&self, what: &str) -> Result<()> {
        if !capture::is_capturing() {
            return Ok(());
        }
        let why = format!("{what}. Run the step once before capturing");
        Err(Error::Capture { op: self.op, device: self.gpu.device(), why, at: self.at })
    }

    fn refused(&self, functions: &Functions, fault: Fault, product: &Product) -> Error {
        let (name, meaning) = functions.describe(fault.code);
        self.refusal(fault.function, name, &meaning, product)
    }

    fn refusal(&self, function: &'static str, name: String, meaning: &str, product: &Product) -> Error {
        let meaning = format!("{meaning}: {product}");
        let hint = "";
        Error::Cuda(Box::new(CudaFailure {
            op: self.op,
            device: self.gpu.device(),
            function,
            name,
            meaning,
            hint,
            at: self.at,
        }))
    }
}

impl Engine {
    /// The engine of the launcher's device, made at the first call.
    fn of(launcher: &Launcher) -> Result<&'static Engine> {
        static ENGINES: [OnceLock<Engine>; GPUS_MAX] = [const { OnceLock::new() }; GPUS_MAX];
        static MAKING: Mutex<()> = Mutex::new(());
        let place = &ENGINES[launcher.gpu.index];
        if let Some(engine) = place.get() {
            return Ok(engine);
        }
        let _making = lock(&MAKING);
        if let Some(engine) = place.get() {
            return Ok(engine);
        }
        launcher.not_captured("no product was made on this device before")?;
        let engine = Engine::make(launcher)?;
        Ok(place.get_or_init(|| engine))
    }

    fn make(launcher: &Launcher) -> Result<Engine> {
        let (gpu, op, at) = (launcher.gpu, launcher.op, launcher.at);
        let functions = library::functions().map_err(|why| Error::DeviceAbsent {
            op,
            device: gpu.device(),
            why: why.to_string(),
            at,
        })?;
        gpu.bind().map_err(|fault| fault.of(op, gpu.device(), at))?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the context that the handle is to belong to is current; the pointer is to a variable of ours.
        let made = unsafe { blaslt!(functions, cublasLtCreate(&mut handle)) };
        made.map_err(|Fault { function, code }| {
            let (name, meaning) = functions.describe(code);
            let hint = "Mostly the device has no memory left, or the library does not fit the driver.";
            Error::Cuda(Box::new(CudaFailure { op, device: gpu.device(), function, name, meaning, hint, at }))
        })?;
        // SAFETY: takes nothing.
        tracing::debug!("cuBLASLt {} on {}", unsafe { (functions.cublasLtGetVersion)() }, gpu.device());
        Ok(Engine {
            functions,
            handle: Handle(handle),
            workspace_bytes: workspace_bytes(gpu),
            plans: RwLock::default(),
            workspaces: Mutex::default(),
            relu_keeps_nan: [const { OnceLock::new() }; 3],
        })
    }
}

/// What NVIDIA recommends: the fastest algorithms of sm_90 and later use up to 32 MiB.
fn workspace_bytes(gpu: &Gpu) -> usize {
    if gpu.capability >= (9, 0) { 32 << 20 } else { 8 << 20 }
}

impl Product {
    fn key(&self) -> Key {
        let [m, n, k] = self.mnk.map(|length| length as u64);
        Key {
            rows: n,
            columns: m,
            inner: k,
            transposed: [self.right.transposed, self.left.transposed],
            dtypes: [self.dtype, self.out_dtype],
            math: if self.dtype == DType::F32 { f32_math() } else { F32Math::Strict },
            epilogue: self.epilogue.number(),
            beta_is_zero: self.beta == 0.0,
            alignments: [self.right.address, self.left.address, self.existing, self.out].map(alignment),
        }
    }
}

impl std::fmt::Display for Product {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ([m, n, k], dtype) = (self.mnk, self.dtype);
        let t = |side: Side| if side.transposed { ".t()" } else { "" };
        // `.t()` says how the matrix lies in memory; the shapes are those of the product.
        write!(f, "{dtype}[{m}, {k}]{} · {dtype}[{k}, {n}]{} to {}", t(self.left), t(self.right), self.out_dtype)?;
        let Key { epilogue, alignments, .. } = self.key();
        write!(f, ", epilogue {epilogue}, alignments {alignments:?} bytes")
    }
}

/// The largest power of two, up to 256, that divides the address.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read<T>(lock: &RwLock<T>) -> std::sync::RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epilogues_have_the_librarys_numbers() {
        use cudarc::cublaslt::sys::cublasLtEpilogue_t as Number;
        let number = |function, bias: bool, aux: bool| {
            Epilogue { function, bias: bias.then_some(1), aux: aux.then_some(1) }.number()
        };
        for (ours, theirs) in [
            (number(Function::Identity, false, false), Number::CUBLASLT_EPILOGUE_DEFAULT),
            (number(Function::Identity, true, false), Number::CUBLASLT_EPILOGUE_BIAS),
            (number(Function::Relu, false, false), Number::CUBLASLT_EPILOGUE_RELU),
            (number(Function::Relu, true, false), Number::CUBLASLT_EPILOGUE_RELU_BIAS),
            (number(Function::Gelu, false, true), Number::CUBLASLT_EPILOGUE_GELU_AUX),
            (number(Function::Gelu, true, true), Number::CUBLASLT_EPILOGUE_GELU_AUX_BIAS),
            (number(Function::Gelu, true, false), Number::CUBLASLT_EPILOGUE_GELU_BIAS),
            (number(Function::GeluGradient, false, true), Number::CUBLASLT_EPILOGUE_DGELU),
        ] {
            assert_eq!(ours, theirs as u32, "{theirs:?}");
        }
    }

    #[test]
    fn a_product_is_described_with_all_that_an_algorithm_is_chosen_by() {
        let side = |transposed| Side { address: 0x1010, transposed };
        let product = Product {
            mnk: [2, 3, 4],
            left: side(false),
            right: side(true),
            out: 0x1100,
            existing: 0x1100,
            dtype: DType::BF16,
            out_dtype: DType::F32,
            alpha: 1.0,
            beta: 0.0,
            epilogue: Epilogue { bias: Some(1), ..Epilogue::default() },
        };
        let expected = "bf16[2, 4] · bf16[4, 3].t() to f32, epilogue 4, alignments [16, 16, 256, 256] bytes";
        assert_eq!(product.to_string(), expected);
    }

    #[test]
    fn alignment_is_a_power_of_two_of_at_most_256() {
        assert_eq!([0x1000, 0x1100, 0x1080, 0x1004, 0x1002, 0x1001].map(alignment), [256, 256, 128, 4, 2, 1]);
    }
}
