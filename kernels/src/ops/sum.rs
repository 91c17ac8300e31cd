//! sum and mean of all elements, accumulated in f64 and rounded once at the end.
//!
//! The order is fixed by the length alone, so the bits depend neither on the threads nor on the SIMD level. A block of
//! 1024 elements goes into 32 lanes (element i into lane i mod 32), which are added pairwise; runs of whole blocks, at
//! most 256 runs of equal length, add their blocks in order; and the runs are added in order.
//!
//! On a GPU a warp adds a block of elements. Up to 256 blocks a single thread block does it all; beyond, each run has
//! one, and the runs' sums take 2 KiB of scratch memory, which a captured graph cannot allocate.

use crate::cuda::{Grid, Launcher, Source};
use crate::error::Result;
use crate::ops::call::{Call, FLOATS, Lent, Placed};
use crate::ops::float::Float;
use crate::simd::multiversion;
use crate::storage::Origin;
use crate::threads::{self, PARALLEL_MIN};
use crate::{DType, Shape, Tensor};

static SOURCE: Source = Source::new("sum.cu", include_str!("sum.cu"));

/// Elements added together in lanes.
const BLOCK: usize = 1024;
/// Four AVX-512 registers: as many independent additions as hide the latency of one.
const LANES: usize = 32;
/// The most runs, whose sums lie on the stack.
const RUNS_MAX: usize = 256;

/// The sum of all elements, as a tensor without dimensions. 0 if there are none.
#[track_caller]
pub fn sum(x: &Tensor) -> Result<Tensor> {
    let out = x.new_empty(&[])?;
    sum_into(&out, x)?;
    Ok(out)
}

/// `out` [] `= sum(x)`. Allocates nothing.
#[track_caller]
pub fn sum_into(out: &Tensor, x: &Tensor) -> Result<()> {
    reduce_into("sum", out, x)
}

/// The mean of all elements, as a tensor without dimensions. NaN if there are none, as in PyTorch.
#[track_caller]
pub fn mean(x: &Tensor) -> Result<Tensor> {
    let out = x.new_empty(&[])?;
    mean_into(&out, x)?;
    Ok(out)
}

/// `out` [] `= mean(x)`. Allocates nothing.
#[track_caller]
pub fn mean_into(out: &Tensor, x: &Tensor) -> Result<()> {
    reduce_into("mean", out, x)
}

#[track_caller]
fn reduce_into(op: &'static str, out: &Tensor, x: &Tensor) -> Result<()> {
    let mut call = Call::new(op);
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    call.has_shape(out, &[], "one number")?;
    call.same_dtype(out, x)?;
    call.row_major(x)?;
    let divisor = if op == "mean" { call.tensor(x).count() as f64 } else { 1.0 };
    let placed = call.place(x, &FLOATS)?;
    {
        let [mut out, lent_x] = placed.enter([out, x])?;
        if let Some(gpu) = placed.launcher()? {
            launch(&gpu, &placed, [&out, &lent_x], placed.tensor(x).count(), divisor)?;
        } else if placed.tensor(x).dtype() == DType::F32 {
            out.elements_mut()[0] = (total::<f32>(lent_x.elements()) / divisor) as f32;
        } else {
            out.elements_mut()[0] = total::<f64>(lent_x.elements()) / divisor;
        }
    }
    placed.finish()
}

fn launch(gpu: &Launcher, placed: &Placed<'_>, [out, x]: [&Lent<'_>; 2], count: usize, divisor: f64) -> Result<()> {
    /// What `sum.cu` allows.
    const ONE_RUN_WARPS_MAX: usize = 32;
    const RUN_THREADS: u32 = 512;
    let blocks = count.div_ceil(BLOCK);
    if blocks <= RUNS_MAX {
        // Every run is one block, so the runs in order are the blocks in order.
        let threads = 32 * blocks.clamp(1, ONE_RUN_WARPS_MAX) as u32;
        let kernel = gpu.kernel(&SOURCE, "sum_f32")?.output(out).reads(x).count(count).f64(divisor);
        return kernel.launch(Grid::blocks(1, threads));
    }
    let run_len = run_len(count);
    let runs = count.div_ceil(run_len);
    let shape = Shape::checked(gpu.op, &[runs], gpu.at)?;
    let sums = Tensor::allocate(shape, DType::F64, gpu.gpu.device(), Origin::Computed, gpu.op, gpu.at)?;
    let sums = placed.enter_new(&sums)?;
    let kernel = gpu.kernel(&SOURCE, "sum_runs_f32")?.output(&sums).reads(x).count(count).count(run_len);
    kernel.launch(Grid::blocks(runs, RUN_THREADS))?;
    let kernel = gpu.kernel(&SOURCE, "sum_of_runs_f32")?.output(out).output(&sums).u32(runs as u32).f64(divisor);
    kernel.launch(Grid::blocks(1, RUNS_MAX as u32))
}

/// Elements of a run, a multiple of BLOCK; 0 if there are no elements.
fn run_len(count: usize) -> usize {
    count.div_ceil(BLOCK).div_ceil(RUNS_MAX) * BLOCK
}

/// The sum in the order that this file's head describes.
fn total<T: Float>(x: &[T]) -> f64 {
    let run_len = run_len(x.len());
    if run_len == 0 {
        return 0.0;
    }
    let runs = x.len().div_ceil(run_len);
    let mut sums = [0f64; RUNS_MAX];
    let pieces = if x.len() < PARALLEL_MIN { 1 } else { threads::count().min(runs) };
    threads::split_mut_in(&mut sums[..runs], 1, pieces, |first, sums| {
        for (run, sum) in sums.iter_mut().enumerate() {
            let start = (first + run) * run_len;
            *sum = run_total(&x[start..x.len().min(start + run_len)]);
        }
    });
    sums[..runs].iter().sum()
}

