//! Tests of matmul.

use std::ops::Range;

use super::*;
use crate::ops::testing::random_f32;
#[cfg(target_arch = "x86_64")]
use crate::simd::{self, Level};

type Piece = unsafe fn(
    &TiledMatmul<'_, f32>,
    Range<usize>,
    Range<usize>,
    &AsIs,
    &mut (Panels<f32>, Panels<f32>),
);

/// The f32 kernels that this processor can run, by name.
fn f32_kernels() -> Vec<(&'static str, Piece)> {
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(unused_mut, reason = "one kernel there")
    )]
    let mut kernels: Vec<(&str, Piece)> = vec![("plain", piece::<f32, Plain>)];
    #[cfg(target_arch = "x86_64")]
    {
        if simd::level() >= Level::Avx2 {
            kernels.push(("AVX2", piece::<f32, Avx2F32>));
        }
        if simd::level() >= Level::Avx512 {
            kernels.push(("AVX-512", piece::<f32, Avx512F32>));
        }
    }
    kernels
}

/// The matmuls of training steps, and awkward ones around tiles, blocks and pieces.
const SHAPES: [(usize, usize, usize); 17] = [
    (128, 1024, 784),
    (128, 10, 1024),
    (10, 1024, 128),
    (128, 1024, 10),
    (300, 1000, 128),
    (1, 1000, 700),
    (1000, 1, 700),
    (2, 600, 513),
    (600, 2, 513),
    (65, 65, 1025),
    (64, 64, 1000),
    (161, 3, 3000),
    (3, 161, 3000),
    (200, 200, 2),
    (97, 193, 511),
    (5, 7, 3),
    (4, 3, 0),
];
const LAYOUTS: [(bool, bool); 4] = [(false, false), (false, true), (true, false), (true, true)];
const SCALES: (f32, f32) = (0.5, 2.0);

/// Operands and output of one matmul.
struct Case {
    shape: (usize, usize, usize),
    layout: (bool, bool),
    a: Vec<f32>,
    b: Vec<f32>,
    out: Vec<f32>,
}

impl Case {
    fn new(shape: (usize, usize, usize), layout: (bool, bool)) -> Case {
        let (m, n, k) = shape;
        Case {
            shape,
            layout,
            a: random_f32(m * k, 1),
            b: random_f32(k * n, 2),
            out: random_f32(m * n, 3),
        }
    }

    /// The bits of the output after `body`.
    fn run(&self, body: impl FnOnce(&TiledMatmul<'_, f32>)) -> Vec<u32> {
        let (m, n, k) = self.shape;
        let mut out = self.out.clone();
        body(&TiledMatmul {
            out: out.as_mut_ptr(),
            stride: n,
            a: Matrix::new(&self.a, m, k, self.layout.0),
            b: Matrix::new(&self.b, k, n, self.layout.1),
            matmul_scale: SCALES.0,
            existing_scale: SCALES.1,
        });
        out.iter().map(|value| value.to_bits()).collect()
    }

    /// Some elements as (index, bits), each added along k in order, block by block.
    fn plainly(&self) -> Vec<(usize, u32)> {
        let (m, n, k) = self.shape;
        let a = |row: usize, along: usize| {
            if self.layout.0 {
                self.a[along * m + row]
            } else {
                self.a[row * k + along]
            }
        };
        let b = |along: usize, column: usize| {
            if self.layout.1 {
                self.b[column * k + along]
            } else {
                self.b[along * n + column]
            }
        };
        let blocks = k.div_ceil(ALONG_MAX).max(1);
        let element = |index: usize| {
            let (row, column) = (index / n, index % n);
            let value = (0..blocks).fold(self.out[index], |out, block| {
                let along = k * block / blocks..k * (block + 1) / blocks;
                let sum = along.fold(0f32, |sum, i| a(row, i).mul_add(b(i, column), sum));
                let existing = if block == 0 { SCALES.1 } else { 1.0 };
                existing.mul_add(out, SCALES.0 * sum)
            });
            (index, value.to_bits())
        };
        (0..m * n)
            .step_by((m * n / 500).max(1))
            .map(element)
            .collect()
    }
}

#[test]
fn each_element_is_added_in_order_for_any_number_of_threads() {
    for shape in SHAPES {
        for layout in LAYOUTS {
            let case = Case::new(shape, layout);
            let alone = case.run(|work| in_pieces(work, 1, &AsIs));
            for (index, bits) in case.plainly() {
                assert_eq!(alone[index], bits, "{shape:?} {layout:?}, element {index}");
            }
            for threads in [2, 3, 5, 8] {
                let pieces = case.run(|work| in_pieces(work, threads, &AsIs));
                assert!(pieces == alone, "{shape:?} {layout:?} on {threads}");
            }
        }
    }
}

#[test]
fn every_kernel_has_the_same_bits() {
    for shape in [(97, 193, 511), (13, 70, 300)] {
        for layout in LAYOUTS {
            let case = Case::new(shape, layout);
            let expected = case.run(|work| in_pieces(work, 1, &AsIs));
            for (name, piece) in f32_kernels() {
                let mut panels = Default::default();
                // SAFETY: the whole output, on this thread alone, with a kernel that exists here.
                let bits = case.run(|work| unsafe {
                    piece(work, 0..shape.0, 0..shape.1, &AsIs, &mut panels);
                });
                assert!(bits == expected, "{shape:?} {layout:?} with {name}");
            }
        }
    }
}
