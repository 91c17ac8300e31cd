//! token_mean: the mean of the first tokens of each sequence, all of them or the first one alone,
//! and its gradient. A sum adds tokens in their order, so its bits are the same everywhere.
//!
//! Letters: B sequences, T tokens of a sequence, N of these in the mean, C columns.

use crate::error::Result;
use crate::launch::{Grid, Source, args};
use crate::ops::call::{Call, FLOATS_AND_BF16, Slot, with_float};
use crate::ops::float::Float;
use crate::simd::multiversion;
use crate::{Tensor, threads};

static SOURCE: Source = Source::new("token_mean.cu", include_str!("token_mean.cu"));

/// The mean `out` (B, C) of the first `tokens` tokens of each sequence of `x` (B, T, C).
#[track_caller]
pub fn token_mean_into(out: &Tensor, x: &Tensor, tokens: usize) -> Result<()> {
    let call = Call::new("token_mean");
    run(call, [("out", out), ("x", x)], tokens, false)
}

/// The gradient `dx` (B, T, C) from `dout` (B, C): 0 for tokens that are not in the mean.
#[track_caller]
pub fn token_mean_backward_into(dx: &Tensor, dout: &Tensor, tokens: usize) -> Result<()> {
    let call = Call::new("token_mean_backward");
    run(call, [("dx", dx), ("dout", dout)], tokens, true)
}

/// Both directions, whose kernels have the names of the operations.
fn run<'a>(
    mut call: Call<'a>,
    [to, from]: [(&'static str, &'a Tensor); 2],
    tokens: usize,
    is_backward: bool,
) -> Result<()> {
    let to = call.writes(to.0, to.1);
    let from = call.reads(from.0, from.1);
    let mean_and_all = if is_backward { [from, to] } else { [to, from] };
    let [time, columns] = check(&call, mean_and_all, tokens)?;
    call.run(from, &FLOATS_AND_BF16, |placed| {
        let [mut to, from] = placed.enter([to, from])?;
        if let Some(gpu) = placed.launcher() {
            let args = args![to, from, to.count, columns, time, tokens];
            // A token of the mean after the other, or the mean.
            let loads = if is_backward { 1 } else { tokens };
            let grid = Grid::elements(to.count).rounds_of(loads);
            return gpu.launch(&SOURCE, (placed.call.by.op, to.dtype), grid, args);
        }
        let (sizes, size) = ([time, columns, tokens], (time * columns).max(1));
        with_float!(placed.dtype, T => {
            let (to, from) = (to.elements_mut::<T>(), from.elements());
            match is_backward {
                false => threads::split_mut(to, columns.max(1), |first, out| {
                    forward(out, &from[first * time..], sizes);
                }),
                true => threads::split_mut(to, size, |first, dx| {
                    backward(dx, &from[first / time..], sizes);
                }),
            }
        });
        Ok(())
    })
}

/// Checks `mean` (B, C), `all` (B, T, C) and the number of tokens. Gives T and C.
fn check(call: &Call<'_>, [mean, all]: [Slot; 2], tokens: usize) -> Result<[usize; 2]> {
    let [sequences, time, columns] = call.dims::<3>(all, "[sequences, tokens, columns]")?;
    call.has_shape(mean, &[sequences, columns], "[sequences, columns]")?;
    call.same_dtype(mean, all)?;
    call.all_row_major()?;
    if !(1..=time).contains(&tokens) {
        let expected = format!("from 1 to {time}, all tokens of a sequence");
        return Err(call.value("tokens", expected, tokens));
    }
    Ok([time, columns])
}

multiversion! {
    fn forward[T: Float](out: &mut [T], x: &[T], sizes: [usize; 3]) {
        let [time, columns, tokens] = sizes;
        let count = T::from_f64(tokens as f64);
        let sequences = x.chunks_exact((time * columns).max(1));
        for (out, x) in out.chunks_exact_mut(columns.max(1)).zip(sequences) {
            out.copy_from_slice(&x[..columns]);
            for token in x.chunks_exact(columns).take(tokens).skip(1) {
                for (out, &x) in out.iter_mut().zip(token) {
                    *out = *out + x;
                }
            }
            for out in out {
                *out = *out / count;
            }
        }
    }
}

multiversion! {
    fn backward[T: Float](dx: &mut [T], dout: &[T], sizes: [usize; 3]) {
        let [time, columns, tokens] = sizes;
        let count = T::from_f64(tokens as f64);
        let sequences = dx.chunks_exact_mut((time * columns).max(1));
        for (dx, dout) in sequences.zip(dout.chunks_exact(columns.max(1))) {
            let (mean, rest) = dx.split_at_mut(tokens * columns);
            rest.fill(T::ZERO);
            for token in mean.chunks_exact_mut(columns) {
                for (dx, &dout) in token.iter_mut().zip(dout) {
                    *dx = dout / count;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
