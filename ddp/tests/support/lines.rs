//! Rows that are not a list of features: whole numbers in two dimensions, and a class for each
//! line.

use std::sync::Arc;

use ddp::data::{Dataset, RowSpec, TaskSpec, TensorSpec};
use ddp::nn::{CustomOp, Module, Scope, Var};
use ddp_kernels::{DType, Tensor, ops};

use super::random::mixed;

/// Lines of a row.
pub(crate) const LINES: usize = 3;
/// Numbers of a line.
pub(crate) const WIDTH: usize = 2;
/// The numbers and the classes are below this.
pub(crate) const CLASSES: usize = 5;

/// Drawn rows: i64 (LINES, WIDTH), with a class for each line: i32 (LINES).
#[derive(Debug)]
pub(crate) struct Lines {
    pub(crate) rows: u64,
    /// The row and the line whose target is not a class.
    pub(crate) bad: Option<(u64, u64)>,
    pub(crate) spec: RowSpec,
}

impl Lines {
    pub(crate) fn new(rows: u64) -> Lines {
        let spec = RowSpec {
            inputs: TensorSpec::new(DType::I64, &[LINES, WIDTH]),
            targets: TensorSpec::new(DType::I32, &[LINES]),
            task: TaskSpec::numbered_classes(CLASSES),
            image: Vec::new(),
        };
        Lines {
            rows,
            bad: None,
            spec,
        }
    }
}

impl Dataset for Lines {
    fn rows(&self) -> u64 {
        self.rows
    }

    fn spec(&self) -> &RowSpec {
        &self.spec
    }

    fn fingerprint(&self) -> ddp::data::Result<String> {
        Ok(format!("lines of a test: {}", self.rows))
    }

    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> ddp::data::Result<()> {
        let drawn = |stream, index| mixed(stream, index) % CLASSES as u64;
        inputs.with_slice_mut(|inputs: &mut [i64]| {
            for (&row, row_inputs) in rows.iter().zip(inputs.chunks_exact_mut(LINES * WIDTH)) {
                let first = row * (LINES * WIDTH) as u64;
                for (index, number) in (first..).zip(row_inputs) {
                    *number = drawn(1, index) as i64;
                }
            }
        })?;
        Ok(targets.with_slice_mut(|targets: &mut [i32]| {
            for (&row, row_targets) in rows.iter().zip(targets.chunks_exact_mut(LINES)) {
                for (line, class) in (0..).zip(row_targets) {
                    *class = if self.bad == Some((row, line)) {
                        CLASSES as i32
                    } else {
                        drawn(2, row * LINES as u64 + line) as i32
                    };
                }
            }
        })?)
    }
}

/// Whole numbers as floats: the first layer of a model of such rows.
#[derive(Debug)]
pub(crate) struct ToFloats;

impl Module for ToFloats {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        m.custom(Arc::new(ToFloats), &[x])
    }

    fn input_dtype(&self) -> Option<DType> {
        Some(DType::I64)
    }
}

impl CustomOp for ToFloats {
    fn shape(&self, inputs: &[Vec<usize>]) -> ddp::nn::Result<Vec<usize>> {
        Ok(inputs[0].clone())
    }

    fn forward(&self, x: &[&Tensor], floats: &Tensor) -> ddp::nn::Result<()> {
        Ok(ops::cast_into(floats, x[0])?)
    }

    fn backward(&self, _: &[&Tensor], _: [&Tensor; 2], _: &[&Tensor]) -> ddp::nn::Result<()> {
        unreachable!("integers have no gradient")
    }
}
