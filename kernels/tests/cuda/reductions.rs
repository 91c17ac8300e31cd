//! Sums, norms, counts and the flag of a bad step: the CPU's bits, because the kernels add in the
//! order that the CPU documents.

use ddp_kernels::ops::{self, Chunk, ChunkTable, StepMarks};
use ddp_kernels::progress::DeviceProgress;
use ddp_kernels::{DType, Device, Tensor};

use crate::tiles::{around, constant};
use crate::{SIZES, assert_same_bits, devices, next_device, random_f32};

/// Standard normals without the special values: their sums mean something.
pub(crate) fn finite(count: usize, seed: u64) -> Vec<f32> {
    random_f32(count, seed)
        .into_iter()
        .map(|x| if x.abs() < 100.0 { x } else { 0.25 })
        .collect()
}

pub(crate) fn cpu<T: ddp_kernels::Element>(data: &[T], shape: &[usize]) -> Tensor {
    Tensor::from_slice(data, shape, Device::Cpu).unwrap()
}

/// A copy of `x` on `device` that begins `skipped` elements into a buffer: at 1 no access of 16
/// bytes is possible.
pub(crate) fn upload(x: &Tensor, device: Device, skipped: usize) -> Tensor {
    let buffer = Tensor::full(&[x.count() + skipped], 77.0, x.dtype(), device).unwrap();
    let part = buffer
        .slice(skipped..skipped + x.count())
        .unwrap()
        .reshape(x.shape().dims())
        .unwrap();
    part.copy_from(&x.to(device).unwrap()).unwrap();
    part
}

/// Tables of every kind over a buffer of `count` elements: whole, with gaps, empty chunks, odd
/// offsets, many small ones.
pub(crate) fn tables(count: usize) -> Vec<ChunkTable> {
    let whole = [
        ChunkTable::whole(count),
        ChunkTable::whole(count).without_decay(),
    ];
    let in_parts = |parts: &[(usize, usize)]| {
        let mut offset = 0;
        let chunk = |&(gap, len): &(usize, usize)| {
            let start = (offset + gap).min(count);
            let chunk = Chunk {
                offset: start,
                len: len.min(count - start),
                decay: len % 2 == 1,
            };
            offset = chunk.range().end;
            chunk
        };
        ChunkTable::new(parts.iter().map(chunk).collect()).unwrap()
    };
    let some = in_parts(&[
        (0, 0),
        (4, 1),
        (3, 1024),
        (8, 2049),
        (0, 0),
        (0, 0),
        (1, 333),
        (0, 100_000),
        (0, 0),
    ]);
    let many = in_parts(&vec![(3, 37); 200]);
    let aligned = in_parts(&[(4, 1024), (64, 4096), (0, 1000)]);
    whole
        .into_iter()
        .chain([some, many, aligned, ChunkTable::new(Vec::new()).unwrap()])
        .collect()
}

#[test]
fn sum_and_mean_have_the_cpu_s_bits_for_every_size_and_alignment() {
    // Around a block of elements and the most that one block of threads adds, and runs of several
    // blocks.
    let block = constant!("sum.cu", SUM_BLOCK);
    let most = block * constant!("sum.cu", RUNS_MAX);
    let sizes = around(block)
        .into_iter()
        .chain([most, most + 1, 3 * most - 86_431]);
    for size in SIZES.into_iter().chain(sizes) {
        let x = cpu(&finite(size, 1), &[size]);
        let expected = [ops::sum(&x).unwrap(), ops::mean(&x).unwrap()];
        // Beyond f32 on the way, but not in f64.
        let special = random_f32(size, 2)
            .into_iter()
            .enumerate()
            .map(|(index, x)| match x {
                x if x.abs() < 1e9 => x,
                _ => [f32::MAX, f32::MIN][index % 2],
            });
        let special: Vec<f32> = special.collect();
        let special = cpu(&special, &[size]);
        if let Some(device) = next_device() {
            for skipped in [0, 1] {
                let there = upload(&x, device, skipped);
                let what = format!("of {size} from element {skipped} on");
                assert_same_bits(
                    &ops::sum(&there).unwrap(),
                    &expected[0],
                    &format!("sum {what}"),
                );
                assert_same_bits(
                    &ops::mean(&there).unwrap(),
                    &expected[1],
                    &format!("mean {what}"),
                );
                let there = upload(&special, device, skipped);
                assert_same_bits(
                    &ops::sum(&there).unwrap(),
                    &ops::sum(&special).unwrap(),
                    &format!("special {what}"),
                );
            }
        }
    }
}

