//! The values that a model starts with: those of `init-from`. Where a run trains adapters, they are
//! the base, which is read again whenever the run is resumed or its model is used.

use std::path::{Path, PathBuf};

use ddp_data::text::{TOKENIZER_FILE, Vocabulary};
use ddp_data::{TaskSpec, TokenizerId};
use ddp_nn::models::family::refuse;
use ddp_nn::params::Params;

use crate::checkpoint::{self, MODEL_FILE, Opened, State};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::hugging_face::{self, ADAPTER_FILE};
use crate::lora;
use crate::setting::{INIT_FROM, LORA};

/// A Hugging Face folder, or that of an adapter with its base, as a checkpoint of no steps. `base`
/// is where the base is, if not where the adapter says; a model of `context` tokens sees no more.
pub fn open_folder(folder: &Path, base: Option<&Path>, context: Option<usize>) -> Result<Opened> {
    let has_adapter = folder.join(ADAPTER_FILE).exists();
    let adapter = has_adapter.then(|| lora::describe(folder)).transpose()?;
    let (lora, named) = adapter.unzip();
    let named = named.flatten().map(PathBuf::from);
    let base = base.map(PathBuf::from).or(named);
    let base = base.unwrap_or_else(|| folder.to_path_buf());
    if has_adapter {
        check_there(&base, "the adapter", folder)?;
    }
    let mut model = hugging_face::checked(&base)?.spec;
    let usable = model.usable_context();
    model.context = context.map_or(usable, |context| context.min(usable));
    let mut places = [folder, &base].into_iter();
    let tokenizer_in = places.find(|it| it.join(TOKENIZER_FILE).exists());
    let tokenizer = tokenizer_in.map(|it| Vocabulary::read(&it.join(TOKENIZER_FILE)));
    let tokenizer = tokenizer.transpose()?.map(|vocabulary| TokenizerId {
        end_of_text: vocabulary.end_of_text(None).ok().map(|end| end as usize),
        hash: vocabulary.hash,
    });
    let (row_shape, vocabulary) = (vec![model.context], model.vocab);
    let config = Config {
        model: model.into(),
        init_from: Some(base.clone()),
        lora,
        ..Config::default()
    };
    let state = State {
        task: TaskSpec::NextToken {
            // A model of texts by bytes has no tokenizer, and one more token if texts end.
            are_bytes: tokenizer.is_none() && matches!(vocabulary, 256 | 257),
            vocabulary,
            tokenizer,
            packed: config.data_request().packed,
        },
        config: config.to_json(),
        row_shape,
        ..State::default()
    };
    let tokenizer_in = tokenizer_in.map(PathBuf::from);
    Ok(Opened::foreign(folder, state, tokenizer_in))
}

/// Refuses to go on without the folder that adapters were trained beside.
fn check_there(base: &Path, what: &str, of: &Path) -> Result<()> {
    let help = format!(
        "it is the base model of {what} {}: put it back, or give {INIT_FROM} FOLDER, where it is now",
        of.display()
    );
    match std::fs::metadata(base) {
        Ok(_) => Ok(()),
        Err(error) => Err(Error::io("read", base, help)(error)),
    }
}

/// Fills a model, or the base of its adapters, with the values that `path` names. Rank 0 checks the
/// bytes of a checkpoint's file. Returns a digest of the values.
pub fn load(path: &Path, parts: &[&Params], rank: usize) -> Result<String> {
    if hugging_face::is_folder(path) {
        return hugging_face::load(path, parts);
    }
    let file = path.join(MODEL_FILE);
    if path.is_dir() && !file.exists() {
        let expected = "a model file, or the folder of a checkpoint or of Hugging Face";
        let help = "give a folder in its checkpoints, if this is a run";
        return Err(refuse("init-from", path.display(), expected, help).into());
    }
    let path = if path.is_dir() { &file } else { path };
    if path.exists() && !path.is_file() {
        let expected = "an ordinary file";
        let help = "save what a pipe or a device gives as a file first";
        return Err(refuse("init-from", path.display(), expected, help).into());
    }
    checkpoint::load_initial(path, parts, rank)
}

/// Fills the base of the adapters that `config` asks for, if it does. It must have the digest
/// `then`, if that is known. Returns its digest.
pub(crate) fn load_base(
    config: &Config,
    parts: &[&Params],
    rank: usize,
    then: Option<&String>,
) -> Result<Option<String>> {
    let (Some(_), Some(path)) = (&config.lora, &config.init_from) else {
        return Ok(None);
    };
    check_there(path, "the run", &config.out)?;
    let now = load(path, parts, rank)?;
    match then.filter(|then| **then != now) {
        None => Ok(Some(now)),
        Some(then) => Err(Error::Data(format!(
            "{INIT_FROM} {}: expected the base model that the adapters were trained on ({LORA}), of \
             digest {then}, got other weights, of digest {now}; help: give that folder, or put it back as it was",
            path.display()
        ))),
    }
}

/// Fills a model with the values of a checkpoint, which has these settings.
pub fn load_opened(opened: &Opened, config: &Config, parts: &[&Params]) -> Result<()> {
    let base = load_base(config, parts, 0, opened.state.base.as_ref())?;
    if !opened.is_foreign() {
        return checkpoint::load_opened(opened, parts);
    }
    match (&config.lora, &config.init_from) {
        (Some(lora), Some(path)) => {
            let base = (path.as_path(), base.as_deref());
            lora::load(lora, &config.model, parts, base, 0)
        }
        _ => load(&opened.folder, parts, 0).map(drop),
    }
}
