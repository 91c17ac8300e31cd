//! The norm of all gradients and the scale that clips them, without leaving the device: `grad_norm_partials` sums
//! squares by quantum, `clip_scale` makes of them the number that the optimizers multiply gradients by.
//!
//! Squares are summed in f64, in an order that depends on the chunk table alone. So ranks that each hold the partials
//! of their own slices (ZeRO-1) get, once these are put in order, the norm that one rank alone would.

use crate::cuda::launch::{BLOCK_THREADS, Kernel};
use crate::cuda::{Grid, Source};
use crate::error::Result;
use crate::ops::call::{Call, FLOATS, Lent, Slot};
use crate::ops::chunks::{self, ChunkTable};
use crate::ops::float::{Float, LANES, lane_sum, tree_sum};
use crate::simd::multiversion;
use crate::{DType, Tensor};

static SOURCE: Source = Source::new("grad_norm.cu", include_str!("grad_norm.cu"));
/// Threads of the one block that adds the partials.
const CLIP_THREADS: u32 = 512;
/// Quanta of a block that has a warp for each.
const QUANTA_PER_BLOCK: usize = BLOCK_THREADS as usize / 32;

multiversion! {
    /// Σ x². The square of an f32 is exact in f64, so whether it is fused with the sum makes no difference.
    fn sum_of_squares[T: Float](x: &[T]) -> f64 {
        let mut lanes = [0.0; LANES];
        let (blocks, tail) = x.as_chunks::<LANES>();
        for block in blocks {
            for (lane, &x) in lanes.iter_mut().zip(block) {
                *lane += x.widened() * x.widened();
            }
        }
        for (lane, &x) in lanes.iter_mut().zip(tail) {
            *lane += x.widened() * x.widened();
        }
        tree_sum(lanes)
    }
}

multiversion! {
    fn sum[](x: &[f64]) -> f64 {
        lane_sum(x)
    }
}

/// The sum of squares of every quantum of `chunks`, into `partials`, f64\[chunks.quanta()\].
#[track_caller]
pub fn grad_norm_partials(partials: &Tensor, grads: &Tensor, chunks: &ChunkTable) -> Result<()> {
    let mut call = Call::new("grad_norm_partials");
    let partials = call.writes("partials", partials);
    let grads = call.reads("grads", grads);
    chunks.check_fits(&call, grads)?;
    call.has_shape(partials, &[chunks.quanta()], "one sum for each quantum of the chunk table")?;
    call.has_dtype(partials, &[DType::F64])?;
    let placed = call.place(grads, &FLOATS)?;
    {
        let [mut partials, lent_grads] = placed.enter([partials, grads])?;
        if let Some(gpu) = placed.launcher()? {
            let quanta = chunks.quanta();
            if quanta > 0 {
                let kernel = gpu.kernel(&chunks::SOURCE, "grad_norm_partials_f32")?;
                let kernel = kernel.output(&partials).reads(&lent_grads).count(quanta);
                chunks.launch(&gpu, kernel, Grid::blocks(quanta.div_ceil(QUANTA_PER_BLOCK), BLOCK_THREADS))?;
            }
        } else if placed.tensor(grads).dtype() == DType::F32 {
            partials_of::<f32>(partials.elements_mut(), lent_grads.elements(), chunks);
        } else {
            partials_of::<f64>(partials.elements_mut(), lent_grads.elements(), chunks);
        }
    }
    placed.finish()
}

fn partials_of<T: Float>(partials: &mut [f64], grads: &[T], chunks: &ChunkTable) {
    chunks.each_quantum(partials, |piece| sum_of_squares(&grads[piece.range()]));
}

