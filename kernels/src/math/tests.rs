//! Tests of math.

use super::*;

/// ε of the bounds in this file.
const EPSILON: f64 = 1.0 / (1 << 24) as f64;

/// Every `stride`th f32 of [low, high], by bit pattern: dense near 0, and the ends themselves.
fn sweep(low: f32, high: f32, stride: usize) -> impl Iterator<Item = f32> {
    let negative = (0x8000_0000..=0xff80_0000_u32)
        .step_by(stride)
        .map(f32::from_bits);
    let positive = (0..=0x7f80_0000_u32).step_by(stride).map(f32::from_bits);
    negative
        .chain(positive)
        .filter(move |x| (low..=high).contains(x))
        .chain([low, high])
}

/// The largest of `error` over a sweep, and where it is.
fn worst(xs: impl Iterator<Item = f32>, error: impl Fn(f32) -> f64) -> (f64, f32) {
    xs.map(|x| (error(x), x))
        .fold((0.0, 0.0), |a, b| if b.0 <= a.0 { a } else { b })
}

#[track_caller]
fn check(name: &str, bound: f64, (error, x): (f64, f32)) {
    println!("{name}: worst error {error:.3} at {x:e}, bound {bound}");
    assert!(
        error <= bound,
        "{name}: error {error} at {x:e} is over {bound}"
    );
}

/// |got − want| in ulps of `want`.
fn ulps(got: f32, want: f64) -> f64 {
    let exponent = (((want.to_bits() >> 52) & 0x7ff) as i32 - 1023).max(-126);
    (f64::from(got) - want).abs() / 2f64.powi(exponent - 23)
}

fn relative_epsilons(got: f32, want: f64) -> f64 {
    if want == 0.0 {
        f64::from(got).abs()
    } else {
        ((f64::from(got) - want) / want).abs() / EPSILON
    }
}

fn absolute_epsilons(got: f32, want: f64, scale: f64) -> f64 {
    (f64::from(got) - want).abs() / EPSILON / scale
}

fn normal_density(x: f64) -> f64 {
    (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt()
}

/// Φ in f64: the series φ(x) (x + x³/3 + x⁵/15 + …) near 0, the continued fraction of the tail
/// beyond.
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
    if x < 0.0 {
        upper_tail
    } else {
        1.0 - upper_tail
    }
}

fn twice_u(x: f64) -> f64 {
    2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)
}

fn reference_sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn reference_gelu_tanh_grad(x: f64) -> f64 {
    let (s, far) = (
        reference_sigmoid(twice_u(x)),
        reference_sigmoid(-twice_u(x)),
    );
    s + x * s * far * 2.0 * (2.0 / std::f64::consts::PI).sqrt() * (1.0 + 3.0 * 0.044715 * x * x)
}

