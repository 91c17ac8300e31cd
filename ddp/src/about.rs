//! The name and the version of the running program: `ddp-train`, unless it is one of your own.

use std::sync::OnceLock;

/// A program's name and version.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProgramName {
    pub(crate) name: &'static str,
    pub(crate) version: &'static str,
}

static ABOUT: OnceLock<ProgramName> = OnceLock::new();

/// Says which program runs, before anything asks for it.
pub(crate) fn set(about: ProgramName) {
    _ = ABOUT.set(about);
}

/// The running program.
pub(crate) fn about() -> &'static ProgramName {
    ABOUT.get_or_init(|| ProgramName {
        name: "ddp-train",
        version: env!("CARGO_PKG_VERSION"),
    })
}
