//! fill: one value everywhere, in any dtype; and zero.

use crate::cuda::copies;
use crate::dtype::{bf16, f16, with_element};
use crate::error::{Caller, Result};
use crate::launch::{Grid, Launcher, Source, args};
use crate::ops::call::{Buffer, Call, EVERY_DTYPE};
use crate::ops::loops::write;
use crate::streaming::{Make, STREAMING_BYTES_MIN};
use crate::{DType, Element, Tensor};

static SOURCE: Source = Source::new("fill.cu", include_str!("fill.cu"));

/// `out = value` everywhere. An integer dtype must be able to hold the value; a float dtype rounds
/// it.
#[track_caller]
pub fn fill_into(out: &Tensor, value: f64) -> Result<()> {
    fill("fill", out, value)
}

/// `out = 0` everywhere.
#[track_caller]
pub fn zero(out: &Tensor) -> Result<()> {
    fill("zero", out, 0.0)
}

#[track_caller]
fn fill(op: &'static str, out: &Tensor, value: f64) -> Result<()> {
    let mut call = Call::new(op);
    let out = call.writes("out", out);
    let by = call.by;
    call.run(out, &EVERY_DTYPE, |placed| {
        let [mut out] = placed.enter([out])?;
        with_element!(out.dtype, T => {
            let rounded = exact::<T>(value, by)?;
            match placed.launcher() {
                Some(gpu) => fill_on(&gpu, &out, value)?,
                None => fill_all(out.elements_mut::<T>(), rounded),
            }
        });
        Ok(())
    })
}

/// `value` as a `T`, or an error if an integer type cannot hold it.
pub(crate) fn exact<T: Element>(value: f64, by: Caller) -> Result<T> {
    let converted = T::from_f64(value);
    // The largest i64 is 2⁶³ − 1, which as f64 is 2⁶³ again.
    let beyond = T::DTYPE == DType::I64 && value >= 9_223_372_036_854_775_808.0;
    if T::DTYPE.is_float() || (converted.to_f64() == value && !beyond) {
        return Ok(converted);
    }
    let expected = format!("a whole number that {} holds", T::DTYPE);
    Err(by.value("value", expected, value))
}

/// The bits of `value`, rounded to `dtype`.
fn bits_of(value: f64, dtype: DType) -> u64 {
    match dtype {
        DType::F32 => f32::from_f64(value).to_bits().into(),
        DType::BF16 => bf16::from_f64(value).to_bits().into(),
        DType::F16 => f16::from_f64(value).to_bits().into(),
        DType::F64 => value.to_bits(),
        DType::U8 => u8::from_f64(value).into(),
        DType::I32 => i32::from_f64(value).cast_unsigned().into(),
        DType::I64 => i64::from_f64(value).cast_unsigned(),
    }
}

/// The kernel for a dtype by its width: `names` are for 1, 2, 4 and 8 bytes.
pub(crate) fn kernel_for_width(names: [&'static str; 4], dtype: DType) -> &'static str {
    names[dtype.bytes().trailing_zeros() as usize]
}

/// Fills `out` with `value`, rounded to its dtype.
fn fill_on(gpu: &Launcher, out: &Buffer<'_>, value: f64) -> Result<()> {
    let bits = bits_of(value, out.dtype);
    if bits == 0 && out.count > 0 {
        return zero_on(gpu, out);
    }
    let name = kernel_for_width(["fill_1", "fill_2", "fill_4", "fill_8"], out.dtype);
    let grid = Grid::packs(out.count, out.dtype);
    gpu.launch(&SOURCE, name, grid, args![out, out.count, bits])
}

/// `out = 0`, for an output that is not empty.
pub(super) fn zero_on(gpu: &Launcher, out: &Buffer<'_>) -> Result<()> {
    // SAFETY: the output is entered for writing and is this many bytes of this device's memory.
    let zeroed = unsafe { copies::fill(&gpu.queue, out.address(), 0, out.bytes()) };
    zeroed.map_err(|fault| fault.of(gpu.by, gpu.queue.gpu.device()))
}

/// Fills `out`, which `op` has just made on a GPU, with a value that its dtype can hold.
pub(crate) fn fill_new(out: &Tensor, value: f64, by: Caller) -> Result<()> {
    write_new(out, by, |gpu, out| fill_on(gpu, out, value))
}

/// Fills `out`, which `op` has just made on a GPU, with 0, 1, 2 …
pub(crate) fn arange_new(out: &Tensor, by: Caller) -> Result<()> {
    write_new(out, by, |gpu, out| {
        let grid = Grid::elements(out.count);
        gpu.launch(&SOURCE, ("arange", out.dtype), grid, args![out, out.count])
    })
}

/// Runs `launch` on `out`, which `op` has just made on a GPU.
pub(crate) fn write_new(
    out: &Tensor,
    by: Caller,
    launch: impl FnOnce(&Launcher, &Buffer<'_>) -> Result<()>,
) -> Result<()> {
    let mut call = Call::by(by);
    let out = call.writes("tensor", out);
    call.run(out, &EVERY_DTYPE, |placed| {
        let [out] = placed.enter([out])?;
        let gpu = placed.launcher().expect("the caller made it on a GPU");
        launch(&gpu, &out)
    })
}

/// Fills `out`, past the caches if it is large.
pub(super) fn fill_all<T: Element>(out: &mut [T], value: T) {
    let large = size_of_val(out) >= STREAMING_BYTES_MIN;
    write(out, large, One(value));
}

/// One value everywhere.
#[derive(Clone, Copy)]
struct One<T>(T);

impl<T: Element> Make<T> for One<T> {
    #[inline(always)]
    fn make(self, _: usize, out: &mut [T]) {
        out.fill(self.0);
    }
    #[inline(always)]
    fn ask(self, _: usize) {}
}

#[cfg(test)]
mod tests;
