//! One thing that `doctor` looked at, and how it is.

use std::fmt::{self, Display};

use serde::{Deserialize, Serialize};

/// How something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Health {
    /// As it should be.
    Fine,
    /// Training runs, slower than it could or not on all that is there.
    Note,
    /// Training as this job is started does not run.
    Bad,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Finding {
    /// What it is about.
    pub(super) topic: String,
    /// How it is.
    pub(super) health: Health,
    /// What was seen.
    pub(super) text: String,
    /// What mends it.
    pub(super) mend: Option<String>,
}

impl Finding {
    pub(super) fn fine(topic: &str, text: impl Into<String>) -> Finding {
        Finding {
            topic: topic.into(),
            health: Health::Fine,
            text: text.into(),
            mend: None,
        }
    }

    pub(super) fn note(topic: &str, text: impl Into<String>, mend: impl Into<String>) -> Finding {
        Finding {
            topic: topic.into(),
            health: Health::Note,
            text: text.into(),
            mend: Some(mend.into()),
        }
    }

    pub(super) fn bad(topic: &str, text: impl Into<String>, mend: impl Into<String>) -> Finding {
        Finding {
            topic: topic.into(),
            health: Health::Bad,
            text: text.into(),
            mend: Some(mend.into()),
        }
    }
}

impl Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = match self.health {
            Health::Fine => "ok  ",
            Health::Note => "note",
            Health::Bad => "BAD ",
        };
        write!(
            f,
            "{mark}  {:<12} {}",
            self.topic,
            self.text.replace('\n', "\n                    ")
        )?;
        self.mend
            .as_ref()
            .map_or(Ok(()), |mend| write!(f, "\n                    -> {mend}"))
    }
}
