//! Linear: y = x·Wᵀ + b, with PyTorch's layout and initial weights, on the last axis. Letters:
//! I inputs, O outputs.

use crate::build::{Init, Tie};
use crate::forward::{Module, Scope, Var};
use crate::lora;

/// A linear layer on the last axis. Weight (O, I) and bias (O) start uniform between ±1/√I, as in
/// `torch.nn.Linear`.
#[derive(Clone, Debug)]
pub struct Linear {
    /// O
    outputs: usize,
    has_bias: bool,
    tie: Option<Tie>,
    /// What weight and bias start with, if not PyTorch's.
    init: Option<[Init; 2]>,
    /// Whether it is a model's first or last layer.
    is_outer: bool,
    /// The outputs of each layer that is merged into this one.
    parts: Vec<usize>,
}

impl Linear {
    /// A layer with this many outputs and a bias. The last axis of its input is the number of
    /// inputs.
    pub fn new(outputs: usize) -> Linear {
        Linear {
            outputs,
            has_bias: true,
            tie: None,
            init: None,
            is_outer: false,
            parts: vec![outputs],
        }
    }

    /// The same layer as the first or last one of a model, whose weight is not a hidden matrix.
    pub fn outer(self) -> Linear {
        let is_outer = true;
        Linear { is_outer, ..self }
    }

    /// The same layer, in place of several that share their input, with this many outputs each.
    pub fn in_parts(self, outputs: &[usize]) -> Linear {
        let parts = outputs.to_vec();
        Linear { parts, ..self }
    }

    /// The same layer without a bias.
    pub fn without_bias(self) -> Linear {
        self.biased(false)
    }

    /// The same layer with or without a bias.
    pub(crate) fn biased(self, has_bias: bool) -> Linear {
        Linear { has_bias, ..self }
    }

    /// The same layer with a weight that all layers of this tie share. Each has its own bias.
    pub fn tied(self, tie: &Tie) -> Linear {
        let tie = Some(tie.clone());
        Linear { tie, ..self }
    }

    /// The same layer whose weight and bias start at 0, if `starts`.
    pub(crate) fn starting_at_zero(self, starts: bool) -> Linear {
        let init = starts.then_some([Init::Constant(0.0); 2]).or(self.init);
        Linear { init, ..self }
    }

    /// The same layer whose weight starts normal with this standard deviation, and whose bias
    /// starts at 0, as in GPT-2.
    pub fn normal(self, deviation: f64) -> Linear {
        let init = Some([Init::Normal { deviation }, Init::Constant(0.0)]);
        Linear { init, ..self }
    }
}

impl Module for Linear {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let inputs = x.shape().last().copied().unwrap_or(0);
        if x.rank() < 2 || inputs == 0 || self.outputs == 0 {
            let expected = "rows of at least one input, and at least one output";
            let help = "a linear layer works on the last axis: [rows, …, inputs]";
            return x.refuse("linear", &[x], expected, help);
        }
        let bound = 1.0 / (inputs as f64).sqrt();
        let [init, bias_init] = self.init.unwrap_or([Init::Uniform { bound }; 2]);
        let shape = [self.outputs, inputs];
        let weight = match &self.tie {
            Some(tie) => m.tied_parameter(tie, "weight", &shape, init),
            None => m.parameter("weight", &shape, init),
        };
        if !self.is_outer {
            m.hidden_matrices(&weight, &self.parts);
        }
        let has_bias = self.has_bias;
        let bias = has_bias.then(|| m.parameter("bias", &[self.outputs], bias_init));
        let y = x.linear(&weight, bias.as_ref());
        // A tied weight may belong to other layers, too.
        if self.is_outer || self.tie.is_some() {
            return y;
        }
        lora::adapted(m, x, y, &self.parts)
    }
}

impl Scope<'_> {
    /// x·Wᵀ + b on the last axis, with PyTorch's initial weights: `name.weight` (outputs, inputs)
    /// and `name.bias`.
    #[track_caller]
    pub fn linear(&mut self, name: &str, x: &Var, outputs: usize) -> Var {
        self.layer(name, x, Linear::new(outputs))
    }
}
