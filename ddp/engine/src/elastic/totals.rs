//! What a run counts, and how fast it is.

use std::time::{Duration, Instant};

use ddp_data::Batch;
use serde::{Deserialize, Serialize};

use crate::checkpoint::{Best, Plateau, State};
use crate::metrics_log::StepEvent;
use crate::step::Stats;

/// What is known of a run besides its tensors. A rank that is behind gets that of another one.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct RunTotals {
    /// Of the whole run, including before it was resumed.
    pub(crate) steps: u64,
    pub(crate) samples: u64,
    pub(crate) last_loss: Option<f64>,
    pub(crate) evaluation: Option<Stats>,
    /// The best evaluation, and the last one.
    pub(crate) best: Option<Best>,
    pub(crate) last: Option<Best>,
    /// The figure by which the model of the best evaluation is compared with others.
    pub(crate) score: Option<f64>,
    pub(crate) progress: Plateau,
    /// The fingerprint of the held-out rows that `best` was determined on.
    pub(crate) held_out: Option<String>,
    /// The steps that were last logged and evaluated, as far as they were due.
    pub(crate) logged: u64,
    pub(crate) evaluated: u64,
    /// The step of the last checkpoint; 0 for none.
    pub(crate) saved: u64,
    /// In a job that continues without lost ranks: the last logged step, and its line.
    pub(crate) line: (u64, String),
}

impl RunTotals {
    /// The totals of a new run, or of one that resumes from `state`.
    pub(crate) fn new(state: Option<&State>) -> RunTotals {
        let Some(state) = state else {
            return RunTotals::default();
        };
        // A step is saved after it was logged and evaluated.
        let [steps, logged, evaluated, saved] = [state.step; 4];
        RunTotals {
            steps,
            logged,
            evaluated,
            saved,
            samples: state.samples,
            best: state.best,
            last: state.last,
            progress: Plateau {
                best: state.progress.best.or(state.best),
                ..state.progress
            },
            ..RunTotals::default()
        }
    }

    /// Notes the evaluation after a step; None if its figures are not finite.
    pub(crate) fn note_evaluation(&mut self, step: u64, evaluation: Option<Best>) {
        // After the loss of a rank a step may be evaluated again: it counts once.
        let is_best = |new: &Best, best: Best| best.step == step || new.cost() < best.cost();
        let better = |best: Option<Best>| {
            evaluation.filter(|new| best.is_none_or(|best| is_best(new, best)))
        };
        (self.last, self.best) = (evaluation, better(self.best).or(self.best));
        let before = self.progress;
        self.progress = match better(before.best) {
            None => Plateau {
                since: before.since + u64::from(before.step != step),
                step,
                ..before
            },
            best => Plateau {
                best,
                since: 0,
                step,
            },
        };
    }
}

/// The shortest time that is divided by.
const TICK: Duration = Duration::from_nanos(1);

/// How fast this process trains.
#[derive(Debug)]
pub(crate) struct Clock {
    /// False on simulated GPUs, whose speed says nothing.
    pub(crate) has_rates: bool,
    /// When the first step began, also on another rank that this one takes over from, and the rows
    /// since then.
    began: Instant,
    samples: u64,
    /// Since the rates were last read: the time, steps, rows.
    since: Instant,
    steps_since: u64,
    samples_since: u64,
    /// Elements of this rank's rows, and how many those had if none was cut short: since the first
    /// step, and since the rates were last read.
    lengths: [[u64; 2]; 2],
    /// How long the host waited since then.
    pub(crate) waits: Waits,
}

/// How long the host waited: for rows, for reductions, for checkpoints.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Waits {
    pub(crate) data: Duration,
    pub(crate) reductions: Duration,
    pub(crate) saving: Duration,
}

impl Clock {
    /// The first step begins now.
    pub(crate) fn new(has_rates: bool) -> Clock {
        let now = Instant::now();
        Clock {
            has_rates,
            began: now,
            samples: 0,
            since: now,
            steps_since: 0,
            samples_since: 0,
            lengths: [[0; 2]; 2],
            waits: Waits::default(),
        }
    }

    /// Counts this rank's rows of a step.
    pub(crate) fn count_lengths(&mut self, batch: &Batch) {
        let elements = batch.x.count();
        let whole = batch.whole().map_or(elements, |whole| batch.mine * whole);
        for [own, all] in &mut self.lengths {
            (*own, *all) = (*own + elements as u64, *all + whole as u64);
        }
    }

