//! What the ranks of a generation do together: they connect, agree where they continue, give each
//! other what they lack, and take steps. Of each thing one rank may know that all have done their
//! part while another does not.

use std::collections::{BTreeMap, BTreeSet};

use ddp_comm::membership::agreement::{RankReport, Regroup, Slicing};
use ddp_comm::membership::decide::End;
use ddp_comm::membership::wire::ToLauncher;

use super::run::Run;
use super::{Job, Next, PRECEDENCE, Phase, RETRY, STEP};

/// In this order; the last two again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// They say where each of them stands.
    Agrees,
    /// They give each other what they lack.
    Levels,
    /// All have what they need.
    Takes,
    /// The metrics log is open.
    Opens,
    /// They add up gradients.
    Sums,
    /// Under ZeRO-1: all have sums.
    Updates,
}

#[derive(Default)]
pub(super) struct Together {
    /// Its processes.
    pub(super) all: Vec<usize>,
    pub(super) connected: BTreeSet<usize>,
    /// Whether all have connected.
    pub(super) has_met: bool,
    /// By round: what each has given.
    parts: BTreeMap<u64, BTreeMap<usize, Addend>>,
    /// What they have agreed on, and the checkpoint from which they continue if none has the run.
    plan: Option<Regroup>,
    saved: u64,
    /// The exit code with which the first of them failed.
    pub(super) failed: Option<u8>,
}

impl Together {
    pub(super) fn of(all: Vec<usize>) -> Together {
        Together {
            all,
            ..Together::default()
        }
    }
}

/// What a process gives the others of its generation.
#[derive(Clone)]
struct Addend {
    knows_of_newcomers: bool,
    was_asked: bool,
    has_begun: bool,
    /// Before they take steps.
    run: Option<Run>,
}

