//! Errors as `ddp-train` shows them.

use std::fmt;

use ddp_comm::Remedy;
pub use ddp_engine::error::{Error, Result};

/// An error as `ddp-train` prints it: with control characters escaped, which names
/// from data and files may contain.
#[derive(Debug)]
pub struct ShownError(pub Error);

impl fmt::Display for ShownError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = self.0.to_string();
        if let Error::Comm(error) = &self.0
            && let Some(remedy) = error.remedy().map(remedy_text)
            && !remedy.is_empty()
        {
            text += &format!("; {remedy}");
        }
        f.write_str(&self.0.escaped(&text))
    }
}

/// The error of a flag with a wrong value.
pub(crate) fn refuse(flag: &str, got: impl fmt::Display, expected: &str, help: &str) -> Error {
    Error::Usage(format!("{flag} {got}: expected {expected}; help: {help}"))
}

/// The flag that helps with an error between ranks.
pub fn remedy_text(remedy: Remedy) -> &'static str {
    match remedy {
        Remedy::LongerTimeout => "--timeout-s sets how long to wait",
        Remedy::ShareGpus => "--share-gpus lets several ranks use one GPU, for tests",
        Remedy::TrainOnCpu => "--device cpu trains on the CPU",
        Remedy::NoGraphs => "--graph off runs steps without graphs",
        Remedy::Continue => {
            "a run continues from its newest checkpoint with --resume auto; --restarts does so by itself, and \
             --min-ranks continues without the rank"
        }
        _ => "",
    }
}

impl From<ddp_comm::Error> for ShownError {
    fn from(error: ddp_comm::Error) -> ShownError {
        ShownError(error.into())
    }
}

impl ddp_comm::HasExitCode for ShownError {
    fn exit_code(&self) -> u8 {
        self.0.exit_code()
    }

    fn reporter(&self) -> Option<usize> {
        self.0.reporter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indented_lines_of_bad_data_stay_lines_and_others_are_escaped() {
        let text = "t.csv: texts in 2 columns:\n    \"a\"\n    \"b\nc\"\n  help: \u{1b}[1m";
        let shown = ShownError(Error::Data(text.into())).to_string();
        let expected = "t.csv: texts in 2 columns:\n    \"a\"\n    \"b\\nc\"\n  help: \\u{1b}[1m";
        assert_eq!(shown, expected);
    }
}
