//! Random tensors on a GPU: `random.rs`'s bits, made on the device. What the constructors call; on the CPU they fill by themselves.

use crate::cuda::{Grid, Source};
use crate::error::{Result, Site};
use crate::ops::fill::write_new;
use crate::random::Draw;
use crate::{DType, Tensor};

static SOURCE: Source = Source::new("random.cu", include_str!("random.cu"));

/// What to draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Distribution {
    /// In [0, 1).
    Uniform,
    Normal,
    /// Whole numbers in 0..bound.
    Below(u32),
}

/// Fills `out`, which `op` has just made on a GPU, with `draw`.
pub(crate) fn draw_new(out: &Tensor, draw: Draw, distribution: Distribution, op: &'static str, at: Site) -> Result<()> {
    let name = match (distribution, out.dtype()) {
        (Distribution::Uniform, DType::F32) => "rand_f32",
        (Distribution::Uniform, DType::BF16) => "rand_bf16",
        (Distribution::Uniform, DType::F16) => "rand_f16",
        (Distribution::Uniform, DType::F64) => "rand_f64",
        (Distribution::Normal, DType::F32) => "randn_f32",
        (Distribution::Normal, DType::BF16) => "randn_bf16",
        (Distribution::Normal, DType::F16) => "randn_f16",
        (Distribution::Normal, DType::F64) => "randn_f64",
        (Distribution::Below(_), DType::U8) => "randint_u8",
        (Distribution::Below(_), DType::I32) => "randint_i32",
        (Distribution::Below(_), DType::I64) => "randint_i64",
        (distribution, dtype) => unreachable!("the constructors refuse {distribution:?} in {dtype}"),
    };
    let stream = draw.stream();
    write_new(out, op, at, |gpu, lent| {
        let kernel = gpu.kernel(&SOURCE, name)?.output(lent).count(out.count());
        let kernel = kernel.u32(stream.key[0]).u32(stream.key[1]).u64(stream.draw);
        let kernel = match distribution {
            Distribution::Below(bound) => kernel.u32(bound),
            _ => kernel,
        };
        // A thread makes at least the four elements of a block.
        kernel.launch(Grid::elements(out.count().div_ceil(4)))
    })
}
