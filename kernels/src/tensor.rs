//! `Tensor`: a handle on a storage (with offset, shape, dtype, device). Clones and views alias; operations write
//! into tensors given to them; the aliasing rule stands in `storage.rs`. Every constructor takes a device or
//! inherits one: there is no default.
//!
//! Layouts are two: row-major, and the transpose of a row-major matrix (`t()`), which costs nothing and which the
//! matrix products read as it is.

mod create;
mod data;
mod views;

pub use data::Destination;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::cuda::capture;
use crate::cuda::queue::Queue;
use crate::error::{Error, OperandInfo, Result, Site, TensorInfo};
use crate::storage::{Borrow, Origin, Storage};
use crate::{DType, Device, Shape};

/// A tensor: where its elements are, what they are, and how they are arranged.
///
/// It is a handle: clones and views (`reshape`, `slice`, `t`) share memory, and operations write into tensors given to them.
/// While an operation, a copy or a lent slice uses elements, nothing else may write them: whoever comes second, on this thread
/// or another, gets an error that names both, at once. Other elements of the same memory are free. So no data race on the host can be
/// written in safe code. On a GPU an operation is over, in this sense, when it is in its stream; what work of several streams does to one
/// tensor is ordered by events, as [`Stream::scope`](crate::stream::Stream::scope) tells.
///
/// Elements lie row by row, or as the transpose of that (`t()`), which the matrix products read as it is; other
/// operations ask for `contiguous()`.
#[derive(Clone)]
pub struct Tensor {
    storage: Arc<Storage>,
    /// Elements from the storage's start to the first of this tensor.
    offset: usize,
    shape: Shape,
    dtype: DType,
    /// A matrix whose elements lie in memory as those of its transpose.
    transposed: bool,
    name: Option<Arc<str>>,
}

impl Tensor {
    /// Where the elements are.
    pub fn device(&self) -> Device {
        self.storage.device()
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The lengths of the dimensions, outermost first.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// How many elements.
    pub fn count(&self) -> usize {
        self.shape.count()
    }

    /// How many bytes the elements take.
    pub fn bytes(&self) -> usize {
        self.count() * self.dtype.bytes()
    }

    /// The name given by `named`, if any.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Whether this is a matrix seen transposed (`t()`).
    pub fn is_transposed(&self) -> bool {
        self.transposed
    }

    /// Whether the elements are in host memory that a device copies from and to without a detour.
    pub fn is_pinned(&self) -> bool {
        self.storage.is_pinned()
    }

    /// The same tensor under a name, which errors use from then on, and listings of live tensors too if this is all of
    /// its memory and not a view of a part.
    pub fn named(self, name: &str) -> Tensor {
        self.with_name(Some(name.into()))
    }

    /// This copy of `original` under its name.
    pub(crate) fn with_name_of(self, original: &Tensor) -> Tensor {
        self.with_name(original.name.clone())
    }

    fn with_name(mut self, name: Option<Arc<str>>) -> Tensor {
        if let Some(name) = &name
            && self.bytes() == self.storage.bytes()
        {
            self.storage.block().set_name(name);
        }
        self.name = name;
        self
    }

    /// Whether this is the only handle on its memory: nobody else can read or write it. Graphs do not count: they use it in the
    /// order of their launches, like operations.
    pub fn is_only_handle(&self) -> bool {
        Arc::strong_count(&self.storage) == 1 + self.storage.graphs()
    }

    /// Whether the two handles share memory.
    pub fn shares_memory_with(&self, other: &Tensor) -> bool {
        if !Arc::ptr_eq(&self.storage, &other.storage) {
            return false;
        }
        let (mine, theirs) = (self.byte_range(), other.byte_range());
        !mine.is_empty() && !theirs.is_empty() && mine.start < theirs.end && theirs.start < mine.end
    }

    /// Whether the two handles are the same elements in the same order in memory.
    pub(crate) fn is_same_memory(&self, other: &Tensor) -> bool {
        Arc::ptr_eq(&self.storage, &other.storage) && self.byte_range() == other.byte_range()
    }

    /// This tensor's shape and layout over the memory of `copy`, which holds the same bytes.
    pub(crate) fn with_memory_of(&self, copy: &Tensor) -> Tensor {
        debug_assert_eq!(self.bytes(), copy.bytes());
        let offset = copy.byte_range().start / self.dtype.bytes();
        Tensor { storage: copy.storage.clone(), offset, ..self.clone() }
    }

    /// What this tensor is, apart from its contents.
    pub fn info(&self) -> TensorInfo {
        TensorInfo { name: self.name.clone(), dtype: self.dtype, shape: self.shape, device: self.device() }
    }

    pub(crate) fn as_operand(&self, role: &'static str) -> OperandInfo {
        OperandInfo { role, tensor: self.info() }
    }

    pub(crate) fn storage(&self) -> &Storage {
        &self.storage
    }

    /// The bytes of the storage that the elements occupy, whatever their order.
    pub(crate) fn byte_range(&self) -> Range<usize> {
        let start = self.offset * self.dtype.bytes();
        start..start + self.bytes()
    }

    /// Enters the elements' bytes for reading or writing, or says who is in the way.
    pub(crate) fn borrow(&self, role: &'static str, writes: bool, op: &'static str, at: Site) -> Result<Borrow<'_>> {
        self.storage.enter(self.byte_range(), writes, op, at).map_err(|other| Error::Busy {
            op,
            operand: Box::new(self.as_operand(role)),
            other_op: other.op,
            other_writes: other.writes,
            other_at: other.at,
            at,
        })
    }

