//! Matrices that lie in the registers of a warp: `ldmatrix` and `mma`.

use crate::number::{bits, f16_to_f32};
use crate::state::LANES;

/// A matrix of 8 rows of 8 halves, as its lanes hold it: lane i has two neighbours of row i / 4;
/// of the transposed matrix, of column i / 4.
pub(crate) fn fragment(rows: &[[u8; 16]], is_transposed: bool) -> [u32; LANES] {
    let half = |row: usize, column: usize| {
        u32::from(u16::from_le_bytes([
            rows[row][column * 2],
            rows[row][column * 2 + 1],
        ]))
    };
    std::array::from_fn(|lane| {
        let (group, pair) = (lane / 4, lane % 4 * 2);
        if is_transposed {
            half(pair, group) | half(pair + 1, group) << 16
        } else {
            half(group, pair) | half(group, pair + 1) << 16
        }
    })
}

/// `mma.m16n8k16`: D = A·B + C. Products are exact in f32; the ISA leaves the order of the sums
/// open and asks for single precision. Here each element adds its 16 products to C one after the
/// other.
pub(crate) fn multiply(
    is_f16: bool,
    a: &[[u32; LANES]; 4],
    b: &[[u32; LANES]; 2],
    c: &[[u32; LANES]; 4],
) -> [[u32; LANES]; 4] {
    let value = |half: u32| {
        if is_f16 {
            f16_to_f32(half as u16)
        } else {
            f32::from_bits(half << 16)
        }
    };
    let (mut left, mut right) = ([[0f32; 16]; 16], [[0f32; 8]; 16]);
    let mut sums = [[0f32; 8]; 16];
    for lane in 0..LANES {
        let (group, pair) = (lane / 4, lane % 4 * 2);
        for (part, words) in a.iter().enumerate() {
            let (row, column) = (group + part % 2 * 8, pair + part / 2 * 8);
            left[row][column] = value(words[lane] & 0xffff);
            left[row][column + 1] = value(words[lane] >> 16);
        }
        for (part, words) in b.iter().enumerate() {
            right[pair + part * 8][group] = value(words[lane] & 0xffff);
            right[pair + part * 8 + 1][group] = value(words[lane] >> 16);
        }
        for (part, words) in c.iter().enumerate() {
            sums[group + part / 2 * 8][pair + part % 2] = f32::from_bits(words[lane]);
        }
    }
    for (row, sums) in left.iter().zip(&mut sums) {
        for (factor, others) in row.iter().zip(&right) {
            for (sum, other) in sums.iter_mut().zip(others) {
                *sum += factor * other;
            }
        }
    }
    std::array::from_fn(|part| {
        std::array::from_fn(|lane| {
            let (group, pair) = (lane / 4, lane % 4 * 2);
            bits(sums[group + part / 2 * 8][pair + part % 2])
        })
    })
}
