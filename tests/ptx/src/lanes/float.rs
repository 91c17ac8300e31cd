//! Arithmetic on floating-point numbers, exact and approximate.

use crate::number::{self, Approximate, bits, flushed};
use crate::op::{Float, Slot};
use crate::state::{LANES, Warp};

pub(super) fn single(x: u32, ftz: bool) -> f32 {
    f32::from_bits(if ftz { flushed(x) } else { x })
}

pub(super) fn result(x: f32, ftz: bool) -> u32 {
    if ftz { flushed(bits(x)) } else { bits(x) }
}

#[inline(always)]
pub(super) fn float32(
    warp: &mut Warp,
    mask: u32,
    op: Float,
    ftz: bool,
    d: &Slot,
    a: Slot,
    b: Slot,
) {
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
pub(super) fn float64(warp: &mut Warp, mask: u32, op: Float, d: &Slot, a: Slot, b: Slot) {
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
pub(super) fn divided_wrongly(a: u32, b: u32, is_full: bool, ftz: bool, seed: u64) -> u32 {
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
pub(super) fn approximately(function: Approximate, ftz: bool, x: u32, errors: Option<u64>) -> u32 {
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
