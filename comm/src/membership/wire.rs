//! The messages between a rank and its launcher. On another host an agent passes them on.

use std::net::IpAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A message from a rank.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub enum ToLauncher {
    /// It waits for a generation after this one, and listens at this port.
    Waits {
        /// The last generation that it knows of; 0 for none.
        after: u32,
        /// Where the others reach it on its host.
        port: u16,
    },
    /// A number that changes with each sign of its progress.
    Progress(u64),
    /// Ranks of this generation that it does not hear.
    Misses {
        /// The generation.
        generation: u32,
        /// Their numbers.
        ranks: Vec<usize>,
        /// Whether all ranks of the generation had connected.
        have_met: bool,
    },
    /// It was asked to stop by this signal: the job stops, also if this rank is lost before the
    /// others know.
    Asked(i32),
    /// The job ends with this exit code.
    Ends(u8),
}

/// A message to a rank.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub enum ToRank {
    /// The first one: what kind of job it is.
    Welcome {
        /// Whether it is elastic.
        is_elastic: bool,
        /// With fewer ranks it saves and ends.
        min_ranks: usize,
        /// By rank: its host.
        hosts: Vec<usize>,
        /// The current generation; 0 before the first.
        generation: u32,
    },
    /// The sockets of this message connect the ranks of this generation, which are on one host:
    /// the first rank gets one to each other rank, in order. Comes before `Formed`.
    Sockets(u32),
    /// It takes part in this generation.
    Formed(Generation),
    /// This generation is over.
    Over(u32),
    /// Whether processes wait to join.
    Newcomers(bool),
    /// The job ends with this exit code.
    Ends(u8),
    /// Its agent has heard that the launcher works. It had asked that so long ago.
    Alive(Duration),
}

/// A generation.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Generation {
    /// From 1.
    pub number: u32,
    /// Its ranks.
    pub members: Vec<MemberAddress>,
    /// By rank, also those that do not take part: its host.
    pub hosts: Vec<usize>,
    /// Since the generation before.
    pub change: Change,
    /// For how long the generation before has been over.
    pub over_for: Duration,
}

/// A rank of a generation.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct MemberAddress {
    /// Its number.
    pub rank: usize,
    /// Where other hosts reach its host, if that is known.
    pub address: Option<IpAddr>,
    /// Where it listens.
    pub port: u16,
}

/// Who was lost and who came since the generation before. Ranks have the numbers with which the
/// job was started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// Who was lost.
    pub lost: Vec<LostRank>,
    /// Who came.
    pub joined: Vec<usize>,
}

impl Change {
    /// Adds what changed after that.
    pub fn extend(&mut self, later: Change) {
        let is_lost = |rank: &usize| later.lost.iter().any(|lost| lost.rank == *rank);
        self.joined.retain(|rank| !is_lost(rank));
        self.lost.extend(later.lost);
        self.joined.extend(later.joined);
    }
}

/// A rank that was lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostRank {
    /// Its number when the job was started.
    pub rank: usize,
    /// Why, as far as it is known: "killed by signal 9".
    pub why: String,
}
