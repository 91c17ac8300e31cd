//! Learning-rate schedules: pure functions of the step.
//!
//! With W warm-up steps, T steps in total, peak p and minimum m, the learning rate of the k-th
//! step, from 1 to T, is
//!
//! ```text
//! k <= P            p · k/P                                  P = W, or 1 without a warm-up
//! constant          p
//! linear            m + (p − m) · (1 − x)                    x = (k − P)/(T − P)
//! cosine            m + (p − m) · (1 + cos πx)/2
//! wsd               p up to step T − D, then m + (p − m) · (T − k)/D, D = 0.2 T ≤ T − P
//! k > T             m, except for constant
//! ```
//!
//! Only step P has the peak, and the last step has m. With a warm-up, these are the values of
//! Hugging Face's schedules after k of their steps; their step k uses the value after k − 1, so
//! that their first step has the rate 0.

use std::f64::consts::PI;

use ddp_kernels::choices;

use crate::error::{Error, Result};

choices! {
    /// The course of the learning rate after the warm-up.
    #[derive(Default)]
    pub enum ScheduleShape {
        /// The peak until the end
        #[default]
        Constant = "constant",
        /// Down in a straight line
        Linear = "linear",
        /// Down along half a cosine
        Cosine = "cosine",
        /// The peak, then down over the last fifth
        Wsd = "wsd",
    }
}

/// `ScheduleShape::Wsd` falls over one in this many steps.
const WSD_DECAY: u64 = 5;

/// A learning rate for every step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    shape: ScheduleShape,
    peak: f64,
    minimum: f64,
    warmup_steps: u64,
    total_steps: u64,
}

impl Schedule {
    /// A schedule with 0 <= minimum <= peak, both finite, and no more warm-up steps than steps.
    pub fn new(
        shape: ScheduleShape,
        peak: f64,
        minimum: f64,
        warmup_steps: u64,
        total_steps: u64,
    ) -> Result<Schedule> {
        let problem = if !(0.0..f64::INFINITY).contains(&peak) {
            format!(
                "learning rate: expected a finite number, 0 or more, got {peak}; help: 0.001 is usual"
            )
        } else if !(0.0..=peak).contains(&minimum) {
            format!(
                "lowest learning rate: expected 0 up to the learning rate, {peak}, got {minimum}; help: lower it"
            )
        } else if warmup_steps > total_steps {
            format!(
                "warm-up steps: expected at most all steps, {total_steps}, got {warmup_steps}; help: give fewer"
            )
        } else {
            String::new()
        };
        if !problem.is_empty() {
            return Err(Error::Usage(problem));
        }
        Ok(Schedule {
            shape,
            peak,
            minimum,
            warmup_steps,
            total_steps,
        })
    }

