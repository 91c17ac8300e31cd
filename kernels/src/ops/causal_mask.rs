//! causal_mask: what is added to attention scores so that no token (row) sees a later one (column):
//! 0 on and below the diagonal, −∞ above it.

use crate::cuda::launch::args;
use crate::cuda::{Grid, Source};
use crate::error::Result;
use crate::ops::call::{Call, FLOATS_AND_BF16, with_float};
use crate::ops::float::Float;
use crate::{DType, Device, Tensor, threads};

static SOURCE: Source = Source::new("causal_mask.cu", include_str!("causal_mask.cu"));

/// The mask of T tokens, in a new tensor (T, T).
#[track_caller]
pub fn causal_mask(tokens: usize, dtype: DType, device: Device) -> Result<Tensor> {
    let out = Tensor::empty(&[tokens, tokens], dtype, device)?;
    causal_mask_into(&out)?;
    Ok(out)
}

/// `out` (T, T) becomes the mask of T tokens. On a GPU it may also be bf16.
#[track_caller]
pub fn causal_mask_into(out: &Tensor) -> Result<()> {
    let mut call = Call::new("causal_mask");
    let out = call.writes("out", out);
    let [tokens, _] = call.dims(out, "[tokens, tokens]")?;
    call.has_shape(out, &[tokens, tokens], "[tokens, tokens]")?;
    call.row_major(out)?;
    call.run(out, &FLOATS_AND_BF16, |placed| {
        let [mut out] = placed.enter([out])?;
        if let Some(gpu) = placed.launcher() {
            let grid = Grid::packs(out.count, out.dtype);
            return gpu.launch(
                &SOURCE,
                ("causal_mask", out.dtype),
                grid,
                args![out, tokens],
            );
        }
        with_float!(placed.dtype, T => write_rows::<T>(out.elements_mut(), tokens));
        Ok(())
    })
}

fn write_rows<T: Float>(out: &mut [T], tokens: usize) {
    if tokens == 0 {
        return;
    }
    threads::split_mut(out, tokens, |first, out| {
        for (row, out) in out.chunks_mut(tokens).enumerate() {
            let (seen, after) = out.split_at_mut(first / tokens + row + 1);
            seen.fill(T::ZERO);
            after.fill(T::NEG_INFINITY);
        }
    });
}

#[cfg(test)]
mod tests;
