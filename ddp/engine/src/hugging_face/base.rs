//! What an export takes from the folder that its run started from: whatever training did not
//! change, such as the chat template and keys of `config.json` that no setting here stands for.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ddp_data::text::{CHAT_FILES, TOKENIZER_FILE, Vocabulary};
use ddp_kernels::files::read_up_to;
use serde_json::{Map, Value};

use super::config::{DescribedModel, describe, keys_of};
use super::keys::Keys;
use super::{CONFIG_FILE, is_folder};
use crate::checkpoint::{self, refuse, unreadable};
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
    /// That of a run which started from `init_from`, and whose data have this tokenizer. Warns
    /// about what an export will lack.
    pub fn of(init_from: &Path, tokenizer: Option<&Vocabulary>) -> Result<Option<Base>> {
        let Some(folder) = &origin(init_from) else {
            tracing::warn!(
                "the export has neither the chat template nor the keys of config.json of the \
                 model that the run started from: {} is no Hugging Face folder (any more); help: \
                 put it back, or copy what you need from it",
                init_from.display()
            );
            return Ok(None);
        };
        let (described, config) = (
            describe(folder)?,
            Keys::read(&folder.join(CONFIG_FILE))?.left,
        );
        let path = folder.join(TOKENIZER_FILE);
        let there = path
            .is_file()
            .then(|| Vocabulary::read(&path))
            .transpose()?;
        let there = there.filter(|there| tokenizer.is_some_and(|here| here.hash == there.hash));
        let Some(there) = there else {
            tracing::warn!(
                "the export lacks the chat template, generation_config.json and the end tokens of \
                 {}: the data were not tokenized with its tokenizer.json; help: copy them from \
                 there if they fit the tokens that were trained on",
                folder.display()
            );
            return Ok(Some(Base {
                described,
                config,
                files: None,
                ends: Vec::new(),
            }));
        };
        let mut ends: Vec<u64> = there.ends().into_iter().map(u64::from).collect();
        match &config.get(END) {
            Some(Value::Array(all)) => ends.extend(all.iter().filter_map(Value::as_u64)),
            one => ends.extend(one.and_then(Value::as_u64)),
        }
        let own = there.files().map(|(name, bytes)| (name, bytes.to_vec()));
        let mut files: BTreeMap<_, _> = own.collect();
        for name in TOKENIZER_FILES {
            let path = folder.join(name);
            if path.is_file() {
                let bytes = read_up_to(&path, BYTES_MAX).map_err(unreadable(&path))?;
                let long = || {
                    refuse(
                        &path,
                        format!("expected at most {BYTES_MAX} bytes, got more; help: remove it"),
                    )
                };
                files.insert(name, bytes.ok_or_else(long)?);
            }
        }
        Ok(Some(Base {
            described,
            config,
            files: Some(files),
            ends,
        }))
    }

    /// Whether the model still ends texts as the base does: not if it learnt from conversations
    /// with another end.
    fn keeps_ends(&self, tokenizer: Option<&Vocabulary>, end: Option<usize>) -> bool {
        let has_own = tokenizer.is_some_and(|it| !it.chat_files.is_empty());
        let is_known = |end: usize| self.ends.contains(&(end as u64));
        self.files.is_some() && (!has_own || end.is_none_or(is_known))
    }

    /// Its files of the tokenizer, for those that the run's data lack.
    pub(super) fn files(
        self,
        tokenizer: Option<&Vocabulary>,
        end: Option<usize>,
    ) -> BTreeMap<&'static str, Vec<u8>> {
        let keeps_ends = self.keeps_ends(tokenizer, end);
        let mut files = self.files.unwrap_or_default();
        let [config, template, generation] = CHAT_FILES;
        if tokenizer.is_some_and(|it| !it.chat_files.is_empty()) {
            // A template may be in either.
            files.retain(|name, _| ![config, template].contains(name));
        }
        if !keeps_ends {
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

/// The Hugging Face folder from which a run started, if need be by way of other runs.
fn origin(init_from: &Path) -> Option<PathBuf> {
    let mut folder = init_from.to_path_buf();
    for _ in 0..RUNS_MAX {
        if is_folder(&folder) {
            return Some(folder);
        }
        let opened = checkpoint::open(&folder).ok()?;
        folder = opened.state.config.get("init-from")?.as_str()?.into();
    }
    None
}
