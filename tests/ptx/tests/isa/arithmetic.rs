//! One thread, one instruction: values by hand, from the ISA's definitions.

use crate::machine::{kernel, launch, threads};

/// The result of an instruction: 64 bits of %rd9, else 32 of %r9, 16 of %h9, or whether %p9 is
/// set. Its operands are %rd1 to %rd4; %r1 to %r4 and %h1 to %h4 are their lower parts; %p1 is
/// true, %p2 false.
fn result(instruction: &str, inputs: &[u64]) -> u64 {
    let mut body = String::from("\tsetp.eq.s32 %p1, 0, 0;\n\tsetp.ne.s32 %p2, 0, 0;\n");
    for number in 1..=inputs.len() {
        body += &format!(
            "\tld.global.u64 %rd{number}, [%rd0+{}];\n\tcvt.u32.u64 %r{number}, %rd{number};\n\tcvt.u16.u64 %h{number}, %rd{number};\n",
            number * 8 - 8
        );
    }
    body += &format!("\t{instruction}\n");
    body += if instruction.contains("%rd9") {
        "\tst.global.u64 [%rd0+64], %rd9;\n"
    } else if instruction.contains("%r9") {
        "\tst.global.u32 [%rd0+64], %r9;\n"
    } else if instruction.contains("%h9") {
        "\tst.global.u16 [%rd0+64], %h9;\n"
    } else {
        "\tselp.u32 %r9, 1, 0, %p9;\n\tst.global.u32 [%rd0+64], %r9;\n"
    };
    let mut memory: Vec<u8> = inputs
        .iter()
        .flat_map(|input| input.to_le_bytes())
        .collect();
    memory.resize(72, 0);
    launch(&kernel("", &body), &mut memory, &threads(1))
        .unwrap_or_else(|finding| panic!("{instruction}: {finding}"));
    let mut found = [0; 8];
    found.copy_from_slice(&memory[64..72]);
    u64::from_le_bytes(found)
}

#[track_caller]
fn expect(cases: &[(&str, &[u64], u64)]) {
    for (instruction, inputs, expected) in cases {
        let found = result(instruction, inputs);
        assert_eq!(
            found, *expected,
            "{instruction} of {inputs:x?}: {found:#x}, expected {expected:#x}"
        );
    }
}

/// f32 in the lower half.
fn s(value: f32) -> u64 {
    u64::from(value.to_bits())
}

fn d(value: f64) -> u64 {
    value.to_bits()
}

const NAN: u64 = 0x7fff_ffff;

#[test]
fn integers_wrap_and_keep_their_signs() {
    expect(&[
        ("add.s32 %r9, %r1, %r2;", &[0x7fff_ffff, 1], 0x8000_0000),
        ("sub.s64 %rd9, %rd1, %rd2;", &[0, 1], u64::MAX),
        ("add.s16 %h9, %h1, %h2;", &[0xffff, 2], 1),
        ("mul.lo.s32 %r9, %r1, %r2;", &[0x1_0001, 0x1_0001], 0x2_0001),
        (
            "mul.hi.u32 %r9, %r1, %r2;",
            &[0xffff_ffff, 0xffff_ffff],
            0xffff_fffe,
        ),
        ("mul.hi.s32 %r9, %r1, %r2;", &[0xffff_ffff, 0xffff_ffff], 0),
        ("mul.hi.u64 %rd9, %rd1, %rd2;", &[u64::MAX, 2], 1),
        (
            "mul.wide.u32 %rd9, %r1, %r2;",
            &[0xffff_ffff, 2],
            0x1_ffff_fffe,
        ),
        (
            "mul.wide.s32 %rd9, %r1, %r2;",
            &[0xffff_ffff, 2],
            u64::MAX - 1,
        ),
        ("mul.wide.u16 %r9, %h1, %h2;", &[0xffff, 2], 0x1_fffe),
        ("mul.wide.s16 %r9, %h1, %h2;", &[0xffff, 2], 0xffff_fffe),
        ("mad.lo.s32 %r9, %r1, %r2, %r3;", &[3, 5, 0xffff_ffff], 14),
        (
            "mad.wide.u32 %rd9, %r1, %r2, %rd3;",
            &[0xffff_ffff, 2, 3],
            0x2_0000_0001,
        ),
        ("div.s32 %r9, %r1, %r2;", &[0xffff_fff9, 2], 0xffff_fffd),
        ("rem.s32 %r9, %r1, %r2;", &[0xffff_fff9, 2], 0xffff_ffff),
        ("div.u64 %rd9, %rd1, %rd2;", &[u64::MAX, 10], u64::MAX / 10),
        ("rem.u32 %r9, %r1, %r2;", &[0xffff_ffff, 10], 5),
        ("min.s32 %r9, %r1, %r2;", &[0xffff_ffff, 1], 0xffff_ffff),
        ("min.u32 %r9, %r1, %r2;", &[0xffff_ffff, 1], 1),
        ("max.s64 %rd9, %rd1, %rd2;", &[u64::MAX, 1], 1),
        ("neg.s32 %r9, %r1;", &[5], 0xffff_fffb),
        ("abs.s32 %r9, %r1;", &[0xffff_fffb], 5),
        ("not.b32 %r9, %r1;", &[0xf0], 0xffff_ff0f),
        ("xor.b64 %rd9, %rd1, %rd2;", &[0xff00, 0x0ff0], 0xf0f0),
    ]);
}

