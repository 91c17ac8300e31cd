//! Errors of checkpoints that cannot be read.

use std::path::Path;

use crate::error::Error;

/// What helps if a checkpoint cannot be used.
const HELP: &str = "; help: name another checkpoint of the run";

/// A checkpoint that cannot be used.
pub fn damaged(folder: &Path, why: impl Into<String>) -> Error {
    let why = why.into();
    Error::Data(format!(
        "cannot use the checkpoint {}: {why}{HELP}",
        folder.display()
    ))
}

/// The error of a checkpoint that cannot be used, with another help: using a model and resuming a
/// run need different ones.
pub fn with_help(error: Error, help: &str) -> Error {
    match error {
        Error::Data(text) => Error::Data(match text.strip_suffix(HELP) {
            Some(text) => format!("{text}; help: {help}"),
            None => text,
        }),
        other => other,
    }
}

/// The reason in the text of an error that `damaged` made.
pub(super) fn reason<'a>(folder: &Path, text: &'a str) -> &'a str {
    let start = format!("cannot use the checkpoint {}: ", folder.display());
    let text = text.strip_prefix(&start).unwrap_or(text);
    text.strip_suffix(HELP).unwrap_or(text)
}

/// A file that cannot be read.
pub(crate) fn unreadable(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
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
        "is of format {got}, and this program reads format {known}: use the version that wrote it"
    )
}

/// The first names of a list, and how many more there are.
pub(crate) fn some(names: &[&str]) -> String {
    match names.len() {
        0..=4 => names.join(", "),
        count => format!("{} and {} more", names[..3].join(", "), count - 3),
    }
}
