//! The elementwise operations give the bits of their CPU versions: for every size and dtype, apart
//! and in place, on views that begin where 16 bytes at a time cannot be moved. In bf16 too, where
//! both compute in f32 and round once.

use ddp_kernels::dtype::bf16;
use ddp_kernels::ops::{self, Activation, DropoutKey};
use ddp_kernels::{DType, Device, Element, Error, Tensor};

use crate::tiles::Odd;
use crate::{SIZES, assert_same_bits, devices, next_device, random_f32};

const WIDE: [DType; 2] = [DType::F32, DType::BF16];

/// A vector of `count` elements on the CPU, in `dtype`.
fn input(count: usize, seed: u64, dtype: DType) -> Tensor {
    Tensor::from_slice(&random_f32(count, seed), &[count], Device::Cpu)
        .unwrap()
        .to_dtype(dtype)
        .unwrap()
}

/// `x` on `device`, beginning `skipped` elements into a buffer, with as many behind it.
fn upload(x: &Tensor, device: Device, skipped: usize) -> (Tensor, Tensor) {
    let count = x.count();
    let buffer = Tensor::full(&[count + 2 * skipped], 77.0, x.dtype(), device).unwrap();
    let part = buffer.slice(skipped..skipped + count).unwrap();
    part.copy_from(&x.to(device).unwrap()).unwrap();
    (buffer, part)
}

/// Asserts that nothing around the part of `buffer` that `upload` gave was written.
#[track_caller]
fn assert_untouched(buffer: &Tensor, skipped: usize, what: &str) {
    let count = buffer.count();
    let around = [
        buffer.slice(0..skipped).unwrap(),
        buffer.slice(count - skipped..count).unwrap(),
    ];
    for part in around {
        assert_same_bits(
            &part,
            &Tensor::full(&[skipped], 77.0, part.dtype(), Device::Cpu).unwrap(),
            what,
        );
    }
}

/// Compares `operation`, which is given its output and its `inputs` of one shape and dtype, on a
/// device with the CPU, apart and in place of each input in `in_place`, in every dtype and size,
/// with one alignment of each.
fn check(name: &str, inputs: usize, in_place: &[usize], operation: impl Fn(&Tensor, &[Tensor])) {
    let cases = SIZES
        .into_iter()
        .flat_map(|size| WIDE.map(|dtype| (size, dtype)));
    for (size, dtype) in cases {
        let Some(device) = next_device() else { return };
        let given: Vec<Tensor> = (0..inputs)
            .map(|seed| input(size, seed as u64 + 1, dtype))
            .collect();
        let expected = Tensor::zeros(&[size], dtype, Device::Cpu).unwrap();
        operation(&expected, &given);

        let odd = format!("{name} {dtype} {size}");
        for odd in ddp_testing::cases_of(&odd, Odd::each(inputs + 1), 1) {
            let what = format!("{name} {dtype}[{size}], {odd:?} at odd addresses");
            let skipped = |operand| if odd.is(operand) { 1 } else { 16 };
            let place = |(index, x)| upload(x, device, skipped(index)).1;
            let there: Vec<Tensor> = given.iter().enumerate().map(place).collect();
            let (buffer, out) = upload(&expected.zeros_like().unwrap(), device, skipped(inputs));
            operation(&out, &there);
            assert_same_bits(&out, &expected, &what);
            assert_untouched(&buffer, skipped(inputs), &what);
            for &index in in_place {
                let mut there: Vec<Tensor> = given.iter().enumerate().map(place).collect();
                let (buffer, out) = upload(&given[index], device, skipped(index));
                there[index] = out.clone();
                operation(&out, &there);
                let what = format!("{what}, in place of input {index}");
                assert_same_bits(&out, &expected, &what);
                assert_untouched(&buffer, skipped(index), &what);
            }
        }
    }
}

#[test]
fn activations_and_their_derivatives_have_the_cpu_s_bits() {
    for activation in Activation::all() {
        check(&format!("{activation:?}"), 1, &[0], |out, x| {
            ops::activate_into(out, &x[0], activation).unwrap()
        });
        check(&format!("{activation:?} backward"), 2, &[0], |dx, x| {
            ops::activate_backward_into(dx, &x[0], &x[1], activation).unwrap()
        });
    }
}

/// A formula for bf16 that is less exact may round as another one does, but for a few numbers.
#[test]
fn activations_of_every_bf16_number_have_the_cpu_s_bits() {
    let Some(device) = next_device() else { return };
    let all: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    let x = Tensor::from_slice(&all, &[all.len()], Device::Cpu).unwrap();
    for activation in Activation::all() {
        let expected = ops::activate(&x, activation).unwrap();
        let got = ops::activate(&x.to(device).unwrap(), activation).unwrap();
        assert_same_bits(&got, &expected, &format!("{activation:?}"));
    }
}

