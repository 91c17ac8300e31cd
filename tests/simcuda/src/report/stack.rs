//! Call stacks of the product: cheap to take, and symbolised only when shown.
//!
//! Taking one walks return addresses (about a microsecond per frame). Equal stacks are kept once.
//! Names come from the standard library's reader of debug information when a stack is shown.

use std::backtrace::Backtrace;
use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Frames that distinguish two stacks. Deeper ones belong to the runtime that started the thread.
const FRAMES: usize = 48;

/// The origin of a call.
#[derive(Clone)]
pub struct Stack {
    path: Arc<Path>,
}

struct Path {
    backtrace: Backtrace,
    shown: OnceLock<Vec<String>>,
}

impl Stack {
    /// The stack of the calling thread.
    pub fn capture() -> Self {
        static PATHS: OnceLock<Mutex<HashMap<Vec<usize>, Arc<Path>>>> = OnceLock::new();
        let mut frames = [std::ptr::null_mut::<c_void>(); FRAMES];
        // SAFETY: `frames` has room for FRAMES pointers, which is what is said.
        let count = unsafe { libc::backtrace(frames.as_mut_ptr(), FRAMES as i32) };
        let key: Vec<usize> = frames[..count.max(0) as usize]
            .iter()
            .map(|frame| *frame as usize)
            .collect();
        let mut paths = PATHS
            .get_or_init(Mutex::default)
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let path = paths.entry(key).or_insert_with(|| {
            Arc::new(Path {
                backtrace: Backtrace::force_capture(),
                shown: OnceLock::new(),
            })
        });
        Self {
            path: Arc::clone(path),
        }
    }

    /// The innermost frames in one line, for use inside a sentence.
    pub fn in_line(&self) -> String {
        const SHOWN: usize = 4;
        let frames = self.frames();
        match frames.len() {
            0 => self.to_string(),
            count if count <= SHOWN => frames.join(" < "),
            count => format!(
                "{} < … ({} more)",
                frames[..SHOWN].join(" < "),
                count - SHOWN
            ),
        }
    }

    /// The product's frames, innermost first: `function at file:line`.
    pub fn frames(&self) -> &[String] {
        self.path
            .shown
            .get_or_init(|| product_frames(&format!("{:#}", self.path.backtrace)))
    }
}

impl fmt::Display for Stack {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.frames().is_empty() {
            return formatter.write_str("(no frame of the product is known)");
        }
        for (index, frame) in self.frames().iter().enumerate() {
            let separator = if index == 0 { "" } else { "\n    " };
            write!(formatter, "{separator}{frame}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Stack {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

/// Where this package was built: its files are ours.
const OWN_FOLDER: &str = env!("CARGO_MANIFEST_DIR");

/// Extracts the product's frames from the standard library's output: a line `N: address -
/// function`, usually followed by `at file:line:column`.
fn product_frames(printed: &str) -> Vec<String> {
    let mut frames: Vec<(&str, &str)> = Vec::new();
    for line in printed.lines() {
        let line = line.trim();
        if let Some(place) = line.strip_prefix("at ") {
            if let Some((_, known)) = frames.last_mut() {
                // The column adds nothing.
                *known = place.rsplit_once(':').map_or(place, |(place, _)| place);
            }
        } else if let Some((_, function)) = line.split_once(" - ") {
            frames.push((function, ""));
        }
    }
    frames.retain(|(function, place)| is_of_the_product(function, place));
    let shown = |(function, place): (&str, &str)| match place {
        "" => function.to_owned(),
        place => format!("{} at {}", name_of(function), within_workspace(place)),
    };
    frames.into_iter().map(shown).collect()
}

/// A function's name without path, type arguments and hash; `{closure}` if it is one, after the
/// function that it is in. Inlined functions have no path or hash, and inlining changes from build
/// to build.
fn name_of(function: &str) -> String {
    let is_hash = |part: &str| {
        part.strip_prefix('h')
            .is_some_and(|hash| hash.len() == 16 && hash.bytes().all(|it| it.is_ascii_hexdigit()))
    };
    let (mut depth, mut before) = (0, ' ');
    let mut path = String::new();
    for character in function.chars() {
        match character {
            '<' => depth += 1,
            '>' if before != '-' => depth -= 1,
            _ if depth == 0 => path.push(character),
            _ => {}
        }
        before = character;
    }
    let parts = path
        .split("::")
        .filter(|part| !part.is_empty() && !is_hash(part));
    let (closures, named): (Vec<&str>, Vec<&str>) =
        parts.partition(|part| part.contains("{closure"));
    match (named.last(), closures.is_empty()) {
        (Some(name), true) => (*name).to_owned(),
        (Some(name), false) => format!("{name}::{{closure}}"),
        (None, _) => "{closure}".to_owned(),
    }
}

/// A path relative to the workspace of this package.
fn within_workspace(place: &str) -> &str {
    let workspace = OWN_FOLDER.trim_end_matches("tests/simcuda");
    place.strip_prefix(workspace).unwrap_or(place)
}

/// By file if known: inlined functions lose the path in their name. A frame without a file belongs
/// to a library without debug information, and is shown by name.
fn is_of_the_product(function: &str, place: &str) -> bool {
    if !place.is_empty() {
        let foreign = [
            "/rustc/",
            "/.cargo/",
            "cargo/registry/",
            "/library/std/",
            "/library/core/",
            "/library/alloc/",
            "/csu/",
            "/nptl/",
            "/sysdeps/",
        ];
        let is_simulator = place.starts_with(OWN_FOLDER) && !place.contains("/tests.rs:");
        return !is_simulator && !foreign.iter().any(|foreign| place.contains(foreign));
    }
    // Impls print as `<alloc::boxed::Box<F> as core::ops::FnOnce>::call_once`: the first name
    // counts.
    let name = function.trim_start_matches(['<', '&', '*', '_']);
    let foreign = [
        "std::",
        "core::",
        "alloc::",
        "cudarc::",
        "test::",
        "ddp_simcuda::",
        "rust",
        "libc_",
        "pthread_",
        "unknown>",
    ];
    let runtime = [
        "",
        "main",
        "start",
        "start_thread",
        "clone",
        "clone3",
        "restore_rt",
    ];
    let is_entry_point = name
        .strip_prefix("cu")
        .is_some_and(|rest| rest.starts_with(|it: char| it.is_ascii_uppercase()));
    !is_entry_point
        && !runtime.contains(&name)
        && !foreign.iter().any(|foreign| name.starts_with(foreign))
}

#[cfg(test)]
mod tests;
