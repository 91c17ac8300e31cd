//! What instructions do to the lanes that execute them.

use crate::access::{address, finish_copies, load, store, target};
use crate::finding::{Fault, Kind};
use crate::memory::How;
use crate::number::{self, Approximate, bf16, bits, flushed};
use crate::op::{
    Atomic, Compare, Compared, Float, Int, Logic, Op, Register, Shuffle, Slot, Strength, Vote,
    Width,
};
use crate::shared::Access;
use crate::state::{Copy, Effect, Ground, LANES, Warp, bits_of};
use crate::tensor;
use crate::text::Space;
use crate::wgmma;

/// Results lane by lane, where `mask` has the lane: `map!(warp.w[d], mask, (a, b), |a, b| a + b)`,
/// whose operands are arrays.
macro_rules! map {
    ($warp:ident.$pool:ident[$d:expr], $mask:expr, ($($x:ident = $source:expr),*), $value:expr) => {{
        $(let $x = $source;)*
        let mask = $mask;
        let out = &mut $warp.$pool[*$d as usize];
        for lane in 0..LANES {
            let value = { $(let $x = $x[lane];)* $value };
            out[lane] = if mask >> lane & 1 != 0 { value } else { out[lane] };
        }
    }};
}

/// The same where the value must not be computed for other lanes, or costs much.
macro_rules! each {
    ($warp:ident.$pool:ident[$d:expr], $mask:expr, ($($x:ident = $source:expr),*), $value:expr) => {{
        $(let $x = $source;)*
        for lane in bits_of($mask) {
            let value = { $(let $x = $x[lane as usize];)* $value };
            $warp.$pool[*$d as usize][lane as usize] = value;
        }
    }};
}

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

macro_rules! integers {
    ($warp:ident, $mask:ident, $op:expr, $pool:ident, $unsigned:ty, $signed:ty, $wide:ty, $wide_signed:ty, $d:expr, $a:expr, $b:expr) => {{
        let (slot_a, slot_b) = (*$a as usize, *$b as usize);
        macro_rules! two {
            ($x:ident, $y:ident, $value:expr) => {
                map!(
                    $warp.$pool[$d],
                    $mask,
                    ($x = $warp.$pool[slot_a], $y = $warp.$pool[slot_b]),
                    $value
                )
            };
        }
        macro_rules! shift {
            ($x:ident, $y:ident, $value:expr) => {
                map!(
                    $warp.$pool[$d],
                    $mask,
                    ($x = $warp.$pool[slot_a], $y = $warp.w[slot_b]),
                    $value
                )
            };
        }
        const BITS: u32 = <$unsigned>::BITS;
        match $op {
            Int::Add => two!(x, y, x.wrapping_add(y)),
            Int::Sub => two!(x, y, x.wrapping_sub(y)),
            Int::Mul => two!(x, y, x.wrapping_mul(y)),
            Int::MulHighU => two!(x, y, ((x as $wide * y as $wide) >> BITS) as $unsigned),
            Int::MulHighS => {
                two!(
                    x,
                    y,
                    ((x as $signed as $wide_signed * y as $signed as $wide_signed) >> BITS)
                        as $unsigned
                )
            }
            Int::DivU | Int::DivS | Int::RemU | Int::RemS => {
                let (x, y) = ($warp.$pool[slot_a], $warp.$pool[slot_b]);
                for lane in bits_of($mask) {
                    let (x, y) = (x[lane as usize], y[lane as usize]);
                    if y == 0 {
                        return Err(Fault::new(
                            Kind::Stopped,
                            lane,
                            "an integer is divided by zero",
                        ));
                    }
                    $warp.$pool[*$d as usize][lane as usize] = match $op {
                        Int::DivU => x / y,
                        Int::RemU => x % y,
                        Int::DivS => (x as $signed).wrapping_div(y as $signed) as $unsigned,
                        _ => (x as $signed).wrapping_rem(y as $signed) as $unsigned,
                    };
                }
            }
            Int::MinU => two!(x, y, x.min(y)),
            Int::MaxU => two!(x, y, x.max(y)),
            Int::MinS => two!(x, y, (x as $signed).min(y as $signed) as $unsigned),
            Int::MaxS => two!(x, y, (x as $signed).max(y as $signed) as $unsigned),
            Int::And => two!(x, y, x & y),
            Int::Or => two!(x, y, x | y),
            Int::Xor => two!(x, y, x ^ y),
            Int::Not => two!(x, _y, !x),
            Int::Neg => two!(x, _y, x.wrapping_neg()),
            Int::Abs => two!(x, _y, (x as $signed).wrapping_abs() as $unsigned),
            // Amounts beyond the width are the width.
            Int::Shl => shift!(x, y, if y >= BITS { 0 } else { x << (y & (BITS - 1)) }),
            Int::ShrU => shift!(x, y, if y >= BITS { 0 } else { x >> (y & (BITS - 1)) }),
            Int::ShrS => shift!(x, y, (x as $signed >> y.min(BITS - 1)) as $unsigned),
        }
    }};
}

