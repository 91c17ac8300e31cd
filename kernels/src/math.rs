//! Scalar f32 functions whose bits are the same everywhere: exp, ln, sigmoid, SiLU and both GELUs
//! with their gradients, sine and cosine of turns.
//!
//! Conventions. Only operations that IEEE 754 rounds exactly: + − × ÷, sqrt, fused multiply-add,
//! bit casts, integer arithmetic. No table, no call into libm, no branch: a conditional here is a
//! select between two computed values. So every SIMD width gives the bits of the scalar code, CUDA
//! gives them too when built without fast-math, and LLVM vectorises loops over these functions
//! inside a `#[target_feature]` function. Rust never fuses by itself: each `mul_add` is a decision,
//! and every other multiplication is meant to round.
//!
//! Bounds are stated in units of ε = 2⁻²⁴, half the distance from 1 to the next f32: one correctly
//! rounded operation is off by at most ε relative, or half an ulp. Polynomials are minimax fits
//! (Remez), coefficients rounded to f32.

/// 1.5 × 2²³: adding it leaves the nearest integer in the low mantissa bits, for |x| < 2²².
const ROUND_TO_INTEGER: f32 = 12_582_912.0;

/// `x`, but not below `low`. Unlike `f32::max` it keeps NaN, and is one instruction.
#[inline(always)]
fn at_least(x: f32, low: f32) -> f32 {
    if x < low { low } else { x }
}

/// `x`, but not above `high`. Unlike `f32::min` it keeps NaN.
#[inline(always)]
fn at_most(x: f32, high: f32) -> f32 {
    if x > high { high } else { x }
}

/// The polynomial with these coefficients, highest power first (Horner, one fused step a
/// coefficient).
#[inline(always)]
fn polynomial<const N: usize>(x: f32, coefficients: [f32; N]) -> f32 {
    let mut sum = coefficients[0];
    let mut next = 1;
    while next < N {
        sum = sum.mul_add(x, coefficients[next]);
        next += 1;
    }
    sum
}

/// eˣ within 1 ulp, subnormal results included. 1 at 0; infinity above 88.723; 0 below −103.973.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Beyond these the result is 0 or infinity already, and the exponent arithmetic below would
    // leave its range.
    let x = at_most(at_least(x, -104.0), 89.0);
    // x = n ln 2 + r, |r| <= ln 2 / 2; ln 2 in two parts, so that r is off by less than ε |r|.
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND_TO_INTEGER);
    let n = shifted - ROUND_TO_INTEGER;
    let r = n.mul_add(-1.428_606_8e-6, n.mul_add(-0.693_145_75, x));
    let mantissa = exp_mantissa(r);
    // 2ⁿ in two factors: neither over- nor underflows alone, and only the last product rounds.
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND_TO_INTEGER.to_bits() as i32);
    mantissa * power_of_two(n >> 1) * power_of_two(n.wrapping_sub(n >> 1))
}

/// eˣ within 1 ulp for x in [−84.5, 0], where the result is normal: the same steps with less around
/// them.
#[inline(always)]
fn exp_of_negative(x: f32) -> f32 {
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND_TO_INTEGER);
    let n = shifted - ROUND_TO_INTEGER;
    let mantissa = exp_mantissa(n.mul_add(-1.428_606_8e-6, n.mul_add(-0.693_145_75, x)));
    // The low bits of `shifted` are n; they go straight into the exponent.
    f32::from_bits(mantissa.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// eˣ within 1 ulp for x in [−87, 88], and 0 below: the weights of a softmax. NaN stays NaN.
#[inline(always)]
pub(crate) fn exp_or_zero(x: f32) -> f32 {
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND_TO_INTEGER);
    let n = shifted - ROUND_TO_INTEGER;
    let mantissa = exp_mantissa(n.mul_add(-1.428_606_8e-6, n.mul_add(-0.693_145_75, x)));
    let exponent = shifted.to_bits().wrapping_add(127) << 23;
    let e = mantissa * f32::from_bits(exponent);
    if x < -87.0 { 0.0 } else { e }
}

/// eʳ for |r| <= ln 2 / 2.
#[inline(always)]
fn exp_mantissa(r: f32) -> f32 {
    polynomial(
        r,
        [
            1.378_059_4e-3,
            8.373_124_5e-3,
            4.166_953_6e-2,
            1.666_647_2e-1,
            4.999_998_5e-1,
            1.0,
            1.0,
        ],
    )
}

