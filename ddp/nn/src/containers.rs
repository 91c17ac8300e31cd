//! Layers made of layers: in a row, and around a sum.

use ddp_kernels::DType;

use crate::build::Lora;
use crate::forward::{Module, Scope, Var};

/// Layers one after the other, called "0", "1" and so on, as in `torch.nn.Sequential`, unless they
/// have names.
#[derive(Debug, Default)]
pub struct Sequential {
    layers: Vec<Box<dyn Module>>,
    /// The name of each layer.
    names: Vec<String>,
    /// The number of the next layer without a name.
    next: usize,
    /// The adapters of its linear layers.
    lora: Option<Lora>,
}

impl Sequential {
    /// No layers: returns its input.
    pub fn new() -> Sequential {
        Sequential::default()
    }

    /// Adds a layer at the end.
    pub fn then(mut self, layer: impl Module) -> Sequential {
        self.push(Box::new(layer));
        self
    }

    /// Adds a boxed layer at the end.
    pub fn push(&mut self, layer: Box<dyn Module>) {
        let name = self.next.to_string();
        self.next += 1;
        self.push_named(&name, layer);
    }

    /// Adds a layer with the number of the one below it, so that it does not change the names of
    /// the layers above.
    pub fn push_unnumbered(&mut self, layer: Box<dyn Module>) {
        let name = self.next.saturating_sub(1).to_string();
        self.push_named(&name, layer);
    }

    /// Adds a layer with this name instead of a number. It may have dots: `blocks.0`. Without a
    /// name the layer's own names are those of the model.
    pub(crate) fn push_named(&mut self, name: &str, layer: Box<dyn Module>) {
        self.names.push(name.to_string());
        self.layers.push(layer);
    }

    /// As `push_named`, by value.
    pub fn named(mut self, name: &str, layer: impl Module) -> Sequential {
        self.push_named(name, Box::new(layer));
        self
    }

    /// The same layers, whose linear ones have adapters.
    pub fn adapted(mut self, lora: Lora) -> Sequential {
        self.lora = Some(lora);
        self
    }
}

impl Module for Sequential {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        m.adapt(&self.lora);
        let mut y = x.clone();
        for (name, layer) in self.names.iter().zip(&self.layers) {
            y = match &**name {
                "" => layer.forward(m, &y),
                name => m.within(name, |m| layer.forward(m, &y)),
            };
        }
        y
    }

    fn input_dtype(&self) -> Option<DType> {
        self.layers.first().and_then(|first| first.input_dtype())
    }
}

/// Adds its input to the output of the inner layer, whose names do not mention the residual.
#[derive(Debug)]
pub struct Residual(Box<dyn Module>);

impl Residual {
    /// A residual around `inner`, whose output must have the shape of its input.
    pub fn new(inner: impl Module) -> Residual {
        Residual(Box::new(inner))
    }
}

impl Module for Residual {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let inner = self.0.forward(m, x);
        if inner.shape() != x.shape() {
            let expected = format!("rows of the input's shape {:?}", x.row_shape());
            let help = "end the inner layer with a linear one of as many outputs as inputs";
            return x.refuse("residual", &[&inner], &expected, help);
        }
        x + inner
    }
}

#[cfg(test)]
mod tests;