/// The comparison's predicate, for all lanes.
macro_rules! compared {
    ($compare:expr, $a:expr, $b:expr, |$x:ident| $view:expr) => {{
        let (a, b) = ($a, $b);
        macro_rules! all {
            (|$p:ident, $q:ident| $is:expr) => {{
                let mut found = 0_u32;
                for lane in 0..LANES {
                    let $p = {
                        let $x = a[lane];
                        $view
                    };
                    let $q = {
                        let $x = b[lane];
                        $view
                    };
                    found |= u32::from($is) << lane;
                }
                found
            }};
        }
        // Only NaN is unequal to itself.
        #[allow(clippy::eq_op, clippy::neg_cmp_op_on_partial_ord)]
        match $compare {
            Compare::Eq => all!(|p, q| p == q),
            Compare::Ne => all!(|p, q| p != q && p == p && q == q),
            Compare::Lt => all!(|p, q| p < q),
            Compare::Le => all!(|p, q| p <= q),
            Compare::Gt => all!(|p, q| p > q),
            Compare::Ge => all!(|p, q| p >= q),
            Compare::EqU => all!(|p, q| p == q || p != p || q != q),
            Compare::NeU => all!(|p, q| p != q),
            Compare::LtU => all!(|p, q| !(p >= q)),
            Compare::LeU => all!(|p, q| !(p > q)),
            Compare::GtU => all!(|p, q| !(p <= q)),
            Compare::GeU => all!(|p, q| !(p < q)),
            Compare::Number => all!(|p, q| p == p && q == q),
            Compare::Nan => all!(|p, q| p != p || q != q),
        }
    }};
}

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

fn blended(old: u32, new: u32, mask: u32) -> u32 {
    old & !mask | new & mask
}

fn single(x: u32, ftz: bool) -> f32 {
    f32::from_bits(if ftz { flushed(x) } else { x })
}

fn result(x: f32, ftz: bool) -> u32 {
    if ftz { flushed(bits(x)) } else { bits(x) }
}

#[inline(always)]
fn float32(warp: &mut Warp, mask: u32, op: Float, ftz: bool, d: &Slot, a: Slot, b: Slot) {
    let (a, b) = (a as usize, b as usize);
    macro_rules! two {
        (|$x:ident, $y:ident| $value:expr) => {
            if ftz {
                map!(warp.w[d], mask, (x = warp.w[a], y = warp.w[b]), {
                    let ($x, $y) = (f32::from_bits(flushed(x)), f32::from_bits(flushed(y)));
                    flushed(bits($value))
                })
            } else {
                map!(warp.w[d], mask, (x = warp.w[a], y = warp.w[b]), {
                    let ($x, $y) = (f32::from_bits(x), f32::from_bits(y));
                    bits($value)
                })
            }
        };
    }
    match op {
        Float::Add => two!(|x, y| x + y),
        Float::Sub => two!(|x, y| x - y),
        Float::Mul => two!(|x, y| x * y),
        Float::Div => two!(|x, y| x / y),
        Float::DivApprox => two!(|x, y| number::divide_approximately(x, y, false)),
        Float::DivFull => two!(|x, y| number::divide_approximately(x, y, true)),
        Float::Min => two!(|x, y| number::min(x, y)),
        Float::Max => two!(|x, y| number::max(x, y)),
        Float::Sqrt => two!(|x, _y| x.sqrt()),
        Float::Rcp => two!(|x, _y| 1.0 / x),
        Float::Neg => two!(|x, _y| -x),
        Float::Abs => two!(|x, _y| x.abs()),
    }
}