/// 2ⁿ for n in −126..=127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// The natural logarithm within 1 ulp over all of f32: ln 1 = 0, ln 0 = −∞, ln ∞ = ∞, NaN below 0.
#[inline(always)]
pub(crate) fn ln(x: f32) -> f32 {
    let subnormal = x < f32::MIN_POSITIVE;
    let normal = if subnormal { x * 8_388_608.0 } else { x };
    // x = m 2^e with m in [2/3, 4/3), so that near 1 the exponent is 0 and nothing cancels.
    let bits = normal.to_bits() as i32;
    let exponent_bits = bits.wrapping_sub(0x3f2a_aaab) & (0xff80_0000_u32 as i32);
    let m = f32::from_bits(bits.wrapping_sub(exponent_bits) as u32);
    let exponent =
        (exponent_bits as f32).mul_add(1.0 / 8_388_608.0, if subnormal { -23.0 } else { 0.0 });
    let f = m - 1.0;
    let f2 = f * f;
    // ln(1+f) = f − f²/2 + f³ (…): odd and even coefficients apart, for a shorter chain.
    let odd = polynomial(
        f2,
        [-0.130_310_06, -0.121_483_51, -0.166_846_13, -0.249_996_2],
    );
    let even = polynomial(f2, [0.140_869_14, 0.139_814_85, 0.200_120_35]);
    let tail = polynomial(f, [even.mul_add(f, odd), 0.333_331_97, -0.5]);
    let finite = exponent.mul_add(std::f32::consts::LN_2, tail.mul_add(f2, f));
    let negative_or_zero = if x == 0.0 {
        f32::NEG_INFINITY
    } else {
        f32::NAN
    };
    let special = if x <= 0.0 { negative_or_zero } else { x };
    if (x > 0.0) & (x < f32::INFINITY) {
        finite
    } else {
        special
    }
}

/// 1 / (1 + e⁻ˣ), within 4ε relative where the result is normal.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// tanh x within 2 ulp: an odd polynomial near 0 (Cephes), else 1 − 2 / (e^2|x| + 1).
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let (size, square) = (x.abs(), x * x);
    let odd = [
        -0.005_704_988_7,
        0.020_639_088,
        -0.053_739_715,
        0.133_314_42,
        -0.333_332_8,
    ];
    let near = (polynomial(square, odd) * square).mul_add(x, x);
    let tail = 1.0 - 2.0 / (exp(2.0 * size) + 1.0);
    let far = if x < 0.0 { -tail } else { tail };
    if size < 0.625 { near } else { far }
}

/// SiLU, x sigmoid(x), and its derivative s + x s (1 − s). The value is within 6ε relative where it
/// is normal; the derivative is off by at most 7ε.
///
/// With e = e^(−|x|), which is within 2ε: 1/(1 + e) is within 3ε, e/(1 + e) within 5ε, their
/// product within 9ε, and x times that is below 0.23.
#[inline(always)]
pub(crate) fn silu_and_slope(x: f32) -> (f32, f32) {
    // At ±104 e is 0 already; beyond, ∞ × 0 would give NaN.
    let x = at_least(x, -104.0);
    let e = exp(-x.abs());
    let near = 1.0 / (1.0 + e);
    let far = e * near;
    let s = if x < 0.0 { far } else { near };
    (x * s, at_most(x, 104.0).mul_add(near * far, s))
}

/// As `silu_and_slope`.
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    silu_and_slope(x).0
}

/// As `silu_and_slope`.
#[inline(always)]
pub(crate) fn silu_slope(x: f32) -> f32 {
    silu_and_slope(x).1
}

/// 2 √(2/π): GELU's tanh form is x sigmoid(2u) with 2u = x (TWICE_U_1 + TWICE_U_3 x²).
const TWICE_U_1: f32 = 1.595_769;
/// 2 √(2/π) × 0.044715.
const TWICE_U_3: f32 = 0.071_354_814;

/// GELU in its tanh form, x (1 + tanh u) / 2 with u = √(2/π) (x + 0.044715 x³). Off by at most 4ε
/// max(|x|, 1).
///
/// With s = sigmoid(2u): sum, quotient and product are 3ε s, exp's 2ε reaches s as 2ε s (1 − s),
/// and 2u's own 3ε as 3ε |2u| s (1 − s). Together under 3.5ε for every x.
#[inline(always)]
pub(crate) fn gelu_tanh(x: f32) -> f32 {
    // At −15 the sigmoid is 0 already; a smaller x would make −∞ × 0.
    let x = at_least(x, -15.0);
    x * sigmoid(x * TWICE_U_3.mul_add(x * x, TWICE_U_1))
}

/// The derivative of [`gelu_tanh`], s + x s (1 − s) (2u)′ with s = sigmoid(2u). Off by at most 8ε.
///
/// s is within 2.7ε as in [`gelu_tanh`], the last sum rounds by 1ε, and the product is off by (10 +
/// 3 |2u|) ε relative, under 3.8ε absolute where it peaks, near x = 1.2.
#[inline(always)]
pub(crate) fn gelu_tanh_grad(x: f32) -> f32 {
    // At ±15 the result is exactly 1 and 0.
    let x = at_most(at_least(x, -15.0), 15.0);
    let a = x.abs();
    let x2 = x * x;
    // By |x|, so that 1 − s comes from e^(−|2u|) <= 1 without cancelling, and nothing overflows.
    let e = exp(-(a * TWICE_U_3.mul_add(x2, TWICE_U_1)));
    let near = 1.0 / (1.0 + e);
    let far = e * near;
    let s = if x < 0.0 { far } else { near };
    let slope = (3.0 * TWICE_U_3).mul_add(x2, TWICE_U_1);
    (x * slope).mul_add(near * far, s)
}

