//! fill: one value everywhere, in any dtype; and zero.

use crate::cuda::{Grid, Launcher, Source, copies};
use crate::dtype::{bf16, exact, f16, with_element};
use crate::error::{Result, Site};
use crate::ops::call::{Call, Lent};
use crate::ops::cast::EVERY_DTYPE;
use crate::ops::loops::{GRAIN, write_past_caches};
use crate::streaming::{Make, STREAMING_BYTES_MIN};
use crate::{DType, Element, Tensor, threads};

static SOURCE: Source = Source::new("fill.cu", include_str!("fill.cu"));

/// `out = value` everywhere. An integer dtype must be able to hold the value; a float dtype rounds it.
#[track_caller]
pub fn fill_into(out: &Tensor, value: f64) -> Result<()> {
    // The zero of every dtype is all zero bits; that of −0 is not.
    if value.to_bits() == 0 {
        return fill_bytes("fill", out);
    }
    let mut call = Call::new("fill");
    let out = call.writes("out", out);
    let (op, at) = (call.op, call.at);
    let placed = call.place(out, &EVERY_DTYPE)?;
    let dtype = placed.tensor(out).dtype();
    {
        let [mut lent_out] = placed.enter([out])?;
        with_element!(dtype, T => {
            let rounded = exact::<T>(op, value, at)?;
            match placed.launcher()? {
                Some(gpu) => fill_on(&gpu, &lent_out, placed.tensor(out).count(), dtype.bytes(), bits_of(value, dtype))?,
                None => fill_all(lent_out.elements_mut::<T>(), rounded),
            }
        });
    }
    placed.finish()
}

/// `out = 0` everywhere.
#[track_caller]
pub fn zero(out: &Tensor) -> Result<()> {
    fill_bytes("zero", out)
}

#[track_caller]
fn fill_bytes(op: &'static str, out: &Tensor) -> Result<()> {
    let mut call = Call::new(op);
    let out = call.writes("out", out);
    let placed = call.place(out, &EVERY_DTYPE)?;
    {
        let [mut lent_out] = placed.enter([out])?;
        match placed.launcher()? {
            Some(gpu) => zero_on(&gpu, &lent_out, placed.tensor(out).bytes())?,
            None => fill_all(lent_out.elements_mut::<u8>(), 0),
        }
    }
    placed.finish()
}

