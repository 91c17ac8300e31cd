//! Scaled dot-product attention, `softmax(scale · q·kᵀ) · v` for each head, and its gradients. The
//! scores of a sequence (T × T) are never in memory: both directions go over them in blocks. A soft
//! cap makes cap·tanh(s / cap) of each score s.
//!
//! Heads may share heads of k and v (grouped queries): with `kv_heads` of them, the heads `h` with
//! the same `h / (heads / kv_heads)` share one. Forward keeps the logarithm of each row's sum, from
//! which backward computes the weights again.
//!
//! A masked key has the weight 0. As in PyTorch, 0 times a v that is not finite is NaN, so such a v
//! can spoil queries before its token, in its own sequence only.
//!
//! Every element is summed in an order that follows from the shapes. On the CPU all processors have
//! the same bits; a GPU's differ from these within rounding.

mod backward;
mod bf16;
mod blocks;
mod cpu;
mod firsts;
mod forward;
pub(super) mod gpu;
mod rows;
mod sizes;

use crate::error::Result;
use crate::ops::call::{Buffer, FLOATS_AND_BF16, OpCall, Slot, Versions};
use crate::ops::stored::with_stored;
use crate::threads::Shares;
use crate::{DType, Tensor};
use backward::{Backward, write_delta};
use firsts::Firsts;
use forward::Forward;
pub use sizes::Attention;
use sizes::{HEAD_SIZE_MAX, Sizes};

const CPU_ONLY: Versions = Versions {
    cpu: &[DType::F32, DType::F64, DType::BF16],
    cuda: &[],
};

/// Writes attention to `out` (B·T, heads·head_size) from `qkv` (B·T, (heads +
/// 2·kv_heads)·head_size), whose columns are those of q, then k, then v. For backward it writes the
/// logarithms of the sums of weights to `log_sum_exp` (B·heads, T), which is f32 where `out` is
/// bf16.
///
/// Where a sequence holds several documents, `begins`, i32 (B·T), says for each token where in its
/// sequence its document begins, which never decreases along a sequence. A token then attends to
/// its own document alone. Causal attention only.
#[track_caller]
pub fn attention_into(
    out: &Tensor,
    log_sum_exp: &Tensor,
    qkv: &Tensor,
    begins: Option<&Tensor>,
    attention: &Attention,
) -> Result<()> {
    let mut call = OpCall::new("attention");
    let qkv = call.reads("qkv", qkv);
    let out = call.writes("out", out);
    let log_sum_exp = call.writes("log_sum_exp", log_sum_exp);
    let begins = call.reads_some("begins", begins);
    let sizes = attention.check(&call, [qkv], [out], [log_sum_exp], begins)?;
    call.run(qkv, &FLOATS_AND_BF16, |placed| {
        let [mut out, mut log_sum_exp, qkv] = placed.enter([out, log_sum_exp, qkv])?;
        let begins = placed.enter_some(begins)?;
        if let Some(gpu) = placed.gpu() {
            return gpu::forward(&gpu, [&out, &log_sum_exp, &qkv], begins.as_ref(), sizes);
        }
        with_stored!(placed.dtype, S => cpu::run_forward(&Forward {
            sizes,
            firsts: Firsts::new(sizes, begins.as_ref().map(Buffer::elements)),
            out: Shares::new(out.elements_mut::<S>()),
            log_sum_exp: Shares::new(log_sum_exp.elements_mut()),
            qkv: qkv.elements(),
        }));
        Ok(())
    })
}