    /// As `borrow`, for operations: the contents count as used from then on, or as changed.
    pub(crate) fn enter(&self, role: &'static str, writes: bool, op: &'static str, at: Site) -> Result<Borrow<'_>> {
        let borrow = self.borrow(role, writes, op, at)?;
        if writes {
            self.storage.mark_changed();
        } else {
            self.storage.mark_used();
        }
        Ok(borrow)
    }

    /// As `enter`, for work that is given to a stream of a GPU: the memory is not freed before that is done, and a graph being
    /// captured keeps it.
    pub(crate) fn enter_for(
        &self,
        role: &'static str,
        writes: bool,
        queue: &Arc<Queue>,
        op: &'static str,
        at: Site,
    ) -> Result<Borrow<'_>> {
        if capture::is_capturing() && !queue.is_captured() {
            let why = "the stream takes no part in the capture. Let it wait for an event of the captured stream first, or do this \
                       before the capture"
                .to_string();
            return Err(Error::Capture { op, device: queue.gpu.device(), why, at });
        }
        let borrow = self.enter(role, writes, op, at)?;
        self.storage.block().visit(queue, op, at)?;
        self.join_capture(queue);
        Ok(borrow)
    }

    /// A graph being captured on `queue` keeps this tensor's memory.
    pub(crate) fn join_capture(&self, queue: &Queue) {
        if queue.is_captured() {
            capture::keep(&self.storage);
        }
    }

    /// A new tensor of unspecified contents.
    pub(crate) fn allocate(
        shape: Shape,
        dtype: DType,
        device: Device,
        origin: Origin,
        op: &'static str,
        at: Site,
    ) -> Result<Tensor> {
        let info = TensorInfo { name: None, dtype, shape, device };
        let storage = Storage::new(device, shape.count() * dtype.bytes(), origin, false, info, op, at)?;
        Ok(Tensor { storage, offset: 0, shape, dtype, transposed: false, name: None })
    }

    /// Room on `target` for this tensor's elements in their order, keeping its name.
    pub(crate) fn empty_for_arrival(&self, target: Device, op: &'static str, at: Site) -> Result<Tensor> {
        let info = TensorInfo { device: target, ..self.info() };
        let origin = Origin::Arrived(self.device(), at);
        let storage = Storage::new(target, self.bytes(), origin, false, info, op, at)?;
        Ok(Tensor { storage, offset: 0, ..self.clone() })
    }
}

impl fmt::Display for Tensor {
    /// Name, dtype, shape and device. Never the contents: printing them would be a hidden transfer.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.info().fmt(f)
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({})", self.info())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Random;
    use proptest::prelude::*;

    fn counting(shape: &[usize]) -> Tensor {
        let count: usize = shape.iter().product();
        Tensor::arange(count, DType::I64, Device::Cpu).unwrap().reshape(shape).unwrap()
    }

    proptest! {
        #[test]
        fn slices_and_reshapes_show_the_elements_they_name(
            rows in 0usize..9, columns in 0usize..9, start in 0usize..10, end in 0usize..10
        ) {
            let whole = counting(&[rows, columns]);
            match whole.slice(start..end) {
                Ok(part) => {
                    prop_assert!(start <= end && end <= rows);
                    let expected: Vec<i64> = (start * columns..end * columns).map(|i| i as i64).collect();
                    prop_assert_eq!(part.to_vec::<i64>().unwrap(), expected.clone());
                    prop_assert_eq!(part.flatten().unwrap().to_vec::<i64>().unwrap(), expected);
                    prop_assert_eq!(part.shares_memory_with(&whole), part.count() > 0);
                }
                Err(error) => {
                    prop_assert!(start > end || end > rows);
                    prop_assert!(error.to_string().contains("slice: range: expected within 0.."), "{}", error);
                }
            }
        }

        #[test]
        fn a_transposed_view_has_the_transposes_elements(rows in 0usize..40, columns in 0usize..40) {
            let whole = counting(&[rows, columns]);
            let turned = whole.t().unwrap();
            prop_assert_eq!(turned.shape().dims(), &[columns, rows][..]);
            let expected: Vec<i64> =
                (0..columns).flat_map(|c| (0..rows).map(move |r| (r * columns + c) as i64)).collect();
            prop_assert_eq!(turned.to_vec::<i64>().unwrap(), expected.clone());
            prop_assert_eq!(turned.contiguous().unwrap().to_vec::<i64>().unwrap(), expected);
            prop_assert_eq!(turned.t().unwrap().to_vec::<i64>().unwrap(), whole.to_vec::<i64>().unwrap());
            prop_assert!(turned.t().unwrap().reshape(&[rows * columns]).is_ok());
        }

        #[test]
        fn reshape_takes_exactly_the_shapes_of_as_many_elements(shape in prop::collection::vec(0usize..6, 0..5)) {
            let whole = counting(&[24]);
            let fits = shape.iter().product::<usize>() == 24;
            prop_assert_eq!(whole.reshape(&shape).is_ok(), fits);
        }
    }

