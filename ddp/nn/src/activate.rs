//! Layers without parameters. Dropout: which elements are dropped depends on the seed, the layer,
//! the step and the row's position in the global batch, and not on the number of ranks or on
//! micro-batches.

use ddp_kernels::ops::Activation;

use crate::forward::{Module, Scope, Var};

/// An activation, applied to each element. A linear layer below applies it, and one above
/// multiplies its derivative into its own backward.
#[derive(Clone, Debug)]
pub struct Activate(Activation);

impl Activate {
    /// Applies `activation`.
    pub fn new(activation: Activation) -> Activate {
        Activate(activation)
    }
}

macro_rules! constructors {
    ($($(#[$help:meta])* $Name:ident $method:ident $flag:literal $entry:tt)*) => {
        impl Activate {
            $($(#[$help])*
            pub fn $method() -> Activate {
                Activate(Activation::$Name)
            })*
        }
    };
}
ddp_kernels::activations!(constructors);

impl Module for Activate {
    fn forward(&self, _: &mut Scope<'_>, x: &Var) -> Var {
        x.activate(self.0)
    }
}

/// In training, zeroes each element with a probability and scales up the others; otherwise returns
/// its input.
#[derive(Clone, Debug)]
pub struct Dropout(f64);

impl Dropout {
    /// Drops with this probability, at least 0 and less than 1.
    pub fn new(probability: f64) -> Dropout {
        Dropout(probability)
    }
}

impl Module for Dropout {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        m.drop_elements(x, self.0)
    }
}

impl Scope<'_> {
    /// In training, zeros with this probability, and the rest scaled up. `name` is its own.
    #[track_caller]
    pub fn dropout(&mut self, name: &str, x: &Var, probability: f64) -> Var {
        self.layer(name, x, Dropout::new(probability))
    }
}

#[cfg(test)]
mod tests {
    use ddp_kernels::{DType, Device, Tensor};

    use crate::models::Model;
    use crate::pass::tests::in_pass;
    use crate::{Dropout, Sequential};

    #[test]
    fn each_layer_drops_other_elements() {
        let layers = Sequential::new().then(Dropout::new(0.5));
        let layers = Box::new(layers.then(Dropout::new(0.5)));
        let model = Model::new(layers, &[64], DType::F32, Device::Cpu, 1, &|_| false).unwrap();
        let x = Tensor::ones(&[16, 64], DType::F32, Device::Cpu).unwrap();
        let y = in_pass(&model, true, |mut pass| model.forward(&mut pass, &x)).unwrap();
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
