//! The model of `--init-from`: reads it from the folder, and checks that flags do not contradict
//! it.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::checkpoint::{self, MODEL_FILE, STATE_FILE};
use crate::config::Config;
use crate::error::{Error, Result, refuse};
use crate::hugging_face;
use crate::models::ModelSpec;

/// What `--init-from` names.
#[derive(Clone, Debug)]
pub(crate) struct InitialWeights {
    /// The folder with the values: of a run, that of its best checkpoint.
    pub(crate) folder: PathBuf,
    /// Its model. Its dropout is NaN if flags must decide it.
    pub(crate) model: ModelSpec,
    dropout_refusal: Option<String>,
}

/// Refuses what is neither a file of tensors nor a folder with one.
fn check_weights(path: &Path) -> Result<()> {
    let folder = path
        .parent()
        .filter(|it| path.is_file() && hugging_face::is_folder(it));
    let is_weights = match path.metadata() {
        Ok(about) if about.is_dir() => path.join(MODEL_FILE).exists(),
        Ok(about) if about.is_file() => path.extension().is_some_and(|it| it == "safetensors"),
        _ => true,
    };
    let help = match (folder, hugging_face::help_for_unread(path)) {
        (Some(folder), _) => format!("give its folder, {}", folder.display()),
        (None, Some(help)) => help,
        (None, None) if is_weights => return Ok(()),
        (None, None) => "pickles are not read: download the model's .safetensors".into(),
    };
    Err(Error::Data(format!(
        "--init-from {}: expected a Hugging Face folder (with config.json), the folder of a \
         checkpoint or run, or our model.safetensors; help: {help}",
        path.display()
    )))
}

/// Settings that a model may change after it was saved. It may also see fewer tokens.
const FREE: &str = "dropout export-class longest-context recompute recompute-blocks";

impl InitialWeights {
    /// What `path` says about its model; nothing if it is a file with tensors only.
    pub(crate) fn of(path: &Path) -> Result<Option<InitialWeights>> {
        // Only folders say something about their model; files are opened after other checks.
        let missing = path.metadata().err();
        let missing = missing.filter(|error| error.kind() == ErrorKind::NotFound);
        let is_file = path
            .extension()
            .is_some_and(|ending| ending == "safetensors");
        if let (false, Some(_), Some(source)) = (is_file, path.to_str(), missing) {
            let help = hugging_face::help_for_unread(path);
            let help = help.unwrap_or(
                "there is no such folder; a model of the hub is downloaded with hf download NAME \
                 --local-dir FOLDER"
                    .into(),
            );
            return Err(Error::io("open", path, help)(source));
        }
        if hugging_face::is_folder(path) {
            let mut described = hugging_face::describe(path)?;
            if described.dropout_refusal.is_some() {
                described.spec.dropout = f64::NAN;
            }
            return Ok(Some(InitialWeights {
                folder: path.to_path_buf(),
                model: described.spec.into(),
                dropout_refusal: described.dropout_refusal,
            }));
        }
        let opened = if path.join(STATE_FILE).exists() {
            checkpoint::open(path)?
        } else if path.join("checkpoints").is_dir() {
            checkpoint::best(path)?.opened
        } else {
            return check_weights(path).map(|()| None);
        };
        let config = Config::of_checkpoint(&opened)?;
        if config.lora.is_some() {
            return Err(Error::Data(format!(
                "--init-from {}: expected a whole model, got adapters (--lora); help: give what \
                 export --merge writes, or their base, and what export writes as --lora from=FOLDER",
                path.display()
            )));
        }
        let mut model = config.model;
        // How that run saved memory is not this one's matter.
        for (name, value) in [("recompute", "none"), ("recompute-blocks", "0")] {
            if let Some(setting) = model.setting(name) {
                setting.field.set(value).map_err(Error::Internal)?;
            }
        }
        model.write_out(opened.state.task.outputs());
        Ok(Some(InitialWeights {
            folder: opened.folder,
            model,
            dropout_refusal: None,
        }))
    }

    /// Refuses settings of `config` that contradict the folder, and fills in the rest.
    pub(crate) fn settle(self, config: &mut Config) -> Result<()> {
        let refused = |name: &str, got: &str, expected: &str| {
            let expected = format!("{expected}, as in {}", self.folder.display());
            let help =
                "leave out --model and all settings of the model: they follow from --init-from";
            Err(refuse(&format!("--{name}"), got, &expected, help))
        };
        let mut saved = self.model;
        let given = &mut config.model;
        if given.name() != saved.name() {
            return refused("model", given.name(), saved.name());
        }
        let outputs = saved.vocabulary().unwrap_or(0);
        saved.write_out(outputs);
        given.write_out(outputs);
        // JSON has no NaN.
        if let (true, Some(why)) = (given.value("dropout").is_null(), self.dropout_refusal) {
            return Err(Error::Data(why));
        }
        for (name, there) in saved.values() {
            let here = given.value(&name);
            let is_shorter = name == "context" && given.context() < saved.context();
            if here != there && !is_shorter && !FREE.split(' ').any(|free| free == name) {
                let most = if name == "context" { "at most " } else { "" };
                return refused(&name, &here.to_string(), &format!("{most}{there}"));
            }
        }
        config.init_from = Some(self.folder);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The dot made it the name of a file, which is opened later, and the error was about the data.
    #[test]
    fn a_name_of_the_hub_is_no_file() {
        let error = InitialWeights::of(Path::new("meta-llama/Llama-3.2-1B")).unwrap_err();
        let text = error.to_string();
        assert_eq!(error.exit_code(), 74);
        let help = "there is no such folder";
        let download = "hf download meta-llama/Llama-3.2-1B --local-dir FOLDER";
        assert!(text.contains(help) && text.contains(download), "{text}");
        let file = InitialWeights::of(Path::new("no/model.safetensors")).unwrap();
        assert!(file.is_none(), "a file is opened later");
    }

    /// The errors used to be about --context or the data.
    #[test]
    fn what_is_no_model_is_refused_before_data_are_read() {
        let folder = std::env::temp_dir().join(format!("ddp-initial-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("model")).unwrap();
        let refused = |name: &str, part: &str| {
            let text = InitialWeights::of(&folder.join(name))
                .unwrap_err()
                .to_string();
            assert!(text.contains(name) && text.contains(part), "{text}");
        };
        std::fs::write(folder.join("model.gguf"), "GGUF").unwrap();
        refused("model.gguf", "GGUF is not read");
        refused("model", "expected a Hugging Face folder");
        std::fs::write(folder.join("model/q4.gguf"), "GGUF").unwrap();
        refused("model", r#"model", gguf_file="q4.gguf")"#);
        let config = r#"{"architectures": ["GPT2LMHeadModel"]}"#;
        std::fs::write(folder.join("model/config.json"), config).unwrap();
        refused("model/config.json", "give its folder");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
