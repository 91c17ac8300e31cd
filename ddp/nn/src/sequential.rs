//! Sequential: layers in a row. A linear layer applies the activation above it, a layer
//! multiplies the derivative of the activation below it into its own backward, a residual applies
//! the norm above it, and nothing is computed below the lowest trained layer.

use std::ops::Range;

use ddp_kernels::ops::Activation;
use ddp_kernels::{DType, Tensor};

use crate::build::{Build, UseIndex};
use crate::error::Result;
use crate::fold::{Fold, Folded};
use crate::layer::{Layer, Normed};
use crate::loss::LossHead;
use crate::pass::Pass;

/// Layers one after the other, called "0", "1" and so on, as in `torch.nn.Sequential`, unless they
/// have names. Letters: L layers.
#[derive(Debug)]
pub struct Sequential {
    layers: Vec<Box<dyn Layer>>,
    /// (L + 1), once built: where in the model each layer begins, and where the last one ends.
    begins: Vec<UseIndex>,
    /// (L + 1), once built: how many layers that draw random numbers come before each.
    random_before: Vec<u32>,
    fuses: bool,
    /// (L), the name of each layer. The numbers of a split model's upper parts do not start at 0.
    names: Vec<String>,
    /// The number of the next layer without a name.
    next: usize,
    /// How many layers that draw random numbers the parts below this one have.
    random_below: u32,
    /// Names of tied parameters that the parts below this one declare.
    lent: Vec<String>,
}

impl Default for Sequential {
    fn default() -> Sequential {
        Sequential::new()
    }
}

impl Sequential {
    /// No layers: returns its input.
    pub fn new() -> Sequential {
        Sequential {
            layers: Vec::new(),
            begins: Vec::new(),
            random_before: Vec::new(),
            fuses: true,
            names: Vec::new(),
            next: 0,
            random_below: 0,
            lent: Vec::new(),
        }
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
    pub fn push_named(&mut self, name: &str, layer: Box<dyn Layer>) {
        self.names.push(name.to_string());
        self.layers.push(layer);
    }

    /// As `push_named`, by value.
    pub fn named(mut self, name: &str, layer: impl Layer + 'static) -> Sequential {
        self.push_named(name, Box::new(layer));
        self
    }

    /// The same layers without fusing activations and norms, for comparisons.
    pub fn without_fusing(self) -> Sequential {
        Sequential {
            fuses: false,
            ..self
        }
    }

    /// (L + 1), once built: where in the model each layer begins, and where the last one ends.
    pub(crate) fn begins(&self) -> &[UseIndex] {
        &self.begins
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
                fuses: self.fuses,
                ..Sequential::new()
            });
        }
        all.reverse();
        all
    }

    /// What to ask of layer `index` in backward, if the whole was asked for `fold`.
    fn fold_of(&self, index: usize, pass: &Pass<'_>, fold: Fold) -> Fold {
        let Some(below) = index.checked_sub(1) else {
            return fold;
        };
        if fold == Fold::Nothing && !pass.trains_between(self.begins[0], self.begins[index]) {
            return Fold::Nothing;
        }
        match self.layers[below].activation() {
            Some(activation) if self.fuses => Fold::Activation(activation),
            _ => Fold::Input,
        }
    }
}

impl Layer for Sequential {
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
        for above in 1..self.layers.len() {
            let (lower, upper) = self.layers.split_at_mut(above);
            if let Some(activation) = upper[0].activation()
                && self.fuses
                && lower[above - 1].fuse(activation)
            {
                upper[0].set_fused();
            }
        }
        let mut below = None;
        for layer in &mut self.layers {
            layer.set_below(below.filter(|_| self.fuses));
            below = layer.activation();
        }
        self.begins.clear();
        self.random_before.clear();
        build.skip_random_layers(self.random_below);
        build.borrow_from_below(&self.lent);
        let mut shape = shape.to_vec();
        for (index, layer) in self.layers.iter_mut().enumerate() {
            self.begins.push(build.use_index());
            self.random_before.push(build.random_layers());
            shape = build.scope(&self.names[index], |build| layer.build(build, &shape))?;
        }
        self.begins.push(build.use_index());
        self.random_before.push(build.random_layers());
        Ok(shape)
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        if pass.is_training() {
            pass.mark();
        }
        let mut y = Normed::plain(x);
        for (index, layer) in self.layers.iter().enumerate() {
            let above = self.layers.get(index + 1).and_then(|above| above.norm());
            y = layer.forward_normed(pass, y, above.filter(|_| self.fuses))?;
        }
        Ok(y.x)
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor, fold: Fold) -> Result<Folded> {
        let mut gradient = Folded::plain(dy.clone());
        for (index, layer) in self.layers.iter().enumerate().rev() {
            let Some(dy) = gradient.gradient.take() else {
                break;
            };
            if gradient.folded {
                // The layer above has multiplied this activation's derivative in.
                pass.restore();
                gradient = Folded::plain(dy);
            } else {
                gradient = layer.backward(pass, &dy, self.fold_of(index, pass, fold))?;
            }
        }
        let left = pass.rewind();
        assert!(
            left == 0 || gradient.gradient.is_none(),
            "{left} tensors that layers saved in forward were not restored in backward"
        );
        Ok(if fold == Fold::Nothing {
            Folded::nothing()
        } else {
            gradient
        })
    }

    fn input_dtype(&self) -> Option<DType> {
        self.layers.first().and_then(|first| first.input_dtype())
    }

    fn head(&self) -> Option<&dyn LossHead> {
        self.layers.last().and_then(|last| last.head())
    }

    fn fuse(&mut self, above: Activation) -> bool {
        self.fuses && self.layers.last_mut().is_some_and(|last| last.fuse(above))
    }
}
