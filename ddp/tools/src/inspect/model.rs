//! Inspects a model file: names, shapes and dtypes of its tensors. Values are not read.

use std::fs::File;
use std::path::Path;

use ddp_data::safetensors::{Header, TensorEntry};
use serde_json::{Value, json};

use super::sheet::{Inspected, Sheet, table};
use crate::checkpoint::unreadable;
use crate::error::{Error, Result};

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
        let mut file = File::open(path).map_err(failed())?;
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
