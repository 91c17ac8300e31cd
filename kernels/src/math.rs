//! Scalar f32 functions whose bits are the same everywhere: exp, ln, sigmoid, both GELUs with their
//! gradients, sine and cosine of turns.
//!
//! Conventions. Only operations that IEEE 754 rounds exactly: + − × ÷, sqrt, fused multiply-add, bit casts, integer
//! arithmetic. No table, no call into libm, no branch: a conditional here is a select between two computed values.
//! So every SIMD width gives the bits of the scalar code, CUDA gives them too when built without fast-math, and LLVM
//! vectorises loops over these functions inside a `#[target_feature]` function. Rust never fuses by itself: each
//! `mul_add` is a decision, and every other multiplication is meant to round.
//!
//! Bounds are stated in units of ε = 2⁻²⁴, half the distance from 1 to the next f32: one correctly rounded operation
//! is off by at most ε relative, or half an ulp. Polynomials are minimax fits (Remez), coefficients rounded to f32.

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

/// The polynomial with these coefficients, highest power first (Horner, one fused step a coefficient).
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
    // Beyond these the result is 0 or infinity already, and the exponent arithmetic below would leave its range.
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

/// eˣ within 1 ulp for x in [−84.5, 0], where the result is normal: the same steps with less around them.
#[inline(always)]
fn exp_of_negative(x: f32) -> f32 {
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND_TO_INTEGER);
    let n = shifted - ROUND_TO_INTEGER;
    let mantissa = exp_mantissa(n.mul_add(-1.428_606_8e-6, n.mul_add(-0.693_145_75, x)));
    // The low bits of `shifted` are n; they go straight into the exponent.
    f32::from_bits(mantissa.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// eʳ for |r| <= ln 2 / 2.
#[inline(always)]
fn exp_mantissa(r: f32) -> f32 {
    polynomial(r, [1.378_059_4e-3, 8.373_124_5e-3, 4.166_953_6e-2, 1.666_647_2e-1, 4.999_998_5e-1, 1.0, 1.0])
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
    let exponent = (exponent_bits as f32).mul_add(1.0 / 8_388_608.0, if subnormal { -23.0 } else { 0.0 });
    let f = m - 1.0;
    let f2 = f * f;
    // ln(1+f) = f − f²/2 + f³ (…): odd and even coefficients apart, for a shorter chain.
    let odd = polynomial(f2, [-0.130_310_06, -0.121_483_51, -0.166_846_13, -0.249_996_2]);
    let even = polynomial(f2, [0.140_869_14, 0.139_814_85, 0.200_120_35]);
    let tail = polynomial(f, [even.mul_add(f, odd), 0.333_331_97, -0.5]);
    let finite = exponent.mul_add(std::f32::consts::LN_2, tail.mul_add(f2, f));
    let negative_or_zero = if x == 0.0 { f32::NEG_INFINITY } else { f32::NAN };
    let special = if x <= 0.0 { negative_or_zero } else { x };
    if (x > 0.0) & (x < f32::INFINITY) { finite } else { special }
}

/// 1 / (1 + e⁻ˣ), within 4ε relative where the result is normal.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// 2 √(2/π): GELU's tanh form is x sigmoid(2u) with 2u = x (TWICE_U_1 + TWICE_U_3 x²).
const TWICE_U_1: f32 = 1.595_769;
/// 2 √(2/π) × 0.044715.
const TWICE_U_3: f32 = 0.071_354_814;

/// GELU in its tanh form, x (1 + tanh u) / 2 with u = √(2/π) (x + 0.044715 x³). Off by at most 4ε max(|x|, 1).
///
/// With s = sigmoid(2u): sum, quotient and product are 3ε s, exp's 2ε reaches s as 2ε s (1 − s), and 2u's own 3ε as
/// 3ε |2u| s (1 − s). Together under 3.5ε for every x.
#[inline(always)]
pub(crate) fn gelu_tanh(x: f32) -> f32 {
    // At −15 the sigmoid is 0 already; a smaller x would make −∞ × 0.
    let x = at_least(x, -15.0);
    x * sigmoid(x * TWICE_U_3.mul_add(x * x, TWICE_U_1))
}

/// The derivative of [`gelu_tanh`], s + x s (1 − s) (2u)′ with s = sigmoid(2u). Off by at most 8ε.
///
/// s is within 2.7ε as in [`gelu_tanh`], the last sum rounds by 1ε, and the product is off by (10 + 3 |2u|) ε
/// relative, under 3.8ε absolute where it peaks, near x = 1.2.
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

/// The normal distribution: (Φ(x), e^(−x²/2)), for x in [−15, ∞]. Φ is off by at most 4ε (absolute); beyond ±13, where
/// both tails are below 2e-37, they are 0.
///
/// With a = |x|, the upper tail is Q(a) = e^(−a²/2) R((a − 2.5)/(a + 2.5)), and R, which falls smoothly from 1/2
/// towards 0, is a polynomial of degree 7 fitted over a in [0, 14.5]. In ε, each at its worst a: the fit 0.2; the
/// quotient's 3 roundings, through dR/ds <= 1/2, 1.5; the polynomial's steps 0.8; exp and the product, 3 × Q, 1.5;
/// a²/2's rounding 0.1; 1 − Q 0.5. These maxima add up to 4.6 but lie apart (exp is exact at 0, where Q peaks);
/// 2.5 is measured.
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
    (if x < 0.0 { upper_tail } else { 1.0 - upper_tail }, e)
}

