//! A copy of the model and of this rank's moments in host memory, from which a checkpoint is
//! written while training continues.
//!
//! It is allocated once and filled for each checkpoint, in pinned memory on a rank with GPUs if
//! possible. It takes 4 bytes a parameter for the model, on rank 0 only, and 4 for each moment that
//! the rank writes.

use std::ops::Range;
use std::path::Path;

use ddp_comm::Group;
use ddp_kernels::transfer::{Phase, announced, in_phase};
use ddp_kernels::{DType, Device, Tensor};

use super::model;
use super::optimizer::{self, Outgoing};
use super::restore::parts;
use super::tensors;
use crate::error::Result;
use crate::step::Step;
use ddp_data::safetensors::Header;
use ddp_kernels::files::Contents;

/// The part of a checkpoint that this rank writes.
#[derive(Debug)]
pub(super) struct Snapshot {
    model: Option<Part>,
    moments: Option<Part>,
}

/// What a file is made of.
#[derive(Debug)]
struct Part {
    header: Header,
    /// In the order of the header: which copy, and the range in it.
    list: Vec<(usize, Range<usize>)>,
    copies: Vec<Tensor>,
}

impl Snapshot {
    /// Memory for a rank that writes the model, moments, or both.
    pub(super) fn new(step: &Step, writes_model: bool, writes_moments: bool) -> Result<Snapshot> {
        // Refuses values that a checkpoint would round.
        parts(step)?;
        Ok(Snapshot {
            model: writes_model.then(|| Part::of_model(step)).transpose()?,
            moments: writes_moments.then(|| Part::of_moments(step)).transpose()?,
        })
    }

    /// Copies the current values and moments of `step`.
    pub(super) fn fill(&mut self, step: &Step) -> Result<()> {
        let of_model = self
            .model
            .iter()
            .flat_map(|part| part.copies.iter().zip(values(step)));
        let of_moments = self
            .moments
            .iter()
            .flat_map(|part| part.copies.iter().zip(moments(step)));
        let mut copies = of_model.chain(of_moments);
        in_phase(Phase::Checkpoint, || {
            announced("the snapshot for a checkpoint", || {
                copies.try_for_each(|(copy, source)| Ok(copy.copy_from(source)?))
            })
        })
    }

    /// Writes the model's file, if this rank does. It gives up when a rank of `group` is lost.
    pub(super) fn write_model(&self, path: &Path, group: &Group) -> Result<Option<Contents>> {
        let model = self.model.as_ref();
        model.map(|part| part.write(path, group)).transpose()
    }

    /// The same for this rank's file of moments, if it has one.
    pub(super) fn write_moments(&self, path: &Path, group: &Group) -> Result<Option<Contents>> {
        let moments = self.moments.as_ref();
        moments.map(|part| part.write(path, group)).transpose()
    }
}

/// All values, by stage.
fn values(step: &Step) -> impl Iterator<Item = &Tensor> {
    step.stages()
        .iter()
        .map(|stage| stage.model().params.values())
}

/// All moments, by stage.
fn moments(step: &Step) -> impl Iterator<Item = &Tensor> {
    let stages = step.stages().iter();
    stages.flat_map(|stage| stage.optimizer().moments().map(|(_, moment)| moment))
}

impl Part {
    fn of_model(step: &Step) -> Result<Part> {
        let parts = parts(step)?;
        let stages = parts.iter().enumerate();
        let of_stage = stages.flat_map(|(stage, params)| {
            let parameters = params.in_order().into_iter();
            parameters.map(move |parameter| (stage, parameter.range.clone()))
        });
        Ok(Part {
            header: model::header(&model::in_order(&parts)),
            list: of_stage.collect(),
            copies: values(step).map(copy_of).collect::<Result<_>>()?,
        })
    }

    fn of_moments(step: &Step) -> Result<Part> {
        let stages = step.stages().iter();
        let stages: Vec<_> = stages
            .map(|stage| (&stage.model().params, stage.optimizer()))
            .collect();
        let outgoing = Outgoing::of(&stages);
        let place = |it: &Outgoing| {
            let before = stages[..it.stage].iter();
            let before: usize = before
                .map(|(_, optimizer)| optimizer.moments().count())
                .sum();
            (before + it.moment, it.at..it.at + it.length())
        };
        Ok(Part {
            header: optimizer::header(&outgoing),
            list: outgoing.iter().map(place).collect(),
            copies: moments(step).map(copy_of).collect::<Result<_>>()?,
        })
    }

    fn write(&self, path: &Path, group: &Group) -> Result<Contents> {
        let tensor = |(copy, range): &(usize, Range<usize>)| -> Result<Tensor> {
            group.check_ranks()?;
            Ok(self.copies[*copy].slice(range.clone())?)
        };
        tensors::write_file(path, &self.header, self.list.iter().map(tensor))
    }
}

/// Host memory for a copy of `tensor`. Without pinned memory, copies only take longer.
fn copy_of(tensor: &Tensor) -> Result<Tensor> {
    let is_on_gpu = tensor.device().is_accelerator();
    let pinned = is_on_gpu.then(|| Tensor::zeros_pinned(tensor.shape(), DType::F32));
    let copy = match pinned {
        Some(Ok(copy)) => copy,
        _ => Tensor::zeros(tensor.shape(), DType::F32, Device::Cpu)?,
    };
    Ok(copy.named("a checkpoint's snapshot"))
}
