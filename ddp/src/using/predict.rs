//! `ddp-train predict`: writes a model's prediction for each row to a file, which is written whole
//! or not at all. Rank 0 writes the batches of all ranks in the order of rows.

use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::{PathBufValueParser, TypedValueParser};
use ddp_comm::World;
use ddp_data::setting::DATA;
use ddp_kernels::mapped::Identity;
use ddp_kernels::transfer::{Phase, in_phase};

use super::load::{self, Given, ReadyModel, UsingFlags};
use super::outputs::{check_finite, rescaled};
use crate::data::{DataSpec, LabelName, Normalization, resolve};
use crate::error::{Error, Result, refuse};
use crate::files;
use crate::shown::shown;
use crate::tables::{self, KeptCells};
use crate::tasks::{self, PredictionOptions, Predictions, SaveAs};

/// Printed after the help of `predict`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  ddp-train predict --checkpoint out --data new.csv --out answers.csv
  ddp-train predict --checkpoint out --data new.csv --out answers.csv --keep all
  ddp-train predict --checkpoint out --data train.csv --held-out --out answers.csv --keep all
  ddp-train predict --checkpoint out --data new.npy --out answers.npy --probabilities
  mpirun -n 4 ddp-train predict --checkpoint out --data 'shards/*.npy' --out answers.csv --logits

A .csv has the columns row (from 0), prediction and probability; with --probabilities and --logits also p:CLASS and \
logit:CLASS. Columns that --keep names come before these, quoted as they need to be. For regression: row and prediction (prediction:COLUMN for each of several, by number if the data gave no names).

A .npy holds each row's class as i64: its name if all names are whole numbers, else its index in the sorted names (from 0); \
with --probabilities or --logits f32 [rows, classes]; for regression f32 [rows, outputs].

The file does not depend on the number of ranks. Labels are needed only with --held-out. Of built-in data (glyphs, synthetic:…) the held-out \
rows are used, if there are any.";

/// The flags of `predict`.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct PredictFlags {
    /// The flags of both commands.
    #[command(flatten)]
    pub using: UsingFlags,
    /// File to write: .npy or .csv
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(PredictionsFile::new))]
    pub out: PredictionsFile,
    /// Write the probability of every class
    #[arg(long)]
    pub probabilities: bool,
    /// Write the model's output for every class, before softmax
    #[arg(long)]
    pub logits: bool,
    /// Columns of the input to write before the predictions, separated by commas; all for all. A
    /// name that contains a comma must be the only one
    #[arg(id = "kept", long = "keep", value_name = "COLUMNS")]
    pub keep: Option<String>,
    /// Replace an existing file
    #[arg(long)]
    pub overwrite: bool,
}

impl PredictFlags {
    /// Refuses what does not fit into one array.
    pub(crate) fn check(&self) -> Result<()> {
        let is_npy = self.out.format == SaveAs::Npy;
        if is_npy && self.using.held_out {
            let expected = "a .csv with --held-out, whose column row says which rows these are";
            let (out, help) = (self.out.path.display(), "write a .csv");
            return Err(refuse("--out", out, expected, help));
        }
        if is_npy && self.probabilities && self.logits {
            return Err(Error::Usage(format!(
                "--out {}: expected --probabilities or --logits, since a .npy holds one array; \
                 help: leave one of them out, or write a .csv",
                self.out.path.display()
            )));
        }
        Ok(())
    }

    /// Distinguishes the contents of the tables with columns to write.
    fn kept_tables(&self) -> Result<Vec<Identity>> {
        let (Some(_), DataSpec::Files(spec)) = (&self.keep, &self.using.data) else {
            return Ok(Vec::new());
        };
        let read = |path: &PathBuf| {
            let about = std::fs::metadata(path).map_err(files::failed("read", path))?;
            // Its permissions and links may change.
            let changed_ns = 0;
            Ok(Identity {
                changed_ns,
                ..Identity::of(&about)
            })
        };
        resolve::files(&spec.path, DATA)?.iter().map(read).collect()
    }

    /// The columns of the input to write, if any.
    fn kept(&self) -> Result<Option<(Vec<u8>, KeptCells)>> {
        let Some(keep) = &self.keep else {
            return Ok(None);
        };
        match (&self.using.data, self.out.format) {
            (DataSpec::Files(spec), SaveAs::Csv) => {
                let files = resolve::files(&spec.path, DATA)?;
                Ok(Some(tables::keep(files, keep)?))
            }
            _ => {
                let expected = "tables as --data and a .csv as --out";
                Err(refuse("--keep", keep, expected, "leave it out"))
            }
        }
    }
}

/// A file of predictions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PredictionsFile {
    /// Its path.
    pub path: PathBuf,
    /// Its format, by the ending of its name.
    pub format: SaveAs,
}

