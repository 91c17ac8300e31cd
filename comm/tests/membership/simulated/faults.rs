//! What goes wrong in a simulated job, and passes.

use ddp_comm::membership::decide::{self, End, JobEvent};
use ddp_comm::membership::wire::ToLauncher;

use super::{INTERRUPT, Job, KILL, Message, Next, Phase, Process, TERM, Word};
use crate::schedule::Fault;

impl Job<'_> {
    fn living(&self, rank: usize) -> Option<usize> {
        let lives =
            |it: &Process| it.rank == rank && it.phase != Phase::Ended && it.phase != Phase::Comes;
        self.processes.iter().rposition(lives)
    }

    /// Whether all processes that run handle signals.
    fn have_handlers(&self) -> bool {
        let handles = |it: &Process| !matches!(it.phase, Phase::Comes | Phase::Starts);
        self.processes.iter().all(handles)
    }

    pub(super) fn fault(&mut self, index: usize) {
        let fault = self.schedule.faults[index].1;
        self.say(format!("FAULT: {fault:?}"));
        self.last_fault = self.now;
        // Between hosts others may be heard of first, and be no cause.
        let is_lost = match fault {
            Fault::Kill(_) | Fault::Fails(_) | Fault::Leaves(..) => self.schedule.hosts > 1,
            Fault::FailsToStart(_)
            | Fault::StartsLate(..)
            | Fault::Suspends(_)
            | Fault::Signal(..)
            | Fault::Asked(_)
            | Fault::AsksRank(_, _, false)
            | Fault::InterruptsAll
            | Fault::DiskIsFull
            | Fault::AnotherAgent(..)
            | Fault::FailsToLetIn(_)
            | Fault::LockStays(_) => false,
            _ => true,
        };
        self.explained.extend(is_lost.then_some(77));
        self.explained.extend(match fault {
            Fault::Kill(_) => vec![decide::of_signal(KILL)],
            Fault::Leaves(_, code) => vec![code],
            Fault::Fails(_) => vec![65],
            Fault::Signal(signal, _) | Fault::Asked(signal) => {
                vec![75, decide::of_signal(signal), decide::of_signal(TERM)]
            }
            Fault::AsksRank(_, signal, is_killed) => {
                let killed = is_killed.then_some(decide::of_signal(KILL));
                let ends = [75, decide::of_signal(signal), decide::of_signal(TERM)];
                ends.into_iter().chain(killed).collect()
            }
            // Alone it is no second one, and all save.
            Fault::InterruptsAll if self.schedule.faults.len() == 1 && self.have_handlers() => {
                vec![75]
            }
            // Ranks that do not end in time are killed.
            Fault::InterruptsAll => [INTERRUPT, TERM]
                .map(decide::of_signal)
                .into_iter()
                .chain([75])
                .collect(),
            Fault::LockStays(_) => vec![74],
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
            Fault::Signal(signal, is_again) => {
                self.asked.get_or_insert(self.now);
                self.decide(JobEvent::Signal(signal));
                if is_again {
                    self.plan(300, Next::Passes(index));
                }
            }
            Fault::Asked(signal) => {
                self.asked.get_or_insert(self.now);
                self.decide(JobEvent::Asked(signal));
            }
            Fault::AsksRank(rank, signal, is_killed) => {
                if let Some(it) = self.living(rank) {
                    self.is_signalled(it, signal, false);
                    if is_killed {
                        self.ends(it, End::Signal(KILL));
                    }
                }
            }
            Fault::InterruptsAll => {
                for it in 0..self.processes.len() {
                    self.is_signalled(it, INTERRUPT, false);
                }
                let after = self.random.of(0..100);
                self.plan(after, Next::Passes(index));
            }
            Fault::StartsLate(rank, ms) => {
                self.starts_late[rank] = ms;
                self.plan(ms, Next::Passes(index));
            }
            Fault::AnotherAgent(host, ms) => self.starts_agent(host, ms),
            Fault::FailsToLetIn(host) => self.fails_to_let_in[host] = true,
            Fault::AgentStops(host, ms) => {
                self.links[host].is_stopped = self.links[host].has_agent;
                self.plan(ms, Next::Passes(index));
            }
            Fault::Delays(host, by, ms) => {
                self.links[host].delay = by;
                self.plan(ms, Next::Passes(index));
            }
            Fault::DiskIsFull => self.disk.is_full = true,
            Fault::LockStays(ms) => {
                self.disk.lock_stays = self.disk.lock_stays.max(self.now + ms);
                self.plan(ms, Next::Passes(index));
            }
        }
    }

    /// Passes on what was held back.
    fn release(&mut self, host: usize) {
        for way in [0, 1] {
            let held = std::mem::take(&mut self.links[host].held[way]);
            held.into_iter()
                .for_each(|message| self.send(host, way, message));
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
                    self.processes[it].went_on = Some(self.now);
                    if !self.processes[it].hangs {
                        self.processes[it].unwell_until = self.now;
                    }
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
                self.release(host);
            }
            Fault::AgentStops(host, _) => {
                self.links[host].is_stopped = false;
                self.links[host].went_on = Some(self.now);
                if self.state.hosts[host].is_lost {
                    self.agent_ends(host);
                }
                self.release(host);
            }
            Fault::Delays(host, ..) => self.links[host].delay = 0,
            Fault::Signal(signal, _) => self.decide(JobEvent::Signal(signal)),
            Fault::InterruptsAll => self.decide(JobEvent::Signal(INTERRUPT)),
            Fault::CutBetween(..) => self.is_cut.clear(),
            Fault::Suspends(_) => {
                let since = self.suspended_since.take().unwrap_or(self.now);
                self.suspended += self.now - since;
                let unread = std::mem::take(&mut self.unread);
                unread.into_iter().for_each(|next| self.handle(next));
            }
            _ => {}
        }
    }
}
