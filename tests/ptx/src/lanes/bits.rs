//! Bits of words: fields, bytes, tables, shifts of two words, counts, and other widths.

use crate::number;
use crate::op::{Op, Register, Width};
use crate::state::{LANES, Warp, bits_of};

#[inline(always)]
pub(super) fn execute(warp: &mut Warp, op: &Op, mask: u32) {
    match op {
        Op::Insert {
            width,
            d,
            a,
            b,
            position,
            length,
        } => {
            let (position, length) = (warp.w[*position as usize], warp.w[*length as usize]);
            if *width == Width::D {
                each!(
                    warp.d[d],
                    mask,
                    (
                        x = warp.d[*a as usize],
                        y = warp.d[*b as usize],
                        p = position,
                        n = length
                    ),
                    number::insert(x, y, p, n, 64)
                );
            } else {
                each!(
                    warp.w[d],
                    mask,
                    (
                        x = warp.w[*a as usize],
                        y = warp.w[*b as usize],
                        p = position,
                        n = length
                    ),
                    number::insert(u64::from(x), u64::from(y), p, n, 32) as u32
                );
            }
        }
        Op::Extract {
            width,
            is_signed,
            d,
            a,
            position,
            length,
        } => {
            let (position, length) = (warp.w[*position as usize], warp.w[*length as usize]);
            if *width == Width::D {
                each!(
                    warp.d[d],
                    mask,
                    (x = warp.d[*a as usize], p = position, n = length),
                    number::extract(x, p, n, 64, *is_signed)
                );
            } else {
                each!(
                    warp.w[d],
                    mask,
                    (x = warp.w[*a as usize], p = position, n = length),
                    number::extract(u64::from(x), p, n, 32, *is_signed) as u32
                );
            }
        }
        Op::Permute { d, a, b, selector } => {
            each!(
                warp.w[d],
                mask,
                (
                    x = warp.w[*a as usize],
                    y = warp.w[*b as usize],
                    z = warp.w[*selector as usize]
                ),
                number::permute(x, y, z)
            );
        }
        Op::Lookup { d, a, b, c, table } => {
            each!(
                warp.w[d],
                mask,
                (
                    x = warp.w[*a as usize],
                    y = warp.w[*b as usize],
                    z = warp.w[*c as usize]
                ),
                number::lookup(x, y, z, *table)
            );
        }
        Op::Funnel {
            is_left,
            wraps,
            d,
            a,
            b,
            amount,
        } => {
            each!(
                warp.w[d],
                mask,
                (
                    x = warp.w[*a as usize],
                    y = warp.w[*b as usize],
                    n = warp.w[*amount as usize]
                ),
                {
                    let (both, n) = (
                        u64::from(y) << 32 | u64::from(x),
                        if *wraps { n & 31 } else { n.min(32) },
                    );
                    if *is_left {
                        ((both << n) >> 32) as u32
                    } else {
                        (both >> n) as u32
                    }
                }
            );
        }
        Op::Count { width, d, a } => match width {
            Width::D => each!(warp.w[d], mask, (x = warp.d[*a as usize]), x.count_ones()),
            _ => each!(warp.w[d], mask, (x = warp.w[*a as usize]), x.count_ones()),
        },
        Op::LeadingZeros { width, d, a } => match width {
            Width::D => each!(
                warp.w[d],
                mask,
                (x = warp.d[*a as usize]),
                x.leading_zeros()
            ),
            _ => each!(
                warp.w[d],
                mask,
                (x = warp.w[*a as usize]),
                x.leading_zeros()
            ),
        },
        Op::Reverse { width, d, a } => match width {
            Width::D => each!(warp.d[d], mask, (x = warp.d[*a as usize]), x.reverse_bits()),
            _ => each!(warp.w[d], mask, (x = warp.w[*a as usize]), x.reverse_bits()),
        },
        _ => unreachable!("{op:?} is about no bits"),
    }
}

#[inline(always)]
pub(super) fn extend(
    warp: &mut Warp,
    mask: u32,
    is_signed: bool,
    bits: u32,
    d: Register,
    a: Register,
) {
    let (to, from) = (d.slot, a.slot as usize);
    match (is_signed, bits, d.width, a.width) {
        (_, 32, Width::W, Width::D) => map!(warp.w[&to], mask, (x = warp.d[from]), x as u32),
        (false, 32, Width::D, Width::W) => {
            map!(warp.d[&to], mask, (x = warp.w[from]), u64::from(x))
        }
        (false, 16, Width::W, Width::H) => {
            map!(warp.w[&to], mask, (x = warp.h[from]), u32::from(x))
        }
        (false, 16, Width::D, Width::H) => {
            map!(warp.d[&to], mask, (x = warp.h[from]), u64::from(x))
        }
        (_, 16, Width::H, Width::W) => map!(warp.h[&to], mask, (x = warp.w[from]), x as u16),
        (true, 32, Width::D, Width::W) => map!(
            warp.d[&to],
            mask,
            (x = warp.w[from]),
            i64::from(x as i32) as u64
        ),
        _ => {
            for lane in bits_of(mask) {
                let value = warp.get(a, lane) << (64 - bits);
                let value = if is_signed {
                    ((value as i64) >> (64 - bits)) as u64
                } else {
                    value >> (64 - bits)
                };
                warp.set(d, lane, value);
            }
        }
    }
}
