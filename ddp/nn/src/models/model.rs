//! `Model`: a module with its memory, ready to run; and a model split over several devices.
//!
//! Where layers compute in bf16, the model rounds its input. Its output is bf16 too: each matmul
//! sums in f32 and rounds once. The loss reads that output, computes in f32, and rounds its
//! gradient once. PyTorch's autocast does the same, and the loss reads and writes half the bytes.
//!
//! Names, initial weights, the random numbers of dropout, and so the saved model, are those of the
//! unsplit model. It is split where one value alone goes from below to above, before a layer with
//! parameters: one without (an activation, dropout) stays with the layer below, which can still
//! apply the activation. Parts have about equal numbers of parameters, and so equal memory and, for
//! linear layers, equal work.
//!
//! Layers of a `Tie` may be in different parts. The first part that uses the parameter owns it, and
//! later ones borrow it: `Params::tied_copies`. It counts in each layer that uses it.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use ddp_kernels::ops::{self, F32Math};
use ddp_kernels::{DType, Device, Seed, Tensor};

use crate::build::Declarations;
use crate::error::{DEVICES_PER_RANK, Error, Result};
use crate::forward::{Module, ModulePiece, Traced};
use crate::params::{Numerics, Params, Sharing};
use crate::{Loss, Pass, Sequential};

/// What a model is made of: a module, or what of one is on a device.
pub struct Layers(Source);

enum Source {
    Module(Arc<dyn Module>),
    /// With what it declares, and the shape of a row of its output.
    Part(Box<(Traced, Declarations, Vec<usize>)>),
}

impl<M: Module> From<Box<M>> for Layers {
    fn from(module: Box<M>) -> Layers {
        Layers(Source::Module(Arc::from(module as Box<dyn Module>)))
    }
}

impl From<Box<dyn Module>> for Layers {
    fn from(module: Box<dyn Module>) -> Layers {
        Layers(Source::Module(Arc::from(module)))
    }
}

impl fmt::Debug for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Source::Module(module) => module.fmt(f),
            Source::Part(part) => part.0.fmt(f),
        }
    }
}

/// Layers, their parameters, and the shapes of input and output.
#[derive(Debug)]
pub struct Model {
    root: Traced,
    /// Their parameters and buffers.
    pub params: Params,
    /// The shape of one row of the input.
    pub input_shape: Vec<usize>,
    /// The shape of one row of the output.
    pub output_shape: Vec<usize>,
    /// How a GPU multiplies f32.
    pub f32_math: F32Math,
    /// Whether it takes tokens: then also shorter rows.
    takes_tokens: bool,
}

impl Sequential {
    /// The model of these layers for rows of this shape, in f32, with memory on `device`.
    pub fn build(self, row_shape: &[usize], device: Device, seed: Seed) -> Result<Model> {
        Model::new(
            Box::new(self),
            row_shape,
            DType::F32,
            device,
            seed.0,
            &|_| false,
        )
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
        root: impl Into<Layers>,
        input_shape: &[usize],
        format: impl Into<Numerics>,
        device: Device,
        seed: u64,
        frozen: &dyn Fn(&str) -> bool,
    ) -> Result<Model> {
        Model::with_shares(root, input_shape, format, device, seed, frozen, 1)
    }

    /// As `new`, with a trained part that ranks share (ZeRO): how many they are at most, or the
    /// [`Sharing`] that the reducer's options tell.
    pub fn with_shares(
        root: impl Into<Layers>,
        input_shape: &[usize],
        format: impl Into<Numerics>,
        device: Device,
        seed: u64,
        frozen: &dyn Fn(&str) -> bool,
        sharing: impl Into<Sharing>,
    ) -> Result<Model> {
        let format = format.into();
        let (root, declarations, output_shape) = match root.into().0 {
            Source::Part(part) => *part,
            Source::Module(module) => {
                let mut declarations = Declarations::new();
                let (root, output) = Traced::build(module, &mut declarations, input_shape)?;
                (root, declarations, output)
            }
        };
        Ok(Model {
            params: Params::new(&declarations, format, device, seed, frozen, &sharing.into())?,
            takes_tokens: root.input_dtype() == Some(DType::I64),
            root,
            input_shape: input_shape.to_vec(),
            output_shape,
            f32_math: format.f32_math,
        })
    }

