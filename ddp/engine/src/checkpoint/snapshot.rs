//! A copy of the model and of this rank's moments in host memory, from which a checkpoint is
//! written while training continues.
//!
//! It is allocated once and filled for each checkpoint, in pinned memory on a rank with GPUs if
//! possible. It takes 4 bytes a parameter for the model, on rank 0 only, and 4 for each moment that
//! the rank writes.

use std::ops::Range;
use std::path::Path;

use ddp_kernels::transfer::{Phase, announced, in_phase};
use ddp_kernels::{DType, Device, Tensor};

use super::model;
use super::optimizer::{self, Outgoing};
use super::restore::check_dtype;
use super::tensors;
use crate::error::Result;
use crate::step::Step;
use ddp_data::safetensors::Header;
use ddp_kernels::files::Contents;
use ddp_nn::params::Params;

/// The part of a checkpoint that this rank writes.
#[derive(Debug)]
pub(super) struct Snapshot {
    model: Option<ModelPart>,
    moments: Option<MomentsPart>,
}

#[derive(Debug)]
struct ModelPart {
    header: Header,
    /// In the order of the header: the stage, and the range in its values.
    list: Vec<(usize, Range<usize>)>,
    /// All values of each stage.
    values: Vec<Tensor>,
}

#[derive(Debug)]
struct MomentsPart {
    header: Header,
    list: Vec<Outgoing>,
    /// By stage and moment.
    moments: Vec<Vec<Tensor>>,
}

impl Snapshot {
    /// Memory for a rank that writes the model, moments, or both.
    pub(super) fn new(step: &Step, writes_model: bool, writes_moments: bool) -> Result<Snapshot> {
        step.stages()
            .iter()
            .try_for_each(|stage| check_dtype(&stage.model().params))?;
        Ok(Snapshot {
            model: writes_model.then(|| ModelPart::new(step)).transpose()?,
            moments: writes_moments.then(|| MomentsPart::new(step)).transpose()?,
        })
    }

    /// Copies the current values and moments of `step`.
    pub(super) fn fill(&mut self, step: &Step) -> Result<()> {
        in_phase(Phase::Checkpoint, || {
            announced("the snapshot for a checkpoint", || {
                for (index, stage) in step.stages().iter().enumerate() {
                    if let Some(model) = &self.model {
                        model.values[index].copy_from(stage.model().params.values())?;
                    }
                    if let Some(part) = &self.moments {
                        let pairs = part.moments[index].iter().zip(stage.optimizer().moments());
                        pairs
                            .into_iter()
                            .try_for_each(|(copy, (_, moment))| copy.copy_from(moment))?;
                    }
                }
                Ok(())
            })
        })
    }

    /// Writes the model's file, if this rank does.
    pub(super) fn write_model(&self, path: &Path) -> Result<Option<Contents>> {
        let Some(ModelPart {
            header,
            list,
            values,
        }) = &self.model
        else {
            return Ok(None);
        };
        let tensor = |(stage, range): &(usize, Range<usize>)| -> Result<Tensor> {
            Ok(values[*stage].slice(range.clone())?)
        };
        tensors::write_file(path, header, list.iter().map(tensor)).map(Some)
    }

    /// Writes this rank's file of moments, if it has one.
    pub(super) fn write_moments(&self, path: &Path) -> Result<Option<Contents>> {
        let Some(MomentsPart {
            header,
            list,
            moments,
        }) = &self.moments
        else {
            return Ok(None);
        };
        let tensor = |outgoing: &Outgoing| -> Result<Tensor> {
            Ok(moments[outgoing.stage][outgoing.moment]
                .slice(outgoing.at..outgoing.at + outgoing.length())?)
        };
        tensors::write_file(path, header, list.iter().map(tensor)).map(Some)
    }
}

impl ModelPart {
    fn new(step: &Step) -> Result<ModelPart> {
        let parts: Vec<&Params> = step
            .stages()
            .iter()
            .map(|stage| &stage.model().params)
            .collect();
        let mut list = Vec::new();
        for (stage, params) in parts.iter().enumerate() {
            list.extend(
                params
                    .in_order()
                    .into_iter()
                    .map(|p| (stage, p.range.clone())),
            );
        }
        let header = model::header(&model::in_order(&parts));
        let values = parts
            .iter()
            .map(|params| copy_of(params.values()))
            .collect::<Result<_>>()?;
        Ok(ModelPart {
            header,
            list,
            values,
        })
    }
}

impl MomentsPart {
    fn new(step: &Step) -> Result<MomentsPart> {
        let stages: Vec<_> = step
            .stages()
            .iter()
            .map(|stage| (&stage.model().params, stage.optimizer()))
            .collect();
        let list = Outgoing::of(&stages);
        let copies = |(_, optimizer): &(&Params, &ddp_nn::optim::Optimizer)| {
            optimizer
                .moments()
                .map(|(_, moment)| copy_of(moment))
                .collect::<Result<Vec<_>>>()
        };
        let moments = stages.iter().map(copies).collect::<Result<_>>()?;
        Ok(MomentsPart {
            header: optimizer::header(&list),
            list,
            moments,
        })
    }
}

/// Host memory for a copy of `tensor`.
fn copy_of(tensor: &Tensor) -> Result<Tensor> {
    let pinned = || {
        tensor
            .device()
            .is_accelerator()
            .then(|| Tensor::zeros_pinned(tensor.shape(), DType::F32).ok())
            .flatten()
    };
    // Without pinned memory, copies only take longer.
    let copy = match pinned() {
        Some(copy) => copy,
        None => Tensor::zeros(tensor.shape(), DType::F32, Device::Cpu)?,
    };
    Ok(copy.named("a checkpoint's snapshot"))
}