#[test]
fn grad_norm_partials_have_the_cpu_s_bits_for_every_table() {
    for size in SIZES {
        let x = cpu(&finite(size, 3), &[size]);
        for (index, chunks) in tables(size).into_iter().enumerate() {
            let partials = Tensor::full(&[chunks.quanta()], 9.0, DType::F64, Device::Cpu).unwrap();
            ops::grad_norm_partials(&partials, &x, &chunks).unwrap();
            for (device, skipped) in next_device()
                .into_iter()
                .flat_map(|device| [(device, 0), (device, 1)])
            {
                let got = Tensor::full(&[chunks.quanta()], 9.0, DType::F64, device).unwrap();
                ops::grad_norm_partials(&got, &upload(&x, device, skipped), &chunks).unwrap();
                assert_same_bits(
                    &got,
                    &partials,
                    &format!("{size} elements, table {index}, from element {skipped} on"),
                );
            }
        }
    }
}

#[test]
fn digests_have_the_cpu_s_bits_for_every_table() {
    for size in SIZES {
        let x = cpu(&finite(size, 4), &[size]);
        for (index, chunks) in tables(size).into_iter().enumerate() {
            let count = ops::DIGEST * chunks.quanta();
            let digests = Tensor::full(&[count], 9.0, DType::I64, Device::Cpu).unwrap();
            ops::digest_quanta(&digests, &x, &chunks).unwrap();
            for (device, skipped) in next_device()
                .into_iter()
                .flat_map(|device| [(device, 0), (device, 1)])
            {
                let got = Tensor::full(&[count], 9.0, DType::I64, device).unwrap();
                ops::digest_quanta(&got, &upload(&x, device, skipped), &chunks).unwrap();
                assert_eq!(
                    got.to_vec::<i64>().unwrap(),
                    digests.to_vec::<i64>().unwrap(),
                    "{size} elements, table {index}, from element {skipped} on"
                );
            }
        }
    }
}

#[test]
fn clip_scale_has_the_cpu_s_bits_for_every_count_limit_and_divisor() {
    // Around a warp and the tile of partials that the kernel takes at a time.
    let tile = constant!("grad_norm.cu", TILE);
    for count in [0, 31, 33, 1000].into_iter().chain(around(tile)) {
        let partials: Vec<f64> = finite(count, 4)
            .iter()
            .map(|&x| f64::from(x) * f64::from(x) + 1e-9)
            .collect();
        for special in [None, Some(f64::NAN), Some(f64::INFINITY)] {
            let mut partials = partials.clone();
            if let (Some(special), Some(last)) = (special, partials.last_mut()) {
                *last = special;
            }
            let partials = cpu(&partials, &[count]);
            for (max_norm, divisor) in [
                (0.0, 2f32),
                (1.0, 3.0),
                (1e9, 0.5),
                (1.0, 0.0),
                (0.5, f32::NAN),
            ] {
                let (one, first) = (cpu(&[divisor], &[1]), cpu(&[divisor, 7.0], &[2]));
                for divisor in [None, Some(&one), Some(&first)] {
                    let expected = cpu(&[9f32; 2], &[2]);
                    ops::clip_scale(&expected, Some(&partials), max_norm, divisor).unwrap();
                    if let Some(device) = next_device() {
                        let got = Tensor::zeros(&[2], DType::F32, device).unwrap();
                        let divisor = divisor.map(|divisor| divisor.to(device).unwrap());
                        let partials = partials.to(device).unwrap();
                        ops::clip_scale(&got, Some(&partials), max_norm, divisor.as_ref()).unwrap();
                        let what = format!(
                            "{count} partials, {special:?}, at most {max_norm}, {divisor:?}"
                        );
                        assert_same_bits(&got, &expected, &what);
                    }
                }
            }
        }
    }
    for device in devices() {
        let (got, divisor) = (
            Tensor::zeros(&[2], DType::F32, device).unwrap(),
            cpu(&[4f32], &[1]).to(device).unwrap(),
        );
        ops::clip_scale(&got, None, 0.0, Some(&divisor)).unwrap();
        assert_eq!(got.to_vec::<f32>().unwrap(), [0.25, 0.0]);
    }
}

