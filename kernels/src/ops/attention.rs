//! Scaled dot-product attention, `softmax(scale · q·kᵀ) · v` for each head, and its gradients. The
//! scores of a sequence (T × T) are never in memory: both directions go over them in blocks.
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
mod cached;
mod cpu;
mod forward;
mod gpu;
mod matmuls;
mod sizes;
mod softmax;

use crate::error::Result;
use crate::ops::call::{Buffer, Call, FLOATS_AND_BF16, Placed, Slot, Versions, with_float};
use crate::threads::Shares;
use crate::{DType, Tensor};
use backward::{Backward, write_delta};
use forward::Forward;
use gpu::Heads;
use sizes::{HEAD_SIZE_MAX, Sizes};

const CPU_ONLY: Versions = Versions {
    cpu: &[DType::F32, DType::F64],
    cuda: &[],
};

/// What kind of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Tokens of a sequence (T).
    pub time: usize,
    /// Heads of q.
    pub heads: usize,
    /// Heads of k and v: a divisor of `heads`.
    pub kv_heads: usize,
    /// Columns of a head: 1 to 256.
    pub head_size: usize,
    /// Whether a token attends only to itself and what is before it.
    pub causal: bool,
    /// What q·k is multiplied by; by default 1/√head_size.
    pub scale: Option<f64>,
}

/// Where q, k and v are, or their gradients.
#[derive(Clone, Copy, Debug)]
pub enum Qkv<'a> {
    /// Beside each other: (B·T, (heads + 2·kv_heads)·head_size), with the columns of q first, then
    /// those of k, then those of v.
    Packed(&'a Tensor),
    /// In three tensors.
    Apart {
        /// (B·T, heads·head_size)
        q: &'a Tensor,
        /// (B·T, kv_heads·head_size)
        k: &'a Tensor,
        /// (B·T, kv_heads·head_size)
        v: &'a Tensor,
    },
}

