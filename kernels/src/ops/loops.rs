//! The loops that elementwise operations share: over the pool, vectorised for this processor, in place or apart.
//!
//! An operation gives a small `Copy` type with `#[inline(always)]` methods instead of a closure, because only those are
//! sure to be compiled into each SIMD version of the loop.

use crate::dtype::Element;
use crate::ops::call::Lent;
use crate::simd::multiversion;
use crate::threads;

/// Threads take pieces on multiples of this many elements: whole cache lines, whole SIMD blocks.
pub(crate) const GRAIN: usize = 1024;

/// From this many bytes on, an output that is not read besides goes past the caches: it would only push out what the
/// next operation needs, and an ordinary store reads the line from memory first. Larger than most third-level caches.
const STREAMING_BYTES_MIN: usize = 32 << 20;

/// `out = f(x)` for one element.
pub(crate) trait Unary<T>: Copy + Send + Sync {
    fn apply(self, x: T) -> T;
}

/// `out = f(a, b)` for one element.
pub(crate) trait Binary<T>: Copy + Send + Sync {
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
        Some(x) => write_apart(out, |first, out| unary_apart(out, &x[first..first + out.len()], f)),
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
        (Some(a), Some(b)) => write_apart(out, |first, out| {
            let range = first..first + out.len();
            binary_apart(out, &a[range.clone()], &b[range], f);
        }),
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
            store_streaming(out, made);
        }
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a fence touches no memory; every x86-64 has it. It orders the streaming stores before whatever
        // tells other threads that this piece is done.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    });
}

/// Copies a block past the caches where the processor can.
#[inline]
fn store_streaming<T: Element>(out: &mut [T], block: &[T]) {
    debug_assert_eq!(out.len(), block.len());
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
        const LANE_BYTES: usize = size_of::<__m128i>();
        if out.as_ptr().addr().is_multiple_of(LANE_BYTES) {
            let lanes = size_of_val(out) / LANE_BYTES;
            let (target, source) = (out.as_mut_ptr().cast::<__m128i>(), block.as_ptr().cast::<__m128i>());
            for lane in 0..lanes {
                // SAFETY: lane < lanes keeps both within their slices, which are as long; the target is aligned to
                // the lane by the test above, the source is loaded unaligned; plain numbers have no invalid bits.
                unsafe { _mm_stream_si128(target.add(lane), _mm_loadu_si128(source.add(lane))) };
            }
            let done = lanes * LANE_BYTES / size_of::<T>();
            out[done..].copy_from_slice(&block[done..]);
            return;
        }
    }
    out.copy_from_slice(block);
}
