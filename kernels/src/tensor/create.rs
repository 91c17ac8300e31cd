//! Constructors. Each takes a device, or inherits it (with the dtype) from a tensor: `zeros_like`, `new_zeros` …

use std::panic::Location;

use super::Tensor;
use crate::dtype::{exact, with_element};
use crate::error::{Error, Result, Site, TensorInfo};
use crate::ops::{Distribution, arange_new, draw_new, fill_new};
use crate::random::{Draw, Random};
use crate::storage::{Origin, Storage};
use crate::transfer::{self, Asked};
use crate::{DType, Device, Element, Shape};

/// The largest bound whose numbers an integer dtype holds.
fn most_of(dtype: DType) -> u64 {
    match dtype {
        DType::U8 => 1 << 8,
        DType::I32 => 1 << 31,
        _ => u64::from(u32::MAX),
    }
}

/// Makes a tensor and lets `fill` write its elements where the host can reach them; on a GPU `launch` does, by kernels
/// that make the same bits there.
fn made<T: Element>(
    op: &'static str,
    shape: &[usize],
    device: Device,
    at: Site,
    fill: impl FnOnce(&mut [T]),
    launch: impl FnOnce(&Tensor) -> Result<()>,
) -> Result<Tensor> {
    let tensor = Tensor::allocate(Shape::checked(op, shape, at)?, T::DTYPE, device, Origin::Computed, op, at)?;
    if device == Device::Cpu {
        fill(tensor.borrow("tensor", true, op, at)?.elements_mut::<T>());
    } else {
        launch(&tensor)?;
    }
    Ok(tensor)
}

/// Makes a random tensor, by `fill` or on a GPU. What fails uses up no numbers.
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
    let tensor = made::<T>(op, shape, device, at, |elements| fill(draw, elements), launch)?;
    *random = after;
    Ok(tensor)
}

impl Tensor {
    /// Elements of unspecified value: for outputs that are written before they are read.
    #[track_caller]
    pub fn empty(shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
        let at = Location::caller();
        Tensor::allocate(Shape::checked("empty", shape, at)?, dtype, device, Origin::Computed, "empty", at)
    }

    /// All zeros.
    #[track_caller]
    pub fn zeros(shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
        let at = Location::caller();
        let tensor =
            Tensor::allocate(Shape::checked("zeros", shape, at)?, dtype, device, Origin::Computed, "zeros", at)?;
        if device.is_accelerator() {
            fill_new(&tensor, 0.0, "zeros", at)?;
        } else if !tensor.storage.block().is_fresh() {
            // The zero of every dtype is all zero bits.
            tensor.borrow("tensor", true, "zeros", at)?.elements_mut::<u8>().fill(0);
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
            let launch = |tensor: &Tensor| fill_new(tensor, value, op, at);
            made::<T>(op, shape, device, at, |elements| elements.fill(rounded), launch)
        })
    }

    /// 0, 1, 2 … `count` − 1. The dtype must hold `count` − 1 exactly if it is an integer.
    #[track_caller]
    pub fn arange(count: usize, dtype: DType, device: Device) -> Result<Tensor> {
        let at = Location::caller();
        with_element!(dtype, T => {
            exact::<T>("arange", count.saturating_sub(1) as f64, at)?;
            let fill = |elements: &mut [T]| {
                for (index, element) in elements.iter_mut().enumerate() {
                    *element = T::from_f64(index as f64);
                }
            };
            made::<T>("arange", &[count], device, at, fill, |tensor| arange_new(tensor, "arange", at))
        })
    }

    /// Uniform in [0, 1), of a float dtype. The same bits on every device and for every thread count.
    #[track_caller]
    pub fn rand(shape: &[usize], dtype: DType, device: Device, random: &mut Random) -> Result<Tensor> {
        Tensor::drawn("rand", shape, dtype, device, random, Location::caller())
    }

    /// Standard normal, of a float dtype. The same bits on every device and for every thread count.
    #[track_caller]
    pub fn randn(shape: &[usize], dtype: DType, device: Device, random: &mut Random) -> Result<Tensor> {
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
        let normal = op == "randn";
        let value_error = || {
            let (what, expected) = ("dtype".into(), "a float dtype (use randint for whole numbers)".into());
            Error::Value { op, what, expected, got: dtype.to_string(), at }
        };
        if !dtype.is_float() {
            return Err(value_error());
        }
        with_element!(dtype, T => {
            let distribution = if normal { Distribution::Normal } else { Distribution::Uniform };
            let fill = |draw: Draw, elements: &mut [T]| draw.fill(normal, elements);
            random_tensor::<T>(op, shape, device, random, distribution, at, fill)
        })
    }

    /// Whole numbers uniform in 0..`bound`, as U8, I32 or I64.
    #[track_caller]
    pub fn randint(bound: u32, shape: &[usize], dtype: DType, device: Device, random: &mut Random) -> Result<Tensor> {
        let at = Location::caller();
        if dtype.is_float() {
            return Err(Error::value("randint", "dtype", "u8, i32 or i64", dtype));
        }
        let highest = f64::from(bound) - 1.0;
        with_element!(dtype, T => {
            if bound == 0 || T::from_f64(highest).to_f64() != highest {
                return Err(Error::value("randint", "bound", format!("1 to {}", most_of(dtype)), bound));
            }
            let fill = |draw: Draw, elements: &mut [T]| draw.fill_below(bound, elements);
            random_tensor::<T>("randint", shape, device, random, Distribution::Below(bound), at, fill)
        })
    }

    /// The elements of `data` in the given shape. The data is the host's; on another device this uploads it.
    #[track_caller]
    pub fn from_slice<T: Element>(data: &[T], shape: &[usize], device: Device) -> Result<Tensor> {
        let at = Location::caller();
        let checked = Shape::checked("from_slice", shape, at)?;
        if checked.count() != data.len() {
            return Err(Error::value(
                "from_slice",
                "number of elements",
                format!("{} for the shape {checked}", checked.count()),
                data.len(),
            ));
        }
        device.check_usable("from_slice", at)?;
        if device != Device::Cpu {
            // Before anything is copied.
            let info = TensorInfo { name: None, dtype: T::DTYPE, shape: checked, device: Device::Cpu };
            transfer::check("from_slice", &info, device, Asked::Explicitly, at)?;
        }
        let here = Tensor::allocate(checked, T::DTYPE, Device::Cpu, Origin::HostData, "from_slice", at)?;
        here.borrow("tensor", true, "from_slice", at)?.elements_mut().copy_from_slice(data);
        here.to_at(device, "from_slice", at)
    }

    /// One number, as a tensor without dimensions.
    #[track_caller]
    pub fn scalar<T: Element>(value: T, device: Device) -> Result<Tensor> {
        Tensor::from_slice(&[value], &[], device)
    }

    /// Zeros in pinned host memory, which copies to and from any device overlap computing with. Needs a device: it is made by one that this process
    /// uses already, or else by the first, which is then in use. A process that is to use another one alone touches that first.
    #[track_caller]
    pub fn zeros_pinned(shape: &[usize], dtype: DType) -> Result<Tensor> {
        let at = Location::caller();
        let shape = Shape::checked("zeros_pinned", shape, at)?;
        Device::Cuda(0).check_usable("zeros_pinned", at)?;
        let info = TensorInfo { name: None, dtype, shape, device: Device::Cpu };
        let bytes = shape.count() * dtype.bytes();
        let storage = Storage::new(Device::Cpu, bytes, Origin::HostData, true, info, "zeros_pinned", at)?;
        let tensor = Tensor { storage, offset: 0, shape, dtype, transposed: false, name: None };
        if !tensor.storage.block().is_fresh() {
            tensor.borrow("tensor", true, "zeros_pinned", at)?.elements_mut::<u8>().fill(0);
        }
        Ok(tensor)
    }
}

