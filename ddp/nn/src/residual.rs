//! Residual: y = x + inner(x).

use ddp_kernels::{Tensor, ops};

use crate::build::Build;
use crate::error::{Error, Result};
use crate::fold::{Fold, Folded};
use crate::layer::Layer;
use crate::pass::Pass;

/// Adds its input to the output of the inner layer, whose names do not mention the residual.
#[derive(Debug)]
pub struct Residual {
    inner: Box<dyn Layer>,
}

impl Residual {
    /// A residual around `inner`, whose output must have the shape of its input.
    pub fn new(inner: impl Layer + 'static) -> Residual {
        Residual {
            inner: Box::new(inner),
        }
    }
}

impl Layer for Residual {
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
        let output = self.inner.build(build, shape)?;
        if output != shape {
            return Err(Error::Model {
                layer: build.path().to_string(),
                expected: format!("an inner layer whose output has the input's shape {shape:?}"),
                got: format!("{output:?}"),
                help: "end it with a linear layer of as many outputs as inputs".into(),
            });
        }
        Ok(output)
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        let inner = self.inner.forward(pass, x)?;
        let y = pass.take(x.shape())?;
        ops::add_into(&y, x, &inner)?;
        Ok(y)
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor, fold: Fold) -> Result<Folded> {
        let inner_fold = if fold == Fold::Nothing {
            Fold::Nothing
        } else {
            Fold::Input
        };
        let Some(inner) = self.inner.backward(pass, dy, inner_fold)?.gradient else {
            return Ok(Folded::nothing());
        };
        let dx = pass.take(dy.shape())?;
        ops::add_into(&dx, dy, &inner)?;
        pass.fold(dx, fold)
    }
}
