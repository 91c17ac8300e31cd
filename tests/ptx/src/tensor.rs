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

/// A matrix in shared memory with swizzled lines of 128 bytes. PTX ISA, "Matrix Descriptor Format"
/// and "Canonical Layouts".
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptor {
    start: u64,
    /// Bytes from 64 elements of a line to the next 64.
    leading: u64,
    /// Bytes from 8 lines to the next 8.
    stride: u64,
}

impl Descriptor {
    /// The error names what is not simulated.
    pub(crate) fn of(bits: u64) -> Result<Descriptor, String> {
        let refuse = |what: String| Err(format!("descriptor {bits:#x}: {what} is not simulated"));
        match bits >> 62 {
            0 => return refuse("a matrix without swizzle".to_owned()),
            2 => return refuse("the 64-byte swizzle".to_owned()),
            3 => return refuse("the 32-byte swizzle".to_owned()),
            _ => {}
        }
        match bits >> 49 & 7 {
            0 => {}
            base => return refuse(format!("base offset {base}")),
        }
        // Between the fields.
        if bits & !(3 << 62 | 0x3fff << 32 | 0x3fff << 16 | 0x3fff) != 0 {
            return refuse("a bit that the ISA leaves undefined".to_owned());
        }
        let field = |first: u32| (bits >> first & 0x3fff) << 4;
        Ok(Descriptor {
            start: field(0),
            leading: field(16),
            stride: field(32),
        })
    }

    /// The address of 16 bytes. A line is a row of K-major A or a column of K-major B, with 2 such
    /// pieces; of matrices that are MN-major it is one k with a piece for each 8 rows or columns.
    pub(crate) fn piece(self, line: u64, piece: u64) -> u64 {
        let line = line % 8 * 128 + line / 8 * self.stride;
        let address = self.start + line + piece % 8 * 16 + piece / 8 * self.leading;
        address ^ (address >> 7 & 7) << 4
    }
}

/// The place of a warp's element `index` of accumulator D: row of the warp's 16, and column.
fn of_sum(lane: usize, index: usize) -> (usize, usize) {
    (
        lane / 4 + index / 2 % 2 * 8,
        index / 4 * 8 + lane % 4 * 2 + index % 2,
    )
}

/// The 16 rows of A that the registers of a warp hold, `[k][row]`.
pub(crate) fn left_of(registers: &[[u32; LANES]; 4]) -> [[f32; 16]; 16] {
    let mut left = [[0.0; 16]; 16];
    for (part, words) in registers.iter().enumerate() {
        for (lane, word) in words.iter().enumerate() {
            let (row, k) = (lane / 4 + part % 2 * 8, lane % 4 * 2 + part / 2 * 8);
            left[k][row] = f32::from_bits(word << 16);
            left[k + 1][row] = f32::from_bits(word & 0xffff_0000);
        }
    }
    left
}

/// A warp's part of `wgmma.mma_async`: its 16 rows of D += A·B, with A as `[k][row]`, B as
/// `[k][column]` and D in registers. As in `multiply`, each element adds its products one after the
/// other.
pub(crate) fn multiply_in_group(
    left: &[[f32; 16]; 16],
    right: &[f32],
    is_negated: bool,
    sums: &mut [[u32; LANES]],
) {
    let columns = sums.len() * 2;
    let mut rows = vec![0f32; 16 * columns];
    for (index, words) in sums.iter().enumerate() {
        for (lane, word) in words.iter().enumerate() {
            let (row, column) = of_sum(lane, index);
            rows[row * columns + column] = f32::from_bits(*word);
        }
    }
    for (row, sums) in rows.chunks_exact_mut(columns).enumerate() {
        for (left, right) in left.iter().zip(right.chunks_exact(columns)) {
            let factor = if is_negated { -left[row] } else { left[row] };
            for (sum, other) in sums.iter_mut().zip(right) {
                *sum += factor * other;
            }
        }
    }
    for (index, words) in sums.iter_mut().enumerate() {
        for (lane, word) in words.iter_mut().enumerate() {
            let (row, column) = of_sum(lane, index);
            *word = bits(rows[row * columns + column]);
        }
    }
}