#[test]
fn scale_and_axpy_have_the_cpu_s_bits() {
    check("scale", 1, &[0], |out, x| {
        ops::scale_into(out, &x[0], 0.1).unwrap()
    });
    check("axpy", 2, &[], |out, x| {
        ops::scale_into(out, &x[0], 1.0).unwrap();
        ops::axpy(out, -0.3, &x[1]).unwrap();
    });
}

#[test]
fn axpy_adds_narrow_numbers_to_f32_without_losing_any() {
    for (device, dtype) in devices().into_iter().map(|device| (device, DType::BF16)) {
        for size in SIZES {
            let (x, y) = (input(size, 8, dtype), input(size, 9, DType::F32));
            let (there, narrow) = (y.to(device).unwrap(), x.to(device).unwrap());
            ops::axpy(&there, -0.3, &narrow).unwrap();
            ops::axpy(&y, -0.3, &x).unwrap();
            assert_same_bits(&there, &y, &format!("{dtype} added to f32, {size}"));
            let error = ops::axpy(&narrow, 1.0, &there).unwrap_err().to_string();
            assert!(
                error.contains("x f32")
                    && error.contains(&format!("expected dtype {dtype}, as y has")),
                "{error}"
            );
        }
    }
}

/// Sums of so many parts along a tree, of which this rank has three: its last one is replaced.
fn check_add_in_order<T: Element>(dtype: DType, parts: usize, size: usize, skipped: usize) {
    let Some(device) = next_device() else { return };
    let all = input(parts * size, 21, dtype).to_vec::<T>().unwrap();
    let part = |index: usize| &all[index * size..][..size];
    let own = 4..7;
    let (mut order, mut left) = (Vec::new(), Vec::<(usize, Vec<T>)>::new());
    for index in 0..parts {
        let (mut shards, mut sum, mut additions) = (1, part(index).to_vec(), 0);
        while let Some((before, _)) = left.last()
            && (*before == shards || index + 1 == parts)
        {
            let (before, halves) = left.pop().unwrap();
            let add = |(sum, half): (&T, &T)| T::from_f64(half.to_f64() + sum.to_f64());
            sum = sum.iter().zip(&halves).map(add).collect();
            (shards, additions) = (shards + before, additions + 1);
        }
        order.push((own.contains(&index), additions));
        left.push((shards, sum));
    }
    let tensor = |of: &[T]| Tensor::from_slice(of, &[of.len()], Device::Cpu).unwrap();
    let others: Vec<T> = [&all[..own.start * size], &all[own.end * size..]].concat();
    // Rows have `skipped` elements before those that are added.
    let gap = vec![T::from_f64(3.0); skipped];
    let rows = own.start..own.end - 1;
    let rows: Vec<T> = rows
        .flat_map(|row| [&gap[..], part(row)].concat())
        .collect();
    let rows = tensor(&rows).to(device).unwrap();
    let (_buffer, others) = upload(&tensor(&others), device, skipped);
    let (buffer, out) = upload(&tensor(part(own.end - 1)), device, skipped);
    let order = ops::AddOrder::new(&order, device).unwrap();
    ops::add_in_order(&out, &others, &rows, skipped, &order).unwrap();
    let what = format!("{parts} parts of {size} {dtype}, {skipped} skipped");
    assert_same_bits(&out, &tensor(&left[0].1), &what);
    assert_untouched(&buffer, skipped, &what);
}

#[test]
fn add_in_order_has_the_bits_of_one_addition_after_another() {
    for (parts, sizes) in [(11, &SIZES[..]), (1024, &[1, 264, 500])] {
        for (size, skipped) in sizes.iter().flat_map(|size| [(*size, 0), (*size, 3)]) {
            check_add_in_order::<f32>(DType::F32, parts, size, skipped);
            check_add_in_order::<bf16>(DType::BF16, parts, size, skipped);
        }
    }
}

#[test]
fn more_elements_than_a_grid_takes_at_once_are_all_computed() {
    // A grid has at most 2,112 blocks of 256 threads, each of which takes two packs of four at a
    // time: 4.3 million.
    const COUNT: usize = 5_000_003;
    for device in devices() {
        let numbers: Vec<f32> = (0..COUNT).map(|index| index as f32 - 1e6).collect();
        let x = Tensor::from_slice(&numbers, &[COUNT], Device::Cpu).unwrap();
        let there = x.to(device).unwrap();
        ops::axpy(&there, 1.0, &x.to(device).unwrap()).unwrap();
        ops::activate_into(&there, &there, Activation::Relu).unwrap();
        ops::activate_into(&x, &x, Activation::Relu).unwrap();
        ops::scale_into(&x, &x, 2.0).unwrap();
        assert_same_bits(&there, &x, "relu of a sum");
    }
}

