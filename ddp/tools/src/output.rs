//! Standard output, where commands print their results.

use std::fmt::Display;
use std::io::{self, ErrorKind, IsTerminal, Write};

use crate::error::{Error, Result};
use crate::shown::shown_text;

/// Prints a line on rank 0.
pub type Say<'a> = &'a mut dyn FnMut(&dyn Display) -> Result<()>;

/// Prints text, at once.
pub fn print(text: &dyn Display) -> Result<()> {
    let mut output = io::stdout().lock();
    let written = write!(output, "{text}").and_then(|()| output.flush());
    written.map_err(unprinted)
}

/// Prints text that a model wrote, at once. Control characters would drive a terminal: there they
/// are escaped.
pub fn print_text(text: &str) -> Result<()> {
    if io::stdout().is_terminal() {
        return print(&shown_text(text));
    }
    print(&text)
}

/// The error of standard output.
pub fn unprinted(source: io::Error) -> Error {
    let help = "send it to a terminal, or to a file on a disk with space left";
    Error::io("write to", "standard output", help)(source)
}

/// A closed pipe, as in `ddp-train inspect RUN | head`, is not a failure.
pub fn unless_reader_left(printed: Result<()>) -> Result<()> {
    match printed {
        Err(Error::Io(error)) if error.source.kind() == ErrorKind::BrokenPipe => Ok(()),
        printed => printed,
    }
}

/// The summary of a result that is on the disk already: failing to print it is only warned of.
pub fn warn_unprinted(printed: Result<()>) {
    if let Err(error) = printed {
        tracing::warn!("the result is complete, but its summary could not be printed: {error}");
    }
}