    /// The learning rate of step `step0`, counted from 0 as in `Loader::load`.
    pub fn learning_rate(&self, step0: u64) -> f64 {
        let Schedule {
            shape,
            peak,
            minimum,
            warmup_steps: warmup,
            total_steps: total,
        } = *self;
        let step = step0.saturating_add(1);
        let top = warmup.max(1);
        if step <= top {
            return peak * (step as f64 / top as f64);
        }
        // The rate after `done` of `all` falling steps, along `curve` from 1 to 0.
        let down = |done: u64, all: u64, curve: fn(f64) -> f64| match done {
            _ if done >= all => minimum,
            0 => peak,
            // Rounding must not exceed either end.
            _ => {
                (minimum + (peak - minimum) * curve(done as f64 / all as f64)).clamp(minimum, peak)
            }
        };
        let straight = |x: f64| 1.0 - x;
        let falling = total.saturating_sub(top);
        match shape {
            ScheduleShape::Constant => peak,
            ScheduleShape::Linear => down(step - top, falling, straight),
            ScheduleShape::Cosine => down(step - top, falling, |x| 0.5 * (1.0 + (PI * x).cos())),
            ScheduleShape::Wsd => {
                let decay = (total / WSD_DECAY).max(1).min(falling);
                down(step.saturating_sub(total - decay), decay, straight)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ddp_kernels::setting::Choice;
    use proptest::prelude::*;

    fn any_schedule() -> impl Strategy<Value = Schedule> {
        (
            0usize..4,
            1u64..2000,
            0.0..1.0f64,
            1e-6..10.0f64,
            0.0..1.0f64,
        )
            .prop_map(|(shape, total, warm, peak, low)| {
                let warmup = (total as f64 * warm * 1.01) as u64;
                Schedule::new(
                    ScheduleShape::ALL[shape].0,
                    peak,
                    peak * low,
                    warmup.min(total),
                    total,
                )
                .unwrap()
            })
    }

    proptest! {
        #[test]
        fn rates_stay_between_zero_and_the_peak_and_after_the_warmup_above_the_minimum(schedule in any_schedule()) {
            let Schedule { peak, minimum, warmup_steps, total_steps, .. } = schedule;
            // Not even one unit in the last place above the peak.
            for step in 1..=total_steps + 3 {
                let rate = schedule.learning_rate(step - 1);
                prop_assert!(rate > 0.0 || minimum == 0.0);
                prop_assert!(rate <= peak, "{rate} in step {step}");
                prop_assert!(step <= warmup_steps || rate >= minimum, "{rate} in step {step}");
            }
        }

        #[test]
        fn the_warmup_rises_evenly_and_reaches_the_peak_in_its_last_step(schedule in any_schedule()) {
            let Schedule { peak, warmup_steps, .. } = schedule;
            for step in 1..=warmup_steps {
                let expected = peak * step as f64 / warmup_steps as f64;
                // Two roundings on either side.
                prop_assert!((schedule.learning_rate(step - 1) - expected).abs() <= 4.0 * f64::EPSILON * peak);
            }
            prop_assert!(warmup_steps == 0 || schedule.learning_rate(warmup_steps - 1) == peak);
        }

        #[test]
        fn one_step_has_the_peak_and_the_last_has_the_minimum(schedule in any_schedule()) {
            let Schedule { shape, peak, minimum, warmup_steps, total_steps } = schedule;
            let top = warmup_steps.max(1);
            prop_assert_eq!(schedule.learning_rate(top - 1), peak);
            let end = if shape == ScheduleShape::Constant || total_steps == top { peak } else { minimum };
            prop_assert_eq!(schedule.learning_rate(total_steps - 1), end);
            let after = if shape == ScheduleShape::Constant { peak } else { minimum };
            prop_assert_eq!(schedule.learning_rate(total_steps), after);
            prop_assert_eq!(schedule.learning_rate(u64::MAX), after);
            let falls_at_once = matches!(shape, ScheduleShape::Linear | ScheduleShape::Cosine) && top < total_steps;
            // Half a cosine over 2000 steps falls by 6e-7 of its height in the first of them.
            if falls_at_once && minimum < 0.99 * peak {
                prop_assert!(schedule.learning_rate(top) < peak, "the peak is held twice");
            }
        }

        #[test]
        fn after_the_warmup_it_only_falls_and_never_jumps(schedule in any_schedule()) {
            let Schedule { shape, peak, minimum, warmup_steps, total_steps } = schedule;
            let top = warmup_steps.max(1);
            let falling = total_steps - top;
            let steps = match shape {
                ScheduleShape::Wsd => (total_steps / WSD_DECAY).max(1).min(falling),
                _ => falling,
            };
            // A straight line falls by its height over its steps, half a cosine by at most π/2
            // times that.
            let most = (peak - minimum) * (PI / 2.0) / steps.max(1) as f64 + 4.0 * f64::EPSILON * peak;
            for step in top..total_steps {
                let fall = schedule.learning_rate(step - 1) - schedule.learning_rate(step);
                prop_assert!((0.0..=most).contains(&fall), "{fall} after step {step}, at most {most}");
            }
        }
    }

    #[test]
    fn the_formulas_by_hand() {
        let rates = |shape, warmup, steps: &[u64]| {
            let schedule = Schedule::new(shape, 1.0, 0.2, warmup, 110).unwrap();
            steps
                .iter()
                .map(|&step| schedule.learning_rate(step - 1))
                .collect::<Vec<_>>()
        };
        let close = |got: Vec<f64>, expected: &[f64]| {
            // A few roundings of numbers up to 1.
            assert!(
                got.iter()
                    .zip(expected)
                    .all(|(got, expected)| (got - expected).abs() < 1e-15),
                "{got:?}"
            );
        };
        close(
            rates(ScheduleShape::Constant, 10, &[1, 5, 10, 11, 110]),
            &[0.1, 0.5, 1.0, 1.0, 1.0],
        );
        close(
            rates(ScheduleShape::Linear, 10, &[9, 10, 35, 60, 110]),
            &[0.9, 1.0, 0.8, 0.6, 0.2],
        );
        close(
            rates(ScheduleShape::Cosine, 10, &[9, 10, 60, 110]),
            &[0.9, 1.0, 0.6, 0.2],
        );
        let first = 0.6 + 0.4 * (PI / 100.0).cos();
        close(rates(ScheduleShape::Cosine, 10, &[11]), &[first]);
        // Without a warm-up the first step has the peak: 109 steps are left.
        close(
            rates(ScheduleShape::Linear, 0, &[1, 2, 110]),
            &[1.0, 1.0 - 0.8 / 109.0, 0.2],
        );
        // The last fifth of 110 steps: 22.
        let w = |gone: f64| 0.2 + 0.8 * (1.0 - gone / 22.0);
        close(
            rates(ScheduleShape::Wsd, 10, &[10, 60, 88, 89, 109, 110, 111]),
            &[1.0, 1.0, 1.0, w(1.0), w(21.0), 0.2, 0.2],
        );
    }

    #[test]
    fn with_a_warm_up_step_k_has_hugging_faces_value_after_k_steps() {
        // transformers.get_cosine_schedule_with_warmup and get_linear_…, as they are written there.
        let (warmup, total) = (7u64, 50u64);
        let warm = |k: f64| k / warmup as f64;
        let progress = |k: f64| (k - warmup as f64) / (total - warmup) as f64;
        for k in 1..=total {
            let at = k as f64;
            let (cosine, linear) = if k < warmup {
                (warm(at), warm(at))
            } else {
                (
                    0.5 * (1.0 + (PI * progress(at)).cos()),
                    (total - k) as f64 / (total - warmup) as f64,
                )
            };
            for (shape, expected) in [
                (ScheduleShape::Cosine, cosine),
                (ScheduleShape::Linear, linear),
            ] {
                let schedule = Schedule::new(shape, 1.0, 0.0, warmup, total).unwrap();
                let got = schedule.learning_rate(k - 1);
                assert!((got - expected).abs() < 1e-15, "{shape:?}, step {k}: {got}");
            }
        }
    }

    #[test]
    fn numbers_that_cannot_be_are_refused_by_name() {
        let error = |peak, minimum, warmup, total| {
            Schedule::new(ScheduleShape::Cosine, peak, minimum, warmup, total)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            error(-1.0, 0.0, 0, 1),
            "learning rate: expected a finite number, 0 or more, got -1; help: 0.001 is usual"
        );
        assert!(error(f64::NAN, 0.0, 0, 1).contains("got NaN"));
        assert_eq!(
            error(0.1, 0.2, 0, 1),
            "lowest learning rate: expected 0 up to the learning rate, 0.1, got 0.2; help: lower it"
        );
        assert_eq!(
            error(0.1, 0.0, 6, 5),
            "warm-up steps: expected at most all steps, 5, got 6; help: give fewer"
        );
        let error = "cosin".parse::<ScheduleShape>().unwrap_err();
        assert!(error.contains("constant, linear, cosine, wsd"), "{error}");
    }
}
