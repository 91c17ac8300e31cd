//! The arithmetic of reductions: what several ranks hold becomes one, in the order of the ranks, compiled for every width
//! of SIMD and chosen at run time.
//!
//! bf16 and f16 are added and compared in f32, and rounded once. Of equal values, and of several NaNs, the first rank's
//! is kept where there is a choice. I64 wraps around.

use ddp_kernels::DType;
use ddp_kernels::dtype::{bf16, f16, round};
use ddp_kernels::simd::{Level, level};

use crate::collective::Reduce;

/// Where the ranks' elements lie: those of rank `r` begin `r * stride_bytes` behind `first`, except those of `mine`,
/// which are the caller's own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sources {
    pub(crate) first: *const u8,
    pub(crate) stride_bytes: usize,
    pub(crate) ranks: usize,
    pub(crate) mine: usize,
}

/// Reduces `own` and what the others hold into `own`.
///
/// # Safety
///
/// From each of the others' places `own.len()` bytes can be read, which nobody writes until this returns, and which do not
/// overlap `own`. They need no alignment.
pub(crate) unsafe fn reduce(dtype: DType, reduce: Reduce, own: &mut [u8], sources: Sources) {
    assert!(sources.ranks >= 2 && sources.mine < sources.ranks && own.len().is_multiple_of(dtype.bytes()));
    macro_rules! by_operation {
        ($element:ty) => {
            match reduce {
                Reduce::Sum => dispatch::<$element, Sum>,
                Reduce::Max => dispatch::<$element, Max>,
                Reduce::Min => dispatch::<$element, Min>,
            }
        };
    }
    let run: unsafe fn(&mut [u8], Sources) = match dtype {
        DType::F32 => by_operation!(f32),
        DType::BF16 => by_operation!(bf16),
        DType::F16 => by_operation!(f16),
        DType::F64 => by_operation!(f64),
        DType::I64 => by_operation!(i64),
        DType::U8 | DType::I32 => unreachable!("Group refuses to reduce {dtype}"),
    };
    // SAFETY: by the caller's promise.
    unsafe { run(own, sources) }
}

/// A type that is reduced.
trait Element: Copy {
    /// What it is computed in.
    type Wide: Number;
    fn wide(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
}

/// A type that is computed in.
trait Number: Copy + PartialOrd {
    fn plus(self, other: Self) -> Self;
    fn is_nan(self) -> bool;
}

trait Operation {
    fn combine<N: Number>(all: N, next: N) -> N;
}

struct Sum;
struct Max;
struct Min;

impl Operation for Sum {
    #[inline(always)]
    fn combine<N: Number>(all: N, next: N) -> N {
        all.plus(next)
    }
}

impl Operation for Max {
    #[inline(always)]
    fn combine<N: Number>(all: N, next: N) -> N {
        if !all.is_nan() & ((next > all) | next.is_nan()) { next } else { all }
    }
}

impl Operation for Min {
    #[inline(always)]
    fn combine<N: Number>(all: N, next: N) -> N {
        if !all.is_nan() & ((next < all) | next.is_nan()) { next } else { all }
    }
}

macro_rules! number {
    ($($number:ty: $plus:expr, $is_nan:expr;)*) => {$(
        impl Number for $number {
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                ($plus)(self, other)
            }
            #[inline(always)]
            fn is_nan(self) -> bool {
                ($is_nan)(self)
            }
        }
        impl Element for $number {
            type Wide = $number;
            #[inline(always)]
            fn wide(self) -> Self {
                self
            }
            #[inline(always)]
            fn narrow(wide: Self) -> Self {
                wide
            }
        }
    )*};
}

number! {
    f32: |a: f32, b: f32| a + b, f32::is_nan;
    f64: |a: f64, b: f64| a + b, f64::is_nan;
    i64: i64::wrapping_add, |_: i64| false;
}

impl Element for bf16 {
    type Wide = f32;
    #[inline(always)]
    fn wide(self) -> f32 {
        round::bf16_wide(self)
    }
    #[inline(always)]
    fn narrow(wide: f32) -> bf16 {
        round::bf16_nearest(wide)
    }
}

impl Element for f16 {
    type Wide = f32;
    #[inline(always)]
    fn wide(self) -> f32 {
        round::f16_wide(self)
    }
    #[inline(always)]
    fn narrow(wide: f32) -> f16 {
        round::f16_nearest(wide)
    }
}