    #[test]
    fn index_and_slice_of_what_is_not_there_are_errors_that_name_it() {
        let x = counting(&[2, 3]).named("x");
        let error = x.index(2).unwrap_err().to_string();
        assert!(error.contains("expected below 2 for \"x\" i64[2, 3] on cpu, got 2"), "{error}");
        assert!(counting(&[]).index(0).is_err() && counting(&[]).slice(0..0).is_err());
        assert!(x.slice(usize::MAX..usize::MAX).is_err());
        let error = x.t().unwrap().flatten().unwrap_err().to_string();
        assert!(error.contains("got a transposed view") && error.contains(".contiguous()"), "{error}");
        assert_eq!(x.index(1).unwrap().to_vec::<i64>().unwrap(), [3, 4, 5]);
    }

    #[test]
    fn shape_dtype_and_device_are_shown_together_and_never_the_contents() {
        let x = Tensor::zeros(&[2, 3], DType::BF16, Device::Cpu).unwrap();
        assert_eq!(format!("{x} | {x:?}"), "bf16[2, 3] on cpu | Tensor(bf16[2, 3] on cpu)");
        assert_eq!(x.named("h").to_string(), "\"h\" bf16[2, 3] on cpu");
    }

    #[test]
    fn constructors_inherit_and_refuse_what_a_dtype_cannot_hold() {
        let x = Tensor::ones(&[2], DType::F16, Device::Cpu).unwrap();
        let mut random = Random::new(1);
        for like in
            [x.zeros_like(), x.ones_like(), x.full_like(0.5), x.rand_like(&mut random), x.randn_like(&mut random)]
        {
            let like = like.unwrap();
            assert_eq!((like.dtype(), like.shape(), like.device()), (DType::F16, x.shape(), x.device()));
        }
        assert_eq!(x.new_full(&[3, 1], 2.0).unwrap().to_vec::<half::f16>().unwrap(), [half::f16::from_f32(2.0); 3]);
        for bad in [
            Tensor::full(&[1], 300.0, DType::U8, Device::Cpu),
            Tensor::full(&[1], 0.5, DType::I32, Device::Cpu),
            Tensor::full(&[1], f64::NAN, DType::I64, Device::Cpu),
            Tensor::arange(257, DType::U8, Device::Cpu),
            Tensor::rand(&[1], DType::I32, Device::Cpu, &mut random),
            Tensor::randint(0, &[1], DType::I32, Device::Cpu, &mut random),
            Tensor::randint(257, &[1], DType::U8, Device::Cpu, &mut random),
            Tensor::randint(2, &[1], DType::F32, Device::Cpu, &mut random),
        ] {
            let text = bad.unwrap_err().to_string();
            assert!(text.contains("expected") && text.contains("tensor.rs"), "{text}");
        }
        assert_eq!(Tensor::arange(256, DType::U8, Device::Cpu).unwrap().to_vec::<u8>().unwrap()[255], 255);
    }

    #[test]
    fn reading_as_another_type_or_a_number_from_many_is_refused() {
        let x = counting(&[4]);
        let error = x.to_vec::<f32>().unwrap_err().to_string();
        assert!(error.contains("expected dtype f32") && error.contains(".to_dtype(DType::F32)"), "{error}");
        let error = x.item().unwrap_err().to_string();
        assert!(error.contains("item: x i64[4] on cpu: expected exactly one element"), "{error}");
        let target = Tensor::zeros(&[4], DType::F32, Device::Cpu).unwrap();
        assert!(target.copy_from(&x).unwrap_err().to_string().contains("expected the target's dtype, f32"));
        assert!(x.copy_from(&x).unwrap_err().to_string().contains("share memory"));
    }

    #[test]
    fn a_name_on_a_part_does_not_rename_the_whole_and_empty_parts_are_in_nobodys_way() {
        let arena = Tensor::zeros(&[10], DType::F32, Device::Cpu).unwrap().named("arena.all");
        let head = arena.slice(0..2).unwrap().named("arena.head");
        assert_eq!(head.name(), Some("arena.head"));
        let live = crate::memory::named_live(Device::Cpu);
        assert!(
            live.iter()
                .any(|(id, live)| *id == arena.storage().id() && live.tensor.name.as_deref() == Some("arena.all"))
        );
        let empty = arena.slice(3..3).unwrap();
        assert!(!empty.shares_memory_with(&arena));
        arena.with_slice_mut::<f32, _>(|_| assert!(empty.to_vec::<f32>().unwrap().is_empty())).unwrap();
    }
}
