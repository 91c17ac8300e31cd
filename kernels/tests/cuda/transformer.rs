//! Rotary positions, swiglu, relu² and windows: the CPU's bits, in bf16 too, where
//! both compute in f32 and round once.

use std::cell::Cell;

use ddp_kernels::ops::{self, Windows};
use ddp_kernels::{DType, Device, Result, Tensor};

use crate::reductions::{cpu, upload};
use crate::tiles::{Odd, placing};
use crate::{assert_same_bits, next_device, random_f32};

/// `operation(out, [a, b])` on a device and in place of `a` has the bits of the CPU; `out_shape` is
/// the shape of `out`.
fn check(
    what: &str,
    operation: impl Fn(&Tensor, [&Tensor; 2]) -> Result<()>,
    out_shape: &[usize],
    [a, b]: [&Tensor; 2],
    in_place: bool,
) {
    for dtype in [DType::F32, DType::BF16] {
        let [a, b] = [a, b].map(|x| x.to_dtype(dtype).unwrap());
        let expected = a.new_zeros(out_shape).unwrap();
        operation(&expected, [&a, &b]).unwrap();
        for (odd, device) in Odd::each(3).filter_map(|odd| Some((odd, next_device()?))) {
            let place = placing(device, odd);
            let [a, b] = [&a, &b].map(&place);
            let what = format!("{what} of {a}, {odd:?} at odd addresses");
            let out = place(&Tensor::full(out_shape, 9.0, dtype, Device::Cpu).unwrap());
            operation(&out, [&a, &b]).unwrap();
            assert_same_bits(&out, &expected, &what);
            if in_place {
                operation(&a, [&a, &b]).unwrap();
                assert_same_bits(&a, &expected, &format!("in place: {what}"));
            }
        }
    }
}

#[test]
fn swiglu_and_its_gradient_have_the_cpu_s_bits() {
    for [rows, columns] in [[0, 4], [2, 0], [1, 1], [5, 3], [3, 8], [7, 260]] {
        let x = cpu(&random_f32(2 * rows * columns, 93), &[rows, 2 * columns]);
        let dout = cpu(&random_f32(rows * columns, 94), &[rows, columns]);
        let forward = |out: &Tensor, [x, _]: [&Tensor; 2]| ops::swiglu_into(out, x);
        check("swiglu", forward, &[rows, columns], [&x, &x], false);
        let backward =
            |dx: &Tensor, [x, dout]: [&Tensor; 2]| ops::swiglu_backward_into(dx, dout, x);
        check(
            "swiglu_backward",
            backward,
            &[rows, 2 * columns],
            [&x, &dout],
            true,
        );
    }
}

#[test]
fn rotary_positions_have_the_cpu_s_bits() {
    // Sequences, positions, heads, size of a head, columns of it that are turned, and after heads.
    let calls = Cell::new(false);
    for [sequences, positions, heads, head_size, turned, rest] in [
        [0, 3, 2, 4, 4, 0],
        [1, 1, 1, 2, 2, 0],
        [2, 3, 2, 6, 6, 5],
        [2, 5, 3, 16, 16, 8],
        [1, 2, 0, 4, 4, 3],
        [1, 3, 40, 64, 64, 0],
        [2, 3, 3, 7, 4, 2],
        [2, 5, 3, 16, 8, 8],
        [2, 5, 2, 10, 8, 4],
    ] {
        let (rows, columns) = (sequences * positions, heads * head_size + rest);
        let x = cpu(&random_f32(rows * columns, 95), &[rows, columns]);
        let frequencies = ops::rope_frequencies(turned, 500.0).unwrap();
        let of_table = ops::rope_table(positions, &frequencies, 1.0, Device::Cpu).unwrap();
        // At an odd address for every other operand in turn.
        let table = |x: &Tensor| {
            upload(
                &of_table,
                x.device(),
                usize::from(calls.replace(!calls.get())),
            )
        };
        let heads = [heads, head_size];
        let turn = |out: &Tensor, [x, _]: [&Tensor; 2]| ops::rope_into(out, x, &table(x), heads);
        check("rope", turn, &[rows, columns], [&x, &x], true);
        let back =
            |out: &Tensor, [x, _]: [&Tensor; 2]| ops::rope_backward_into(out, x, &table(x), heads);
        check("rope_backward", back, &[rows, columns], [&x, &x], true);
    }
}

#[test]
fn windows_and_their_gradient_have_the_cpu_s_bits() {
    // Images, channels, height, width; then size, stride, padding and dilation of each axis.
    for (image, of) in [
        ([2, 3, 7, 9], [[3, 2], [2, 1], [1, 2], [1, 3]]),
        ([1, 2, 2, 600], [[3, 3], [1, 1], [1, 1], [1, 1]]),
        ([3, 2, 8, 5], [[2, 1], [3, 2], [0, 0], [2, 1]]),
        ([0, 2, 3, 3], [[3, 3], [1, 1], [1, 1], [1, 1]]),
    ] {
        let [size, stride, padding, dilation] = of;
        let windows = Windows {
            size,
            stride,
            padding,
            dilation,
        };
        let [down, across] = windows.places([image[2], image[3]]).unwrap();
        let columns = [image[1] * size[0] * size[1], image[0] * down * across];
        let x = cpu(&random_f32(image.iter().product(), 98), &image);
        let dout = cpu(&random_f32(columns.iter().product(), 99), &columns);
        let forward = |out: &Tensor, [x, _]: [&Tensor; 2]| ops::unfold_into(out, x, &windows);
        check("unfold", forward, &columns, [&x, &x], false);
        let backward =
            |dx: &Tensor, [dout, _]: [&Tensor; 2]| ops::unfold_backward_into(dx, dout, &windows);
        check("unfold_backward", backward, &image, [&dout, &dout], false);
    }
}