#[test]
fn shifts_beyond_the_width_are_the_width() {
    expect(&[
        ("shl.b32 %r9, %r1, %r2;", &[1, 31], 0x8000_0000),
        ("shl.b32 %r9, %r1, %r2;", &[1, 32], 0),
        ("shl.b32 %r9, %r1, %r2;", &[1, 0xffff_ffff], 0),
        ("shr.u32 %r9, %r1, %r2;", &[0x8000_0000, 31], 1),
        ("shr.s32 %r9, %r1, %r2;", &[0x8000_0000, 40], 0xffff_ffff),
        ("shr.u64 %rd9, %rd1, %r2;", &[1 << 63, 63], 1),
        ("shl.b64 %rd9, %rd1, %r2;", &[1, 64], 0),
        ("shr.u16 %h9, %h1, %r2;", &[0x8000, 15], 1),
        (
            "shf.l.wrap.b32 %r9, %r1, %r2, %r3;",
            &[0x8000_0000, 1, 33],
            3,
        ),
        ("shf.r.clamp.b32 %r9, %r1, %r2, %r3;", &[5, 7, 40], 7),
    ]);
}

#[test]
fn bits_are_counted_moved_and_chosen() {
    expect(&[
        ("popc.b32 %r9, %r1;", &[0xf0f0], 8),
        ("popc.b64 %r9, %rd1;", &[u64::MAX], 64),
        ("clz.b32 %r9, %r1;", &[0], 32),
        ("clz.b64 %r9, %rd1;", &[1], 63),
        ("brev.b32 %r9, %r1;", &[1], 0x8000_0000),
        (
            "bfi.b32 %r9, %r1, %r2, 8, 4;",
            &[0xf5, 0xffff_ffff],
            0xffff_f5ff,
        ),
        ("bfi.b32 %r9, %r1, %r2, 30, 8;", &[0xff, 0], 0xc000_0000),
        ("bfi.b32 %r9, %r1, %r2, 32, 8;", &[0xff, 7], 7),
        (
            "bfi.b64 %rd9, %rd1, %rd2, 32, 32;",
            &[0xabcd, 0x1234],
            0xabcd_0000_1234,
        ),
        ("bfe.u32 %r9, %r1, 4, 8;", &[0xabcd], 0xbc),
        ("bfe.s32 %r9, %r1, 4, 8;", &[0xabcd], 0xffff_ffbc),
        ("bfe.s32 %r9, %r1, 28, 8;", &[0x8000_0000], 0xffff_fff8),
        (
            "prmt.b32 %r9, %r1, %r2, 0x7531;",
            &[0x4433_2211, 0x8877_6655],
            0x8866_4422,
        ),
        (
            "prmt.b32 %r9, %r1, %r2, 0x0fb8;",
            &[0x8033_2211, 0x8877_6655],
            0x11ff_ff00,
        ),
        (
            "lop3.b32 %r9, %r1, %r2, %r3, 0x96;",
            &[0b1100, 0b1010, 0b1111],
            0b1001,
        ),
        (
            "lop3.b32 %r9, %r1, %r2, %r3, 0x80;",
            &[0b1100, 0b1010, 0b1111],
            0b1000,
        ),
        ("selp.b32 %r9, %r1, %r2, %p1;", &[1, 2], 1),
        ("selp.b32 %r9, %r1, %r2, %p2;", &[1, 2], 2),
        (
            "mov.b64 %rd9, {%r1, %r2};",
            &[0x1111, 0x2222],
            0x2222_0000_1111,
        ),
        ("mov.b32 %r9, {%h1, %h2};", &[0x1111, 0x2222], 0x2222_1111),
        (
            "mov.b64 {%r8, %r9}, %rd1;",
            &[0xaaaa_bbbb_cccc_dddd],
            0xaaaa_bbbb,
        ),
        ("mov.b32 {%h8, %h9}, %r1;", &[0xaaaa_bbbb], 0xaaaa),
    ]);
}

