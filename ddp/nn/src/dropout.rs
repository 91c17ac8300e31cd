//! Dropout. Which elements are dropped follows from the seed, the layer, the step and the row's
//! position in the global batch: it does not depend on the number of ranks or on micro-batches.

use ddp_kernels::Tensor;
use ddp_kernels::ops::{self, DropoutKey};

use crate::build::Build;
use crate::error::Result;
use crate::layer::Layer;
use crate::pass::Pass;

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

    fn drops(&self, pass: &Pass<'_>) -> bool {
        pass.is_training() && self.probability > 0.0
    }

    /// Forward and backward are the same operation. Nothing is saved: the same random numbers are
    /// drawn again.
    fn apply(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
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
