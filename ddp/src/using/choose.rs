//! The checkpoint that a path means: its own folder, or in a run's folder the best by validation,
//! else the newest intact one; and whether it is of the run in whose folder it is.

use ddp_data::setting::DATA;
use std::fs;
use std::path::Path;

use crate::checkpoint::{self, Chosen, MODEL_FILE, Opened, STATE_FILE};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::hugging_face;
use crate::metrics::Run;
use crate::metrics_log::EVENTS_FILE;
use crate::shown::shown;
use crate::trainer::is_same_data;

/// The folder of a run that holds its checkpoints.
const CHECKPOINTS: &str = "checkpoints";

/// The checkpoint that `path` means.
pub(crate) fn choose(path: &Path) -> Result<Chosen> {
    let help = "give --checkpoint the folder of a run (its --out) or of one of its checkpoints";
    let about = fs::metadata(path).map_err(Error::io("read", path, help))?;
    if about.is_file() {
        return of_file(path);
    }
    if hugging_face::is_folder(path) {
        return Err(Error::Data(format!(
            "{}: expected the folder of a run or of a checkpoint, got one of Hugging Face; help: \
             ddp-train --init-from FOLDER --steps 0 --data … --val-data … --out RUN evaluates it \
             and makes a run of it",
            path.display()
        )));
    }
    if is_checkpoint(path) {
        return named(path);
    }
    let name = path.file_name().unwrap_or_default();
    match path.parent() {
        _ if path.join(CHECKPOINTS).is_dir() => checkpoint::best(path),
        Some(out) if name == CHECKPOINTS => checkpoint::best(out),
        _ => Err(Error::Data(format!(
            "{}: expected the folder of a run or of a checkpoint, got one with neither \
             {CHECKPOINTS}/ nor {MODEL_FILE} in it; help: give --checkpoint the --out of a run",
            path.display()
        ))),
    }
}

/// `out/checkpoints/step-00000007 (the best by validation), after step 7`
pub(crate) fn described(Chosen { opened, why }: &Chosen) -> String {
    let (folder, step) = (shown(&opened.folder.to_string_lossy()), opened.state.step);
    format!("{folder} ({why}), after step {step}")
}

/// Refuses a checkpoint of another run: settings or data that its run never had, according to the
/// metrics log of the run in whose folder it is. Call it when all ranks have opened the checkpoint:
/// a job in training may remove it while the log is read.
pub(crate) fn check_run(opened: &Opened) -> Result<()> {
    let folder = opened.folder.canonicalize().unwrap_or_default();
    let parent = folder.parent();
    let checkpoints = parent.filter(|parent| parent.ends_with(CHECKPOINTS));
    let Some(out) = checkpoints.and_then(Path::parent) else {
        return Ok(());
    };
    if !out.join(EVENTS_FILE).exists() {
        return Ok(());
    }
    // There may be millions of steps.
    let run = Run::read_log(out, |line| !line.starts_with(b"{\"event\":\"step\""))?;
    // Without its first line, or with one of another version, a log says nothing.
    let settings = Some(&run.start.config).filter(|settings| !settings.is_empty());
    let Some(then) = settings.and_then(|settings| Config::from_checkpoint(settings).ok()) else {
        return Ok(());
    };
    let mut changes = Config::of_checkpoint(opened)?.changes(&then);
    if !is_same_data(&opened.state.fingerprint, &run.start.fingerprint) {
        changes.push(format!("{DATA} with other rows"));
    }
    // A resume with --override may have changed them.
    let overridden = || run.resumes.iter().flat_map(|resume| &resume.overridden);
    let change = changes.into_iter().find(|change| {
        let name = change.split_inclusive(' ').next().unwrap_or_default();
        !overridden().any(|known| known.starts_with(name))
    });
    change.map_or(Ok(()), |change| {
        Err(Error::Data(format!(
            "{}: expected a checkpoint of the run in {}, got one of another run, with {change}; \
             help: move it to the run that it is of, or out of this one",
            opened.folder.display(),
            out.display()
        )))
    })
}

/// Whether the folder has files of a checkpoint.
pub(crate) fn is_checkpoint(folder: &Path) -> bool {
    let names = [MODEL_FILE, STATE_FILE];
    names.iter().any(|name| folder.join(name).exists())
}

/// The checkpoint in `folder`.
fn named(folder: &Path) -> Result<Chosen> {
    let help = "give --checkpoint the folder of the run, whose best intact checkpoint is used";
    let opened = checkpoint::open(folder);
    Ok(Chosen {
        opened: opened.map_err(|error| checkpoint::with_help(error, help))?,
        why: "as named".into(),
    })
}

/// The checkpoint that a file of it belongs to.
fn of_file(path: &Path) -> Result<Chosen> {
    match path.parent() {
        Some(folder) if folder.join(STATE_FILE).exists() => named(folder),
        _ => Err(Error::Usage(format!(
            "--checkpoint {}: expected the folder of a checkpoint, got a file without {STATE_FILE} \
             next to it, which has the layers, classes and normalization; help: give the folder \
             that training wrote",
            path.display()
        ))),
    }
}
