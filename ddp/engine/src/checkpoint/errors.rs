//! Errors of checkpoints that cannot be read.

use std::path::Path;

use crate::error::Error;

/// A checkpoint that cannot be used.
pub fn damaged(folder: &Path, why: impl Into<String>) -> Error {
    let why = why.into();
    Error::Data(format!(
        "cannot use the checkpoint {}: {why}; help: use another one of the run (`resume` PATH)",
        folder.display()
    ))
}

/// A file that cannot be read.
pub(super) fn unreadable(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_path_buf();
    let help = "check that it exists and can be read".to_string();
    move |source| Error::Io {
        action: "read",
        path,
        source,
        help,
    }
}

/// The error of a file of another version.
pub(super) fn other_format(got: impl Into<u64>, known: u32) -> String {
    let got = got.into();
    format!(
        "is of format {got}, and this program reads format {known}: use the ddp-train that wrote it"
    )
}

/// The first names of a list, and how many more there are.
pub(super) fn some(names: &[&str]) -> String {
    match names.len() {
        0..=4 => names.join(", "),
        count => format!("{} and {} more", names[..3].join(", "), count - 3),
    }
}
