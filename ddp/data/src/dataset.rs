//! What a dataset is: rows of one shape, each with inputs and targets.

use std::fmt::Debug;
use std::panic::Location;
use std::sync::Arc;

use ddp_kernels::{DType, Device, Tensor};
use std::hash::Hasher as _;
use twox_hash::XxHash3_64;

use crate::error::Result;
use crate::task::TaskSpec;
use crate::tensor_spec::TensorSpec;

/// Rows to train on or to evaluate on. Implement it for data of your own.
///
/// It returns any rows in any order and keeps no position: the order is the sampler's.
pub trait Dataset: Debug + Send + Sync {
    /// The number of rows.
    fn rows(&self) -> u64;

    /// What each row has.
    fn spec(&self) -> &RowSpec;

    /// A line of text that is equal on two ranks exactly if their data are: the kind, the sizes and
    /// `sampled_hash`.
    fn fingerprint(&self) -> Result<String>;

    /// Writes the given rows one after another into host memory: `inputs` (R, the shape of a row's
    /// inputs) and `targets` (R, the shape of a row's targets), each of its spec's dtype.
    ///
    /// It is part of every step, so it must not allocate after the first calls. A row must be the
    /// same each time, since it may be kept on a GPU.
    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> Result<()>;

    /// The rows of each class, if they were counted.
    fn rows_of_classes(&self) -> Option<Vec<u64>> {
        None
    }

    /// The shape of one row's inputs.
    fn row_shape(&self) -> &[usize] {
        &self.spec().inputs.shape
    }

    /// What is to be learned.
    fn task(&self) -> &TaskSpec {
        &self.spec().task
    }
}

impl<D: Dataset + ?Sized> Dataset for Arc<D> {
    fn rows(&self) -> u64 {
        (**self).rows()
    }

    fn spec(&self) -> &RowSpec {
        (**self).spec()
    }

    fn fingerprint(&self) -> Result<String> {
        (**self).fingerprint()
    }

    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> Result<()> {
        (**self).gather(rows, inputs, targets)
    }

    fn rows_of_classes(&self) -> Option<Vec<u64>> {
        (**self).rows_of_classes()
    }
}

/// What each row of a dataset has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowSpec {
    /// What the model sees.
    pub inputs: TensorSpec,
    /// What it is to predict: as the task has it for a row, or for each position of a row.
    pub targets: TensorSpec,
    /// What the targets mean.
    pub task: TaskSpec,
    /// The shape that a row has in its file, if that has several dimensions and `inputs` is flat.
    pub image: Vec<usize>,
}

impl RowSpec {
    /// Rows of f32 features with one label each.
    pub fn features(count: usize, task: TaskSpec) -> RowSpec {
        RowSpec {
            inputs: TensorSpec::new(DType::F32, &[count]),
            targets: task.targets(),
            task,
            image: Vec::new(),
        }
    }

    /// Whether rows of these two shapes, empty where they are not known, have their numbers in
    /// different places, as planes and pixels have. Flat rows fit any shape.
    pub fn images_differ(a: &[usize], b: &[usize]) -> bool {
        let lengths = |shape: &[usize]| -> Vec<usize> {
            shape.iter().copied().filter(|at| *at != 1).collect()
        };
        let (a, b) = (lengths(a), lengths(b));
        a.len() > 1 && b.len() > 1 && a != b
    }

    /// How many targets a row has: one, or one for each of its positions.
    pub fn positions(&self) -> usize {
        self.targets.elements() / self.task.targets().elements().max(1)
    }
}

/// The inputs and the targets of these rows, in new host memory.
pub fn read_rows(dataset: &dyn Dataset, rows: &[u64]) -> Result<[Tensor; 2]> {
    let RowSpec {
        inputs, targets, ..
    } = dataset.spec();
    let made =
        |spec: &TensorSpec| Tensor::zeros(&spec.shape_of(rows.len()), spec.dtype, Device::Cpu);
    let [inputs, targets] = [made(inputs)?, made(targets)?];
    dataset.gather(rows, &inputs, &targets)?;
    Ok([inputs, targets])
}

/// Rows that `sampled_hash` reads.
const SAMPLED_ROWS: u64 = 16;

/// A hash of some rows spread over the data, the first and the last among them: for fingerprints.
pub fn sampled_hash(dataset: &dyn Dataset) -> Result<u64> {
    let rows = dataset.rows();
    let mut hash = XxHash3_64::new();
    let count = SAMPLED_ROWS.min(rows);
    for sample in 0..count {
        let row =
            (u128::from(rows - 1) * u128::from(sample) / u128::from((count - 1).max(1))) as u64;
        let [inputs, targets] = read_rows(dataset, &[row])?;
        for tensor in [targets, inputs] {
            let update = |bytes: &[u8]| hash.write(bytes);
            tensor.with_bytes("sampled_hash", Location::caller(), update)?;
        }
    }
    Ok(hash.finish())
}

/// Asserts what `gather` is promised: tensors for exactly these rows, and rows that exist.
pub(crate) fn check_gather(dataset: &dyn Dataset, rows: &[u64], inputs: &Tensor, targets: &Tensor) {
    let spec = dataset.spec();
    for (tensor, spec) in [(inputs, &spec.inputs), (targets, &spec.targets)] {
        let count = rows.len();
        assert!(
            spec.fits(tensor, count),
            "{tensor} for {count} rows of {spec}"
        );
    }
    let missing = rows.iter().find(|&&row| row >= dataset.rows());
    assert!(missing.is_none(), "row {missing:?} of {}", dataset.rows());
}

/// No rows, if there are none to evaluate on.
#[derive(Debug)]
pub(crate) struct NoRows(pub(crate) RowSpec);

impl Dataset for NoRows {
    fn rows(&self) -> u64 {
        0
    }

    fn spec(&self) -> &RowSpec {
        &self.0
    }

    fn fingerprint(&self) -> Result<String> {
        Ok("no rows".into())
    }

    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> Result<()> {
        check_gather(self, rows, inputs, targets);
        Ok(())
    }
}
