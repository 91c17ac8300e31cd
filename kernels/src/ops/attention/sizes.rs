//! What the CPU's and the GPU's attention share: sizes, and where q, k and v lie.

/// The widest head.
pub(super) const HEAD_SIZE_MAX: usize = 256;

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
    /// How many tokens a token attends to at most, itself and those right before it, if not all.
    pub window: Option<usize>,
    /// Scores s become cap·tanh(s / cap), if there is a cap, as in Gemma 2.
    pub cap: Option<f64>,
}

/// The checked sizes of one attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) attention: Attention,
    /// What q·k is multiplied by.
    pub(super) scale: f64,
}

impl std::ops::Deref for Sizes {
    type Target = Attention;

    fn deref(&self) -> &Attention {
        &self.attention
    }
}

/// Where the columns of q, k, v or the output lie in a row-major tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct ColumnLayout {
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

    /// Where q, k and v lie.
    pub(super) fn columns(&self) -> [ColumnLayout; 3] {
        let ([q, k, _], stride) = (self.widths(), self.packed_width());
        [0, q, q + k].map(|first| ColumnLayout { first, stride })
    }

    /// Heads of q that share one head of k and v.
    pub(super) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}
