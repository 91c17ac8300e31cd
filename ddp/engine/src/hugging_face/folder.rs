//! The tensors of a folder: in `model.safetensors`, or in several files that an index lists.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};

use ddp_data::safetensors::TensorEntry;
use ddp_kernels::files::open_ordinary;
use serde::Deserialize;

use super::architecture::Architecture;
use super::names::{is_constant, with_prefix};
use crate::checkpoint::{FileDType, MODEL_FILE, ReadFrom, header_of, refuse, text_of, unreadable};
use crate::error::Result;

/// The file that says which tensor is in which file.
const INDEX_FILE: &str = "model.safetensors.index.json";
/// Longer ones are refused: that of a model with 50,000 tensors has 5 MB.
const INDEX_BYTES_MAX: u64 = 64 << 20;

/// A tensor in an open file.
#[derive(Debug)]
pub(super) struct FoundTensor {
    pub(super) shape: Vec<usize>,
    pub(super) dtype: FileDType,
    /// Its first byte in the file.
    start: u64,
    file: usize,
}

/// All tensors of a folder by name, with the prefix of the whole model.
#[derive(Debug)]
pub(super) struct Tensors {
    pub(super) found: BTreeMap<String, FoundTensor>,
    files: Vec<(PathBuf, File)>,
}

impl Tensors {
    /// Opens the files and reads where their tensors are.
    pub(super) fn open(folder: &Path, architecture: &Architecture) -> Result<Tensors> {
        let mut tensors = Tensors {
            found: BTreeMap::new(),
            files: Vec::new(),
        };
        for name in files(folder)? {
            let path = folder.join(name);
            let file = open_ordinary(&path).map_err(unreadable(&path))?;
            let header = header_of(&path, &file)?;
            for entry in &header.entries {
                tensors.add(&path, entry, header.data_start, architecture)?;
            }
            tensors.files.push((path, file));
        }
        Ok(tensors)
    }

    fn add(
        &mut self,
        path: &Path,
        entry: &TensorEntry,
        data_start: u64,
        architecture: &Architecture,
    ) -> Result<()> {
        let name = with_prefix(architecture, &entry.name);
        if is_constant(architecture, &name) {
            return Ok(());
        }
        let found = FoundTensor {
            shape: entry.shape.clone(),
            dtype: FileDType::of(entry).map_err(|why| refuse(path, why))?,
            start: data_start + entry.start,
            file: self.files.len(),
        };
        if self.found.insert(name, found).is_none() {
            return Ok(());
        }
        let text =
            "in one of the files, got it twice; help: give a folder that save_pretrained wrote";
        Err(refuse(path, format!("expected {} {text}", entry.name)))
    }

    /// Reads the values of a tensor from the one at `first` on. `bytes` is a scratch buffer.
    pub(super) fn read(
        &self,
        found: &FoundTensor,
        first: usize,
        values: &mut [f32],
        bytes: &mut Vec<u8>,
    ) -> Result<()> {
        let (path, file) = &self.files[found.file];
        let start = found.start + (first * found.dtype.bytes()) as u64;
        let mut file = ReadFrom::place(file, start);
        let read = found.dtype.read(&mut file, values, bytes);
        read.map_err(unreadable(path))
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The names of the files with tensors. As in transformers, an index counts only without
/// `model.safetensors`.
fn files(folder: &Path) -> Result<BTreeSet<String>> {
    if folder.join(MODEL_FILE).is_file() {
        return Ok([MODEL_FILE.to_string()].into());
    }
    let path = folder.join(INDEX_FILE);
    if !path.is_file() {
        let why = format!(
            "expected {MODEL_FILE} or {INDEX_FILE}, got neither; help: load the model with \
             transformers, and save it again with save_pretrained"
        );
        return Err(refuse(folder, why));
    }
    let text = text_of(&path, INDEX_BYTES_MAX)?;
    let index: Index = serde_json::from_str(&text).map_err(|error| {
        let why = format!("{error}; help: give a folder that save_pretrained wrote");
        refuse(&path, why)
    })?;
    let names: BTreeSet<String> = index.weight_map.into_values().collect();
    let Some(name) = names.iter().find(|name| name.contains('/')) else {
        return Ok(names);
    };
    let expected = "expected names of files in the same folder";
    let why = format!("{expected}, got {name:?}; help: move it there");
    Err(refuse(&path, why))
}