#[test]
fn every_exponent_and_sign_goes_through_activations_with_the_cpu_s_bits() {
    for device in devices() {
        // Every 40,009th f32 there is, with subnormals and NaNs, and the infinities.
        let all = (0..=u32::MAX).step_by(40_009).map(f32::from_bits);
        let all: Vec<f32> = all.chain([f32::INFINITY, f32::NEG_INFINITY]).collect();
        let x = Tensor::from_slice(&all, &[all.len()], Device::Cpu).unwrap();
        let there = x.to(device).unwrap();
        for activation in Activation::all() {
            assert_same_bits(
                &ops::activate(&there, activation).unwrap(),
                &ops::activate(&x, activation).unwrap(),
                &format!("{activation:?}"),
            );
            let one = x.ones_like().unwrap();
            let dx = one.to(device).unwrap();
            ops::activate_backward_into(&dx, &dx, &there, activation).unwrap();
            ops::activate_backward_into(&one, &one, &x, activation).unwrap();
            assert_same_bits(&dx, &one, &format!("{activation:?} backward"));
        }
    }
}

#[test]
fn dropout_drops_the_same_elements_as_on_the_cpu() {
    for (rows, columns) in [
        (0, 3),
        (1, 1),
        (5, 1),
        (3, 7),
        (33, 32),
        (64, 24),
        (7, 1025),
        (3, 20_004),
    ] {
        for (dtype, probability) in WIDE
            .into_iter()
            .flat_map(|dtype| [0.0, 0.3, 0.9].map(|p| (dtype, p)))
        {
            let x = input(rows * columns, 5, dtype)
                .reshape(&[rows, columns])
                .unwrap();
            // Past 2³², so that the high bits of the row count.
            let position = Tensor::from_slice(&[77i64, (3 << 32) + 9], &[2], Device::Cpu).unwrap();
            let key = DropoutKey {
                seed: 0x1234_5678_9abc_def0,
                layer: 5,
                position: &position,
            };
            let expected = ops::dropout(&x, probability, &key).unwrap();
            let Some(device) = next_device() else { return };
            let position = position.to(device).unwrap();
            let key = DropoutKey {
                position: &position,
                ..key
            };
            for odd in Odd::each(2) {
                let what = format!(
                    "dropout {probability} {dtype}[{rows}, {columns}], {odd:?} at odd addresses"
                );
                let [from, skipped] = [0, 1].map(|operand| if odd.is(operand) { 1 } else { 16 });
                let flat = x.flatten().unwrap();
                let there = upload(&flat, device, from)
                    .1
                    .reshape(&[rows, columns])
                    .unwrap();
                let (buffer, out) = upload(&flat.zeros_like().unwrap(), device, skipped);
                ops::dropout_into(
                    &out.reshape(&[rows, columns]).unwrap(),
                    &there,
                    probability,
                    &key,
                )
                .unwrap();
                assert_same_bits(&out, &expected.flatten().unwrap(), &what);
                assert_untouched(&buffer, skipped, &what);
                ops::dropout_into(&there, &there, probability, &key).unwrap();
                assert_same_bits(&there, &expected, &format!("{what}, in place"));
            }
        }
    }
}

#[test]
fn more_rows_than_a_grid_takes_at_once_are_all_dropped_out() {
    // 551 packs a row, 551,551 in all; a grid has at most 540,672 threads, which then continue 981
    // rows and some packs further.
    let [rows, columns] = [1001, 2204];
    for device in devices() {
        let x = input(rows * columns, 9, DType::F32)
            .reshape(&[rows, columns])
            .unwrap();
        let position = Tensor::from_slice(&[3i64, 5], &[2], Device::Cpu).unwrap();
        let key = DropoutKey {
            seed: 8,
            layer: 1,
            position: &position,
        };
        let expected = ops::dropout(&x, 0.4, &key).unwrap();
        let position = position.to(device).unwrap();
        // In place: an element that was scaled twice shows.
        let there = x.to(device).unwrap();
        ops::dropout_into(
            &there,
            &there,
            0.4,
            &DropoutKey {
                position: &position,
                ..key
            },
        )
        .unwrap();
        assert_same_bits(&there, &expected, "dropout");
    }
}

