//! Dropout, by sample and step: which elements are dropped follows from the seed, the layer, the step and the sample's
//! number in the global batch, so any number of ranks and any cut into micro-batches drops the same ones.

use ddp_kernels::Tensor;
use ddp_kernels::ops::{self, DropoutKey};

use crate::error::{Error, Result};
use crate::nn::build::Build;
use crate::nn::layer::{Fold, Folded, Layer};
use crate::nn::pass::Pass;

/// In training, zeroes each element with a probability and scales up the rest; otherwise passes its input on.
#[derive(Debug)]
pub struct Dropout {
    probability: f64,
    /// Among the layers of the model that draw.
    number: u32,
}

impl Dropout {
    /// A layer that drops with this probability, 0 up to but not 1.
    pub fn new(probability: f64) -> Dropout {
        Dropout { probability, number: 0 }
    }

    fn drops(&self, pass: &Pass<'_>) -> bool {
        pass.is_training() && self.probability > 0.0
    }

    /// Forward and backward are one operation: nothing need be saved to drop the same elements again.
    fn apply(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        let out = pass.take(x.shape())?;
        let key = DropoutKey { seed: pass.seed(), layer: self.number, position: pass.position() };
        ops::dropout_into(&out, x, self.probability, &key)?;
        Ok(out)
    }
}

impl Layer for Dropout {
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
        if !(0.0..1.0).contains(&self.probability) {
            return Err(Error::Model {
                layer: build.path().to_string(),
                expected: "a probability of dropping from 0 up to but not 1".into(),
                got: self.probability.to_string(),
                way_out: "Leave the layer out (or use 0) to drop nothing.".into(),
            });
        }
        self.number = build.drawing_number();
        Ok(shape.to_vec())
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        if self.drops(pass) { self.apply(pass, x) } else { Ok(x.clone()) }
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor, fold: Fold) -> Result<Folded> {
        if fold == Fold::Nothing {
            return Ok(Folded::nothing());
        }
        if !self.drops(pass) {
            return Ok(Folded::plain(dy.clone()));
        }
        let dx = self.apply(pass, dy)?;
        pass.fold(dx, fold)
    }
}