/// The same, with device and dtype inherited: what helper tensors inside a model should be made by.
impl Tensor {
    /// Unspecified elements, like this tensor in shape, dtype and device.
    #[track_caller]
    pub fn empty_like(&self) -> Result<Tensor> {
        Tensor::empty(&self.shape, self.dtype, self.device())
    }

    /// Zeros like this tensor in shape, dtype and device.
    #[track_caller]
    pub fn zeros_like(&self) -> Result<Tensor> {
        Tensor::zeros(&self.shape, self.dtype, self.device())
    }

    /// Ones like this tensor in shape, dtype and device.
    #[track_caller]
    pub fn ones_like(&self) -> Result<Tensor> {
        Tensor::ones(&self.shape, self.dtype, self.device())
    }

    /// `value` everywhere, like this tensor in shape, dtype and device.
    #[track_caller]
    pub fn full_like(&self, value: f64) -> Result<Tensor> {
        Tensor::full(&self.shape, value, self.dtype, self.device())
    }

    /// Uniform in [0, 1), like this tensor in shape, dtype and device.
    #[track_caller]
    pub fn rand_like(&self, random: &mut Random) -> Result<Tensor> {
        Tensor::rand(&self.shape, self.dtype, self.device(), random)
    }

    /// Standard normal, like this tensor in shape, dtype and device.
    #[track_caller]
    pub fn randn_like(&self, random: &mut Random) -> Result<Tensor> {
        Tensor::randn(&self.shape, self.dtype, self.device(), random)
    }

    /// Unspecified elements of another shape, with this tensor's dtype and device.
    #[track_caller]
    pub fn new_empty(&self, shape: &[usize]) -> Result<Tensor> {
        Tensor::empty(shape, self.dtype, self.device())
    }

    /// Zeros of another shape, with this tensor's dtype and device.
    #[track_caller]
    pub fn new_zeros(&self, shape: &[usize]) -> Result<Tensor> {
        Tensor::zeros(shape, self.dtype, self.device())
    }

    /// Ones of another shape, with this tensor's dtype and device.
    #[track_caller]
    pub fn new_ones(&self, shape: &[usize]) -> Result<Tensor> {
        Tensor::ones(shape, self.dtype, self.device())
    }

    /// `value` everywhere in another shape, with this tensor's dtype and device.
    #[track_caller]
    pub fn new_full(&self, shape: &[usize], value: f64) -> Result<Tensor> {
        Tensor::full(shape, value, self.dtype, self.device())
    }
}
