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
use ddp_kernels::files::FileDigest;
use ddp_nn::params::Params;

/// The part of a checkpoint that this rank writes.
#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) model: Option<FilePart>,
    /// This rank's.
    pub(super) moments: Option<FilePart>,
}

/// What a file is made of.
#[derive(Debug)]
pub(super) struct FilePart {
    pub(super) header: Header,
    /// In the order of the header: which copy, and the range in it.
    list: Vec<(usize, Range<usize>)>,
    copies: Vec<Tensor>,
}

impl Snapshot {
    /// Memory for a rank that writes the model, moments, or both.
    pub(super) fn new(step: &Step, writes_model: bool, writes_moments: bool) -> Result<Snapshot> {
        // Refuses values that a checkpoint would round.
        parts(step)?;
        let moments = writes_moments.then(|| FilePart::of_moments(step));
        Ok(Snapshot {
            model: writes_model.then(|| FilePart::of_model(step)).transpose()?,
            moments: moments.transpose()?,
        })
    }

    /// Copies the current values and moments of `step`. All ranks call it together: they may have
    /// divided the values.
    pub(super) fn fill(&mut self, step: &Step) -> Result<()> {
        let of_moments = self.moments.iter().map(|part| &part.copies);
        let mut of_moments = of_moments.flat_map(|copies| copies.iter().zip(moments(step)));
        in_phase(Phase::Checkpoint, || {
            announced("the snapshot for a checkpoint", || {
                for (index, stage) in step.stages().iter().enumerate() {
                    let copy = self.model.as_ref().map(|part| &part.copies[index]);
                    stage.reducer().copy_masters(&stage.model().params, copy)?;
                }
                of_moments.try_for_each(|(copy, source)| Ok(copy.copy_from(source)?))
            })
        })
    }
}

/// All moments, by stage.
fn moments(step: &Step) -> impl Iterator<Item = &Tensor> {
    let stages = step.stages().iter();
    stages.flat_map(|stage| stage.optimizer().moments().map(|(_, moment)| moment))
}

impl FilePart {
    fn of_model(step: &Step) -> Result<FilePart> {
        let parts = parts(step)?;
        let stages = parts.iter().enumerate();
        let of_stage = stages.flat_map(|(stage, params)| {
            let parameters = params.in_order().into_iter().filter(|it| !it.is_base);
            parameters.map(move |parameter| (stage, parameter.range.clone()))
        });
        let copy = |params: &Params| copy_of(params.arena_count(), params.device());
        Ok(FilePart {
            header: model::header(&model::saved(&parts)),
            list: of_stage.collect(),
            copies: step.params().map(copy).collect::<Result<_>>()?,
        })
    }

    fn of_moments(step: &Step) -> Result<FilePart> {
        let outgoing = Outgoing::of(step);
        let copy = |moment: &Tensor| copy_of(moment.count(), moment.device());
        Ok(FilePart {
            header: optimizer::header(&outgoing),
            list: outgoing.into_iter().map(|it| it.source).collect(),
            copies: moments(step).map(copy).collect::<Result<_>>()?,
        })
    }

    /// The tensors in the order of the header.
    pub(super) fn tensors(&self) -> impl Iterator<Item = Result<Tensor>> {
        let list = self.list.iter();
        list.map(|(copy, range)| Ok(self.copies[*copy].slice(range.clone())?))
    }

    /// Writes the file. It gives up when a rank of `group` is lost.
    pub(super) fn write(&self, path: &Path, group: &Group) -> Result<FileDigest> {
        let checked = |tensor: Result<Tensor>| {
            group.check_ranks()?;
            tensor
        };
        tensors::write_file(path, &self.header, self.tensors().map(checked))
    }
}

/// Host memory for a copy of a tensor of `device`. Without pinned memory, copies only take longer.
fn copy_of(count: usize, device: Device) -> Result<Tensor> {
    let is_on_gpu = device.is_accelerator();
    let pinned = is_on_gpu.then(|| Tensor::zeros_pinned(&[count], DType::F32));
    let copy = match pinned {
        Some(Ok(copy)) => copy,
        _ => Tensor::zeros(&[count], DType::F32, Device::Cpu)?,
    };
    Ok(copy.named("a checkpoint's snapshot"))
}
