//! `Module`, and `Scope`: what its forward declares while it is traced.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;

use ddp_kernels::{DType, Tensor};

use super::op::{Given, Input, Numbers, Op, Parameter};
use super::trace::{Trace, Var, count_of};
use crate::build::{Declarations, Init, Lora, ParamId, Tie};
use crate::error::Result;

/// A model or a part of one, by its formula.
///
/// ```
/// use ddp_nn::{Init, Module, Scope, Var};
///
/// /// A gated block with a learned temperature.
/// #[derive(Debug)]
/// struct Gated {
///     width: usize,
/// }
///
/// impl Module for Gated {
///     fn forward(&self, m: &mut Scope, x: &Var) -> Var {
///         let hidden = m.linear("up", x, self.width).gelu();
///         let temperature = m.parameter("temperature", &[1], Init::Constant(1.0));
///         let gate = (m.linear("gate", x, self.width) / temperature).softmax(-1);
///         x + m.linear("down", &(hidden * gate), x.size(-1))
///     }
/// }
/// # use ddp_kernels::{Device, Seed};
/// let model = ddp_nn::Sequential::new().then(Gated { width: 8 });
/// let model = model.build(&[4], Device::Cpu, Seed(1)).unwrap();
/// assert_eq!(model.output_shape, [4]);
/// ```
pub trait Module: fmt::Debug + Send + Sync + 'static {
    /// The output for `x` (B, …), which has the batch as its first axis, too. It is traced: it must
    /// do the same for every batch of a shape. Operations do not fail; the first error is reported
    /// with its line when the forward has returned.
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var;

    /// The dtype of the input, if it is not the dtype that layers compute in: i64 for tokens.
    fn input_dtype(&self) -> Option<DType> {
        None
    }
}

/// A module that is a function without settings: `Formula(forward)`.
pub struct Formula<F>(pub F);

/// Debug shows the function's type, which is its name unless it is a closure.
impl<F> fmt::Debug for Formula<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::any::type_name::<F>())
    }
}

impl<F: Fn(&mut Scope<'_>, &Var) -> Var + Send + Sync + 'static> Module for Formula<F> {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        self.0(m, x)
    }
}

/// What a forward is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PassMode {
    Training,
    Evaluation,
    /// Of tokens that follow others.
    Decoding,
}

/// What the first trace has declared, by name.
#[derive(Clone, Debug, Default)]
pub(super) struct DeclaredParameters {
    parameters: HashMap<String, (ParamId, Vec<usize>)>,
    /// Layers that draw random numbers.
    pub(super) numbers: HashMap<String, u32>,
}

/// Parameters, layers and numbers of a forward. Names are those of checkpoints; each is declared
/// once.
pub struct Scope<'a> {
    pub(super) trace: Rc<RefCell<Trace>>,
    pub(super) declared: &'a mut DeclaredParameters,
    /// In the first trace.
    pub(super) build: Option<&'a mut Declarations>,
    /// The beginning of names.
    pub(super) prefix: String,
    pub(super) mode: PassMode,
    pub(super) lora: Option<Lora>,
}

