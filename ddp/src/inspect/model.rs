//! Inspects a model file: names, shapes and dtypes of its tensors. Values are not read.

use std::fs::File;
use std::path::Path;

use serde_json::{Value, json};

use super::sheet::{Inspected, Sheet, table};
use crate::checkpoint::unreadable;
use crate::error::{Error, Result};
use ddp_data::safetensors::{Entry, Header};

/// The tensors of a file.
#[derive(Debug)]
pub(super) struct Tensors {
    header: Header,
    bytes: u64,
}

impl Tensors {
    /// Reads the header of the file at `path`, checked against its size.
    pub(super) fn read(path: &Path) -> Result<Tensors> {
        let failed = || unreadable(path);
        let mut file = File::open(path).map_err(failed())?;
        let bytes = file.metadata().map_err(failed())?.len();
        let header = Header::read(&mut file, bytes).map_err(failed())?;
        let header = header.map_err(|why| Error::Data(format!("{}: {why}", path.display())))?;
        Ok(Tensors { header, bytes })
    }

    /// Elements of all tensors.
    pub(super) fn elements(&self) -> usize {
        self.header.entries.iter().map(Entry::count).sum()
    }

    /// The names of the tensors that `is_wanted` accepts, and their elements.
    pub(super) fn those(&self, is_wanted: impl Fn(&str) -> bool) -> (Vec<String>, usize) {
        let entries = self.header.entries.iter();
        let wanted: Vec<&Entry> = entries.filter(|entry| is_wanted(&entry.name)).collect();
        let names = wanted.iter().map(|entry| entry.name.clone()).collect();
        (names, wanted.iter().map(|entry| entry.count()).sum())
    }

    /// A line for each tensor.
    pub(super) fn table(&self) -> String {
        let row = |entry: &Entry| {
            let shape = format!("{:?}", entry.shape);
            let count = entry.count().to_string();
            vec![entry.name.clone(), shape, entry.dtype.to_lowercase(), count]
        };
        let rows: Vec<Vec<String>> = self.header.entries.iter().map(row).collect();
        table(&rows)
    }

    /// The same as JSON.
    pub(super) fn to_json(&self) -> Value {
        let tensor = |entry: &Entry| json!({ "name": entry.name, "shape": entry.shape, "dtype": entry.dtype });
        self.header.entries.iter().map(tensor).collect()
    }
}

/// Whether the file holds a model and not data, by the names of its tensors.
pub(super) fn is_model(path: &Path) -> bool {
    let named = |entry: &Entry| entry.name.ends_with(".weight") || entry.name.ends_with(".bias");
    path.extension()
        .is_some_and(|ending| ending == "safetensors")
        && Tensors::read(path).is_ok_and(|tensors| tensors.header.entries.iter().any(named))
}

/// Inspects the file at `path`.
pub(super) fn found(path: &Path) -> Result<Inspected> {
    let tensors = Tensors::read(path)?;
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
    Inspected::intact(sheet, json)
}