/// `out = [scale, norm]`: what the optimizers multiply gradients by, and the norm of the gradients. Gradients are sums;
/// `divisor`, one float on the same device, is what makes means of them (1 without it; a divisor of 0, no row at all,
/// makes a scale of 0).
///
/// `norm = √(Σ partials) / divisor` (0 without partials, when nobody asks for it), and
/// `scale = min(1, max_norm / (norm + 1e-6)) / divisor`, as `torch.nn.utils.clip_grad_norm_` has it.
/// A `max_norm` of 0 clips nothing. A norm that is not finite makes a scale of 0 or NaN: see `mark_nonfinite`.
#[track_caller]
pub fn clip_scale(out: &Tensor, partials: Option<&Tensor>, max_norm: f64, divisor: Option<&Tensor>) -> Result<()> {
    let mut call = Call::new("clip_scale");
    let out = call.writes("out", out);
    let partials = call.reads_some("partials", partials);
    let divisor = call.reads_some("divisor", divisor);
    call.has_shape(out, &[2], "scale and norm")?;
    if !(0.0..f64::INFINITY).contains(&max_norm) {
        return Err(call.bad_value("max_norm", "0 (no clipping) or more", max_norm.to_string()));
    }
    match partials {
        Some(partials) => {
            call.dims::<1>(partials, "what grad_norm_partials wrote")?;
            call.has_dtype(partials, &[DType::F64])?;
        }
        None if max_norm > 0.0 => {
            return Err(call.bad_value("max_norm", "0, since there are no partials to clip by", max_norm.to_string()));
        }
        None => {}
    }
    check_scale(&call, divisor)?;
    let placed = call.place(out, &FLOATS)?;
    {
        let [mut lent_out] = placed.enter([out])?;
        let (lent_partials, lent_divisor) = (placed.enter_some(partials)?, placed.enter_some(divisor)?);
        let divisor = divisor.zip(lent_divisor.as_ref()).map(|(slot, lent)| (lent, placed.tensor(slot).dtype()));
        if let Some(gpu) = placed.launcher()? {
            let count = partials.map_or(0, |partials| placed.tensor(partials).count());
            let kernel = gpu.kernel(&SOURCE, "clip_scale_f32")?.output(&lent_out).maybe(lent_partials.as_ref());
            give_scale(kernel.count(count).f64(max_norm), divisor).launch(Grid::blocks(1, CLIP_THREADS))?;
        } else {
            let sum = lent_partials.map_or(0.0, |partials| sum(partials.elements()));
            let [scale, norm] = clipped(sum, max_norm, read_scale(divisor));
            match placed.tensor(out).dtype() {
                DType::F32 => lent_out.elements_mut().copy_from_slice(&[scale as f32, norm as f32]),
                _ => lent_out.elements_mut().copy_from_slice(&[scale, norm]),
            }
        }
    }
    placed.finish()
}

/// Scale and norm, from the sum of squares.
fn clipped(sum: f64, max_norm: f64, divisor: f64) -> [f64; 2] {
    let mean = if divisor == 0.0 { 0.0 } else { 1.0 / divisor };
    let norm = mean * sum.sqrt();
    // Not min(): a NaN must stay.
    let limit = max_norm / (norm + 1e-6);
    [if max_norm == 0.0 || limit > 1.0 { mean } else { mean * limit }, norm]
}

/// What an optimizer asks of a `gradient_scale`: at least one float, of which it reads the first.
pub(super) fn check_scale(call: &Call<'_>, scale: Option<Slot>) -> Result<()> {
    let Some(scale) = scale else { return Ok(()) };
    call.has_dtype(scale, &[DType::F32, DType::F64])?;
    let [count] = call.dims(scale, "of which the first element multiplies every gradient")?;
    if count == 0 {
        return Err(call.misfit(scale, "at least one element", "Give it what clip_scale wrote, or None."));
    }
    Ok(())
}

