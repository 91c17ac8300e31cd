//! The flags of `verify`.

use std::path::PathBuf;

use clap::Args;
use ddp_tools::verify::{Choice, Given, Request};

use super::{RankFlags, whole};
use crate::error::{Error, Result};

/// Printed after the help.
pub(crate) const EXAMPLES: &str = "\
Examples:
  ddp-train verify out                                     repeat every step
  ddp-train verify out --head 3f9c…                        the head was published: 64 characters
  ddp-train verify out --intervals 5 --seed 'public draw'  five intervals, drawn by a text
  ddp-train verify out --data mine.csv --out here          these data; writes here/verdict.json
  ddp-train verify out --ranks 3                           a run with --same-bits, on any ranks

Data, base weights and tokenizer are read only from where you say, or with --as-logged from where the
log says. Nothing is written but --out and copies of data (--cache-dir).

Exit codes: 0 as claimed, 3 not as claimed, 4 cannot be told here; without a verdict 2 wrong flags,
74 no log, 78 ranks with different folders, flags or programs.";

/// The flags of `verify`.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct VerifyFlags {
    /// The folder of a run, from anybody: what --out was
    #[arg(value_name = "RUN")]
    pub folder: PathBuf,
    /// The head of its log that was published, also one from before a loss or a resume
    #[arg(long, value_name = "HEX", value_parser = head)]
    pub head: Option<String>,
    /// Repeat all steps; the default
    #[arg(long, conflicts_with_all = ["intervals", "from", "to"])]
    pub all: bool,
    /// Repeat N of the intervals between checkpoints that are there, drawn by --seed, of those
    /// that can be repeated here
    #[arg(long, value_name = "N", value_parser = whole(1..=usize::MAX), allow_negative_numbers = true)]
    #[arg(conflicts_with_all = ["from", "to"])]
    pub intervals: Option<usize>,
    /// The text that draws them: one that was not known when the head was published
    #[arg(long, value_name = "TEXT", requires = "intervals")]
    pub seed: Option<String>,
    /// Repeat the intervals with steps after this one
    #[arg(long, value_name = "STEP", value_parser = whole(0..=u64::MAX), allow_negative_numbers = true)]
    pub from: Option<u64>,
    /// The last step to repeat [default: that of the run]
    #[arg(long, value_name = "STEP", value_parser = whole(1..=u64::MAX), allow_negative_numbers = true)]
    pub to: Option<u64>,
    /// Read data, base weights and tokenizer that are not given from where the log says they are
    #[arg(long)]
    pub as_logged: bool,
    /// Accept another build of the program than the log names
    #[arg(long)]
    pub other_program: bool,
    /// Folder for verdict.json [default: none is written]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
    /// Its ranks.
    #[command(flatten)]
    pub ranks: RankFlags,
}

/// Reads a head.
fn head(text: &str) -> std::result::Result<String, String> {
    let is_head = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let lower = is_head.then(|| text.to_ascii_lowercase());
    lower.ok_or_else(|| "expected 64 hexadecimal digits, as inspect prints them".into())
}

impl VerifyFlags {
    /// Refuses a draw that only this machine could make.
    pub(crate) fn check(&self) -> Result<()> {
        if self.intervals.is_none() || self.seed.is_some() {
            return Ok(());
        }
        Err(Error::Usage(
            "--intervals: expected --seed with it, so that others can repeat the draw; help: give \
             a text that was not known when the head was published, as in --seed 'public draw'"
                .into(),
        ))
    }

    /// What is to be verified.
    pub(crate) fn request(&self) -> Request {
        let choice = match (self.intervals, self.from, self.to) {
            (Some(count), ..) => Choice::Drawn {
                count,
                seed: self.seed.clone().unwrap_or_default(),
            },
            (None, None, None) => Choice::All,
            (None, from, to) => Choice::Steps(from.unwrap_or(0), to),
        };
        Request {
            run: self.folder.clone(),
            head: self.head.clone(),
            choice,
            given: Given {
                settings: self.ranks.settings.0.clone(),
                as_logged: self.as_logged,
            },
            accepts_other: self.other_program,
            out: self.out.clone(),
            as_json: self.json,
        }
    }
}
