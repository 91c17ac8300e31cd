//! Linear: y = x·Wᵀ + b, with PyTorch's layout and initial weights. Letters: B rows of the input
//! (all its dimensions but the last), I inputs, O outputs.

use ddp_kernels::ops::{self, Activation};
use ddp_kernels::{Device, Tensor};

use crate::build::{Build, Init, ParamId, Tie};
use crate::error::{Error, Result};
use crate::layer::Layer;
use crate::lora::Adapters;
use crate::pass::{Pass, with_last_of};

/// A linear layer on the last dimension. Weight (O, I) and bias (O) start uniform between ±1/√I, as
/// in `torch.nn.Linear`.
#[derive(Debug)]
pub struct Linear {
    /// O
    pub(crate) outputs: usize,
    has_bias: bool,
    /// Its name in the model once built, for messages.
    name: String,
    tie: Option<Tie>,
    /// What weight and bias start with, if not PyTorch's.
    init: Option<[Init; 2]>,
    /// The activation above it, which it applies. In training it then saves, after its own tensor,
    /// what that activation's backward needs.
    pub(crate) above: Option<Activation>,
    /// The activation below it, whose derivative it multiplies into the gradient of its input.
    pub(crate) below: Option<Activation>,
    /// Whether it is a model's first or last layer.
    is_outer: bool,
    /// The outputs of each layer that is merged into this one.
    parts: Vec<usize>,
    /// Once built: what is added to it.
    pub(crate) adapters: Option<Adapters>,
    built: Option<Built>,
}

#[derive(Clone, Copy, Debug)]
struct Built {
    inputs: usize,
    weight: ParamId,
    bias: Option<ParamId>,
}

impl Linear {
    /// A layer with this many outputs and a bias. The last dimension of its input is the number of
    /// inputs.
    pub fn new(outputs: usize) -> Linear {
        Linear {
            outputs,
            has_bias: true,
            name: String::new(),
            tie: None,
            init: None,
            above: None,
            below: None,
            is_outer: false,
            parts: vec![outputs],
            adapters: None,
            built: None,
        }
    }

    /// The same layer as the first or last one of a model, whose weight is not a hidden matrix.
    pub fn outer(mut self) -> Linear {
        self.is_outer = true;
        self
    }

    /// The same layer, in place of several that share their input, with this many outputs each.
    pub fn in_parts(mut self, outputs: &[usize]) -> Linear {
        self.parts = outputs.to_vec();
        self
    }

    /// The same layer without a bias.
    pub fn without_bias(mut self) -> Linear {
        self.has_bias = false;
        self
    }

    /// The same layer with a weight that all layers of this tie share. Each has its own bias.
    pub fn tied(mut self, tie: &Tie) -> Linear {
        self.tie = Some(tie.clone());
        self
    }

    /// The same layer whose weight starts normal with this standard deviation, and whose bias
    /// starts at 0, as in GPT-2.
    pub fn normal(mut self, deviation: f64) -> Linear {
        self.init = Some([Init::Normal { deviation }, Init::Constant(0.0)]);
        self
    }

    fn built(&self) -> Built {
        self.built
            .expect("a layer is built (Model::new) before it is run")
    }

    /// The weight, once built.
    pub(crate) fn weight(&self) -> ParamId {
        self.built().weight
    }

    /// I, once built.
    pub(crate) fn inputs(&self) -> usize {
        self.built().inputs
    }

    /// `x` (…, I), reshaped to (B, I).
    fn rows(&self, x: &Tensor) -> Result<Tensor> {
        let inputs = self.built().inputs;
        let dims = x.shape().dims();
        if dims.len() < 2 || dims[dims.len() - 1] != inputs {
            return Err(Error::model(
                self.name.clone(),
                format!("rows of {inputs} inputs, as it was built for"),
                x.to_string(),
                format!("pass [rows, …, {inputs}], or build the model for this shape"),
            ));
        }
        Ok(x.reshape(&[x.count() / inputs, inputs])?)
    }

    /// The forward with another bias (O).
    pub(crate) fn forward_with(
        &self,
        pass: &mut Pass<'_>,
        x: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        let weight = self.built().weight;
        let rows = self.rows(x)?;
        let shape = [rows.shape()[0], self.outputs];
        let keeps_pre_activation =
            self.above.is_some_and(Activation::keeps_input) && pass.is_training();
        // On the CPU the layer above rarely keeps the activation's output: see `computed_again`.
        let y = if keeps_pre_activation && x.device() == Device::Cpu {
            pass.take_brief(&shape)?
        } else {
            pass.take(&shape)?
        };
        let pre_activation = keeps_pre_activation
            .then(|| pass.take(&shape))
            .transpose()?;
        let weight = pass.value(weight)?;
        ops::linear_into(&y, &rows, weight, bias, self.above, pre_activation.as_ref())?;
        if let Some(adapters) = &self.adapters {
            adapters.add_outputs(pass, &y, x)?;
        }
        if pass.is_training() {
            if self.needs_input(pass) && self.computed_again(&rows).is_none() {
                pass.save(&rows);
            }
            if self.above.is_some() {
                pass.save(pre_activation.as_ref().unwrap_or(&y));
            }
        }
        with_last_of(&y, x, self.outputs)
    }

    /// Whether backward needs the input: only if the weight or the bias is trained.
    fn needs_input(&self, pass: &Pass<'_>) -> bool {
        let Built { weight, bias, .. } = self.built();
        pass.trains(weight) || bias.is_some_and(|bias| pass.trains(bias))
    }