impl Job<'_> {
    /// What they do together in the process's generation.
    fn together(&mut self, index: usize) -> &mut Together {
        let generation = self.processes[index].generation;
        self.together.get_mut(&generation).expect("it was formed")
    }

    fn place(&mut self, index: usize) -> usize {
        let mut all = self.together(index).all.iter();
        all.position(|it| *it == index).expect("it is one of them")
    }

    /// Its slices in its generation.
    fn slicing(&mut self, index: usize) -> impl Fn(usize) -> Slicing + use<> {
        let generation = self.processes[index].generation.into();
        let all = self.together(index).all.clone();
        let hosts: BTreeSet<usize> = all.iter().map(|&it| self.processes[it].host).collect();
        let distance = match hosts.len() {
            1 => 1,
            hosts => all.len().div_ceil(hosts),
        };
        move |place| Slicing::new(generation, [place, all.len()], distance)
    }

    pub(super) fn goes(&mut self, index: usize) {
        match self.processes[index].phase {
            Phase::Starts if self.processes[index].fails_to_start => {
                self.explained.insert(71);
                self.ends(index, End::Code(71))
            }
            // What it does first depends on how the job is.
            Phase::Starts if !self.processes[index].heard.is_welcomed => {
                let plan = self.processes[index].plan;
                self.plan(RETRY, Next::Goes(index, plan));
            }
            Phase::Starts => self.waits(index),
            Phase::Connects if !self.reaches_all(index) => {
                let plan = self.processes[index].plan;
                self.plan(RETRY, Next::Goes(index, plan));
            }
            Phase::Connects => {
                self.judge_members(index);
                let together = self.together(index);
                together.connected.insert(index);
                if together.connected.len() == together.all.len() {
                    together.has_met = true;
                    self.have_connected(self.processes[index].generation);
                }
            }
            Phase::Works => self.gives(index),
            Phase::Ends(code) => self.ends(index, End::Code(code)),
            Phase::Comes | Phase::Waits | Phase::Exchanges | Phase::Ended => {}
        }
    }

    fn have_connected(&mut self, generation: u32) {
        let all = self.together[&generation].all.clone();
        for (place, &index) in all.iter().enumerate() {
            // It may have ended, or found that another has.
            let it = &mut self.processes[index];
            if (it.phase, it.generation) != (Phase::Connects, generation) {
                continue;
            }
            if all.len() < self.schedule.min_ranks {
                if place == 0 {
                    self.says(index, ToLauncher::Ends(77));
                }
                self.goes_after(index, Phase::Ends(77), 10..60);
                continue;
            }
            it.round = 0;
            self.unconnected[it.rank] = 0;
            self.works(index, Stage::Agrees, 1..10);
        }
    }

    fn works(&mut self, index: usize, stage: Stage, after: std::ops::Range<u64>) {
        let it = &mut self.processes[index];
        (it.stage, it.round) = (stage, it.round + 1);
        self.goes_after(index, Phase::Works, after);
    }

    /// A process gives its part, and waits for the others.
    fn gives(&mut self, index: usize) {
        let is_first = self.place(index) == 0;
        if !is_first {
            self.closes(index);
        }
        let it = &self.processes[index];
        if it.stage == Stage::Opens && is_first && !self.opens(index) {
            let it = &self.processes[index];
            if it.phase == Phase::Works {
                self.plan(RETRY, Next::Goes(index, it.plan));
            }
            return;
        }
        let it = &self.processes[index];
        let (stage, round) = (it.stage, it.round);
        let gives_run = match stage {
            // Where no generation has got as far as its first step, all begin again.
            Stage::Agrees => it.has_begun && it.steps().is_some(),
            Stage::Levels => true,
            _ => false,
        };
        let part = Addend {
            knows_of_newcomers: it.heard.newcomers,
            was_asked: it.was_asked,
            has_begun: it.has_begun,
            run: it.run.clone().filter(|_| gives_run),
        };
        let together = self.together(index);
        let parts = together.parts.entry(round).or_default();
        parts.insert(index, part);
        let all = (parts.len() == together.all.len()).then(|| together.all.clone());
        let it = &mut self.processes[index];
        (it.phase, it.since) = (Phase::Exchanges, self.now);
        for other in all.into_iter().flatten() {
            let after = self.random.of(1..10);
            let plan = self.processes[other].plan;
            self.plan(after, Next::HasAll(other, plan, round));
        }
    }

    /// A process has what all have given in this round.
    pub(super) fn has_all(&mut self, index: usize, round: u64) {
        let it = &self.processes[index];
        if (it.phase, it.round) != (Phase::Exchanges, round) {
            return;
        }
        match it.stage {
            Stage::Agrees => self.agrees(index),
            Stage::Levels => {
                let (place, slicing) = (self.place(index), self.slicing(index));
                let together = self.together(index);
                let parts = &together.parts[&round];
                let runs: Vec<_> = together
                    .all
                    .iter()
                    .map(|it| parts[it].run.clone())
                    .collect();
                let plan = together.plan.as_ref().expect("they have agreed");
                let mut run = Run::level(&runs, place, plan, &slicing);
                run.make_ready(slicing(place));
                self.processes[index].run = Some(run);
                self.works(index, Stage::Takes, 1..5);
            }
            Stage::Takes => {
                self.sliced = self.together(index).all.clone();
                self.run_of(index).advance();
                self.judge_elements(index);
                self.works(index, Stage::Opens, 1..20);
            }
            Stage::Opens => self.begins(index),
            Stage::Sums => {
                if self.run_of(index).prepares() {
                    self.works(index, Stage::Updates, 1..5);
                } else {
                    self.has_taken_step(index, round);
                }
            }
            Stage::Updates => {
                self.run_of(index).advance();
                self.judge_elements(index);
                self.has_taken_step(index, round - 1);
            }
        }
    }

    fn run_of(&mut self, index: usize) -> &mut Run {
        self.processes[index].run.as_mut().expect("it has a run")
    }

    /// The ranks agree where they continue, and each goes there as far as it can alone.
    fn agrees(&mut self, index: usize) {
        let (place, slicing) = (self.place(index), self.slicing(index));
        let round = self.processes[index].round;
        let together = self.together(index);
        let parts = together.all.iter().map(|it| &together.parts[&round][it]);
        let report = |it: &Addend| it.run.as_ref().map(Run::report).unwrap_or_default();
        let reports: Vec<RankReport> = parts.map(report).collect();
        let parts = &together.parts[&round];
        let mine = parts[&index].run.clone();
        let has_begun = parts.values().any(|it| it.has_begun);
        let plan = Regroup::of(&reports);
        let (act, source) = (plan.acts[place], plan.source());
        if self.together(index).plan.is_none() {
            self.have_agreed(index, &plan);
        }
        self.together(index).plan = Some(plan);
        self.processes[index].has_begun = has_begun;
        self.processes[index].run = mine.and_then(|it| it.follow(act));
        if source.is_some() {
            return self.works(index, Stage::Levels, 1..20);
        }
        let saved = self.together(index).saved;
        let mut run = Run::new(saved, self.schedule.has_slices);
        run.make_ready(slicing(place));
        self.processes[index].run = Some(run);
        self.works(index, Stage::Takes, 1..20);
    }

    /// The first of them has the plan.
    fn have_agreed(&mut self, index: usize, plan: &Regroup) {
        let generation = self.processes[index].generation;
        let from = plan.source().and_then(|it| plan.progress[it]);
        let saved = self.disk.saved;
        self.together(index).saved = saved;
        self.judge_plan(index, plan);
        if let Some(slicing) = plan.slicings.iter().flatten().next() {
            self.sliced = self.together[&(slicing.number as u32)].all.clone();
        }
        match from {
            Some(from) => {
                // An update that all are ready for is made.
                self.taken = self.taken.max(from.steps);
                self.say(format!(
                    "generation {generation} continues after step {}",
                    from.steps
                ));
            }
            None => {
                self.say(format!("generation {generation} begins after step {saved}"));
                self.taken = saved;
            }
        }
    }

    /// All are ready for the next step, or the work is done.
    fn begins(&mut self, index: usize) {
        self.processes[index].has_begun = true;
        if self.place(index) == 0 && !self.writes(index) {
            return;
        }
        if self.run_of(index).progress.steps == self.schedule.steps {
            self.is_done(index);
        } else {
            self.works(index, Stage::Sums, STEP);
        }
    }

    fn is_done(&mut self, index: usize) {
        if !self.is_ordinary() {
            self.says(index, ToLauncher::Ends(0));
        }
        self.goes_after(index, Phase::Ends(0), 10..60);
    }

    /// A process has taken a step, of which the sums came in this round.
    fn has_taken_step(&mut self, index: usize, round: u64) {
        let step = self.run_of(index).progress.steps;
        let it = &self.processes[index];
        let generation = it.generation;
        let is_left = self.state.hosts[it.host].is_lost || it.agent < self.links[it.host].agents;
        // A rank that was stopped beside its agent may end the step in which it was, alone. Only
        // what it writes counts.
        if !is_left || it.went_on.is_none() {
            self.judge_step(generation, step);
            (self.newest, self.taken) = (generation, step);
        }
        let parts = self.together(index).parts[&round].values();
        let meets = parts.clone().any(|it| it.knows_of_newcomers);
        let stops = parts.clone().any(|it| it.was_asked);
        let is_over = step == self.schedule.steps;
        let saves = is_over || stops || step.is_multiple_of(self.schedule.save_every);
        if self.place(index) == 0 {
            if !self.writes(index) {
                return;
            }
            if saves {
                self.disk.saved = step;
            }
        }
        let progress = &mut self.run_of(index).progress;
        progress.logged = step;
        if saves {
            progress.saved = step;
        }
        if is_over {
            self.is_done(index);
        } else if stops {
            self.goes_after(index, Phase::Ends(75), 10..300);
        } else if meets {
            self.waits(index);
        } else {
            self.works(index, Stage::Sums, STEP);
        }
    }

    /// Whether packets pass from one process's host to another's.
    fn passes_between(&self, from: usize, to: usize) -> bool {
        let (from, to) = (self.processes[from].host, self.processes[to].host);
        match (from, to) {
            _ if from == to => true,
            (0, host) => !self.links[host].is_cut[1],
            (host, 0) => !self.links[host].is_cut[0],
            pair => !self.is_cut.contains(&pair),
        }
    }

    /// Whether a process can exchange something with all others of its generation.
    pub(super) fn reaches_all(&self, index: usize) -> bool {
        let all = &self.together[&self.processes[index].generation].all;
        all.iter().all(|&other| self.is_connected(index, other))
    }

    /// Whether two processes can exchange something: packets are answered.
    fn is_connected(&self, one: usize, other: usize) -> bool {
        self.passes_between(one, other) && self.passes_between(other, one)
    }

    /// Looks whether the others of its generation are there.
    pub(super) fn looks(&mut self, index: usize) {
        let it = &self.processes[index];
        if !it.takes_part() {
            return;
        }
        let together = &self.together[&it.generation];
        // One that has done its work says farewell.
        let is_done = self.taken == self.schedule.steps;
        let has_ended = |other: &usize| self.processes[*other].phase == Phase::Ended && !is_done;
        // Of the end of a rank of its host it is told, once they are connected.
        let is_told = !self.is_ordinary() && it.phase != Phase::Connects;
        let sees = |other: &usize| {
            let is_here = self.processes[*other].host == it.host;
            !(is_told && is_here) && self.passes_between(*other, index)
        };
        let mut all = together.all.iter();
        if all.any(|other| has_ended(other) && sees(other)) {
            let code = together.failed.unwrap_or(77);
            return self.misses(index, code);
        }
        let waited = self.now - it.since;
        let limit = self.schedule.timeout_s * 1000;
        // Those that show no sign of life here. Who connects names others only after those that
        // do not reach them.
        let is_missing = |other: &usize| {
            *other != index
                && (!self.is_connected(*other, index)
                    || self.processes[*other].is_still()
                    || has_ended(other)
                    || it.phase == Phase::Connects
                        && waited > limit + PRECEDENCE
                        && !together.connected.contains(other))
        };
        let missing: Vec<usize> = { together.all.iter().copied() }
            .filter(is_missing)
            .collect();
        // The first of a host, which others there wait for, may be late to name stopped ranks of
        // other hosts: it is named before.
        let first = { together.all.iter() }.find(|other| self.processes[**other].host == it.host);
        let are_far = |other: &usize| {
            let far = &self.processes[*other];
            far.is_stopped && far.host != it.host
        };
        let is_late = first.is_some_and(|&first| first != index)
            && it.phase == Phase::Exchanges
            && self.schedule.seed.is_multiple_of(2)
            && self.schedule.is_heard()
            && missing.iter().all(are_far);
        let ranks: Vec<usize> = match first {
            Some(&first) if is_late && !missing.is_empty() => vec![self.processes[first].rank],
            _ => missing
                .iter()
                .map(|&other| self.processes[other].rank)
                .collect(),
        };
        if it.phase != Phase::Works && waited > limit && !ranks.is_empty() {
            let (generation, rank) = (it.generation, it.rank);
            let have_met = it.phase != Phase::Connects;
            self.say(format!("rank {rank} misses ranks {ranks:?}"));
            if !self.is_ordinary() {
                self.says(
                    index,
                    ToLauncher::Misses {
                        generation,
                        ranks,
                        have_met,
                    },
                );
            }
            return self.misses(index, 77);
        }
        let plan = it.plan;
        self.plan(RETRY, Next::Looks(index, plan));
    }

    /// A rank does not hear the others: it waits for the next generation, or fails with them.
    fn misses(&mut self, index: usize, code: u8) {
        if self.is_ordinary() {
            self.goes_after(index, Phase::Ends(code), 1..50);
        } else {
            self.waits(index);
        }
    }
}
