//! Errors as `ddp-train` shows them.

use std::fmt;

use ddp_comm::Remedy;
pub use ddp_engine::error::{Error, Result};

use crate::config::{SETTINGS, Setting};
use crate::shown::{shown, shown_lines};

/// An error as a terminal may have it: `ddp-train` ends with it. What data and files bring along (names, paths) stays on its line, and
/// none of it drives the terminal.
#[derive(Debug)]
pub struct Told(pub Error);

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = with_flags(&self.0.to_string());
        if let Error::Comm(error) = &self.0
            && let Some(remedy) = error.remedy().map(remedy_text)
            && !remedy.is_empty()
        {
            text += &format!("; {remedy}");
        }
        match &self.0 {
            Error::Data(_)
            | Error::Remote { .. }
            | Error::Io { .. }
            | Error::Model { .. }
            | Error::Stopped(_) => f.write_str(&shown(&text)),
            // Lists of flags, ranks, tensors have lines of their own, none of which begins as the first does.
            _ => f.write_str(
                &shown_lines(&text)
                    .replace('\n', "\n  ")
                    .replace("\n  \n", "\n\n"),
            ),
        }
    }
}

/// Libraries name settings in backquotes: here they become flags.
pub(crate) fn with_flags(text: &str) -> String {
    let of_predict = ["probabilities", "logits"].map(Into::into);
    let names = SETTINGS.iter().map(Setting::name).chain(of_predict);
    names.fold(text.to_string(), |text, name| {
        text.replace(&format!("`{name}`"), &format!("--{name}"))
    })
}

/// What a user of `ddp-train` types to change a setting that would avoid an error between ranks.
pub fn remedy_text(remedy: Remedy) -> &'static str {
    match remedy {
        Remedy::LongerTimeout => "--timeout-s sets how long to wait",
        Remedy::ShareGpus => "--share-gpus lets several ranks use one GPU, for tests",
        Remedy::TrainOnCpu => "--device cpu trains on the CPU",
        Remedy::NoGraphs => "--graph off runs steps without graphs",
        _ => "",
    }
}

impl From<ddp_comm::Error> for Told {
    fn from(error: ddp_comm::Error) -> Told {
        Told(error.into())
    }
}

impl ddp_comm::HasExitCode for Told {
    fn exit_code(&self) -> u8 {
        self.0.exit_code()
    }
}