impl PredictionsFile {
    pub(crate) fn new(path: PathBuf) -> Result<PredictionsFile, String> {
        let ending = path.extension().unwrap_or_default().to_ascii_lowercase();
        let format = match ending.to_str() {
            Some("csv") => SaveAs::Csv,
            Some("npy") => SaveAs::Npy,
            _ => return Err("expected a name that ends in .csv or .npy".into()),
        };
        Ok(PredictionsFile { path, format })
    }
}

/// Writes the predictions for all rows.
pub(crate) fn predict(flags: &PredictFlags, world: &World) -> Result<()> {
    if world.rank() == 0 {
        check_out(flags)?;
        flags.kept()?;
    }
    // They are read once for the model, and once for the columns that are kept.
    let tables = flags.kept_tables()?;
    let (using, out) = (&flags.using, &flags.out);
    let (probabilities, logits, keep) = (flags.probabilities, flags.logits, &flags.keep);
    let asked = Given {
        using,
        labels: None,
        // They say which rows are the training data's.
        needs_labels: using.held_out,
        sorted: true,
        output: format!(
            "out = {out:?}\nprobabilities = {probabilities}\nlogits = {logits}\nkeep = {keep:?}"
        ),
    };
    let mut ready = in_phase(Phase::Setup, || load::ready(&asked, world))?;
    let task = tasks::of(&ready.chosen.opened.state.task);
    let encoder = &*task.predictions(PredictionOptions {
        format: out.format,
        probabilities,
        logits,
        names: ready
            .chosen
            .opened
            .state
            .label
            .as_ref()
            .map(LabelName::columns),
    })?;
    let kept = &mut flags.kept()?;
    if let Some((kept, _)) = kept {
        check_names(kept, &encoder.head(0)?)?;
    }
    in_phase(Phase::Evaluation, || {
        if world.rank() > 0 {
            return write_all(&mut ready, (encoder, kept), world, None, &out.path);
        }
        let out = &out.path;
        let write = |file: &mut File| {
            write_all(&mut ready, (encoder, kept), world, Some(file), out)?;
            if flags.kept_tables()? == tables {
                return Ok(());
            }
            Err(Error::Data(format!(
                "--data {}: expected unchanged tables, got others than at the start; help: start again once nothing \
                 writes to them",
                using.data
            )))
        };
        let written = if flags.overwrite {
            files::replace_file(out, write)
        } else {
            files::new_file(out, write)
        };
        written.map_err(|error| is_taken(error, out))
    })?;
    world.barrier()?;
    if world.rank() == 0 {
        let path = |path: &Path| shown(&path.to_string_lossy());
        let (out, model) = (path(&out.path), path(&ready.chosen.opened.folder));
        let (rows, why) = (ready.rows.rows(), &ready.chosen.why);
        tracing::info!("wrote {rows} predictions to {out}, from {model} ({why})");
    }
    Ok(())
}

/// Refuses columns of the input with the names of those that are written besides.
fn check_names(kept: &[u8], written: &[u8]) -> Result<()> {
    let [kept, written] = [kept, written].map(String::from_utf8_lossy);
    let mut written = written.trim_end().split(',');
    let Some(name) = written.find(|name| kept.split(',').any(|it| it == *name)) else {
        return Ok(());
    };
    let expected = "columns with other names than those that predict writes";
    let help = "name the columns to keep, without this one";
    Err(refuse("--keep", format!("{name:?}"), expected, help))
}

/// Refuses to write over a file or into a folder that does not exist, before anything is computed.
fn check_out(flags: &PredictFlags) -> Result<()> {
    let out = &flags.out.path;
    let refused = |expected: &str, help| Err(refuse("--out", out.display(), expected, help));
    match std::fs::symlink_metadata(out) {
        Ok(about) if about.is_dir() => {
            return refused("the name of a file", "it is a folder: give a name in it");
        }
        Ok(_) if !flags.overwrite => return Err(taken(out)),
        Ok(_) => {}
        Err(_) => return check_folder(out),
    }
    // The rows may be read from this file, also by another name.
    let (DataSpec::Files(spec), Ok(file)) = (&flags.using.data, std::fs::canonicalize(out)) else {
        return Ok(());
    };
    let is_out = |path: &&PathBuf| std::fs::canonicalize(path).is_ok_and(|path| path == file);
    let files = resolve::files(&spec.path, DATA)?;
    files.iter().find(is_out).map_or(Ok(()), |path| {
        let expected = format!("another file than {}, which --data reads", path.display());
        refused(&expected, "give another name: the rows would be lost")
    })
}

fn check_folder(out: &Path) -> Result<()> {
    let folder = out.parent().unwrap_or(Path::new(""));
    let (kind, help) = if folder.as_os_str().is_empty() || folder.is_dir() {
        return Ok(());
    } else if folder.exists() {
        (ErrorKind::NotADirectory, "give another --out".into())
    } else {
        let make = format!("make the folder: mkdir -p {}", folder.display());
        (ErrorKind::NotFound, make)
    };
    Err(Error::io("write", out, help)(kind.into()))
}