/// The bits of `value`, rounded to `dtype`, in the lowest ones.
pub(crate) fn bits_of(value: f64, dtype: DType) -> u64 {
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

/// The kernel that is for elements of so many bytes: `names` are for 1, 2, 4 and 8.
pub(crate) fn kernel_for_width(names: [&'static str; 4], element_bytes: usize) -> &'static str {
    names[element_bytes.trailing_zeros() as usize]
}

/// Zeroes the `bytes` bytes of `out`.
fn zero_on(gpu: &Launcher, out: &Lent<'_>, bytes: usize) -> Result<()> {
    let Some(address) = out.address().filter(|_| bytes > 0) else { return Ok(()) };
    // SAFETY: the output is entered for writing, is memory of this device, and has so many bytes by the caller's promise.
    let zeroed = unsafe { copies::zero(&gpu.queue, address, bytes) };
    zeroed.map_err(|fault| fault.of(gpu.op, gpu.queue.gpu.device(), gpu.at))
}

/// Fills the `count` elements of `out`, of `element_bytes` each, with the lowest bits of `value`.
fn fill_on(gpu: &Launcher, out: &Lent<'_>, count: usize, element_bytes: usize, value: u64) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    let kernel = gpu.kernel(&SOURCE, kernel_for_width(["fill_1", "fill_2", "fill_4", "fill_8"], element_bytes))?;
    kernel.output(out).count(count).u64(value).launch(Grid::elements((count * element_bytes).div_ceil(16)))
}

/// Fills `out`, which `op` has just made on a GPU, with `value`, which an integer dtype must be able to hold.
pub(crate) fn fill_new(out: &Tensor, value: f64, op: &'static str, at: Site) -> Result<()> {
    write_new(out, op, at, |gpu, lent| match bits_of(value, out.dtype()) {
        // The zero of every dtype is all zero bits.
        0 => zero_on(gpu, lent, out.bytes()),
        bits => fill_on(gpu, lent, out.count(), out.dtype().bytes(), bits),
    })
}

/// Fills `out`, which `op` has just made on a GPU, with 0, 1, 2 …
pub(crate) fn arange_new(out: &Tensor, op: &'static str, at: Site) -> Result<()> {
    let name = match out.dtype() {
        DType::F32 => "arange_f32",
        DType::BF16 => "arange_bf16",
        DType::F16 => "arange_f16",
        DType::F64 => "arange_f64",
        DType::U8 => "arange_u8",
        DType::I32 => "arange_i32",
        DType::I64 => "arange_i64",
    };
    write_new(out, op, at, |gpu, lent| {
        gpu.kernel(&SOURCE, name)?.output(lent).count(out.count()).launch(Grid::elements(out.count()))
    })
}

/// Runs `launch` on `out`, which `op` has just made on a GPU, unless it is empty.
pub(crate) fn write_new(
    out: &Tensor,
    op: &'static str,
    at: Site,
    launch: impl FnOnce(&Launcher, &Lent<'_>) -> Result<()>,
) -> Result<()> {
    if out.count() == 0 {
        return Ok(());
    }
    let mut call = Call::new(op);
    call.at = at;
    let out = call.writes("tensor", out);
    let placed = call.place(out, &EVERY_DTYPE)?;
    let [lent] = placed.enter([out])?;
    let gpu = placed.launcher()?.expect("the caller asked whether the device is a GPU");
    let launched = launch(&gpu, &lent);
    drop(lent);
    launched.and_then(|()| placed.finish())
}

fn fill_all<T: Element>(out: &mut [T], value: T) {
    if size_of_val(out) >= STREAMING_BYTES_MIN {
        write_past_caches(out, One(value));
    } else {
        threads::split_mut(out, GRAIN, |_, part| part.fill(value));
    }
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
mod tests {
    use super::*;
    use crate::ops::testing::{SIZES, cpu, cpu_of};
    use crate::{DType, Device, Element};

    #[test]
    fn every_dtype_and_size_is_filled_and_zeroed() {
        for (size, dtype) in SIZES.into_iter().flat_map(|size| DType::ALL.map(|dtype| (size, dtype))) {
            let out = Tensor::ones(&[size], dtype, Device::Cpu).unwrap();
            fill_into(&out, 7.0).unwrap();
            with_element!(dtype, T => {
                assert!(out.to_vec::<T>().unwrap().iter().all(|x| x.to_f64() == 7.0), "{dtype} {size}");
                zero(&out).unwrap();
                assert!(out.to_vec::<T>().unwrap().iter().all(|x| x.to_f64() == 0.0), "{dtype} {size}");
            });
        }
    }

    #[test]
    fn floats_round_and_keep_the_sign_of_zero_and_only_the_part_named_is_written() {
        let whole = cpu(&[1.0; 4], &[4]);
        fill_into(&whole.slice(1..2).unwrap(), -0.0).unwrap();
        fill_into(&whole.slice(2..3).unwrap(), 0.1).unwrap();
        zero(&whole.slice(3..4).unwrap()).unwrap();
        let bits: Vec<u32> = whole.to_vec::<f32>().unwrap().iter().map(|x| x.to_bits()).collect();
        assert_eq!(bits, [1.0, -0.0, 0.1f32, 0.0].map(f32::to_bits));
        fill_into(&whole, f64::NAN).unwrap();
        assert!(whole.to_vec::<f32>().unwrap().iter().all(|x| x.is_nan()));
    }

    #[test]
    fn a_large_output_is_filled_to_its_last_element() {
        // Past the size from which the loops store around the caches, and on no round number of blocks.
        let count = (33 << 20) / 4 + 3;
        let out = Tensor::zeros(&[count], DType::I32, Device::Cpu).unwrap();
        fill_into(&out, -5.0).unwrap();
        assert!(out.with_slice::<i32, _>(|out| out.iter().all(|&x| x == -5)).unwrap());
    }

    #[test]
    fn a_value_that_an_integer_cannot_hold_is_refused() {
        for (value, dtype) in [(0.5, "u8"), (256.0, "u8"), (-1.0, "u8"), (f64::NAN, "u8")] {
            let error = fill_into(&cpu_of(&[1u8], &[1]), value).unwrap_err().to_string();
            let expected = format!("fill: value: expected a whole number that {dtype} holds, got {value}");
            assert!(error.contains(&expected), "{error}");
        }
        // i64 ends one below 2⁶³, which the f64 comparison alone would not tell apart.
        let out = cpu_of(&[1i64], &[1]);
        assert!(fill_into(&out, 2f64.powi(63)).is_err());
        fill_into(&out, -2f64.powi(63)).unwrap();
        assert_eq!(out.to_vec::<i64>().unwrap(), [i64::MIN]);
    }
}