    /// Backward computes the first `count` parts of the whole model again, and forward keeps only
    /// what goes into each. A part ends where one value alone goes on.
    pub fn recompute_parts(&mut self, count: usize) {
        self.root.recomputed = count;
    }

    /// The output for `x` (B, …), in the layers' dtype. Rows of tokens may be shorter than the
    /// model was built for. `x` is in the dtype that the first layer asks for. Otherwise it is in
    /// the layers' dtype, or in the masters', which is rounded first.
    /// `pass` is over this model's parameters.
    pub fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        let dtypes = self.input_dtypes();
        // A decoder passes as many tokens as there are. An upper part compares shapes when it is
        // planned.
        let has_any_shape = pass.cache().is_some() || !self.root.takes_input();
        if !has_any_shape || x.shape().is_empty() || !dtypes.contains(&x.dtype()) {
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

    /// The dtypes of inputs: as the layers take them, and another that is rounded to that.
    fn input_dtypes(&self) -> [DType; 2] {
        match self.root.input_dtype() {
            Some(dtype) => [dtype; 2],
            None => [self.params.dtype(), self.params.master_dtype()],
        }
    }

    fn check_input(&self, x: &Tensor, [taken, rounded]: [DType; 2]) -> Result<()> {
        let shape = &self.input_shape[..];
        let row = x.shape().split_first().map_or(&[][..], |(_, row)| row);
        let is_shorter = || match (row, shape) {
            ([tokens, others @ ..], [most, expected @ ..]) => {
                self.takes_tokens && tokens < most && others == expected
            }
            _ => false,
        };
        if (row == shape || is_shorter()) && [taken, rounded].contains(&x.dtype()) {
            return Ok(());
        }
        let dtypes = if taken == rounded {
            taken.to_string()
        } else {
            format!("{rounded} or {taken}")
        };
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
        match self.root.left_head(pass) {
            None => loss.gradient(pass, of),
            Some(head) => ops::with_f32_math(self.f32_math, || head.gradient(loss, pass, of)),
        }
    }

    /// The loss of each row of the forward's output. `of` is that output, the targets, and the
    /// statistics, to which it adds as [`Loss::compute`] does.
    pub fn losses(&self, pass: &mut Pass<'_>, loss: &dyn Loss, of: [&Tensor; 3]) -> Result<Tensor> {
        match self.root.left_head(pass) {
            None => loss.compute(pass, of, None),
            Some(head) => ops::with_f32_math(self.f32_math, || head.losses(loss, pass, of)),
        }
    }

    /// Computes the gradients of all trained parameters from `dy`, the gradient of the output of
    /// the forward before. The pass's listener learns of each when it is complete.
    pub fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<()> {
        self.backward_from(pass, dy, false).map(drop)
    }

    /// As `backward`, and returns the gradient of the input: for the model below, or for its own
    /// sake. None for an input of integers.
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
            self.root.backward(pass, dy, wants_input_gradient)
        })?;
        pass.check_complete()?;
        Ok(gradient)
    }
}

impl Model {
    /// Splits `root`, for rows of `input_shape`, over `devices`. Returns a model for each, from the
    /// input to the output. `make` makes one from its layers, the shape of a row of their input,
    /// and the device. The caller copies the parameters that they borrow (`Params::tied_copies`).
    pub fn split(
        root: impl Module,
        input_shape: &[usize],
        devices: &[Device],
        mut make: impl FnMut(Layers, &[usize], Device) -> Result<Model>,
    ) -> Result<Vec<Model>> {
        if let &[device] = devices {
            return Ok(vec![make(Box::new(root).into(), input_shape, device)?]);
        }
        let mut shape = input_shape.to_vec();
        let one = |(layers, &device): (Layers, &Device)| {
            let model = make(layers, &shape, device)?;
            shape.clone_from(&model.output_shape);
            Ok(model)
        };
        let parts = parts(Arc::new(root), input_shape, devices.len())?;
        let models = parts.into_iter().zip(devices).map(one);
        let mut models = models.collect::<Result<Vec<Model>>>()?;
        for part in 1..models.len() {
            let (below, rest) = models.split_at_mut(part);
            let below: Vec<&mut Params> = below.iter_mut().map(|model| &mut model.params).collect();
            rest[0].params.borrow_from(below);
        }
        Ok(models)
    }
}

