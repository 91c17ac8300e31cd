//! A run as a process has it: how far it is, and under ZeRO-1 its slices. A model is how many
//! updates each of its elements has.

use std::ops::Range;

use ddp_comm::membership::agreement::{
    Act, NextVersion, RankProgress, RankReport, Regroup, SliceState, Slicing, moves,
};

/// How many elements a model has.
const ELEMENTS: usize = 60;

/// The updates of each element; None where a process has no moments.
type Moments = [Option<u64>; ELEMENTS];

#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) progress: RankProgress,
    /// It gets its state while the others train already.
    pub(super) awaits_state: bool,
    slices: Option<Slices>,
}

#[derive(Clone, Debug)]
struct Slices {
    state: SliceState,
    moments: Moments,
    /// Those of the slices that it has got and not taken.
    next: Moments,
    /// The last step of which it has the sums.
    sums: u64,
}

/// The elements of a slice.
fn elements(slice: usize, ranks: usize) -> Range<usize> {
    slice * ELEMENTS / ranks..(slice + 1) * ELEMENTS / ranks
}

fn ranges(slicing: &Slicing) -> Vec<Range<usize>> {
    let all = [Some(slicing.owns), slicing.backs_up];
    let of = |slice| elements(slice, slicing.ranks);
    all.into_iter().flatten().map(of).collect()
}

impl Run {
    /// That of a checkpoint after this many steps, or a new one.
    pub(super) fn new(steps: u64, has_slices: bool) -> Run {
        let slices = || Slices {
            state: SliceState::default(),
            moments: [None; ELEMENTS],
            next: [Some(steps); ELEMENTS],
            sums: steps,
        };
        Run {
            progress: RankProgress {
                steps,
                saved: steps,
                ..RankProgress::default()
            },
            awaits_state: false,
            slices: has_slices.then(slices),
        }
    }

    pub(super) fn report(&self) -> RankReport {
        let versions = self
            .slices
            .as_ref()
            .map(|it| it.state.versions(self.progress.steps));
        let [has, ready] = versions.unwrap_or_default();
        RankReport {
            progress: Some(self.progress),
            has,
            ready,
        }
    }

    /// Its part of the plan.
    pub(super) fn follow(mut self, act: Act) -> Option<Run> {
        match act {
            Act::Stay => self.slices.iter_mut().for_each(|it| it.state.go_back()),
            Act::Advance => self.advance(),
            Act::Forget => return None,
        }
        Some(self)
    }

    /// All are ready for the next slices, or the update.
    pub(super) fn advance(&mut self) {
        let Some(slices) = &mut self.slices else {
            return;
        };
        match slices.state.advance() {
            Some(NextVersion::Update) => {
                self.progress.steps += 1;
                let slicing = slices.state.slicing().expect("it has slices");
                if slices.sums != self.progress.steps {
                    slices.moments = [None; ELEMENTS];
                }
                for element in ranges(&slicing).into_iter().flatten() {
                    slices.moments[element] = slices.moments[element].map(|it| it + 1);
                }
            }
            Some(NextVersion::Slices(_)) => slices.moments = slices.next,
            None => {}
        }
    }

    /// It has the sums of the next step. Whether it waits until all have.
    pub(super) fn prepares(&mut self) -> bool {
        self.awaits_state = false;
        match &mut self.slices {
            Some(slices) => {
                slices.sums = self.progress.steps + 1;
                slices.state.make_ready(NextVersion::Update);
            }
            None => self.progress.steps += 1,
        }
        self.slices.is_some()
    }

    /// It has its slices of this generation, as far as it needs others.
    pub(super) fn make_ready(&mut self, slicing: Slicing) {
        if let Some(slices) = &mut self.slices {
            slices.state.make_ready(NextVersion::Slices(slicing));
        }
    }

    /// That of rank `place` after the ranks have given each other what they lack. `all`: by rank,
    /// what they had. `slicing` is that of a rank in this generation.
    pub(super) fn level(
        all: &[Option<Run>],
        place: usize,
        plan: &Regroup,
        slicing: impl Fn(usize) -> Slicing,
    ) -> Run {
        let source = plan.source().expect("a rank has a run");
        let given = all[source].as_ref().expect("the source has a run");
        let mine = all[place].as_ref();
        let mut run = mine.unwrap_or(given).clone();
        let is_most = |it: &Run| it.progress == given.progress;
        run.awaits_state =
            mine.is_none() && !plan.has_slices() && all.iter().flatten().all(is_most);
        run.progress = given.progress;
        let Some(slices) = &mut run.slices else {
            return run;
        };
        if mine.is_none() {
            *slices = Slices {
                state: SliceState::default(),
                moments: [None; ELEMENTS],
                next: [None; ELEMENTS],
                sums: 0,
            };
        }
        slices.next = [None; ELEMENTS];
        let held = |it: &Option<Slicing>| it.as_ref().map(ranges).unwrap_or_default();
        let held: Vec<_> = plan.slicings.iter().map(held).collect();
        let wanted: Vec<_> = (0..all.len()).map(|rank| ranges(&slicing(rank))).collect();
        for it in moves(&held, &wanted) {
            if it.to == place {
                let from = all[it.from].as_ref().and_then(|it| it.slices.as_ref());
                let from = from.expect("who gives has slices");
                slices.next[it.range.clone()].copy_from_slice(&from.moments[it.range]);
            }
        }
        run
    }

    /// An element of its slices whose moments are not those after its steps, and these.
    pub(super) fn wrong_element(&self) -> Option<(usize, Option<u64>)> {
        let slices = self.slices.as_ref()?;
        let slicing = slices.state.slicing()?;
        let mut all = ranges(&slicing).into_iter().flatten();
        let at = all.find(|&it| slices.moments[it] != Some(self.progress.steps))?;
        Some((at, slices.moments[at]))
    }
}