fn taken(out: &Path) -> Error {
    let help = "it exists: give another, or --overwrite";
    refuse("--out", out.display(), "the name of a new file", help)
}

/// The error for a file that another process has created since.
fn is_taken(error: Error, out: &Path) -> Error {
    match error {
        Error::Io(error) if error.source.kind() == ErrorKind::AlreadyExists => taken(out),
        other => other,
    }
}

/// Writes a row: the columns of the input, then the prediction.
type Writers<'a> = (&'a dyn Predictions, &'a mut Option<(Vec<u8>, KeptCells)>);

/// Encodes this rank's batch of round `round`.
fn part(ready: &mut ReadyModel, (encoder, kept): &mut Writers<'_>, round: u64) -> Result<Vec<u8>> {
    let batch = ready.batches.load(round)?;
    let (first, mut bytes) = (batch.first, Vec::new());
    let number = |row| ready.rows.number(first + row);
    let output = ready.forward.run(&batch.x)?;
    let normalization = ready.chosen.opened.state.target_normalization.as_ref();
    let output = rescaled(&output, normalization, Normalization::undo_clipped)?;
    let outputs = output.count() / batch.mine.max(1);
    let encode = |values: &[f32]| -> Result<()> {
        check_finite("the model gives", values, outputs, number)?;
        for (row, values) in (0..).map(number).zip(values.chunks(outputs)) {
            if let Some((_, cells)) = kept {
                cells(row, &mut bytes)?;
            }
            encoder.row(row, values, &mut bytes);
        }
        Ok(())
    };
    output.with_slice(encode)??;
    Ok(bytes)
}

/// Predicts this rank's batches. Rank 0 writes those of all ranks to `file`, in the order of rows,
/// with one batch of each rank in memory.
fn write_all(
    ready: &mut ReadyModel,
    mut writers: Writers<'_>,
    world: &World,
    file: Option<&mut File>,
    path: &Path,
) -> Result<()> {
    let mut file = file.map(|file| BufWriter::with_capacity(1 << 20, file));
    let failed = || files::failed("write", path);
    let rows = usize::try_from(ready.rows.rows())
        .map_err(|error| Error::Usage(format!("--out: too many rows: {error}")))?;
    if let Some(file) = &mut file {
        let (encoder, kept) = &writers;
        let kept = kept.as_ref().map_or(&[][..], |(names, _)| names);
        let head = [kept, &encoder.head(rows)?].concat();
        file.write_all(&head).map_err(failed())?;
    }
    for round in 0..ready.batches.rounds() {
        let bytes = if round < ready.batches.count() {
            part(ready, &mut writers, round)?
        } else {
            Vec::new()
        };
        let of_ranks = world.all_gather_bytes(&bytes)?;
        if let Some(file) = &mut file {
            let written = of_ranks.iter().try_for_each(|bytes| file.write_all(bytes));
            written.map_err(failed())?;
        }
    }
    ready.rows.check_unchanged()?;
    file.map_or(Ok(()), |mut file| Ok(file.flush().map_err(failed())?))
}

#[cfg(test)]
mod tests {
    use ddp_kernels::files::testing::Scratch;

    use super::*;
    use crate::cli::{Command, parse};

    /// The flags of `predict` on the table `data`, with these besides.
    fn flags(data: &str, more: &str) -> PredictFlags {
        let words = format!("ddp-train predict --checkpoint out --data {data} {more}");
        match parse(words.split_whitespace()).unwrap() {
            (Command::Predict(flags), _) => flags,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn columns_that_cannot_be_kept_are_refused_before_anything_is_written() {
        let scratch = Scratch::new();
        let path = scratch.path().join("t.csv");
        std::fs::write(&path, "id,prediction\n1,2\n").unwrap();
        let data = path.to_str().unwrap();
        let refused = |error: Error, code: u8, part: &str| {
            let text = error.to_string();
            assert!(error.exit_code() == code && text.contains(part), "{text}");
        };
        for (data, out) in [(data, "a.npy"), ("glyphs", "a.csv")] {
            let error = flags(data, &format!("--out {out} --keep all")).kept();
            let expected = "--keep all: expected tables as --data and a .csv as --out";
            refused(error.err().unwrap(), 2, expected);
        }
        for (keep, is_wrong) in [("id", false), ("all", true)] {
            let (kept, _) = flags(data, &format!("--out a.csv --keep {keep}"))
                .kept()
                .unwrap()
                .unwrap();
            let checked = check_names(&kept, b"row,prediction\n");
            assert_eq!(checked.is_err(), is_wrong);
            checked
                .err()
                .into_iter()
                .for_each(|it| refused(it, 2, "--keep \"prediction\""));
        }
        let unknown = flags(data, "--out a.csv --keep predictions").kept();
        refused(
            unknown.err().unwrap(),
            65,
            "\"prediction\" was probably meant",
        );
    }
}
