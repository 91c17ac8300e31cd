//! Models: layers with memory, ready to run; and the models that come with the project.
//!
//! Where layers compute in bf16, inputs are rounded at the model's door, and its output, logits, is bf16 as the layers between are: the last
//! product's sums are in f32 and rounded once. The loss reads that and computes in f32, and the gradient it gives is rounded once, too. It is
//! what PyTorch's autocast does, and the loss reads and writes half the bytes.

pub mod mlp;
pub mod split;

pub use mlp::Mlp;

use ddp_kernels::ops::{self, F32Math};
use ddp_kernels::{Device, Tensor};

use crate::error::{Error, Result};
use crate::nn::{Fold, Folded, Layer, Pass};
use crate::params::{Format, Params};

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
    /// How its products of f32 are computed on a GPU.
    f32_math: F32Math,
}

impl Model {
    /// Builds `root` for rows of `input_shape` and gives it memory on `device`, filled from `seed`. `format`
    /// says what it computes in: a dtype, or a [`Precision`](crate::config::Precision). `frozen` says by name which parameters are left as
    /// they are.
    pub fn new(
        root: Box<dyn Layer>,
        input_shape: &[usize],
        format: impl Into<Format>,
        device: Device,
        seed: u64,
        frozen: &dyn Fn(&str) -> bool,
    ) -> Result<Model> {
        Model::with_shares(root, input_shape, format, device, seed, frozen, 1)
    }

    /// As `new`, laid out so that `shares` ranks can share the trained part, for ZeRO-1: as many as
    /// [`ReducerOptions::shares`](crate::reducer::ReducerOptions::shares) says.
    pub fn with_shares(
        mut root: Box<dyn Layer>,
        input_shape: &[usize],
        format: impl Into<Format>,
        device: Device,
        seed: u64,
        frozen: &dyn Fn(&str) -> bool,
        shares: usize,
    ) -> Result<Model> {
        let format = format.into();
        let (params, output_shape) =
            Params::with_shares(root.as_mut(), input_shape, format, device, seed, frozen, shares)?;
        let input_shape = input_shape.to_vec();
        Ok(Model { root, params, input_shape, output_shape, f32_math: format.f32_math })
    }

    /// The output for `x` (B first), in the dtype that layers compute in. `x` may be in that or in the one of the values: then it is rounded
    /// first. `pass` is one over this model's parameters.
    pub fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        let (layers, masters) = (self.params.dtype(), self.params.master_dtype());
        let dims = x.shape().dims();
        if dims.is_empty() || dims[1..] != self.input_shape || (x.dtype() != layers && x.dtype() != masters) {
            let dtypes = if layers == masters { layers.to_string() } else { format!("{masters} or {layers}") };
            return Err(Error::Model {
                layer: "model".into(),
                expected: format!("rows of {:?} in {dtypes}, as it was built for", self.input_shape),
                got: x.to_string(),
                way_out: "Give it [rows, …] of that shape and dtype.".into(),
            });
        }
        let rounded = if x.dtype() == layers { None } else { Some(pass.take(x.shape())?) };
        if let Some(rounded) = &rounded {
            ops::cast_into(rounded, x)?;
        }
        ops::with_f32_math(self.f32_math, || self.root.forward(pass, rounded.as_ref().unwrap_or(x)))
    }

    /// The gradients of all trained parameters, from the gradient of the output of the forward before. The pass tells of
    /// each as it is complete.
    pub fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<()> {
        self.backward_to(pass, dy, Fold::Nothing).map(drop)
    }

    /// As `backward`, and gives what `fold` asks for: the gradient of the input, where the input is another model's output.
    pub fn backward_to(&self, pass: &mut Pass<'_>, dy: &Tensor, fold: Fold) -> Result<Folded> {
        let below = ops::with_f32_math(self.f32_math, || self.root.backward(pass, dy, fold))?;
        pass.check_complete()?;
        Ok(below)
    }
}
