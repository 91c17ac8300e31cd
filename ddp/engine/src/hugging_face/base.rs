//! What an export takes from the folder that its run started from: whatever training did not
//! change, such as the chat template and keys of `config.json` that no setting here stands for.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ddp_data::text::{CHAT_FILES, TOKENIZER_FILE, Vocabulary, check_link};
use ddp_kernels::files::read_up_to;
use serde_json::{Map, Value};

use super::config::{DescribedModel, describe, keys_of};
use super::keys::Keys;
use super::{CONFIG_FILE, is_folder};
use crate::checkpoint::{STATE_FILE, State, refuse, unreadable};
use crate::error::Result;

/// The other files of tokenizers.
const TOKENIZER_FILES: [&str; 5] = [
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
];
/// Longer ones are refused.
const BYTES_MAX: u64 = 256 << 20;
/// Runs that started from another run: more are not followed.
const RUNS_MAX: usize = 64;
/// The names of the key for the type of the weights, the one of version 5 of transformers first.
const DTYPE: [&str; 2] = ["dtype", "torch_dtype"];
const END: &str = "eos_token_id";

/// A folder that a run started from.
#[derive(Debug)]
pub struct Base {
    described: DescribedModel,
    config: Map<String, Value>,
    /// None if the run's data were made with another tokenizer, or an unknown one.
    files: Option<BTreeMap<&'static str, Vec<u8>>>,
    /// The tokens at which the model ends a text.
    ends: Vec<u64>,
}

impl Base {
    /// The base of a run that started from `init_from`, with the tokenizer of its data; None if
    /// the run did not start from a Hugging Face folder. Warns about what an export will lack.
    pub fn of(init_from: &Path, tokenizer: Option<&Vocabulary>) -> Option<Base> {
        let read = origin(init_from).and_then(|folder| match folder {
            Some(folder) => Base::read(&folder, tokenizer).map(Some),
            None => Ok(None),
        });
        read.unwrap_or_else(|error| {
            tracing::warn!(
                "the export lacks what it would take from the model that the run started from, \
                 such as the chat template and keys of config.json: {error}"
            );
            None
        })
    }

    fn read(folder: &Path, tokenizer: Option<&Vocabulary>) -> Result<Base> {
        let mut base = Base {
            described: describe(folder)?,
            config: Keys::read(&folder.join(CONFIG_FILE))?.left,
            files: None,
            ends: Vec::new(),
        };
        // It names Python code, which an export does not have.
        base.config.remove("auto_map");
        let path = folder.join(TOKENIZER_FILE);
        let there = tokenizer.filter(|_| path.is_file());
        let there = there.map(|_| Vocabulary::read(&path)).transpose()?;
        let both = there.zip(tokenizer);
        let Some((there, here)) = both.filter(|(there, here)| there.hash == here.hash) else {
            tracing::warn!(
                "the export takes neither chat template, generation_config.json nor end tokens \
                 from {}: the data were not tokenized with its tokenizer.json; help: copy them \
                 from there if they fit the tokens that were trained on",
                folder.display()
            );
            return Ok(base);
        };
        base.ends = there.ends().into_iter().map(u64::from).collect();
        match &base.config.get(END) {
            Some(Value::Array(all)) => base.ends.extend(all.iter().filter_map(Value::as_u64)),
            one => base.ends.extend(one.and_then(Value::as_u64)),
        }
        let own = there.files().map(|(name, bytes)| (name, bytes.to_vec()));
        let mut files: BTreeMap<_, _> = own.collect();
        // Other forms of the same tokenizer.
        for name in TOKENIZER_FILES {
            let path = folder.join(name);
            if there.file == here.file && path.is_file() {
                check_link(&path).map_err(|why| refuse(&path, why))?;
                let bytes = read_up_to(&path, BYTES_MAX).map_err(unreadable(&path))?;
                let long = format!("expected at most {BYTES_MAX} bytes, got more; help: remove it");
                files.insert(name, bytes.ok_or_else(|| refuse(&path, long))?);
            }
        }
        base.files = Some(files);
        Ok(base)
    }

    /// Whether the model still ends texts with the base's tokens. It does not if it was trained on
    /// conversations that end otherwise.
    fn keeps_ends(&self, tokenizer: Option<&Vocabulary>, end: Option<usize>) -> bool {
        let has_own = tokenizer.is_some_and(|it| !it.chat_files.is_empty());
        let is_known = |end: usize| self.ends.contains(&(end as u64));
        self.files.is_some() && (!has_own || end.is_none_or(is_known))
    }

    /// Its files of the tokenizer, replaced by those of the run's data.
    pub(super) fn files(
        self,
        tokenizer: Option<&Vocabulary>,
        end: Option<usize>,
    ) -> BTreeMap<&'static str, Vec<u8>> {
        let keeps_ends = self.keeps_ends(tokenizer, end);
        let mut files = self.files.unwrap_or_default();
        let [config, template, generation] = CHAT_FILES;
        let Some(own) = tokenizer else {
            return files;
        };
        if [config, template]
            .iter()
            .any(|it| own.chat_files.contains_key(it))
        {
            // Either of them may hold the template.
            files.retain(|name, _| ![config, template].contains(name));
        }
        files.extend(own.files().map(|(name, bytes)| (name, bytes.to_vec())));
        let ends = own.ends();
        if !keeps_ends && end.is_some_and(|end| !ends.contains(&(end as u32))) {
            // The data's file may be the base's, too.
            files.remove(generation);
        }
        files
    }

    /// Its `config.json`, with those keys of `ours` that have another value than for the base.
    pub(super) fn config(
        &self,
        ours: Map<String, Value>,
        tokenizer: Option<&Vocabulary>,
        end: Option<usize>,
    ) -> Map<String, Value> {
        let DescribedModel {
            spec, architecture, ..
        } = &self.described;
        let theirs = keys_of(spec, spec.vocab, None, architecture);
        if theirs["architectures"] != ours["architectures"] {
            return ours;
        }
        let keeps_ends = self.keeps_ends(tokenizer, end);
        let mut keys = self.config.clone();
        let dtype = DTYPE.into_iter().find(|name| keys.contains_key(*name));
        let dtype = dtype.unwrap_or(DTYPE[1]);
        keys.retain(|name, _| name == dtype || !DTYPE.contains(&name.as_str()));
        for (key, value) in ours {
            if key == DTYPE[1] {
                keys.insert(dtype.into(), value);
            } else if match key.as_str() {
                END => !keeps_ends,
                "bos_token_id" => self.files.is_none(),
                _ => theirs.get(&key) != Some(&value),
            } {
                keys.insert(key, value);
            }
        }
        keys
    }
}

/// The Hugging Face folder from which a run started, if need be by way of other runs; None if the
/// first one started from nothing, or from a file.
fn origin(init_from: &Path) -> Result<Option<PathBuf>> {
    let mut folder = init_from.to_path_buf();
    for _ in 0..RUNS_MAX {
        if is_folder(&folder) {
            return Ok(Some(folder));
        }
        if folder.is_file() {
            return Ok(None);
        }
        let path = folder.join(STATE_FILE);
        let bytes = read_up_to(&path, BYTES_MAX).map_err(unreadable(&path))?;
        let state = State::parse(&bytes.unwrap_or_default()).map_err(|why| refuse(&path, why))?;
        match state.config.get("init-from").and_then(Value::as_str) {
            Some(before) => folder = before.into(),
            None => return Ok(None),
        }
    }
    Ok(None)
}
