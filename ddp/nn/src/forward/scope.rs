//! `Scope`: what a forward declares while it is traced.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use super::custom::CustomOp;
use super::trace::{Op, Trace, Var};
use crate::activate::Dropout;
use crate::build::{Build, Init, ParamId, UseIndex};
use crate::error::Result;
use crate::layer::Layer;
use crate::linear::Linear;
use crate::norm::Normalize;
use crate::vocabulary::Embedding;

/// What the first trace has declared, by name.
#[derive(Debug, Default)]
pub(super) struct Declared {
    parameters: HashMap<String, (ParamId, Vec<usize>)>,
    numbers: HashMap<String, usize>,
    pub(super) layers: Vec<Inner>,
}

/// A layer within a forward.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) layer: Box<dyn Layer>,
    /// The shapes of a row of its input and its output.
    rows: [Vec<usize>; 2],
    /// Its parameters.
    pub(super) uses: [UseIndex; 2],
}

/// Declares, for the first trace.
pub(super) trait Declares {
    fn parameter(&mut self, name: &str, shape: &[usize], init: Init) -> Result<ParamId>;
    fn layer(
        &mut self,
        name: &str,
        layer: &mut dyn Layer,
        row: &[usize],
    ) -> Result<(Vec<usize>, [UseIndex; 2])>;
}

impl Declares for Build<'_> {
    fn parameter(&mut self, name: &str, shape: &[usize], init: Init) -> Result<ParamId> {
        Build::parameter(self, name, shape, init)
    }

    fn layer(
        &mut self,
        name: &str,
        layer: &mut dyn Layer,
        row: &[usize],
    ) -> Result<(Vec<usize>, [UseIndex; 2])> {
        let begin = self.use_index();
        let shape = self.scope(name, |build| layer.build(build, row))?;
        Ok((shape, [begin, self.use_index()]))
    }
}

/// Parameters, layers and numbers of a forward. Names are those of checkpoints, after the name of
/// the module; each is declared once.
pub struct Scope<'a> {
    pub(super) trace: Rc<RefCell<Trace>>,
    pub(super) declared: &'a mut Declared,
    pub(super) build: Option<&'a mut (dyn Declares + 'a)>,
    /// The beginning of names.
    pub(super) prefix: String,
    pub(super) is_training: bool,
}

