//! Layers without parameters. Activations: in a `Sequential` a linear layer below applies them, and
//! a linear layer above multiplies their derivative into its own backward. SwiGLU is always a
//! separate layer. Dropout: which elements are dropped depends on the seed, the layer, the step and
//! the row's position in the global batch, and not on the number of ranks or on micro-batches.

use ddp_kernels::Tensor;
use ddp_kernels::ops::{self, Activation, Chain, DropoutKey, Function, Step, View};

use crate::build::Build;
use crate::error::Result;
use crate::layer::Layer;
use crate::pass::{Pass, with_last_of};

/// An activation, applied to each element.
#[derive(Debug)]
pub struct Activate {
    pub(crate) activation: Activation,
    /// Whether the linear layer below applies it.
    pub(crate) is_applied: bool,
    /// Whether the linear layer above multiplies its derivative in.
    pub(crate) is_derived: bool,
}

impl Activate {
    /// Applies `activation`.
    pub fn new(activation: Activation) -> Activate {
        Activate {
            activation,
            is_applied: false,
            is_derived: false,
        }
    }

    /// max(z, 0)
    pub fn relu() -> Activate {
        Activate::new(Activation::Relu)
    }

    /// z·Φ(z), as `torch.nn.GELU()`.
    pub fn gelu() -> Activate {
        Activate::new(Activation::Gelu)
    }

    /// GELU by tanh, as `torch.nn.GELU("tanh")` and GPT-2.
    pub fn gelu_tanh() -> Activate {
        Activate::new(Activation::GeluTanh)
    }
}

impl Layer for Activate {
    fn build(&mut self, _: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
        (self.is_applied, self.is_derived) = (false, false);
        Ok(shape.to_vec())
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        if self.is_applied {
            return Ok(x.clone());
        }
        let y = pass.take(x.shape())?;
        ops::activate_into(&y, x, self.activation)?;
        if pass.is_training() {
            pass.save(if self.activation.keeps_input() { x } else { &y });
        }
        Ok(y)
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>> {
        // The layer below saved it if it applies the activation.
        let saved = pass.restore().reshape(dy.shape())?;
        if self.is_derived {
            return Ok(Some(dy.clone()));
        }
        let dx = pass.take(dy.shape())?;
        ops::activate_backward_into(&dx, dy, &saved, self.activation)?;
        Ok(Some(dx))
    }
}

/// silu(gate)·up, of (…, 2·H): the first half of the columns is the gate. Letters: H columns of the
/// output.
#[derive(Clone, Copy, Debug)]
pub struct Swiglu;

impl Layer for Swiglu {
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
        let mut shape = shape.to_vec();
        let Some(columns) = shape.last_mut().filter(|columns| columns.is_multiple_of(2)) else {
            return Err(build.refuse(
                "an even number of columns: gate and up",
                format!("rows of shape {shape:?}"),
                "make both with one linear layer",
            ));
        };
        *columns /= 2;
        Ok(shape)
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        let (rows, columns) = rows(x)?;
        let y = pass.take(&[rows.shape()[0], columns / 2])?;
        ops::swiglu_into(&y, &rows)?;
        if pass.is_training() {
            pass.save(&rows);
        }
        with_last_of(&y, x, columns / 2)
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>> {
        let x = pass.restore();
        let (dy_rows, _) = rows(dy)?;
        let dx = pass.take(x.shape())?;
        ops::swiglu_backward_into(&dx, &dy_rows, &x)?;
        Ok(Some(with_last_of(&dx, dy, x.shape()[1])?))
    }
}

/// gelu(gate)·up, approximated with tanh, of (…, 2·H): as [`Swiglu`] with another function.
#[derive(Clone, Copy, Debug)]
pub struct Geglu;

impl Geglu {
    /// Writes what `steps` compute to the columns of `out` (R, …) from the one with this number on.
    /// They load gate and up, the halves of a row of `x` (R, 2·H), then dy (R, H), if there is one.
    fn run(
        [out, x]: [&Tensor; 2],
        dy: Option<&Tensor>,
        column: usize,
        steps: &[Step],
    ) -> Result<()> {
        let [rows, columns] = [x.shape()[0], x.shape()[1] / 2];
        let view = |of: &Tensor, offset| View {
            offset,
            strides: vec![of.shape()[1], 1],
        };
        let mut loads = vec![view(x, 0), view(x, columns)];
        loads.extend(dy.map(|dy| view(dy, 0)));
        // Without dy, the gate is loaded in its place, and not used.
        let load = |number| Step::Load(number);
        let last = loads.len() - 1;
        let steps = [&[load(0), load(1), load(last)], steps].concat();
        let views = [loads, vec![view(out, column)]];
        let chain = Chain::new("geglu", &[rows, columns], 0, steps, views)?;
        let inputs: Vec<&Tensor> = [x, x].into_iter().chain(dy).collect();
        Ok(ops::chain_into(&chain, &[out], &inputs)?)
    }
}

impl Layer for Geglu {
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
        Swiglu.build(build, shape)
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        use Function::{GeluTanh, Mul};
        let (rows, columns) = rows(x)?;
        let y = pass.take(&[rows.shape()[0], columns / 2])?;
        let steps = [
            Step::Apply(GeluTanh, [0; 3]),
            Step::Apply(Mul, [3, 1, 0]),
            Step::Store(0, 4),
        ];
        Geglu::run([&y, &rows], None, 0, &steps)?;
        if pass.is_training() {
            pass.save(&rows);
        }
        with_last_of(&y, x, columns / 2)
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>> {
        use Function::{GeluTanh, GeluTanhSlope, Mul};
        let x = pass.restore();
        let (dy_rows, columns) = rows(dy)?;
        let dx = pass.take(x.shape())?;
        let of_gate = [
            Step::Apply(GeluTanhSlope, [0; 3]),
            Step::Apply(Mul, [2, 1, 0]),
            Step::Apply(Mul, [4, 3, 0]),
            Step::Store(0, 5),
        ];
        let of_up = [
            Step::Apply(GeluTanh, [0; 3]),
            Step::Apply(Mul, [2, 3, 0]),
            Step::Store(0, 4),
        ];
        Geglu::run([&dx, &x], Some(&dy_rows), 0, &of_gate)?;
        Geglu::run([&dx, &x], Some(&dy_rows), columns, &of_up)?;
        Ok(Some(with_last_of(&dx, dy, x.shape()[1])?))
    }
}

/// `x` (…, C) as (R, C), and C.
fn rows(x: &Tensor) -> Result<(Tensor, usize)> {
    let columns = x.shape()[x.shape().rank() - 1];
    Ok((x.reshape(&[x.count() / columns, columns])?, columns))
}

/// In training, zeroes each element with a probability and scales up the others; otherwise returns
/// its input.
#[derive(Debug)]
pub struct Dropout {
    probability: f64,
    /// Its number among the model's layers that draw random numbers.
    number: u32,
}

impl Dropout {
    /// Drops with this probability, at least 0 and less than 1.
    pub fn new(probability: f64) -> Dropout {
        Dropout {
            probability,
            number: 0,
        }
    }

