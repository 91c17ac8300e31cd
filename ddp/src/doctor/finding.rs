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
    fn new(health: Health, topic: &str, text: String, help: Option<String>) -> Finding {
        let topic = topic.into();
        Finding {
            topic,
            health,
            text,
            help,
        }
    }

    pub(super) fn fine(topic: &str, text: impl Into<String>) -> Finding {
        Finding::new(Health::Fine, topic, text.into(), None)
    }

    pub(super) fn note(topic: &str, text: impl Into<String>, help: impl Into<String>) -> Finding {
        Finding::new(Health::Note, topic, text.into(), Some(help.into()))
    }

    pub(super) fn bad(topic: &str, text: impl Into<String>, help: impl Into<String>) -> Finding {
        Finding::new(Health::Bad, topic, text.into(), Some(help.into()))
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
        self.help
            .as_ref()
            .map_or(Ok(()), |help| write!(f, "\n                    -> {help}"))
    }
}