/// # Safety
///
/// As for `reduce`.
unsafe fn dispatch<E: Element, O: Operation>(own: &mut [u8], sources: Sources) {
    #[cfg(target_arch = "x86_64")]
    {
        /// # Safety
        ///
        /// As for `reduce`, on a processor that has these.
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        unsafe fn avx512<E: Element, O: Operation>(own: &mut [u8], sources: Sources) {
            // SAFETY: by the caller's promise.
            unsafe { body::<E, O>(own, sources) }
        }
        /// # Safety
        ///
        /// As above.
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn avx2<E: Element, O: Operation>(own: &mut [u8], sources: Sources) {
            // SAFETY: by the caller's promise.
            unsafe { body::<E, O>(own, sources) }
        }
        match level() {
            // SAFETY: by the caller's promise, and `level` found these features on this processor.
            Level::Avx512 => return unsafe { avx512::<E, O>(own, sources) },
            // SAFETY: as above.
            Level::Avx2 => return unsafe { avx2::<E, O>(own, sources) },
            Level::Baseline => {}
        }
    }
    // SAFETY: by the caller's promise.
    unsafe { body::<E, O>(own, sources) }
}

/// Elements that are read, combined and written at once: whole arrays by value, so that the compiler need not ask whether
/// memory overlaps.
const BLOCK: usize = 32;

/// # Safety
///
/// As for `reduce`.
#[inline(always)]
unsafe fn body<E: Element, O: Operation>(own: &mut [u8], sources: Sources) {
    let count = own.len() / size_of::<E>();
    let own = own.as_mut_ptr().cast::<E>();
    let blocks = count / BLOCK * BLOCK;
    // SAFETY: both walk over elements 0 to `count` once, each within `own` and what the caller promised.
    unsafe {
        for index in (0..blocks).step_by(BLOCK) {
            step::<E, O, BLOCK>(own, index, sources);
        }
        for index in blocks..count {
            step::<E, O, 1>(own, index, sources);
        }
    }
}

