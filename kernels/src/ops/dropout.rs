//! dropout: `out = x / (1 − p)` for the elements that are kept, 0 for the others, which are each dropped with
//! probability p.
//!
//! Which those are is a pure function of the seed, the layer, the step, the sample (its row in the global batch) and
//! the column: not of the rank that holds the sample, nor of how the batch is cut. So any number of ranks drops the
//! same elements, and nothing need be kept for the backward pass: it is the same call, on dy.

use crate::cuda::{Grid, Launcher, Source};
use crate::error::Result;
use crate::ops::call::{Call, Lent, WIDE};
use crate::ops::cast::copy_on;
use crate::ops::elementwise::{kernel_for, kernel_names};
use crate::ops::float::Float;
use crate::ops::loops::GRAIN;
use crate::philox::philox4x32;
use crate::simd::multiversion;
use crate::{DType, Tensor, threads};

static SOURCE: Source = Source::new("dropout.cu", include_str!("dropout.cu"));

/// One past the largest global row.
const ROWS_MAX: u64 = 1 << 40;
/// One past the largest layer.
const LAYERS_MAX: u32 = 1 << 16;
/// The most columns: four to a counter of 32 bits.
const COLUMNS_MAX: usize = 1 << 34;

/// Which elements are dropped.
#[derive(Clone, Copy, Debug)]
pub struct DropoutKey<'a> {
    /// The run's seed. It may be the one of `Random`, whose counters these never meet.
    pub seed: u64,
    /// Which dropout of the model, below 2¹⁶: each has its own pattern.
    pub layer: u32,
    /// I64 `[2]`: the step, 0 to 2³² − 1, and the global row of `x`'s first row, where rows stay below 2⁴⁰. A tensor
    /// beside `x`, so that a recorded step can be run again with another position.
    pub position: &'a Tensor,
}

/// [`dropout_into`] with a new tensor for its output.
#[track_caller]
pub fn dropout(x: &Tensor, probability: f64, key: &DropoutKey<'_>) -> Result<Tensor> {
    let out = x.empty_like()?;
    dropout_into(&out, x, probability, key)?;
    Ok(out)
}

/// `out = x` with each element dropped with `probability` (0 up to but not 1; at 0 this copies) and the rest scaled to
/// keep the mean. A dropped element is 0 even where `x` is NaN. `x` is `[rows, …]`, one row a sample; `out` may be `x`
/// itself. The same call with dy for `x` is the derivative.
///
/// An element is kept when a uniform multiple of 2⁻²⁴ is at least `probability`.
///
/// A position out of range is an error on the CPU. On a GPU nobody reads it before the kernel does: there it makes all of `out`
/// NaN, which `mark_nonfinite` finds (but not at a `probability` of 0, which copies whatever the position is).
#[track_caller]
pub fn dropout_into(out: &Tensor, x: &Tensor, probability: f64, key: &DropoutKey<'_>) -> Result<()> {
    let mut call = Call::new("dropout");
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    let position = call.reads("position", key.position);
    call.may_be_in_place(x, out);
    call.elementwise(&[out, x])?;
    call.has_shape(position, &[2], "[the step, the global row of the first row]")?;
    call.has_dtype(position, &[DType::I64])?;
    let [rows, features @ ..] = call.tensor(x).shape().dims() else {
        return Err(call.misfit(x, "[rows, …], one row a sample", "Reshape it to [1] for a single number."));
    };
    let (rows, columns) = (*rows as u64, features.iter().product::<usize>());
    if !(0.0..1.0).contains(&probability) {
        return Err(call.bad_value("probability", "0 up to but not 1", probability.to_string()));
    }
    if key.layer >= LAYERS_MAX {
        return Err(call.bad_value("layer", format!("below {LAYERS_MAX}"), key.layer.to_string()));
    }
    if columns > COLUMNS_MAX {
        return Err(call.misfit(x, format!("at most {COLUMNS_MAX} columns"), "Reshape it to more rows."));
    }
    let pattern = Pattern {
        key: [key.seed as u32, (key.seed >> 32) as u32],
        step: 0,
        layer: key.layer,
        // An exact product; rounding up makes "at least the probability" a comparison of whole numbers.
        kept_from: (probability * f64::from(1 << 24)).ceil() as i32,
    };
    let scale = 1.0 / (1.0 - probability);
    let placed = call.place(x, &WIDE)?;
    {
        let [mut out, lent_x, position] = placed.enter([out, x, position])?;
        if let Some(gpu) = placed.launcher()? {
            if probability == 0.0 {
                copy_on(&gpu, &out, &lent_x, placed.tensor(x).bytes())?;
            } else {
                let dtype = placed.tensor(x).dtype();
                drop_on(&gpu, [&out, &lent_x, &position], dtype, [rows as usize, columns], pattern, scale as f32)?;
            }
            drop((out, lent_x, position));
            return placed.finish();
        }
        let &[step, first_row] = position.elements::<i64>() else { unreachable!("its shape is [2]") };
        let (Ok(step), Ok(first_row)) = (u32::try_from(step), u64::try_from(first_row)) else {
            return Err(placed.call.bad_value("position", POSITIONS, format!("[{step}, {first_row}]")));
        };
        if first_row > ROWS_MAX || first_row + rows > ROWS_MAX {
            return Err(placed.call.bad_value("position", POSITIONS, format!("[{step}, {first_row}] for {rows} rows")));
        }
        let pattern = Pattern { step, ..pattern };
        match placed.tensor(x).dtype() {
            _ if probability == 0.0 => {
                if let Some(x) = lent_x.unless_in_place::<u8>() {
                    threads::copy(out.elements_mut::<u8>(), x);
                }
            }
            DType::F32 => {
                let scale = scale as f32;
                drop_rows(out.elements_mut(), lent_x.unless_in_place(), columns, first_row, pattern, scale);
            }
            _ => drop_rows(out.elements_mut(), lent_x.unless_in_place(), columns, first_row, pattern, scale),
        }
    }
    placed.finish()
}

