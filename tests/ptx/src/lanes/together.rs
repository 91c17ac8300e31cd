//! What the lanes of a warp do together.

use crate::finding::{Fault, Kind};
use crate::op::{Op, Shuffle, Slot, Vote};
use crate::state::{LANES, Warp, bits_of};

/// The lanes that an instruction needs besides the one that executes it; None: it needs no others.
pub(crate) fn members(warp: &Warp, op: &Op) -> Option<u32> {
    let of = |slot: Slot, warp: &Warp| {
        // All members name the same ones.
        let lane = if warp.live == 0 {
            0
        } else {
            warp.live.trailing_zeros()
        };
        warp.w[slot as usize][lane as usize]
    };
    match op {
        Op::Shuffle { members, .. }
        | Op::Vote { members, .. }
        | Op::Match { members, .. }
        | Op::WarpBarrier { members } => Some(of(*members, warp)),
        Op::Multiply { .. } | Op::LoadMatrix { .. } | Op::Wgmma(_) => Some(u32::MAX),
        _ => None,
    }
}

/// `.aligned` instructions on matrices are undefined unless the whole warp executes them.
pub(super) fn whole_warp(warp: &Warp, mask: u32) -> Result<(), Fault> {
    if mask == u32::MAX {
        return Ok(());
    }
    let missing = (!mask).trailing_zeros();
    let why = if warp.threads >> missing & 1 == 0 {
        "there is none"
    } else {
        "it has returned or skips it"
    };
    Err(Fault::new(
        Kind::Warp,
        mask.trailing_zeros() & 31,
        format!("all 32 lanes are needed, and of lane {missing} {why}"),
    ))
}

#[inline(always)]
pub(super) fn execute(warp: &mut Warp, op: &Op, mask: u32) {
    match op {
        Op::Shuffle {
            how,
            d,
            is_valid,
            a,
            b,
            c,
            members: _,
        } => {
            let (values, offsets, clamps) = (
                warp.w[*a as usize],
                warp.w[*b as usize],
                warp.w[*c as usize],
            );
            let mut valid = 0;
            let mut found = values;
            for lane in bits_of(mask) {
                let (from, is_in) =
                    shuffled(*how, lane, offsets[lane as usize], clamps[lane as usize]);
                // Of a lane that takes no part nothing can be read.
                found[lane as usize] = if mask >> from & 1 != 0 {
                    values[from as usize]
                } else {
                    u32::MAX
                };
                valid |= u32::from(is_in) << lane;
            }
            map!(warp.w[d], mask, (x = found), x);
            if let Some(slot) = is_valid {
                let place = &mut warp.p[*slot as usize];
                *place = blended(*place, valid, mask);
            }
        }
        Op::Vote {
            how,
            d,
            a,
            is_inverted,
            members: _,
        } => {
            let value = warp.p[*a as usize];
            let votes = if *is_inverted { !value } else { value } & mask;
            if *how == Vote::Ballot {
                map!(warp.w[d], mask, (x = [votes; LANES]), x);
            } else {
                let is = match how {
                    Vote::All => votes == mask,
                    Vote::Any => votes != 0,
                    _ => votes == 0 || votes == mask,
                };
                let place = &mut warp.p[*d as usize];
                *place = blended(*place, if is { u32::MAX } else { 0 }, mask);
            }
        }
        Op::Match {
            is_all,
            is_same,
            d,
            a,
            members: _,
        } => {
            let values: [u64; LANES] = std::array::from_fn(|lane| warp.get(*a, lane as u32));
            let mut found = [0; LANES];
            for lane in bits_of(mask) {
                let same =
                    bits_of(mask).filter(|other| values[*other as usize] == values[lane as usize]);
                let same = same.fold(0, |all, other| all | 1 << other);
                found[lane as usize] = if *is_all && same != mask { 0 } else { same };
            }
            map!(warp.w[d], mask, (x = found), x);
            if let Some(slot) = is_same {
                let value = bits_of(mask)
                    .filter(|lane| found[*lane as usize] == mask)
                    .fold(0, |all, lane| all | 1 << lane);
                let place = &mut warp.p[*slot as usize];
                *place = blended(*place, value, mask);
            }
        }
        Op::ActiveMask { d } => map!(warp.w[d], mask, (x = [mask; LANES]), x),
        Op::WarpBarrier { .. } => {
            // What members did before is before what any of them does next.
            let next = bits_of(mask).map(|lane| warp.barriers[lane as usize] + 1);
            let next = next.max().unwrap_or(0);
            for lane in bits_of(mask) {
                warp.barriers[lane as usize] = next;
            }
        }
        _ => unreachable!("{op:?} needs no other lanes"),
    }
}

/// The lane that a shuffle reads from, and whether it is in the segment.
fn shuffled(how: Shuffle, lane: u32, offset: u32, clamp: u32) -> (u32, bool) {
    let (offset, segment) = (offset & 31, clamp >> 8 & 31);
    let bound = clamp & 31;
    let high = lane & segment | bound & !segment;
    let low = lane & segment;
    let (from, is_in) = match how {
        Shuffle::Up => {
            let from = lane.wrapping_sub(offset);
            (from, from as i32 >= high as i32)
        }
        Shuffle::Down => (lane + offset, lane + offset <= high),
        Shuffle::Butterfly => (lane ^ offset, lane ^ offset <= high),
        Shuffle::Index => {
            let from = low | offset & !segment;
            (from, from <= high)
        }
    };
    if is_in { (from, true) } else { (lane, false) }
}

pub(super) fn blended(old: u32, new: u32, mask: u32) -> u32 {
    old & !mask | new & mask
}
