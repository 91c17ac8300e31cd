//! The parts of every message: lines of source, the help at its end, bytes that people read, names
//! of values; and warnings.

use std::fmt;
use std::io::Write as _;
use std::panic::Location;

/// A line in the caller's source.
pub type Site = &'static Location<'static>;

/// Who asked for something: an operation, and the line in the caller's source. Every message about
/// it names both.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller {
    pub(crate) op: &'static str,
    pub(crate) at: Site,
}

impl Caller {
    /// The operation `op`, called at the line that calls this function's caller.
    #[track_caller]
    pub(crate) fn new(op: &'static str) -> Caller {
        let at = Location::caller();
        Caller { op, at }
    }
}

/// The end of an error message: `; help:` and the fix, or nothing if there is no fix to name.
pub struct Help<'a>(pub &'a str);

impl fmt::Display for Help<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            Ok(())
        } else {
            write!(f, "; help: {}", self.0)
        }
    }
}

/// A source line as `file:line`.
pub struct Line<'a>(pub &'a Location<'a>);

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.0.file(), self.0.line())
    }
}

/// Bytes with a binary unit: `512 B`, `4.0 KiB`, `1.5 GiB`.
pub(crate) fn human_bytes(bytes: usize) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// Declares an enum whose values have names: `name` returns them, and messages show them. `ALL` has
/// the values in this order.
#[macro_export]
macro_rules! named {
    ($(#[$meta:meta])* $vis:vis enum $kind:ident {
        $($(#[$about:meta])* $value:ident = $name:literal,)+
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $vis enum $kind {
            $($(#[$about])* $value,)+
        }

        impl $kind {
            /// All of them, in order.
            $vis const ALL: [$kind; [$($name),+].len()] = [$($kind::$value),+];

            /// Its name.
            $vis const fn name(self) -> &'static str {
                match self {
                    $($kind::$value => $name,)+
                }
            }
        }

        impl ::std::fmt::Display for $kind {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.pad(self.name())
            }
        }
    };
}

/// Prints a warning: through `tracing` if the program listens to it, else on standard error.
pub(crate) fn warn(text: &str) {
    if tracing::dispatcher::has_been_set() {
        tracing::warn!("{text}");
    } else {
        // A closed standard error must not make it fail.
        let _ = writeln!(std::io::stderr(), "warning: {text}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_read_well() {
        let shown: Vec<String> = [0, 1023, 1024, 1536, 3 << 30, usize::MAX]
            .map(human_bytes)
            .into();
        assert_eq!(
            shown,
            ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "3.0 GiB", "16.0 EiB"]
        );
    }
}
