//! Models: layers with memory, ready to run; and the models that come with the project.

pub mod mlp;

pub use mlp::Mlp;

use ddp_kernels::{DType, Device, Tensor};

use crate::error::{Error, Result};
use crate::nn::{Fold, Layer, Pass};
use crate::params::Params;

/// A layer (of layers), its parameters, and the shapes of what goes in and comes out.
#[derive(Debug)]
pub struct Model {
    /// The layers.
    pub root: Box<dyn Layer>,
    /// Their parameters and buffers.
    pub params: Params,
    /// The shape of one row of the input.
    pub input_shape: Vec<usize>,
    /// The shape of one row of the output.
    pub output_shape: Vec<usize>,
}

impl Model {
    /// Builds `root` for rows of `input_shape` and gives it memory on `device`, filled from `seed`. `frozen` says by name
    /// which parameters are left as they are.
    pub fn new(
        mut root: Box<dyn Layer>,
        input_shape: &[usize],
        dtype: DType,
        device: Device,
        seed: u64,
        frozen: &dyn Fn(&str) -> bool,
    ) -> Result<Model> {
        let (params, output_shape) = Params::new(root.as_mut(), input_shape, dtype, device, seed, frozen)?;
        Ok(Model { root, params, input_shape: input_shape.to_vec(), output_shape })
    }

    /// The output for `x` (B first). `pass` is one over this model's parameters.
    pub fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        let dims = x.shape().dims();
        if dims.is_empty() || dims[1..] != self.input_shape || x.dtype() != self.params.dtype() {
            return Err(Error::Model {
                layer: "model".into(),
                expected: format!("rows of {:?} in {}, as it was built for", self.input_shape, self.params.dtype()),
                got: x.to_string(),
                way_out: "Give it [rows, …] of that shape and dtype.".into(),
            });
        }
        self.root.forward(pass, x)
    }

    /// The gradients of all trained parameters, from the gradient of the output of the forward before. The pass tells of
    /// each as it is complete.
    pub fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<()> {
        self.root.backward(pass, dy, Fold::Nothing)?;
        pass.check_complete()
    }
}