/// Reduces `B` elements from `index` on.
///
/// # Safety
///
/// They lie within `own` and what the caller of `reduce` promised.
#[inline(always)]
unsafe fn step<E: Element, O: Operation, const B: usize>(own: *mut E, index: usize, sources: Sources) {
    let read = |rank: usize| -> [E; B] {
        let theirs = sources.first.wrapping_add(rank * sources.stride_bytes).cast::<E>();
        let from = if rank == sources.mine { own.cast_const() } else { theirs };
        // SAFETY: by the caller's promise; any bits are a value of these types.
        unsafe { from.wrapping_add(index).cast::<[E; B]>().read_unaligned() }
    };
    let (first, second) = (read(0), read(1));
    let mut all: [E::Wide; B] = std::array::from_fn(|lane| O::combine(first[lane].wide(), second[lane].wide()));
    for rank in 2..sources.ranks {
        let next = read(rank);
        for (all, next) in all.iter_mut().zip(next) {
            *all = O::combine(*all, next.wide());
        }
    }
    let made: [E; B] = std::array::from_fn(|lane| E::narrow(all[lane]));
    // SAFETY: by the caller's promise.
    unsafe {
        own.wrapping_add(index).cast::<[E; B]>().write_unaligned(made);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The reduction written as plainly as can be, on the bits of one element of each rank.
    pub(crate) fn reference(dtype: DType, reduce: Reduce, ranks: &[u64]) -> u64 {
        fn fold<N: Number>(reduce: Reduce, all: impl Iterator<Item = N>) -> N {
            let combine = |a: N, b: N| match reduce {
                Reduce::Sum => a.plus(b),
                _ if a.is_nan() => a,
                _ if b.is_nan() => b,
                Reduce::Max => {
                    if b > a {
                        b
                    } else {
                        a
                    }
                }
                Reduce::Min => {
                    if b < a {
                        b
                    } else {
                        a
                    }
                }
            };
            all.reduce(combine).unwrap()
        }
        let bits = ranks.iter().copied();
        match dtype {
            DType::F32 => u64::from(fold(reduce, bits.map(|bits| f32::from_bits(bits as u32))).to_bits()),
            DType::F64 => fold(reduce, bits.map(f64::from_bits)).to_bits(),
            DType::I64 => fold(reduce, bits.map(|bits| bits as i64)) as u64,
            DType::BF16 => {
                let wide = fold(reduce, bits.map(|bits| bf16::from_bits(bits as u16).to_f32()));
                u64::from(bf16::from_f32(wide).to_bits())
            }
            DType::F16 => {
                let wide = fold(reduce, bits.map(|bits| f16::from_bits(bits as u16).to_f32()));
                u64::from(f16::from_f32(wide).to_bits())
            }
            DType::U8 | DType::I32 => unreachable!(),
        }
    }

    /// Equal to the bit, or both NaN: which NaN a sum of several gives is the processor's choice.
    pub(crate) fn same(dtype: DType, left: u64, right: u64) -> bool {
        let is_nan = |bits: u64| match dtype {
            DType::F32 => f32::from_bits(bits as u32).is_nan(),
            DType::F64 => f64::from_bits(bits).is_nan(),
            DType::BF16 => bf16::from_bits(bits as u16).is_nan(),
            DType::F16 => f16::from_bits(bits as u16).is_nan(),
            DType::U8 | DType::I32 | DType::I64 => false,
        };
        left == right || (is_nan(left) && is_nan(right))
    }

    /// The bits of element `index`.
    pub(crate) fn bits(dtype: DType, bytes: &[u8], index: usize) -> u64 {
        let size = dtype.bytes();
        let mut wide = [0; 8];
        wide[..size].copy_from_slice(&bytes[index * size..][..size]);
        u64::from_le_bytes(wide)
    }

    #[test]
    fn sixteen_bits_become_thirty_two_exactly() {
        for bits in 0..=u16::MAX {
            let (brain, half) = (bf16::from_bits(bits), f16::from_bits(bits));
            assert!(brain.wide().to_bits() == brain.to_f32().to_bits() || brain.is_nan());
            assert!(half.wide().to_bits() == half.to_f32().to_bits() || (half.is_nan() && half.wide().is_nan()));
            assert!(bf16::narrow(brain.wide()) == brain || brain.is_nan());
            assert!(f16::narrow(half.wide()) == half || half.is_nan());
        }
    }

    proptest! {
        #[test]
        fn thirty_two_bits_become_sixteen_by_rounding_once(bits in any::<u32>(), near in any::<u16>(), off in -2i32..3) {
            // Any number, and numbers around those where rounding turns.
            let tie = (u32::from(near) << 13 | 0x1000).wrapping_add_signed(off).wrapping_add(112 << 23);
            for wide in [bits, bits >> 1 & 0x47ff_ffff, tie, u32::from(near) << 16 | 0x8000].map(f32::from_bits) {
                let (brain, half) = (bf16::narrow(wide), f16::narrow(wide));
                prop_assert!(brain.to_bits() == bf16::from_f32(wide).to_bits() || (brain.is_nan() && wide.is_nan()));
                prop_assert!(half.to_bits() == f16::from_f32(wide).to_bits() || (half.is_nan() && wide.is_nan()), "{wide:e}");
            }
        }

        #[test]
        fn every_type_and_operation_equals_the_plain_loop(
            seed in any::<u64>(),
            count in 0usize..150,
            ranks in 2usize..6,
            mine in 0usize..5,
            shift in 0usize..9,
        ) {
            let mine = mine % ranks;
            for dtype in crate::collective::REDUCIBLE {
                for operation in [Reduce::Sum, Reduce::Max, Reduce::Min] {
                    let bytes = count * dtype.bytes();
                    let stride = bytes + 24;
                    let mut random = seed | 1;
                    let mut all = vec![0u8; ranks * stride + shift];
                    for (index, byte) in all.iter_mut().enumerate() {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        // Often all bits of a byte alike: zeros, infinities and NaNs come up.
                        *byte = [(random >> 33) as u8, 0, 0xff, 0x7f][(random >> 60) as usize % 4 * (index % 3 % 2)];
                    }
                    let expected: Vec<u64> = (0..count)
                        .map(|index| {
                            let of = |rank: usize| bits(dtype, &all[shift + rank * stride..], index);
                            reference(dtype, operation, &(0..ranks).map(of).collect::<Vec<_>>())
                        })
                        .collect();
                    let mut own = all[shift + mine * stride..][..bytes].to_vec();
                    let first = all[shift..].as_ptr();
                    let sources = Sources { first, stride_bytes: stride, ranks, mine };
                    // SAFETY: every place is within `all`, which nobody writes.
                    unsafe { reduce(dtype, operation, &mut own, sources) };
                    for (index, &expected) in expected.iter().enumerate() {
                        let found = bits(dtype, &own, index);
                        prop_assert!(same(dtype, found, expected), "{dtype} {operation:?}: {found:x} {expected:x}");
                    }
                }
            }
        }
    }
}