    /// The activation below, if backward recomputes this layer's input with it: the activation's
    /// own input is kept anyway, so this layer's need not be. Only on the CPU, where that costs
    /// little and gives the same bits.
    fn computed_again(&self, on_its_device: &Tensor) -> Option<Activation> {
        let is_again = |it: &Activation| it.keeps_input() && on_its_device.device() == Device::Cpu;
        self.below.filter(is_again)
    }

    /// dw = dyᵀ·x and db = Σ rows of dy, for `x` (B, I) and `dy` (B, O).
    fn write_gradients(&self, pass: &mut Pass<'_>, dy: &Tensor, x: &Tensor) -> Result<()> {
        let built = self.built();
        let dw = pass.gradient(built.weight);
        let db = built.bias.and_then(|bias| pass.gradient(bias));
        // One operation adds to both or replaces both. If a tied weight was already used above, it
        // is added to but the bias is replaced: the bias then starts at zero.
        let accumulate = dw.as_ref().is_some_and(|dw| dw.accumulate)
            || db.as_ref().is_some_and(|db| db.accumulate);
        for gradient in [&dw, &db].into_iter().flatten() {
            if accumulate && !gradient.accumulate {
                ops::zero(gradient.tensor)?;
            }
        }
        let mut db = db.map(|db| db.tensor);
        let mut sums = pass.row_sums_of(dy);
        if sums.is_none() && db.is_some() {
            sums = pass.sum_row_blocks(dy)?;
        }
        if let Some(sums) = sums
            && let Some(db) = db.take()
        {
            ops::add_row_sums_into(db, &sums, accumulate)?;
        }
        match dw {
            Some(dw) => ops::linear_backward_weight_into(dw.tensor, db, dy, x, accumulate)?,
            None if db.is_some() => {
                // Only the weight is frozen, which is rare: its gradient is computed and dropped.
                let unused = pass.take(&[self.outputs, built.inputs])?;
                ops::linear_backward_weight_into(&unused, db, dy, x, accumulate)?;
            }
            None => {}
        }
        Ok(())
    }
}

impl Layer for Linear {
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
        let inputs = shape.last().copied().unwrap_or(0);
        if inputs == 0 || self.outputs == 0 {
            return Err(build.refuse(
                "at least one input and one output",
                format!("rows of shape {shape:?} and {} outputs", self.outputs),
                "a linear layer works on the last dimension of a row: [inputs]",
            ));
        }
        let bound = 1.0 / (inputs as f64).sqrt();
        let [init, bias_init] = self.init.unwrap_or([Init::Uniform { bound }; 2]);
        let weight = match &self.tie {
            Some(tie) => build.tied_parameter(tie, "weight", &[self.outputs, inputs], init)?,
            None => build.parameter("weight", &[self.outputs, inputs], init)?,
        };
        if !self.is_outer {
            build.hidden_matrices(weight, &self.parts);
        }
        let bias = self
            .has_bias
            .then(|| build.parameter("bias", &[self.outputs], bias_init))
            .transpose()?;
        // A tied weight may belong to other layers, too.
        self.adapters = if self.is_outer || self.tie.is_some() {
            None
        } else {
            Adapters::build(build, inputs, &self.parts)?
        };
        self.built = Some(Built {
            inputs,
            weight,
            bias,
        });
        (self.above, self.below) = (None, None);
        self.name = build.path().to_string();
        Ok([&shape[..shape.len() - 1], &[self.outputs]].concat())
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        let bias = self.built().bias;
        let bias = bias.map(|bias| pass.value(bias)).transpose()?;
        self.forward_with(pass, x, bias)
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>> {
        let built = self.built();
        let (inputs, weight) = (built.inputs, built.weight);
        let dy_rows = dy.reshape(&[dy.count() / self.outputs, self.outputs])?;
        if self.needs_input(pass) {
            let x = match self.computed_again(dy) {
                Some(activation) => {
                    let z = pass.top().reshape(&[dy_rows.shape()[0], inputs])?;
                    let x = pass.take_brief(z.shape())?;
                    ops::activate_into(&x, &z, activation)?;
                    x
                }
                None => pass.restore(),
            };
            self.write_gradients(pass, &dy_rows, &x)?;
        }
        let adapters = self.adapters.as_ref();
        let of_adapters = adapters.map(|it| it.write_gradients(pass, &dy_rows));
        let of_adapters = adapters.zip(of_adapters.transpose()?);
        // Before the gradient of the input, so that these are reduced while it is computed.
        built.bias.map_or(Ok(()), |bias| pass.finished(bias))?;
        pass.finished(weight)?;
        if !pass.needs_input_gradient() {
            return Ok(None);
        }
        let shape = [dy_rows.shape()[0], inputs];
        let dx = match self.computed_again(dy) {
            // Where the input was.
            Some(_) => pass.take_brief(&shape)?,
            None => pass.take(&shape)?,
        };
        // The activation's own backward takes what it needs off the stack.
        let saved = self.below.map(|_| pass.top().reshape(&shape));
        let saved = saved.transpose()?;
        let row_sums = self.below.map(|_| pass.take_row_sums(&dx));
        let row_sums = row_sums.transpose()?.flatten();
        let below = self.below.zip(saved.as_ref());
        let weight = pass.value(weight)?;
        ops::linear_backward_input_summed_into(&dx, row_sums.as_ref(), &dy_rows, weight, below)?;
        if let Some((adapters, dmixed)) = of_adapters {
            adapters.add_input_gradient(pass, &dx, &dmixed, dy)?;
        }
        Ok(Some(with_last_of(&dx, dy, inputs)?))
    }
}
