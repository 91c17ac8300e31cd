//! `Model`: layers with their memory, ready to run.
//!
//! Where layers compute in bf16, the model rounds its input. Its output is bf16 too: each matmul
//! sums in f32 and rounds once. The loss reads that output, computes in f32, and rounds its
//! gradient once. PyTorch's autocast does the same, and the loss reads and writes half the bytes.

use std::any::Any;

use ddp_kernels::ops::{self, F32Math};
use ddp_kernels::{DType, Device, Seed, Tensor};

use crate::build::{Build, Declarations};
use crate::error::{Error, Result};
use crate::params::{Format, Params};
use crate::{Head, Layer, Loss, Pass, Sequential};

/// Layers, their parameters, and the shapes of input and output.
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
    /// How a GPU multiplies f32.
    f32_math: F32Math,
}

impl Sequential {
    /// The model of these layers for rows of this shape, in f32, with memory on `device`.
    pub fn build(self, row_shape: &[usize], device: Device, seed: Seed) -> Result<Model> {
        let root = Box::new(self);
        Model::new(root, row_shape, DType::F32, device, seed.0, &|_| false)
    }

    /// The models of these layers, split over `devices`: see [`Model::split`].
    pub fn build_over(
        self,
        row_shape: &[usize],
        devices: &[Device],
        seed: Seed,
    ) -> Result<Vec<Model>> {
        Model::split(self, row_shape, devices, |layers, shape, device| {
            Model::new(layers, shape, DType::F32, device, seed.0, &|_| false)
        })
    }
}

impl Model {
    /// Builds `root` for rows of `input_shape` and gives it memory on `device`, filled from `seed`.
    /// `format` is a dtype or a [`Precision`](crate::params::Precision). `frozen` tells by name
    /// which parameters are not trained.
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

    /// As `new`, laid out so that any number of ranks up to `shares` can share the trained part,
    /// for ZeRO-1. The reducer's options tell how many.
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
        let mut declarations = Declarations::new();
        let output_shape = root.build(&mut Build::new(&mut declarations), input_shape)?;
        Ok(Model {
            params: Params::new(&declarations, format, device, seed, frozen, shares)?,
            root,
            input_shape: input_shape.to_vec(),
            output_shape,
            f32_math: format.f32_math,
        })
    }

    /// The output for `x` (B, …), in the layers' dtype. `x` is in the dtype that the first layer
    /// asks for. Otherwise it is in the layers' dtype, or in the masters', which is rounded first.
    /// `pass` is over this model's parameters.
    pub fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        let dtypes = self.input_dtypes();
        // A decoder passes as many tokens as there are.
        if pass.cache().is_none() {
            self.check_input(x, dtypes)?;
        }
        let mut x = x.clone();
        if x.dtype() != dtypes[0] {
            let rounded = pass.take(x.shape())?;
            ops::cast_into(&rounded, &x)?;
            x = rounded;
        }
        ops::with_f32_math(self.f32_math, || self.root.forward(pass, &x))
    }

    /// How a GPU multiplies f32 in its layers.
    pub fn f32_math(&self) -> F32Math {
        self.f32_math
    }

    /// The dtypes of inputs: as the layers take them, and another that is rounded to that.
    fn input_dtypes(&self) -> [DType; 2] {
        match self.root.input_dtype() {
            Some(dtype) => [dtype; 2],
            None => [self.params.dtype(), self.params.master_dtype()],
        }
    }

    fn check_input(&self, x: &Tensor, [taken, rounded]: [DType; 2]) -> Result<()> {
        let row = x.shape().split_first().map(|(_, row)| row);
        if row == Some(&self.input_shape) && [taken, rounded].contains(&x.dtype()) {
            return Ok(());
        }
        let dtypes = if taken == rounded {
            taken.to_string()
        } else {
            format!("{rounded} or {taken}")
        };
        let shape = &self.input_shape;
        Err(Error::model(
            "model",
            format!("rows of {shape:?} in {dtypes}, as it was built for"),
            x.to_string(),
            "pass [rows, …] of that shape and dtype",
        ))
    }

    /// The gradient, for `backward`, of the sum of `loss` of the forward's output. `of` is that
    /// output, the targets, and the statistics, to which it adds as [`Loss::compute`] does.
    pub fn loss_gradient(
        &self,
        pass: &mut Pass<'_>,
        loss: &dyn Loss,
        of: [&Tensor; 3],
    ) -> Result<Tensor> {
        match self.head(pass) {
            None => loss.gradient(pass, of),
            Some(head) => ops::with_f32_math(self.f32_math, || head.gradient(loss, pass, of)),
        }
    }

    /// The loss of each row of the forward's output. `of` is that output, the targets, and the
    /// statistics, to which it adds as [`Loss::compute`] does.
    pub fn losses(&self, pass: &mut Pass<'_>, loss: &dyn Loss, of: [&Tensor; 3]) -> Result<Tensor> {
        match self.head(pass) {
            None => loss.compute(pass, of, None),
            Some(head) => ops::with_f32_math(self.f32_math, || head.losses(loss, pass, of)),
        }
    }

    /// The head, if the pass leaves it to the loss.
    fn head(&self, pass: &Pass<'_>) -> Option<&Head> {
        let mut last: &dyn Any = &*self.root;
        while let Some(layers) = last.downcast_ref::<Sequential>() {
            last = layers.last()?;
        }
        last.downcast_ref().filter(|_| pass.leaves_head())
    }

    /// Computes the gradients of all trained parameters from `dy`, the gradient of the output of
    /// the forward before. The pass's listener learns of each when it is complete.
    pub fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<()> {
        self.backward_from(pass, dy, false).map(drop)
    }

    /// As `backward`, and returns the gradient of the input, which is the output of another model
    /// or of interest itself. None for an input of integers.
    pub fn backward_to_input(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>> {
        self.backward_from(pass, dy, true)
    }

    fn backward_from(
        &self,
        pass: &mut Pass<'_>,
        dy: &Tensor,
        wants_input_gradient: bool,
    ) -> Result<Option<Tensor>> {
        let gradient = ops::with_f32_math(self.f32_math, || {
            pass.input_gradient(wants_input_gradient, |pass| self.root.backward(pass, dy))
        })?;
        pass.check_complete()?;
        Ok(gradient)
    }
}
