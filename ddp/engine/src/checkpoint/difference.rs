//! In which weights and moments a model in training differs from a checkpoint, however many ranks
//! have either.

use ddp_comm::World;

use super::files::{ReadFrom, unreadable};
use super::folders::MODEL_FILE;
use super::manifest::Opened;
use super::model::{header_of, model_of};
use super::optimizer::{Outgoing, SavedMoments};
use super::restore::MomentsReader;
use super::snapshot::Snapshot;
use super::tensors::FileDType;
use crate::error::Result;
use crate::exchange;
use crate::shown::significant;
use crate::step::Step;

/// The weights, then the moments that have other bits in the checkpoint, as texts: by parameter,
/// the first element and how many there are. All ranks call it together.
pub(crate) fn differences(opened: &Opened, step: &mut Step, world: &World) -> Result<Vec<String>> {
    step.gather()?;
    let is_first = world.rank() == 0;
    let shares = step.params().any(|params| params.shares() > 1);
    let mut snapshot = Snapshot::new(step, is_first, is_first || shares)?;
    snapshot.fill(step)?;
    let mine = [
        of_model(opened, &snapshot)?,
        of_moments(opened, &snapshot, step)?,
    ];
    let all = exchange::gather(world, &mine)?;
    let of = |which: usize| all.iter().flat_map(move |rank| rank[which].clone());
    Ok(of(0).chain(of(1)).collect())
}

fn of_model(opened: &Opened, snapshot: &Snapshot) -> Result<Vec<String>> {
    let Some(model) = &snapshot.model else {
        return Ok(Vec::new());
    };
    let (path, file) = (opened.model_file(), model_of(opened)?);
    let header = header_of(&path, &file)?;
    let (mut found, mut saved, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
    if header.entries != model.header.entries {
        return Ok(vec![format!("the tensors of {MODEL_FILE}")]);
    }
    let mut file = ReadFrom::place(&file, header.data_start);
    for (entry, tensor) in header.entries.iter().zip(model.tensors()) {
        saved.resize(entry.count(), 0.0);
        let read = FileDType::F32.read(&mut file, &mut saved, &mut bytes);
        read.map_err(unreadable(&path))?;
        let text =
            tensor?.with_slice(|values: &[f32]| differing(&entry.name, 0, &saved, values))?;
        found.extend(text);
    }
    Ok(found)
}

fn of_moments(opened: &Opened, snapshot: &Snapshot, step: &Step) -> Result<Vec<String>> {
    let Some(moments) = &snapshot.moments else {
        return Ok(Vec::new());
    };
    let files = match SavedMoments::read(opened.optimizer_files())? {
        Ok(files) => files,
        Err(why) => return Ok(vec![why]),
    };
    let (mut reader, mut found, mut saved) = (MomentsReader::new(&files), vec![], vec![]);
    for (outgoing, tensor) in Outgoing::of(step).iter().zip(moments.tensors()) {
        let (parameter, moment, range) = outgoing.place();
        // NaN where the checkpoint has nothing.
        saved.clear();
        saved.resize(range.len(), f32::NAN);
        reader.fill(range.start, files.pieces(parameter, moment), &mut saved)?;
        let name = format!("{moment} of {parameter}");
        let text = tensor?.with_slice(|all: &[f32]| differing(&name, range.start, &saved, all))?;
        found.extend(text);
    }
    Ok(found)
}

/// How the elements from `first` on differ from those that were saved.
fn differing(name: &str, first: usize, saved: &[f32], values: &[f32]) -> Option<String> {
    let pairs = || saved.iter().zip(values).enumerate();
    let mut others = pairs().filter(|(_, (a, b))| a.to_bits() != b.to_bits());
    let (at, (saved, value)) = others.next()?;
    let [saved, value] = [saved, value].map(|it| significant(f64::from(*it), 9));
    let (at, count) = (first + at, 1 + others.count());
    Some(format!(
        "{name}: {count} of {} elements, from element {at} on: {saved} in the checkpoint, {value} computed",
        values.len()
    ))
}
