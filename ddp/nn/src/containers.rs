//! Layers made of layers.
//!
//! Sequential: layers in a row. A linear layer applies the activation above it and multiplies the
//! derivative of the one below it into its own backward, a residual applies the norm above it, and
//! nothing is computed below the lowest trained layer.
//!
//! Residual: y = x + inner(x), or y = x + inner(norm(x)). In a `Sequential`, a residual with a norm
//! and what comes above it share passes over memory: the sum and the norm of the layer above are
//! one operation, as are the norm's backward and the sum of both gradients.
//!
//! Recompute: trades time for memory. What layers save between forward and backward is dropped, and
//! backward runs their forward again. The bits are the same, since random numbers depend on layer,
//! step and row alone.

use std::any::Any;
use std::ops::Range;

use ddp_kernels::ops;
use ddp_kernels::{DType, Tensor};

use crate::activate::Activate;
use crate::build::{Build, Lora, UseIndex};
use crate::error::Result;
use crate::layer::{Layer, described};
use crate::linear::Linear;
use crate::norm::Normalize;
use crate::pass::{Pass, observe};

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
    /// The adapters of its linear layers.
    lora: Option<Lora>,
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

    /// Adds a layer with the number of the one below it, so that it does not change the names of
    /// the layers above.
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

    /// The same layers, whose linear ones have adapters.
    pub fn adapted(mut self, lora: Lora) -> Sequential {
        self.lora = Some(lora);
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
                lora: self.lora.clone(),
                ..Sequential::new()
            });
        }
        all.reverse();
        all
    }
}

/// A linear layer that may apply an activation: adapters add to its output before that.
fn unadapted(layer: &mut dyn Any) -> Option<&mut Linear> {
    let linear = layer.downcast_mut::<Linear>();
    linear.filter(|linear| linear.adapters.is_none())
}

/// Lets built neighbours share passes over memory. Their bits stay those of each alone.
fn fuse(below: &mut dyn Any, above: &mut dyn Any) {
    if let Some(activate) = above.downcast_mut::<Activate>() {
        if let Some(linear) = unadapted(below) {
            (linear.above, activate.is_applied) = (Some(activate.activation), true);
        }
    } else if let Some(linear) = unadapted(above) {
        if let Some(activate) = below.downcast_mut::<Activate>() {
            (linear.below, activate.is_derived) = (Some(activate.activation), true);
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
        build.adapt(&self.lora);
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

/// Keeps only the input of the inner layer, whose names do not mention this one.
#[derive(Debug)]
pub struct Recompute {
    inner: Box<dyn Layer>,
}

impl Recompute {
    /// The same layer as `inner`, with less memory and one more forward.
    pub fn new(inner: impl Layer + 'static) -> Recompute {
        Recompute {
            inner: Box::new(inner),
        }
    }
}

impl Layer for Recompute {
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
        self.inner.build(build, shape)
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        if !pass.is_training() {
            return self.inner.forward(pass, x);
        }
        pass.save(x);
        pass.without_saving(|pass| pass.apart(|pass| self.inner.forward(pass, x)))
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>> {
        let x = pass.restore();
        pass.apart(|pass| self.inner.forward(pass, &x))?;
        self.inner.backward(pass, dy)
    }

    fn input_dtype(&self) -> Option<DType> {
        self.inner.input_dtype()
    }
}

#[cfg(test)]
mod tests;
