//! Matrix products on a GPU, by cuBLASLt.
//!
//! Our matrices are row-major and the library's are column-major, so a row-major `[m, n]` is its
//! `[n, m]`. `out = left·right` is passed as `outᵀ = rightᵀ·leftᵀ`, which moves nothing: A is
//! `right`, B is `left`, and a `t()` view is read with op T. The library's bias along rows is ours
//! along columns.
//!
//! * Sums are in f32 for every dtype. f32 operands are multiplied as f32, or as TF32 if
//!   `with_f32_math` says so.
//! * The heuristic runs once per kind of product (`plan.rs`). Nothing is timed unless a program
//!   asks for it (`choose.rs`): timing may choose other algorithms, and so other bits, in another
//!   run.
//! * Each stream has its own workspace, because two products would overwrite each other's. It is
//!   made at the stream's first product and kept. A graph uses the workspaces of the streams it was
//!   captured from: such a stream must not run other products beside the graph without an event
//!   between them.

mod choose;
mod epilogue;
mod library;
mod plan;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use super::Launcher;
use crate::cuda::devices::GPUS_MAX;
use crate::cuda::fault;
use crate::cuda::gpu::Handle;
use crate::cuda::nodes::{self, NodeKind, NodeWork};
use crate::cuda::queue::is_capturing;
use crate::error::{Error, Result};
use crate::precision::{F32Math, f32_math};
use crate::sync::lock;
use crate::{DType, Tensor};
pub(crate) use epilogue::{Epilogue, Function};
use library::{Fault, Functions, Opaque, blaslt};
pub(crate) use plan::Kind;
use plan::{Operands, Plan, WORKSPACE_BYTES};

/// A matrix to read: `[rows, columns]` as the product sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Side {
    pub(crate) address: u64,
    /// Memory holds its transpose.
    pub(crate) transposed: bool,
}

/// `out = epilogue(alpha * left·right + beta * existing)`, all row-major and non-empty.
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

