//! Constructors, but for `empty` and `zeros_pinned` (`tensor/new.rs`). Each takes a device, or
//! inherits it and the dtype from a tensor (`zeros_like`, `new_zeros` …). There is no default
//! device.

use std::panic::Location;

use super::exact::exact;
use super::fill::{arange_new, fill_new};
use super::random::{Distribution, draw_new};
use crate::dtype::with_element;
use crate::error::{Error, Result, Site, TensorInfo};
use crate::random::{Draw, Random};
use crate::storage::Origin;
use crate::transfer::{self, Asked};
use crate::{DType, Device, Element, Shape, Tensor};

/// Makes a tensor: `fill` writes its elements on the CPU, `launch` runs kernels that make the same
/// bits on a GPU.
fn made<T: Element>(
    op: &'static str,
    shape: &[usize],
    device: Device,
    at: Site,
    fill: impl FnOnce(&mut [T]),
    launch: impl FnOnce(&Tensor) -> Result<()>,
) -> Result<Tensor> {
    let shape = Shape::checked(op, shape, at)?;
    let tensor = Tensor::allocate(shape, T::DTYPE, device, Origin::Computed, op, at)?;
    if device == Device::Cpu {
        fill(tensor.borrow("tensor", true, op, at)?.elements_mut::<T>());
    } else {
        launch(&tensor)?;
    }
    Ok(tensor)
}

/// Makes a random tensor. A failure uses up no numbers.
fn random_tensor<T: Element>(
    op: &'static str,
    shape: &[usize],
    device: Device,
    random: &mut Random,
    distribution: Distribution,
    at: Site,
    fill: impl FnOnce(Draw, &mut [T]),
) -> Result<Tensor> {
    let mut after = random.clone();
    let draw = after.next_draw();
    let launch = |tensor: &Tensor| draw_new(tensor, draw, distribution, op, at);
    let fill = |elements: &mut [T]| fill(draw, elements);
    let tensor = made::<T>(op, shape, device, at, fill, launch)?;
    *random = after;
    Ok(tensor)
}

impl Tensor {
    /// All zeros.
    #[track_caller]
    pub fn zeros(shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
        let at = Location::caller();
        let shape = Shape::checked("zeros", shape, at)?;
        let tensor = Tensor::allocate(shape, dtype, device, Origin::Computed, "zeros", at)?;
        if device.is_accelerator() {
            fill_new(&tensor, 0.0, "zeros", at)?;
        } else {
            tensor.clear("zeros", at)?;
        }
        Ok(tensor)
    }

    /// All ones.
    #[track_caller]
    pub fn ones(shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
        Tensor::full_of("ones", shape, 1.0, dtype, device, Location::caller())
    }

    /// All `value`, which an integer dtype must be able to hold.
    #[track_caller]
    pub fn full(shape: &[usize], value: f64, dtype: DType, device: Device) -> Result<Tensor> {
        Tensor::full_of("full", shape, value, dtype, device, Location::caller())
    }

    fn full_of(
        op: &'static str,
        shape: &[usize],
        value: f64,
        dtype: DType,
        device: Device,
        at: Site,
    ) -> Result<Tensor> {
        with_element!(dtype, T => {
            let rounded = exact::<T>(op, value, at)?;
            let fill = |elements: &mut [T]| elements.fill(rounded);
            made::<T>(op, shape, device, at, fill, |tensor| fill_new(tensor, value, op, at))
        })
    }

    /// 0, 1, 2 … `count` − 1, which an integer dtype must be able to hold.
    #[track_caller]
    pub fn arange(count: usize, dtype: DType, device: Device) -> Result<Tensor> {
        let (op, at) = ("arange", Location::caller());
        with_element!(dtype, T => {
            exact::<T>(op, count.saturating_sub(1) as f64, at)?;
            let fill = |elements: &mut [T]| {
                for (index, element) in elements.iter_mut().enumerate() {
                    *element = T::from_f64(index as f64);
                }
            };
            made::<T>(op, &[count], device, at, fill, |tensor| arange_new(tensor, op, at))
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
        Tensor::drawn("rand", shape, dtype, device, random, Location::caller())
    }

    /// Standard normal, in f32, bf16 or f64; the same bits on every device and any thread count.
    #[track_caller]
    pub fn randn(
        shape: &[usize],
        dtype: DType,
        device: Device,
        random: &mut Random,
    ) -> Result<Tensor> {
        Tensor::drawn("randn", shape, dtype, device, random, Location::caller())
    }

    fn drawn(
        op: &'static str,
        shape: &[usize],
        dtype: DType,
        device: Device,
        random: &mut Random,
        at: Site,
    ) -> Result<Tensor> {
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F64) {
            let expected = "f32, bf16 or f64 (use randint for integers)";
            return Err(Error::value_at(op, "dtype", expected, dtype, at));
        }
        let normal = op == "randn";
        let distribution = if normal {
            Distribution::Normal
        } else {
            Distribution::Uniform
        };
        with_element!(dtype, T => {
            let fill = |draw: Draw, elements: &mut [T]| draw.fill(normal, elements);
            random_tensor::<T>(op, shape, device, random, distribution, at, fill)
        })
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
        let (op, at) = ("randint", Location::caller());
        let most: u64 = match dtype {
            DType::U8 => 1 << 8,
            DType::I32 => 1 << 31,
            DType::I64 => u64::from(u32::MAX),
            _ => return Err(Error::value(op, "dtype", "u8, i32 or i64", dtype)),
        };
        if bound == 0 || u64::from(bound) > most {
            return Err(Error::value(op, "bound", format!("1 to {most}"), bound));
        }
        with_element!(dtype, T => {
            let fill = |draw: Draw, elements: &mut [T]| draw.fill_below(bound, elements);
            let distribution = Distribution::Below(bound);
            random_tensor::<T>(op, shape, device, random, distribution, at, fill)
        })
    }

    /// The elements of `data` in the given shape. On a GPU this is an upload.
    #[track_caller]
    pub fn from_slice<T: Element>(data: &[T], shape: &[usize], device: Device) -> Result<Tensor> {
        let (op, at) = ("from_slice", Location::caller());
        let shape = Shape::checked(op, shape, at)?;
        if shape.count() != data.len() {
            let expected = format!("{} for the shape {shape}", shape.count());
            let what = "number of elements";
            return Err(Error::value(op, what, expected, data.len()));
        }
        device.check_usable(op, at)?;
        if device != Device::Cpu {
            // Before the data is copied to separate host memory.
            let info = TensorInfo {
                name: None,
                dtype: T::DTYPE,
                shape,
                device: Device::Cpu,
            };
            transfer::check(op, &info, device, Asked::Explicitly, at)?;
        }
        let here = Tensor::allocate(shape, T::DTYPE, Device::Cpu, Origin::HostData, op, at)?;
        let mut borrow = here.borrow("tensor", true, op, at)?;
        borrow.elements_mut().copy_from_slice(data);
        drop(borrow);
        here.to_at(device, op, at)
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