#[test]
fn the_flag_keeps_the_first_bad_step_wherever_the_bad_element_is() {
    for device in devices() {
        let number = |value: i64| Tensor::from_slice(&[value], &[1], device).unwrap();
        for (size, skipped) in SIZES
            .into_iter()
            .flat_map(|size| [(size, 0), (size, 1), (size, 3)])
        {
            let x = finite(size, 5);
            let flag = number(0);
            ops::mark_nonfinite(
                &flag,
                &upload(&cpu(&x, &[size]), device, skipped),
                &number(1),
            )
            .unwrap();
            assert_eq!(
                flag.item().unwrap(),
                0.0,
                "{size} finite elements from {skipped} on"
            );
            let places = [
                0,
                1,
                3,
                size / 2,
                size.saturating_sub(2),
                size.saturating_sub(1),
            ];
            for (place, bad) in places
                .into_iter()
                .zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY].repeat(2))
            {
                let mut x = x.clone();
                let Some(element) = x.get_mut(place) else {
                    continue;
                };
                *element = bad;
                let (x, flag) = (upload(&cpu(&x, &[size]), device, skipped), number(0));
                ops::mark_nonfinite(&flag, &x, &number(7)).unwrap();
                ops::mark_nonfinite(&flag, &x, &number(8)).unwrap();
                assert_eq!(
                    flag.item().unwrap(),
                    7.0,
                    "{bad} at {place} of {size} from {skipped} on"
                );
            }
        }
        let flag = number(0);
        let largest = cpu(&[f32::MAX, f32::MIN, -0.0, 1e-45], &[2, 2])
            .to(device)
            .unwrap();
        ops::mark_nonfinite(&flag, &largest, &number(1)).unwrap();
        assert_eq!(flag.item().unwrap(), 0.0);
    }
}

#[test]
fn a_step_is_decided_as_on_the_cpu() {
    for (before, stats, squares) in [
        ([0i64, 0, 4], [1f32, 2.0, 3.0, 4.0], 1f64),
        ([0, 0, 4], [1.0, 2.0, f32::NAN, 4.0], 1.0),
        ([0, 0, 4], [f32::INFINITY, 2.0, 3.0, 4.0], 1.0),
        ([0, 0, 4], [1.0, 2.0, 3.0, 4.0], f64::NAN),
        ([0, 0, 4], [1.0, 2.0, 3.0, 4.0], 1e300),
        ([0, 4, 4], [1.0, 2.0, 3.0, f32::NAN], 1.0),
        ([3, 4, 4], [1.0, 2.0, 3.0, f32::NAN], 1.0),
    ] {
        let decide = |device: Device| {
            let here = |tensor: Tensor| tensor.to(device).unwrap();
            // The first of its own bad steps stays.
            let (flags, own) = (here(cpu(&before, &[3])), here(cpu(&before[..1], &[1])));
            let (stats, step) = (here(cpu(&stats, &[4])), here(cpu(&[5i64], &[1])));
            let out = Tensor::zeros(&[2], DType::F32, device).unwrap();
            let marks = StepMarks {
                flags: &flags,
                own: Some(&own),
                stats: &stats,
                step: &step,
                stop: None,
                stopped: None,
            };
            let (squares, divisor) = (here(cpu(&[squares], &[1])), stats.slice(1..2).unwrap());
            ops::decide_step(&out, Some(&squares), 1.0, Some(&divisor), Some(marks)).unwrap();
            [out, flags, own]
        };
        let expected = decide(Device::Cpu);
        for device in devices() {
            for (got, expected) in decide(device).iter().zip(&expected) {
                assert_same_bits(got, expected, &format!("{before:?}, {stats:?}, {squares}"));
            }
        }
    }
}