impl Product {
    /// `out = left·right`, all in f32.
    pub(crate) fn new(mnk: [usize; 3], left: Side, right: Side, out: u64) -> Product {
        Product {
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
struct Engine {
    functions: &'static Functions,
    handle: Handle<Opaque>,
    /// None for a kind that the library has no algorithm for.
    plans: RwLock<HashMap<Kind, Option<Arc<Plan>>>>,
    /// By stream.
    workspaces: Mutex<HashMap<u64, Workspace>>,
}

/// Workspace for the products of one stream.
struct Workspace {
    address: u64,
    /// Kept to the end of the process, because graphs hold the address.
    _tensor: Tensor,
}

impl Launcher {
    /// Gives a product to the launcher's stream.
    pub(crate) fn multiply(&self, product: &Product) -> Result<()> {
        if self.multiply_if_supported(product)? {
            return Ok(());
        }
        let (name, _) = Engine::of(self)?.functions.describe(library::NOT_SUPPORTED);
        let function = "cublasLtMatmulAlgoGetHeuristic";
        Err(self.refusal(function, &name, "no algorithm", product))
    }

    /// As `multiply`, but returns false and does nothing if the library has no algorithm for it.
    pub(crate) fn multiply_if_supported(&self, product: &Product) -> Result<bool> {
        debug_assert!(product.mnk.iter().all(|&length| length > 0));
        let engine = Engine::of(self)?;
        let kind = product.kind();
        let known = read(&engine.plans).get(&kind).cloned();
        let mut plan = match known {
            Some(plan) => plan,
            None => self.plan(engine, &kind, product, 0)?,
        };
        for refused in 1.. {
            let Some(known) = plan else { return Ok(false) };
            let operands = self.operands(engine, &known, product)?;
            self.bind()?;
            // SAFETY: the context is current. The operation entered its operands and checked their
            // shapes against this product. The workspace belongs to this stream and has the size
            // that the plan allows.
            let run = || unsafe { known.run(engine.functions, engine.handle.0, &operands) };
            match nodes::launch(&self.queue, run).map_err(|fault| self.failed(fault))? {
                Ok(()) => break,
                // The library may refuse what its heuristic returned; then nothing was queued.
                Err(fault) if fault.code == library::NOT_SUPPORTED && !is_capturing() => {
                    plan = self.plan(engine, &kind, product, refused)?;
                }
                Err(fault) => return Err(self.refused(engine.functions, fault, product)),
            }
        }
        let existing = if product.beta == 0.0 {
            0
        } else {
            product.existing
        };
        let epilogue = [product.epilogue.bias, product.epilogue.aux].map(Option::unwrap_or_default);
        let sides = [product.left.address, product.right.address];
        let used = [
            sides[0],
            sides[1],
            existing,
            product.out,
            epilogue[0],
            epilogue[1],
        ];
        let work = NodeWork {
            flop: 2.0
                * product
                    .mnk
                    .map(|length| length as f64)
                    .iter()
                    .product::<f64>(),
            ..NodeWork::default()
        };
        nodes::node(NodeKind::Product, product, self.by.op, &used, work);
        Ok(true)
    }

    /// The addresses of a product for a plan.
    fn operands(&self, engine: &Engine, plan: &Plan, product: &Product) -> Result<Operands> {
        Ok(Operands {
            a: product.right.address,
            b: product.left.address,
            c: product.existing,
            d: product.out,
            alpha: product.alpha,
            beta: product.beta,
            bias: product.epilogue.bias,
            aux: product.epilogue.aux,
            workspace: match plan.needs_workspace() {
                true => self.workspace(engine)?,
                false => 0,
            },
            stream: self.queue.raw().cast(),
        })
    }

    fn bind(&self) -> Result<()> {
        self.gpu.bind().map_err(|fault| self.failed(fault))
    }

    fn failed(&self, fault: fault::Fault) -> Error {
        fault.of(self.by, self.gpu.device())
    }

    /// Asks cuBLASLt for a plan, without its first `refused` algorithms. The answer is stored, even
    /// if it has none, so that it is asked once.
    fn plan(
        &self,
        engine: &Engine,
        kind: &Kind,
        product: &Product,
        refused: usize,
    ) -> Result<Option<Arc<Plan>>> {
        // The first product of a kind loads code, which may wait for the whole device.
        self.not_captured("a product of this kind was not made before")?;
        if kind.dtypes[0] == DType::F32 && kind.math == F32Math::Strict {
            self.refuse_emulation()?;
        }
        let plan = match self.leaves(kind)? {
            true => None,
            false => Plan::make(engine.functions, engine.handle.0, kind, refused)
                .map_err(|fault| self.refused(engine.functions, fault, product))?,
        };
        let plan = match plan {
            Some(plan) => {
                let operands = self.operands(engine, &plan, product)?;
                self.keeps_nan(engine, &plan, kind, &operands)?
                    .then_some(plan)
            }
            None => None,
        };
        let plan = plan.map(Arc::new);
        let mut plans = engine.plans.write().unwrap_or_else(PoisonError::into_inner);
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
                "unset or 0, since products of f32 are in f32 unless asked otherwise. Unset it, or \
                 ask for TF32 by ops::with_f32_math",
                value.to_string_lossy(),
            )),
            _ => Ok(()),
        }
    }

    /// The address of this stream's workspace, which the first call allocates.
    fn workspace(&self, engine: &Engine) -> Result<u64> {
        let mut workspaces = lock(&engine.workspaces);
        if let Some(workspace) = workspaces.get(&self.queue.id) {
            return Ok(workspace.address);
        }
        self.not_captured("no product was made on this stream before")?;
        let (tensor, address) = self.memory("cuBLASLt workspace", WORKSPACE_BYTES, None)?;
        workspaces.insert(
            self.queue.id,
            Workspace {
                address,
                _tensor: tensor,
            },
        );
        Ok(address)
    }

    fn not_captured(&self, what: &str) -> Result<()> {
        if !is_capturing() {
            return Ok(());
        }
        let help = "run the step once before you capture it";
        Err(self.by.capture(self.gpu.device(), what, help))
    }

    fn refused(&self, functions: &Functions, fault: Fault, product: &Product) -> Error {
        // Of a lost device cuBLASLt says only that it failed; the driver says why.
        if let Err(mut why) = self.queue.record(false)
            && why.is_of_a_lost_device()
        {
            why.function = fault.function;
            return self.failed(why);
        }
        let (name, meaning) = functions.describe(fault.code);
        self.refusal(fault.function, &name, &meaning, product)
    }

