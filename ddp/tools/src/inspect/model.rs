//! Inspects a model file: names, shapes and dtypes of its tensors. Values are not read.

use std::fs;
use std::io;
use std::path::Path;

use ddp_data::safetensors::{Header, TensorEntry};
use ddp_kernels::files::open_ordinary;
use serde_json::{Value, json};

use super::sheet::{Inspected, Sheet, table};
use crate::checkpoint::unreadable;
use crate::error::{Error, Result};
use crate::hugging_face::{self, ADAPTER_FILE};

/// The tensors of a file.
#[derive(Debug)]
pub(super) struct FileTensors {
    entries: Vec<TensorEntry>,
    bytes: u64,
}

impl FileTensors {
    /// Reads the header of the file at `path`, checked against its size.
    pub(super) fn read(path: &Path) -> Result<FileTensors> {
        let failed = || unreadable(path);
        let mut file = open_ordinary(path).map_err(failed())?;
        let bytes = file.metadata().map_err(failed())?.len();
        let header = Header::read(&mut file, bytes).map_err(failed())?;
        let header = header.map_err(|why| Error::Data(format!("{}: {why}", path.display())))?;
        let entries = header.entries;
        Ok(FileTensors { entries, bytes })
    }

    /// Elements of all tensors.
    pub(super) fn elements(&self) -> usize {
        self.entries.iter().map(TensorEntry::count).sum()
    }

    /// The names of the tensors that `is_wanted` accepts, and their elements.
    pub(super) fn those(&self, is_wanted: impl Fn(&str) -> bool) -> (Vec<String>, usize) {
        let wanted = || self.entries.iter().filter(|entry| is_wanted(&entry.name));
        let names = wanted().map(|entry| entry.name.clone()).collect();
        (names, wanted().map(TensorEntry::count).sum())
    }

    /// A line for each tensor.
    pub(super) fn table(&self) -> String {
        let row = |entry: &TensorEntry| {
            let (shape, count) = (format!("{:?}", entry.shape), entry.count().to_string());
            vec![entry.name.clone(), shape, entry.dtype.to_lowercase(), count]
        };
        table(&self.entries.iter().map(row).collect::<Vec<_>>())
    }

    /// The same as JSON.
    pub(super) fn to_json(&self) -> Value {
        let tensor = |entry: &TensorEntry| json!({ "name": entry.name, "shape": entry.shape, "dtype": entry.dtype });
        self.entries.iter().map(tensor).collect()
    }
}

/// Inspects a folder of Hugging Face: a model or an adapter, and all its files of tensors.
pub(super) fn of_folder(path: &Path) -> Result<Inspected> {
    let failed = || unreadable(path);
    let entries = fs::read_dir(path).map_err(failed())?;
    let names: io::Result<Vec<_>> = entries.map(|entry| Ok(entry?.path())).collect();
    let mut files = names.map_err(failed())?;
    // Not another form of the same model, such as consolidated.safetensors.
    files.retain(|file| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let is_model = name.starts_with("model") || name.starts_with("adapter_model");
        is_model && name.ends_with(".safetensors")
    });
    files.sort();
    let mut all = FileTensors {
        entries: Vec::new(),
        bytes: 0,
    };
    for file in &files {
        let FileTensors { entries, bytes } = FileTensors::read(file)?;
        all.entries.extend(entries);
        all.bytes += bytes;
    }
    let kind = if path.join(ADAPTER_FILE).exists() {
        format!("an adapter of PEFT ({ADAPTER_FILE} names its base)")
    } else {
        let spec = hugging_face::describe(path)?.spec;
        format!(
            "{}, {} layers of {} columns, {} tokens, context {}",
            spec.export_class, spec.layers, spec.width, spec.vocab, spec.context
        )
    };
    let mut sheet = Sheet::new(format!(
        "Hugging Face folder {}, {} bytes",
        path.display(),
        all.bytes
    ));
    sheet.add("model", kind.clone());
    sheet.add("tensors", all.table());
    sheet.add("elements", all.elements().to_string());
    let json = json!({
        "kind": "folder",
        "path": path.to_string_lossy(),
        "model": kind,
        "bytes": all.bytes,
        "tensors": all.to_json(),
        "elements": all.elements(),
    });
    Ok(Inspected(sheet, json, None))
}

/// Inspects the file at `path`.
pub(super) fn found(path: &Path) -> Result<Inspected> {
    let tensors = FileTensors::read(path)?;
    let mut sheet = Sheet::new(format!("model {}, {} bytes", path.display(), tensors.bytes));
    sheet.add("tensors", tensors.table());
    sheet.add("elements", tensors.elements().to_string());
    let note = "ddp-train inspect FOLDER also shows the configuration of its checkpoint";
    sheet.add("note", note);
    let json = json!({
        "kind": "model",
        "path": path.to_string_lossy(),
        "bytes": tensors.bytes,
        "tensors": tensors.to_json(),
        "elements": tensors.elements(),
    });
    Ok(Inspected(sheet, json, None))
}
