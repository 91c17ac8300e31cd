use std::fs;
use std::time::Instant;

use super::*;
use crate::files::{flat, open};
use ddp_kernels::files::testing::Scratch;

fn array_of(scratch: &Scratch, element: NumberType, row_shape: &[usize], bytes: &[u8]) -> Array {
    let path = scratch.path().join("a.bin");
    let _ = fs::remove_file(&path);
    flat::write(&path, |writer| {
        writer.begin("x", element, row_shape)?;
        writer.write(bytes)?;
        Ok(flat::About::default())
    })
    .unwrap();
    open(&path, None).unwrap().arrays.remove(0)
}

#[test]
fn rows_longer_than_a_piece_are_whole() {
    let scratch = Scratch::new();
    let bytes: Vec<u8> = (0..3 * 10_001).map(|index| (index % 253) as u8).collect();
    let array = array_of(&scratch, NumberType::U8, &[10_001], &bytes);
    for row in 0..3 {
        let mut into = vec![0; 10_001];
        array.read_i64(row, &mut into).unwrap();
        let expected = bytes[row as usize * 10_001..][..10_001]
            .iter()
            .map(|&byte| i64::from(byte));
        assert!(into.into_iter().eq(expected), "row {row}");
    }
    let mut all = vec![0.0; bytes.len()];
    array.read_f32(0, &mut all).unwrap();
    assert!(
        all.iter()
            .zip(&bytes)
            .all(|(&got, &byte)| got == f32::from(byte))
    );
    array.read_f32(3, &mut []).unwrap();
}

#[test]
#[should_panic(expected = "rows 2 … of")]
fn rows_that_are_not_there_are_a_mistake_of_the_caller() {
    let scratch = Scratch::new();
    let array = array_of(&scratch, NumberType::U8, &[4], &[0; 12]);
    let _ = array.read_f32(2, &mut [0.0; 8]);
}

#[test]
#[should_panic(expected = "not whole rows")]
fn a_partial_row_is_a_programmer_error() {
    let scratch = Scratch::new();
    let array = array_of(&scratch, NumberType::U8, &[4], &[0; 12]);
    let _ = array.read_f32(0, &mut [0.0; 6]);
}

#[test]
fn wider_numbers_are_rounded_to_the_nearest() {
    let scratch = Scratch::new();
    let values = [
        0.1f64,
        1.0 + 2f64.powi(-24),
        1.0 + 3.0 * 2f64.powi(-24),
        1e300,
        -1e-300,
    ];
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    let mut read = [0.0; 5];
    array_of(&scratch, NumberType::F64, &[], &bytes)
        .read_f32(0, &mut read)
        .unwrap();
    assert_eq!(read, [0.1, 1.0, 1.0 + 2f32.powi(-22), f32::INFINITY, -0.0]);
    let values = [16_777_217i64, 16_777_219, i64::MAX, i64::MIN];
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    let mut read = [0.0; 4];
    array_of(&scratch, NumberType::I64, &[], &bytes)
        .read_f32(0, &mut read)
        .unwrap();
    assert_eq!(
        read,
        [16_777_216.0, 16_777_220.0, 2f32.powi(63), -2f32.powi(63)]
    );
}

#[test]
fn nan_payloads_are_read_unchanged() {
    let scratch = Scratch::new();
    let bits = [
        0x7fc0_0001u32,
        0xffff_ffff,
        0x7f80_0000,
        0x7f80_0001,
        0x8000_0000,
    ];
    let bytes: Vec<u8> = bits.iter().flat_map(|value| value.to_le_bytes()).collect();
    let mut read = [0.0; 5];
    array_of(&scratch, NumberType::F32, &[], &bytes)
        .read_f32(0, &mut read)
        .unwrap();
    assert_eq!(read.map(f32::to_bits), bits);
}

/// The claim of `read_f32`: rows from a mapped file at a speed near that of copying memory.
#[test]
#[ignore = "a measurement: CARGO_PROFILE_TEST_OPT_LEVEL=3 cargo test -p ddp-data --lib how_fast -- --ignored --nocapture"]
fn how_fast_rows_are_read() {
    const ROWS: usize = 60_000;
    const FEATURES: usize = 784;
    let scratch = Scratch::new();
    // The rows of a batch, in the order in which a sampler gives them.
    let order: Vec<u64> = (0..ROWS as u64)
        .map(|row| row * 48_271 % ROWS as u64)
        .collect();
    let mut batch = vec![0f32; 128 * FEATURES];
    for element in [NumberType::U8, NumberType::F32] {
        let row_bytes = FEATURES * element.bytes();
        let bytes: Vec<u8> = (0..ROWS * row_bytes)
            .map(|index| (index % 64) as u8)
            .collect();
        let array = array_of(&scratch, element, &[FEATURES], &bytes);
        let mut best = [f64::INFINITY; 2];
        for _ in 0..7 {
            let start = Instant::now();
            for (row, into) in order.iter().zip((0..128).cycle()) {
                array
                    .read_f32(*row, &mut batch[into * FEATURES..][..FEATURES])
                    .unwrap();
            }
            best[0] = best[0].min(start.elapsed().as_secs_f64());
            std::hint::black_box(&mut batch);
            // As many bytes as come out, from memory of ours and in the same order.
            let floats: &[f32] = &vec![1.0; ROWS * FEATURES];
            std::hint::black_box(floats);
            let start = Instant::now();
            for (row, into) in order.iter().zip((0..128).cycle()) {
                let from = &floats[*row as usize * FEATURES..][..FEATURES];
                batch[into * FEATURES..][..FEATURES].copy_from_slice(std::hint::black_box(from));
            }
            best[1] = best[1].min(start.elapsed().as_secs_f64());
            std::hint::black_box(&mut batch);
        }
        let speed = best.map(|seconds| (4 * ROWS * FEATURES) as f64 / seconds / 1e9);
        println!(
            "{element}: {:.2} GB/s of f32, copying memory {:.2} GB/s, ratio {:.2}",
            speed[0],
            speed[1],
            speed[0] / speed[1]
        );
    }
}
