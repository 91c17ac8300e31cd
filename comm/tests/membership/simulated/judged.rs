//! What must hold in a simulated job: after each event, and at its end.

use std::collections::BTreeSet;

use ddp_comm::membership::agreement::Regroup;
use ddp_comm::membership::decide::JobAction;
use ddp_comm::membership::wire::{Generation, ToRank};

use super::{Job, Phase, Process};
use crate::schedule::Kind;

/// For how long after it went on again others may count a rank as hanging.
const MOMENT: u64 = 1000;
/// How many steps are taken, at most, until a rank that waits takes part.
const STEPS_MAX: u64 = 30;
/// How long after a rank has hung for the timeout the others meet, at most.
const MEETING: u64 = 1500;
/// For how long after a rank was unwell others may wait for each other when the job ends.
const ENDING: u64 = 20_000;
/// How often in a row a rank may be left out before it has connected, at most, because of the one
/// fault. Of each other one a generation may come, in which it does not count as new.
const UNCONNECTED_MAX: u32 = 2;

impl Job<'_> {
    pub(super) fn wrong(&mut self, what: String) {
        self.say(format!("WRONG: {what}"));
        self.outcome.wrong.get_or_insert(what);
    }

    /// A rank is started.
    pub(super) fn judge_start(&mut self, rank: usize, host: usize) {
        let schedule = self.schedule;
        if self.processes.len() >= schedule.ranks {
            let comes = schedule.kind == Kind::Pods && self.coming == Some(host);
            self.restarts += u32::from(!comes);
        }
        let lives = |it: &&Process| it.host == host && it.phase != Phase::Ended;
        let is_full = self.processes.iter().filter(lives).count() >= schedule.spare_room();
        if self.disagrees[rank] {
            self.wrong(format!("rank {rank}, which disagrees, is started again"));
        }
        let others = schedule.faults.len().saturating_sub(1) as u32;
        if self.unconnected[rank] > UNCONNECTED_MAX + others {
            self.wrong(format!(
                "rank {rank}, which cannot connect, is started again"
            ));
        }
        if self.restarts > schedule.restarts {
            self.wrong("more ranks are started again than may be".into());
        }
        if self.state.stop.is_some() || self.state.ends.is_some() {
            self.wrong(format!("rank {rank} is started although the job ends"));
        }
        if host >= schedule.hosts && is_full {
            self.wrong(format!("spare host {host} has no room for rank {rank}"));
        }
    }

    /// A host has come again, and the launcher knows.
    pub(super) fn judge_host(&mut self, host: usize) {
        let (state, schedule) = (&self.state, self.schedule);
        let is_free = schedule.kind == Kind::Pods || schedule.restarts == 1000;
        if !is_free || state.stop.is_some() || state.ends.is_some() {
            return;
        }
        let is_left_out = |rank: &usize| {
            let it = &state.ranks[*rank];
            it.host == host && !it.comes() && !it.stays_out && it.tries < 10
        };
        if let Some(rank) = (0..schedule.ranks).find(is_left_out) {
            self.wrong(format!("rank {rank} is not started on host {host}"));
        }
    }

    fn is_well(&self, it: &Process) -> bool {
        it.unwell_until < self.now.saturating_sub(MOMENT) || it.unwell_until == 0
    }

    pub(super) fn judge_kill(&mut self, index: usize, why: &str) {
        let it = &self.processes[index];
        let together = self.together.get(&it.generation);
        let has_connected = together.is_none_or(|it| it.has_met);
        if why.contains("another host") && !it.has_begun && !has_connected {
            self.unconnected[it.rank] += 1;
        }
        // The launcher cannot know whether the rank that was missed hangs.
        let is_taken_for_unheard =
            why.contains("another host") && self.processes.iter().any(|it| !self.is_well(it));
        let is_kept = it.phase != Phase::Ended && self.is_well(it) && !is_taken_for_unheard;
        if self.schedule.is_heard() && is_kept {
            let (rank, number) = (it.rank, it.number);
            self.wrong(format!(
                "process {number} of rank {rank}, which works, is killed"
            ));
        }
    }

    pub(super) fn judge_kill_of_all(&mut self) {
        let since = self.now.saturating_sub(ENDING);
        let was_unwell = |it: &Process| it.unwell_until > since;
        if self.processes.iter().any(was_unwell) {
            return;
        }
        for index in 0..self.processes.len() {
            // One that still starts, before others have trained, does not hear of the end.
            let it = &self.processes[index];
            if it.phase != Phase::Starts || it.heard.is_newcomer() {
                self.judge_kill(index, "");
            }
        }
    }

    /// A generation is over.
    pub(super) fn judge_end_of_generation(&mut self, actions: &[JobAction]) {
        let over = ToRank::Over(self.state.generation);
        let is_told = |number: u32| {
            let mut actions = actions.iter();
            actions.any(|it| matches!(it, JobAction::Tell { process, message, .. } if (*process, message) == (number, &over)))
        };
        let mut living = self.state.members.iter();
        let untold = living
            .find(|it| self.state.process(it.rank) == Some(it.process) && !is_told(it.process));
        if let Some(it) = untold {
            let rank = it.rank;
            self.wrong(format!(
                "rank {rank} is not told that its generation is over"
            ));
        }
    }

    pub(super) fn judge_generation(&mut self, formed: &Generation) {
        let (ranks, schedule) = (formed.members.len(), self.schedule);
        let comes = self.state.ranks.iter().filter(|rank| rank.comes()).count();
        if formed.number == 1 && ranks < comes {
            self.wrong("the first generation is without a rank that comes".into());
        }
        if schedule.kind == Kind::Ordinary && ranks < schedule.ranks {
            self.wrong("the job begins, or continues, without all ranks".into());
        }
        let lost = formed.change.lost.iter().map(|it| it.rank);
        let back = { lost }.filter(|rank| formed.change.joined.contains(rank));
        let back = back.count();
        if back > 0 && ranks - back >= schedule.min_ranks {
            self.wrong("a rank that was just lost is back before a step".into());
        }
    }

    /// A rank connects to those that it has heard of: all must have heard of the same ones.
    pub(super) fn judge_members(&mut self, index: usize) {
        let it = &self.processes[index];
        let Some(heard) = &it.heard.generation else {
            return self.wrong("a rank connects without a generation".into());
        };
        let numbers = heard.members.iter().map(|it| it.rank);
        let all = self.together[&heard.number].all.iter();
        let is_same = numbers.eq(all.map(|&other| self.processes[other].rank));
        let hosts = heard.members.iter().map(|it| heard.hosts[it.rank]);
        let all = self.together[&heard.number].all.iter();
        let are_there = hosts.eq(all.map(|&other| self.processes[other].host));
        if !is_same || !are_there || heard.number != it.generation {
            let rank = it.rank;
            self.wrong(format!("rank {rank} has heard of other ranks or hosts"));
        }
    }

    /// The ranks of a process's generation have this plan.
    pub(super) fn judge_plan(&mut self, index: usize, plan: &Regroup) {
        let all = self.together[&self.processes[index].generation].all.clone();
        // Of the processes that have last divided the slices: owner and backup of one.
        let ranks = self.sliced.len();
        let hosts: BTreeSet<usize> = self
            .sliced
            .iter()
            .map(|&it| self.processes[it].host)
            .collect();
        let distance = match hosts.len() {
            0 | 1 => 1,
            hosts => ranks.div_ceil(hosts),
        };
        let is_gone = |place: usize| !all.contains(&self.sliced[place % ranks]);
        let are_gone = (0..ranks).any(|it| is_gone(it) && is_gone(it + distance));
        let taken = self.taken;
        if plan.has_lost_slices && !are_gone && taken > 0 {
            self.wrong("slices are lost, though each has its owner or its backup".into());
        }
        let Some(from) = plan.source().and_then(|it| plan.progress[it]) else {
            return;
        };
        let has_taken = |it: &usize| self.processes[*it].steps() > Some(from.steps);
        if self.schedule.has_slices && from.steps < taken || all.iter().any(has_taken) {
            self.wrong(format!(
                "the ranks continue after step {}, though a later one was taken",
                from.steps
            ));
        }
    }

    /// A process has taken slices, or made an update.
    pub(super) fn judge_elements(&mut self, index: usize) {
        let it = &self.processes[index];
        let (rank, run) = (it.rank, it.run.as_ref().expect("it has a run"));
        let steps = run.progress.steps;
        if let Some((element, updates)) = run.wrong_element() {
            self.wrong(format!(
                "element {element} of rank {rank} has {updates:?} updates after step {steps}"
            ));
        }
    }

    /// A rank of this generation has taken a step.
    pub(super) fn judge_step(&mut self, generation: u32, step: u64) {
        if generation < self.newest {
            self.wrong(format!(
                "generation {generation} takes step {step} after {}",
                self.newest
            ));
        }
        if step != self.taken && step != self.taken + 1 {
            self.wrong(format!("step {step} follows step {}", self.taken));
        }
        let is_again = generation == self.newest || step >= self.taken;
        let holds = |it: &Process| {
            it.generation < generation && it.steps() >= Some(step) && it.phase != Phase::Ended
        };
        if !is_again && self.processes.iter().any(holds) {
            self.wrong(format!(
                "step {step} is taken again, though a rank has taken it"
            ));
        }
        let is_heard = self.schedule.is_heard();
        let waits = |it: &&Process| {
            let is_late = step > it.waits_since + STEPS_MAX;
            is_heard && is_late && it.phase == Phase::Waits && self.is_well(it)
        };
        if let Some(it) = self.processes.iter().find(waits) {
            let rank = it.rank;
            self.wrong(format!("rank {rank} waits, and is not taken in"));
        }
    }

    /// A rank's process is stopped or hangs, for `ms`.
    pub(super) fn is_unwell(&mut self, index: usize, ms: u64) {
        let it = &mut self.processes[index];
        it.unwell_until = u64::MAX;
        let timeout = self.schedule.timeout_s * 1000;
        let takes_part = it.takes_part();
        let is_only = self.schedule.faults.len() == 1 && self.state.members.len() > 1;
        if takes_part && is_only && ms > timeout + MEETING && !self.is_ordinary() {
            self.over_by = Some((self.now + timeout + MEETING, self.state.generation));
        }
    }

    /// Checks what must have happened by now.
    pub(super) fn judge_times(&mut self) {
        if let Some((by, generation)) = self.over_by
            && by < self.now
            && (self.state.generation, self.state.ends) == (generation, None)
        {
            self.wrong("the others have not met without a rank that hangs".into());
        }
        let timeout = self.schedule.timeout_s * 1000;
        let is_heard = self.schedule.is_heard();
        let stays = |it: &&Process| {
            let is_late = self.now > it.stopped_at + 3 * timeout + MOMENT;
            is_heard && is_late && it.is_stopped && it.phase != Phase::Ended
        };
        if let Some(it) = self.processes.iter().find(stays) {
            let rank = it.rank;
            self.wrong(format!("rank {rank} is stopped, and is not killed"));
        }
    }

    /// The job has ended.
    pub(super) fn check_end(&mut self) {
        let (code, schedule) = (self.state.exit_code(), self.schedule);
        // A process never started if its agent had ended before the request arrived.
        let is_of_agent = |it: &&Process| {
            let link = &self.links[it.host];
            link.has_agent && link.agents == it.agent
        };
        let lives = |it: &&Process| it.phase != Phase::Ended && is_of_agent(it);
        if let Some(it) = self.processes.iter().find(lives)
            && !self.state.hosts[it.host].is_lost
        {
            return self.wrong(format!("process {} of rank {} stays", it.number, it.rank));
        }
        let is_done = self.taken == schedule.steps;
        let are_well = self.processes.iter().all(|it| it.unwell_until == 0);
        if let Some(asked) = self.asked
            && code == 0
            && self.now > asked + 3 * MOMENT
            && are_well
            && schedule.is_heard()
        {
            self.wrong("it was asked to stop, and goes on".into());
        }
        match code {
            0 if !is_done => self.wrong(format!("0 after {} steps", self.taken)),
            // A stop may come when the work is done.
            0 => {}
            code if !self.explained.contains(&code) => {
                self.wrong(format!("it ended with {code}, which nothing explains"));
            }
            75 if self.state.stop.is_some() => {}
            // What a rank has found.
            65 | 74 if self.state.ends == Some(code) => {}
            // Its word came later.
            _ if self.decided == Some(code) => {}
            code if matches!(self.state.ends, Some(65 | 74)) => {
                let ends = self.state.ends;
                self.wrong(format!(
                    "{code} after a rank has ended the job with {ends:?}"
                ));
            }
            _ if schedule.must_succeed() => self.wrong(format!("it ended with {code}")),
            _ => {}
        }
    }
}
