//! The keys of a `config.json`: those that are read are taken, and the rest is refused by name.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::architecture::Architecture;
use crate::checkpoint::text_of;
use crate::error::{Error, Result};

/// Longer files are refused.
const BYTES_MAX: u64 = 1 << 20;

/// The keys that were not taken yet.
pub(super) struct Keys {
    pub(super) path: PathBuf,
    pub(super) left: Map<String, Value>,
}

impl Keys {
    pub(super) fn read(path: &Path) -> Result<Keys> {
        let text = text_of(path, BYTES_MAX)?;
        let left = serde_json::from_str(&text).map_err(|error| {
            Error::Data(format!(
                "{}: expected a JSON object: {error}; help: give a folder that save_pretrained \
                 wrote",
                path.display()
            ))
        })?;
        let path = path.to_path_buf();
        Ok(Keys { path, left })
    }

    /// The value of `key`; `default` where it is missing or null.
    pub(super) fn take<T: DeserializeOwned>(&mut self, key: &str, default: T) -> Result<T> {
        Ok(self.optional(key, None)?.unwrap_or(default))
    }

    /// The value of `key`, None where it is null; `default` where it is missing.
    pub(super) fn optional<T: DeserializeOwned>(
        &mut self,
        key: &str,
        default: Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.left.remove(key) else {
            return Ok(default);
        };
        let read = serde_json::from_value(value.clone());
        read.map_err(|error| self.of_wrong_type(key, &value, &error.to_string()))
    }

    /// Refuses any value of `key` except `only`, its default.
    pub(super) fn expect(&mut self, key: &str, only: Value) -> Result<()> {
        let got = self.take(key, only.clone())?;
        let is_same_number = got.is_number() && got.as_f64() == only.as_f64();
        if got == only || is_same_number {
            return Ok(());
        }
        Err(self.unknown(key, &got, &format!("{only}: nothing else is supported")))
    }

    /// Refuses the remaining keys, except those that are known not to matter. Those that begin with
    /// `_` are notes of transformers.
    pub(super) fn finish(&self, architecture: &Architecture) -> Result<()> {
        let is_irrelevant = |key: &str| {
            key.starts_with('_') || matches!(architecture.treatment(key), Some(("irrelevant", _)))
        };
        let is_unknown = |(key, value): &(&String, &Value)| !is_irrelevant(key) && !value.is_null();
        match self.left.iter().find(is_unknown) {
            None => Ok(()),
            Some((key, value)) if key == "quantization_config" => Err(self.refused(&format!(
                "{key} {value}: expected weights in bf16, f16 or f32, got quantized ones; help: give the \
                 folder of the model that they were made from"
            ))),
            Some((key, value)) => Err(self.refused(&format!(
                "{key} {value}: expected no such key, since this program does not know it; help: \
                 remove it, if the model does not depend on it"
            ))),
        }
    }

    /// The error of a parser, which names types of Rust.
    pub(super) fn of_wrong_type(&self, key: &str, got: &Value, error: &str) -> Error {
        let (_, expected) = error.rsplit_once("expected ").unwrap_or(("", error));
        let expected = match expected {
            "usize" | "i64" => "a whole number",
            "f64" => "a number",
            other => other,
        };
        self.unknown(key, got, expected)
    }

    pub(super) fn unknown(&self, key: &str, got: &Value, expected: &str) -> Error {
        self.refused(&format!(
            "{key} {got}: expected {expected}; help: give another folder"
        ))
    }

    pub(super) fn refused(&self, why: &str) -> Error {
        Error::Data(self.text(why))
    }

    pub(super) fn text(&self, why: &str) -> String {
        format!("{}: {why}", self.path.display())
    }
}
