//! The model of the tensor cores' instruction.

use half::bf16;

use super::{Ground, library, shot};

/// Operands are taken apart, and the result put together, element by element as in the PTX ISA's
/// section "Matrix Fragments for mma.m16n8k16 with floating point type".
const SOURCE: &str = r#"
extern "C" __global__ void multiply(const unsigned short* a, const unsigned short* b, float* c) {
  int group = threadIdx.x >> 2, in_group = threadIdx.x % 4;
  unsigned int left[4] = {}, right[2] = {};
  for (int i = 0; i < 8; i++) {
    int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
    int column = in_group * 2 + (i & 1) + (i < 4 ? 0 : 8);
    left[i / 2] |= (unsigned int)a[row * 16 + column] << (i % 2 * 16);
  }
  for (int i = 0; i < 4; i++) {
    int row = in_group * 2 + (i & 1) + (i < 2 ? 0 : 8);
    right[i / 2] |= (unsigned int)b[row * 8 + group] << (i % 2 * 16);
  }
  float* at[4];
  for (int i = 0; i < 4; i++) at[i] = c + (i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1);
  float d0, d1, d2, d3;
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d0), "=f"(d1), "=f"(d2), "=f"(d3)
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]),
        "f"(*at[0]), "f"(*at[1]), "f"(*at[2]), "f"(*at[3]));
  *at[0] = d0, *at[1] = d1, *at[2] = d2, *at[3] = d3;
}
extern "C" __global__ void convert(const float* x, unsigned int* word, float* power) {
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(*word) : "f"(x[0]), "f"(x[1]));
  for (int i = 0; i < 5; i++) asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power[i]) : "f"(x[i]));
}"#;

#[test]
fn a_warp_multiplies_16_by_16_by_8_and_adds_along_k_in_order() {
    // The sums round: thirds and large neighbours.
    let element = |i: usize| bf16::from_f32((i * 37 % 101) as f32 / 3.0 - 16.0);
    let a: Vec<bf16> = (0..256).map(element).collect();
    let b: Vec<bf16> = (0..128).map(|i| element(i * 5 + 1)).collect();
    let c: Vec<f32> = (0..128).map(|i| i as f32 * 0.1).collect();
    let bits = |x: &[bf16]| x.iter().map(|x| x.to_bits()).collect::<Vec<u16>>();
    let mut ground = Ground::default();
    let (to_a, to_b) = (ground.upload(&bits(&a)), ground.upload(&bits(&b)));
    let to_c = ground.upload(&c);
    shot(&library(SOURCE), "multiply", 1, 32, &[to_a, to_b, to_c]).expect(&ground);
    let got = ground.download::<f32>(to_c, 128);
    for (index, got) in got.into_iter().enumerate() {
        let (row, column) = (index / 8, index % 8);
        let expected = (0..16).fold(c[index], |sum, k| {
            sum + a[row * 16 + k].to_f32() * b[k * 8 + column].to_f32()
        });
        assert_eq!(got.to_bits(), expected.to_bits(), "{row}, {column}");
    }
}

#[test]
fn two_numbers_become_one_word_and_tiny_powers_of_two_become_zero() {
    let mut ground = Ground::default();
    let x = ground.upload(&[1.0f32, -2.0, -126.0, -126.5, f32::NEG_INFINITY]);
    let (word, power) = (ground.allocate(4), ground.allocate(20));
    shot(&library(SOURCE), "convert", 1, 1, &[x, word, power]).expect(&ground);
    assert_eq!(ground.download::<u32>(word, 1), [0x3f80_c000]);
    let expected = [2.0, 0.25, f32::MIN_POSITIVE, 0.0, 0.0];
    assert_eq!(ground.download::<f32>(power, 5), expected);
}