const POSITIONS: &str = "a step from 0 to 4294967295 and rows from 0 to 2⁴⁰ − 1";

/// What decides besides row and column.
#[derive(Clone, Copy)]
struct Pattern {
    key: [u32; 2],
    step: u32,
    layer: u32,
    /// An element is kept when its 24 random bits are at least this.
    kept_from: i32,
}

impl Pattern {
    /// The counter of columns 4 `block` to 4 `block` + 3. No two (step, layer, row, block) share one: each word below
    /// is theirs alone, the third holding 8 bits of the row, 16 of the layer, and a mark that the counters of
    /// `Random` with the same seed have only from its 2³¹-th draw on.
    #[inline(always)]
    fn counter(self, row: u64, block: u32) -> [u32; 4] {
        [block, row as u32, 1 << 31 | self.layer << 8 | (row >> 32) as u32, self.step]
    }
}

/// On a GPU; the kernel reads the step and the first row from `position`.
fn drop_on(
    gpu: &Launcher,
    [out, x, position]: [&Lent<'_>; 3],
    dtype: DType,
    [rows, columns]: [usize; 2],
    pattern: Pattern,
    scale: f32,
) -> Result<()> {
    // A thread takes the columns of 16 bytes.
    let groups = rows * columns.div_ceil(16 / dtype.bytes());
    if groups == 0 {
        return Ok(());
    }
    let kernel = gpu.kernel(&SOURCE, kernel_for(kernel_names!("dropout"), dtype))?;
    let kernel = kernel.output(out).input(x, out).reads(position).count(rows).count(columns).f32(scale);
    let kernel = kernel.i32(pattern.kept_from).u32(pattern.layer).u32(pattern.key[0]).u32(pattern.key[1]);
    kernel.launch(Grid::elements(groups))
}

fn drop_rows<T: Float>(out: &mut [T], x: Option<&[T]>, columns: usize, first_row: u64, pattern: Pattern, scale: T) {
    threads::split_mut(out, GRAIN, |first, out| {
        // One block more than a grain fills, since a part may begin inside a block.
        let mut bits = [[0; 4]; GRAIN / 4 + 1];
        let mut done = 0;
        while done < out.len() {
            let (row, column) = ((first + done) / columns, (first + done) % columns);
            let part_len = (columns - column).min(GRAIN).min(out.len() - done);
            let part = &mut out[done..done + part_len];
            if let Some(x) = x {
                part.copy_from_slice(&x[first + done..][..part_len]);
            }
            let skipped = column % 4;
            let blocks = &mut bits[..(skipped + part_len).div_ceil(4)];
            draw(pattern, first_row + row as u64, (column / 4) as u32, blocks);
            keep(part, &blocks.as_flattened()[skipped..skipped + part_len], pattern.kept_from, scale);
            done += part_len;
        }
    });
}

multiversion! {
    fn draw[](pattern: Pattern, row: u64, first_block: u32, out: &mut [[u32; 4]]) {
        for (index, out) in out.iter_mut().enumerate() {
            *out = philox4x32(pattern.counter(row, first_block.wrapping_add(index as u32)), pattern.key);
        }
    }
}

multiversion! {
    fn keep[T: Float](out: &mut [T], bits: &[u32], kept_from: i32, scale: T) {
        for (out, &bits) in out.iter_mut().zip(bits) {
            let kept = *out * scale;
            *out = if (bits >> 8) as i32 >= kept_from { kept } else { T::ZERO };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;
    use crate::ops::testing::{SIZES, cpu, cpu_of, random_f32};
    use proptest::prelude::*;

    /// Dropout of `x` at [step, first row], in f32.
    fn dropped(x: &[f32], shape: &[usize], probability: f64, seed: u64, layer: u32, position: [i64; 2]) -> Vec<f32> {
        let key = DropoutKey { seed, layer, position: &cpu_of(&position, &[2]) };
        dropout(&cpu(x, shape), probability, &key).unwrap().to_vec().unwrap()
    }

    proptest! {
        #[test]
        fn rows_drop_the_same_elements_wherever_the_batch_is_cut(
            rows in 1usize..12, columns in 1usize..3000, first_row in 0i64..(1 << 40) - 12, step in 0i64..1 << 32,
            cut in 0usize..12, end in 0usize..12, probability in 0.0f64..0.99, layer in 0u32..1 << 16, seed: u64,
        ) {
            let (end, cut) = (end.min(rows).max(cut.min(rows)), cut.min(rows));
            let x = random_f32(rows * columns, seed);
            let whole = dropped(&x, &[rows, columns], probability, seed, layer, [step, first_row]);
            let part = &x[cut * columns..end * columns];
            let position = [step, first_row + cut as i64];
            let part = dropped(part, &[end - cut, columns], probability, seed, layer, position);
            prop_assert_eq!(&whole[cut * columns..end * columns], part);
        }
    }

    #[test]
    fn every_element_follows_its_own_counter_for_every_size_apart_in_place_and_in_f64() {
        // 25,001 columns: parts of a thread begin inside rows and inside blocks of four.
        for (rows, columns) in SIZES.map(|size| (size, 1)).into_iter().chain([(3, 7), (5, 25_001)]) {
            let x = random_f32(rows * columns, 81);
            let (seed, layer, step, first_row, probability) = (0x1234_5678_9abc_def0_u64, 5, 77, (3 << 32) + 9, 0.3);
            let scale = (1.0 / (1.0 - probability)) as f32;
            let kept = |index: usize| {
                let (row, column) = (first_row + (index / columns) as u64, index % columns);
                let word = 1 << 31 | layer << 8 | (row >> 32) as u32;
                let block =
                    philox4x32([(column / 4) as u32, row as u32, word, step], [seed as u32, (seed >> 32) as u32]);
                f64::from(crate::philox::uniform(block[column % 4])) >= probability
            };
            let expected: Vec<f32> =
                x.iter().enumerate().map(|(index, x)| if kept(index) { x * scale } else { 0.0 }).collect();
            let position = cpu_of(&[i64::from(step), first_row as i64], &[2]);
            let key = DropoutKey { seed, layer, position: &position };
            let x = cpu(&x, &[rows, columns]);
            assert_eq!(dropout(&x, probability, &key).unwrap().to_vec::<f32>().unwrap(), expected);
            let wide = dropout(&x.to_dtype(DType::F64).unwrap(), probability, &key).unwrap().to_vec::<f64>().unwrap();
            for (wide, narrow) in wide.iter().zip(&expected) {
                // The f32 scale and product each round by 2⁻²⁴ relative at most, together by f32's EPSILON.
                assert!((wide - f64::from(*narrow)).abs() <= wide.abs() * f64::from(f32::EPSILON));
            }
            dropout_into(&x, &x, probability, &key).unwrap();
            assert_eq!(x.to_vec::<f32>().unwrap(), expected);
        }
    }

    #[test]
    fn the_share_dropped_is_the_probability_and_every_part_of_the_key_matters() {
        const COUNT: usize = 1_000_000;
        let ones = vec![1.0; COUNT];
        let pattern = |seed, layer, step| dropped(&ones, &[1000, 1000], 0.25, seed, layer, [step, 0]);
        let first = pattern(1, 0, 0);
        let zeros = |x: &[f32]| x.iter().filter(|&&x| x == 0.0).count() as f64 / COUNT as f64;
        // Five standard errors of a share near p of a million: 5 √(p (1 − p) / 10⁶), wrong once in 1.7 million seeds.
        let margin = |p: f64| 5.0 * (p * (1.0 - p) / COUNT as f64).sqrt();
        assert!((zeros(&first) - 0.25).abs() < margin(0.25), "{}", zeros(&first));
        for other in [pattern(2, 0, 0), pattern(1 << 32, 0, 0), pattern(1, 1, 0), pattern(1, 0, 1)] {
            // Independent patterns drop the same element with probability p².
            let both = first.iter().zip(&other).map(|(a, b)| a.max(*b)).collect::<Vec<_>>();
            assert!((zeros(&both) - 0.0625).abs() < margin(0.0625), "{}", zeros(&both));
        }
    }

    #[test]
    fn probability_zero_copies_and_a_dropped_nan_is_zero() {
        let x = [1.5, -0.0, f32::INFINITY, f32::NAN];
        let y = dropped(&x, &[2, 2], 0.0, 1, 1, [0, 0]);
        assert_eq!(y.iter().map(|y| y.to_bits()).collect::<Vec<_>>(), x.map(f32::to_bits));
        let y = dropped(&[f32::NAN; 64], &[64], 0.5, 1, 1, [0, 0]);
        assert!(y.iter().any(|y| y.is_nan()) && y.contains(&0.0));
    }

    #[test]
    fn what_is_out_of_range_is_named() {
        let x = cpu(&[1.0; 4], &[2, 2]);
        let refused = |probability: f64, layer: u32, position: [i64; 2]| {
            let key = DropoutKey { seed: 0, layer, position: &cpu_of(&position, &[2]) };
            dropout(&x, probability, &key).unwrap_err().to_string()
        };
        for (probability, shown) in [(1.0, "1"), (-0.1, "-0.1"), (f64::NAN, "NaN")] {
            let error = refused(probability, 0, [0, 0]);
            let wanted = format!("dropout: probability: expected 0 up to but not 1, got {shown}");
            assert!(error.contains(&wanted), "{error}");
        }
        let error = refused(0.5, 1 << 16, [0, 0]);
        assert!(error.contains("dropout: layer: expected below 65536, got 65536"), "{error}");
        for position in [[-1, 0], [1 << 32, 0], [0, -1], [0, (1 << 40) - 1], [0, i64::MAX]] {
            let error = refused(0.5, 0, position);
            assert!(error.contains("dropout: position: expected a step from 0 to 4294967295"), "{error}");
        }
        let short = Tensor::zeros(&[1], DType::I64, Device::Cpu).unwrap();
        let error = dropout(&x, 0.5, &DropoutKey { seed: 0, layer: 0, position: &short }).unwrap_err().to_string();
        assert!(error.contains("dropout: position i64[1] on cpu: expected shape [2]"), "{error}");
        let position = cpu_of(&[0i64, 0], &[2]);
        let key = DropoutKey { seed: 0, layer: 0, position: &position };
        let error = dropout(&cpu(&[1.0], &[]), 0.5, &key).unwrap_err().to_string();
        assert!(error.contains("dropout: x f32[] on cpu: expected [rows, …]"), "{error}");
        let error = dropout_into(&x.slice(0..1).unwrap(), &cpu(&[1.0; 3], &[1, 3]), 0.5, &key).unwrap_err().to_string();
        assert!(error.contains("dropout: x f32[1, 3] on cpu: expected shape [1, 2], as out has"), "{error}");
    }
}
