//! Slices shared out among the threads of one operation: each takes the parts that its share of the work writes.
//!
//! `split_mut` cuts one slice with them; operations whose outputs are not cut alike (rows of several tensors, chunks of a
//! table) use them directly.

use std::marker::PhantomData;
use std::ops::Range;

/// A mutable slice from which threads take parts that do not overlap.
pub(crate) struct Shares<'a, T> {
    start: *mut T,
    len: usize,
    whole: PhantomData<&'a mut [T]>,
}

// SAFETY: all that a `&Shares` gives away is `&mut [T]` of ranges that do not overlap (the contract of `part`), and
// those may be held by any thread when T is Send.
unsafe impl<T: Send> Sync for Shares<'_, T> {}

impl<'a, T> Shares<'a, T> {
    pub(crate) fn new(whole: &'a mut [T]) -> Shares<'a, T> {
        Shares { start: whole.as_mut_ptr(), len: whole.len(), whole: PhantomData }
    }

    /// How many elements there are in all.
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
        // SAFETY: inside the slice by the assertion; exclusive because `new` took the slice by `&mut`, and the caller
        // promises that no other part overlaps this one.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
