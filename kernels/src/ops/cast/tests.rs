//! Tests of cast.

use super::*;
use crate::Device;
use crate::ops::testing::{SIZES, cpu, cpu_of, random_f32};

fn cast_of<From: Element, To: Element>(x: &[From]) -> Vec<To> {
    cast(&cpu_of(x, &[x.len()]), To::DTYPE)
        .unwrap()
        .to_vec::<To>()
        .unwrap()
}

/// The nearest of all the finite values of a 16-bit float, given as (value, bits) in order; ties to
/// even. What would follow the largest means infinity.
fn nearest_of(all: &[(f64, u16)], x: f64) -> u16 {
    let above = all
        .partition_point(|&(value, _)| value < x)
        .clamp(1, all.len() - 1);
    let ((low, low_bits), (high, high_bits)) = (all[above - 1], all[above]);
    // Exact: both are within a factor of two of x, or the difference has few bits.
    let (to_low, to_high) = (x - low, high - x);
    if to_low < to_high || (to_low == to_high && low_bits & 1 == 0) {
        low_bits
    } else {
        high_bits
    }
}

/// Every non-negative value up to and with infinity, which gets the value that the next exponent
/// would.
fn every_value(infinity: u16, wide: impl Fn(u16) -> f64) -> Vec<(f64, u16)> {
    let largest = wide(infinity - 1);
    let step = largest - wide(infinity - 2);
    (0..infinity)
        .map(|bits| (wide(bits), bits))
        .chain([(largest + step, infinity)])
        .collect()
}

#[test]
fn f32_to_16_bits_is_what_half_gives_for_every_size_and_a_sweep_of_all_bit_patterns() {
    // 2,000,003 is prime: every residue of the low bits comes up. Ties and their neighbours
    // besides.
    let sweep = (0..=u32::MAX).step_by(2_003).map(f32::from_bits);
    let ties = (0..=0xffff_u32).flat_map(|high| {
        [0x7fff, 0x8000, 0x8001, 0xfff, 0x1000, 0x1001, 0x3000, 0]
            .map(|low| f32::from_bits(high << 16 | low))
    });
    let x: Vec<f32> = sweep.chain(ties).collect();
    for (index, (got, got_f16)) in cast_of::<_, bf16>(&x)
        .into_iter()
        .zip(cast_of::<_, f16>(&x))
        .enumerate()
    {
        let (bf16, f16) = (bf16::from_f32(x[index]), f16::from_f32(x[index]));
        if x[index].is_nan() {
            assert!(
                got.is_nan()
                    && got_f16.is_nan()
                    && got.to_bits() & 0x40 != 0
                    && got_f16.to_bits() & 0x200 != 0
            );
        } else {
            assert_eq!(
                (got.to_bits(), got_f16.to_bits()),
                (bf16.to_bits(), f16.to_bits()),
                "{:e}",
                x[index]
            );
        }
    }
    for size in SIZES {
        let x = random_f32(size, 71);
        assert_eq!(
            cast_of::<_, bf16>(&x),
            x.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>()
        );
        assert_eq!(
            cast_of::<_, f16>(&x),
            x.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>()
        );
        assert_eq!(
            cast_of::<_, f64>(&x),
            x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>()
        );
    }
}

#[test]
fn all_16_bit_floats_widen_exactly() {
    let bits: Vec<u16> = (0..=u16::MAX).collect();
    let brain: Vec<bf16> = bits.iter().map(|&bits| bf16::from_bits(bits)).collect();
    let half: Vec<f16> = bits.iter().map(|&bits| f16::from_bits(bits)).collect();
    for (x, wide) in brain.iter().zip(cast_of::<_, f32>(&brain)) {
        assert!(
            x.to_f32().to_bits() == wide.to_bits() || (x.is_nan() && wide.is_nan()),
            "{x:e} {wide:e}"
        );
    }
    for ((x, wide), wider) in half
        .iter()
        .zip(cast_of::<_, f32>(&half))
        .zip(cast_of::<_, f64>(&half))
    {
        assert!(
            x.to_f32().to_bits() == wide.to_bits() || (x.is_nan() && wide.is_nan()),
            "{x:e} {wide:e}"
        );
        assert!(wider == x.to_f64() || (x.is_nan() && wider.is_nan()));
    }
}

