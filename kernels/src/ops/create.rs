//! Constructors, except `empty` and `zeros_pinned` (`tensor.rs`), and fills: one value everywhere,
//! or random numbers with the same bits on every device. Each constructor takes a device, or
//! inherits it and the dtype from a tensor (`zeros_like`, `new_zeros` …). There is no default
//! device.

use crate::cuda::copies;
use crate::dtype::{bf16, f16, with_element};
use crate::error::{Caller, Result, TensorInfo};
use crate::launch::{CuFile, GpuLaunch, Grid, args};
use crate::ops::call::{Buffer, EVERY_DTYPE, OpCall};
use crate::ops::elementwise::write;
use crate::random::{Draw, Random};
use crate::storage::{Borrow, ContentsOrigin};
use crate::streaming::{Make, STREAMING_BYTES_MIN};
use crate::transfer::{self, Asked};
use crate::{DType, Device, Element, Shape, Tensor};

/// Makes a tensor: `fill` writes its elements on the CPU, `launch` runs kernels that make the same
/// bits on a GPU.
fn made<T: Element>(
    by: Caller,
    shape: &[usize],
    device: Device,
    fill: impl FnOnce(&mut [T]),
    launch: impl FnOnce(&GpuLaunch, &Buffer<'_>) -> Result<()>,
) -> Result<Tensor> {
    let shape = Shape::checked(shape, by)?;
    let tensor = Tensor::allocate(shape, T::DTYPE, device, ContentsOrigin::Computed, by)?;
    if device == Device::Cpu {
        fill(tensor.borrow("tensor", true, by)?.elements_mut::<T>());
    } else {
        write_new(&tensor, by, launch)?;
    }
    Ok(tensor)
}

/// A tensor whose elements `fill` writes on the CPU; if it is to be elsewhere, it is sent there.
pub(crate) fn host_data(
    shape: Shape,
    dtype: DType,
    device: Device,
    by: Caller,
    fill: impl FnOnce(Borrow<'_>) -> Result<()>,
) -> Result<Tensor> {
    if device != Device::Cpu {
        // Before host memory is filled.
        let info = TensorInfo::new(dtype, shape, Device::Cpu);
        transfer::check(&info, device, Asked::Explicitly, by)?;
    }
    let here = Tensor::allocate(shape, dtype, Device::Cpu, ContentsOrigin::HostData, by)?;
    fill(here.borrow("tensor", true, by)?)?;
    here.to_at(device, by)
}

/// All `value`, which an integer dtype must be able to hold.
fn full(by: Caller, shape: &[usize], value: f64, dtype: DType, device: Device) -> Result<Tensor> {
    with_element!(dtype, T => {
        let rounded = exact::<T>(value, by)?;
        let fill = |elements: &mut [T]| elements.fill(rounded);
        made::<T>(by, shape, device, fill, |gpu, out| fill_on(gpu, out, value))
    })
}

/// A random tensor. A failure uses up no numbers.
fn drawn(
    by: Caller,
    distribution: Distribution,
    shape: &[usize],
    dtype: DType,
    device: Device,
    random: &mut Random,
) -> Result<Tensor> {
    let (fits, expected) = match distribution {
        Distribution::Below(_) => (!dtype.is_float(), "u8, i32 or i64"),
        Distribution::Uniform | Distribution::Normal => (
            dtype.is_float() && dtype != DType::F16,
            "f32, bf16 or f64 (use randint for integers)",
        ),
    };
    if !fits {
        return Err(by.value("dtype", expected, dtype));
    }
    let mut after = random.clone();
    let draw = after.next_draw();
    let tensor = with_element!(dtype, T => {
        let fill = |elements: &mut [T]| match distribution {
            Distribution::Below(bound) => draw.fill_below(bound, elements),
            of => draw.fill(of == Distribution::Normal, elements),
        };
        made::<T>(by, shape, device, fill, |gpu, out| draw_on(gpu, out, draw, distribution))
    })?;
    *random = after;
    Ok(tensor)
}

impl Tensor {
    /// All zeros.
    #[track_caller]
    pub fn zeros(shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
        let by = Caller::new("zeros");
        let shape = Shape::checked(shape, by)?;
        let tensor = Tensor::allocate(shape, dtype, device, ContentsOrigin::Computed, by)?;
        if device == Device::Cpu {
            tensor.clear(by)?;
        } else {
            write_new(&tensor, by, |gpu, out| fill_on(gpu, out, 0.0))?;
        }
        Ok(tensor)
    }

    /// All ones.
    #[track_caller]
    pub fn ones(shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
        full(Caller::new("ones"), shape, 1.0, dtype, device)
    }

    /// All `value`, which an integer dtype must be able to hold.
    #[track_caller]
    pub fn full(shape: &[usize], value: f64, dtype: DType, device: Device) -> Result<Tensor> {
        full(Caller::new("full"), shape, value, dtype, device)
    }

    /// 0, 1, 2 … `count` − 1, which an integer dtype must be able to hold.
    #[track_caller]
    pub fn arange(count: usize, dtype: DType, device: Device) -> Result<Tensor> {
        let by = Caller::new("arange");
        with_element!(dtype, T => {
            exact::<T>(count.saturating_sub(1) as f64, by)?;
            let fill = |elements: &mut [T]| {
                for (index, element) in elements.iter_mut().enumerate() {
                    *element = T::from_f64(index as f64);
                }
            };
            made::<T>(by, &[count], device, fill, |gpu, out| {
                let grid = Grid::elements(out.count);
                gpu.launch(&FILL, ("arange", out.dtype), grid, args![out, out.count])
            })
        })
    }

    /// Uniform in [0, 1), in f32, bf16 or f64; the same bits on every device and any thread count.
    #[track_caller]
    pub fn rand(
        shape: &[usize],
        dtype: DType,
        device: Device,
        random: &mut Random,
    ) -> Result<Tensor> {
        let by = Caller::new("rand");
        drawn(by, Distribution::Uniform, shape, dtype, device, random)
    }

    /// Standard normal, in f32, bf16 or f64; the same bits on every device and any thread count.
    #[track_caller]
    pub fn randn(
        shape: &[usize],
        dtype: DType,
        device: Device,
        random: &mut Random,
    ) -> Result<Tensor> {
        let by = Caller::new("randn");
        drawn(by, Distribution::Normal, shape, dtype, device, random)
    }

    /// Whole numbers uniform in 0..`bound`, as U8, I32 or I64.
    #[track_caller]
    pub fn randint(
        bound: u32,
        shape: &[usize],
        dtype: DType,
        device: Device,
        random: &mut Random,
    ) -> Result<Tensor> {
        let by = Caller::new("randint");
        let most: u64 = match dtype {
            DType::U8 => 1 << 8,
            DType::I32 => 1 << 31,
            // Others are refused below.
            DType::I64 | DType::F32 | DType::BF16 | DType::F16 | DType::F64 => u32::MAX.into(),
        };
        if bound == 0 || u64::from(bound) > most {
            return Err(by.value("bound", format!("1 to {most}"), bound));
        }
        drawn(by, Distribution::Below(bound), shape, dtype, device, random)
    }

    /// The elements of `data` in the given shape. On a GPU this is an upload.
    #[track_caller]
    pub fn from_slice<T: Element>(data: &[T], shape: &[usize], device: Device) -> Result<Tensor> {
        let by = Caller::new("from_slice");
        let shape = Shape::checked(shape, by)?;
        if shape.count() != data.len() {
            let expected = format!("{} for the shape {shape}", shape.count());
            let what = "number of elements";
            return Err(by.value(what, expected, data.len()));
        }
        if !device.is_planned() {
            device.check_usable(by)?;
        }
        host_data(shape, T::DTYPE, device, by, |mut memory| {
            memory.elements_mut().copy_from_slice(data);
            Ok(())
        })
    }

    /// One number, as a tensor without dimensions.
    #[track_caller]
    pub fn scalar<T: Element>(value: T, device: Device) -> Result<Tensor> {
        Tensor::from_slice(&[value], &[], device)
    }
}

/// Constructors that inherit the device and dtype: use them for helper tensors inside a model.
impl Tensor {
    /// Unspecified elements, with this tensor's shape, dtype and device.
    #[track_caller]
    pub fn empty_like(&self) -> Result<Tensor> {
        Tensor::empty(self.shape(), self.dtype(), self.device())
    }

    /// Zeros, with this tensor's shape, dtype and device.
    #[track_caller]
    pub fn zeros_like(&self) -> Result<Tensor> {
        Tensor::zeros(self.shape(), self.dtype(), self.device())
    }

    /// Ones, with this tensor's shape, dtype and device.
    #[track_caller]
    pub fn ones_like(&self) -> Result<Tensor> {
        Tensor::ones(self.shape(), self.dtype(), self.device())
    }

    /// Standard normal, with this tensor's shape, dtype and device.
    #[track_caller]
    pub fn randn_like(&self, random: &mut Random) -> Result<Tensor> {
        Tensor::randn(self.shape(), self.dtype(), self.device(), random)
    }

    /// Unspecified elements of another shape, with this tensor's dtype and device.
    #[track_caller]
    pub fn new_empty(&self, shape: &[usize]) -> Result<Tensor> {
        Tensor::empty(shape, self.dtype(), self.device())
    }

    /// Zeros of another shape, with this tensor's dtype and device.
    #[track_caller]
    pub fn new_zeros(&self, shape: &[usize]) -> Result<Tensor> {
        Tensor::zeros(shape, self.dtype(), self.device())
    }

    /// `value` everywhere in another shape, with this tensor's dtype and device.
    #[track_caller]
    pub fn new_full(&self, shape: &[usize], value: f64) -> Result<Tensor> {
        Tensor::full(shape, value, self.dtype(), self.device())
    }
}

pub(super) static FILL: CuFile = CuFile::new("fill.cu", include_str!("fill.cu"));

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
    let mut call = OpCall::new(op);
    let out = call.writes("out", out);
    let by = call.by;
    call.run(out, &EVERY_DTYPE, |placed| {
        let [mut out] = placed.enter([out])?;
        with_element!(out.dtype, T => {
            let rounded = exact::<T>(value, by)?;
            match placed.gpu() {
                Some(gpu) => fill_on(&gpu, &out, value)?,
                None => fill_all(out.elements_mut::<T>(), rounded),
            }
        });
        Ok(())
    })
}

/// `value` as a `T`, or an error if an integer type cannot hold it.
fn exact<T: Element>(value: f64, by: Caller) -> Result<T> {
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
fn fill_on(gpu: &GpuLaunch, out: &Buffer<'_>, value: f64) -> Result<()> {
    let bits = bits_of(value, out.dtype);
    if bits == 0 && out.count > 0 {
        return zero_on(gpu, out);
    }
    let name = kernel_for_width(["fill_1", "fill_2", "fill_4", "fill_8"], out.dtype);
    let grid = Grid::packs(out.count, out.dtype);
    gpu.launch(&FILL, name, grid, args![out, out.count, bits])
}

/// `out = 0`, for an output that is not empty.
pub(super) fn zero_on(gpu: &GpuLaunch, out: &Buffer<'_>) -> Result<()> {
    // SAFETY: the output is entered for writing and is this many bytes of this device's memory.
    let zeroed = unsafe { copies::fill(&gpu.queue, out.address(), 0, out.bytes()) };
    zeroed.map_err(|fault| fault.of(gpu.by, gpu.queue.gpu.device()))
}

/// Runs `launch` on `out`, which was just made on a GPU.
fn write_new(
    out: &Tensor,
    by: Caller,
    launch: impl FnOnce(&GpuLaunch, &Buffer<'_>) -> Result<()>,
) -> Result<()> {
    let mut call = OpCall::by(by);
    let out = call.writes("tensor", out);
    call.run(out, &EVERY_DTYPE, |placed| {
        let [out] = placed.enter([out])?;
        let gpu = placed.gpu().expect("the caller made it on a GPU");
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

pub(super) static RANDOM: CuFile = CuFile::new("random.cu", include_str!("random.cu"));

/// What to draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Distribution {
    /// In [0, 1).
    Uniform,
    Normal,
    /// Integers in 0..bound.
    Below(u32),
}

/// Fills `out` on a GPU with `draw`. The caller checked its dtype.
fn draw_on(gpu: &GpuLaunch, out: &Buffer<'_>, draw: Draw, kind: Distribution) -> Result<()> {
    let (base, bound) = match kind {
        Distribution::Uniform => ("rand", 0),
        Distribution::Normal => ("randn", 0),
        Distribution::Below(bound) => ("randint", bound),
    };
    let [key_0, key_1] = draw.key;
    // A thread makes at least the four elements of a Philox block.
    let grid = Grid::elements(out.count.div_ceil(4));
    let args = args![out, out.count, key_0, key_1, draw.draw, bound];
    gpu.launch(&RANDOM, (base, out.dtype), grid, args)
}

#[cfg(test)]
mod tests;
