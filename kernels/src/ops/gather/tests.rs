//! Tests of gather.

use super::*;
use crate::Device;
use crate::ops::testing::{cpu, cpu_of};

/// `table` [N, width] of whole numbers 0 to 126, which every dtype holds.
fn table(rows: usize, width: usize) -> Vec<u8> {
    (0..rows * width)
        .map(|index| (index * 31 % 127) as u8)
        .collect()
}

#[test]
fn every_dtype_shape_and_number_of_threads_gives_the_rows_asked_for() {
    let _alone = crate::ops::testing::alone_with_the_pool();
    for (table_rows, width, count) in [
        (1, 1, 5),
        (7, 3, 0),
        (10, 0, 4),
        (33, 17, 100),
        (500, 130, 1001),
    ] {
        let numbers = table(table_rows, width);
        let rows: Vec<i64> = (0..count)
            .map(|at| (at * 7919 % table_rows) as i64)
            .collect();
        let expected: Vec<u8> = rows
            .iter()
            .flat_map(|&row| &numbers[row as usize * width..][..width])
            .copied()
            .collect();
        for dtype in DType::ALL {
            let source = cpu_of(&numbers, &[table_rows, width])
                .to_dtype(dtype)
                .unwrap();
            for threads in [1, 3] {
                threads::set_count(threads).unwrap();
                let out = Tensor::full(&[count, width], 1.0, dtype, Device::Cpu).unwrap();
                gather_rows(&out, &source, &cpu_of(&rows, &[count])).unwrap();
                let got = out.to_dtype(DType::U8).unwrap().to_vec::<u8>().unwrap();
                assert_eq!(got, expected, "{dtype} {count} of [{table_rows}, {width}]");
            }
        }
    }
}

#[test]
fn rows_may_have_any_shape_and_nan_keeps_its_payload() {
    let odd = f32::from_bits(0x7fc1_2345);
    let table = cpu(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, odd, -0.0], &[2, 2, 2]);
    let out = cpu(&[9.0; 12], &[3, 2, 2]);
    gather_rows(&out, &table, &cpu_of(&[1i64, 0, 1], &[3])).unwrap();
    let bits: Vec<u32> = out
        .to_vec::<f32>()
        .unwrap()
        .iter()
        .map(|x| x.to_bits())
        .collect();
    let second = [4.0, 5.0, odd, -0.0].map(f32::to_bits);
    assert_eq!(
        bits,
        [second, [0.0, 1.0, 2.0, 3.0].map(f32::to_bits), second].concat()
    );
    // A table of one number a row.
    let classes = cpu_of(&[0i64; 2], &[2]);
    gather_rows(
        &classes,
        &cpu_of(&[5i64, 6, 7], &[3]),
        &cpu_of(&[2i64, 1], &[2]),
    )
    .unwrap();
    assert_eq!(classes.to_vec::<i64>().unwrap(), [7, 6]);
}

#[test]
fn an_invalid_row_number_is_named_and_nothing_is_written() {
    let (out, table) = (cpu(&[9.0; 4], &[2, 2]), cpu(&[0.0; 6], &[3, 2]));
    for (bad, shown) in [(3, "3"), (-1, "-1"), (i64::MIN, "-9223372036854775808")] {
        let error = gather_rows(&out, &table, &cpu_of(&[0, bad], &[2]))
            .unwrap_err()
            .to_string();
        let told =
            format!("gather_rows: rows[1]: expected a row of the table, in 0..3, got {shown}");
        assert!(error.contains(&told), "{error}");
        assert_eq!(out.to_vec::<f32>().unwrap(), [9.0; 4]);
    }
    let none = cpu(&[], &[0, 2]);
    let error = gather_rows(&out, &none, &cpu_of(&[0i64; 2], &[2]))
        .unwrap_err()
        .to_string();
    assert!(error.contains("in 0..0, got 0"), "{error}");
}

#[test]
fn other_shapes_dtypes_and_layouts_are_refused() {
    let (out, table, rows) = (
        cpu(&[0.0; 4], &[2, 2]),
        cpu(&[0.0; 6], &[3, 2]),
        cpu_of(&[0i64; 2], &[2]),
    );
    let told = |out: &Tensor, table: &Tensor, rows: &Tensor| {
        gather_rows(out, table, rows).unwrap_err().to_string()
    };
    let error = told(&cpu(&[0.0; 6], &[3, 2]), &table, &rows);
    assert!(
        error.contains("gather_rows: out f32[3, 2] on cpu: expected shape [2, 2]"),
        "{error}"
    );
    let error = told(&cpu_of(&[0u8; 4], &[2, 2]), &table, &rows);
    assert!(
        error.contains("out u8[2, 2] on cpu: expected dtype f32, as table has"),
        "{error}"
    );
    let error = told(&out, &table, &cpu_of(&[0i32; 2], &[2]));
    assert!(
        error.contains("rows i32[2] on cpu: expected dtype i64"),
        "{error}"
    );
    let error = told(&out, &table, &cpu_of(&[0i64; 2], &[2, 1]));
    assert!(
        error.contains("rows i64[2, 1] on cpu: expected 1 dimension"),
        "{error}"
    );
    let error = told(&out, &cpu(&[1.0], &[]), &rows);
    assert!(
        error.contains("table f32[] on cpu: expected at least one dimension"),
        "{error}"
    );
    let error = told(&out, &cpu(&[0.0; 6], &[2, 3]).t().unwrap(), &rows);
    assert!(error.contains("expected row-major elements"), "{error}");
    let error = told(&table.slice(0..2).unwrap(), &table, &rows);
    assert!(
        error.contains("gather_rows") && error.contains("table"),
        "{error}"
    );
}

#[test]
fn the_widest_word_that_fits_everywhere_is_moved() {
    for (addresses, row_bytes, expected) in [
        (0x1000, 3136, 16),
        (0x1008, 3136, 8),
        (0x1000, 8, 8),
        (0x1000, 12, 4),
        (0x1002, 6, 2),
        (0x1001, 16, 1),
    ] {
        assert_eq!(
            word_bytes(addresses, row_bytes),
            expected,
            "{addresses:#x} {row_bytes}"
        );
    }
}

#[test]
fn a_grid_has_whole_blocks_and_no_more_than_the_device_can_use() {
    let threads_of = |grid: Grid| grid.threads.iter().product::<u32>();
    let blocks_of = |grid: Grid| grid.blocks.iter().product::<u32>();
    for (count, words, blocks, threads) in [
        (1, 1, [1, 1, 1], [1, 256, 1]),
        (128, 196, [128, 1, 1], [256, 1, 1]),
        (128, 3, [2, 1, 1], [4, 64, 1]),
        (2, 1000, [2, 4, 1], [256, 1, 1]),
    ] {
        let grid = grid(count, words);
        assert_eq!(
            (grid.blocks, grid.threads),
            (blocks, threads),
            "{count} rows of {words} words"
        );
    }
    for (count, words) in [(1 << 40, 1), (1, 1 << 40), (1 << 20, 1 << 20), (2000, 3000)] {
        let grid = grid(count, words);
        assert!(
            threads_of(grid) == BLOCK_THREADS && blocks_of(grid) <= 16 * 132,
            "{count} {words}: {grid:?}"
        );
    }
}