/// GELU proper, x Φ(x). Off by at most 4ε max(|x|, 1): Φ is within 4ε where |x| < 1 multiplies it down, and beyond
/// that Φ's own error is under 3ε, which leaves one ε for the product.
#[inline(always)]
pub(crate) fn gelu_erf(x: f32) -> f32 {
    // At −15 Φ is 0 already; a smaller x would make −∞ × 0.
    let x = at_least(x, -15.0);
    x * normal_cdf(x).0
}

/// The derivative of [`gelu_erf`], Φ(x) + x φ(x), off by at most 6ε: Φ's 4ε, x φ <= 0.25 at 4ε, one ε for the sum.
#[inline(always)]
pub(crate) fn gelu_erf_grad(x: f32) -> f32 {
    // At ±15 the result is exactly 1 and 0.
    let x = at_most(at_least(x, -15.0), 15.0);
    let (phi_integral, e) = normal_cdf(x);
    // 1 / √(2π)
    (x * 0.398_942_3).mul_add(e, phi_integral)
}

/// (sin 2πu, cos 2πu) for u in [0, 1), each off by at most 2ε = 1.2e-7. The reduction to an eighth of a turn is exact.
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
    // Sine is negative in quarters 2 and 3, cosine in 1 and 2: bit 1 of the quarter becomes the sign bit.
    let sin_sign = (quarter & 2) << 30;
    let cos_sign = (quarter.wrapping_add(1) & 2) << 30;
    (f32::from_bits(sin.to_bits() ^ sin_sign), f32::from_bits(cos.to_bits() ^ cos_sign))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// ε of the bounds in this file.
    const EPSILON: f64 = 1.0 / (1 << 24) as f64;

    /// Every `stride`th f32 of [low, high], by bit pattern: dense near 0, and the ends themselves.
    fn sweep(low: f32, high: f32, stride: usize) -> impl Iterator<Item = f32> {
        let negative = (0x8000_0000..=0xff80_0000_u32).step_by(stride).map(f32::from_bits);
        let positive = (0..=0x7f80_0000_u32).step_by(stride).map(f32::from_bits);
        negative.chain(positive).filter(move |x| (low..=high).contains(x)).chain([low, high])
    }

    /// The largest of `error` over a sweep, and where it is.
    fn worst(xs: impl Iterator<Item = f32>, error: impl Fn(f32) -> f64) -> (f64, f32) {
        xs.map(|x| (error(x), x)).fold((0.0, 0.0), |a, b| if b.0 <= a.0 { a } else { b })
    }

    #[track_caller]
    fn check(name: &str, bound: f64, (error, x): (f64, f32)) {
        println!("{name}: worst error {error:.3} at {x:e}, bound {bound}");
        assert!(error <= bound, "{name}: error {error} at {x:e} is over {bound}");
    }

    /// |got − want| in ulps of `want`.
    fn ulps(got: f32, want: f64) -> f64 {
        let exponent = (((want.to_bits() >> 52) & 0x7ff) as i32 - 1023).max(-126);
        (f64::from(got) - want).abs() / 2f64.powi(exponent - 23)
    }

    fn relative_epsilons(got: f32, want: f64) -> f64 {
        if want == 0.0 { f64::from(got).abs() } else { ((f64::from(got) - want) / want).abs() / EPSILON }
    }

    fn absolute_epsilons(got: f32, want: f64, scale: f64) -> f64 {
        (f64::from(got) - want).abs() / EPSILON / scale
    }

    fn normal_density(x: f64) -> f64 {
        (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt()
    }

    /// Φ in f64: the series φ(x) (x + x³/3 + x⁵/15 + …) near 0, the continued fraction of the tail beyond.
    fn reference_cdf(x: f64) -> f64 {
        let a = x.abs();
        let upper_tail = if a < 3.0 {
            let (mut term, mut sum) = (a, a);
            for k in 1..80 {
                term *= a * a / (2 * k + 1) as f64;
                sum += term;
            }
            0.5 - normal_density(a) * sum
        } else {
            let fraction = (1..200).rev().fold(a, |below, k| a + k as f64 / below);
            normal_density(a) / fraction
        };
        if x < 0.0 { upper_tail } else { 1.0 - upper_tail }
    }

    fn twice_u(x: f64) -> f64 {
        2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)
    }

    fn reference_sigmoid(x: f64) -> f64 {
        1.0 / (1.0 + (-x).exp())
    }

    fn reference_gelu_tanh_grad(x: f64) -> f64 {
        let (s, far) = (reference_sigmoid(twice_u(x)), reference_sigmoid(-twice_u(x)));
        s + x * s * far * 2.0 * (2.0 / std::f64::consts::PI).sqrt() * (1.0 + 3.0 * 0.044715 * x * x)
    }

    #[test]
    fn exp_is_within_one_ulp_and_saturates() {
        // Half an ulp for the last step of the polynomial, and what r and the fit add: under 0.4.
        check("exp", 1.0, worst(sweep(-103.9, 88.72, 1009), |x| ulps(exp(x), f64::from(x).exp())));
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        for x in [88.73, 1e30, f32::INFINITY] {
            assert_eq!(exp(x), f32::INFINITY, "exp({x})");
        }
        for x in [-104.0, -1e30, f32::NEG_INFINITY] {
            assert_eq!(exp(x), 0.0, "exp({x})");
        }
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn ln_is_within_one_ulp_over_every_positive_value() {
        // Half an ulp for the last step, under 0.4 for the steps below it.
        check("ln", 1.0, worst(sweep(1e-45, f32::MAX, 1009), |x| ulps(ln(x), f64::from(x).ln())));
        let near_one = (0x3f00_0000..0x4000_0000_u32).step_by(61).map(f32::from_bits);
        check("ln near 1", 1.0, worst(near_one, |x| ulps(ln(x), f64::from(x).ln())));
        assert_eq!(ln(1.0).to_bits(), 0);
        assert_eq!(ln(f32::INFINITY), f32::INFINITY);
        assert_eq!([ln(0.0), ln(-0.0)], [f32::NEG_INFINITY; 2]);
        assert!(ln(f32::NAN).is_nan() && ln(-1.0).is_nan() && ln(f32::NEG_INFINITY).is_nan());
    }

    #[test]
    fn sigmoid_keeps_its_relative_bound() {
        // exp within 2ε, the sum ε, the quotient ε.
        let sigmoid_error = |x: f32| relative_epsilons(sigmoid(x), reference_sigmoid(f64::from(x)));
        check("sigmoid", 4.0, worst(sweep(-87.0, 100.0, 1009), sigmoid_error));
        assert_eq!([sigmoid(0.0), sigmoid(f32::INFINITY), sigmoid(f32::NEG_INFINITY)], [0.5, 1.0, 0.0]);
        assert!(sigmoid(f32::NAN).is_nan());
    }

    #[test]
    fn both_gelus_and_their_gradients_keep_their_absolute_bounds() {
        let scale = |x: f32| f64::from(x.abs().max(1.0));
        let all = || sweep(-50.0, 50.0, 1009);
        let by = |got: fn(f32) -> f32, want: fn(f64) -> f64, scale: &dyn Fn(f32) -> f64| {
            worst(all(), |x| absolute_epsilons(got(x), want(f64::from(x)), scale(x)))
        };
        check("Φ", 4.0, by(|x| normal_cdf(x.max(-15.0)).0, reference_cdf, &|_| 1.0));
        check("gelu_erf", 4.0, by(gelu_erf, |x| x * reference_cdf(x), &scale));
        check("gelu_erf_grad", 6.0, by(gelu_erf_grad, |x| reference_cdf(x) + x * normal_density(x), &|_| 1.0));
        check("gelu_tanh", 4.0, by(gelu_tanh, |x| x * reference_sigmoid(twice_u(x)), &scale));
        check("gelu_tanh_grad", 8.0, by(gelu_tanh_grad, reference_gelu_tanh_grad, &|_| 1.0));
    }

    #[test]
    fn gelus_are_the_identity_and_zero_far_out_and_keep_nan() {
        for (gelu, grad) in [(gelu_erf as fn(f32) -> f32, gelu_erf_grad as fn(f32) -> f32), (gelu_tanh, gelu_tanh_grad)]
        {
            for x in [15.0, 88.0, 1e10, 1e30, f32::MAX, f32::INFINITY] {
                assert_eq!([gelu(x), gelu(-x), grad(x), grad(-x)], [x, 0.0, 1.0, 0.0], "x = {x}");
            }
            assert_eq!([gelu(0.0), gelu(-0.0)], [0.0, 0.0]);
            // Φ(0) comes out of the polynomial: within its bound of 1/2, not exactly it.
            assert!(absolute_epsilons(grad(0.0), 0.5, 1.0) <= 4.0);
            assert!(gelu(f32::NAN).is_nan() && grad(f32::NAN).is_nan());
        }
    }

    #[test]
    fn sine_and_cosine_of_turns_are_within_two_epsilon_and_exact_at_quarters() {
        let turns =
            || (0..1 << 24).step_by(13).map(|i| i as f32 / (1 << 24) as f32).chain(sweep(0.0, 0.999_999_94, 4001));
        let angle = |u: f32| 2.0 * std::f64::consts::PI * f64::from(u);
        check("sin", 2.0, worst(turns(), |u| absolute_epsilons(sin_cos_turns(u).0, angle(u).sin(), 1.0)));
        check("cos", 2.0, worst(turns(), |u| absolute_epsilons(sin_cos_turns(u).1, angle(u).cos(), 1.0)));
        let quarters = [0.0, 0.25, 0.5, 0.75].map(sin_cos_turns);
        assert_eq!(quarters, [(0.0, 1.0), (1.0, 0.0), (0.0, -1.0), (-1.0, 0.0)]);
    }

    /// Every function over `xs`, one loop each, so that each loop vectorises at the caller's SIMD level.
    #[inline(always)]
    fn every_function(xs: &[f32]) -> Vec<(&'static str, Vec<f32>)> {
        macro_rules! over_all {
            ($($name:literal $function:expr;)*) => {
                vec![$(($name, {
                    let mut out = vec![0.0; xs.len()];
                    for (out, &x) in out.iter_mut().zip(xs) {
                        *out = $function(x);
                    }
                    out
                })),*]
            };
        }
        over_all! {
            "exp" exp; "ln" ln; "sigmoid" sigmoid;
            "gelu_tanh" gelu_tanh; "gelu_tanh_grad" gelu_tanh_grad;
            "gelu_erf" gelu_erf; "gelu_erf_grad" gelu_erf_grad;
            "sin" |x: f32| sin_cos_turns(x.abs().fract()).0; "cos" |x: f32| sin_cos_turns(x.abs().fract()).1;
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn every_simd_level_gives_the_same_bits() {
        #[target_feature(enable = "avx2,fma")]
        fn with_avx2(xs: &[f32]) -> Vec<(&'static str, Vec<f32>)> {
            every_function(xs)
        }
        #[target_feature(enable = "avx512f")]
        fn with_avx512(xs: &[f32]) -> Vec<(&'static str, Vec<f32>)> {
            every_function(xs)
        }
        // NaNs are compared as one: which payload survives an addition is left open by IEEE 754.
        let bits = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
        let same = |level: &str, got: Vec<(&'static str, Vec<f32>)>, xs: &[f32]| {
            for ((name, got), (_, want)) in got.iter().zip(every_function(xs)) {
                for ((&got, want), x) in got.iter().zip(want).zip(xs) {
                    assert_eq!(bits(got), bits(want), "{name}({x:e}) with {level}: {got:e}, without: {want:e}");
                }
            }
        };
        let xs: Vec<f32> = sweep(f32::NEG_INFINITY, f32::INFINITY, 9973).chain([f32::NAN, 0.5, -0.5]).collect();
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the processor has both features, asked on the line above.
            same("avx2", unsafe { with_avx2(&xs) }, &xs);
        }
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has the feature, asked on the line above.
            same("avx512", unsafe { with_avx512(&xs) }, &xs);
        }
    }
}
