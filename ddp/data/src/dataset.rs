//! What a dataset is: rows of one shape, each with inputs and targets.

use std::fmt::{Debug, Display};
use std::panic::Location;
use std::sync::Arc;

use ddp_kernels::{DType, Device, Tensor};
use std::hash::Hasher as _;
use twox_hash::XxHash3_64;

use crate::error::{Error, Result, bail};
use crate::task::{TaskSpec, TensorSpec};

/// Rows to train on or to evaluate on. Implement it for your own data.
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

    /// The BLAKE3 of the contents, for the metrics log. The default is that of the fingerprint,
    /// which suits rows that the fingerprint determines.
    fn blake3(&self) -> Result<String> {
        content_blake3(self, "")
    }

    /// Writes the given rows one after another into host memory: `inputs` (R, the shape of a row's
    /// inputs) and `targets` (R, the shape of a row's targets), each of its spec's dtype.
    ///
    /// It is part of every step, so it must not allocate after the first calls. A row must be the
    /// same each time, since it may be kept on a GPU.
    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> Result<()>;

    /// An error if rows have changed since the start, in their files. It is called before anything
    /// is saved or printed that was made from rows.
    fn check_unchanged(&self) -> Result<()> {
        Ok(())
    }

    /// The rows of each class, if they were counted.
    fn rows_of_classes(&self) -> Option<Vec<u64>> {
        None
    }

    /// The number of row `index` in the data that it is from, which may have rows besides these.
    fn number(&self, index: u64) -> u64 {
        index
    }

    /// How many elements of a row's inputs come before what pads it.
    fn used(&self, _row: u64) -> usize {
        self.spec().inputs.elements()
    }

    /// Whether rows that are padded may be gathered without the end of their padding: inputs and
    /// targets then have as many elements as the longest row of a batch needs.
    fn shortens(&self) -> bool {
        false
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

    fn blake3(&self) -> Result<String> {
        (**self).blake3()
    }

    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> Result<()> {
        (**self).gather(rows, inputs, targets)
    }

    fn check_unchanged(&self) -> Result<()> {
        (**self).check_unchanged()
    }

    fn rows_of_classes(&self) -> Option<Vec<u64>> {
        (**self).rows_of_classes()
    }

    fn number(&self, index: u64) -> u64 {
        (**self).number(index)
    }

    fn used(&self, row: u64) -> usize {
        (**self).used(row)
    }

    fn shortens(&self) -> bool {
        (**self).shortens()
    }
}

/// The inputs and targets of each row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowSpec {
    /// What the model sees.
    pub inputs: TensorSpec,
    /// The target: one for a row, or one for each of its positions, as the task defines it.
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

    /// Whether rows of these two shapes have their numbers in different orders, as planes and
    /// pixels do. An empty shape is unknown; flat rows fit any shape.
    pub fn images_differ(a: &[usize], b: &[usize]) -> bool {
        let [a, b] =
            [a, b].map(|shape| -> Vec<&usize> { shape.iter().filter(|at| **at != 1).collect() });
        a.len() > 1 && b.len() > 1 && a != b
    }

    /// How many targets a row has: one, or one for each of its positions.
    pub fn positions(&self) -> usize {
        self.targets.elements() / self.task.targets().elements().max(1)
    }
}

/// The inputs and the targets of these rows, in new host memory.
pub fn read_rows(dataset: &dyn Dataset, rows: &[u64]) -> Result<[Tensor; 2]> {
    let (spec, count) = (dataset.spec(), rows.len());
    let made = |spec: &TensorSpec| Tensor::zeros(&spec.shape_of(count), spec.dtype, Device::Cpu);
    let [inputs, targets] = [made(&spec.inputs)?, made(&spec.targets)?];
    dataset.gather(rows, &inputs, &targets)?;
    Ok([inputs, targets])
}