#[test]
fn floats_round_to_nearest_and_have_one_nan() {
    let tiny = f32::from_bits(1);
    expect(&[
        (
            "add.rn.f32 %r9, %r1, %r2;",
            &[s(1.0), s(f32::EPSILON / 2.0)],
            s(1.0),
        ),
        (
            "add.f32 %r9, %r1, %r2;",
            &[s(f32::INFINITY), s(f32::NEG_INFINITY)],
            NAN,
        ),
        ("mul.rn.f32 %r9, %r1, %r2;", &[0xffc0_1234, s(1.0)], NAN),
        ("sub.ftz.f32 %r9, %r1, %r2;", &[s(tiny), s(0.0)], 0),
        (
            "mul.ftz.f32 %r9, %r1, %r2;",
            &[s(-1e-30), s(1e-10)],
            0x8000_0000,
        ),
        (
            "mul.f32 %r9, %r1, %r2;",
            &[s(1e-30), s(1e-10)],
            s(1e-30 * 1e-10),
        ),
        // 1 + 2⁻²³ squared minus 1: one rounding keeps 2⁻⁴⁶.
        (
            "fma.rn.f32 %r9, %r1, %r1, %r2;",
            &[s(1.0 + f32::EPSILON), s(-1.0)],
            s(2f32.powi(-22) + 2f32.powi(-46)),
        ),
        (
            "fma.rn.f64 %rd9, %rd1, %rd1, %rd2;",
            &[d(1.0 + f64::EPSILON), d(-1.0)],
            d(2f64.powi(-51) + 2f64.powi(-104)),
        ),
        ("div.rn.f32 %r9, %r1, %r2;", &[s(1.0), s(3.0)], s(1.0 / 3.0)),
        (
            "div.approx.f32 %r9, %r1, %r2;",
            &[s(1.0), s(2f32.powi(127))],
            0,
        ),
        (
            "div.approx.f32 %r9, %r1, %r2;",
            &[s(f32::INFINITY), s(2f32.powi(127))],
            NAN,
        ),
        (
            "div.full.f32 %r9, %r1, %r2;",
            &[s(1.0), s(2f32.powi(127))],
            s(2f32.powi(-127)),
        ),
        ("rcp.rn.f32 %r9, %r1;", &[s(-0.0)], s(f32::NEG_INFINITY)),
        ("sqrt.rn.f32 %r9, %r1;", &[s(2.0)], s(2f32.sqrt())),
        ("sqrt.rn.f32 %r9, %r1;", &[s(-1.0)], NAN),
        ("min.f32 %r9, %r1, %r2;", &[NAN, s(1.0)], s(1.0)),
        ("max.f32 %r9, %r1, %r2;", &[s(1.0), NAN], s(1.0)),
        ("max.f32 %r9, %r1, %r2;", &[0xffc0_0000, 0x7fc0_0000], NAN),
        ("min.f32 %r9, %r1, %r2;", &[s(0.0), s(-0.0)], s(-0.0)),
        ("max.f32 %r9, %r1, %r2;", &[s(-0.0), s(0.0)], s(0.0)),
        ("abs.f32 %r9, %r1;", &[s(-2.0)], s(2.0)),
        ("neg.f64 %rd9, %rd1;", &[d(2.0)], d(-2.0)),
        ("add.f64 %rd9, %rd1, %rd2;", &[d(0.1), d(0.2)], d(0.1 + 0.2)),
    ]);
}

