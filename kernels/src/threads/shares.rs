//! Slices whose parts go to the threads of one operation.
//!
//! `split_mut` cuts one slice with them. Operations whose outputs are cut differently (rows of
//! several tensors, chunks of a table) use them directly.

use std::marker::PhantomData;
use std::ops::Range;

/// Part `index` of `0..len` in `pieces` nearly equal parts, cut at multiples of `grain`.
pub(crate) fn cut(len: usize, grain: usize, pieces: usize, index: usize) -> Range<usize> {
    let grains = len.div_ceil(grain);
    let edge = |i: usize| (grains * i / pieces * grain).min(len);
    edge(index)..edge(index + 1)
}

/// A mutable slice from which threads take parts that do not overlap.
pub(crate) struct Shares<'a, T> {
    start: *mut T,
    len: usize,
    whole: PhantomData<&'a mut [T]>,
}

// SAFETY: a `&Shares` only gives out `&mut [T]` of ranges that do not overlap (the contract of
// `part`), and any thread may hold those if T is Send.
unsafe impl<T: Send> Sync for Shares<'_, T> {}

impl<'a, T> Shares<'a, T> {
    pub(crate) fn new(whole: &'a mut [T]) -> Shares<'a, T> {
        Shares {
            start: whole.as_mut_ptr(),
            len: whole.len(),
            whole: PhantomData,
        }
    }

    /// The number of elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The elements of `range`, which must lie within the slice.
    ///
    /// # Safety
    /// No two parts taken from these shares may overlap while both live.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the slice by the assertion. Exclusive, because `new` took the slice by
        // `&mut` and the caller promises that no other live part overlaps this one.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
