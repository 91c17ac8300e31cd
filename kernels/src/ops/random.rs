//! Random tensors on a GPU, with the bits of `random.rs` at the root of this crate.

use crate::Tensor;
use crate::error::{Caller, Result};
use crate::launch::{Grid, Source, args};
use crate::ops::fill::write_new;
use crate::random::Draw;

static SOURCE: Source = Source::new("random.cu", include_str!("random.cu"));

/// What to draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Distribution {
    /// In [0, 1).
    Uniform,
    Normal,
    /// Integers in 0..bound.
    Below(u32),
}

/// Fills `out`, which `op` has just made on a GPU, with `draw`. The caller checked its dtype.
pub(crate) fn draw_new(
    out: &Tensor,
    draw: Draw,
    distribution: Distribution,
    by: Caller,
) -> Result<()> {
    let (base, bound) = match distribution {
        Distribution::Uniform => ("rand", 0),
        Distribution::Normal => ("randn", 0),
        Distribution::Below(bound) => ("randint", bound),
    };
    let [key_0, key_1] = draw.key;
    write_new(out, by, |gpu, out| {
        // A thread makes at least the four elements of a Philox block.
        let grid = Grid::elements(out.count.div_ceil(4));
        let args = args![out, out.count, key_0, key_1, draw.draw, bound];
        gpu.launch(&SOURCE, (base, out.dtype), grid, args)
    })
}
