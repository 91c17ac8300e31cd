//! The arithmetic of reductions: adds the elements of several ranks, in rank order or in the order
//! of a tree. The code for rank order is compiled for every SIMD width, and the width is chosen at
//! run time.
//!
//! bf16 is added and compared in f32, and rounded once. Where values are equal, or several are NaN,
//! the first rank's is kept if there is a choice. i64 wraps around.

use crate::DType;
use crate::dtype::{bf16, bf16_nearest, bf16_wide};
use crate::named;
#[cfg(target_arch = "x86_64")]
use crate::simd::{Level, level};

named! {
    /// How the elements of all ranks are combined. Sums add in rank order, in f32 for bf16 (rounded
    /// once at the end), so that every rank and every run gets the same bits.
    #[derive(Hash)]
    pub enum Reduce {
        /// The sum.
        Sum = "sum",
        /// The largest; NaN if any is NaN.
        Max = "max",
        /// The smallest; NaN if any is NaN.
        Min = "min",
    }
}

/// One of the partial sums that make up a sum along a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addend {
    /// The rank that gives it.
    pub rank: usize,
    /// Its position among those that the rank gives.
    pub row: usize,
    /// How many additions follow it: each adds the last two remaining sums.
    pub additions: usize,
}

/// Where the ranks' elements are: those of rank `r` begin `r * stride_bytes` after `first`, except
/// those of `mine`, which are the caller's own.
#[derive(Clone, Copy, Debug)]
pub struct Sources {
    /// Those of rank 0.
    pub first: *const u8,
    /// From one rank's to the next one's.
    pub stride_bytes: usize,
    /// How many ranks there are.
    pub ranks: usize,
    /// The caller's rank.
    pub mine: usize,
}

/// Reduces the elements of all ranks into `own`.
///
/// # Safety
///
/// `own.len()` bytes can be read at each of the other ranks' places. Nothing writes them until this
/// returns, and they do not overlap `own`. They need no alignment.
pub unsafe fn reduce(dtype: DType, reduce: Reduce, own: &mut [u8], sources: Sources) {
    assert!(
        sources.ranks >= 2
            && sources.mine < sources.ranks
            && own.len().is_multiple_of(dtype.bytes())
    );
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
        DType::F64 => by_operation!(f64),
        DType::I64 => by_operation!(i64),
        DType::F16 | DType::U8 | DType::I32 => unreachable!("Group refuses to reduce {dtype}"),
    };
    // SAFETY: by the caller's promise.
    unsafe { run(own, sources) }
}

/// The most sums that are left at a time in a sum along a tree: of 2¹⁵ shards.
const DEPTH: usize = 16;

/// Where the elements of a partial sum are; None if they are those that the sum replaces.
pub type PlaceOf<'a> = &'a dyn Fn(&Addend) -> Option<*const u8>;

/// Adds partial sums in the order of a tree, into `own`. Every addition rounds to `dtype`.
///
/// # Safety
///
/// `own.len()` bytes can be read at each place. Nothing writes them until this returns, and they do
/// not overlap `own`. They need no alignment.
pub unsafe fn add_in_order(dtype: DType, own: &mut [u8], order: &[Addend], place: PlaceOf<'_>) {
    let run: unsafe fn(&mut [u8], &[Addend], PlaceOf<'_>) = match dtype {
        DType::F32 => add_elements::<f32>,
        DType::BF16 => add_elements::<bf16>,
        DType::F64 => add_elements::<f64>,
        DType::I64 => add_elements::<i64>,
        DType::F16 | DType::U8 | DType::I32 => unreachable!("Group refuses to reduce {dtype}"),
    };
    // SAFETY: by the caller's promise.
    unsafe { run(own, order, place) }
}

/// # Safety
///
/// As for `add_in_order`.
unsafe fn add_elements<E: Reducible>(own: &mut [u8], order: &[Addend], place: PlaceOf<'_>) {
    let count = own.len() / size_of::<E>();
    let own = own.as_mut_ptr().cast::<E>();
    let blocks = count / WIDE_BLOCK * WIDE_BLOCK;
    let (mut left, mut left_of_one) = ([[E::ZERO; WIDE_BLOCK]; DEPTH], [[E::ZERO; 1]; DEPTH]);
    // SAFETY: as in `body`.
    unsafe {
        for index in (0..blocks).step_by(WIDE_BLOCK) {
            add_block(own, index, order, place, &mut left);
        }
        for index in blocks..count {
            add_block(own, index, order, place, &mut left_of_one);
        }
    }
}

/// Elements that are added at once along a tree.
const WIDE_BLOCK: usize = 128;