    /// What share of whole rows has been computed: since the first step, and since the rates were
    /// last read.
    pub(crate) fn shares(&self) -> [f64; 2] {
        self.lengths.map(|[own, all]| {
            if all == 0 {
                1.0
            } else {
                own as f64 / all as f64
            }
        })
    }

    /// Counts a step over this many rows.
    pub(crate) fn count(&mut self, rows: u64) {
        self.samples += rows;
        self.steps_since += 1;
        self.samples_since += rows;
    }

    /// How long the run has lasted, and the rows since then.
    pub(crate) fn since_began(&self) -> (f64, u64) {
        (self.began.elapsed().as_secs_f64(), self.samples)
    }

    /// The run began so many seconds ago, on another rank.
    pub(crate) fn began_before(&mut self, (seconds, samples): (f64, u64)) {
        let before = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        self.began = self.began.checked_sub(before).unwrap_or(self.began);
        self.samples = samples;
    }

    /// NaN on simulated GPUs.
    fn seconds(&self, time: Duration) -> f64 {
        if self.has_rates {
            return time.as_secs_f64();
        }
        f64::NAN
    }

    /// Seconds since the first step, and rows a second.
    pub(crate) fn total(&self) -> (f64, f64) {
        let time = self.began.elapsed().max(TICK);
        (time.as_secs_f64(), self.samples as f64 / self.seconds(time))
    }

    /// The times and rates of an event: means since the last reading.
    pub(crate) fn rates(&mut self) -> StepEvent {
        let (steps, elapsed) = (self.steps_since.max(1), self.since.elapsed().max(TICK));
        let a_step_ms = |time: Duration| self.seconds(time) * 1e3 / steps as f64;
        let rates = StepEvent {
            step_ms: a_step_ms(elapsed),
            samples_per_s: self.samples_since as f64 / self.seconds(elapsed),
            data_ms: a_step_ms(self.waits.data),
            reduce_ms: Some(a_step_ms(self.waits.reductions)),
            save_ms: a_step_ms(self.waits.saving),
            ..StepEvent::default()
        };
        self.restart();
        rates
    }

    /// Leaves out of the next rates what was not a step.
    pub(crate) fn restart(&mut self) {
        (self.since, self.steps_since, self.samples_since) = (Instant::now(), 0, 0);
        (self.waits, self.lengths[1]) = (Waits::default(), [0; 2]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::BestBy;

    fn by_loss(step: u64, loss: f64) -> Option<Best> {
        let evaluation = Best {
            step,
            loss,
            ..Best::default()
        };
        Some(evaluation).filter(Best::is_finite)
    }

    #[test]
    fn the_best_evaluation_is_the_first_with_the_least_loss_or_the_highest_figure() {
        let mut totals = RunTotals::default();
        let losses = [2.0, f64::NAN, 1.5, 1.5, 3.0, 1.0];
        let mut all = Vec::new();
        for (step, loss) in (1..).zip(losses) {
            totals.note_evaluation(step, by_loss(step, loss));
            let progress = totals.progress;
            assert_eq!(progress.best, totals.best);
            all.push((progress.best.unwrap().step, progress.since));
        }
        assert_eq!(all, [(1, 0), (1, 1), (3, 0), (3, 1), (3, 2), (6, 0)]);
        assert_eq!(totals.last.unwrap().step, 6);

        let mut totals = RunTotals::default();
        for (step, auc) in (1..).zip([0.6, 0.8, 0.8, 0.7]) {
            let by = Some((BestBy::Auc, auc));
            totals.note_evaluation(step, by_loss(step, 1.0).map(|it| Best { by, ..it }));
        }
        assert_eq!(totals.best.map(|best| best.step), Some(2));
        assert_eq!(totals.progress.since, 2);
    }

    #[test]
    fn an_evaluation_that_is_repeated_after_the_loss_of_a_rank_counts_once() {
        let mut totals = RunTotals::default();
        for (step, loss) in [(1, 2.0), (1, 2.0), (2, 3.0), (2, 3.0), (3, 2.5), (3, 2.5)] {
            totals.note_evaluation(step, by_loss(step, loss));
        }
        assert_eq!((totals.best.unwrap().step, totals.progress.since), (1, 2));
        // Its checkpoint may be lost, and then a worse one is the best that is saved.
        totals.best = None;
        totals.note_evaluation(4, by_loss(4, 2.2));
        assert_eq!(totals.best.map(|best| best.step), Some(4));
        assert_eq!(
            (totals.progress.best.unwrap().step, totals.progress.since),
            (1, 3)
        );
    }
}
