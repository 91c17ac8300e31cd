//! Warnings of a library: through `tracing` if the program listens to it, else on standard error.

use std::io::Write as _;

/// Prints a warning.
pub(crate) fn warn(text: &str) {
    if tracing::dispatcher::has_been_set() {
        tracing::warn!("{text}");
    } else {
        // A closed standard error must not make it fail.
        let _ = writeln!(std::io::stderr(), "warning: {text}");
    }
}
