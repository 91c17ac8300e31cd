//! What instructions do to the lanes that execute them.

#[macro_use]
mod macros;
mod bits;
mod float;
mod memory;
mod together;

use self::bits::extend;
use self::float::*;
use self::together::{blended, whole_warp};
use crate::access::{load, store};
use crate::finding::{Fault, Kind};
use crate::memory::How;
use crate::number::{self, bf16, flushed};
use crate::op::{Compare, Compared, Float, Int, Logic, Op, Slot, Width};
use crate::state::{Effect, Ground, LANES, Warp, bits_of};
use crate::tensor;
use crate::wgmma;

pub(crate) use self::together::members;

#[inline(always)]
fn combined(op: Logic, a: u32, b: u32) -> u32 {
    match op {
        Logic::And => a & b,
        Logic::Or => a | b,
        Logic::Xor => a ^ b,
        Logic::Not => !a,
        Logic::Move => a,
    }
}

/// Executes an instruction for the lanes of `mask`.
#[inline(always)]
pub(crate) fn execute(
    warp: &mut Warp,
    ground: &mut Ground<'_, '_>,
    op: &Op,
    mask: u32,
    at: u32,
) -> Result<Effect, Fault> {
    match op {
        Op::Int { width, op, d, a, b } => match width {
            Width::W => integers!(warp, mask, *op, w, u32, i32, u64, i64, d, a, b),
            Width::D => integers!(warp, mask, *op, d, u64, i64, u128, i128, d, a, b),
            _ => integers!(warp, mask, *op, h, u16, i16, u32, i32, d, a, b),
        },
        Op::F32 {
            op: op @ (Float::DivApprox | Float::DivFull),
            ftz,
            d,
            a,
            b,
        } if let Some(seed) = ground.errors => {
            let is_full = *op == Float::DivFull;
            each!(
                warp.w[d],
                mask,
                (x = warp.w[*a as usize], y = warp.w[*b as usize]),
                divided_wrongly(x, y, is_full, *ftz, seed)
            );
        }
        Op::F32 { op, ftz, d, a, b } => float32(warp, mask, *op, *ftz, d, *a, *b),
        Op::Fma32 { ftz, d, a, b, c } => {
            let (ftz, a, b, c) = (*ftz, *a as usize, *b as usize, *c as usize);
            map!(
                warp.w[d],
                mask,
                (x = warp.w[a], y = warp.w[b], z = warp.w[c]),
                result(single(x, ftz).mul_add(single(y, ftz), single(z, ftz)), ftz)
            );
        }
        Op::F64 { op, d, a, b } => float64(warp, mask, *op, d, *a, *b),
        Op::Fma64 { d, a, b, c } => {
            map!(
                warp.d[d],
                mask,
                (
                    x = warp.d[*a as usize],
                    y = warp.d[*b as usize],
                    z = warp.d[*c as usize]
                ),
                {
                    f64::from_bits(x)
                        .mul_add(f64::from_bits(y), f64::from_bits(z))
                        .to_bits()
                }
            );
        }
        Op::Wide {
            from,
            is_signed,
            d,
            a,
            b,
            c,
        } => match (from, is_signed) {
            (Width::H, _) => {
                let c = c.map_or([0; LANES], |c| warp.w[c as usize]);
                let is_signed = *is_signed;
                map!(
                    warp.w[d],
                    mask,
                    (x = warp.h[*a as usize], y = warp.h[*b as usize], z = c),
                    {
                        let product = if is_signed {
                            (i32::from(x as i16) * i32::from(y as i16)) as u32
                        } else {
                            u32::from(x) * u32::from(y)
                        };
                        product.wrapping_add(z)
                    }
                );
            }
            (_, false) => {
                let c = c.map_or([0; LANES], |c| warp.d[c as usize]);
                map!(
                    warp.d[d],
                    mask,
                    (x = warp.w[*a as usize], y = warp.w[*b as usize], z = c),
                    (u64::from(x) * u64::from(y)).wrapping_add(z)
                );
            }
            (_, true) => {
                let c = c.map_or([0; LANES], |c| warp.d[c as usize]);
                map!(
                    warp.d[d],
                    mask,
                    (x = warp.w[*a as usize], y = warp.w[*b as usize], z = c),
                    ((i64::from(x as i32) * i64::from(y as i32)) as u64).wrapping_add(z)
                );
            }
        },
        Op::Mad { width, d, a, b, c } => {
            let (a, b, c) = (*a as usize, *b as usize, *c as usize);
            match width {
                Width::D => map!(
                    warp.d[d],
                    mask,
                    (x = warp.d[a], y = warp.d[b], z = warp.d[c]),
                    x.wrapping_mul(y).wrapping_add(z)
                ),
                Width::W => map!(
                    warp.w[d],
                    mask,
                    (x = warp.w[a], y = warp.w[b], z = warp.w[c]),
                    x.wrapping_mul(y).wrapping_add(z)
                ),
                _ => map!(
                    warp.h[d],
                    mask,
                    (x = warp.h[a], y = warp.h[b], z = warp.h[c]),
                    x.wrapping_mul(y).wrapping_add(z)
                ),
            }
        }
        Op::Approximate {
            function,
            ftz,
            d,
            a,
        } => {
            let errors = ground.errors;
            each!(
                warp.w[d],
                mask,
                (x = warp.w[*a as usize]),
                approximately(*function, *ftz, x, errors)
            );
        }
        Op::Setp {
            compare,
            of,
            ftz,
            d,
            inverse,
            a,
            b,
            with,
        } => {
            let (a, b) = (*a as usize, *b as usize);
            let found = match of {
                Compared::U16 => compared!(compare, warp.h[a], warp.h[b], |x| x),
                Compared::S16 => compared!(compare, warp.h[a], warp.h[b], |x| x as i16),
                Compared::U32 => compared!(compare, warp.w[a], warp.w[b], |x| x),
                Compared::S32 => compared!(compare, warp.w[a], warp.w[b], |x| x as i32),
                Compared::U64 => compared!(compare, warp.d[a], warp.d[b], |x| x),
                Compared::S64 => compared!(compare, warp.d[a], warp.d[b], |x| x as i64),
                Compared::F32 if *ftz => {
                    compared!(compare, warp.w[a], warp.w[b], |x| f32::from_bits(flushed(
                        x
                    )))
                }
                Compared::F32 => compared!(compare, warp.w[a], warp.w[b], |x| f32::from_bits(x)),
                Compared::F64 => compared!(compare, warp.d[a], warp.d[b], |x| f64::from_bits(x)),
            };
            let with = with.map(|(op, slot, is_negated)| {
                let value = warp.p[slot as usize];
                (op, if is_negated { !value } else { value })
            });
            let of = |found: u32| with.map_or(found, |(op, value)| combined(op, found, value));
            if let Some(inverse) = inverse {
                let place = &mut warp.p[*inverse as usize];
                *place = blended(*place, of(!found), mask);
            }
            let place = &mut warp.p[*d as usize];
            *place = blended(*place, of(found), mask);
        }
        Op::Select { width, d, a, b, p } => {
            let (p, a, b) = (warp.p[*p as usize], *a as usize, *b as usize);
            macro_rules! select {
                ($pool:ident) => {{
                    let (x, y) = (warp.$pool[a], warp.$pool[b]);
                    let out = &mut warp.$pool[*d as usize];
                    for lane in 0..LANES {
                        let value = if p >> lane & 1 != 0 { x[lane] } else { y[lane] };
                        out[lane] = if mask >> lane & 1 != 0 {
                            value
                        } else {
                            out[lane]
                        };
                    }
                }};
            }
            match width {
                Width::H => select!(h),
                Width::W => select!(w),
                Width::D => select!(d),
                Width::P => {
                    let value = blended(warp.p[b], warp.p[a], p);
                    warp.p[*d as usize] = blended(warp.p[*d as usize], value, mask);
                }
            }
        }
        Op::Logic { op, d, a, b } => {
            let value = combined(*op, warp.p[*a as usize], warp.p[*b as usize]);
            let place = &mut warp.p[*d as usize];
            *place = blended(*place, value, mask);
        }
        Op::Move { width, d, a } => match width {
            Width::H => map!(warp.h[d], mask, (x = warp.h[*a as usize]), x),
            Width::W => map!(warp.w[d], mask, (x = warp.w[*a as usize]), x),
            _ => map!(warp.d[d], mask, (x = warp.d[*a as usize]), x),
        },
        Op::Pack { d, parts } => {
            for lane in bits_of(mask) {
                let value = parts.iter().rev().fold(0, |word, part| {
                    word << part.width.bits() | warp.get(*part, lane)
                });
                warp.set(*d, lane, value);
            }
        }
        Op::Unpack { parts, a } => match (a.width, &parts[..]) {
            (Width::W, [low, high]) if low.width == Width::H && high.width == Width::H => {
                let whole = warp.w[a.slot as usize];
                map!(warp.h[&low.slot], mask, (x = whole), x as u16);
                map!(warp.h[&high.slot], mask, (x = whole), (x >> 16) as u16);
            }
            _ => {
                for lane in bits_of(mask) {
                    let mut value = warp.get(*a, lane);
                    for part in parts {
                        warp.set(*part, lane, value);
                        value = value.checked_shr(part.width.bits()).unwrap_or(0);
                    }
                }
            }
        },
        Op::Extend {
            is_signed,
            bits,
            d,
            a,
        } => extend(warp, mask, *is_signed, *bits, *d, *a),
        Op::Convert { how, d, a } => match (how.from, how.to, d.width, a.width) {
            (number::Number::F32, number::Number::Bf16, Width::H, Width::W) => {
                let rounding = how.rounding;
                map!(
                    warp.h[&d.slot],
                    mask,
                    (x = warp.w[a.slot as usize]),
                    bf16(x, rounding)
                );
            }
            (number::Number::F32, number::Number::F64, Width::D, Width::W) => {
                let ftz = how.ftz;
                map!(
                    warp.d[&d.slot],
                    mask,
                    (x = warp.w[a.slot as usize]),
                    f64::from(single(x, ftz)).to_bits()
                );
            }
            _ => {
                for lane in bits_of(mask) {
                    let value = how.apply(warp.get(*a, lane));
                    warp.set(*d, lane, value);
                }
            }
        },
        Op::Bf16x2 { d, a, b } => {
            map!(
                warp.w[d],
                mask,
                (high = warp.w[*a as usize], low = warp.w[*b as usize]),
                {
                    let half = |x| u32::from(bf16(x, number::Rounding::Nearest));
                    half(high) << 16 | half(low)
                }
            );
        }
        Op::Insert { .. }
        | Op::Extract { .. }
        | Op::Permute { .. }
        | Op::Lookup { .. }
        | Op::Funnel { .. }
        | Op::Count { .. }
        | Op::LeadingZeros { .. }
        | Op::Reverse { .. } => bits::execute(warp, op, mask),
        Op::Rebase { d, a, add } => {
            let add = *add;
            if a.width == Width::D {
                map!(
                    warp.d[d],
                    mask,
                    (x = warp.d[a.slot as usize]),
                    x.wrapping_add(add)
                );
            } else {
                return Err(Fault::new(
                    Kind::OutOfBounds,
                    mask.trailing_zeros() & 31,
                    "cvta of 32 bits",
                ));
            }
        }
        Op::Load {
            place,
            element,
            read_only,
            strong,
            to,
        } => {
            let how = if *read_only { How::ReadOnly } else { How::Read };
            load(warp, ground, mask, place, *element, (how, *strong), to, at)?
        }
        Op::Store {
            place,
            element,
            strong,
            from,
        } => store(warp, ground, mask, place, *element, *strong, from, at)?,
        Op::Atomic { .. }
        | Op::CopyAsync { .. }
        | Op::CommitCopies
        | Op::WaitCopies { .. }
        | Op::LoadMatrix { .. } => memory::execute(warp, ground, op, mask, at)?,
        Op::Multiply { is_f16, d, a, b, c } => {
            whole_warp(warp, mask)?;
            let w = |slot: &Slot| warp.w[*slot as usize];
            let (a, b, c) = (
                a.each_ref().map(w),
                b.each_ref().map(w),
                c.each_ref().map(w),
            );
            for (slot, part) in d.iter().zip(tensor::multiply(*is_f16, &a, &b, &c)) {
                warp.w[*slot as usize] = part;
            }
        }
        Op::Shuffle { .. }
        | Op::Vote { .. }
        | Op::Match { .. }
        | Op::ActiveMask { .. }
        | Op::WarpBarrier { .. } => together::execute(warp, op, mask),
        Op::Barrier { .. } => return Ok(Effect::Barrier),
        Op::Fence(strong) => {
            for lane in bits_of(mask) {
                let moment = warp.moment(ground, lane, at);
                ground.global.order.fence(moment, *strong);
            }
        }
        Op::ProxyFence => ground.shared.fence_proxy(warp.first_thread, mask),
        Op::Wgmma(op) => {
            if mask != 0 {
                whole_warp(warp, mask)?;
                wgmma::execute(warp, ground, op, at)?;
            }
        }
        Op::Branch { target } => return Ok(Effect::Branch(*target)),
        Op::Exit => return Ok(Effect::Exit),
        Op::Trap => {
            if mask != 0 {
                return Err(Fault::new(
                    Kind::Stopped,
                    mask.trailing_zeros(),
                    "the kernel stops itself (trap)",
                ));
            }
        }
    }
    Ok(Effect::Next)
}
