//! Loads values and moments of a checkpoint, on any number of ranks, whatever number wrote them,
//! with ZeRO-1 or without.

use std::fs::File;

use ddp_kernels::transfer::{Phase, announced, in_phase};
use ddp_kernels::{DType, Device, Tensor};

use super::errors::unreadable;
use super::files::ReadFrom;
use super::manifest::Opened;
use super::model::{ModelFile, load_opened};
use super::optimizer::{Held, HeldPiece};
use super::tensors::Written;
use crate::error::{Error, Result};
use crate::step::{Stage, Step};
use ddp_nn::optim::Piece;
use ddp_nn::params::Params;

/// Loads values and moments into `step`, whatever number of ranks and ZeRO stage wrote them.
/// Nothing is changed if they do not fit. All ranks call it together.
pub fn restore(opened: &Opened, step: &mut Step) -> Result<()> {
    match restore_if_fits(opened, step)? {
        Ok(()) => Ok(()),
        Err(why) => {
            let folder = opened.folder.display();
            let way_out =
                "Give the settings that the run started with (`optimizer`, `momentum`, `freeze`)";
            let moments = "its optimizer's moments are of another run";
            Err(Error::Data(format!(
                "cannot go on from {folder}: {moments}: {why}. {way_out}"
            )))
        }
    }
}

/// The same. The inner error says which moments are of another run; then nothing is changed.
pub fn restore_if_fits(opened: &Opened, step: &mut Step) -> Result<Result<(), String>> {
    let stages = step.stages();
    let parts = parts(step)?;
    let model_file = opened.model_file();
    let model = ModelFile::of(&model_file, opened.model.clone(), &parts)?;
    let wanted = stages.iter().flat_map(|stage| {
        let trained = stage
            .model()
            .params
            .list()
            .iter()
            .filter(|parameter| parameter.is_trained());
        let names = stage.optimizer().rule().moment_names();
        trained.flat_map(move |p| {
            names
                .iter()
                .map(move |name| (p.name.as_str(), *name, p.range.len()))
        })
    });
    let held = match Held::read(opened.optimizer_files())?
        .and_then(|held| held.check(wanted).map(|()| held))
    {
        Ok(held) => held,
        Err(why) => return Ok(Err(why)),
    };
    model.load(&parts)?;
    in_phase(Phase::Checkpoint, || {
        stages
            .iter()
            .try_for_each(|stage| restore_moments(&held, stage))
    })?;
    step.count_moments_from(opened.state.optimizer_since);
    Ok(Ok(()))
}

/// Values alone, for a run whose optimizer begins anew. All ranks.
pub fn restore_values(opened: &Opened, step: &mut Step) -> Result<()> {
    load_opened(opened, &parts(step)?)?;
    step.count_moments_from(opened.state.step);
    Ok(())
}

/// The parts of the model, if they can be had from a checkpoint.
fn parts(step: &Step) -> Result<Vec<&Params>> {
    let parts: Vec<&Params> = step
        .stages()
        .iter()
        .map(|stage| &stage.model().params)
        .collect();
    parts.iter().try_for_each(|params| check_dtype(params))?;
    Ok(parts)
}

/// Refuses what would be rounded in a checkpoint.
pub(super) fn check_dtype(params: &Params) -> Result<()> {
    match params.master_dtype() {
        DType::F32 => Ok(()),
        other => Err(Error::Usage(format!(
            "checkpoints of a model whose values are {other}: expected f32, in which they are written. Build the model in f32 or bf16"
        ))),
    }
}

fn restore_moments(held: &Held, stage: &Stage) -> Result<()> {
    let (params, optimizer) = (&stage.model().params, stage.optimizer());
    let mut reader = Reader {
        held,
        open: None,
        bytes: Vec::new(),
    };
    for (name, moment) in optimizer.moments() {
        // On the CPU they are read into their place.
        let on_host = moment.device() == Device::Cpu;
        let host = if on_host {
            moment.clone()
        } else {
            Tensor::zeros(moment.shape(), DType::F32, Device::Cpu)?
        };
        host.with_slice_mut(|values: &mut [f32]| {
            optimizer.owned_pieces().iter().try_for_each(|piece| {
                let pieces = held.pieces(&params.parameter(piece.parameter).name, name);
                reader.fill(
                    piece,
                    pieces,
                    &mut values[piece.at..piece.at + piece.length],
                )
            })
        })??;
        if !on_host {
            announced("the optimizer's moments", || moment.copy_from(&host))?;
        }
    }
    Ok(())
}

/// Reads pieces; the file of the last one stays open.
struct Reader<'a> {
    held: &'a Held,
    open: Option<(usize, File)>,
    bytes: Vec<u8>,
}

impl Reader<'_> {
    /// Fills `values`, those of `wanted`, from the pieces that have a part of them.
    fn fill(&mut self, wanted: &Piece, pieces: &[HeldPiece], values: &mut [f32]) -> Result<()> {
        for piece in pieces {
            let start = piece.start.max(wanted.start);
            let end = (piece.start + piece.length).min(wanted.start + wanted.length);
            if start < end {
                let offset = piece.offset + 4 * (start - piece.start) as u64;
                self.read(
                    piece.file,
                    offset,
                    &mut values[start - wanted.start..end - wanted.start],
                )?;
            }
        }
        Ok(())
    }

    fn read(&mut self, index: usize, offset: u64, values: &mut [f32]) -> Result<()> {
        let path = &self.held.files[index];
        let file = match self.open.take() {
            Some((open, file)) if open == index => file,
            _ => File::open(path).map_err(unreadable(path))?,
        };
        let read = Written::F32.read(&mut ReadFrom::place(&file, offset), values, &mut self.bytes);
        read.map_err(unreadable(path))?;
        self.open = Some((index, file));
        Ok(())
    }
}
