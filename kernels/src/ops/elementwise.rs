//! Elementwise operations from the checks to the loop or the kernel, such as relu, gelu and scale.
//! Also the loops that other operations share: split over the threads, vectorised for this
//! processor, in place or into another tensor.
//!
//! An operation passes a small `Copy` type with `#[inline(always)]` methods instead of a closure,
//! because only those are certain to be compiled into each SIMD version of the loop.

use crate::dtype::{Element, bf16, bf16_nearest, bf16_wide};
use crate::error::Result;
use crate::launch::{CuFile, Grid, args};
use crate::ops::call::{Buffer, FLOATS_AND_BF16, OpCall, with_float};
use crate::simd::multiversion;
use crate::streaming::{self, Make, STREAMING_BYTES_MIN};
use crate::{DType, Tensor, threads};

/// Threads get pieces of a multiple of this many elements: whole cache lines and SIMD blocks.
pub(crate) const GRAIN: usize = 1024;

/// `out = f(x)` for one element, which may have another type.
pub(crate) trait Unary<T, To = T>: Copy + Send + Sync {
    /// Whether memory is the bottleneck, not arithmetic: then streaming stores pay off.
    const MEMORY_BOUND: bool = true;
    fn apply(self, x: T) -> To;
}

/// `out = f(a, b)` for one element.
pub(crate) trait Binary<T>: Copy + Send + Sync {
    /// As in `Unary`.
    const MEMORY_BOUND: bool = true;
    fn apply(self, a: T, b: T) -> T;
}

/// Declares functions of elements as types that are `Unary`, `Binary` or both; a number in brackets
/// is f64, and T the type of elements:
/// `of_elements! { Scale(factor): (x) => x * T::from_f64(factor); }`.
macro_rules! of_elements {
    (@struct [$($head:tt)*] ()) => { $($head)*; };
    (@struct [$($head:tt)*] ($number:ident)) => { $($head)*(f64); };
    (@impl $Name:ident $number:tt ($x:ident) => $value:expr) => {
        $crate::ops::elementwise::of_elements! { @impl $Name $number Unary [$x: T] => $value }
    };
    (@impl $Name:ident $number:tt ($a:ident, $b:ident) => $value:expr) => {
        $crate::ops::elementwise::of_elements! {
            @impl $Name $number Binary [$a: T, $b: T] => $value
        }
    };
    (@impl $Name:ident ($($number:ident)?) $Kind:ident [$($x:ident: T),+] => $value:expr) => {
        impl<T: $crate::ops::float::Float> $crate::ops::elementwise::$Kind<T> for $Name {
            #[inline(always)]
            fn apply(self, $($x: T),+) -> T {
                $(let $Name($number) = self;)?
                $value
            }
        }
    };
    ($($(#[$meta:meta])* $seen:vis $Name:ident $number:tt: $($args:tt => $value:expr),+;)*) => {$(
        $crate::ops::elementwise::of_elements! {
            @struct [$(#[$meta])* #[derive(Clone, Copy)] $seen struct $Name] $number
        }
        $($crate::ops::elementwise::of_elements! { @impl $Name $number $args => $value })+
    )*};
}
pub(crate) use of_elements;

multiversion! {
    /// `out = f(out)`.
    pub(crate) fn unary_in_place[T: Element, F: Unary<T>](out: &mut [T], f: F) {
        for out in out {
            *out = f.apply(*out);
        }
    }
}

multiversion! {
    fn make_part[T: Element, M: Make<T>](out: &mut [T], first: usize, make: M) {
        make.make(first, out);
    }
}

multiversion! {
    /// `out = f(out, b)`.
    pub(crate) fn binary_in_place[T: Element, F: Binary<T>](out: &mut [T], b: &[T], f: F) {
        for (out, &b) in out.iter_mut().zip(b) {
            *out = f.apply(*out, b);
        }
    }
}

/// `out[i] = f(x[i])`; `x` may be in place.
pub(crate) fn unary<T: Element, F: Unary<T>>(out: &mut Buffer<'_>, x: &Buffer<'_>, f: F) {
    let out = out.elements_mut::<T>();
    let large = F::MEMORY_BOUND && std::mem::size_of_val(out) >= STREAMING_BYTES_MIN;
    match x.unless_in_place::<T>() {
        None if large => threads::split_mut(out, GRAIN, |_, out| {
            for block in out.chunks_mut(GRAIN) {
                // The whole next block: a single stream of reads allows that.
                streaming::ask(
                    block.as_ptr_range().end.cast(),
                    std::mem::size_of_val(block),
                );
                unary_in_place(block, f);
            }
        }),
        None => threads::split_mut(out, GRAIN, |_, out| unary_in_place(out, f)),
        Some(x) => write(out, large, UnaryOf { x, f }),
    }
}

/// `out[i] = f(a[i], b[i])`; `a` may be in place.
pub(crate) fn binary<T: Element, F: Binary<T>>(
    out: &mut Buffer<'_>,
    a: &Buffer<'_>,
    b: &Buffer<'_>,
    f: F,
) {
    let out = out.elements_mut::<T>();
    let b = b.elements::<T>();
    let large = F::MEMORY_BOUND && std::mem::size_of_val(out) >= STREAMING_BYTES_MIN;
    match a.unless_in_place::<T>() {
        None => threads::split_mut(out, GRAIN, |first, out| {
            binary_in_place(out, &b[first..first + out.len()], f)
        }),
        Some(a) => write(out, large, BinaryOf { a, b, f }),
    }
}

/// Writes what `make` computes to `out`; past the caches, with streaming stores, if it is `large`.
pub(crate) fn write<T: Element>(out: &mut [T], large: bool, make: impl Make<T>) {
    threads::split_mut(out, GRAIN, |first, out| {
        if large {
            streaming::write(out, first, make);
            streaming::fence();
        } else {
            make_part(out, first, make);
        }
    });
}

/// A function of the elements of a slice.
#[derive(Clone, Copy)]
pub(crate) struct UnaryOf<'a, T, F> {
    pub(crate) x: &'a [T],
    pub(crate) f: F,
}

impl<T: Element, To: Element, F: Unary<T, To>> Make<To> for UnaryOf<'_, T, F> {
    #[inline(always)]
    fn make(self, first: usize, out: &mut [To]) {
        let x = &self.x[first..first + out.len()];
        for (out, &x) in out.iter_mut().zip(x) {
            *out = self.f.apply(x);
        }
    }
    #[inline(always)]
    fn ask(self, first: usize) {
        streaming::ask_ahead(self.x, first);
    }
}

#[derive(Clone, Copy)]
struct BinaryOf<'a, T, F> {
    a: &'a [T],
    b: &'a [T],
    f: F,
}

