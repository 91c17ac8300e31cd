//! Loads values and moments of a checkpoint on any number of ranks, with ZeRO-1 or without, however
//! they were written.

use std::fs::File;

use ddp_kernels::DType;

use super::files::{ReadFrom, unreadable};
use super::manifest::Opened;
use super::model::{ModelFile, load_opened, model_of, saved};
use super::optimizer::{SavedMoments, SavedPiece};
use super::tensors::{FileDType, read_into};
use crate::error::{Error, Result};
use crate::setting::{FREEZE, MOMENTUM, OPTIMIZER};
use crate::step::{Stage, Step};
use ddp_nn::params::Params;

/// Loads values and moments into `step`. Changes nothing if they do not fit. All ranks call it
/// together.
pub fn restore(opened: &Opened, step: &mut Step) -> Result<()> {
    let folder = opened.folder.display();
    restore_if_fits(opened, step)?.map_err(|why| {
        Error::Data(format!(
            "cannot resume from {folder}: its optimizer's moments are of another run: {why}; \
             help: give the {OPTIMIZER}, {MOMENTUM} and {FREEZE} that the run started with"
        ))
    })
}

/// The same. The inner error says which moments do not fit; then nothing has changed.
pub(crate) fn restore_if_fits(opened: &Opened, step: &mut Step) -> Result<Result<(), String>> {
    let stages = step.stages();
    let parts = parts(step)?;
    let model_file = opened.model_file();
    let model = ModelFile::of(&model_file, model_of(opened)?, saved(&parts), false)?;
    let wanted = stages.iter().flat_map(|stage| {
        let rule = stage.optimizer().rule();
        let list = stage.model().params.list().iter();
        let trained = list.filter(|p| p.is_trained());
        trained.flat_map(move |p| {
            let moments = rule.moments_of(p).iter();
            moments.map(move |name| (p.name.as_str(), *name, p.range.len()))
        })
    });
    let saved = SavedMoments::read(opened.optimizer_files())?.map(|saved| {
        if model.is_renamed {
            return saved.without_dropout();
        }
        saved
    });
    let saved = match saved.and_then(|saved| saved.check(wanted).map(|()| saved)) {
        Ok(saved) => saved,
        Err(why) => return Ok(Err(why)),
    };
    model.load()?;
    let mut stages = stages.iter();
    stages.try_for_each(|stage| restore_moments(&saved, stage))?;
    step.count_moments_from(opened.state.optimizer_since);
    Ok(Ok(()))
}

/// Loads only values: the optimizer starts with zero moments. All ranks call it together.
pub fn restore_values(opened: &Opened, step: &mut Step) -> Result<()> {
    load_opened(opened, &parts(step)?)?;
    step.count_moments_from(opened.state.step);
    Ok(())
}

/// The parts of the model. Refuses values that a checkpoint would round.
pub(super) fn parts(step: &Step) -> Result<Vec<&Params>> {
    let is_rounded = |params: &&Params| params.master_dtype() != DType::F32;
    match step.params().find(is_rounded) {
        None => Ok(step.params().collect()),
        Some(params) => Err(Error::Usage(format!(
            "a checkpoint of a model with {} values: expected f32 values; help: build the model \
             in f32 or bf16",
            params.master_dtype()
        ))),
    }
}

fn restore_moments(saved: &SavedMoments, stage: &Stage) -> Result<()> {
    let (params, optimizer) = (&stage.model().params, stage.optimizer());
    let mut reader = MomentsReader::new(saved);
    for (name, moment) in optimizer.all_moments() {
        read_into(moment, "the optimizer's moments", usize::MAX, |values| {
            let all = optimizer.all_pieces().iter();
            let mut having = all.filter(|piece| piece.moments.contains(&name));
            having.try_for_each(|piece| {
                let pieces = saved.pieces(&params.parameter(piece.parameter).name, name);
                let values = &mut values[piece.at..piece.at + piece.length];
                reader.fill(piece.start, pieces, values)
            })
        })?;
    }
    Ok(())
}

/// Reads pieces; the file of the last one stays open.
pub(super) struct MomentsReader<'a> {
    saved: &'a SavedMoments,
    open: Option<(usize, File)>,
    bytes: Vec<u8>,
}

impl MomentsReader<'_> {
    pub(super) fn new(saved: &SavedMoments) -> MomentsReader<'_> {
        MomentsReader {
            saved,
            open: None,
            bytes: Vec::new(),
        }
    }

    /// Fills `values`, which begin with element `first` of a moment, from the pieces that overlap
    /// them.
    pub(super) fn fill(
        &mut self,
        first: usize,
        pieces: &[SavedPiece],
        values: &mut [f32],
    ) -> Result<()> {
        for piece in pieces {
            let start = piece.start.max(first);
            let end = (piece.start + piece.length).min(first + values.len());
            if start < end {
                let offset = piece.offset + 4 * (start - piece.start) as u64;
                let values = &mut values[start - first..end - first];
                self.read(piece.file, offset, values)?;
            }
        }
        Ok(())
    }

    fn read(&mut self, index: usize, offset: u64, values: &mut [f32]) -> Result<()> {
        let path = &self.saved.files[index];
        let file = match self.open.take() {
            Some((open, file)) if open == index => file,
            _ => File::open(path).map_err(unreadable(path))?,
        };
        let read =
            FileDType::F32.read(&mut ReadFrom::place(&file, offset), values, &mut self.bytes);
        read.map_err(unreadable(path))?;
        self.open = Some((index, file));
        Ok(())
    }
}
