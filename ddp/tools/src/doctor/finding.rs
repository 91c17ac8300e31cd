//! One finding of `doctor`.

use std::fmt::{self, Display};

use serde::{Deserialize, Serialize};

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Health {
    /// All is well.
    Fine,
    /// Training runs, but slower than it could, or without some hardware.
    Note,
    /// Training does not run in this job.
    Bad,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Finding {
    /// Its topic.
    pub(super) topic: String,
    /// Its severity.
    pub(super) health: Health,
    /// What was found.
    pub(super) text: String,
    /// How to fix it.
    pub(super) help: Option<String>,
}

impl Finding {
    pub(super) fn fine(topic: &str, text: impl Into<String>) -> Finding {
        Finding {
            topic: topic.into(),
            health: Health::Fine,
            text: text.into(),
            help: None,
        }
    }

    pub(super) fn note(topic: &str, text: impl Into<String>, help: impl Into<String>) -> Finding {
        Finding {
            health: Health::Note,
            help: Some(help.into()),
            ..Finding::fine(topic, text)
        }
    }

    pub(super) fn bad(topic: &str, text: impl Into<String>, help: impl Into<String>) -> Finding {
        Finding {
            health: Health::Bad,
            ..Finding::note(topic, text, help)
        }
    }

    /// A note, or what is fine.
    pub(super) fn note_if(is_note: bool, topic: &str, text: String, help: &str) -> Finding {
        if is_note {
            Finding::note(topic, text, help)
        } else {
            Finding::fine(topic, text)
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
        const INDENT: &str = "\n                    ";
        let (topic, text) = (&self.topic, self.text.replace('\n', INDENT));
        write!(f, "{mark}  {topic:<12} {text}")?;
        let mut help = self.help.iter();
        help.try_for_each(|help| write!(f, "{INDENT}-> {help}"))
    }
}