/// Writes causal attention of R new tokens to `out` (R, heads·head_size). `qkv` is packed,
/// (R, (heads + 2·kv_heads)·head_size). `cache` (T, 2·kv_heads·head_size), with keys first, has the
/// keys and values of all tokens; its last R rows, those of the new tokens, are written here.
/// `attention.time` is T.
///
/// Backward: none; it is for generating.
#[track_caller]
pub fn attention_cached_into(
    out: &Tensor,
    cache: &Tensor,
    qkv: &Tensor,
    attention: &Attention,
) -> Result<()> {
    let mut call = OpCall::new("attention_cached");
    let out = call.writes("out", out);
    let cache = call.updates("cache", cache);
    let qkv = call.reads("qkv", qkv);
    let sizes = attention.check_numbers(&call)?;
    let time = sizes.time;
    if !attention.causal {
        return Err(call.value("causal", "true: later tokens are not known yet", false));
    }
    let [rows, _] = call.dims::<2>(qkv, "[new tokens, columns]")?;
    if rows > time {
        let expected = format!("at most {time} rows, as many as the cache has");
        return Err(call.operand_error(qkv, expected, "set time to all tokens, the new ones too"));
    }
    let [width, keys, _] = sizes.widths();
    let kv_width = 2 * keys;
    let meaning = "[new tokens, (heads + 2·kv_heads)·head_size]";
    call.has_shape(qkv, &[rows, width + kv_width], meaning)?;
    call.has_shape(out, &[rows, width], "[new tokens, heads·head_size]")?;
    call.has_shape(cache, &[time, kv_width], "[time, 2·kv_heads·head_size]")?;
    call.same_dtype(out, qkv)?;
    call.same_dtype(cache, qkv)?;
    call.all_row_major()?;
    call.run(qkv, &CPU_ONLY, |placed| {
        let [mut out, mut cache, qkv] = placed.enter([out, cache, qkv])?;
        with_stored!(placed.dtype, S => {
            let qkv = qkv.elements::<S>();
            let new = &mut cache.elements_mut::<S>()[(time - rows) * kv_width..];
            for (to, row) in new.chunks_mut(kv_width).zip(qkv.chunks(width + kv_width)) {
                to.copy_from_slice(&row[width..]);
            }
            forward::run_cached(&forward::Cached {
                sizes,
                rows,
                out: Shares::new(out.elements_mut()),
                cache: cache.elements(),
                qkv,
            });
        });
        Ok(())
    })
}

/// Writes the gradients by q, k and v to `dqkv`, from `dout` (B·T, heads·head_size) and what
/// forward read (also `begins`) and wrote. `delta` (B·heads, T), of the dtype of `log_sum_exp`, is
/// overwritten: it holds the sums of `dout ∘ out` over each head's columns.
#[track_caller]
pub fn attention_backward_into(
    dqkv: &Tensor,
    delta: &Tensor,
    [dout, out]: [&Tensor; 2],
    log_sum_exp: &Tensor,
    qkv: &Tensor,
    begins: Option<&Tensor>,
    attention: &Attention,
) -> Result<()> {
    let mut call = OpCall::new("attention_backward");
    let qkv = call.reads("qkv", qkv);
    let (dqkv, delta) = (call.writes("dqkv", dqkv), call.writes("delta", delta));
    let (dout, out) = (call.reads("dout", dout), call.reads("out", out));
    let log_sum_exp = call.reads("log_sum_exp", log_sum_exp);
    let begins = call.reads_some("begins", begins);
    let lines = [delta, log_sum_exp];
    let sizes = attention.check(&call, [qkv, dqkv], [dout, out], lines, begins)?;
    call.run(qkv, &FLOATS_AND_BF16, |placed| {
        let [mut dqkv, mut delta] = placed.enter([dqkv, delta])?;
        let [dout, out, log_sum_exp, qkv] = placed.enter([dout, out, log_sum_exp, qkv])?;
        let begins = placed.enter_some(begins)?;
        if let Some(gpu) = placed.gpu() {
            let inputs = [&dout, &out, &log_sum_exp, &qkv];
            return gpu::backward(&gpu, [&dqkv, &delta], inputs, begins.as_ref(), sizes);
        }
        with_stored!(placed.dtype, S => {
            write_delta::<S>(delta.elements_mut(), dout.elements(), out.elements(), sizes);
            cpu::run_backward(&Backward::<S> {
                sizes,
                firsts: Firsts::new(sizes, begins.as_ref().map(Buffer::elements)),
                dqkv: Shares::new(dqkv.elements_mut()),
                delta: delta.elements(),
                dout: dout.elements(),
                log_sum_exp: log_sum_exp.elements(),
                qkv: qkv.elements(),
            });
        });
        Ok(())
    })
}