/// Writes attention to `out` (B·T, heads·head_size), and for backward the logarithms of the sums
/// of weights to `log_sum_exp` (B·heads, T), which is f32 where `out` is bf16.
#[track_caller]
pub fn attention_into(
    out: &Tensor,
    log_sum_exp: &Tensor,
    qkv: Qkv<'_>,
    attention: &Attention,
) -> Result<()> {
    let mut call = Call::new("attention");
    let inputs = qkv.add(&mut call, ["qkv", "q", "k", "v"], Call::reads);
    let out = call.writes("out", out);
    let log_sum_exp = call.writes("log_sum_exp", log_sum_exp);
    let sizes = attention.check(&call, &inputs)?;
    check_rows(&call, sizes, inputs.slots[0], [out], [log_sum_exp])?;
    call.run(inputs.slots[0], &FLOATS_AND_BF16, |placed| {
        let [mut out, mut log_sum_exp] = placed.enter([out, log_sum_exp])?;
        let memory = inputs.enter(placed)?;
        if let Some(gpu) = placed.launcher() {
            let heads = inputs.heads(&memory, sizes);
            return gpu::forward(&gpu, [&out, &log_sum_exp], heads, sizes);
        }
        with_float!(placed.dtype, T => cpu::run_forward(&Forward {
            sizes,
            out: Shares::new(out.elements_mut::<T>()),
            log_sum_exp: Shares::new(log_sum_exp.elements_mut()),
            inputs: inputs.elements(&memory, sizes),
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
    let mut call = Call::new("attention_cached");
    let out = call.writes("out", out);
    let cache = call.updates("cache", cache);
    let qkv = call.reads("qkv", qkv);
    let sizes = attention.check_numbers(&call)?;
    let time = sizes.time;
    if !attention.causal {
        return Err(call
            .by
            .value("causal", "true: later tokens are not known yet", false));
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
        with_float!(placed.dtype, T => {
            let qkv = qkv.elements::<T>();
            let new = &mut cache.elements_mut::<T>()[(time - rows) * kv_width..];
            for (to, row) in new.chunks_mut(kv_width).zip(qkv.chunks(width + kv_width)) {
                to.copy_from_slice(&row[width..]);
            }
            cached::run(&cached::Work {
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

/// Writes the gradients by q, k and v to `gradients`, from `dout` (B·T, heads·head_size) and what
/// forward read and wrote. `delta` (B·heads, T), of the dtype of `log_sum_exp`, is overwritten: it
/// holds the sums of `dout ∘ out` over each head's columns.
#[track_caller]
pub fn attention_backward_into(
    gradients: Qkv<'_>,
    delta: &Tensor,
    [dout, out]: [&Tensor; 2],
    log_sum_exp: &Tensor,
    qkv: Qkv<'_>,
    attention: &Attention,
) -> Result<()> {
    let mut call = Call::new("attention_backward");
    let inputs = qkv.add(&mut call, ["qkv", "q", "k", "v"], Call::reads);
    let gradients = gradients.add(&mut call, ["dqkv", "dq", "dk", "dv"], Call::writes);
    let delta = call.writes("delta", delta);
    let (dout, out) = (call.reads("dout", dout), call.reads("out", out));
    let log_sum_exp = call.reads("log_sum_exp", log_sum_exp);
    let sizes = attention.check(&call, &inputs)?;
    gradients.check(&call, sizes, inputs.slots[0])?;
    let first = inputs.slots[0];
    check_rows(&call, sizes, first, [dout, out], [delta, log_sum_exp])?;
    call.run(first, &FLOATS_AND_BF16, |placed| {
        let [mut delta, dout, out, log_sum_exp] = placed.enter([delta, dout, out, log_sum_exp])?;
        let memory = inputs.enter(placed)?;
        let mut written = gradients.enter(placed)?;
        if let Some(gpu) = placed.launcher() {
            let to = gradients.heads(&written, sizes);
            let heads = inputs.heads(&memory, sizes);
            return gpu::backward(&gpu, to, &delta, [&dout, &out, &log_sum_exp], heads, sizes);
        }
        with_float!(placed.dtype, T => {
            write_delta::<T>(delta.elements_mut(), dout.elements(), out.elements(), sizes);
            let shares = written.each_mut().map(|buffer| match buffer {
                Some(buffer) => Shares::new(buffer.elements_mut()),
                None => Shares::new(&mut []),
            });
            cpu::run_backward(&Backward::<T> {
                sizes,
                gradients: &shares[..gradients.count],
                gradient_columns: sizes.columns(gradients.is_packed()),
                delta: delta.elements(),
                dout: dout.elements(),
                log_sum_exp: log_sum_exp.elements(),
                inputs: inputs.elements(&memory, sizes),
            });
        });
        Ok(())
    })
}

/// The operands of a `Qkv`: one, or three.
struct Operands {
    slots: [Slot; 3],
    count: usize,
}

impl<'a> Qkv<'a> {
    fn add(
        self,
        call: &mut Call<'a>,
        [packed, q_role, k_role, v_role]: [&'static str; 4],
        add: fn(&mut Call<'a>, &'static str, &'a Tensor) -> Slot,
    ) -> Operands {
        let (slots, count) = match self {
            Qkv::Packed(tensor) => ([add(call, packed, tensor); 3], 1),
            Qkv::Apart { q, k, v } => {
                let q = add(call, q_role, q);
                ([q, add(call, k_role, k), add(call, v_role, v)], 3)
            }
        };
        Operands { slots, count }
    }
}

impl Operands {
    fn is_packed(&self) -> bool {
        self.count == 1
    }

    /// Shapes, dtypes and layouts, for as many rows as `like` has, in its dtype.
    fn check(&self, call: &Call<'_>, sizes: Sizes, like: Slot) -> Result<()> {
        let rows = sizes.batch * sizes.time;
        let (widths, meanings) = match self.is_packed() {
            true => (
                [sizes.packed_width(); 3],
                ["[batch·time, (heads + 2·kv_heads)·head_size]"; 3],
            ),
            false => {
                let kv = "[batch·time, kv_heads·head_size]";
                let meanings = ["[batch·time, heads·head_size]", kv, kv];
                (sizes.widths(), meanings)
            }
        };
        for ((&slot, width), meaning) in self.slots[..self.count].iter().zip(widths).zip(meanings) {
            call.has_shape(slot, &[rows, width], meaning)?;
            call.same_dtype(slot, like)?;
            call.row_major(slot)?;
        }
        Ok(())
    }

    fn enter<'b>(&self, placed: &'b Placed<'_>) -> Result<[Option<Buffer<'b>>; 3]> {
        let mut entered = [const { None }; 3];
        for (buffer, &slot) in entered.iter_mut().zip(&self.slots[..self.count]) {
            *buffer = placed.enter_some(Some(slot))?;
        }
        Ok(entered)
    }

    /// Where q, k and v are on a GPU.
    fn heads(&self, memory: &[Option<Buffer<'_>>; 3], sizes: Sizes) -> Heads {
        Heads::new(&memory[..self.count], sizes.columns(self.is_packed()))
    }

    /// The elements of q, k and v, and where their columns lie in these.
    fn elements<'b, T: crate::Element>(
        &self,
        memory: &'b [Option<Buffer<'b>>; 3],
        sizes: Sizes,
    ) -> [(&'b [T], sizes::Columns); 3] {
        let columns = sizes.columns(self.is_packed());
        std::array::from_fn(|operand| {
            let buffer = memory[operand.min(self.count - 1)].as_ref();
            let elements = buffer.map_or(&[][..], Buffer::elements);
            (elements, columns[operand])
        })
    }
}

/// `(B·T, heads·head_size)` and `(B·heads, T)`.
fn check_rows<const N: usize>(
    call: &Call<'_>,
    sizes: Sizes,
    like: Slot,
    outputs: [Slot; N],
    lines: [Slot; N],
) -> Result<()> {
    let [width, ..] = sizes.widths();
    for slot in outputs {
        let shape = [sizes.batch * sizes.time, width];
        call.has_shape(slot, &shape, "[batch·time, heads·head_size]")?;
        call.same_dtype(slot, like)?;
        call.row_major(slot)?;
    }
    for slot in lines {
        let shape = [sizes.batch * sizes.heads, sizes.time];
        call.has_shape(slot, &shape, "[batch·heads, time]")?;
        call.math_dtype(slot, like)?;
        call.row_major(slot)?;
    }
    Ok(())
}

impl Attention {
    /// The sizes of one sequence, if the numbers allow attention.
    fn check_numbers(&self, call: &Call<'_>) -> Result<Sizes> {
        let &Attention {
            time,
            heads,
            kv_heads,
            head_size,
            causal,
            scale,
        } = self;
        for (what, value) in [("time", time), ("heads", heads), ("kv_heads", kv_heads)] {
            if value == 0 {
                return Err(call.by.value(what, "at least 1", value));
            }
        }
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of heads, which is {heads}");
            return Err(call.by.value("kv_heads", expected, kv_heads));
        }
        if !(1..=HEAD_SIZE_MAX).contains(&head_size) {
            let expected = format!("1 to {HEAD_SIZE_MAX}");
            return Err(call.by.value("head_size", expected, head_size));
        }
        let scale = scale.unwrap_or(1.0 / (head_size as f64).sqrt());
        if !scale.is_finite() {
            return Err(call.by.value("scale", "a finite number", scale));
        }
        Ok(Sizes {
            batch: 1,
            time,
            heads,
            kv_heads,
            head_size,
            causal,
            scale,
        })
    }

    /// Checks the numbers and the inputs, whose first operand has the rows of all.
    fn check(&self, call: &Call<'_>, inputs: &Operands) -> Result<Sizes> {
        let one = self.check_numbers(call)?;
        let (first, time) = (inputs.slots[0], one.time);
        let [rows, _] = call.dims::<2>(first, "[batch·time, columns]")?;
        if !rows.is_multiple_of(time) {
            let expected = format!("whole sequences of {time} rows");
            let help = "set time to the number of rows of a sequence";
            return Err(call.operand_error(first, expected, help));
        }
        let batch = rows / time;
        let sizes = Sizes { batch, ..one };
        inputs.check(call, sizes, first)?;
        Ok(sizes)
    }
}

#[cfg(test)]
mod tests;
