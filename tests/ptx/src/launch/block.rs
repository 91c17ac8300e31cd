//! A block: its warps run in turns until each waits or has ended.

use super::turns::{Random, Turns};
use crate::finding::{Fault, Kind};
use crate::op::{Reduction, Register, Width};
use crate::state::{Ground, Stop, Warp, bits_of};
use crate::wgmma;

/// Where a warp waits.
#[derive(Clone, Copy)]
struct Waits {
    stop: Stop,
    id: u32,
    threads: Option<u32>,
    at: u32,
}

/// Runs the warps of a block to their end. An error has the thread and the instruction.
pub(super) fn block(
    warps: &mut [Warp],
    ground: &mut Ground<'_, '_>,
    turns: Turns,
    random: &mut Random,
) -> Result<(), (u32, u32, Fault)> {
    let mut waits: Vec<Option<Waits>> = vec![None; warps.len()];
    let mut has_exited = vec![false; warps.len()];
    // Threads that arrived by `bar.arrive`, which nobody waits with.
    let mut arrived = [0u32; 16];
    loop {
        let mut runs: Vec<usize> = (0..warps.len())
            .filter(|at| waits[*at].is_none() && !has_exited[*at])
            .collect();
        if runs.is_empty() {
            if has_exited.iter().all(|has| *has) {
                return wgmma::ended(ground);
            }
            release(warps, ground, &mut waits, &has_exited, &mut arrived)?;
            continue;
        }
        match turns {
            Turns::Forward => {}
            Turns::Backward => runs.reverse(),
            // From some warp on, another one each time.
            Turns::Scattered { .. } => {
                let first = random.below(runs.len() as u64) as usize;
                runs.rotate_left(first);
            }
        }
        for number in runs {
            let warp = &mut warps[number];
            match warp
                .run(ground)
                .map_err(|(at, fault)| (warp.first_thread + fault.lane, at, fault))?
            {
                Stop::Exited => has_exited[number] = true,
                stop @ Stop::Barrier {
                    id,
                    threads,
                    arrives_only,
                    at,
                    ..
                } => {
                    if id > 15 {
                        let fault =
                            Fault::new(Kind::Barrier, 0, format!("barrier {id}: there are 16"));
                        return Err((warp.first_thread, at, fault));
                    }
                    if arrives_only {
                        arrived[id as usize] += 32;
                        warp.pass_barrier();
                        ground.follow_no_more();
                    } else {
                        waits[number] = Some(Waits {
                            stop,
                            id,
                            threads,
                            at,
                        });
                    }
                }
            }
        }
    }
}

/// Lets warps go on whose barrier is complete; an error if there is none.
fn release(
    warps: &mut [Warp],
    ground: &mut Ground<'_, '_>,
    waits: &mut [Option<Waits>],
    has_exited: &[bool],
    arrived: &mut [u32; 16],
) -> Result<(), (u32, u32, Fault)> {
    for id in 0..16 {
        let here: Vec<usize> = (0..warps.len())
            .filter(|at| waits[*at].is_some_and(|waits| waits.id == id))
            .collect();
        let Some(first) = here.first().and_then(|at| waits[*at]) else {
            continue;
        };
        let is_whole = here.len() == has_exited.iter().filter(|has| !**has).count();
        let count = here.len() as u32 * 32 + arrived[id as usize];
        let is_complete = match first.threads {
            None => is_whole,
            Some(threads) => count >= threads,
        };
        if !is_complete {
            continue;
        }
        // CUDA: all threads of a block come to the same __syncthreads().
        let is_elsewhere = |at: &&usize| waits[**at].is_some_and(|other| other.at != first.at);
        if first.threads.is_none()
            && let Some(at) = here.iter().find(is_elsewhere)
            && let Some(other) = waits[*at]
        {
            let message = format!(
                "barrier {id} has threads that wait at another instruction, {} of the program, here {}",
                other.at, first.at
            );
            let fault = Fault::new(Kind::Barrier, 0, message);
            return Err((warps[*at].first_thread, other.at, fault));
        }
        arrived[id as usize] = 0;
        reduce(warps, &here, waits);
        if is_whole {
            ground.barriers += 1;
            ground.global.order.end_barrier();
        } else {
            ground.follow_no_more();
        }
        for at in here {
            warps[at].pass_barrier();
            waits[at] = None;
        }
        return Ok(());
    }
    let (number, waits) = waits
        .iter()
        .enumerate()
        .find_map(|(at, waits)| Some((at, (*waits)?)))
        .expect("a warp waits");
    let needs = waits
        .threads
        .map_or("all threads of the block".to_owned(), |threads| {
            format!("{threads} threads")
        });
    let message = format!(
        "barrier {} waits for {needs}, and no warp goes on",
        waits.id
    );
    Err((
        number as u32 * 32,
        waits.at,
        Fault::new(Kind::Barrier, 0, message),
    ))
}

/// `bar.red`: what all threads of the barrier say, for each of them.
fn reduce(warps: &mut [Warp], here: &[usize], waits: &[Option<Waits>]) {
    let reduction = |at: usize| match waits[at]?.stop {
        Stop::Barrier { reduce, .. } => reduce,
        Stop::Exited => None,
    };
    let (mut count, mut all) = (0, 0);
    for at in here {
        let Some(reduce) = reduction(*at) else { return };
        let lanes = warps[*at].at_barrier();
        let value = warps[*at].p[reduce.a as usize];
        count += (if reduce.is_inverted { !value } else { value } & lanes).count_ones();
        all += lanes.count_ones();
    }
    for at in here {
        let Some(reduce) = reduction(*at) else { return };
        let (value, width) = match reduce.op {
            Reduction::And => (u32::from(count == all), Width::P),
            Reduction::Or => (u32::from(count != 0), Width::P),
            Reduction::Count => (count, Width::W),
        };
        let register = Register {
            width,
            slot: reduce.d,
        };
        for lane in bits_of(warps[*at].at_barrier()) {
            warps[*at].set(register, lane, u64::from(value));
        }
    }
}