/// The BLAKE3 of a fingerprint and of what else identifies the contents.
pub(crate) fn content_blake3<D: Dataset + ?Sized>(dataset: &D, contents: &str) -> Result<String> {
    let text = format!("{}\n{contents}", dataset.fingerprint()?);
    Ok(blake3::hash(text.as_bytes()).to_hex().to_string())
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

/// Fills rows of tokens and their targets, i64 on the CPU, by `read`.
pub(crate) fn each_row(
    rows: &[u64],
    inputs: &Tensor,
    targets: &Tensor,
    mut read: impl FnMut(u64, &mut [i64], &mut [i64]) -> Result<()>,
) -> Result<()> {
    let tokens = inputs.shape().dims().last().map_or(1, |&tokens| tokens);
    inputs.with_slice_mut(|inputs: &mut [i64]| {
        targets.with_slice_mut(|targets: &mut [i64]| {
            let inputs = inputs.chunks_exact_mut(tokens);
            let places = inputs.zip(targets.chunks_exact_mut(tokens));
            let mut rows = rows.iter().zip(places);
            rows.try_for_each(|(&row, (inputs, targets))| read(row, inputs, targets))
        })
    })??
}

/// Asserts what `gather` is promised: tensors for exactly these rows, and rows that exist.
pub(crate) fn check_gather(dataset: &dyn Dataset, rows: &[u64], inputs: &Tensor, targets: &Tensor) {
    let spec = dataset.spec();
    for (tensor, spec) in [(inputs, &spec.inputs), (targets, &spec.targets)] {
        let count = rows.len();
        let is_shorter = |dims: &[usize]| {
            dataset.shortens()
                && matches!(dims, [all, row] if *all == count && *row < spec.elements())
        };
        assert!(
            spec.fits(tensor, count) || is_shorter(tensor.shape().dims()),
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

/// The target of positions that have none, which `CrossEntropy` ignores by default, as in PyTorch.
pub const IGNORED: i64 = -100;

/// How many of these targets, i64 in host memory, count.
pub fn counted(targets: &Tensor) -> Result<usize> {
    let count = |all: &[i64]| all.iter().filter(|target| **target != IGNORED).count();
    Ok(targets.with_slice(count)?)
}

/// Rows that are given as tensors: row r is `inputs[r]` with `targets[r]`.
#[derive(Debug)]
pub struct InMemory {
    /// (N, I…)
    inputs: Tensor,
    /// (N, T…)
    targets: Tensor,
    spec: RowSpec,
    fingerprint: String,
    contents: String,
}

impl InMemory {
    /// Rows of `inputs` (N, I…), each of one of this many classes: `labels` (N), from 0.
    pub fn classes(inputs: Tensor, labels: impl AsRef<[i64]>, classes: usize) -> Result<InMemory> {
        let labels = labels.as_ref();
        let targets = Tensor::from_slice(labels, &[labels.len()], Device::Cpu)?;
        InMemory::new(inputs, targets, TaskSpec::numbered_classes(classes))
    }

    /// Rows of `inputs` (N, I…), each with the numbers of `targets` (N, outputs): f32 or, for a
    /// model in f64, f64.
    pub fn numbers(inputs: Tensor, targets: Tensor) -> Result<InMemory> {
        let outputs = targets.shape().dims().get(1).copied().unwrap_or(1);
        InMemory::new(inputs, targets, TaskSpec::Regression { outputs })
    }

    /// Rows of `inputs` (N, I…) and `targets` in host memory, which must not be written to later.
    /// Targets are classes, i64 (N), from 0 (or -100, which is ignored), or numbers, f32 or f64
    /// (N, outputs). Rows with several positions have these between: (N, T) or (N, T, outputs).
    /// Tokens are i64 (N, T), and so are their targets, of which -100 are ignored.
    pub fn new(inputs: Tensor, targets: Tensor, task: TaskSpec) -> Result<InMemory> {
        for (what, tensor) in [("inputs", &inputs), ("targets", &targets)] {
            let help = "copy them with .to(Device::Cpu); batches are copied to the GPU ahead";
            let is_here = tensor.device() == Device::Cpu;
            check(is_here, what, "a tensor in host memory", tensor, help)?;
        }
        let (inputs, targets) = (inputs.contiguous()?, targets.contiguous()?);
        let (wanted, rows) = (task.targets(), inputs.shape().dims().first());
        let (Some(rows), [first, row @ ..]) = (rows, targets.shape().dims()) else {
            let help = "reshape them to [rows, …]";
            return Err(refuse("inputs and targets", "rows", &inputs, help));
        };
        let expected = format!("{rows} rows, as inputs {inputs} have");
        let help = "give a target for each row";
        check(rows == first, "targets", expected, &targets, help)?;
        let is_wide = wanted.dtype == DType::F32 && targets.dtype() == DType::F64;
        let fits = (targets.dtype() == wanted.dtype || is_wide) && row.ends_with(&wanted.shape);
        let expected = format!("{wanted} for each row, for {task}");
        let help = "cast them with .to_dtype(…), or reshape them to [rows, outputs]";
        check(fits, "targets", expected, &targets, help)?;
        let are_tokens = matches!(task, TaskSpec::NextToken { .. });
        let help = "cast them with .to_dtype(DType::I64)";
        let fits = !are_tokens || inputs.dtype() == DType::I64;
        check(fits, "inputs", "tokens, i64", &inputs, help)?;
        let spec_of =
            |tensor: &Tensor| TensorSpec::new(tensor.dtype(), &tensor.shape().dims()[1..]);
        let (inputs_spec, targets_spec) = (spec_of(&inputs), spec_of(&targets));
        let range = 0..task.outputs() as i64;
        for (what, tensor) in [("inputs", &inputs), ("targets", &targets)] {
            let is_class = |class: &i64| range.contains(class) || *class == IGNORED;
            if tensor.dtype() == DType::F32 {
                check_all(what, tensor, "finite numbers", |x: &f32| x.is_finite())?;
            }
            if tensor.dtype() == DType::F64 {
                check_all(what, tensor, "finite numbers", |x: &f64| x.is_finite())?;
            }
            if are_tokens {
                let fits =
                    |token: &i64| range.contains(token) || (what == "targets" && *token == IGNORED);
                check_all(what, tensor, format!("a token, in {range:?}"), fits)?;
            } else if task.classes().is_some() && what == "targets" {
                check_all(what, tensor, format!("a class, in {range:?}"), is_class)?;
            }
        }
        let (mut hash, mut contents) = (XxHash3_64::new(), blake3::Hasher::new());
        for tensor in [&inputs, &targets] {
            let update = |bytes: &[u8]| {
                contents.update(bytes);
                hash.write(bytes);
            };
            tensor.with_bytes("fingerprint", Location::caller(), update)?;
        }
        let hash = hash.finish();
        Ok(InMemory {
            contents: contents.finalize().to_hex().to_string(),
            fingerprint: format!(
                "in memory: {rows} rows of {inputs_spec} with {targets_spec}, {task}, {hash:016x}"
            ),
            inputs,
            targets,
            spec: RowSpec {
                inputs: inputs_spec,
                targets: targets_spec,
                task,
                image: Vec::new(),
            },
        })
    }
}

fn refuse(what: &str, expected: impl Display, got: impl Display, help: &str) -> Error {
    Error::Usage(format!(
        "data in memory: {what}: expected {expected}, got {got}; help: {help}"
    ))
}

fn check(holds: bool, what: &str, expected: impl Display, got: &Tensor, help: &str) -> Result<()> {
    if holds {
        Ok(())
    } else {
        Err(refuse(what, expected, got, help))
    }
}

/// Checks all elements, and names the first one that does not fit.
fn check_all<T: ddp_kernels::Element + Display>(
    what: &str,
    tensor: &Tensor,
    expected: impl Display,
    fits: impl Fn(&T) -> bool,
) -> Result<()> {
    let wrong = tensor.with_slice(|all: &[T]| {
        let index = all.iter().position(|element| !fits(element))?;
        Some((index, all[index]))
    })?;
    let Some((index, got)) = wrong else {
        return Ok(());
    };
    let width = tensor.count() / tensor.shape()[0];
    bail!(
        "data in memory: {what}: expected {expected}, got {got} in row {}, element {}; help: repair or leave out that row",
        index / width,
        index % width
    )
}

impl Dataset for InMemory {
    fn rows(&self) -> u64 {
        self.inputs.shape()[0] as u64
    }

    fn spec(&self) -> &RowSpec {
        &self.spec
    }

    fn fingerprint(&self) -> Result<String> {
        Ok(self.fingerprint.clone())
    }

    fn blake3(&self) -> Result<String> {
        content_blake3(self, &self.contents)
    }

    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> Result<()> {
        check_gather(self, rows, inputs, targets);
        let (op, at) = ("gather", Location::caller());
        for (all, chosen) in [(&self.inputs, inputs), (&self.targets, targets)] {
            let row_bytes = all.bytes() / all.shape()[0].max(1);
            let copy = |all: &[u8], chosen: &mut [u8]| {
                for (&row, chosen) in rows.iter().zip(chosen.chunks_exact_mut(row_bytes.max(1))) {
                    chosen.copy_from_slice(&all[row as usize * row_bytes..][..row_bytes]);
                }
            };
            all.with_bytes(op, at, |all| {
                chosen.with_bytes_mut(op, at, |chosen| copy(all, chosen))
            })??;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
