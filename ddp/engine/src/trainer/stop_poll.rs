//! Whether any rank was asked to stop, decided by all ranks at the same step.
//!
//! A signal reaches ranks at different steps. So about four times a second the ranks compare what
//! they have received, in a separate group. How many steps lie between two polls is computed
//! by all ranks from the same numbers.

use std::time::{Duration, Instant};

use ddp_comm::{Group, Reduce, Signal, StopSignals, World};
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor};

use crate::error::Result;

/// The time between two polls, and so how late a stop may come.
const POLL_EVERY: Duration = Duration::from_millis(250);

/// By how much the number of steps between polls may grow at a time: fast steps now say little
/// about later ones.
const GROWTH_MAX: u64 = 8;

/// The polls of one rank.
#[derive(Debug)]
pub(super) struct StopPoll {
    stops: StopSignals,
    /// None for a single rank.
    group: Option<Group>,
    /// f64 (3): the signal received, the seconds since the last poll, and 1 if a process waits to
    /// be taken in.
    message: Tensor,
    /// The step of the next poll.
    next: u64,
    /// Steps between the last poll and the next.
    interval: u64,
    /// When the last poll was, and after which step.
    last: (Instant, u64),
    /// Whether a process waited to be taken in when the ranks polled just now: the same answer on
    /// all ranks.
    pub(super) has_newcomers: bool,
}

impl StopPoll {
    /// Polls in a run of which `taken` steps are done. All ranks call it together.
    pub(super) fn new(world: &World, taken: u64) -> Result<StopPoll> {
        let has_others = world.size() > 1;
        let group = has_others.then(|| world.group("stop poll")).transpose()?;
        let message = Tensor::zeros(&[3], DType::F64, Device::Cpu)?.named("stop poll");
        Ok(StopPoll {
            stops: world.catch_stop(),
            group,
            message,
            next: taken + 1,
            interval: 1,
            last: (Instant::now(), taken),
            has_newcomers: false,
        })
    }

    /// Whether any rank was asked to stop: the same answer on all ranks, which all call this after
    /// every step. `now` polls even if no poll is due.
    pub(super) fn requested(
        &mut self,
        step: u64,
        now: bool,
        world: &World,
    ) -> Result<Option<Signal>> {
        let own = self.stops.requested();
        let Some(group) = &self.group else {
            self.has_newcomers = world.has_newcomers();
            return Ok(own);
        };
        self.has_newcomers = false;
        if step < self.next && !now {
            return Ok(None);
        }
        let elapsed_s = self.last.0.elapsed().as_secs_f64();
        let code = own.map_or(0.0, |signal| f64::from(signal.code()));
        let newcomers = f64::from(u8::from(world.has_newcomers()));
        let mut values = [code, elapsed_s, newcomers];
        self.message
            .with_slice_mut(|message: &mut [f64]| message.copy_from_slice(&values))?;
        group.all_reduce(
            &self.message,
            Reduce::Max,
            &Stream::default_of(Device::Cpu)?,
        )?;
        self.message
            .with_slice(|message: &[f64]| values.copy_from_slice(message))?;
        let [code, elapsed_s, newcomers] = values;
        self.has_newcomers = newcomers > 0.0;
        let steps = step - self.last.1;
        if steps > 0 {
            self.interval = next_interval(self.interval, steps, elapsed_s);
        }
        self.next = step + self.interval;
        self.last = (Instant::now(), step);
        Ok(Signal::of_code(code as u8))
    }
}

/// Steps until the next poll, when the last `steps` took this many seconds on the slowest rank.
fn next_interval(interval: u64, steps: u64, elapsed_s: f64) -> u64 {
    // NaN counts as 0, and infinity as the largest number.
    let wanted = POLL_EVERY.as_secs_f64() * steps as f64 / elapsed_s;
    (wanted as u64).clamp(1, interval.saturating_mul(GROWTH_MAX))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_next_poll_comes_in_time(interval in 1u64..1 << 40, steps in 1u64..1 << 40, elapsed_s in 0.0..1e6f64) {
            let next = next_interval(interval, steps, elapsed_s);
            prop_assert!((1..=interval * GROWTH_MAX).contains(&next));
            // If steps take as long as before; one step may take longer.
            let takes_s = next as f64 * elapsed_s / steps as f64;
            prop_assert!(next == 1 || takes_s <= POLL_EVERY.as_secs_f64() * (1.0 + 1e-9), "{takes_s} s");
        }

        #[test]
        fn steps_of_any_length_are_polled_about_four_times_a_second(step_s in 1e-6..0.2f64) {
            let mut interval = 1;
            for _ in 0..10 {
                interval = next_interval(interval, interval, interval as f64 * step_s);
            }
            let takes_s = interval as f64 * step_s;
            // As close as whole steps come to it.
            prop_assert!(takes_s <= 0.25 * (1.0 + 1e-9) && takes_s > 0.25 - step_s - 1e-9, "{interval} steps, {takes_s} s");
        }
    }

    #[test]
    fn useless_clocks_do_no_harm() {
        assert_eq!(
            [0.0, f64::NAN, f64::INFINITY].map(|elapsed_s| next_interval(4, 4, elapsed_s)),
            [32, 1, 1]
        );
    }

    #[test]
    fn all_ranks_hear_of_a_stop_after_the_same_step() {
        let worlds = World::threads(3, Some(7), Duration::from_secs(60)).unwrap();
        let heard: Vec<Vec<u64>> = std::thread::scope(|scope| {
            let run = |world: World| {
                let mut poll = StopPoll::new(&world, 10).unwrap();
                let mut polls = vec![];
                for step in 11..200 {
                    // Sleep: ranks differ in speed.
                    std::thread::sleep(Duration::from_millis(world.rank() as u64));
                    assert_eq!(poll.requested(step, step % 50 == 0, &world).unwrap(), None);
                    polls.extend((poll.last.1 == step).then_some(step));
                }
                polls
            };
            let threads: Vec<_> = worlds
                .into_iter()
                .map(|world| scope.spawn(move || run(world)))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        assert!(heard[0][0] == 11 && heard[0].contains(&50), "{heard:?}");
        assert!(heard.iter().all(|polls| *polls == heard[0]), "{heard:?}");
    }
}
