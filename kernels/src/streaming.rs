//! Stores past the caches, with prefetched inputs, for outputs too large for the caches.
//!
//! An ordinary store first reads the line from memory and evicts what the next operation needs; a
//! streaming store of a whole line does neither. Inputs a little ahead are prefetched, because the
//! processor's own prefetching stops at every page. Adding 64 MiB operands on two threads of a Zen
//! 4: ordinary stores 40 GB/s, these 54 to 57, a copy by the same means 56.
//!
//! Lines go straight from registers to memory: through a buffer it would be up to a third slower.

use crate::dtype::Element;
#[cfg(target_arch = "x86_64")]
use crate::simd::{Level, level};

/// Outputs from this size on go past the caches if nothing reads them now. About the size of a
/// large L3 cache: smaller outputs may still be in it at the next use.
pub(crate) const STREAMING_BYTES_MIN: usize = 32 << 20;

/// A cache line, and the widest store.
const LINE_BYTES: usize = 64;
/// How far ahead of a line its inputs are prefetched.
#[cfg(target_arch = "x86_64")]
const AHEAD_BYTES: usize = 1024;

/// Computes an output piece by piece.
pub(crate) trait Make<T>: Copy + Sync {
    /// Writes the elements from `first` on. `#[inline(always)]`, so that each SIMD version of the
    /// loop compiles its own.
    fn make(self, first: usize, out: &mut [T]);
    /// Prefetches the inputs of the elements from `first` on.
    fn ask(self, first: usize);
}

/// Computes `out`, whose first element is number `first`, past the caches. Call `fence` before
/// other threads may read it.
pub(crate) fn write<T: Element, M: Make<T>>(out: &mut [T], first: usize, make: M) {
    // The elements before the first whole line. Lines hold whole elements.
    let misaligned = out.as_ptr().addr() % LINE_BYTES;
    let head = if misaligned == 0 {
        0
    } else {
        (LINE_BYTES - misaligned) / size_of::<T>()
    };
    let (head, rest) = out.split_at_mut(head.min(out.len()));
    let body = size_of_val(rest) / LINE_BYTES * LINE_BYTES / size_of::<T>();
    let (body, tail) = rest.split_at_mut(body);
    let (body_first, tail_first) = (first + head.len(), first + head.len() + body.len());
    make.make(first, head);
    write_lines(body, body_first, make);
    make.make(tail_first, tail);
}

/// Computes whole, aligned lines.
fn write_lines<T: Element, M: Make<T>>(out: &mut [T], first: usize, make: M) {
    #[cfg(target_arch = "x86_64")]
    match level() {
        // SAFETY: this processor has that level.
        Level::Avx512 => return unsafe { x86::write_avx512(out, first, make) },
        // SAFETY: as above.
        Level::Avx2 => return unsafe { x86::write_avx2(out, first, make) },
        Level::Baseline => {}
    }
    make.ask(first);
    make.make(first, out);
}

/// Orders this thread's streaming stores before its later stores, which tell others that they are
/// done.
pub(crate) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has the instruction, which touches no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Prefetches the line some way ahead of element `index`, if the slice reaches so far.
#[inline(always)]
pub(crate) fn ask_ahead<T>(elements: &[T], index: usize) {
    #[cfg(target_arch = "x86_64")]
    x86::prefetch_line(
        elements
            .as_ptr()
            .wrapping_add(index)
            .cast::<u8>()
            .wrapping_add(AHEAD_BYTES),
    );
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (elements, index);
}

/// Prefetches `bytes` bytes from `start` on, which need not exist.
#[inline(always)]
pub(crate) fn ask(start: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..bytes).step_by(LINE_BYTES) {
        x86::prefetch_line(start.wrapping_add(offset));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, bytes);
}

/// Copies a slice.
#[derive(Clone, Copy)]
pub(crate) struct CopyOf<'a, T>(pub(crate) &'a [T]);

impl<T: Element> Make<T> for CopyOf<'_, T> {
    #[inline(always)]
    fn make(self, first: usize, out: &mut [T]) {
        out.copy_from_slice(&self.0[first..first + out.len()]);
    }
    #[inline(always)]
    fn ask(self, first: usize) {
        ask_ahead(self.0, first);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        _MM_HINT_T0, _mm_prefetch, _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512,
        _mm512_stream_si512,
    };

    use super::{LINE_BYTES, Make};
    use crate::dtype::Element;

    #[inline(always)]
    pub(super) fn prefetch_line(address: *const u8) {
        // SAFETY: every x86-64 has it; a prefetch never faults, whatever the address.
        #[allow(unused_unsafe, reason = "safe in the newest compilers")]
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(address.cast());
        }
    }

    /// Declares the loop over lines with `$features`, which stores a line by `$store`.
    macro_rules! write_lines {
        ($name:ident, $features:literal, |$to:ident, $from:ident| $store:expr) => {
            #[target_feature(enable = $features)]
            pub(super) fn $name<T: Element, M: Make<T>>(out: &mut [T], first: usize, make: M) {
                let line_len = LINE_BYTES / size_of::<T>();
                for (line, out) in out.chunks_exact_mut(line_len).enumerate() {
                    let index = first + line * line_len;
                    make.ask(index);
                    // Long enough for the narrowest elements; the compiler keeps the used part in a
                    // register.
                    let mut made = [T::default(); LINE_BYTES];
                    make.make(index, &mut made[..line_len]);
                    let ($to, $from) = (out.as_mut_ptr(), made.as_ptr());
                    // SAFETY: both are one line long, and `write` aligned the output to lines.
                    unsafe { $store };
                }
            }
        };
    }
    write_lines!(
        write_avx512,
        "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c",
        |to, from| _mm512_stream_si512(to.cast(), _mm512_loadu_si512(from.cast()))
    );
    write_lines!(write_avx2, "avx2,fma,f16c", |to, from| {
        let (to, from) = (to.cast(), from.cast());
        let (low, high) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)));
        _mm256_stream_si256(to, low);
        _mm256_stream_si256(to.add(1), high);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_length_and_alignment_is_written_and_nothing_beside(start in 0usize..70, len in 0usize..400) {
            let source: Vec<u8> = (0..len + 5).map(|i| i as u8).collect();
            let mut target = vec![255u8; start + len + 70];
            write(&mut target[start..start + len], 5, CopyOf(&source));
            fence();
            prop_assert_eq!(&target[start..start + len], &source[5..]);
            prop_assert!(target[..start].iter().chain(&target[start + len..]).all(|&byte| byte == 255));

            let wide: Vec<f64> = source.iter().map(|&byte| f64::from(byte)).collect();
            let mut target = vec![-1.0f64; start + len + 9];
            write(&mut target[start..start + len], 5, CopyOf(&wide));
            fence();
            prop_assert_eq!(&target[start..start + len], &wide[5..]);
            prop_assert!(target[..start].iter().chain(&target[start + len..]).all(|&value| value == -1.0));
        }
    }
}
