//! The model that follows from `--init-from`: what the folder holds, and that flags do not
//! contradict it.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::checkpoint::{self, STATE_FILE};
use crate::config::Config;
use crate::error::{Error, Result, refuse, with_flags};
use crate::hugging_face;
use crate::models::ModelSpec;
use crate::models::gpt::GptSpec;

/// What `--init-from` names.
#[derive(Clone, Debug)]
pub(crate) struct FirstValues {
    /// The folder with the values: of a run, that of its best checkpoint.
    folder: PathBuf,
    /// Its model. Its dropout is NaN if flags must decide it.
    pub(crate) model: ModelSpec,
    dropout_refusal: Option<String>,
}

/// Settings that a model may change after it was saved.
const FREE: [&str; 2] = ["dropout", "recompute"];

impl FirstValues {
    /// What `path` says about its model; nothing if it is a file with tensors only.
    pub(crate) fn of(path: &Path) -> Result<Option<FirstValues>> {
        // Only folders say something about their model; files are opened after other checks.
        let names_folder = path.extension().is_none() && path.to_str().is_some();
        if let (true, Err(source)) = (names_folder, std::fs::metadata(path)) {
            return Err(Error::Io {
                action: "open",
                path: path.to_path_buf(),
                source,
                help:
                    "give --init-from a model file, or the folder of a run, of a checkpoint or of \
                       Hugging Face"
                        .into(),
            });
        }
        let opened = if hugging_face::is_folder(path) {
            let described = hugging_face::describe(path)?;
            return Ok(Some(FirstValues {
                folder: path.to_path_buf(),
                model: ModelSpec::Gpt(described.spec),
                dropout_refusal: described.dropout_refusal,
            }));
        } else if path.join(STATE_FILE).exists() {
            checkpoint::open(path)?
        } else if path.join("checkpoints").is_dir() {
            checkpoint::best(path)?.opened
        } else {
            return Ok(None);
        };
        let mut model = Config::of_checkpoint(&opened)?.model;
        if let ModelSpec::Gpt(gpt) = &mut model {
            gpt.vocab = gpt.vocab.max(opened.state.task.outputs());
        }
        Ok(Some(FirstValues {
            folder: opened.folder,
            model,
            dropout_refusal: None,
        }))
    }

    /// Refuses settings of `config` that contradict the folder, and fills in the rest.
    pub(crate) fn settle(self, config: &mut Config) -> Result<()> {
        let mut saved = self.model;
        let given = &mut config.model;
        if given.name() != saved.name() {
            return Err(contradicts(
                "model",
                given.name(),
                saved.name(),
                &self.folder,
            ));
        }
        if let (ModelSpec::Gpt(given), ModelSpec::Gpt(saved)) = (&mut *given, &mut saved) {
            settle_gpt(given, saved);
            if let (true, Some(why)) = (given.dropout.is_nan(), self.dropout_refusal) {
                return Err(Error::Data(with_flags(&why)));
            }
        }
        let table = |model: &ModelSpec| serde_json::to_value(model).expect("settings fit JSON");
        let (there, here) = (table(&saved), table(given));
        for (name, there) in there.as_object().into_iter().flatten() {
            let here = here.get(name).unwrap_or(&Value::Null);
            if here != there && !FREE.contains(&name.as_str()) {
                return Err(contradicts(name, here, there, &self.folder));
            }
        }
        config.init_from = Some(self.folder);
        Ok(())
    }
}

/// Writes out what 0 stands for in both. A model may see fewer tokens than it was saved for.
fn settle_gpt(given: &mut GptSpec, saved: &mut GptSpec) {
    for gpt in [&mut *given, &mut *saved] {
        gpt.kv_heads = gpt.kv_heads();
        gpt.mlp_width = gpt.mlp_width();
    }
    if given.vocab == 0 {
        given.vocab = saved.vocab;
    }
    saved.context = saved.context.min(given.context);
}

fn contradicts(
    name: &str,
    got: impl std::fmt::Display,
    expected: impl std::fmt::Display,
    folder: &Path,
) -> Error {
    let expected = format!("{expected}, as in {}", folder.display());
    let help = "leave out --model and all settings of the model: they follow from --init-from";
    refuse(&format!("--{name}"), got, &expected, help)
}
