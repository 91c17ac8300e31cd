//! Constructors, but for `empty` and `zeros_pinned` (`tensor/new.rs`). Each takes a device, or
//! inherits it and the dtype from a tensor (`zeros_like`, `new_zeros` …). There is no default
//! device.

use super::fill::{arange_new, exact, fill_new};
use super::random::{Distribution, draw_new};
use crate::dtype::with_element;
use crate::error::{Caller, Result, TensorInfo};
use crate::random::Random;
use crate::storage::{Borrow, Origin};
use crate::transfer::{self, Asked};
use crate::{DType, Device, Element, Shape, Tensor};

/// Makes a tensor: `fill` writes its elements on the CPU, `launch` runs kernels that make the same
/// bits on a GPU.
fn made<T: Element>(
    by: Caller,
    shape: &[usize],
    device: Device,
    fill: impl FnOnce(&mut [T]),
    launch: impl FnOnce(&Tensor) -> Result<()>,
) -> Result<Tensor> {
    let shape = Shape::checked(shape, by)?;
    let tensor = Tensor::allocate(shape, T::DTYPE, device, Origin::Computed, by)?;
    if device == Device::Cpu {
        fill(tensor.borrow("tensor", true, by)?.elements_mut::<T>());
    } else {
        launch(&tensor)?;
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
        let info = TensorInfo {
            name: None,
            dtype,
            shape,
            device: Device::Cpu,
        };
        transfer::check(&info, device, Asked::Explicitly, by)?;
    }
    let here = Tensor::allocate(shape, dtype, Device::Cpu, Origin::HostData, by)?;
    fill(here.borrow("tensor", true, by)?)?;
    here.to_at(device, by)
}

/// All `value`, which an integer dtype must be able to hold.
fn full(by: Caller, shape: &[usize], value: f64, dtype: DType, device: Device) -> Result<Tensor> {
    with_element!(dtype, T => {
        let rounded = exact::<T>(value, by)?;
        let fill = |elements: &mut [T]| elements.fill(rounded);
        made::<T>(by, shape, device, fill, |tensor| fill_new(tensor, value, by))
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
        _ => (
            dtype.is_float() && dtype != DType::F16,
            "f32, bf16 or f64 (use randint for integers)",
        ),
    };
    if !fits {
        return Err(by.value("dtype", expected, dtype));
    }
    let mut after = random.clone();
    let draw = after.next_draw();
    let launch = |tensor: &Tensor| draw_new(tensor, draw, distribution, by);
    let tensor = with_element!(dtype, T => {
        let fill = |elements: &mut [T]| match distribution {
            Distribution::Below(bound) => draw.fill_below(bound, elements),
            of => draw.fill(of == Distribution::Normal, elements),
        };
        made::<T>(by, shape, device, fill, launch)
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
        let tensor = Tensor::allocate(shape, dtype, device, Origin::Computed, by)?;
        if device.is_accelerator() {
            fill_new(&tensor, 0.0, by)?;
        } else {
            tensor.clear(by)?;
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
            made::<T>(by, &[count], device, fill, |tensor| arange_new(tensor, by))
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
            _ => u64::from(u32::MAX),
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
        device.check_usable(by)?;
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