#[test]
fn wide_numbers_round_to_16_bits_only_once() {
    let halves = every_value(0x7c00, |bits| f16::from_bits(bits).to_f64());
    let brains = every_value(0x7f80, |bits| bf16::from_bits(bits).to_f64());
    // Midpoints, and so little beside them that f32 (and the half crate's own f64 conversion)
    // cannot see it.
    let x: Vec<f64> = halves
        .windows(2)
        .chain(brains.windows(2))
        .map(|pair| (pair[0].0 + pair[1].0) / 2.0)
        .flat_map(|middle| {
            [
                middle,
                middle.next_down(),
                middle.next_up(),
                -middle.next_up(),
            ]
        })
        .chain([
            0.0,
            -0.0,
            1e-300,
            -1e-300,
            1e300,
            f64::MAX,
            f64::MIN_POSITIVE,
        ])
        .collect();
    for (x, (brain, half)) in x.iter().zip(
        cast_of::<_, bf16>(&x)
            .into_iter()
            .zip(cast_of::<_, f16>(&x)),
    ) {
        let sign = u16::from(x.is_sign_negative()) << 15;
        let (brain, half) = (brain.to_bits(), half.to_bits());
        assert_eq!(brain, sign | nearest_of(&brains, x.abs()), "{x:e} to bf16");
        assert_eq!(half, sign | nearest_of(&halves, x.abs()), "{x:e} to f16");
    }
    // i64: around the middle between 2ᵏ and the next bf16, and between that (odd) and the one
    // after.
    for k in 9..63u32 {
        let (base, half_step) = (1i64 << k, 1i64 << (k - 8));
        let x = [
            half_step - 1,
            half_step,
            half_step + 1,
            3 * half_step - 1,
            3 * half_step,
            3 * half_step + 1,
        ];
        let steps = [0, 0, 2, 2, 4, 4];
        let want: Vec<bf16> = steps
            .map(|steps| bf16::from_f64((base + steps * half_step) as f64))
            .into();
        assert_eq!(cast_of::<_, bf16>(&x.map(|x| base + x)), want, "2^{k}");
        let want: Vec<bf16> = want.iter().map(|want| -*want).collect();
        assert_eq!(cast_of::<_, bf16>(&x.map(|x| -base - x)), want, "-2^{k}");
    }
    let edges: Vec<f16> = [0.0, 65504.0, f64::INFINITY, f64::NEG_INFINITY]
        .map(f16::from_f64)
        .into();
    assert_eq!(cast_of::<i64, f16>(&[0, 65519, 65520, i64::MIN]), edges);
}

/// Where the result of casting `x`, a number that the source holds, must lie.
fn expected(x: f64, to: DType) -> f64 {
    let x = if to.is_float() { x } else { x.trunc() };
    match to {
        DType::F32 => f64::from(x as f32),
        DType::BF16 => bf16::from_f64(x).to_f64(),
        DType::F16 => f16::from_f64(x).to_f64(),
        DType::F64 => x,
        _ if x.is_nan() => 0.0,
        DType::U8 => x.clamp(0.0, 255.0),
        DType::I32 => x.clamp(f64::from(i32::MIN), f64::from(i32::MAX)),
        DType::I64 => x.clamp(i64::MIN as f64, i64::MAX as f64),
    }
}

#[test]
fn all_49_pairs_of_dtypes_round_drop_and_saturate() {
    let numbers = [
        0.0, 1.0, -1.0, 0.5, -1.75, 100.0, 255.0, 256.0, 300.5, -300.5, 65504.0, 1e5, -3e9, 5e9,
        1e19,
    ];
    let special = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e-7, -0.0];
    for from in DType::ALL {
        with_element!(from, From => {
            let x: Vec<From> = numbers.iter().chain(&special).map(|&x| From::from_f64(x)).collect();
            for to in DType::ALL {
                let got = cast(&cpu_of(&x, &[4, 5]), to).unwrap();
                assert_eq!((got.dtype(), got.shape().dims()), (to, &[4, 5][..]));
                let got: Vec<f64> = with_element!(to, To => {
                    got.to_vec::<To>().unwrap().iter().map(|x| x.to_f64()).collect()
                });
                for (x, got) in x.iter().map(|x| x.to_f64()).zip(got) {
                    let expected = expected(x, to);
                    assert!(got == expected || (got.is_nan() && expected.is_nan()), "{x:e} {from} to {to}: {got:e}");
                }
            }
        });
    }
}

#[test]
fn large_integers_do_not_pass_through_floats() {
    let odd = (1i64 << 53) + 1;
    assert_eq!(cast_of::<i64, i64>(&[odd, i64::MIN]), [odd, i64::MIN]);
    assert_eq!(
        cast_of::<i64, i32>(&[odd, -odd, -7]),
        [i32::MAX, i32::MIN, -7]
    );
    // By way of f64 this would round down to the tie and then to even.
    assert_eq!(
        cast_of::<i64, f32>(&[(1 << 60) + (1 << 36) + 1]),
        [(1i64 << 60) as f32 + (1i64 << 37) as f32]
    );
}

#[test]
fn a_transposed_view_stays_one_and_cast_into_refuses_it() {
    let x = cpu(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3]).t().unwrap();
    let y = cast(&x, DType::I32).unwrap();
    assert!(y.is_transposed());
    assert_eq!(y.to_vec::<i32>().unwrap(), [1, 4, 2, 5, 3, 6]);
    let out = Tensor::empty(&[3, 2], DType::I32, Device::Cpu).unwrap();
    let error = cast_into(&out, &x).unwrap_err().to_string();
    assert!(
        error.contains("cast: x f32[3, 2] on cpu: expected row-major elements"),
        "{error}"
    );
    let error = cast_into(&out, &cpu(&[0.0; 6], &[2, 3]))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("cast: x f32[2, 3] on cpu: expected shape [3, 2], as out has"),
        "{error}"
    );
    let error = cast_into(&out, &out).unwrap_err().to_string();
    assert!(
        error.contains("cast: out i32[3, 2] on cpu and x i32[3, 2] on cpu share memory"),
        "{error}"
    );
}