/// Cuts `module`, for rows of `row_shape`, into `count` parts.
fn parts(module: Arc<dyn Module>, row_shape: &[usize], count: usize) -> Result<Vec<Layers>> {
    let mut declarations = Declarations::new();
    let (whole, output) = Traced::build(module, &mut declarations, row_shape)?;
    let pieces = whole.pieces()?;
    if count == 0 || count > pieces.len() {
        let most = pieces.len();
        return Err(Error::Usage(format!(
            "a model over {count} devices: expected from 1 to {most}, because it can be cut in {} \
             places, where one value alone goes on to layers with parameters, got {count}; help: \
             lower {DEVICES_PER_RANK}, or add layers",
            most - 1
        )));
    }
    let elements = |piece: &ModulePiece| piece.elements(&declarations);
    let ranges = even_parts(&pieces.iter().map(elements).collect::<Vec<_>>(), count);
    let part = |range: Range<usize>| {
        let row = pieces.get(range.end).map_or(&output, |above| &above.row);
        let (part, declared) = whole.part(&pieces, range, row_shape, &declarations);
        Layers(Source::Part(Box::new((part, declared, row.clone()))))
    };
    Ok(ranges.into_iter().map(part).collect())
}

/// Cuts `weights` into `parts` runs, none empty. The heaviest run is as light as possible; of all
/// such cuts, the sum of the squared weights of the runs is the least.
fn even_parts(weights: &[usize], parts: usize) -> Vec<Range<usize>> {
    assert!(
        (1..=weights.len()).contains(&parts),
        "{parts} parts of {} pieces",
        weights.len()
    );
    let mut before = vec![0u128];
    for &weight in weights {
        before.push(before[before.len() - 1] + weight as u128);
    }
    let weight = |part: Range<usize>| before[part.end] - before[part.start];
    let heaviest = |below: u128, part| Some(below.max(weight(part)));
    let (cap, _) = best_cuts(weights.len(), parts, &heaviest);
    let squares = |below: u128, part| {
        let weight = weight(part);
        (weight <= cap).then(|| below + weight * weight)
    };
    best_cuts(weights.len(), parts, &squares).1
}

/// The cheapest cuts of this many pieces into parts, none empty, and their cost. `cost` is that of
/// the parts so far and of one more; None if it may not be.
fn best_cuts(
    pieces: usize,
    parts: usize,
    cost: &dyn Fn(u128, Range<usize>) -> Option<u128>,
) -> (u128, Vec<Range<usize>>) {
    // By number of parts and of pieces covered: the least cost, and the last part's start.
    let mut best: Vec<Vec<Option<(u128, usize)>>> = vec![vec![None; pieces + 1]; parts + 1];
    best[0][0] = Some((0, 0));
    for count in 1..=parts {
        for end in count..=pieces {
            let with = |start: usize| Some((cost(best[count - 1][start]?.0, start..end)?, start));
            best[count][end] = (count - 1..end).filter_map(with).min();
        }
    }
    let last = |count: usize, end: usize| best[count][end].expect("there are enough pieces");
    let (mut end, mut cuts) = (pieces, Vec::with_capacity(parts));
    for count in (1..=parts).rev() {
        let (_, start) = last(count, end);
        cuts.push(start..end);
        end = start;
    }
    cuts.reverse();
    (last(parts, pieces).0, cuts)
}

#[cfg(test)]
mod tests;
