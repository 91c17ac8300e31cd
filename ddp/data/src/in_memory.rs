//! A dataset of two tensors in host memory.

use std::fmt::Display;
use std::panic::Location;

use ddp_kernels::{DType, Device, Tensor};
use std::hash::Hasher as _;
use twox_hash::XxHash3_64;

use crate::dataset::{Dataset, RowSpec, check_gather};
use crate::error::{Error, Result};
use crate::task::TaskSpec;
use crate::tensor_spec::TensorSpec;

/// The target of positions that have none, which `CrossEntropy` ignores by default, as in PyTorch.
const IGNORED: i64 = -100;

/// Rows that are given as tensors: row r is `inputs[r]` with `targets[r]`.
#[derive(Debug)]
pub struct InMemory {
    /// (N, I…)
    inputs: Tensor,
    /// (N, T…)
    targets: Tensor,
    spec: RowSpec,
    fingerprint: String,
}

impl InMemory {
    /// Rows of `inputs` (N, I…), each of one of so many classes: `labels` (N), from 0.
    pub fn classes(inputs: Tensor, labels: impl AsRef<[i64]>, classes: usize) -> Result<InMemory> {
        let labels = labels.as_ref();
        let targets = Tensor::from_slice(labels, &[labels.len()], Device::Cpu)?;
        InMemory::new(inputs, targets, TaskSpec::numbered_classes(classes))
    }

    /// Rows of `inputs` (N, I…), each with the numbers of `targets`, f32 (N, outputs).
    pub fn numbers(inputs: Tensor, targets: Tensor) -> Result<InMemory> {
        let outputs = targets.shape().dims().get(1).copied().unwrap_or(1);
        InMemory::new(inputs, targets, TaskSpec::Regression { outputs })
    }

    /// Rows of `inputs` (N, I…) and `targets` in host memory, which must not be written to later.
    /// Targets are classes, i64 (N), from 0 (or -100, which is ignored), or numbers, f32 (N,
    /// outputs). Rows with several positions have these between: (N, T) or (N, T, outputs). Tokens
    /// are i64 (N, T), and so are their targets.
    pub fn new(inputs: Tensor, targets: Tensor, task: TaskSpec) -> Result<InMemory> {
        for (what, tensor) in [("inputs", &inputs), ("targets", &targets)] {
            if tensor.device() != Device::Cpu {
                let help = "copy them with .to(Device::Cpu); batches are copied to the GPU ahead";
                return Err(refuse(what, "a tensor in host memory", tensor, help));
            }
        }
        let (inputs, targets) = (inputs.contiguous()?, targets.contiguous()?);
        let (wanted, rows) = (task.targets(), inputs.shape().dims().first());
        let (Some(rows), [first, row @ ..]) = (rows, targets.shape().dims()) else {
            let help = "reshape them to [rows, …]";
            return Err(refuse("inputs and targets", "rows", &inputs, help));
        };
        if rows != first {
            let expected = format!("{rows} rows, as inputs {inputs} have");
            return Err(refuse(
                "targets",
                expected,
                &targets,
                "give a target for each row",
            ));
        }
        if targets.dtype() != wanted.dtype || !row.ends_with(&wanted.shape) {
            let expected = format!("{wanted} for each row, for {task}");
            let help = "cast them with .to_dtype(…), or reshape them to [rows, outputs]";
            return Err(refuse("targets", expected, &targets, help));
        }
        if matches!(task, TaskSpec::NextToken { .. }) && inputs.dtype() != DType::I64 {
            let help = "cast them with .to_dtype(DType::I64)";
            return Err(refuse("inputs", "tokens, i64", &inputs, help));
        }
        let [inputs_spec, targets_spec] = [&inputs, &targets]
            .map(|tensor| TensorSpec::new(tensor.dtype(), &tensor.shape().dims()[1..]));
        check_finite("inputs", &inputs)?;
        check_finite("targets", &targets)?;
        if let Some(classes) = task.classes() {
            let range = 0..classes.count() as i64;
            let fits = |class: &i64| range.contains(class) || *class == IGNORED;
            check_all("targets", &targets, format!("a class, in {range:?}"), fits)?;
        }
        if let TaskSpec::NextToken { vocabulary, .. } = task {
            let range = 0..vocabulary as i64;
            for (what, tensor) in [("inputs", &inputs), ("targets", &targets)] {
                let fits = |token: &i64| range.contains(token);
                check_all(what, tensor, format!("a token, in {range:?}"), fits)?;
            }
        }
        let mut hash = XxHash3_64::new();
        for tensor in [&inputs, &targets] {
            tensor.with_bytes("fingerprint", Location::caller(), |bytes| hash.write(bytes))?;
        }
        let hash = hash.finish();
        Ok(InMemory {
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

fn check_finite(what: &str, tensor: &Tensor) -> Result<()> {
    match tensor.dtype() {
        DType::F32 => check_all(what, tensor, "finite numbers", |x: &f32| x.is_finite()),
        _ => Ok(()),
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
    let got = format!("{got} in row {}, element {}", index / width, index % width);
    Err(Error::Data(format!(
        "data in memory: {what}: expected {expected}, got {got}; help: repair or leave out that row"
    )))
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