impl Attention {
    /// The sizes of one sequence, if the numbers allow attention.
    fn check_numbers(&self, call: &OpCall<'_>) -> Result<Sizes> {
        let (time, heads, kv_heads) = (self.time, self.heads, self.kv_heads);
        let head_size = self.head_size;
        for (what, value) in [("time", time), ("heads", heads), ("kv_heads", kv_heads)] {
            if value == 0 {
                return Err(call.value(what, "at least 1", value));
            }
        }
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of heads, which is {heads}");
            return Err(call.value("kv_heads", expected, kv_heads));
        }
        if !(1..=HEAD_SIZE_MAX).contains(&head_size) {
            let expected = format!("1 to {HEAD_SIZE_MAX}");
            return Err(call.value("head_size", expected, head_size));
        }
        let scale = self.scale.unwrap_or(1.0 / (head_size as f64).sqrt());
        if !scale.is_finite() {
            return Err(call.value("scale", "a finite number", scale));
        }
        let is_cap = |cap: f64| (1e-30..=1e30).contains(&cap) && scale > 0.0;
        if let Some(cap) = self.cap.filter(|cap| !is_cap(*cap)) {
            return Err(call.value("cap", "1e-30 to 1e30, and a scale above 0", cap));
        }
        if self.window == Some(0) {
            return Err(call.value("window", "at least 1", 0));
        }
        if self.window.is_some() && !self.causal {
            return Err(call.value("window", "none, as it is for causal attention", "one"));
        }
        Ok(Sizes {
            batch: 1,
            attention: *self,
            scale,
        })
    }

    /// Checks the numbers, and tensors `(B·T, (heads + 2·kv_heads)·head_size)`, of which the first
    /// has the rows and the dtype of all, `(B·T, heads·head_size)` and `(B·heads, T)`.
    fn check<const N: usize>(
        &self,
        call: &OpCall<'_>,
        packed: [Slot; N],
        outputs: [Slot; N],
        lines: [Slot; N],
        begins: Option<Slot>,
    ) -> Result<Sizes> {
        let one = self.check_numbers(call)?;
        let (first, time) = (packed[0], one.time);
        let [rows, _] = call.dims::<2>(first, "[batch·time, columns]")?;
        if !rows.is_multiple_of(time) {
            let expected = format!("whole sequences of {time} rows");
            let help = "set time to the number of rows of a sequence";
            return Err(call.operand_error(first, expected, help));
        }
        let batch = rows / time;
        let [width, ..] = one.widths();
        let shape = [rows, one.packed_width()];
        for slot in packed {
            call.has_shape(slot, &shape, "[batch·time, (heads + 2·kv_heads)·head_size]")?;
            call.same_dtype(slot, first)?;
        }
        for slot in outputs {
            call.has_shape(slot, &[rows, width], "[batch·time, heads·head_size]")?;
            call.same_dtype(slot, first)?;
        }
        for slot in lines {
            let shape = [batch * one.heads, time];
            call.has_shape(slot, &shape, "[batch·heads, time]")?;
            call.math_dtype(slot, first)?;
        }
        if let Some(begins) = begins {
            call.has_dtype(begins, &[DType::I32])?;
            call.has_shape(begins, &[rows], "[batch·time]")?;
            if !self.causal {
                let expected = "none, as they are for causal attention";
                return Err(call.operand_error(begins, expected, "set causal"));
            }
        }
        call.all_row_major()?;
        Ok(Sizes { batch, ..one })
    }
}

#[cfg(test)]
mod tests;
