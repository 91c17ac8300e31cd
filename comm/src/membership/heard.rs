//! What a rank has been told, and what it does because of it: plain data, which the simulation
//! runs, too.

use std::time::Duration;

use super::wire::{Generation, ToRank};
use crate::error::EXIT_PEER_LOST;

/// What a rank has been told.
#[derive(Clone, Debug, Default)]
pub struct Heard {
    /// Whether the launcher has said how the job is.
    pub is_welcomed: bool,
    /// Whether the job continues without lost ranks.
    pub is_elastic: bool,
    /// With fewer ranks the job saves and ends.
    pub min_ranks: usize,
    /// By rank: its host.
    pub hosts: Vec<usize>,
    /// The current generation when this process came; 0 before the first.
    pub first: u32,
    /// The last generation that this process belongs to.
    pub generation: Option<Generation>,
    /// The last generation that is over.
    pub over: u32,
    /// Whether processes wait to join.
    pub newcomers: bool,
    /// The exit code of a job that ends.
    pub ends: Option<u8>,
    /// How often its agent has said that the launcher works; 0 if the launcher started this rank.
    pub signs: u64,
    /// How long before the last time it had asked the launcher.
    pub asked_before: Duration,
    /// Whether the launcher or agent that started this rank has ended.
    pub is_alone: bool,
}

/// How a wait for the next generation ended.
#[derive(Debug)]
pub enum MeetingOutcome {
    /// This process takes part in it.
    Formed(Generation),
    /// The job ends with this exit code.
    Over(u8),
}

/// Why what a rank does with others ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallsEnd {
    /// A rank was lost: those that are left meet again.
    Generation,
    /// The job has failed with this exit code.
    Job(u8),
}

impl Heard {
    /// Records what the launcher, or its agent, says. None: it is gone.
    pub fn hear(&mut self, message: Option<ToRank>) {
        match message {
            Some(ToRank::Welcome {
                is_elastic,
                min_ranks,
                hosts,
                generation,
            }) => {
                (self.is_elastic, self.min_ranks) = (is_elastic, min_ranks);
                self.is_welcomed = true;
                (self.hosts, self.first) = (hosts, generation);
            }
            Some(ToRank::Formed(generation)) => {
                self.hosts.clone_from(&generation.hosts);
                self.newcomers = false;
                self.generation = Some(generation);
            }
            Some(ToRank::Over(generation)) => self.over = generation,
            Some(ToRank::Newcomers(are_there)) => self.newcomers = are_there,
            Some(ToRank::Ends(code)) => _ = self.ends.get_or_insert(code),
            Some(ToRank::Alive(asked_before)) => {
                (self.signs, self.asked_before) = (self.signs + 1, asked_before);
            }
            Some(ToRank::Sockets(_)) => {}
            None => self.is_alone = true,
        }
    }

    /// Whether the generation of this process is over.
    pub fn is_over(&self) -> bool {
        let current = self.generation.as_ref();
        current.is_some_and(|it| it.number == self.over)
    }

    /// Whether the job is on several hosts.
    pub(crate) fn is_across(&self) -> bool {
        self.hosts.iter().any(|&host| host > 0)
    }

    /// Whether this process came to a job that had begun, and has not taken part yet.
    pub fn is_newcomer(&self) -> bool {
        self.first > 0 && self.generation.is_none()
    }

    /// The exit code of a job that ends for this process.
    pub fn job_ends(&self) -> Option<u8> {
        self.ends.or(self.is_alone.then_some(EXIT_PEER_LOST))
    }

    /// How a wait for a generation after `after` ends; None while it lasts.
    pub fn meeting(&self, after: u32) -> Option<MeetingOutcome> {
        if let Some(code) = self.job_ends() {
            return Some(MeetingOutcome::Over(code));
        }
        let formed = self.generation.as_ref().filter(|it| it.number > after)?;
        Some(MeetingOutcome::Formed(formed.clone()))
    }

    /// Why what this rank does with those of its generation ends, as far as the launcher says so.
    /// None if the job ends with 0, too: ranks then end by themselves.
    pub fn calls_end(&self) -> Option<CallsEnd> {
        match self.ends {
            Some(code) => (code != 0).then_some(CallsEnd::Job(code)),
            None => self.is_over().then_some(CallsEnd::Generation),
        }
    }
}
