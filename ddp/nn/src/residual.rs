//! Residual: y = x + inner(x), or y = x + inner(norm(x)).
//!
//! In a `Sequential`, a residual with a norm and what comes above it share passes over memory: the
//! sum and the norm of the layer above are one operation, as are the norm's backward and the sum of
//! both gradients.

use ddp_kernels::{Tensor, ops};

use crate::build::Build;
use crate::error::Result;
use crate::layer::{Layer, described};
use crate::norm::Normalize;
use crate::observe::observe;
use crate::pass::Pass;

/// Adds its input to the output of the inner layer, whose names do not mention the residual.
#[derive(Debug)]
pub struct Residual {
    pub(crate) norm: Option<Normalize>,
    norm_path: String,
    inner: Box<dyn Layer>,
    /// The norm with which the layer above begins: this layer computes it.
    pub(crate) above: Option<Normalize>,
}

impl Residual {
    /// A residual around `inner`, whose output must have the shape of its input.
    pub fn new(inner: impl Layer + 'static) -> Residual {
        Residual {
            norm: None,
            norm_path: String::new(),
            inner: Box::new(inner),
            above: None,
        }
    }

    /// The same residual, whose inner layer gets the norm of the input. It is called "norm".
    pub fn after(mut self, norm: Normalize) -> Residual {
        self.norm = Some(norm);
        self
    }
}

impl Layer for Residual {
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
        if let Some(norm) = &mut self.norm {
            build.scope("norm", |build| {
                self.norm_path = build.path().to_string();
                norm.build(build, shape)
            })?;
        }
        self.above = None;
        let output = self.inner.build(build, shape)?;
        if output != shape {
            return Err(build.refuse(
                format!("an inner layer whose output has the input's shape {shape:?}"),
                format!("{output:?}"),
                "end it with a linear layer of as many outputs as inputs",
            ));
        }
        Ok(output)
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        let input = match &self.norm {
            Some(norm) => {
                let normed = norm.forward(pass, x)?;
                let name = || format!("forward of {}", described(&self.norm_path, norm));
                observe(name, &normed)?;
                normed
            }
            None => x.clone(),
        };
        let inner = self.inner.forward(pass, &input)?;
        drop(input);
        if let Some(above) = &self.above {
            return above.forward_sum(pass, x, &inner);
        }
        let y = pass.take(x.shape())?;
        ops::add_into(&y, x, &inner)?;
        Ok(y)
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>> {
        let trains_norm = self.norm.as_ref().is_some_and(|norm| norm.trains(pass));
        let is_needed = pass.needs_input_gradient() || trains_norm;
        let inner = pass.input_gradient(is_needed, |pass| self.inner.backward(pass, dy))?;
        let Some(inner) = inner else { return Ok(None) };
        Ok(Some(match &self.norm {
            Some(norm) => norm.backward_sum(pass, &inner, Some(dy))?,
            None => {
                let dx = pass.take(dy.shape())?;
                ops::add_into(&dx, dy, &inner)?;
                dx
            }
        }))
    }
}

#[cfg(test)]
mod tests {
    use ddp_kernels::{DType, Device, Random};

    use super::*;
    use crate::check::DerivativeCheck;
    use crate::models::Model;
    use crate::{Linear, PassOptions, Saved, Scratch, Sequential};

    /// Residuals with norms, whose inner layers and norms are called as here, and a norm above.
    fn layers() -> Sequential {
        let residual = || Residual::new(Linear::new(4).normal(0.5)).after(Normalize::layer());
        Sequential::new()
            .named("a", residual())
            .named("b", Residual::new(Linear::new(4)))
            .named("c", residual())
            .named("d", residual())
            .named("norm", Normalize::rms())
    }

    fn output(layers: Sequential) -> Vec<f32> {
        let model = Model::new(Box::new(layers), &[4], DType::F32, Device::Cpu, 1, &|_| {
            false
        });
        let model = model.unwrap();
        let position = Tensor::from_slice(&[1i64, 0], &[2], Device::Cpu).unwrap();
        let options = PassOptions {
            training: false,
            accumulate: false,
            last: true,
            seed: 0,
            position: &position,
        };
        let (mut scratch, mut saved) = (Scratch::new(Device::Cpu), Saved::default());
        let mut ready = |_| Ok(());
        let mut pass = Pass::new(&model.params, &mut scratch, &mut saved, options, &mut ready);
        let x = Tensor::randn(&[3, 4], DType::F32, Device::Cpu, &mut Random::new(2)).unwrap();
        model.forward(&mut pass, &x).unwrap().to_vec().unwrap()
    }

    #[test]
    fn a_sum_with_the_norm_above_has_the_bits_of_both_alone() {
        assert_eq!(output(layers()), output(layers().without_fusing()));
    }

    #[test]
    fn derivatives_are_right_whatever_is_trained() {
        let frozen: [&dyn Fn(&str) -> bool; 5] = [
            &|_| false,
            // Only a norm is trained, below layers that are not.
            &|name| name != "c.norm.weight",
            &|name| name != "c.weight",
            &|name| name.contains("norm"),
            &|name| name < "d",
        ];
        for (index, frozen) in frozen.into_iter().enumerate() {
            for mut layers in [layers(), layers().without_fusing()] {
                let check = DerivativeCheck {
                    rows: 3,
                    frozen,
                    ..DerivativeCheck::new(&[4])
                };
                let worst = check.worst(&mut layers).unwrap();
                assert!(worst.error() < 1e-7, "{index}: {worst:?}");
            }
        }
    }
}
