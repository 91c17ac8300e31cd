//! `ddp-train predict`: writes a model's prediction for each row to a file, which appears whole or
//! not at all. Rank 0 writes the batches of all ranks in the order of rows.

use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use ddp_comm::{Group, World};
use ddp_kernels::stream::Stream;
use ddp_kernels::transfer::{Phase, in_phase};
use ddp_kernels::{DType, Device, Tensor};

use super::load::{self, Asked, Ready};
use super::outputs::{check_finite, rescaled};
use crate::cli::PredictFlags;
use crate::data::{DataSpec, LabelName, Normalization, resolve};
use crate::error::{Error, Result, refuse};
use crate::files;
use crate::shown::shown;
use crate::tasks::{self, PredictionOptions, Predictions};

/// Writes the predictions for all rows.
pub fn predict(flags: &PredictFlags, world: &World) -> Result<()> {
    if world.rank() == 0 {
        check_free(flags)?;
        check_other(flags)?;
    }
    let PredictFlags {
        using,
        out,
        probabilities,
        logits,
        ..
    } = flags;
    let (probabilities, logits) = (*probabilities, *logits);
    let asked = Asked {
        using,
        labels: None,
        needs_labels: false,
        output: format!("out = {out:?}\nprobabilities = {probabilities}\nlogits = {logits}"),
    };
    let mut ready = in_phase(Phase::Setup, || load::ready(&asked, world))?;
    let task = tasks::of(&ready.opened.state.task);
    let encoder = &*task.predictions(PredictionOptions {
        format: out.format,
        probabilities,
        logits,
        names: ready.opened.state.label.as_ref().map(LabelName::columns),
    })?;
    let group = world.group("predictions")?;
    in_phase(Phase::Evaluation, || {
        if world.rank() > 0 {
            return send_all(&mut ready, encoder, &group);
        }
        let out = &out.path;
        let write = |file: &mut File| write_all(&mut ready, encoder, &group, file, out);
        let written = match flags.overwrite {
            true => files::replace_file(out, write),
            false => files::new_file(out, write),
        };
        written.map_err(|error| is_taken(error, out))
    })?;
    world.barrier()?;
    if world.rank() == 0 {
        let path = |path: &Path| shown(&path.to_string_lossy());
        let (rows, out, model) = (
            ready.rows.all_rows(),
            path(&out.path),
            path(&ready.opened.folder),
        );
        tracing::info!(
            "wrote {rows} predictions to {out}, from {model} ({})",
            ready.why
        );
    }
    Ok(())
}

/// Refuses to write over a file, before anything is computed.
fn check_free(flags: &PredictFlags) -> Result<()> {
    let out = &flags.out.path;
    match std::fs::symlink_metadata(out) {
        Ok(about) if about.is_dir() => Err(refuse(
            "--out",
            out.display(),
            "the name of a file",
            "it is a folder: give a name in it",
        )),
        Ok(_) if !flags.overwrite => Err(taken(out)),
        Ok(_) => Ok(()),
        Err(_) => check_folder(out),
    }
}

/// Refuses a file in a folder that does not exist, before anything is computed.
fn check_folder(out: &Path) -> Result<()> {
    let folder = out.parent().unwrap_or(Path::new(""));
    if folder.as_os_str().is_empty() || folder.is_dir() {
        return Ok(());
    }
    let (kind, help) = match folder.exists() {
        true => (ErrorKind::NotADirectory, "give another --out".to_string()),
        false => (
            ErrorKind::NotFound,
            format!("make the folder: mkdir -p {}", folder.display()),
        ),
    };
    Err(Error::Io {
        action: "write",
        path: out.to_path_buf(),
        source: kind.into(),
        help,
    })
}

/// Refuses to replace a file that the rows are read from, also by another name.
fn check_other(flags: &PredictFlags) -> Result<()> {
    let out = &flags.out.path;
    let (DataSpec::Files(spec), Ok(file)) = (&flags.using.data, std::fs::canonicalize(out)) else {
        return Ok(());
    };
    let is_out = |path: &PathBuf| std::fs::canonicalize(path).is_ok_and(|path| path == file);
    match resolve::files(&spec.path, "data")?
        .iter()
        .find(|path| is_out(path))
    {
        None => Ok(()),
        Some(path) => {
            let expected = format!("another file than {}, which --data reads", path.display());
            Err(refuse(
                "--out",
                out.display(),
                &expected,
                "give another name: the rows would be lost",
            ))
        }
    }
}