#[test]
fn approximate_functions_are_exact_where_their_value_is() {
    expect(&[
        ("ex2.approx.f32 %r9, %r1;", &[s(10.0)], s(1024.0)),
        ("ex2.approx.ftz.f32 %r9, %r1;", &[s(f32::NEG_INFINITY)], 0),
        ("ex2.approx.ftz.f32 %r9, %r1;", &[s(-130.0)], 0),
        ("ex2.approx.f32 %r9, %r1;", &[s(-130.0)], s(2f32.powi(-130))),
        ("ex2.approx.ftz.f32 %r9, %r1;", &[1], s(1.0)),
        ("ex2.approx.f32 %r9, %r1;", &[NAN], NAN),
        ("lg2.approx.f32 %r9, %r1;", &[s(8.0)], s(3.0)),
        ("rsqrt.approx.f32 %r9, %r1;", &[s(4.0)], s(0.5)),
        ("rcp.approx.f32 %r9, %r1;", &[s(4.0)], s(0.25)),
        ("tanh.approx.f32 %r9, %r1;", &[s(f32::INFINITY)], s(1.0)),
    ]);
}

#[test]
fn comparisons_know_nan() {
    let all: [(&str, [u64; 4]); 14] = [
        // Of (1, 2), (1, 1), (2, 1), (1, NaN).
        ("eq", [0, 1, 0, 0]),
        ("ne", [1, 0, 1, 0]),
        ("lt", [1, 0, 0, 0]),
        ("le", [1, 1, 0, 0]),
        ("gt", [0, 0, 1, 0]),
        ("ge", [0, 1, 1, 0]),
        ("equ", [0, 1, 0, 1]),
        ("neu", [1, 0, 1, 1]),
        ("ltu", [1, 0, 0, 1]),
        ("leu", [1, 1, 0, 1]),
        ("gtu", [0, 0, 1, 1]),
        ("geu", [0, 1, 1, 1]),
        ("num", [1, 1, 1, 0]),
        ("nan", [0, 0, 0, 1]),
    ];
    let pairs = [(1.0, 2.0), (1.0, 1.0), (2.0, 1.0), (1.0, f32::NAN)];
    for (name, expected) in all {
        for ((a, b), expected) in pairs.into_iter().zip(expected) {
            let single = result(&format!("setp.{name}.f32 %p9, %r1, %r2;"), &[s(a), s(b)]);
            let double = result(
                &format!("setp.{name}.f64 %p9, %rd1, %rd2;"),
                &[d(a.into()), d(b.into())],
            );
            assert_eq!(
                (single, double),
                (expected, expected),
                "{name} of {a} and {b}"
            );
        }
    }
    expect(&[
        ("setp.lt.s32 %p9, %r1, %r2;", &[0xffff_ffff, 1], 1),
        ("setp.lt.u32 %p9, %r1, %r2;", &[0xffff_ffff, 1], 0),
        ("setp.hs.u64 %p9, %rd1, %rd2;", &[u64::MAX, 1], 1),
        ("setp.gt.s16 %p9, %h1, %h2;", &[0xffff, 1], 0),
        ("setp.eq.and.s32 %p9, %r1, %r2, %p2;", &[1, 1], 0),
        ("setp.eq.or.s32 %p9, %r1, %r2, %p1;", &[1, 2], 1),
        ("setp.eq.and.s32 %p9, %r1, %r2, !%p2;", &[1, 1], 1),
        // The second result is the inverse.
        ("setp.eq.s32 %p8|%p9, %r1, %r2;", &[1, 1], 0),
        ("setp.eq.ftz.f32 %p9, %r1, %r2;", &[1, 0], 1),
        ("setp.eq.f32 %p9, %r1, %r2;", &[1, 0], 0),
        ("and.pred %p9, %p1, %p2;", &[], 0),
        ("xor.pred %p9, %p1, %p2;", &[], 1),
        ("not.pred %p9, %p2;", &[], 1),
        ("mov.pred %p9, -1;", &[], 1),
    ]);
}

