//! `ddp-train predict`: what a model says of each row, in a file. Rank 0 writes it in the order of rows, as the ranks' batches come; it appears whole or
//! not at all.

use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use ddp_comm::{Group, World};
use ddp_kernels::stream::Stream;
use ddp_kernels::transfer::{Phase, in_phase};
use ddp_kernels::{DType, Device, Tensor};

use super::encode::Encoder;
use super::load::{self, Ready};
use super::outputs::check_finite;
use crate::checkpoint;
use crate::config::UseConfig;
use crate::config::check::refuse;
use crate::config::using::Predictions;
use crate::data::{DataSpec, Task, choose};
use crate::error::{Error, Result};
use crate::files;
use crate::shown::shown;

/// Writes what the model says of each row.
pub fn predict(config: &UseConfig, world: &World) -> Result<()> {
    let predictions = config.predictions.as_ref().ok_or_else(|| Error::Internal("predict without --out".into()))?;
    if world.rank() == 0 {
        check_free(predictions)?;
        check_other(predictions, &config.using.data)?;
    }
    let mut ready = in_phase(Phase::Setup, || load::ready(config, world, false))?;
    check_task(predictions, &ready.opened.state.task)?;
    let task = ready.opened.state.task.clone();
    let encoder = Encoder::new(predictions, &task);
    let group = world.group("predictions")?;
    in_phase(Phase::Evaluation, || {
        if world.rank() > 0 {
            return send_all(&mut ready, &encoder, &group);
        }
        let out = &predictions.out;
        let write = |file: &mut File| write_all(&mut ready, &encoder, &group, file, out);
        match predictions.overwrite {
            true => files::replace_file(out, write),
            false => files::new_file(out, write).map_err(|error| is_taken(error, out)),
        }
    })?;
    checkpoint::wait_for_all(world)?;
    if world.rank() == 0 {
        let path = |path: &Path| shown(&path.to_string_lossy());
        let (rows, out, model) = (ready.dealt.all_rows(), path(&predictions.out), path(&ready.opened.folder));
        tracing::info!("{rows} rows in {out}, by the model of {model} ({})", ready.why);
    }
    Ok(())
}

/// Refuses to write over a file, before anything is computed.
fn check_free(predictions: &Predictions) -> Result<()> {
    let out = &predictions.out;
    match std::fs::symlink_metadata(out) {
        Ok(about) if about.is_dir() => {
            Err(refuse("--out", out.display(), "the name of a file", "It is a folder: give a name in it"))
        }
        Ok(_) if !predictions.overwrite => Err(taken(out)),
        _ => Ok(()),
    }
}

/// Refuses to put the file in the place of one that it is made from, whatever the two are called.
fn check_other(predictions: &Predictions, data: &DataSpec) -> Result<()> {
    let (DataSpec::Files(spec), Ok(out)) = (data, std::fs::canonicalize(&predictions.out)) else { return Ok(()) };
    let is_out = |path: &PathBuf| std::fs::canonicalize(path).is_ok_and(|path| path == out);
    match choose::files(&spec.path, "--data")?.iter().find(|path| is_out(path)) {
        None => Ok(()),
        Some(path) => {
            let expected = format!("another file than {}, which --data reads", path.display());
            Err(refuse("--out", predictions.out.display(), &expected, "Give another: the rows would be gone"))
        }
    }
}

fn taken(out: &Path) -> Error {
    refuse("--out", out.display(), "the name of a new file", "It is there already: give another, or --overwrite")
}

/// What it means that somebody else has made a file of this name meanwhile.
fn is_taken(error: Error, out: &Path) -> Error {
    match error {
        Error::Io { source, .. } if source.kind() == ErrorKind::AlreadyExists => taken(out),
        other => other,
    }
}

/// Refuses what only classes have.
fn check_task(predictions: &Predictions, task: &Task) -> Result<()> {
    let asked = [("--probabilities", predictions.probabilities), ("--logits", predictions.logits)];
    match (asked.iter().find(|(_, asked)| *asked), task) {
        (Some((flag, _)), Task::Regression { .. }) => {
            let expected = "a model that tells classes apart, and this one gives numbers";
            Err(Error::Usage(format!("{flag}: expected {expected}. Leave {flag} out: the numbers are written anyway")))
        }
        _ => Ok(()),
    }
}

/// This rank's part of the file in round `round`, whose batch begins with row `first` of all.
fn part(ready: &mut Ready, encoder: &Encoder<'_>, round: u64, first: u64, bytes: &mut Vec<u8>) -> Result<()> {
    let batch = ready.batches.load(round)?;
    let output = ready.forward.run(&batch.x)?;
    bytes.clear();
    let encode = |values: &[f32]| {
        check_finite(values, encoder.outputs(), first)?;
        encoder.encode(first, values, bytes);
        Ok(())
    };
    output.with_slice(encode)?
}

/// On rank 0: its own parts and those of the others, in the order of rows.
fn write_all(ready: &mut Ready, encoder: &Encoder<'_>, group: &Group, file: &mut File, path: &Path) -> Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, file);
    let failed = || files::failed("write", path);
    file.write_all(&encoder.head(ready.dealt.all_rows())?).map_err(failed())?;
    let mut bytes = Vec::new();
    for round in 0..ready.dealt.rounds() {
        for rank in 0..group.size() {
            let Some((first, _)) = ready.dealt.turn(round, rank) else { continue };
            if rank == 0 {
                part(ready, encoder, round, first, &mut bytes)?;
                file.write_all(&bytes).map_err(failed())?;
            } else {
                let received = receive(group, rank)?;
                received.with_slice(|bytes: &[u8]| file.write_all(bytes))?.map_err(failed())?;
            }
        }
    }
    file.flush().map_err(failed())
}

/// On the other ranks: their parts, to rank 0.
fn send_all(ready: &mut Ready, encoder: &Encoder<'_>, group: &Group) -> Result<()> {
    let stream = Stream::default_of(Device::Cpu)?;
    let mut bytes = Vec::new();
    for round in 0..ready.dealt.rounds() {
        let Some((first, _)) = ready.dealt.turn(round, group.rank()) else { continue };
        part(ready, encoder, round, first, &mut bytes)?;
        let length = Tensor::from_slice(&[bytes.len() as i64], &[1], Device::Cpu)?.named("length of predictions");
        group.send(&length, 0, &stream)?;
        let bytes = Tensor::from_slice(&bytes[..], &[bytes.len()], Device::Cpu)?.named("predictions");
        group.send(&bytes, 0, &stream)?;
    }
    Ok(())
}

/// A part of rank `rank`'s.
fn receive(group: &Group, rank: usize) -> Result<Tensor> {
    let stream = Stream::default_of(Device::Cpu)?;
    let length = Tensor::zeros(&[1], DType::I64, Device::Cpu)?.named("length of predictions");
    group.receive(&length, rank, &stream)?;
    let length = length.to_vec::<i64>()?[0];
    let length = usize::try_from(length).map_err(|_| Error::Internal(format!("rank {rank} sends {length} bytes")))?;
    let bytes = Tensor::empty(&[length], DType::U8, Device::Cpu)?.named("predictions");
    group.receive(&bytes, rank, &stream)?;
    Ok(bytes)
}