#[test]
fn exp_is_within_one_ulp_and_saturates() {
    // Half an ulp for the last step of the polynomial, and what r and the fit add: under 0.4.
    check(
        "exp",
        1.0,
        worst(sweep(-103.9, 88.72, 1009), |x| {
            ulps(exp(x), f64::from(x).exp())
        }),
    );
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
fn silu_and_its_derivative_are_within_their_bounds() {
    let reference = |x: f32| f64::from(x) * reference_sigmoid(f64::from(x));
    check(
        "silu",
        6.0,
        worst(
            sweep(-87.0, 3.4e38, 4099).filter(|x| x.abs() > 1e-37),
            |x| relative_epsilons(silu(x), reference(x)),
        ),
    );
    let slope = |x: f64| {
        let (s, far) = (reference_sigmoid(x), reference_sigmoid(-x));
        s + if x.is_finite() { x * s * far } else { 0.0 }
    };
    check(
        "silu's derivative",
        7.0,
        worst(sweep(f32::NEG_INFINITY, f32::INFINITY, 4099), |x| {
            absolute_epsilons(silu_slope(x), slope(f64::from(x)), 1.0)
        }),
    );
    assert_eq!(silu_and_slope(f32::NEG_INFINITY), (0.0, 0.0));
    assert_eq!(silu_and_slope(f32::INFINITY), (f32::INFINITY, 1.0));
    assert!(silu(f32::NAN).is_nan() && silu_slope(f32::NAN).is_nan());
}

#[test]
fn exp_or_zero_is_within_one_ulp_and_flushes() {
    // As exp.
    check(
        "exp_or_zero",
        1.0,
        worst(sweep(-87.0, 88.0, 1009), |x| {
            ulps(exp_or_zero(x), f64::from(x).exp())
        }),
    );
    assert_eq!(exp_or_zero(0.0), 1.0);
    for x in [-87.1, -1e30, f32::MIN, f32::NEG_INFINITY] {
        assert_eq!(exp_or_zero(x), 0.0, "exp_or_zero({x})");
    }
    // Also NaN whose payload is in the low bits.
    for bits in [0x7fc0_0000, 0x7f80_0001, 0xffff_ffff] {
        assert!(exp_or_zero(f32::from_bits(bits)).is_nan());
    }
}

#[test]
fn ln_is_within_one_ulp_over_every_positive_value() {
    // Half an ulp for the last step, under 0.4 for the steps below it.
    check(
        "ln",
        1.0,
        worst(sweep(1e-45, f32::MAX, 1009), |x| {
            ulps(ln(x), f64::from(x).ln())
        }),
    );
    let near_one = (0x3f00_0000..0x4000_0000_u32)
        .step_by(61)
        .map(f32::from_bits);
    check(
        "ln near 1",
        1.0,
        worst(near_one, |x| ulps(ln(x), f64::from(x).ln())),
    );
    assert_eq!(ln(1.0).to_bits(), 0);
    assert_eq!(ln(f32::INFINITY), f32::INFINITY);
    assert_eq!([ln(0.0), ln(-0.0)], [f32::NEG_INFINITY; 2]);
    assert!(ln(f32::NAN).is_nan() && ln(-1.0).is_nan() && ln(f32::NEG_INFINITY).is_nan());
}

#[test]
fn sigmoid_keeps_its_relative_bound() {
    // exp within 2ε, the sum ε, the quotient ε.
    let sigmoid_error = |x: f32| relative_epsilons(sigmoid(x), reference_sigmoid(f64::from(x)));
    check(
        "sigmoid",
        4.0,
        worst(sweep(-87.0, 100.0, 1009), sigmoid_error),
    );
    assert_eq!(
        [
            sigmoid(0.0),
            sigmoid(f32::INFINITY),
            sigmoid(f32::NEG_INFINITY)
        ],
        [0.5, 1.0, 0.0]
    );
    assert!(sigmoid(f32::NAN).is_nan());
}

#[test]
fn both_gelus_and_their_gradients_keep_their_absolute_bounds() {
    let scale = |x: f32| f64::from(x.abs().max(1.0));
    let all = || sweep(-50.0, 50.0, 1009);
    let by = |got: fn(f32) -> f32, want: fn(f64) -> f64, scale: &dyn Fn(f32) -> f64| {
        worst(all(), |x| {
            absolute_epsilons(got(x), want(f64::from(x)), scale(x))
        })
    };
    check(
        "Φ",
        4.0,
        by(|x| normal_cdf(x.max(-15.0)).0, reference_cdf, &|_| 1.0),
    );
    check(
        "gelu_erf",
        4.0,
        by(gelu_erf, |x| x * reference_cdf(x), &scale),
    );
    check(
        "gelu_erf_grad",
        6.0,
        by(
            gelu_erf_grad,
            |x| reference_cdf(x) + x * normal_density(x),
            &|_| 1.0,
        ),
    );
    check(
        "gelu_tanh",
        4.0,
        by(gelu_tanh, |x| x * reference_sigmoid(twice_u(x)), &scale),
    );
    check(
        "gelu_tanh_grad",
        8.0,
        by(gelu_tanh_grad, reference_gelu_tanh_grad, &|_| 1.0),
    );
}

#[test]
fn gelus_are_the_identity_and_zero_far_out_and_keep_nan() {
    for (gelu, grad) in [
        (gelu_erf as fn(f32) -> f32, gelu_erf_grad as fn(f32) -> f32),
        (gelu_tanh, gelu_tanh_grad),
    ] {
        for x in [15.0, 88.0, 1e10, 1e30, f32::MAX, f32::INFINITY] {
            assert_eq!(
                [gelu(x), gelu(-x), grad(x), grad(-x)],
                [x, 0.0, 1.0, 0.0],
                "x = {x}"
            );
        }
        assert_eq!([gelu(0.0), gelu(-0.0)], [0.0, 0.0]);
        // Φ(0) comes out of the polynomial: within its bound of 1/2, not exactly it.
        assert!(absolute_epsilons(grad(0.0), 0.5, 1.0) <= 4.0);
        assert!(gelu(f32::NAN).is_nan() && grad(f32::NAN).is_nan());
    }
}

#[test]
fn sine_and_cosine_of_turns_are_within_two_epsilon_and_exact_at_quarters() {
    let turns = || {
        (0..1 << 24)
            .step_by(13)
            .map(|i| i as f32 / (1 << 24) as f32)
            .chain(sweep(0.0, 0.999_999_94, 4001))
    };
    let angle = |u: f32| 2.0 * std::f64::consts::PI * f64::from(u);
    check(
        "sin",
        2.0,
        worst(turns(), |u| {
            absolute_epsilons(sin_cos_turns(u).0, angle(u).sin(), 1.0)
        }),
    );
    check(
        "cos",
        2.0,
        worst(turns(), |u| {
            absolute_epsilons(sin_cos_turns(u).1, angle(u).cos(), 1.0)
        }),
    );
    let quarters = [0.0, 0.25, 0.5, 0.75].map(sin_cos_turns);
    assert_eq!(quarters, [(0.0, 1.0), (1.0, 0.0), (0.0, -1.0), (-1.0, 0.0)]);
}

/// Every function over `xs`, one loop each, so that each loop vectorises at the caller's SIMD
/// level.
#[cfg(target_arch = "x86_64")]
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
        "exp" exp; "exp_or_zero" exp_or_zero; "ln" ln; "sigmoid" sigmoid;
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
    let bits = |x: f32| {
        if x.is_nan() {
            f32::NAN.to_bits()
        } else {
            x.to_bits()
        }
    };
    let same = |level: &str, got: Vec<(&'static str, Vec<f32>)>, xs: &[f32]| {
        for ((name, got), (_, want)) in got.iter().zip(every_function(xs)) {
            for ((&got, want), x) in got.iter().zip(want).zip(xs) {
                assert_eq!(
                    bits(got),
                    bits(want),
                    "{name}({x:e}) with {level}: {got:e}, without: {want:e}"
                );
            }
        }
    };
    let xs: Vec<f32> = sweep(f32::NEG_INFINITY, f32::INFINITY, 9973)
        .chain([f32::NAN, 0.5, -0.5])
        .collect();
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: the processor has both features, asked on the line above.
        same("avx2", unsafe { with_avx2(&xs) }, &xs);
    }
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has the feature, asked on the line above.
        same("avx512", unsafe { with_avx512(&xs) }, &xs);
    }
}