    fn refusal(&self, function: &str, name: &str, meaning: &str, product: &Product) -> Error {
        let (device, meaning) = (self.gpu.device(), format!("{meaning}: {product}"));
        self.by.cuda(device, function, [name, &meaning], "")
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
        let (gpu, by) = (launcher.gpu, launcher.by);
        /// Of the first device that made a handle: all devices use the same library.
        static FUNCTIONS: OnceLock<Functions> = OnceLock::new();
        gpu.bind().map_err(|fault| fault.of(by, gpu.device()))?;
        let create = |functions: &Functions| {
            let mut handle = std::ptr::null_mut();
            // SAFETY: the handle's context is current; the pointer is to a local variable.
            unsafe { blaslt!(functions, cublasLtCreate(&mut handle)) }.map(|()| handle)
        };
        let (functions, handle) = match FUNCTIONS.get() {
            Some(functions) => {
                let handle = create(functions).map_err(|Fault { function, code }| {
                    let (name, meaning) = functions.describe(code);
                    let help = "check that the device has free memory";
                    by.cuda(gpu.device(), function, [&name, &meaning], help)
                })?;
                (functions, handle)
            }
            None => {
                let (functions, handle) =
                    library::load(create).map_err(|why| by.absent(gpu.device(), why))?;
                (FUNCTIONS.get_or_init(|| functions), handle)
            }
        };
        // SAFETY: takes no arguments and needs no context.
        let version = unsafe { (functions.cublasLtGetVersion)() };
        tracing::debug!("cuBLASLt {version} on {}", gpu.device());
        Ok(Engine {
            functions,
            handle: Handle(handle),
            plans: RwLock::default(),
            workspaces: Mutex::default(),
        })
    }
}

impl Product {
    fn kind(&self) -> Kind {
        let [m, n, k] = self.mnk.map(|length| length as u64);
        Kind {
            rows: n,
            columns: m,
            inner: k,
            transposed: [self.right.transposed, self.left.transposed],
            dtypes: [self.dtype, self.out_dtype],
            math: if self.dtype == DType::F32 {
                f32_math()
            } else {
                F32Math::Strict
            },
            epilogue: self.epilogue.number(),
            beta_is_zero: self.beta == 0.0,
            alignments: [
                self.right.address,
                self.left.address,
                self.existing,
                self.out,
            ]
            .map(alignment),
        }
    }
}

impl std::fmt::Display for Product {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ([m, n, k], dtype) = (self.mnk, self.dtype);
        let t = |side: Side| if side.transposed { ".t()" } else { "" };
        // `transposed` says how memory is laid out; the shapes are those of the product.
        write!(
            f,
            "{dtype}[{m}, {k}]{} · {dtype}[{k}, {n}]{} to {}",
            t(self.left),
            t(self.right),
            self.out_dtype
        )?;
        let Kind {
            epilogue,
            alignments,
            ..
        } = self.kind();
        write!(f, ", epilogue {epilogue}, alignments {alignments:?} bytes")
    }
}

/// The largest power of two, up to 256, that divides the address.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
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
            Epilogue {
                function,
                bias: bias.then_some(1),
                aux: aux.then_some(1),
            }
            .number()
        };
        for (ours, theirs) in [
            (
                number(Function::Identity, false, false),
                Number::CUBLASLT_EPILOGUE_DEFAULT,
            ),
            (
                number(Function::Identity, true, false),
                Number::CUBLASLT_EPILOGUE_BIAS,
            ),
            (
                number(Function::Relu, false, false),
                Number::CUBLASLT_EPILOGUE_RELU,
            ),
            (
                number(Function::Relu, true, false),
                Number::CUBLASLT_EPILOGUE_RELU_BIAS,
            ),
            (
                number(Function::Gelu, false, true),
                Number::CUBLASLT_EPILOGUE_GELU_AUX,
            ),
            (
                number(Function::Gelu, true, true),
                Number::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            ),
            (
                number(Function::Gelu, true, false),
                Number::CUBLASLT_EPILOGUE_GELU_BIAS,
            ),
            (
                number(Function::GeluGradient, false, true),
                Number::CUBLASLT_EPILOGUE_DGELU,
            ),
        ] {
            assert_eq!(ours, theirs as u32, "{theirs:?}");
        }
    }

    #[test]
    fn a_product_is_described_with_all_that_an_algorithm_is_chosen_by() {
        let side = |transposed| Side {
            address: 0x1010,
            transposed,
        };
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
            epilogue: Epilogue {
                bias: Some(1),
                ..Epilogue::default()
            },
        };
        let expected =
            "bf16[2, 4] · bf16[4, 3].t() to f32, epilogue 4, alignments [16, 16, 256, 256] bytes";
        assert_eq!(product.to_string(), expected);
    }

    #[test]
    fn alignment_is_a_power_of_two_of_at_most_256() {
        assert_eq!(
            [0x1000, 0x1100, 0x1080, 0x1004, 0x1002, 0x1001].map(alignment),
            [256, 256, 128, 4, 2, 1]
        );
    }
}
