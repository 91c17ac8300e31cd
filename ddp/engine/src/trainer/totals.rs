//! Counts and rates of a run.

use std::time::{Duration, Instant};

use crate::checkpoint::{Best, State};
use crate::step::Stats;

/// Counts of a run.
#[derive(Debug)]
pub(super) struct Totals {
    pub(super) started: Instant,
    /// Of the whole run, including before it was resumed.
    pub(super) steps: u64,
    pub(super) samples: u64,
    /// The steps that were complete when this process got the state of the run.
    pub(super) began: u64,
    /// Since the run was resumed.
    pub(super) samples_here: u64,
    pub(super) last_loss: Option<f64>,
    pub(super) evaluation: Option<Stats>,
    /// The evaluation with the lowest loss, and the last one.
    pub(super) best: Option<Best>,
    pub(super) last: Option<Best>,
    /// The step after which ranks were last found to have the same model.
    pub(super) compared: Option<u64>,
    /// The steps that were last logged and evaluated, as far as they were due.
    pub(super) logged: u64,
    pub(super) evaluated: u64,
    /// Since the rates were last read: the time, steps, rows.
    since: Instant,
    steps_since: u64,
    samples_since: u64,
    /// How long the host waited since then.
    pub(super) waits: Waits,
    /// False on simulated GPUs, whose speed says nothing.
    pub(super) has_rates: bool,
}

/// How long the host waited: for rows, for reductions, for checkpoints.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Waits {
    pub(super) data: Duration,
    pub(super) reductions: Duration,
    pub(super) saving: Duration,
}

/// Times of a step in milliseconds, as means since the last reading; NaN on simulated GPUs.
pub(super) struct Rates {
    pub(super) step_ms: f64,
    pub(super) samples_per_s: f64,
    pub(super) data_ms: f64,
    pub(super) reduce_ms: f64,
    pub(super) save_ms: f64,
}

impl Totals {
    /// The totals of a new run, or of one that resumes from `state`.
    pub(super) fn new(state: Option<&State>, has_rates: bool) -> Totals {
        let (now, steps) = (Instant::now(), state.map_or(0, |state| state.step));
        Totals {
            started: now,
            steps,
            began: steps,
            samples: state.map_or(0, |state| state.samples),
            samples_here: 0,
            last_loss: None,
            evaluation: None,
            best: state.and_then(|state| state.best),
            last: state.and_then(|state| state.last),
            compared: None,
            // A step is saved after it was logged and evaluated.
            logged: steps,
            evaluated: steps,
            since: now,
            steps_since: 0,
            samples_since: 0,
            waits: Waits::default(),
            has_rates,
        }
    }

    /// The first step begins now.
    pub(super) fn begin(&mut self) {
        self.started = Instant::now();
        self.restart_clock();
    }

    /// Counts a step over this many rows.
    pub(super) fn count(&mut self, rows: u64) {
        self.steps += 1;
        self.samples += rows;
        self.samples_here += rows;
        self.steps_since += 1;
        self.samples_since += rows;
    }

    /// Notes an evaluation. Returns whether it is the best so far.
    pub(super) fn note_evaluation(&mut self, evaluation: Best) -> bool {
        let is_finite = evaluation.loss.is_finite();
        // JSON, and so a checkpoint, has no other numbers.
        self.last = is_finite.then_some(evaluation);
        // After the loss of a rank a step may be evaluated again.
        let is_better = |best: Best| best.step == evaluation.step || evaluation.loss < best.loss;
        let is_best = is_finite && self.best.is_none_or(is_better);
        if is_best {
            self.best = Some(evaluation);
        }
        is_best
    }

    /// The rates since the last reading.
    pub(super) fn rates(&mut self) -> Rates {
        let elapsed_s = if self.has_rates {
            self.since.elapsed().as_secs_f64().max(1e-9)
        } else {
            f64::NAN
        };
        let steps = self.steps_since.max(1) as f64;
        let per_step_ms = |time: Duration| {
            if self.has_rates {
                time.as_secs_f64() * 1e3 / steps
            } else {
                f64::NAN
            }
        };
        let rates = Rates {
            step_ms: elapsed_s * 1e3 / steps,
            samples_per_s: self.samples_since as f64 / elapsed_s,
            data_ms: per_step_ms(self.waits.data),
            reduce_ms: per_step_ms(self.waits.reductions),
            save_ms: per_step_ms(self.waits.saving),
        };
        self.restart_clock();
        rates
    }

    /// Leaves out of the next rates what was not a step.
    pub(super) fn restart_clock(&mut self) {
        (self.since, self.steps_since, self.samples_since) = (Instant::now(), 0, 0);
        self.waits = Waits::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_evaluation_is_the_first_with_the_least_loss() {
        let mut totals = Totals::new(None, true);
        let losses = [2.0, f64::NAN, 1.5, 1.5, 3.0, 1.0];
        let better: Vec<bool> = losses
            .iter()
            .zip(1..)
            .map(|(&loss, step)| {
                totals.note_evaluation(Best {
                    step,
                    loss,
                    accuracy: None,
                })
            })
            .collect();
        assert_eq!(better, [true, false, true, false, false, true]);
        assert_eq!(
            (totals.best.unwrap().step, totals.last.unwrap().step),
            (6, 6)
        );
    }
}
