//! A product of bf16 matrices, and in which order it is added.

use std::cell::Cell;

use crate::choices;
use crate::dtype::{bf16, bf16_nearest, bf16_wide};
use crate::ops::matmul::tile::Matrix;
use crate::simd::{self, Bf16Unit};

choices! {
    /// In which order the CPU adds products of bf16.
    pub enum Bf16Order {
        /// Of 32 columns, even and odd ones apart, then both: Intel's AMX
        Amx = "amx",
        /// Of two columns the second, then the first: AVX512_BF16
        Dpbf16 = "dpbf16",
    }
}

impl Bf16Order {
    /// The order of this processor's fastest instruction; without one, `Dpbf16`.
    pub fn native() -> Bf16Order {
        match simd::bf16_unit() {
            Bf16Unit::Amx => Bf16Order::Amx,
            Bf16Unit::Dpbf16 | Bf16Unit::None => Bf16Order::Dpbf16,
        }
    }

    /// Whether this processor has an instruction that adds in this order.
    pub fn is_native(self) -> bool {
        match self {
            Bf16Order::Amx => simd::bf16_unit() >= Bf16Unit::Amx,
            Bf16Order::Dpbf16 => simd::bf16_unit() >= Bf16Unit::Dpbf16,
        }
    }
}

thread_local! {
    static ORDER: Cell<Option<Bf16Order>> = const { Cell::new(None) };
}

/// Runs `body` with matmuls of bf16 on the CPU in this order.
pub fn with_bf16_order<R>(order: Bf16Order, body: impl FnOnce() -> R) -> R {
    /// Puts the former one back, by return or by panic.
    struct RestoreOrder(Option<Bf16Order>);
    impl Drop for RestoreOrder {
        fn drop(&mut self) {
            ORDER.set(self.0);
        }
    }
    let _restore = RestoreOrder(ORDER.replace(Some(order)));
    body()
}

/// Computes matmuls of bf16 on the CPU in this order, on this thread from here on; by default in
/// the processor's own.
pub fn set_bf16_order(order: Option<Bf16Order>) {
    ORDER.set(order);
}

/// What is in force on this thread: by default the processor's own.
pub fn bf16_order() -> Bf16Order {
    ORDER.get().unwrap_or_else(Bf16Order::native)
}

/// The most elements along k of a block. Results depend on it.
pub(super) const ALONG_MAX: usize = 4096;
/// Blocks end at multiples of this: what one instruction of AMX takes.
pub(super) const ALONG_GRAIN: usize = 32;
/// The most elements along k of a block of f32 that are split: their products are one block of
/// bf16.
pub(super) const SPLIT_ALONG_MAX: usize = ALONG_MAX / 3 / ALONG_GRAIN * ALONG_GRAIN;

/// The nearest bf16, and the one nearest to what is left.
#[inline(always)]
pub(super) fn parts(x: f32) -> [bf16; 2] {
    let high = bf16_nearest(x);
    [high, bf16_nearest(x - bf16_wide(high))]
}

/// Where a product goes, for threads that write parts of it.
#[derive(Clone, Copy)]
pub(super) enum Target {
    F32(*mut f32),
    Bf16(*mut bf16),
}

/// A product in progress.
pub(super) struct Product<'a, S = bf16> {
    pub(super) out: Target,
    pub(super) a: Matrix<'a, S>,
    pub(super) b: Matrix<'a, S>,
    /// Of the product, and of what is there.
    pub(super) scales: (f32, f32),
    pub(super) order: Bf16Order,
}

// SAFETY: the threads of one matmul write disjoint rows or columns of `out` (argued where they do)
// and only read the rest.
unsafe impl<S: Sync> Sync for Product<'_, S> {}
