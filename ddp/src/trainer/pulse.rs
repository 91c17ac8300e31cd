//! The ranks' pulse: whether one of them was asked to stop, found out by all behind the same step.
//!
//! A signal comes to a rank at some moment, and ranks are not in the same step then. So every now and then (`BEAT_EVERY`) they put together
//! what they have heard, on a group of their own; between these beats nothing is done. The next beat is a number of steps away that all ranks
//! work out from the same numbers.

use std::time::{Duration, Instant};

use ddp_comm::{Group, Reduce, Signal, Stops, World};
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor};

use crate::error::Result;

/// About how much time is between two beats: what a stop may come late.
const BEAT_EVERY: Duration = Duration::from_millis(250);

/// How many times more steps there may be to the next beat than there were to this one: quick steps now say little about those to come.
const GROWTH_MAX: u64 = 8;

/// The pulse, seen from one rank.
#[derive(Debug)]
pub(super) struct Pulse {
    stops: Stops,
    /// None of a rank alone, which hears of everything at once.
    group: Option<Group>,
    /// f64 [2]: the signal that has come, and the seconds since the last beat.
    word: Tensor,
    /// The step behind which the next beat is.
    next: u64,
    /// Steps between the last beat and this.
    interval: u64,
    /// When the last beat was, and behind which step.
    last: (Instant, u64),
}

impl Pulse {
    /// Of what `stops` hears. `taken`: how many steps there were already. All ranks call it.
    pub(super) fn new(world: &World, stops: Stops, taken: u64) -> Result<Pulse> {
        let group = if world.size() > 1 { Some(world.group("pulse")?) } else { None };
        let word = Tensor::zeros(&[2], DType::F64, Device::Cpu)?.named("pulse");
        Ok(Pulse { stops, group, word, next: taken + 1, interval: 1, last: (Instant::now(), taken) })
    }

    /// Whether any rank has been asked to stop, behind step `step`: the same answer on all ranks. `now`: also where no beat is due, as after
    /// something long. All ranks call it behind every step.
    pub(super) fn beat(&mut self, step: u64, now: bool) -> Result<Option<Signal>> {
        let own = self.stops.asked();
        let Some(group) = &self.group else { return Ok(own) };
        if step < self.next && !now {
            return Ok(None);
        }
        let elapsed_s = self.last.0.elapsed().as_secs_f64();
        let mut heard = [own.map_or(0.0, |signal| f64::from(signal.code())), elapsed_s];
        self.word.with_slice_mut(|word: &mut [f64]| word.copy_from_slice(&heard))?;
        group.all_reduce(&self.word, Reduce::Max, &Stream::default_of(Device::Cpu)?)?;
        self.word.with_slice(|word: &[f64]| heard.copy_from_slice(word))?;
        let steps = step - self.last.1;
        if steps > 0 {
            self.interval = next_interval(self.interval, steps, heard[1]);
        }
        self.next = step + self.interval;
        self.last = (Instant::now(), step);
        Ok(Signal::of_code(heard[0] as u8))
    }
}

/// How many steps there are to the next beat, when the last `steps` took so many seconds on the rank where they took longest.
fn next_interval(interval: u64, steps: u64, elapsed_s: f64) -> u64 {
    // As many as take that long; of no time at all infinitely many, and of what is no number none.
    let wanted = BEAT_EVERY.as_secs_f64() * steps as f64 / elapsed_s;
    (wanted as u64).clamp(1, interval.saturating_mul(GROWTH_MAX))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_next_beat_comes_and_comes_in_time(interval in 1u64..1 << 40, steps in 1u64..1 << 40, elapsed_s in 0.0..1e6f64) {
            let next = next_interval(interval, steps, elapsed_s);
            prop_assert!((1..=interval * GROWTH_MAX).contains(&next));
            // If steps take as long as before; one step may take longer.
            let takes_s = next as f64 * elapsed_s / steps as f64;
            prop_assert!(next == 1 || takes_s <= BEAT_EVERY.as_secs_f64() * (1.0 + 1e-9), "{takes_s} s");
        }

        #[test]
        fn steps_of_any_length_have_their_beat_after_a_while(step_s in 1e-6..0.2f64) {
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
    fn clocks_that_say_nothing_do_no_harm() {
        assert_eq!([0.0, f64::NAN, f64::INFINITY].map(|elapsed_s| next_interval(4, 4, elapsed_s)), [32, 1, 1]);
    }

    #[test]
    fn all_ranks_hear_of_a_stop_behind_the_same_step() {
        let worlds = World::threads(3, Some(7), Duration::from_secs(60)).unwrap();
        let heard: Vec<Vec<u64>> = std::thread::scope(|scope| {
            let run = |world: World| {
                let mut pulse = Pulse::new(&world, world.catch_stop(), 10).unwrap();
                let mut beats = vec![];
                for step in 11..200 {
                    std::thread::sleep(Duration::from_millis(world.rank() as u64));
                    let before = pulse.next;
                    assert_eq!(pulse.beat(step, step % 50 == 0).unwrap(), None);
                    beats.extend((pulse.next != before).then_some(step));
                }
                beats
            };
            let threads: Vec<_> = worlds.into_iter().map(|world| scope.spawn(move || run(world))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(heard[0][0] == 11 && heard[0].contains(&50) && heard[0].len() < 150, "{heard:?}");
        assert!(heard.iter().all(|beats| *beats == heard[0]), "{heard:?}");
    }
}
