//! Sequential: layers one after the other, and what that allows: the linear layer below applies an activation, the layer
//! above folds its derivative into its own backward, and nothing is computed below the lowest trained layer.

use std::ops::Range;

use ddp_kernels::Tensor;
use ddp_kernels::ops::Activation;

use crate::error::Result;
use crate::nn::build::{Build, Place};
use crate::nn::layer::{Fold, Folded, Layer};
use crate::nn::pass::Pass;

/// Layers one after the other, called "0", "1" and so on, as in `torch.nn.Sequential`.
#[derive(Debug)]
pub struct Sequential {
    layers: Vec<Box<dyn Layer>>,
    /// Where in the model each layer begins, and at the end where the last one ends.
    places: Vec<Place>,
    /// How many layers that draw had been built where each begins, and at the end.
    drawing: Vec<u32>,
    fuses: bool,
    /// What its first layer is called: not 0 if it is a part of a longer one.
    first: usize,
    /// How many layers that draw the longer one has below it.
    drawing_below: u32,
}

impl Default for Sequential {
    fn default() -> Sequential {
        Sequential::new()
    }
}

impl Sequential {
    /// No layers yet: it passes its input on.
    pub fn new() -> Sequential {
        Sequential {
            layers: Vec::new(),
            places: Vec::new(),
            drawing: Vec::new(),
            fuses: true,
            first: 0,
            drawing_below: 0,
        }
    }

    /// One more layer at the end.
    pub fn then(mut self, layer: impl Layer + 'static) -> Sequential {
        self.layers.push(Box::new(layer));
        self
    }

    /// One more layer at the end, already boxed.
    pub fn push(&mut self, layer: Box<dyn Layer>) {
        self.layers.push(layer);
    }

    /// The same layers, each on its own: nothing is fused or folded. For comparisons.
    pub fn without_fusing(self) -> Sequential {
        Sequential { fuses: false, ..self }
    }

    /// Where each layer began when this was built, by the uses of parameters, and where the last one ended.
    pub(crate) fn places(&self) -> &[Place] {
        &self.places
    }

    /// Cuts it, once built, into parts of consecutive layers that cover it. Layers keep their names and the numbers they draw by.
    pub(crate) fn cut(mut self, parts: &[Range<usize>]) -> Vec<Sequential> {
        assert_eq!(parts.last().map(|part| part.end), Some(self.layers.len()), "parts that cover all layers");
        let mut all: Vec<Sequential> = Vec::with_capacity(parts.len());
        for part in parts.iter().rev() {
            all.push(Sequential {
                layers: self.layers.split_off(part.start),
                first: self.first + part.start,
                drawing_below: self.drawing[part.start],
                fuses: self.fuses,
                ..Sequential::new()
            });
        }
        all.reverse();
        all
    }

    /// What to ask of a layer, given what this whole is asked for.
    fn fold_of(&self, index: usize, pass: &Pass<'_>, fold: Fold) -> Fold {
        let Some(below) = index.checked_sub(1) else { return fold };
        if fold == Fold::Nothing && !pass.trains_between(self.places[0], self.places[index]) {
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
        self.places.clear();
        self.drawing.clear();
        build.continue_drawing_at(self.drawing_below);
        let mut shape = shape.to_vec();
        for (index, layer) in self.layers.iter_mut().enumerate() {
            self.places.push(build.place());
            self.drawing.push(build.drawing_layers());
            shape = build.scope(&(self.first + index).to_string(), |build| layer.build(build, &shape))?;
        }
        self.places.push(build.place());
        self.drawing.push(build.drawing_layers());
        Ok(shape)
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        if pass.is_training() {
            pass.mark();
        }
        let mut y = x.clone();
        for layer in &self.layers {
            y = layer.forward(pass, &y)?;
        }
        Ok(y)
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor, fold: Fold) -> Result<Folded> {
        let mut gradient = Folded::plain(dy.clone());
        for (index, layer) in self.layers.iter().enumerate().rev() {
            let Some(dy) = gradient.gradient.take() else { break };
            if gradient.folded {
                // The layer above has seen to this activation: only what it saved is left.
                pass.restore();
                gradient = Folded::plain(dy);
            } else {
                gradient = layer.backward(pass, &dy, self.fold_of(index, pass, fold))?;
            }
        }
        let left = pass.rewind();
        assert!(
            left == 0 || gradient.gradient.is_none(),
            "{left} tensors that layers saved in forward were not taken back in backward"
        );
        Ok(if fold == Fold::Nothing { Folded::nothing() } else { gradient })
    }

    fn fuse(&mut self, above: Activation) -> bool {
        self.fuses && self.layers.last_mut().is_some_and(|last| last.fuse(above))
    }
}