#[test]
fn a_dropout_position_out_of_range_makes_everything_nan() {
    for (device, dtype) in devices()
        .into_iter()
        .flat_map(|device| WIDE.map(|dtype| (device, dtype)))
    {
        for position in [
            [-1, 0],
            [1 << 32, 0],
            [0, -1],
            [0, (1 << 40) - 1],
            [0, i64::MAX],
        ] {
            let position = Tensor::from_slice(&position, &[2], device).unwrap();
            let x = Tensor::ones(&[2, 33], dtype, device).unwrap();
            ops::dropout_into(
                &x,
                &x,
                0.5,
                &DropoutKey {
                    seed: 1,
                    layer: 0,
                    position: &position,
                },
            )
            .unwrap();
            let x = x.to_dtype(DType::F32).unwrap().to_vec::<f32>().unwrap();
            assert!(x.iter().all(|x| x.is_nan()), "{dtype}");
        }
        // The last rows there are.
        let position =
            Tensor::from_slice(&[(1i64 << 32) - 1, (1 << 40) - 2], &[2], device).unwrap();
        let x = Tensor::ones(&[2, 33], dtype, device).unwrap();
        ops::dropout_into(
            &x,
            &x,
            0.5,
            &DropoutKey {
                seed: 1,
                layer: 0,
                position: &position,
            },
        )
        .unwrap();
        let x = x.to_dtype(DType::F32).unwrap().to_vec::<f32>().unwrap();
        assert!(
            x.iter().all(|&x| x == 0.0 || x == 2.0) && x.contains(&0.0) && x.contains(&2.0),
            "{dtype}"
        );
    }
}

/// Numbers of `dtype` that are hard to convert to another: ends of every integer's range and their
/// neighbours, ties of both 16-bit floats, what is just beyond a tie, subnormals, infinities, NaN.
fn hard_numbers(dtype: DType) -> Tensor {
    if !dtype.is_float() {
        let mut values: Vec<i64> = (0..63)
            .flat_map(|bit| [(1 << bit) - 1, 1 << bit, (1 << bit) + 1])
            .collect();
        // Ties of bf16 and f16 after the first bit, and one unit beside them.
        values.extend((10..62).flat_map(|bit| {
            let one = 1i64 << bit;
            [one / 256, one / 2048].into_iter().flat_map(move |half| {
                [one + half, one + 3 * half]
                    .into_iter()
                    .flat_map(|tie| [tie - 1, tie, tie + 1])
            })
        }));
        values.extend([0, i64::MAX, i64::MAX - 1, i64::MAX >> 1]);
        let negative: Vec<i64> = values.iter().map(|value| -value).collect();
        values.extend(negative);
        values.push(i64::MIN);
        let all = Tensor::from_slice(&values, &[values.len()], Device::Cpu).unwrap();
        return all.to_dtype(dtype).unwrap();
    }
    // Every exponent, with mantissas that are ties for fewer bits, in f64; f32 and 16 bits take
    // what is nearest.
    let mut values = vec![
        0.0,
        f64::INFINITY,
        f64::NAN,
        f64::MIN_POSITIVE,
        5e-324,
        255.5,
        0.5,
        2147483647.5,
    ];
    for exponent in (-1074..1024).step_by(7).chain(-30..70) {
        let one = 2f64.powi(exponent.max(-1022)) * 2f64.powi((exponent + 1022).min(0));
        for fraction in [
            0.0,
            1.0 / 256.0,
            3.0 / 256.0,
            1.0 / 2048.0,
            3.0 / 2048.0,
            2f64.powi(-24),
            3.0 * 2f64.powi(-24),
        ] {
            let tie = one * (1.0 + fraction);
            values.extend([tie.next_down(), tie, tie.next_up()]);
        }
    }
    let negative: Vec<f64> = values.iter().map(|value| -value).collect();
    values.extend(negative);
    Tensor::from_slice(&values, &[values.len()], Device::Cpu)
        .unwrap()
        .to_dtype(dtype)
        .unwrap()
}

#[test]
fn every_dtype_becomes_every_other_as_on_the_cpu() {
    for device in devices() {
        for from in DType::ALL {
            let x = hard_numbers(from);
            for to in DType::ALL {
                let expected = x.to_dtype(to).unwrap();
                for (skipped_in, skipped) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                    let there = upload(&x, device, skipped_in).1;
                    let (buffer, out) = upload(&expected.zeros_like().unwrap(), device, skipped);
                    ops::cast_into(&out, &there).unwrap();
                    let what = format!(
                        "{from} from element {skipped_in} on to {to} from element {skipped} on"
                    );
                    assert_same_bits(&out, &expected, &what);
                    assert_untouched(&buffer, skipped, &what);
                }
            }
        }
    }
}