/// Adds `B` elements from `index` on.
///
/// # Safety
///
/// They are within `own` and what the caller of `add_in_order` promised.
#[inline(always)]
unsafe fn add_block<E: Reducible, const B: usize>(
    own: *mut E,
    index: usize,
    order: &[Addend],
    place: PlaceOf<'_>,
    left: &mut [[E; B]; DEPTH],
) {
    let mut count = 0;
    for part in order {
        let first = place(part).map_or(own.cast_const(), <*const u8>::cast::<E>);
        let from = first.wrapping_add(index);
        // SAFETY: by the caller's promise; any bits are a value of these types.
        let mut sum = unsafe { from.cast::<[E; B]>().read_unaligned() };
        for _ in 0..part.additions {
            count -= 1;
            for (sum, before) in sum.iter_mut().zip(&left[count]) {
                *sum = E::narrow(before.wide().plus(sum.wide()));
            }
        }
        left[count] = sum;
        count += 1;
    }
    // SAFETY: by the caller's promise.
    unsafe {
        own.wrapping_add(index)
            .cast::<[E; B]>()
            .write_unaligned(left[0]);
    }
}

/// A type that is reduced.
trait Reducible: Copy {
    /// What it is computed in.
    type Wide: WideNumber;
    const ZERO: Self;
    fn wide(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
}

/// A type that is computed in.
trait WideNumber: Copy + PartialOrd {
    fn plus(self, other: Self) -> Self;
    fn is_nan(self) -> bool;
}

trait SumOperation {
    fn combine<N: WideNumber>(all: N, next: N) -> N;
}

struct Sum;
struct Max;
struct Min;

impl SumOperation for Sum {
    #[inline(always)]
    fn combine<N: WideNumber>(all: N, next: N) -> N {
        all.plus(next)
    }
}

impl SumOperation for Max {
    #[inline(always)]
    fn combine<N: WideNumber>(all: N, next: N) -> N {
        if !all.is_nan() & ((next > all) | next.is_nan()) {
            next
        } else {
            all
        }
    }
}

impl SumOperation for Min {
    #[inline(always)]
    fn combine<N: WideNumber>(all: N, next: N) -> N {
        if !all.is_nan() & ((next < all) | next.is_nan()) {
            next
        } else {
            all
        }
    }
}

macro_rules! number {
    ($($number:ty: $plus:expr, $is_nan:expr;)*) => {$(
        impl WideNumber for $number {
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                ($plus)(self, other)
            }
            #[inline(always)]
            fn is_nan(self) -> bool {
                ($is_nan)(self)
            }
        }
        impl Reducible for $number {
            type Wide = $number;
            const ZERO: Self = 0 as $number;
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

impl Reducible for bf16 {
    type Wide = f32;
    const ZERO: Self = bf16::ZERO;
    #[inline(always)]
    fn wide(self) -> f32 {
        bf16_wide(self)
    }
    #[inline(always)]
    fn narrow(wide: f32) -> bf16 {
        bf16_nearest(wide)
    }
}

/// # Safety
///
/// As for `reduce`.
unsafe fn dispatch<E: Reducible, O: SumOperation>(own: &mut [u8], sources: Sources) {
    #[cfg(target_arch = "x86_64")]
    {
        /// # Safety
        ///
        /// As for `reduce`, on a processor that has these features.
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        unsafe fn avx512<E: Reducible, O: SumOperation>(own: &mut [u8], sources: Sources) {
            // SAFETY: by the caller's promise.
            unsafe { body::<E, O>(own, sources) }
        }
        /// # Safety
        ///
        /// As above.
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn avx2<E: Reducible, O: SumOperation>(own: &mut [u8], sources: Sources) {
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

/// Elements that are read, combined and written at once: arrays by value, so that the compiler
/// knows that they do not overlap.
const BLOCK: usize = 32;

/// # Safety
///
/// As for `reduce`.
#[inline(always)]
unsafe fn body<E: Reducible, O: SumOperation>(own: &mut [u8], sources: Sources) {
    let count = own.len() / size_of::<E>();
    let own = own.as_mut_ptr().cast::<E>();
    let blocks = count / BLOCK * BLOCK;
    // SAFETY: the loops visit elements 0 to `count` once, within `own` and the caller's promise.
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
/// They are within `own` and what the caller of `reduce` promised.
#[inline(always)]
unsafe fn step<E: Reducible, O: SumOperation, const B: usize>(
    own: *mut E,
    index: usize,
    sources: Sources,
) {
    let read = |rank: usize| -> [E; B] {
        let theirs = sources
            .first
            .wrapping_add(rank * sources.stride_bytes)
            .cast::<E>();
        let from = if rank == sources.mine {
            own.cast_const()
        } else {
            theirs
        };
        // SAFETY: by the caller's promise; any bits are a value of these types.
        unsafe { from.wrapping_add(index).cast::<[E; B]>().read_unaligned() }
    };
    let (first, second) = (read(0), read(1));
    let mut all: [E::Wide; B] =
        std::array::from_fn(|lane| O::combine(first[lane].wide(), second[lane].wide()));
    for rank in 2..sources.ranks {
        let next = read(rank);
        for (all, next) in all.iter_mut().zip(next) {
            *all = O::combine(*all, next.wide());
        }
    }
    let made: [E; B] = std::array::from_fn(|lane| E::narrow(all[lane]));
    // SAFETY: by the caller's promise.
    unsafe {
        own.wrapping_add(index)
            .cast::<[E; B]>()
            .write_unaligned(made);
    }
}

#[cfg(test)]
mod tests;
