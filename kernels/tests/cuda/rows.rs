//! Sums of rows and of columns are bit-identical to the CPU's, in bf16 too, where both compute in
//! f32 and round once.

use ddp_kernels::ops;
use ddp_kernels::{DType, Device, Result, Tensor};

use crate::reductions::{cpu, finite, upload};
use crate::tiles::{around, constant};
use crate::{assert_same_bits, next_device};

/// No rows, single ones, columns around a warp and a block of a sum, rows around those that the
/// gradient of a bias adds together, and more of both.
fn shapes() -> Vec<[usize; 2]> {
    let mut shapes = vec![[0, 3], [3, 0], [7, 1], [300, 260], [2_001, 7]];
    shapes.extend(around(constant!("sum.cu", WARP)).map(|columns| [9, columns]));
    shapes.extend(around(constant!("sum.cu", SUM_BLOCK)).map(|columns| [4, columns]));
    shapes.extend(around(constant!("linear.cu", ROW_BLOCK)).map(|rows| [rows, 33]));
    shapes
}

/// What is computed from two operands, into the first argument.
type Operation = fn(&Tensor, &Tensor, &Tensor) -> Result<()>;

/// Compares `operation` of `a` and `b` on a device with the CPU.
fn check(what: &str, operation: Operation, out_shape: &[usize], [a, b]: [&Tensor; 2]) {
    for dtype in [DType::F32, DType::BF16] {
        let [a, b] = [a, b].map(|x| x.to_dtype(dtype).unwrap());
        let expected = a.new_zeros(out_shape).unwrap();
        operation(&expected, &a, &b).unwrap();
        for (device, skipped) in next_device()
            .into_iter()
            .flat_map(|device| [(device, 0), (device, 1)])
        {
            let out = Tensor::full(out_shape, 9.0, dtype, device).unwrap();
            operation(
                &out,
                &upload(&a, device, skipped),
                &upload(&b, device, skipped),
            )
            .unwrap();
            let what = format!("{what} of {a} and {b} from element {skipped} on");
            assert_same_bits(&out, &expected, &what);
        }
    }
}

#[test]
fn sums_of_rows_have_the_cpu_s_bits() {
    for [rows, columns] in shapes() {
        let x = cpu(&finite(rows * columns, 31), &[rows, columns]);
        let sum: Operation = |out, x, _| ops::row_sum_into(out, x);
        check("row_sum", sum, &[rows, 1], [&x, &x]);
    }
}

#[test]
fn column_sums_have_the_cpu_s_bits_and_sum_bf16_in_f32() {
    for [rows, columns] in shapes() {
        let x = cpu(&finite(rows * columns, 37), &[rows, columns]);
        check(
            "column_sum",
            |out, x, _| ops::column_sum_into(out, x, false),
            &[columns],
            [&x, &x],
        );
        let narrow = x.to_dtype(DType::BF16).unwrap();
        let expected = x.new_full(&[columns], 3.0).unwrap();
        ops::column_sum_into(&expected, &narrow, true).unwrap();
        if let Some(device) = next_device() {
            let got = Tensor::full(&[columns], 3.0, DType::F32, device).unwrap();
            ops::column_sum_into(&got, &narrow.to(device).unwrap(), true).unwrap();
            assert_same_bits(&got, &expected, "bf16 added to f32");
        }
    }
}

/// The sums of each block of so many rows, added in order.
pub(crate) fn sums_of_blocks(x: &[f32], height: usize, columns: usize) -> Vec<f32> {
    let of_block = |block: &[f32], column: usize| {
        let of_column = block[column..].iter().step_by(columns);
        of_column.fold(0.0, |sum, value| sum + value)
    };
    (x.chunks((height * columns).max(1)))
        .flat_map(|block| (0..columns).map(move |column| of_block(block, column)))
        .collect()
}

#[test]
fn sums_of_blocks_of_rows_are_added_in_groups_with_the_cpu_s_bits() {
    let group = constant!("linear.cu", GROUP);
    let rows = constant!("linear.cu", ROW_BLOCK) * group;
    // A group and its neighbours, five groups, and more groups than a block adds at once.
    let at_once = constant!("linear.cu", GROUPS_AT_ONCE);
    let heights = around(group).into_iter().chain([at_once * group + 70]);
    for blocks in heights {
        let sums = cpu(&finite(blocks * 6, 38), &[blocks, 6]);
        for accumulate in [false, true] {
            let expected = sums.new_full(&[6], 3.0).unwrap();
            ops::add_row_sums_into(&expected, &sums, accumulate).unwrap();
            if let Some(device) = next_device() {
                let got = Tensor::full(&[6], 3.0, DType::F32, device).unwrap();
                ops::add_row_sums_into(&got, &sums.to(device).unwrap(), accumulate).unwrap();
                assert_same_bits(&got, &expected, &format!("{blocks} blocks, {accumulate}"));
            }
        }
    }
    // The same order, however the blocks of rows are summed, but for those of many rows in bf16,
    // which are a norm's; columns of all widths of a pack.
    for [rows, columns] in [[rows - 1, 4], [rows + 1, 8], [2 * rows + 65, 3]] {
        let x = cpu(&finite(rows * columns, 39), &[rows, columns]);
        for dtype in [DType::F32, DType::BF16] {
            let x = x.to_dtype(dtype).unwrap();
            let expected = Tensor::full(&[columns], 3.0, DType::F32, Device::Cpu).unwrap();
            ops::column_sum_into(&expected, &x, true).unwrap();
            if let Some(device) = next_device() {
                let [direct, from_blocks] =
                    [0, 1].map(|_| Tensor::full(&[columns], 3.0, DType::F32, device).unwrap());
                let x = x.to(device).unwrap();
                ops::column_sum_into(&direct, &x, true).unwrap();
                assert_same_bits(
                    &direct,
                    &expected,
                    &format!("sum of {dtype}[{rows}, {columns}]"),
                );
                let blocks = ops::row_sums_of(&x);
                let sums = Tensor::full(&blocks, 9.0, DType::F32, device).unwrap();
                ops::row_block_sums_into(&sums, &x).unwrap();
                let what = format!("{dtype}[{rows}, {columns}]");
                if dtype == DType::BF16 {
                    let height = rows.div_ceil(blocks[0]);
                    let all = x.to((Device::Cpu, DType::F32)).unwrap().to_vec().unwrap();
                    let expected = sums_of_blocks(&all, height, columns);
                    assert_same_bits(&sums, &cpu(&expected, &blocks), &what);
                    continue;
                }
                ops::add_row_sums_into(&from_blocks, &sums, true).unwrap();
                assert_same_bits(&from_blocks, &expected, &what);
            }
        }
    }
}