#[test]
fn conversions_round_saturate_and_extend() {
    expect(&[
        ("cvt.u64.u32 %rd9, %r1;", &[0xffff_ffff], 0xffff_ffff),
        ("cvt.s64.s32 %rd9, %r1;", &[0xffff_ffff], u64::MAX),
        ("cvt.s64.s8 %rd9, %rd1;", &[0x1234_5680], u64::MAX - 0x7f),
        ("cvt.u32.u16 %r9, %h1;", &[0xffff], 0xffff),
        ("cvt.u16.u32 %h9, %r1;", &[0x1_2345], 0x2345),
        ("cvt.sat.u32.s32 %r9, %r1;", &[0xffff_ffff], 0),
        ("cvt.rn.f32.s32 %r9, %r1;", &[0xffff_ffff], s(-1.0)),
        ("cvt.rn.f32.u32 %r9, %r1;", &[0x100_0001], s(16_777_216.0)),
        ("cvt.rp.f32.u32 %r9, %r1;", &[0x100_0001], s(16_777_218.0)),
        ("cvt.rz.f32.u32 %r9, %r1;", &[0x100_0003], s(16_777_218.0)),
        (
            "cvt.rn.f32.u64 %r9, %rd1;",
            &[u64::MAX],
            s(18_446_744_073_709_551_616.0),
        ),
        (
            "cvt.rn.f64.u64 %rd9, %rd1;",
            &[(1 << 53) + 1],
            d(9_007_199_254_740_992.0),
        ),
        ("cvt.rzi.s32.f32 %r9, %r1;", &[s(-1.9)], 0xffff_ffff),
        ("cvt.rni.s32.f32 %r9, %r1;", &[s(2.5)], 2),
        ("cvt.rmi.s32.f32 %r9, %r1;", &[s(-1.1)], 0xffff_fffe),
        ("cvt.rpi.s32.f32 %r9, %r1;", &[s(1.1)], 2),
        ("cvt.rzi.s32.f32 %r9, %r1;", &[s(1e20)], 0x7fff_ffff),
        ("cvt.rzi.u32.f32 %r9, %r1;", &[s(-1.0)], 0),
        ("cvt.rzi.u32.f64 %r9, %rd1;", &[d(1e20)], 0xffff_ffff),
        // NaN: zero, unless f64 or 64 bits take part.
        ("cvt.rzi.s32.f32 %r9, %r1;", &[NAN], 0),
        ("cvt.rzi.s64.f32 %rd9, %r1;", &[NAN], 1 << 63),
        ("cvt.rzi.s32.f64 %r9, %rd1;", &[d(f64::NAN)], 0x8000_0000),
        ("cvt.rzi.f32.f32 %r9, %r1;", &[s(-1.9)], s(-1.0)),
        ("cvt.sat.f32.f32 %r9, %r1;", &[s(1.5)], s(1.0)),
        ("cvt.sat.f32.f32 %r9, %r1;", &[NAN], 0),
        ("cvt.f64.f32 %rd9, %r1;", &[s(0.1)], d(f64::from(0.1f32))),
        (
            "cvt.rn.f32.f64 %r9, %rd1;",
            &[d(1.0 + 2f64.powi(-24))],
            s(1.0),
        ),
        (
            "cvt.rp.f32.f64 %r9, %rd1;",
            &[d(1.0 + 2f64.powi(-30))],
            s(1.0 + f32::EPSILON),
        ),
        (
            "cvt.rz.f32.f64 %r9, %rd1;",
            &[d(-1.0 - 2f64.powi(-24) * 1.5)],
            s(-1.0),
        ),
    ]);
}