impl Scope<'_> {
    /// Whether this is the forward of training.
    pub fn is_training(&self) -> bool {
        self.is_training
    }

    /// Declares with `body` what is called `name.…`.
    pub fn within<R>(&mut self, name: &str, body: impl FnOnce(&mut Scope<'_>) -> R) -> R {
        let before = self.prefix.len();
        self.prefix = format!("{}{name}.", self.prefix);
        let result = body(self);
        self.prefix.truncate(before);
        result
    }

    fn leaf(&self, op: Op, shape: &[usize], name: String) -> Var {
        let mut trace = self.trace.borrow_mut();
        let id = trace.push(op, vec![], shape.to_vec());
        trace.names.push((id, name));
        drop(trace);
        let trace = self.trace.clone();
        Var { trace, id }
    }

    /// Keeps an error, and goes on with numbers of this shape.
    #[track_caller]
    fn refused(&self, text: String, shape: &[usize]) -> Var {
        let at = std::panic::Location::caller();
        let (file, line) = (at.file(), at.line());
        let error = format!("{text} ({file}:{line})");
        self.trace.borrow_mut().error.get_or_insert(error);
        self.leaf(Op::Input, shape, "x".into())
    }

    /// A parameter with this name, shape and initial weights.
    #[track_caller]
    pub fn parameter(&mut self, name: &str, shape: &[usize], init: Init) -> Var {
        let path = format!("{}{name}", self.prefix);
        if let Some(build) = &mut self.build {
            match build.parameter(&path, shape, init) {
                Ok(id) => {
                    _ = self
                        .declared
                        .parameters
                        .insert(path.clone(), (id, shape.to_vec()))
                }
                Err(error) => return self.refused(error.to_string(), shape),
            }
        }
        let Some((id, known)) = self.declared.parameters.get(&path) else {
            let text = format!(
                "parameter {path}: expected one of the first trace, got a new one; help: let no name or condition depend on the batch or the mode"
            );
            return self.refused(text, shape);
        };
        if known != shape {
            let text = format!(
                "parameter {path}: expected shape {known:?}, as in the first trace, got {shape:?}; help: let no parameter depend on the batch"
            );
            return self.refused(text, shape);
        }
        self.leaf(Op::Parameter(*id), shape, path)
    }

    /// These numbers.
    #[track_caller]
    pub fn numbers(&mut self, values: &[f64], shape: &[usize]) -> Var {
        if values.len() != shape.iter().product::<usize>() {
            let text = format!(
                "numbers: expected as many as {shape:?} has, got {}; help: check the shape",
                values.len()
            );
            return self.refused(text, shape);
        }
        self.leaf(Op::Numbers(values.into()), shape, "numbers".into())
    }

    /// 0, 1, 2 and so on: the indices of an axis, as for a mask.
    #[track_caller]
    pub fn indices(&mut self, count: usize) -> Var {
        let values: Vec<f64> = (0..count).map(|it| it as f64).collect();
        self.numbers(&values, &[count])
    }

    /// The output of a layer with a backward of its own, such as `SelfAttention`, for `x` (B, …).
    #[track_caller]
    pub fn layer(&mut self, name: &str, x: &Var, mut layer: impl Layer) -> Var {
        let path = format!("{}{name}", self.prefix);
        let shape = x.shape();
        let row = shape.get(1..).unwrap_or_default();
        if let Some(build) = &mut self.build {
            match build.layer(&path, &mut layer, row) {
                Ok((output, uses)) => {
                    self.declared
                        .numbers
                        .insert(path.clone(), self.declared.layers.len());
                    self.declared.layers.push(Inner {
                        layer: Box::new(layer),
                        rows: [row.to_vec(), output],
                        uses,
                    });
                }
                Err(error) => return self.refused(error.to_string(), &shape),
            }
        }
        let number = self.declared.numbers.get(&path).copied();
        let known = number.map(|number| &self.declared.layers[number].rows);
        let Some([_, output]) = known.filter(|[input, _]| input == row) else {
            let known = known.map_or("a layer of the first trace".into(), |it| {
                format!("rows of {:?}", it[0])
            });
            let text = format!(
                "layer {path}: expected {known}, got rows of {row:?}; help: let shapes depend on the batch in axis 0 alone"
            );
            return self.refused(text, &shape);
        };
        let output = [&shape[..1], output].concat();
        let y = x.push(Op::Layer(number.unwrap_or(0)), &[x], output);
        self.trace.borrow_mut().names.push((y.id, path));
        y
    }

    /// x·Wᵀ + b on the last axis, with PyTorch's initial weights: `name.weight` (outputs, inputs)
    /// and `name.bias`.
    #[track_caller]
    pub fn linear(&mut self, name: &str, x: &Var, outputs: usize) -> Var {
        self.layer(name, x, Linear::new(outputs))
    }

    /// The fused layer norm of the last axis: `name.weight` and `name.bias`.
    #[track_caller]
    pub fn layer_norm(&mut self, name: &str, x: &Var) -> Var {
        self.layer(name, x, Normalize::layer())
    }

    /// The fused RMS norm of the last axis: `name.weight`.
    #[track_caller]
    pub fn rms_norm(&mut self, name: &str, x: &Var) -> Var {
        self.layer(name, x, Normalize::rms())
    }

    /// A learned row for each token of `x` (B, T): `name.tokens.weight`.
    #[track_caller]
    pub fn embedding(&mut self, name: &str, x: &Var, vocabulary: usize, columns: usize) -> Var {
        self.layer(name, x, Embedding::new(vocabulary, columns))
    }

    /// In training, zeros with this probability, and the rest scaled up. `name` is its own.
    #[track_caller]
    pub fn dropout(&mut self, name: &str, x: &Var, probability: f64) -> Var {
        self.layer(name, x, Dropout::new(probability))
    }

    /// An operation with a backward by hand.
    #[track_caller]
    pub fn custom(&mut self, op: Arc<dyn CustomOp>, inputs: &[&Var]) -> Var {
        let shapes: Vec<Vec<usize>> = inputs.iter().map(|it| it.shape()).collect();
        let Some(first) = inputs.first() else {
            return self.refused(
                "custom: expected at least one input, got none; help: give it x".into(),
                &[],
            );
        };
        match op.shape(&shapes) {
            Ok(shape) => first.checked(Op::Custom(op), inputs, shape),
            Err(error) => self.refused(error.to_string(), &shapes[0]),
        }
    }
}
