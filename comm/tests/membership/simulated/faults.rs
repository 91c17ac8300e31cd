//! What goes wrong in a simulated job, and passes.

use ddp_comm::membership::decide::{self, End, JobEvent};
use ddp_comm::membership::wire::ToLauncher;

use super::{Job, KILL, Message, Next, Phase, Process, TERM, Word};
use crate::schedule::Fault;

impl Job<'_> {
    fn living(&self, rank: usize) -> Option<usize> {
        let lives =
            |it: &Process| it.rank == rank && it.phase != Phase::Ended && it.phase != Phase::Comes;
        self.processes.iter().rposition(lives)
    }

    pub(super) fn fault(&mut self, index: usize) {
        let fault = self.schedule.faults[index].1;
        self.say(format!("FAULT: {fault:?}"));
        self.last_fault = self.now;
        // Between hosts others may be heard of first, and be no cause.
        let is_lost = match fault {
            Fault::Kill(_) | Fault::Fails(_) | Fault::Leaves(..) => self.schedule.hosts > 1,
            Fault::FailsToStart(_) | Fault::Suspends(_) | Fault::Signal => false,
            _ => true,
        };
        self.explained.extend(is_lost.then_some(77));
        self.explained.extend(match fault {
            Fault::Kill(_) => vec![decide::of_signal(KILL)],
            Fault::Leaves(_, code) => vec![code],
            Fault::Fails(_) => vec![65],
            Fault::Signal => vec![75, decide::of_signal(TERM)],
            _ => vec![],
        });
        match fault {
            Fault::Kill(rank) => self
                .living(rank)
                .into_iter()
                .for_each(|it| self.ends(it, End::Signal(KILL))),
            Fault::Leaves(rank, code) => {
                self.living(rank)
                    .into_iter()
                    .for_each(|it| self.ends(it, End::Code(code)));
            }
            Fault::Fails(rank) => {
                if let Some(it) = self.living(rank) {
                    if !self.is_ordinary() {
                        self.says(it, ToLauncher::Ends(65));
                    }
                    self.ends(it, End::Code(65));
                }
            }
            Fault::FailsToStart(rank) => self.fails_to_start[rank] = true,
            Fault::Stop(rank, ms) => {
                if let Some(it) = self.living(rank) {
                    self.processes[it].is_stopped = true;
                    self.processes[it].stopped_at = self.now;
                    self.is_unwell(it, ms);
                    self.word(it, Word::Stopped(true));
                }
                self.plan(ms, Next::Passes(index));
            }
            Fault::Hangs(rank) => {
                if let Some(it) = self.living(rank) {
                    self.processes[it].hangs = true;
                    self.is_unwell(it, u64::MAX);
                }
            }
            Fault::Cut(host, ways, ms) => {
                for (is_cut, cut) in self.links[host].is_cut.iter_mut().zip(ways) {
                    *is_cut |= cut;
                }
                self.plan(ms, Next::Passes(index));
            }
            Fault::CutBetween([one, other], ways, ms) => {
                let pairs = [(one, other), (other, one)].into_iter().zip(ways);
                self.is_cut.extend(pairs.filter(|it| it.1).map(|it| it.0));
                self.plan(ms, Next::Passes(index));
            }
            Fault::LosesHost(host) => {
                self.agent_ends(host);
                if self.is_ordinary() {
                    self.send(host, 0, Message::Gone);
                }
            }
            Fault::Suspends(ms) => {
                if self.suspended_since.is_none() {
                    self.suspended_since = Some(self.now);
                    self.plan(ms, Next::Passes(index));
                }
            }
            Fault::Signal => {
                self.asked.get_or_insert(self.now);
                self.decide(JobEvent::Signal(TERM));
            }
        }
    }

    pub(super) fn passes(&mut self, index: usize) {
        let fault = self.schedule.faults[index].1;
        self.say(format!("passes: {fault:?}"));
        self.last_fault = self.now;
        match fault {
            Fault::Stop(rank, _) => {
                for it in 0..self.processes.len() {
                    if self.processes[it].rank != rank || !self.processes[it].is_stopped {
                        continue;
                    }
                    self.processes[it].is_stopped = false;
                    if self.processes[it].hangs {
                        continue;
                    }
                    self.processes[it].unwell_until = self.now;
                    if self.processes[it].phase != Phase::Ended {
                        self.word(it, Word::Stopped(false));
                        let unheard = std::mem::take(&mut self.processes[it].unheard);
                        unheard
                            .into_iter()
                            .for_each(|message| self.hears(it, message));
                    }
                }
            }
            Fault::Cut(host, ..) => {
                self.links[host].is_cut = [false; 2];
                for way in [0, 1] {
                    let held = std::mem::take(&mut self.links[host].held[way]);
                    held.into_iter()
                        .for_each(|message| self.send(host, way, message));
                }
            }
            Fault::CutBetween(..) => self.is_cut.clear(),
            Fault::Suspends(_) => {
                let since = self.suspended_since.take().unwrap_or(self.now);
                self.suspended += self.now - since;
                let unread = std::mem::take(&mut self.unread);
                unread.into_iter().for_each(|next| self.happens(next));
            }
            _ => {}
        }
    }
}