#[test]
fn after_the_stop_word_no_step_is_complete_until_the_flag_is_reset() {
    for device in devices() {
        let stop = DeviceProgress::new(device, 1).unwrap().board().stop_word();
        let here = |numbers: &[i64]| cpu(numbers, &[numbers.len()]).to(device).unwrap();
        let out = Tensor::zeros(&[2], DType::F32, device).unwrap();
        let stats = cpu(&[1f32; 4], &[4]).to(device).unwrap();
        let decide = |before: [i64; 3]| {
            let (flags, step) = (here(&before), here(&[5]));
            let marks = StepMarks {
                flags: &flags,
                own: None,
                stats: &stats,
                step: &step,
                stop: Some(stop),
                stopped: None,
            };
            ops::decide_step(&out, None, 0.0, None, Some(marks)).unwrap();
            flags.to_vec::<i64>().unwrap()
        };
        assert_eq!(decide([0, 0, 4]), [0, 0, 5]);
        // What was stopped stays so, also if the word is another one by then.
        assert_eq!(decide([-1, 0, 4]), [-1, 0, 4]);
        stop.set();
        assert_eq!(decide([0, 0, 4]), [-1, 0, 4]);
        assert_eq!(decide([3, 0, 4]), [3, 0, 4]);
    }
}

#[test]
fn a_rank_that_was_stopped_says_so() {
    for device in devices() {
        let stop = DeviceProgress::new(device, 1).unwrap().board().stop_word();
        let there = |tensor: Tensor| tensor.to(device).unwrap();
        let vote = |flag: i64| {
            let (flags, vote) = (cpu(&[flag, 0, 4], &[3]), cpu(&[9f32], &[1]));
            let (flags, vote) = (there(flags), there(vote));
            ops::vote_stopped(&vote, &flags, Some(stop)).unwrap();
            vote.to_vec::<f32>().unwrap()[0]
        };
        assert_eq!([0, 7, -1].map(vote), [0.0, 0.0, 1.0]);
        stop.set();
        assert_eq!(vote(0), 1.0);
    }
}

#[test]
fn a_step_for_which_a_rank_is_not_ready_is_not_complete() {
    for device in devices().into_iter().chain([Device::Cpu]) {
        let here = |numbers: &[i64]| cpu(numbers, &[numbers.len()]).to(device).unwrap();
        let out = Tensor::zeros(&[2], DType::F32, device).unwrap();
        let stats = cpu(&[1f32; 4], &[4]).to(device).unwrap();
        for (before, missing, after) in [
            ([0, 0, 4], 0f32, [0, 0, 5]),
            ([0, 0, 4], 2.0, [-1, 0, 4]),
            ([3, 0, 4], 1.0, [3, 0, 4]),
        ] {
            let (flags, step) = (here(&before), here(&[5]));
            let stopped = cpu(&[missing], &[1]).to(device).unwrap();
            let marks = StepMarks {
                flags: &flags,
                own: None,
                stats: &stats,
                step: &step,
                stop: None,
                stopped: Some(&stopped),
            };
            ops::decide_step(&out, None, 0.0, None, Some(marks)).unwrap();
            assert_eq!(flags.to_vec::<i64>().unwrap(), after, "{device}, {missing}");
        }
    }
}
