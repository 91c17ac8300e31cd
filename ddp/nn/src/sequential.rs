//! Sequential: layers in a row. A linear layer applies the activation above it and multiplies the
//! derivative of the one below it into its own backward, a residual applies the norm above it, and
//! nothing is computed below the lowest trained layer.

use std::any::Any;
use std::ops::Range;

use ddp_kernels::ops::Activation;
use ddp_kernels::{DType, Tensor};

use crate::activate::Activate;
use crate::build::{Build, UseIndex};
use crate::error::Result;
use crate::layer::{Layer, described};
use crate::linear::Linear;
use crate::norm::Normalize;
use crate::observe::observe;
use crate::pass::Pass;
use crate::residual::Residual;

/// Layers one after the other, called "0", "1" and so on, as in `torch.nn.Sequential`, unless they
/// have names. Letters: L layers.
#[derive(Debug, Default)]
pub struct Sequential {
    layers: Vec<Box<dyn Layer>>,
    /// (L + 1), once built: where in the model each layer begins, and where the last one ends.
    pub(crate) begins: Vec<UseIndex>,
    /// (L + 1), once built: how many layers that draw random numbers come before each.
    random_before: Vec<u32>,
    /// (L), the name of each layer. The numbers of a split model's upper parts do not start at 0.
    names: Vec<String>,
    /// (L), once built: the names within the whole model.
    paths: Vec<String>,
    /// The number of the next layer without a name.
    next: usize,
    /// How many layers that draw random numbers the parts below this one have.
    random_below: u32,
    /// Names of tied parameters that the parts below this one declare.
    lent: Vec<String>,
}

impl Sequential {
    /// No layers: returns its input.
    pub fn new() -> Sequential {
        Sequential::default()
    }

    /// Adds a layer at the end.
    pub fn then(mut self, layer: impl Layer + 'static) -> Sequential {
        self.push(Box::new(layer));
        self
    }

    /// Adds a boxed layer at the end.
    pub fn push(&mut self, layer: Box<dyn Layer>) {
        let name = self.next.to_string();
        self.next += 1;
        self.push_named(&name, layer);
    }

    /// Adds a layer under the number of the one below it: the names of the layers above are those
    /// that they have without it.
    pub fn push_unnumbered(&mut self, layer: Box<dyn Layer>) {
        let name = self.next.saturating_sub(1).to_string();
        self.push_named(&name, layer);
    }

    /// Adds a layer with this name instead of a number. It may have dots: `blocks.0`.
    pub(crate) fn push_named(&mut self, name: &str, layer: Box<dyn Layer>) {
        self.names.push(name.to_string());
        self.layers.push(layer);
    }

    /// As `push_named`, by value.
    pub fn named(mut self, name: &str, layer: impl Layer + 'static) -> Sequential {
        self.push_named(name, Box::new(layer));
        self
    }

    /// The last layer.
    pub(crate) fn last(&self) -> Option<&dyn Layer> {
        self.layers.last().map(|last| &**last)
    }

    /// Cuts the built layers into consecutive parts that cover them. Layers keep their names and
    /// their numbers for drawing. `lent` tells the names of the tied parameters that are declared
    /// before a point of the model.
    pub(crate) fn cut(
        mut self,
        parts: &[Range<usize>],
        lent: impl Fn(UseIndex) -> Vec<String>,
    ) -> Vec<Sequential> {
        assert_eq!(
            parts.last().map(|part| part.end),
            Some(self.layers.len()),
            "parts that cover all layers"
        );
        let mut all: Vec<Sequential> = Vec::with_capacity(parts.len());
        for part in parts.iter().rev() {
            all.push(Sequential {
                layers: self.layers.split_off(part.start),
                names: self.names.split_off(part.start),
                random_below: self.random_before[part.start],
                lent: lent(self.begins[part.start]),
                ..Sequential::new()
            });
        }
        all.reverse();
        all
    }
}

/// Lets built neighbours share passes over memory. Their bits stay those of each alone.
fn fuse(below: &mut dyn Any, above: &mut dyn Any) {
    if let Some(activate) = above.downcast_mut::<Activate>() {
        if let Some(linear) = below.downcast_mut::<Linear>()
            && activate.activation != Activation::Identity
        {
            (linear.above, activate.is_applied) = (activate.activation, true);
        }
    } else if let Some(linear) = above.downcast_mut::<Linear>() {
        if let Some(activate) = below.downcast_mut::<Activate>() {
            (linear.below, activate.is_derived) = (activate.activation, true);
        }
    } else if let Some(residual) = below.downcast_mut::<Residual>() {
        residual.above = match above.downcast_ref::<Residual>() {
            Some(above) => above.norm.clone(),
            None => above.downcast_ref::<Normalize>().cloned(),
        };
    }
}

impl Layer for Sequential {
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
        self.begins.clear();
        self.random_before.clear();
        self.paths.clear();
        build.skip_random_layers(self.random_below);
        build.borrow_from_below(&self.lent);
        let mut shape = shape.to_vec();
        for (index, layer) in self.layers.iter_mut().enumerate() {
            self.begins.push(build.use_index());
            self.random_before.push(build.random_layers());
            shape = build.scope(&self.names[index], |build| {
                self.paths.push(build.path().to_string());
                layer.build(build, &shape)
            })?;
        }
        self.begins.push(build.use_index());
        self.random_before.push(build.random_layers());
        for above in 1..self.layers.len() {
            let (below, above) = self.layers.split_at_mut(above);
            let below = below.last_mut().expect("one is below");
            fuse(&mut **below, &mut *above[0]);
        }
        Ok(shape)
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        if pass.is_training() {
            pass.mark();
        }
        let mut y = x.clone();
        for (layer, path) in self.layers.iter().zip(&self.paths) {
            y = layer.forward(pass, &y)?;
            observe(|| format!("forward of {}", described(path, &**layer)), &y)?;
        }
        Ok(y)
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>> {
        let of_all = pass.needs_input_gradient();
        let mut gradient = Some(dy.clone());
        let places = self.begins.iter().zip(&self.paths);
        for (layer, (&begin, path)) in self.layers.iter().zip(places).rev() {
            let Some(dy) = gradient.take() else { break };
            let is_needed = of_all || pass.trains_between(self.begins[0], begin);
            gradient = pass.input_gradient(is_needed, |pass| layer.backward(pass, &dy))?;
            if let Some(gradient) = &gradient {
                observe(
                    || format!("backward of {}", described(path, &**layer)),
                    gradient,
                )?;
            }
        }
        let left = pass.rewind();
        assert!(
            left == 0 || gradient.is_none(),
            "{left} tensors that layers saved in forward were not restored in backward"
        );
        Ok(gradient)
    }

    fn input_dtype(&self) -> Option<DType> {
        self.layers.first().and_then(|first| first.input_dtype())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A layer that its neighbours do not know.
    #[derive(Debug)]
    struct Apart(Box<dyn Layer>);

    impl Layer for Apart {
        fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
            self.0.build(build, shape)
        }
        fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
            self.0.forward(pass, x)
        }
        fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>> {
            self.0.backward(pass, dy)
        }
        fn input_dtype(&self) -> Option<DType> {
            self.0.input_dtype()
        }
    }

    impl Sequential {
        /// The same layers, each alone.
        pub(crate) fn without_fusing(mut self) -> Sequential {
            let apart = |layer| Box::new(Apart(layer)) as Box<dyn Layer>;
            self.layers = self.layers.into_iter().map(apart).collect();
            self
        }
    }
}
