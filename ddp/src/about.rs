//! The name and the version of the running program: `ddp-train`, unless it is one of your own.

use std::sync::OnceLock;

/// A program's name and version.
#[derive(Clone, Copy, Debug)]
pub(crate) struct About {
    pub(crate) name: &'static str,
    pub(crate) version: &'static str,
}

static ABOUT: OnceLock<About> = OnceLock::new();

/// Says which program runs, before anything asks for it.
pub(crate) fn set(about: About) {
    _ = ABOUT.set(about);
}

/// The running program.
pub(crate) fn about() -> &'static About {
    ABOUT.get_or_init(|| About {
        name: "ddp-train",
        version: env!("CARGO_PKG_VERSION"),
    })
}