#[test]
fn every_16_bit_float_becomes_every_dtype_as_on_the_cpu() {
    for device in devices() {
        for (from, to) in [DType::BF16, DType::F16]
            .into_iter()
            .flat_map(|from| DType::ALL.map(|to| (from, to)))
        {
            let bits: Vec<f32> = (0..=u16::MAX)
                .map(|bits| match from {
                    DType::BF16 => ddp_kernels::dtype::bf16::from_bits(bits).to_f32(),
                    _ => ddp_kernels::dtype::f16::from_bits(bits).to_f32(),
                })
                .collect();
            let x = Tensor::from_slice(&bits, &[1 << 16], Device::Cpu)
                .unwrap()
                .to_dtype(from)
                .unwrap();
            let got = ops::cast(&x.to(device).unwrap(), to).unwrap();
            assert_same_bits(
                &got,
                &ops::cast(&x, to).unwrap(),
                &format!("{from} to {to}"),
            );
        }
    }
}

/// With PTX where the GPU has it. The sum of two bf16 has any upper half, and a lower half below,
/// at and above a tie.
#[test]
fn every_sum_that_is_rounded_to_bf16_goes_to_the_nearest() {
    use ddp_kernels::dtype::bf16;
    let upper: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    let sum = |a: bf16, lower: u32| {
        let size = u32::from(a.to_bits()) << 16;
        let b = f32::from_bits(size | lower) - f32::from_bits(size);
        (a, bf16::from_f32(b))
    };
    for device in devices() {
        for lower in [0, 1, 0x80, 0x7f80, 0x8000, 0x8100, 0xff00] {
            let (a, b): (Vec<_>, Vec<_>) = upper.iter().map(|a| sum(*a, lower)).unzip();
            let expected: Vec<u16> = (a.iter().zip(&b))
                .map(|(a, b)| a.to_f32() + b.to_f32())
                .map(|sum| {
                    if sum.is_nan() {
                        0x7fff
                    } else {
                        bf16::from_f32(sum).to_bits()
                    }
                })
                .collect();
            let upload = |x: &[bf16]| Tensor::from_slice(x, &[1 << 16], device).unwrap();
            let sum = upload(&a);
            ops::axpy(&sum, 1.0, &upload(&b)).unwrap();
            let got = sum.to_vec::<bf16>().unwrap();
            let got: Vec<u16> = got.into_iter().map(bf16::to_bits).collect();
            let wrong = (0..1 << 16).find(|&at| got[at] != expected[at]);
            assert_eq!(wrong, None, "{device}: {lower:#x}");
        }
    }
}

#[test]
fn fill_and_zero_write_what_they_are_given_and_nothing_beside_it() {
    for device in devices() {
        for (size, dtype) in SIZES
            .into_iter()
            .flat_map(|size| DType::ALL.map(|dtype| (size, dtype)))
        {
            for skipped in [0, 1, 16] {
                let what = format!("{dtype}[{size}] from element {skipped} on");
                let blank = Tensor::full(&[size], 3.0, dtype, Device::Cpu).unwrap();
                let (buffer, out) = upload(&blank, device, skipped);
                for value in [7.0, 0.0] {
                    ops::fill_into(&out, value).unwrap();
                    assert_same_bits(&out, &blank.new_full(blank.shape(), value).unwrap(), &what);
                }
                if dtype.is_float() {
                    for value in [-0.0, 0.1, f64::NAN, f64::NEG_INFINITY] {
                        ops::fill_into(&out, value).unwrap();
                        assert_same_bits(
                            &out,
                            &blank.new_full(blank.shape(), value).unwrap(),
                            &what,
                        );
                    }
                }
                ops::zero(&out).unwrap();
                assert_same_bits(&out, &blank.zeros_like().unwrap(), &what);
                assert_untouched(&buffer, skipped, &what);
            }
        }
    }
}

#[test]
fn there_is_no_math_in_f64_f16_or_integers_and_the_error_says_what_there_is() {
    for device in devices() {
        for dtype in [DType::F64, DType::F16, DType::I32] {
            let error = ops::activate(
                &Tensor::ones(&[3], dtype, device).unwrap(),
                Activation::Relu,
            )
            .unwrap_err();
            assert!(matches!(error, Error::NoVersion(_)), "{error:?}");
            let text = error.to_string();
            assert!(
                text.contains(&format!(
                    "activate: there is no version for {dtype} on {device}"
                )),
                "{text}"
            );
            assert!(text.contains("f32, bf16 on cuda"), "{text}");
        }
    }
}
