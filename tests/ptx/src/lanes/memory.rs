//! Atomics, copies to shared memory and matrices from there. Loads and stores are in `access`.

use super::together::whole_warp;
use crate::access::{address, finish_copies, target};
use crate::finding::{Fault, Kind};
use crate::memory::How;
use crate::number::bits;
use crate::op::{Atomic, Op, Strength};
use crate::shared::Access;
use crate::state::{Copy, Ground, LANES, Warp, bits_of};
use crate::tensor;
use crate::text::Space;

#[inline(always)]
pub(super) fn execute(
    warp: &mut Warp,
    ground: &mut Ground<'_, '_>,
    op: &Op,
    mask: u32,
    at: u32,
) -> Result<(), Fault> {
    match op {
        Op::Atomic {
            op,
            place,
            bytes,
            strong,
            d,
            b,
            c,
        } => {
            for lane in ordered(mask, ground.is_downward) {
                let (space, address) = target(warp, place, lane, *bytes)?;
                let moment = warp.moment(ground, lane, at);
                let from = match space {
                    Space::Global => ground.global.touch(
                        address,
                        *bytes,
                        How::Atomic,
                        strong.strength,
                        moment,
                    )?,
                    Space::Shared => {
                        ground
                            .shared
                            .touch(address, u64::from(*bytes), Access::Atomic, moment)?;
                        ground.shared.place(address)
                    }
                    _ => {
                        let message = "an atomic on memory that is neither global nor shared";
                        return Err(Fault::new(Kind::OutOfBounds, lane, message));
                    }
                };
                let mut word = [0; 8];
                // SAFETY: `touch` has checked that so many bytes are there.
                unsafe {
                    std::ptr::copy_nonoverlapping(from, word.as_mut_ptr(), *bytes as usize);
                }
                let old = u64::from_le_bytes(word);
                let c = c.map(|c| warp.get(c, lane));
                let new = modified(*op, *bytes, old, warp.get(*b, lane), c);
                // SAFETY: as above.
                unsafe {
                    let word = new.to_le_bytes();
                    std::ptr::copy_nonoverlapping(word.as_ptr(), from, *bytes as usize);
                }
                if space == Space::Global {
                    // ISA: `red` reads, but is no acquire pattern.
                    if d.is_some() {
                        ground.global.observe(address, moment, *strong);
                    }
                    // An atomic that changes nothing publishes nothing: no thread can see it.
                    if new != old {
                        ground.global.publish(address, moment, *strong, true);
                    }
                }
                if let Some(d) = d {
                    warp.set(*d, lane, old);
                }
            }
        }
        Op::CopyAsync {
            to,
            from,
            bytes,
            given,
        } => {
            for lane in bits_of(mask) {
                let copy = Copy {
                    to: address(warp, to, lane),
                    from: address(warp, from, lane),
                    bytes: *bytes,
                    given: given
                        .map_or(*bytes, |given| warp.w[given as usize][lane as usize])
                        .min(*bytes),
                };
                if !copy.from.is_multiple_of(u64::from(*bytes)) {
                    let message = format!("a copy of {bytes} bytes from {:#x}", copy.from);
                    return Err(Fault::new(Kind::Misaligned, lane, message));
                }
                let moment = warp.moment(ground, lane, at);
                // It reads from now on, until it arrives.
                for (address, bytes) in copy.pieces() {
                    ground
                        .global
                        .touch(address, bytes, How::Read, Strength::Weak, moment)?;
                }
                ground
                    .shared
                    .touch(copy.to, u64::from(*bytes), Access::Start, moment)?;
                warp.copies[lane as usize].open.push(copy);
            }
        }
        Op::CommitCopies => {
            for lane in bits_of(mask) {
                let copies = &mut warp.copies[lane as usize];
                let group = std::mem::take(&mut copies.open);
                copies.groups.push_back(group);
            }
        }
        Op::WaitCopies { but } => {
            finish_copies(warp, ground, mask, but.unwrap_or(0), but.is_none(), at)?
        }
        Op::LoadMatrix {
            place,
            is_transposed,
            to,
        } => {
            whole_warp(warp, mask)?;
            let mut rows = [[0u8; 16]; LANES];
            for lane in 0..(to.len() * 8) as u32 {
                let row = address(warp, place, lane);
                let moment = warp.moment(ground, lane, at);
                ground.shared.touch(row, 16, Access::Read, moment)?;
                rows[lane as usize] = ground.shared.load(row);
            }
            for (matrix, slot) in to.iter().enumerate() {
                warp.w[*slot as usize] =
                    tensor::fragment(&rows[matrix * 8..matrix * 8 + 8], *is_transposed);
            }
        }
        _ => unreachable!("{op:?} is not about memory"),
    }
    Ok(())
}

/// Lanes in the order in which their atomics are carried out.
fn ordered(mask: u32, is_downward: bool) -> impl Iterator<Item = u32> {
    let turned = if is_downward {
        mask.reverse_bits()
    } else {
        mask
    };
    bits_of(turned).map(move |lane| if is_downward { 31 - lane } else { lane })
}

fn modified(op: Atomic, bytes: u32, old: u64, b: u64, c: Option<u64>) -> u64 {
    let is_wide = bytes == 8;
    let signed = |x: u64| {
        if is_wide {
            x as i64
        } else {
            i64::from(x as u32 as i32)
        }
    };
    match op {
        Atomic::Add => old.wrapping_add(b),
        // ISA: `atom.add.f32` on global memory keeps subnormal numbers.
        Atomic::AddF32 => u64::from(bits(f32::from_bits(old as u32) + f32::from_bits(b as u32))),
        Atomic::AddF64 => (f64::from_bits(old) + f64::from_bits(b)).to_bits(),
        Atomic::Exchange => b,
        Atomic::CompareAndSwap => {
            if old == b {
                c.unwrap_or(old)
            } else {
                old
            }
        }
        Atomic::MinU => old.min(b),
        Atomic::MaxU => old.max(b),
        Atomic::MinS => {
            if signed(old) < signed(b) {
                old
            } else {
                b
            }
        }
        Atomic::MaxS => {
            if signed(old) > signed(b) {
                old
            } else {
                b
            }
        }
        Atomic::And => old & b,
        Atomic::Or => old | b,
        Atomic::Xor => old ^ b,
    }
}
