//! copy_valid: a copy of what a step has computed, if the step has a result.

use crate::error::Result;
use crate::launch::{BLOCK_THREADS, Grid, Source, args};
use crate::ops::call::{Call, FLOATS, with_float};
use crate::ops::nonfinite::check_flags;
use crate::progress::StopWord;
use crate::{DType, Tensor};

static SOURCE: Source = Source::new("copy_valid.cu", include_str!("copy_valid.cu"));

/// `out = x` if the first of `flags` ([`STEP_FLAGS`](crate::ops::STEP_FLAGS)) is 0 and the stop
/// word is not set; otherwise `out` stays as it is. Both have one dimension. With `vote`, f32 (1):
/// it becomes 1 if the steps were stopped, else 0, and all of `x` is copied or nothing.
#[track_caller]
pub fn copy_valid(
    out: &Tensor,
    x: &Tensor,
    flags: &Tensor,
    vote: Option<&Tensor>,
    stop: Option<StopWord>,
) -> Result<()> {
    let mut call = Call::new("copy_valid");
    let out = call.updates("out", out);
    let (x, flags) = (call.reads("x", x), call.reads("flags", flags));
    let vote = vote.map(|vote| call.writes("vote", vote));
    call.same_shape(x, out)?;
    call.same_dtype(x, out)?;
    call.all_row_major()?;
    check_flags(&call, Some(flags))?;
    if let Some(vote) = vote {
        call.has_shape(vote, &[1], "whether the steps were stopped")?;
        call.has_dtype(vote, &[DType::F32])?;
    }
    call.run(out, &FLOATS, |placed| {
        let [mut out, x, flags] = placed.enter([out, x, flags])?;
        let mut vote = placed.enter_some(vote)?;
        if let Some(gpu) = placed.launcher() {
            let threads = BLOCK_THREADS as usize;
            let grid = match vote {
                Some(_) => Grid::blocks(1, BLOCK_THREADS, 1 + out.count.div_ceil(threads)),
                None => Grid::elements(out.count).rounds_of(2),
            };
            let stop = stop.map_or(0, StopWord::address);
            let args = args![out, x, out.count, flags, vote, stop];
            return gpu.launch(&SOURCE, "copy_valid_f32", grid, args);
        }
        let flag = flags.elements::<i64>()[0];
        if let Some(vote) = &mut vote {
            vote.elements_mut::<f32>()[0] = f32::from(u8::from(flag < 0));
        }
        with_float!(placed.dtype, T => if flag == 0 {
            out.elements_mut::<T>().copy_from_slice(x.elements());
        });
        Ok(())
    })
}

#[cfg(test)]
mod tests;
