//! The run's folder: a metrics log with a lock, and checkpoints. Only rank 0 writes there.

use ddp_comm::membership::wire::ToLauncher;

use super::{Job, Phase};

/// How long rank 0 waits for a lock that a lost host has left.
const LOCK_MAX: u64 = 120_000;

#[derive(Default)]
pub(super) struct Disk {
    /// The last checkpoint.
    pub(super) saved: u64,
    /// The next thing that is written fails.
    pub(super) is_full: bool,
    /// Until when the locks of processes that have ended stay.
    pub(super) lock_stays: u64,
    /// The process with the lock.
    locked_by: Option<usize>,
    /// The last generation of which something was written.
    written: u32,
}

impl Job<'_> {
    /// Rank 0 opens the metrics log. Whether it could; if not, it tries again, or ends the job.
    pub(super) fn opens(&mut self, index: usize) -> bool {
        let free = match self.disk.locked_by {
            None => true,
            Some(other) if other == index => true,
            Some(other) => {
                self.processes[other].phase == Phase::Ended && self.now >= self.disk.lock_stays
            }
        };
        if free {
            self.disk.locked_by = Some(index);
        } else if self.now > self.processes[index].since + LOCK_MAX {
            // Nothing can end a stopped process on a host that does not answer.
            let stays = |it: usize| {
                let (process, link) = (&self.processes[it], &self.links[self.processes[it].host]);
                process.is_stopped && (link.is_stopped || !link.has_agent || link.is_cut[1])
            };
            if self.disk.locked_by.is_some_and(stays) {
                self.explained.insert(74);
            }
            self.fails(index, 74);
        }
        free
    }

    /// A process that is no longer rank 0 closes it.
    pub(super) fn closes(&mut self, index: usize) {
        self.disk.locked_by.take_if(|it| *it == index);
    }

    /// Rank 0 writes. Whether it could.
    pub(super) fn writes(&mut self, index: usize) -> bool {
        let (rank, generation) = (self.processes[index].rank, self.processes[index].generation);
        if self.disk.locked_by != Some(index) || generation < self.disk.written {
            self.wrong(format!(
                "rank {rank} of generation {generation} writes without the lock, or after \
                 generation {}",
                self.disk.written
            ));
        }
        self.disk.written = generation;
        if self.disk.is_full {
            self.explained.insert(74);
            self.fails(index, 74);
        }
        !self.disk.is_full
    }

    /// A rank has found what ends the job.
    fn fails(&mut self, index: usize, code: u8) {
        if !self.is_ordinary() {
            self.says(index, ToLauncher::Ends(code));
        }
        self.goes_after(index, Phase::Ends(code), 1..50);
    }
}
