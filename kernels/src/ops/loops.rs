//! The loops that elementwise operations share: over the pool, vectorised for this processor, in place or apart.
//!
//! An operation gives a small `Copy` type with `#[inline(always)]` methods instead of a closure, because only those are
//! sure to be compiled into each SIMD version of the loop.

use crate::dtype::Element;
use crate::ops::call::Lent;
use crate::simd::multiversion;
use crate::streaming::{self, STREAMING_BYTES_MIN};
use crate::threads;

/// Threads take pieces on multiples of this many elements: whole cache lines, whole SIMD blocks.
pub(crate) const GRAIN: usize = 1024;

/// `out = f(x)` for one element.
pub(crate) trait Unary<T>: Copy + Send + Sync {
    /// Whether memory is waited for rather than the arithmetic, which is what streaming stores are for: made in blocks,
    /// they do not overlap with computing as ordinary stores do.
    const WAITS_FOR_MEMORY: bool = true;
    fn apply(self, x: T) -> T;
}

/// `out = f(a, b)` for one element.
pub(crate) trait Binary<T>: Copy + Send + Sync {
    /// As in `Unary`.
    const WAITS_FOR_MEMORY: bool = true;
    fn apply(self, a: T, b: T) -> T;
}

multiversion! {
    fn unary_in_place[T: Element, F: Unary<T>](out: &mut [T], f: F) {
        for out in out {
            *out = f.apply(*out);
        }
    }
}

multiversion! {
    fn unary_apart[T: Element, F: Unary<T>](out: &mut [T], x: &[T], f: F) {
        for (out, &x) in out.iter_mut().zip(x) {
            *out = f.apply(x);
        }
    }
}

multiversion! {
    fn binary_apart[T: Element, F: Binary<T>](out: &mut [T], a: &[T], b: &[T], f: F) {
        for ((out, &a), &b) in out.iter_mut().zip(a).zip(b) {
            *out = f.apply(a, b);
        }
    }
}

multiversion! {
    fn binary_onto_a[T: Element, F: Binary<T>](out: &mut [T], b: &[T], f: F) {
        for (out, &b) in out.iter_mut().zip(b) {
            *out = f.apply(*out, b);
        }
    }
}

multiversion! {
    fn binary_onto_b[T: Element, F: Binary<T>](out: &mut [T], a: &[T], f: F) {
        for (out, &a) in out.iter_mut().zip(a) {
            *out = f.apply(a, *out);
        }
    }
}

multiversion! {
    fn binary_onto_both[T: Element, F: Binary<T>](out: &mut [T], f: F) {
        for out in out {
            *out = f.apply(*out, *out);
        }
    }
}

/// `out[i] = f(x[i])`; `x` may be in place.
pub(crate) fn unary<T: Element, F: Unary<T>>(out: &mut Lent<'_>, x: &Lent<'_>, f: F) {
    let out = out.elements_mut::<T>();
    match x.unless_in_place::<T>() {
        None => threads::split_mut(out, GRAIN, |_, out| unary_in_place(out, f)),
        Some(x) => {
            let make = |first: usize, out: &mut [T]| unary_apart(out, &x[first..first + out.len()], f);
            if F::WAITS_FOR_MEMORY { write_apart(out, make) } else { threads::split_mut(out, GRAIN, make) }
        }
    }
}

/// `out[i] = f(a[i], b[i])`; `a`, `b` or both may be in place.
pub(crate) fn binary<T: Element, F: Binary<T>>(out: &mut Lent<'_>, a: &Lent<'_>, b: &Lent<'_>, f: F) {
    let out = out.elements_mut::<T>();
    match (a.unless_in_place::<T>(), b.unless_in_place::<T>()) {
        (None, None) => threads::split_mut(out, GRAIN, |_, out| binary_onto_both(out, f)),
        (None, Some(b)) => {
            threads::split_mut(out, GRAIN, |first, out| binary_onto_a(out, &b[first..first + out.len()], f));
        }
        (Some(a), None) => {
            threads::split_mut(out, GRAIN, |first, out| binary_onto_b(out, &a[first..first + out.len()], f));
        }
        (Some(a), Some(b)) => {
            let make = |first: usize, out: &mut [T]| {
                let range = first..first + out.len();
                binary_apart(out, &a[range.clone()], &b[range], f);
            };
            if F::WAITS_FOR_MEMORY { write_apart(out, make) } else { threads::split_mut(out, GRAIN, make) }
        }
    }
}

/// Fills `out`, which nothing reads meanwhile, by `make(first, part)`; past the caches when it is very large.
pub(crate) fn write_apart<T: Element>(out: &mut [T], make: impl Fn(usize, &mut [T]) + Sync) {
    if std::mem::size_of_val(out) < STREAMING_BYTES_MIN {
        return threads::split_mut(out, GRAIN, make);
    }
    threads::split_mut(out, GRAIN, |first, out| {
        let mut buffer = [T::default(); GRAIN];
        for (index, out) in out.chunks_mut(GRAIN).enumerate() {
            let made = &mut buffer[..out.len()];
            make(first + index * GRAIN, made);
            streaming::copy(out, made);
        }
        streaming::fence();
    });
}