impl Scope<'_> {
    /// Whether this is the forward of training.
    pub fn is_training(&self) -> bool {
        self.mode == PassMode::Training
    }

    /// Whether the tokens follow those of earlier forwards, which only attention sees.
    pub fn is_decoding(&self) -> bool {
        self.mode == PassMode::Decoding
    }

    /// Sets the initial weights of all parameters called `leaf`.
    #[cfg(test)]
    pub(crate) fn start_all(&mut self, leaf: &str, init: Init) {
        if let Some(build) = &mut self.build {
            let list = build.list.iter_mut();
            let called = list.filter(|one| one.name.ends_with(&format!(".{leaf}")));
            called.for_each(|one| one.init = init);
        }
    }

    /// The name of what is declared here, for messages.
    pub(crate) fn path(&self) -> &str {
        match self.prefix.strip_suffix('.') {
            Some(path) => path,
            None => "model",
        }
    }

    /// The adapters of linear layers.
    pub(crate) fn lora(&self) -> Option<Lora> {
        self.lora.clone()
    }

    /// Gives linear layers from here on adapters.
    pub(crate) fn adapt(&mut self, lora: &Option<Lora>) {
        if lora.is_some() {
            self.lora.clone_from(lora);
        }
        if let Some(build) = &mut self.build {
            build.lora.clone_from(&self.lora);
        }
    }

    /// Declares with `body` what is called `name.…`.
    pub fn within<R>(&mut self, name: &str, body: impl FnOnce(&mut Scope<'_>) -> R) -> R {
        let before = self.prefix.len();
        self.prefix = format!("{}{name}.", self.prefix);
        self.trace.borrow_mut().place = self.path().into();
        let result = body(self);
        self.prefix.truncate(before);
        self.trace.borrow_mut().place = self.path().into();
        result
    }

    /// What `body` computes, which is not kept in training: backward computes it again. In f32 the
    /// bits are the same; in bf16 what leaves `body` is rounded to memory, which may otherwise stay
    /// within a pass.
    pub fn recompute(&mut self, body: impl FnOnce(&mut Scope<'_>) -> Var) -> Var {
        let before = {
            let trace = &mut self.trace.borrow_mut();
            let next = trace.nodes.len();
            let again = self.is_training().then_some(next);
            let again = trace.again.or(again);
            std::mem::replace(&mut trace.again, again)
        };
        let result = body(self);
        self.trace.borrow_mut().again = before;
        result
    }

    #[track_caller]
    pub(super) fn leaf(&self, op: impl Into<Op>, shape: &[usize], name: String) -> Var {
        let mut trace = self.trace.borrow_mut();
        let id = trace.push(op, vec![], shape.to_vec());
        trace.names.push((id, name));
        drop(trace);
        let trace = self.trace.clone();
        Var { trace, id }
    }

    /// Keeps an error, and goes on with numbers of this shape.
    #[track_caller]
    pub(super) fn refused(&self, text: String, shape: &[usize]) -> Var {
        self.trace.borrow_mut().keep_error(text);
        self.leaf(Input, shape, "x".into())
    }

    /// A parameter with this name, shape and initial weights. Weight decay applies to those of two
    /// or more axes.
    #[track_caller]
    pub fn parameter(&mut self, name: &str, shape: &[usize], init: Init) -> Var {
        self.declare(name, shape, |build, path| {
            build.parameter(path, shape, init)
        })
    }

    /// As `parameter`, one that all uses of this tie share. The first use gives its name.
    #[track_caller]
    pub fn tied_parameter(&mut self, tie: &Tie, name: &str, shape: &[usize], init: Init) -> Var {
        self.declare(name, shape, |build, path| {
            build.tied_parameter(tie, path, shape, init)
        })
    }

    /// A buffer: saved and moved with the model, never trained. Its dtype is that of the masters,
    /// also where layers compute in bf16. A `CustomOp` may write to it in forward. Each rank writes
    /// its own; every training step, evaluation and checkpoint begins with those of rank 0.
    #[track_caller]
    pub fn buffer(&mut self, name: &str, shape: &[usize], init: Init) -> Var {
        self.declare(name, shape, |build, path| build.buffer(path, shape, init))
    }

    /// Says that `parameter` is a weight (O, I) of a hidden layer, made of matrices with this many
    /// rows, which Muon orthogonalises one by one. Embeddings and output layers are for AdamW.
    #[track_caller]
    pub fn hidden_matrices(&mut self, parameter: &Var, rows: &[usize]) {
        let shape = parameter.shape();
        let fits = shape.len() == 2 && shape[0] == rows.iter().sum::<usize>();
        let Some(build) = &mut self.build else {
            return;
        };
        if let (Op::Parameter(Parameter(id)), true) = (parameter.op(), fits) {
            build.list[id.0].matrices = rows.to_vec();
        } else {
            let expected = format!("a parameter with rows of {rows:?} together");
            let help = "give the rows of each of its matrices";
            parameter.refuse("hidden_matrices", &[parameter], &expected, help);
        }
    }

    #[track_caller]
    fn declare(
        &mut self,
        name: &str,
        shape: &[usize],
        declare: impl FnOnce(&mut Declarations, &str) -> Result<ParamId>,
    ) -> Var {
        let path = format!("{}{name}", self.prefix);
        if let Some(build) = &mut self.build {
            match declare(build, &path) {
                Ok(id) => {
                    let known = (id, shape.to_vec());
                    self.declared.parameters.insert(path.clone(), known);
                }
                Err(error) => return self.refused(error.to_string(), shape),
            }
        }
        let Some((id, known)) = self.declared.parameters.get(&path) else {
            let text = format!(
                "parameter {path}: expected one of the first trace, got a new one; help: let no name or condition depend on the mode or the lengths of a row; a loss has no parameters"
            );
            return self.refused(text, shape);
        };
        if known != shape {
            let text = format!(
                "parameter {path}: expected shape {known:?}, as in the first trace, got {shape:?}; help: let no parameter depend on the lengths of a row"
            );
            return self.refused(text, shape);
        }
        self.leaf(Parameter(*id), shape, path)
    }

    /// These numbers.
    #[track_caller]
    pub fn numbers(&mut self, values: &[f64], shape: &[usize]) -> Var {
        if Some(values.len()) != count_of(shape) {
            let text = format!(
                "numbers: expected as many as {shape:?} has, got {}; help: check the shape",
                values.len()
            );
            return self.refused(text, shape);
        }
        self.leaf(Numbers(values.into()), shape, "numbers".into())
    }

    /// A tensor on the model's device, without a gradient.
    pub(crate) fn tensor(&mut self, tensor: &Tensor, name: &str) -> Var {
        self.leaf(Given(tensor.clone()), tensor.shape(), name.into())
    }

    /// 0, 1, 2 and so on: the indices of an axis, as for a mask.
    #[track_caller]
    pub fn indices(&mut self, count: usize) -> Var {
        let values: Vec<f64> = (0..count).map(|it| it as f64).collect();
        self.numbers(&values, &[count])
    }

    /// The output of `layer` for `x`. Its names begin with `name`.
    #[track_caller]
    pub fn layer(&mut self, name: &str, x: &Var, layer: impl Module) -> Var {
        self.layer_of(name, |m| layer.forward(m, x))
    }

    /// As `within`. Errors in `body` have the caller's line.
    #[track_caller]
    pub(super) fn layer_of(&mut self, name: &str, body: impl FnOnce(&mut Scope<'_>) -> Var) -> Var {
        let line = self.trace.borrow_mut().begin_line();
        let y = self.within(name, body);
        self.trace.borrow_mut().line = line;
        y
    }
}