fn taken(out: &Path) -> Error {
    refuse(
        "--out",
        out.display(),
        "the name of a new file",
        "it exists: give another, or --overwrite",
    )
}

/// The error for a file that another process has created since.
fn is_taken(error: Error, out: &Path) -> Error {
    match error {
        Error::Io { source, .. } if source.kind() == ErrorKind::AlreadyExists => taken(out),
        other => other,
    }
}

/// Encodes this rank's batch of round `round`, which starts at row `first`.
fn part(
    ready: &mut Ready,
    encoder: &dyn Predictions,
    round: u64,
    first: u64,
    bytes: &mut Vec<u8>,
) -> Result<()> {
    let batch = ready.batches.load(round)?;
    let output = ready.forward.run(&batch.x)?;
    let normalization = ready.opened.state.target_normalization.as_ref();
    let output = rescaled(&output, normalization, Normalization::undo)?;
    bytes.clear();
    let outputs = output.count() / batch.mine.max(1);
    let encode = |values: &[f32]| {
        check_finite("the model gives", values, outputs, first)?;
        for (row, values) in (first..).zip(values.chunks(outputs)) {
            encoder.row(row, values, bytes);
        }
        Ok(())
    };
    output.with_slice(encode)?
}

/// On rank 0: writes its own batches and those of the others, in the order of rows.
fn write_all(
    ready: &mut Ready,
    encoder: &dyn Predictions,
    group: &Group,
    file: &mut File,
    path: &Path,
) -> Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, file);
    let failed = || files::failed("write", path);
    let rows = usize::try_from(ready.rows.all_rows())
        .map_err(|error| Error::Usage(format!("--out: too many rows: {error}")))?;
    file.write_all(&encoder.head(rows)?).map_err(failed())?;
    let mut bytes = Vec::new();
    for round in 0..ready.rows.rounds() {
        for rank in 0..group.size() {
            let Some(first) = ready.rows.first_row(round, rank) else {
                continue;
            };
            if rank == 0 {
                part(ready, encoder, round, first, &mut bytes)?;
                file.write_all(&bytes).map_err(failed())?;
            } else {
                let received = receive(group, rank)?;
                received
                    .with_slice(|bytes: &[u8]| file.write_all(bytes))?
                    .map_err(failed())?;
            }
        }
    }
    Ok(file.flush().map_err(failed())?)
}

/// On the other ranks: sends their batches to rank 0.
fn send_all(ready: &mut Ready, encoder: &dyn Predictions, group: &Group) -> Result<()> {
    let stream = Stream::default_of(Device::Cpu)?;
    let mut bytes = Vec::new();
    for round in 0..ready.rows.rounds() {
        let Some(first) = ready.rows.first_row(round, group.rank()) else {
            continue;
        };
        part(ready, encoder, round, first, &mut bytes)?;
        let length = Tensor::from_slice(&[bytes.len() as i64], &[1], Device::Cpu)?
            .named("length of predictions");
        group.send(&length, 0, &stream)?;
        let bytes =
            Tensor::from_slice(&bytes[..], &[bytes.len()], Device::Cpu)?.named("predictions");
        group.send(&bytes, 0, &stream)?;
    }
    Ok(())
}

/// Receives an encoded batch of rank `rank`.
fn receive(group: &Group, rank: usize) -> Result<Tensor> {
    let stream = Stream::default_of(Device::Cpu)?;
    let length = Tensor::zeros(&[1], DType::I64, Device::Cpu)?.named("length of predictions");
    group.receive(&length, rank, &stream)?;
    let length = length.to_vec::<i64>()?[0];
    let length = usize::try_from(length)
        .map_err(|_| Error::Internal(format!("rank {rank} sends {length} bytes")))?;
    let bytes = Tensor::empty(&[length], DType::U8, Device::Cpu)?.named("predictions");
    group.receive(&bytes, rank, &stream)?;
    Ok(bytes)
}
