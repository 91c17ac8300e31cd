//! What one row's inputs or targets are.

use std::fmt;

use ddp_kernels::{DType, Tensor};

/// The dtype and the shape of one row's inputs or targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// The type of the elements.
    pub dtype: DType,
    /// The shape for one row; empty for one element.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Elements of this dtype in this shape for each row.
    pub fn new(dtype: DType, shape: &[usize]) -> TensorSpec {
        TensorSpec {
            dtype,
            shape: shape.to_vec(),
        }
    }

    /// The number of elements of a row.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The bytes of a row.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.bytes()
    }

    /// The shape of `rows` rows.
    pub(crate) fn shape_of(&self, rows: usize) -> Vec<usize> {
        [&[rows], &self.shape[..]].concat()
    }

    /// Whether `tensor` holds `rows` such rows.
    pub(crate) fn fits(&self, tensor: &Tensor, rows: usize) -> bool {
        let dims = tensor.shape().dims();
        tensor.dtype() == self.dtype && dims.split_first() == Some((&rows, &self.shape[..]))
    }
}

impl fmt::Display for TensorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.shape)
    }
}
