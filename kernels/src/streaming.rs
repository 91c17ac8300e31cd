//! Copies past the caches, for what is too large to stay in them.
//!
//! An ordinary store reads the line from memory first, and pushes out what the next operation needs. A streaming store
//! of a whole line does neither: relu on 64 MiB runs at 54 GB/s on one core instead of 30. Stores of less than a line
//! gain nothing (34), so the width follows the SIMD level.

use crate::dtype::Element;
use crate::simd::{Level, level};

/// From this many bytes on, an output that is not read besides goes past the caches. About the size of a large
/// third-level cache: below, what is written may still be there when it is wanted.
pub(crate) const STREAMING_BYTES_MIN: usize = 32 << 20;

/// A cache line, and the widest store.
const LINE_BYTES: usize = 64;

/// Copies `source` to `target` past the caches. `fence` has to follow before other threads are told.
pub(crate) fn copy<T: Element>(target: &mut [T], source: &[T]) {
    assert_eq!(target.len(), source.len());
    // The elements before the first whole line; lines are whole elements, and elements are aligned to their size.
    let misaligned = target.as_ptr().addr() % LINE_BYTES;
    let head = if misaligned == 0 { 0 } else { (LINE_BYTES - misaligned) / size_of::<T>() };
    let head = head.min(target.len());
    let (target_head, target) = target.split_at_mut(head);
    let (source_head, source) = source.split_at(head);
    target_head.copy_from_slice(source_head);

    let body = size_of_val(target) / LINE_BYTES * LINE_BYTES / size_of::<T>();
    let (target_body, target_tail) = target.split_at_mut(body);
    let (source_body, source_tail) = source.split_at(body);
    target_tail.copy_from_slice(source_tail);
    copy_lines(target_body, source_body);
}

/// Copies whole lines to an aligned target.
fn copy_lines<T: Element>(target: &mut [T], source: &[T]) {
    #[cfg(target_arch = "x86_64")]
    {
        let bytes = size_of_val(target);
        let (to, from) = (target.as_mut_ptr().cast::<u8>(), source.as_ptr().cast::<u8>());
        match level() {
            // SAFETY: both slices have `bytes` bytes, a multiple of the line; the target is aligned to it (or empty);
            // the level was found on this processor; plain numbers may be copied as bytes.
            Level::Avx512 => return unsafe { x86::copy_avx512(to, from, bytes) },
            // SAFETY: as above.
            Level::Avx2 => return unsafe { x86::copy_avx2(to, from, bytes) },
            Level::Baseline => {}
        }
    }
    target.copy_from_slice(source);
}

/// Orders the streaming stores of this thread before whatever tells others that they are done.
pub(crate) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has it, and it touches no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256i, __m512i, _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512, _mm512_stream_si512,
    };

    /// # Safety
    /// `bytes` bytes can be read at `from` and written at `to`, which is aligned to 64; `bytes` is a multiple of 64.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn copy_avx512(to: *mut u8, from: *const u8, bytes: usize) {
        for offset in (0..bytes).step_by(64) {
            // SAFETY: inside both by the caller's promise.
            unsafe {
                let line: __m512i = _mm512_loadu_si512(from.add(offset).cast());
                _mm512_stream_si512(to.add(offset).cast(), line);
            }
        }
    }

    /// # Safety
    /// As `copy_avx512`.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn copy_avx2(to: *mut u8, from: *const u8, bytes: usize) {
        for offset in (0..bytes).step_by(64) {
            // SAFETY: inside both by the caller's promise; both halves of a line one after the other fill it.
            unsafe {
                let low: __m256i = _mm256_loadu_si256(from.add(offset).cast());
                let high: __m256i = _mm256_loadu_si256(from.add(offset + 32).cast());
                _mm256_stream_si256(to.add(offset).cast(), low);
                _mm256_stream_si256(to.add(offset + 32).cast(), high);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_length_and_alignment_is_copied_and_nothing_beside(start in 0usize..70, len in 0usize..400) {
            let source: Vec<u8> = (0..len).map(|i| i as u8).collect();
            let mut target = vec![255u8; start + len + 70];
            copy(&mut target[start..start + len], &source);
            fence();
            prop_assert_eq!(&target[start..start + len], &source[..]);
            prop_assert!(target[..start].iter().chain(&target[start + len..]).all(|&byte| byte == 255));

            let wide: Vec<f64> = source.iter().map(|&byte| f64::from(byte)).collect();
            let mut target = vec![-1.0f64; start + len + 9];
            copy(&mut target[start..start + len], &wide);
            fence();
            prop_assert_eq!(&target[start..start + len], &wide[..]);
            prop_assert!(target[..start].iter().chain(&target[start + len..]).all(|&value| value == -1.0));
        }
    }
}
