//! A model file: its tensors by name, shape and dtype. Values are not read.

use std::fs::File;
use std::path::Path;

use serde_json::{Value, json};

use super::sheet::{Found, Sheet, table};
use crate::error::{Error, Result};
use ddp_data::safetensors::Header;

/// The tensors of a file.
#[derive(Debug)]
pub(super) struct Tensors {
    header: Header,
    bytes: u64,
}

impl Tensors {
    /// Those of the file at `path`, checked against its size.
    pub(super) fn read(path: &Path) -> Result<Tensors> {
        let failed = |source: std::io::Error| Error::Io {
            action: "read",
            path: path.to_path_buf(),
            source,
            way_out: "Check that it is there and may be read".into(),
        };
        let mut file = File::open(path).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        let header = Header::read(&mut file, bytes).map_err(failed)?;
        let header = header.map_err(|why| Error::Data(format!("{}: {why}", path.display())))?;
        Ok(Tensors { header, bytes })
    }

    /// Elements of all of them.
    pub(super) fn elements(&self) -> usize {
        self.header
            .entries
            .iter()
            .map(|entry| entry.shape.iter().product::<usize>())
            .sum()
    }

    /// A line a tensor.
    pub(super) fn table(&self) -> String {
        let count = |shape: &[usize]| shape.iter().product::<usize>().to_string();
        let row = |name: &str, shape: &[usize], dtype: &str| {
            vec![
                name.to_string(),
                format!("{shape:?}"),
                dtype.to_lowercase(),
                count(shape),
            ]
        };
        table(
            &self
                .header
                .entries
                .iter()
                .map(|entry| row(&entry.name, &entry.shape, &entry.dtype))
                .collect::<Vec<_>>(),
        )
    }

    /// The same as JSON.
    pub(super) fn to_json(&self) -> Value {
        let tensor = |name: &str, shape: &[usize], dtype: &str| json!({ "name": name, "shape": shape, "dtype": dtype });
        self.header
            .entries
            .iter()
            .map(|entry| tensor(&entry.name, &entry.shape, &entry.dtype))
            .collect()
    }
}

/// Whether the file holds a model rather than data: its tensors are called so.
pub(super) fn is_model(path: &Path) -> bool {
    let named = |entry: &ddp_data::safetensors::Entry| {
        [".weight", ".bias"]
            .iter()
            .any(|ending| entry.name.ends_with(ending))
    };
    path.extension()
        .is_some_and(|ending| ending == "safetensors")
        && Tensors::read(path).is_ok_and(|tensors| tensors.header.entries.iter().any(named))
}

/// What is in the file.
pub(super) fn found(path: &Path) -> Result<Found> {
    let tensors = Tensors::read(path)?;
    let mut sheet = Sheet::new(format!("model {}, {} bytes", path.display(), tensors.bytes));
    sheet.add("tensors", tensors.table());
    sheet.add("elements", tensors.elements().to_string());
    sheet.add("note", "The file alone has no configuration: ddp-train inspect FOLDER shows that of its checkpoint");
    let json = json!({
        "kind": "model", "path": path.to_string_lossy(), "bytes": tensors.bytes, "tensors": tensors.to_json(), "elements": tensors.elements(),
    });
    Ok(Found {
        sheet,
        json,
        trouble: None,
    })
}
