//! What of a run is done, and how fast it goes.

use std::time::{Duration, Instant};

use crate::checkpoint::{Best, State};
use crate::step::Stats;

/// What has been done so far, and how fast.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) started: Instant,
    /// Of the whole run, also before it was resumed.
    pub(super) steps: u64,
    pub(super) samples: u64,
    /// Of these, since it was.
    pub(super) samples_here: u64,
    pub(super) last_loss: Option<f64>,
    pub(super) evaluation: Option<Stats>,
    /// The evaluation with the least loss so far, and the last one.
    pub(super) best: Option<Best>,
    pub(super) last: Option<Best>,
    /// Behind which step ranks were last found to hold the same model.
    pub(super) compared: Option<u64>,
    /// Since when, and how much: what is not a step does not count.
    since: Instant,
    steps_since: u64,
    samples_since: u64,
    /// What of that time the host spent waiting for rows, for reductions, and for checkpoints.
    pub(super) held_up: HeldUp,
    /// Whether how fast it went says anything: not on a simulated GPU.
    pub(super) rates_count: bool,
}

/// Where the host waited.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HeldUp {
    pub(super) data: Duration,
    pub(super) reductions: Duration,
    pub(super) saving: Duration,
}

/// What steps took, in milliseconds each, since the last reading.
pub(super) struct Rates {
    pub(super) step_ms: f64,
    pub(super) samples_per_s: f64,
    pub(super) data_ms: f64,
    pub(super) reduce_ms: f64,
    pub(super) save_ms: f64,
}

impl Done {
    /// What a run has done that goes on from `state`, or begins.
    pub(super) fn from(state: Option<&State>, rates_count: bool) -> Done {
        let now = Instant::now();
        Done {
            started: now,
            steps: state.map_or(0, |state| state.step),
            samples: state.map_or(0, |state| state.samples),
            samples_here: 0,
            last_loss: None,
            evaluation: None,
            best: state.and_then(|state| state.best),
            last: state.and_then(|state| state.last),
            compared: None,
            since: now,
            steps_since: 0,
            samples_since: 0,
            held_up: HeldUp::default(),
            rates_count,
        }
    }

    /// A step over so many rows.
    pub(super) fn count(&mut self, rows: u64) {
        self.steps += 1;
        self.samples += rows;
        self.samples_here += rows;
        self.steps_since += 1;
        self.samples_since += rows;
    }

    /// An evaluation. Whether none was better so far.
    pub(super) fn evaluated(&mut self, evaluation: Best) -> bool {
        // What is no number cannot be saved.
        self.last = Some(evaluation).filter(|evaluation| evaluation.loss.is_finite());
        let is_best = evaluation.loss.is_finite() && self.best.is_none_or(|best| evaluation.loss < best.loss);
        if is_best {
            self.best = Some(evaluation);
        }
        is_best
    }

    /// What steps took since the last reading; no numbers where they would say nothing.
    pub(super) fn rates(&mut self) -> Rates {
        let elapsed_s = if self.rates_count { self.since.elapsed().as_secs_f64().max(1e-9) } else { f64::NAN };
        let steps = self.steps_since.max(1) as f64;
        let each = |time: Duration| if self.rates_count { time.as_secs_f64() * 1e3 / steps } else { f64::NAN };
        let rates = Rates {
            step_ms: elapsed_s * 1e3 / steps,
            samples_per_s: self.samples_since as f64 / elapsed_s,
            data_ms: each(self.held_up.data),
            reduce_ms: each(self.held_up.reductions),
            save_ms: each(self.held_up.saving),
        };
        self.restart_clock();
        rates
    }

    pub(super) fn restart_clock(&mut self) {
        (self.since, self.steps_since, self.samples_since) = (Instant::now(), 0, 0);
        self.held_up = HeldUp::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_evaluation_is_the_first_with_the_least_loss() {
        let mut done = Done::from(None, true);
        let losses = [2.0, f64::NAN, 1.5, 1.5, 3.0, 1.0];
        let better: Vec<bool> =
            losses.iter().zip(1..).map(|(&loss, step)| done.evaluated(Best { step, loss, accuracy: None })).collect();
        assert_eq!(better, [true, false, true, false, false, true]);
        assert_eq!((done.best.unwrap().step, done.last.unwrap().step), (6, 6));
    }
}