multiversion! {
    fn run_total[T: Float](x: &[T]) -> f64 {
        let mut sum = 0.0;
        for block in x.chunks(BLOCK) {
            let mut lanes = [0f64; LANES];
            let (whole, rest) = block.as_chunks::<LANES>();
            for elements in whole {
                for (lane, element) in lanes.iter_mut().zip(elements) {
                    *lane += element.widened();
                }
            }
            for (lane, element) in lanes.iter_mut().zip(rest) {
                *lane += element.widened();
            }
            sum += pairwise(lanes);
        }
        sum
    }
}

/// The lanes' sum: the upper half onto the lower, until one is left. Kept out of line, because LLVM would otherwise
/// break the lanes of the loop before it into pieces that suit these additions (twice the time).
#[inline(never)]
fn pairwise(mut lanes: [f64; LANES]) -> f64 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;
    use crate::ops::testing::{SIZES, cpu, cpu_of, random_f32};

    fn sum_of(x: &[f32]) -> f32 {
        sum(&cpu(x, &[x.len()])).unwrap().to_vec::<f32>().unwrap()[0]
    }

    /// The documented order, written the slow way.
    fn in_documented_order(x: &[f32]) -> f64 {
        let blocks: Vec<f64> = x
            .chunks(BLOCK)
            .map(|block| {
                let mut lanes: Vec<f64> = (0..LANES)
                    .map(|lane| block.iter().skip(lane).step_by(LANES).map(|&x| f64::from(x)).sum())
                    .collect();
                while lanes.len() > 1 {
                    let (low, high) = lanes.split_at(lanes.len() / 2);
                    lanes = low.iter().zip(high).map(|(low, high)| low + high).collect();
                }
                lanes[0]
            })
            .collect();
        let runs = blocks.chunks(blocks.len().div_ceil(RUNS_MAX).max(1)).map(|run| run.iter().sum::<f64>());
        runs.fold(0.0, |sum, run| sum + run)
    }

    #[test]
    fn the_bits_are_those_of_the_documented_order_for_every_size_and_any_threads() {
        let _alone = crate::ops::testing::alone_with_the_pool();
        for size in SIZES.into_iter().chain([BLOCK * RUNS_MAX - 1, BLOCK * RUNS_MAX + 1, 1_000_003]) {
            let x: Vec<f64> = random_f32(size, 61).iter().map(|&x| f64::from(x) + 1e-9).collect();
            let x32: Vec<f32> = x.iter().map(|&x| x as f32).collect();
            assert_eq!(total(&x32).to_bits(), in_documented_order(&x32).to_bits(), "{size} elements");
        }
    }

    #[test]
    fn sum_and_mean_are_rounded_once() {
        for size in SIZES.into_iter().filter(|&size| size > 0) {
            let x = random_f32(size, 62);
            // Whole numbers of 2⁻²⁴ below 2³: sums below 2⁵³ of them are exact in i64 and in f64.
            let quanta: Vec<i64> = x.iter().map(|&x| (f64::from(x) * f64::from(1 << 24)) as i64).collect();
            let x: Vec<f32> = quanta.iter().map(|&quanta| quanta as f32 / (1 << 24) as f32).collect();
            let exact: i64 = x.iter().map(|&x| (f64::from(x) * f64::from(1 << 24)) as i64).sum();
            let exact = exact as f64 / f64::from(1 << 24);
            assert_eq!(sum_of(&x), exact as f32);
            let got = mean(&cpu(&x, &[size])).unwrap();
            assert_eq!((got.shape().rank(), got.to_vec::<f32>().unwrap()), (0, vec![(exact / size as f64) as f32]));
            let wide = cpu(&x, &[size]).to_dtype(DType::F64).unwrap();
            assert_eq!(sum(&wide).unwrap().to_vec::<f64>().unwrap(), [exact]);
        }
    }

    #[test]
    fn the_sum_of_nothing_is_zero_its_mean_nan_and_infinity_and_nan_pass_through() {
        let nothing = Tensor::zeros(&[0, 3], DType::F32, Device::Cpu).unwrap();
        assert_eq!(sum(&nothing).unwrap().item().unwrap(), 0.0);
        assert!(mean(&nothing).unwrap().item().unwrap().is_nan());
        assert_eq!(sum_of(&[1.0, f32::INFINITY]), f32::INFINITY);
        assert!(sum_of(&[f32::INFINITY, f32::NEG_INFINITY]).is_nan() && sum_of(&[f32::NAN]).is_nan());
        // Would be infinite on the way in f32.
        assert_eq!(sum_of(&[f32::MAX, f32::MAX, -f32::MAX]), f32::MAX);
    }

    #[test]
    fn operands_that_do_not_fit_are_named() {
        let x = cpu(&[1.0, 2.0], &[2]);
        let error = sum_into(&x, &x).unwrap_err().to_string();
        assert!(error.contains("sum: out f32[2] on cpu: expected shape [], that is one number"), "{error}");
        let error = mean_into(&cpu_of(&[0.0f64], &[]), &x).unwrap_err().to_string();
        assert!(error.contains("mean: out f64[] on cpu: expected dtype f32, as x has"), "{error}");
        let error = sum(&cpu_of(&[1i64], &[1])).unwrap_err().to_string();
        assert!(error.contains("sum: there is no version for i64 on cpu"), "{error}");
        let one = cpu(&[1.0], &[]);
        let error = sum_into(&one, &one).unwrap_err().to_string();
        assert!(error.contains("sum: out f32[] on cpu and x f32[] on cpu share memory"), "{error}");
    }
}