impl<T: Element, F: Binary<T>> Make<T> for BinaryOf<'_, T, F> {
    #[inline(always)]
    fn make(self, first: usize, out: &mut [T]) {
        let range = first..first + out.len();
        let (a, b) = (&self.a[range.clone()], &self.b[range]);
        for ((out, &a), &b) in out.iter_mut().zip(a).zip(b) {
            *out = self.f.apply(a, b);
        }
    }
    #[inline(always)]
    fn ask(self, first: usize) {
        streaming::ask_ahead(self.a, first);
        streaming::ask_ahead(self.b, first);
    }
}

/// A function of f32 for bf16.
#[derive(Clone, Copy)]
struct Rounded<F>(F);

impl<F: Unary<f32>> Unary<bf16> for Rounded<F> {
    const MEMORY_BOUND: bool = F::MEMORY_BOUND;
    #[inline(always)]
    fn apply(self, x: bf16) -> bf16 {
        bf16_nearest(self.0.apply(bf16_wide(x)))
    }
}

impl<F: Binary<f32>> Binary<bf16> for Rounded<F> {
    const MEMORY_BOUND: bool = F::MEMORY_BOUND;
    #[inline(always)]
    fn apply(self, a: bf16, b: bf16) -> bf16 {
        bf16_nearest(self.0.apply(bf16_wide(a), bf16_wide(b)))
    }
}

/// The file and the name of an operation's kernels, of which there is one for each dtype, and the
/// argument that they get last, if any.
pub(crate) type Kernel = (&'static CuFile, &'static str, Option<u64>);

/// `out = f(x)`, in f32, or f64 on the CPU; `x` may be `out`.
#[track_caller]
pub(crate) fn unary_op(
    op: &'static str,
    out: &Tensor,
    x: &Tensor,
    f: impl Unary<f32> + Unary<f64>,
    (source, name, last): Kernel,
) -> Result<()> {
    let mut call = OpCall::new(op);
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    call.may_be_in_place(x, out);
    call.elementwise(&[out, x])?;
    call.run(x, &FLOATS_AND_BF16, |placed| {
        let [mut out, x] = placed.enter([out, x])?;
        if let Some(gpu) = placed.gpu() {
            let args = args![out, x, out.count, last];
            let args = &args[..3 + usize::from(last.is_some())];
            let grid = Grid::packs(out.count, out.dtype);
            return gpu.launch(source, (name, out.dtype), grid, args);
        }
        if placed.dtype == DType::BF16 {
            unary::<bf16, _>(&mut out, &x, Rounded(f));
        } else {
            with_float!(placed.dtype, T => unary::<T, _>(&mut out, &x, f));
        }
        Ok(())
    })
}

/// `out = f(a, b)`, in f32, or f64 on the CPU; `a` may be `out`. Each operand comes with its role.
#[track_caller]
pub(crate) fn binary_op(
    op: &'static str,
    [out, a, b]: [(&'static str, &Tensor); 3],
    f: impl Binary<f32> + Binary<f64>,
    (source, name, last): Kernel,
) -> Result<()> {
    let mut call = OpCall::new(op);
    let out = call.writes(out.0, out.1);
    let a = call.reads(a.0, a.1);
    let b = call.reads(b.0, b.1);
    call.may_be_in_place(a, out);
    call.elementwise(&[out, a, b])?;
    call.run(a, &FLOATS_AND_BF16, |placed| {
        let [mut out, a, b] = placed.enter([out, a, b])?;
        if let Some(gpu) = placed.gpu() {
            let args = args![out, a, b, out.count, last];
            let args = &args[..4 + usize::from(last.is_some())];
            let grid = Grid::packs(out.count, out.dtype);
            return gpu.launch(source, (name, out.dtype), grid, args);
        }
        if placed.dtype == DType::BF16 {
            binary::<bf16, _>(&mut out, &a, &b, Rounded(f));
        } else {
            with_float!(placed.dtype, T => binary::<T, _>(&mut out, &a, &b, f));
        }
        Ok(())
    })
}