#[inline(always)]
fn float64(warp: &mut Warp, mask: u32, op: Float, d: &Slot, a: Slot, b: Slot) {
    let (a, b) = (a as usize, b as usize);
    macro_rules! two {
        (|$x:ident, $y:ident| $value:expr) => {
            map!(warp.d[d], mask, (x = warp.d[a], y = warp.d[b]), {
                let ($x, $y) = (f64::from_bits(x), f64::from_bits(y));
                f64::to_bits($value)
            })
        };
    }
    match op {
        Float::Add => two!(|x, y| x + y),
        Float::Sub => two!(|x, y| x - y),
        Float::Mul => two!(|x, y| x * y),
        Float::Div | Float::DivApprox | Float::DivFull => two!(|x, y| x / y),
        Float::Min => two!(|x, y| number::min64(x, y)),
        Float::Max => two!(|x, y| number::max64(x, y)),
        Float::Sqrt => two!(|x, _y| x.sqrt()),
        Float::Rcp => two!(|x, _y| 1.0 / x),
        Float::Neg => two!(|x, _y| -x),
        Float::Abs => two!(|x, _y| x.abs()),
    }
}

/// An error of a result, up to so many units of 2⁻²⁴, one of which is for its rounding to f32.
///
/// One input has one error in a launch, as in hardware. What is exact there, such as 2⁰, errs here:
/// no kernel of ours may rely on that.
fn error_of(inputs: u64, seed: u64, units: f64) -> f64 {
    let mut mixed = (inputs ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let part = (mixed >> 40) as f64 / (1u64 << 23) as f64 - 1.0;
    part * (units - 1.0) / (1u64 << 24) as f64
}

/// `div.approx` and `div.full` with an error of up to 2 units in the last place.
fn divided_wrongly(a: u32, b: u32, is_full: bool, ftz: bool, seed: u64) -> u32 {
    let (x, y) = (single(a, ftz), single(b, ftz));
    let nearest = number::divide_approximately(x, y, is_full);
    if !nearest.is_normal() {
        return result(nearest, ftz);
    }
    // A unit in the last place is at least 2⁻²⁴ of the value.
    let error = error_of(u64::from(a) << 32 | u64::from(b), seed, 2.0);
    result((f64::from(x) / f64::from(y) * (1.0 + error)) as f32, ftz)
}

/// An approximate function, perhaps with an error within the ISA's bound.
fn approximately(function: Approximate, ftz: bool, x: u32, errors: Option<u64>) -> u32 {
    let exact = function.of(single(x, ftz));
    let Some(seed) = errors else {
        return result(exact, ftz);
    };
    if !exact.is_finite() || exact == 0.0 {
        return result(exact, ftz);
    }
    let error = error_of(u64::from(x), seed, function.error());
    let is_absolute = matches!(
        function,
        Approximate::Log2 | Approximate::Sin | Approximate::Cos
    );
    let wide = function.exactly(f64::from(single(x, ftz)));
    let wrong = if is_absolute {
        wide + error
    } else {
        wide * (1.0 + error)
    };
    result(wrong as f32, ftz)
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

/// `.aligned` instructions on matrices are undefined unless the whole warp executes them.
fn whole_warp(warp: &Warp, mask: u32) -> Result<(), Fault> {
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
fn extend(warp: &mut Warp, mask: u32, is_signed: bool, bits: u32, d: Register, a: Register) {
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

/// Lanes in the order in which their atomics are carried out.
fn ordered(mask: u32, is_downward: bool) -> impl Iterator<Item = u32> {
    let turned = if is_downward {
        mask.reverse_bits()
    } else {
        mask
    };
    bits_of(turned).map(move |lane| if is_downward { 31 - lane } else { lane })
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