#[test]
fn halves_are_rounded_as_their_types_ask() {
    expect(&[
        ("cvt.rn.bf16.f32 %h9, %r1;", &[0x3f80_8000], 0x3f80),
        ("cvt.rn.bf16.f32 %h9, %r1;", &[0x3f81_8000], 0x3f82),
        ("cvt.rn.bf16.f32 %h9, %r1;", &[0x3f80_8001], 0x3f81),
        ("cvt.rz.bf16.f32 %h9, %r1;", &[0x3f80_ffff], 0x3f80),
        ("cvt.rn.bf16.f32 %h9, %r1;", &[0x7f7f_ffff], 0x7f80),
        ("cvt.rn.bf16.f32 %h9, %r1;", &[0x7f80_0001], 0x7fff),
        // The first operand is the upper half.
        (
            "cvt.rn.bf16x2.f32 %r9, %r1, %r2;",
            &[s(1.0), s(2.0)],
            0x3f80_4000,
        ),
        (
            "cvt.rn.f16.f32 %h9, %r1;",
            &[s(1.0 + 2f32.powi(-11))],
            0x3c00,
        ),
        ("cvt.rn.f16.f32 %h9, %r1;", &[s(65519.0)], 0x7bff),
        ("cvt.rn.f16.f32 %h9, %r1;", &[s(65520.0)], 0x7c00),
        ("cvt.rn.f16.f32 %h9, %r1;", &[s(2f32.powi(-25))], 0),
        (
            "cvt.rn.f16.f32 %h9, %r1;",
            &[s(-1.5 * 2f32.powi(-25))],
            0x8001,
        ),
        (
            "cvt.rn.f16.f32 %h9, %r1;",
            &[s(2f32.powi(-14) - 2f32.powi(-26))],
            0x0400,
        ),
        ("cvt.f32.f16 %r9, %h1;", &[0x0001], s(2f32.powi(-24))),
        ("cvt.f32.f16 %r9, %h1;", &[0xc000], s(-2.0)),
        ("cvt.f32.f16 %r9, %h1;", &[0x7c00], s(f32::INFINITY)),
        ("cvt.f32.bf16 %r9, %h1;", &[0x3f80], s(1.0)),
    ]);
}

#[test]
fn memory_is_read_and_written_by_width_and_sign() {
    let first = [0x8899_aabb_ccdd_eeffu64];
    expect(&[
        ("ld.global.u8 %h9, [%rd0+1];", &first, 0xee),
        ("ld.global.s8 %h9, [%rd0+1];", &first, 0xffee),
        ("ld.global.s8 %r9, [%rd0+1];", &first, 0xffff_ffee),
        ("ld.global.u16 %r9, [%rd0+2];", &first, 0xccdd),
        ("ld.global.s32 %rd9, [%rd0];", &first, 0xffff_ffff_ccdd_eeff),
        ("ld.global.v2.u32 {%r8, %r9}, [%rd0];", &first, 0x8899_aabb),
        (
            "ld.global.nc.v4.u16 {%h5, %h6, %h7, %h9}, [%rd0];",
            &first,
            0x8899,
        ),
        ("ld.volatile.global.u64 %rd9, [%rd0];", &first, first[0]),
        // A generic address of global memory is its own.
        ("ld.u32 %r9, [%rd0+4];", &first, 0x8899_aabb),
        // A wider register is stored in part.
        (
            "st.global.u8 [%rd0], %r1;\n\tld.global.u32 %r9, [%rd0];",
            &[0x11_2233],
            0x11_2233,
        ),
        ("atom.global.add.u32 %r9, [%rd0], 5;", &[37], 37),
        (
            "red.global.add.u32 [%rd0], 5;\n\tld.global.u32 %r9, [%rd0];",
            &[37],
            42,
        ),
        (
            "atom.global.cas.b64 %rd9, [%rd0], 37, 1;\n\tld.global.u64 %rd9, [%rd0];",
            &[37],
            1,
        ),
        (
            "atom.global.cas.b64 %rd9, [%rd0], 38, 1;\n\tld.global.u64 %rd9, [%rd0];",
            &[37],
            37,
        ),
        ("atom.global.exch.b32 %r9, [%rd0], 7;", &[37], 37),
        (
            "atom.global.min.s32 %r9, [%rd0], -1;\n\tld.global.u32 %r9, [%rd0];",
            &[37],
            0xffff_ffff,
        ),
        (
            "atom.global.max.u64 %rd9, [%rd0], 99;\n\tld.global.u64 %rd9, [%rd0];",
            &[37],
            99,
        ),
        (
            "atom.global.add.f32 %r9, [%rd0], 0f3F800000;\n\tld.global.u32 %r9, [%rd0];",
            &[s(2.5)],
            s(3.5),
        ),
    ]);
}
