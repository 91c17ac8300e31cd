//! What the CPU's and the GPU's attention share: sizes, and where q, k and v lie.

/// The widest head.
pub(super) const HEAD_SIZE_MAX: usize = 256;

/// The checked sizes of one attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) time: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_size: usize,
    pub(super) causal: bool,
    /// What q·k is multiplied by.
    pub(super) scale: f64,
}

/// Where the columns of q, k or v lie in a row-major tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Columns {
    pub(super) first: usize,
    /// Elements from one row to the next.
    pub(super) stride: usize,
}

impl Sizes {
    /// Columns of q, k and v. They are not checked yet, and no tensor has usize::MAX columns.
    pub(super) fn widths(&self) -> [usize; 3] {
        [self.heads, self.kv_heads, self.kv_heads].map(|heads| heads.saturating_mul(self.head_size))
    }

    /// Columns of all three beside each other.
    pub(super) fn packed_width(&self) -> usize {
        self.widths().into_iter().fold(0, usize::saturating_add)
    }

    /// Where q, k and v lie: beside each other, or in three tensors.
    pub(super) fn columns(&self, packed: bool) -> [Columns; 3] {
        let [q, k, v] = self.widths();
        if packed {
            let stride = self.packed_width();
            return [0, q, q + k].map(|first| Columns { first, stride });
        }
        [q, k, v].map(|stride| Columns { first: 0, stride })
    }

    /// Heads of q that share one head of k and v.
    pub(super) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}
