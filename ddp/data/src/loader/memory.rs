//! Memory for the inputs and targets of a batch.

use ddp_kernels::{DType, Tensor};

use crate::dataset::{Dataset, RowSpec};
use crate::error::Result;

/// Makes a tensor for inputs (0) or targets (1).
type Make<'a> = dyn Fn(usize, &[usize], DType) -> ddp_kernels::Result<Tensor> + 'a;

/// Memory for the inputs and targets of `rows` rows.
pub(super) fn made(dataset: &dyn Dataset, rows: usize, make: &Make<'_>) -> Result<[Tensor; 2]> {
    let RowSpec {
        inputs, targets, ..
    } = dataset.spec();
    let x = make(0, &inputs.shape_of(rows), inputs.dtype)?.named("batch");
    let targets = make(1, &targets.shape_of(rows), targets.dtype)?.named("targets");
    Ok([x, targets])
}

/// The first `rows` rows of this memory.
pub(super) fn first_rows([x, targets]: &[Tensor; 2], rows: usize) -> Result<[Tensor; 2]> {
    Ok([x.slice(0..rows)?, targets.slice(0..rows)?])
}