/// The scale in such a tensor, 1 if there is none.
pub(super) fn read_scale<T: Float>(scale: Option<(&Lent<'_>, DType)>) -> T {
    match scale {
        None => T::ONE,
        Some((lent, DType::F32)) => T::from_f64(f64::from(lent.elements::<f32>()[0])),
        Some((lent, _)) => T::from_f64(lent.elements::<f64>()[0]),
    }
}

/// Such a tensor as kernels take it: where it lies, and whether it is f64.
pub(super) fn give_scale<'a>(kernel: Kernel<'a>, scale: Option<(&Lent<'_>, DType)>) -> Kernel<'a> {
    let is_f64 = scale.is_some_and(|(_, dtype)| dtype == DType::F64);
    kernel.maybe(scale.map(|(lent, _)| lent)).u32(u32::from(is_f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::chunks::{Chunk, QUANTUM};
    use crate::ops::testing::{SIZES, cpu, cpu_of, random_f32};
    use crate::threads;

    fn partials(grads: &Tensor, chunks: &ChunkTable) -> Vec<f64> {
        let out = cpu_of(&vec![-1.0f64; chunks.quanta()], &[chunks.quanta()]);
        grad_norm_partials(&out, grads, chunks).unwrap();
        out.to_vec().unwrap()
    }

    #[test]
    fn partials_are_the_sums_of_squares_of_each_quantum_for_any_number_of_threads() {
        let _alone = crate::ops::testing::alone_with_the_pool();
        for size in SIZES {
            let x = random_f32(size, 1);
            let chunks = ChunkTable::whole(size, true);
            let square_sum = |piece: &[f32]| piece.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
            let want: Vec<f64> = x.chunks(QUANTUM).map(square_sum).collect();
            threads::set_count(1).unwrap();
            let got = partials(&cpu(&x, &[size]), &chunks);
            for (got, want) in got.iter().zip(&want) {
                // Two orders of summing 1024 positive numbers: at most 1024 roundings.
                assert!((got - want).abs() <= 1024.0 * f64::EPSILON * want, "{got} {want}");
            }
            for count in [2, 3] {
                threads::set_count(count).unwrap();
                assert_eq!(partials(&cpu(&x, &[size]), &chunks), got);
            }
        }
    }

    #[test]
    fn slices_of_two_ranks_in_order_give_the_norm_of_one() {
        let x = cpu(&random_f32(10 * QUANTUM, 2), &[10 * QUANTUM]);
        let whole = partials(&x, &ChunkTable::whole(10 * QUANTUM, true));
        let chunk = |offset: usize, len: usize| Chunk { offset: offset * QUANTUM, len: len * QUANTUM, decay: true };
        let ranks = [vec![chunk(0, 2), chunk(4, 3)], vec![chunk(2, 2), chunk(7, 3)]];
        let [first, second] = ranks.map(|chunks| partials(&x, &ChunkTable::new(chunks).unwrap()));
        assert_eq!([&first[..2], &second[..2], &first[2..], &second[2..]].concat(), whole);
    }

    /// PyTorch 2.11: `q.grad = torch.tensor([3., 4., 12.]); torch.nn.utils.clip_grad_norm_([q], 2.0)` gives 13.0 and
    /// leaves `[0.4615384340286255, 0.615384578704834, 1.846153736114502]`.
    #[test]
    fn the_scale_clips_as_pytorch_does_and_never_enlarges() {
        let (out, parts) = (cpu(&[9.0; 2], &[2]), cpu_of(&[9.0f64, 16.0, 144.0], &[3]));
        let scale = |max_norm: f64, divisor: f32| -> [f32; 2] {
            clip_scale(&out, Some(&parts), max_norm, Some(&cpu(&[divisor], &[1]))).unwrap();
            out.to_vec::<f32>().unwrap().try_into().unwrap()
        };
        let [factor, norm] = scale(2.0, 1.0);
        assert_eq!(norm, 13.0);
        for (x, want) in [(3.0, 0.461_538_43), (4.0, 0.615_384_6), (12.0, 1.846_153_7)] {
            // PyTorch divides in f32: two roundings there, two here.
            assert!((x * factor - want).abs() <= 4.0 * f32::EPSILON * want, "{} {want}", x * factor);
        }
        assert_eq!(scale(0.0, 2.0), [0.5, 6.5]);
        assert_eq!(scale(100.0, 2.0), [0.5, 6.5]);
        assert_eq!(scale(1.0, 0.0), [0.0, 0.0], "no row: nothing to learn");
        let [factor, norm] = scale(1.0, 2.0);
        // max_norm + 1e-6 in the quotient, and the rounding to f32.
        assert!(norm == 6.5 && (factor - 0.5 / 6.5).abs() < 1e-7, "{factor}");
        clip_scale(&out, Some(&cpu_of(&[f64::NAN], &[1])), 1.0, None).unwrap();
        assert!(out.to_vec::<f32>().unwrap()[0].is_nan());
        clip_scale(&out, Some(&cpu_of::<f64>(&[], &[0])), 1.0, None).unwrap();
        assert_eq!(out.to_vec::<f32>().unwrap(), [1.0, 0.0]);
        clip_scale(&out, None, 0.0, Some(&cpu(&[4.0], &[1]))).unwrap();
        assert_eq!(out.to_vec::<f32>().unwrap(), [0.25, 0.0]);
    }

    #[test]
    fn arguments_that_do_not_fit_are_named() {
        let (out, parts) = (cpu(&[0.0; 2], &[2]), cpu_of(&[1.0f64], &[1]));
        for (max_norm, partials, wanted) in [
            (-1.0, Some(&parts), "max_norm: expected 0 (no clipping) or more, got -1"),
            (f64::NAN, Some(&parts), "max_norm: expected 0 (no clipping) or more, got NaN"),
            (1.0, None, "max_norm: expected 0, since there are no partials to clip by, got 1"),
        ] {
            let error = clip_scale(&out, partials, max_norm, None).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
        let error =
            grad_norm_partials(&parts, &cpu(&[0.0; 2000], &[2000]), &ChunkTable::whole(2000, true)).unwrap_err();
        assert!(error.to_string().contains("partials f64[1] on cpu: expected shape [2]"), "{error}");
        let error = grad_norm_partials(&parts, &out, &ChunkTable::whole(3, true)).unwrap_err().to_string();
        assert!(
            error.contains("grads f32[2] on cpu: expected at least 3 elements, where the last chunk ends"),
            "{error}"
        );
    }
}