/// The normal distribution: (Φ(x), e^(−x²/2)), for x in [−15, ∞]. Φ is off by at most 4ε
/// (absolute); beyond ±13, where both tails are below 2e-37, they are 0.
///
/// With a = |x|, the upper tail is Q(a) = e^(−a²/2) R((a − 2.5)/(a + 2.5)), and R, which falls
/// smoothly from 1/2 towards 0, is a polynomial of degree 7 fitted over a in [0, 14.5]. In ε, each
/// at its worst a: the fit 0.2; the quotient's 3 roundings, through dR/ds <= 1/2, 1.5; the
/// polynomial's steps 0.8; exp and the product, 3 × Q, 1.5; a²/2's rounding 0.1; 1 − Q 0.5. These
/// maxima add up to 4.6 but lie apart (exp is exact at 0, where Q peaks); 2.5 is measured.
#[inline(always)]
fn normal_cdf(x: f32) -> (f32, f32) {
    // The bound keeps e normal, and ∞/∞ out of the quotient.
    let a = at_most(x.abs(), 13.0);
    let e = exp_of_negative(-0.5 * (a * a));
    let e = if a == 13.0 { 0.0 } else { e };
    let s = (a - 2.5) / (a + 2.5);
    let upper_tail = e * polynomial(
        s,
        [
            0.000_130_644_27,
            0.001_282_203,
            0.003_128_505,
            -0.005_121_346,
            -0.024_563_706,
            0.113_133_6,
            -0.228_069_65,
            0.141_331_34,
        ],
    );
    (
        if x < 0.0 {
            upper_tail
        } else {
            1.0 - upper_tail
        },
        e,
    )
}

/// GELU proper, x Φ(x). Off by at most 4ε max(|x|, 1): Φ is within 4ε where |x| < 1 multiplies it
/// down, and beyond that Φ's own error is under 3ε, which leaves one ε for the product.
#[inline(always)]
pub(crate) fn gelu_erf(x: f32) -> f32 {
    // At −15 Φ is 0 already; a smaller x would make −∞ × 0.
    let x = at_least(x, -15.0);
    x * normal_cdf(x).0
}

/// The derivative of [`gelu_erf`], Φ(x) + x φ(x), off by at most 6ε: Φ's 4ε, x φ <= 0.25 at 4ε, one
/// ε for the sum.
#[inline(always)]
pub(crate) fn gelu_erf_grad(x: f32) -> f32 {
    // At ±15 the result is exactly 1 and 0.
    let x = at_most(at_least(x, -15.0), 15.0);
    let (phi_integral, e) = normal_cdf(x);
    // 1 / √(2π)
    (x * 0.398_942_3).mul_add(e, phi_integral)
}

/// (sin 2πu, cos 2πu) for u in [0, 1), each off by at most 2ε = 1.2e-7. The reduction to an eighth
/// of a turn is exact.
#[inline(always)]
pub(crate) fn sin_cos_turns(u: f32) -> (f32, f32) {
    // u = quarter / 4 + f, |f| <= 1/8
    let shifted = u.mul_add(4.0, ROUND_TO_INTEGER);
    let quarter = shifted.to_bits();
    let f = (shifted - ROUND_TO_INTEGER).mul_add(-0.25, u);
    let f2 = f * f;
    let sin = f * polynomial(f2, [-75.240_07, 81.588_13, -41.341_63, 6.283_185_5]);
    let cos = polynomial(f2, [59.245_964, -85.443_74, 64.939_32, -19.739_208, 1.0]);
    let swap = quarter & 1 != 0;
    let (sin, cos) = (if swap { cos } else { sin }, if swap { sin } else { cos });
    // Sine is negative in quarters 2 and 3, cosine in 1 and 2: bit 1 of the quarter becomes the
    // sign bit.
    let sin_sign = (quarter & 2) << 30;
    let cos_sign = (quarter.wrapping_add(1) & 2) << 30;
    (
        f32::from_bits(sin.to_bits() ^ sin_sign),
        f32::from_bits(cos.to_bits() ^ cos_sign),
    )
}

/// Grey levels as numbers, `out = (levels − mean) · scale`, element by element. Here and not beside
/// the data that have them, because tests run this crate optimised.
pub fn normalize_levels(out: &mut [f32], levels: &[u8], mean: f32, scale: f32) {
    for (out, &level) in out.iter_mut().zip(levels) {
        *out = (f32::from(level) - mean) * scale;
    }
}

#[cfg(test)]
mod tests;
