//! Tests of matmul.

use super::*;
use crate::ops::testing::random_f32;

/// The products a training step makes, and awkward ones around every threshold above.
const SHAPES: [(usize, usize, usize); 16] = [
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
];

fn run(m: usize, n: usize, k: usize, a_t: bool, b_t: bool, threads: usize) -> Vec<u32> {
    let (a, b) = (random_f32(m * k, 1), random_f32(k * n, 2));
    let mut out = random_f32(m * n, 3);
    let (a, b) = (Matrix::new(&a, m, k, a_t), Matrix::new(&b, k, n, b_t));
    let work = Product {
        out: out.as_mut_ptr(),
        stride: n,
        a,
        b,
        product_scale: 0.5,
        existing_scale: 2.0,
    };
    if b_t && m > 1 && n > 1 && k > 2 {
        panel::in_panels(&work, m, n, k, threads, &AsIs);
    } else {
        in_pieces(&work, m, n, k, threads, &AsIs);
    }
    out.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_pieces() {
    for (m, n, k) in SHAPES {
        for (a_t, b_t) in [(false, false), (false, true), (true, false), (true, true)] {
            let alone = run(m, n, k, a_t, b_t, 1);
            for threads in 2..=8 {
                assert!(
                    run(m, n, k, a_t, b_t, threads) == alone,
                    "{m}x{n}x{k} {a_t} {b_t} on {threads}"
                );
            }
        }
    }
}