    pub(crate) fn drops(&self, pass: &Pass<'_>) -> bool {
        pass.is_training() && self.probability > 0.0
    }

    /// Forward and backward are the same operation. Nothing is saved: the same random numbers are
    /// drawn again.
    pub(crate) fn apply(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        let out = pass.take(x.shape())?;
        let key = DropoutKey {
            seed: pass.seed(),
            layer: self.number,
            position: pass.position(),
        };
        ops::dropout_into(&out, x, self.probability, &key)?;
        Ok(out)
    }
}

impl Layer for Dropout {
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
        if !(0.0..1.0).contains(&self.probability) {
            return Err(build.refuse(
                "a dropout probability of at least 0 and less than 1",
                self.probability.to_string(),
                "use 0 to drop nothing",
            ));
        }
        self.number = build.random_layer();
        Ok(shape.to_vec())
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        if self.drops(pass) {
            self.apply(pass, x)
        } else {
            Ok(x.clone())
        }
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>> {
        // The same elements: a mask is its own derivative.
        self.forward(pass, dy).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use ddp_kernels::{DType, Device, Tensor};

    use crate::models::Model;
    use crate::{Dropout, Pass, PassOptions, Saved, Scratch, Sequential};

    #[test]
    fn each_layer_drops_other_elements() {
        let layers = Sequential::new().then(Dropout::new(0.5));
        let layers = Box::new(layers.then(Dropout::new(0.5)));
        let model = Model::new(layers, &[64], DType::F32, Device::Cpu, 1, &|_| false).unwrap();
        let (mut scratch, mut saved) = (Scratch::new(Device::Cpu), Saved::default());
        let position = Tensor::from_slice(&[1i64, 0], &[2], Device::Cpu).unwrap();
        let options = PassOptions {
            training: true,
            accumulate: false,
            last: true,
            seed: 4,
            position: &position,
        };
        let mut ready = |_| Ok(());
        let mut pass = Pass::new(&model.params, &mut scratch, &mut saved, options, &mut ready);
        let x = Tensor::ones(&[16, 64], DType::F32, Device::Cpu).unwrap();
        let y = model.forward(&mut pass, &x).unwrap();
        // A quarter of 1,024, within six standard deviations of 14.
        let kept = y
            .to_vec::<f32>()
            .unwrap()
            .iter()
            .filter(|&&y| y > 0.0)
            .count();
        assert!((172..340).contains(&kept), "{kept} kept by both");
    }
}
