//! The checkpoint that a path means: its own folder, or in a run's folder the best by validation,
//! else the newest intact one.

use std::fs;
use std::path::Path;

use crate::checkpoint::{self, CHECKPOINTS, Chosen, MODEL_FILE, Opened, STATE_FILE, is_checkpoint};
use crate::error::{Error, Result, refuse};
use crate::hugging_face::{self, ADAPTER_FILE};
use crate::initial;
use crate::shown::shown;

/// The checkpoint that `path` means, with the base of adapters where `base` says, if it does. A
/// Hugging Face folder sees `context` tokens, if that is given.
pub(crate) fn choose(path: &Path, base: Option<&Path>, context: Option<usize>) -> Result<Chosen> {
    if hugging_face::is_folder(path) {
        let has_adapter = path.join(ADAPTER_FILE).exists();
        base.filter(|_| !has_adapter).map_or(Ok(()), no_base)?;
        return Ok(Chosen {
            opened: initial::open_folder(path, base, context)?,
            why: "of Hugging Face".into(),
        });
    }
    let mut chosen = checkpoint_of(path)?;
    rebase(&mut chosen.opened, base)?;
    Ok(chosen)
}

/// Takes the base of a checkpoint's adapters from another place.
pub(super) fn rebase(opened: &mut Opened, base: Option<&Path>) -> Result<()> {
    let (Some(base), config) = (base, &mut opened.state.config) else {
        return Ok(());
    };
    if !config.contains_key("lora") {
        return no_base(base);
    }
    config.insert("init-from".into(), base.to_string_lossy().into());
    Ok(())
}

fn no_base(got: &Path) -> Result<()> {
    let expected = "adapters (--lora), beside which the weights of that folder are";
    let help = "leave it out: the model is whole";
    Err(refuse("--init-from", got.display(), expected, help))
}

fn checkpoint_of(path: &Path) -> Result<Chosen> {
    let unread = hugging_face::help_for_unread(path);
    let help = "give --checkpoint the folder of a run (its --out) or of one of its checkpoints";
    let all = [Some(help.to_string()), unread.clone()];
    let help = all.into_iter().flatten().collect::<Vec<_>>().join("; ");
    let about = fs::metadata(path).map_err(Error::io("read", path, help))?;
    let refuse_unread = |help: String| {
        let expected = "the folder of a checkpoint or run, or of Hugging Face";
        refuse("--checkpoint", path.display(), expected, &help)
    };
    if about.is_file() {
        return unread.map_or_else(|| of_file(path), |help| Err(refuse_unread(help)));
    }
    if is_checkpoint(path) {
        return named(path);
    }
    let name = path.file_name().unwrap_or_default();
    match path.parent() {
        _ if path.join(CHECKPOINTS).is_dir() => checkpoint::best(path),
        Some(out) if name == CHECKPOINTS => checkpoint::best(out),
        _ if unread.is_some() => Err(refuse_unread(unread.unwrap_or_default())),
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
    if opened.is_foreign() {
        return format!("{folder} ({why})");
    }
    format!("{folder} ({why}), after step {step}")
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
