//! The family `positions`: integers in, a class for each position out.
//!
//! Letters: R rows, A positions of a row, B integers at each position, V values of an integer,
//! W width, C classes.

use std::sync::Arc;

use ddp::family_settings;
use ddp::models::family::{DataShape, Family, check_size, refuse};
use ddp::nn::{Activate, CustomOp, Dropout, Linear, Module, Result, Scope, Sequential, Var};
use ddp_kernels::{DType, Tensor};

family_settings! {
    /// Settings of the family.
    pub struct PositionsSpec {
        /// Number of different integers, which are from 0 on
        values "N": usize = 16;
        /// Width of the hidden layer
        width "N": usize = 8;
        /// Probability of dropping an element of the hidden layer
        dropout "P": f64 = 0.0;
    }
}

impl Family for PositionsSpec {
    fn name(&self) -> &'static str {
        "positions"
    }

    fn help(&self) -> &'static str {
        "For tests: a class for each position"
    }

    fn check(&self) -> Result<()> {
        check_size("values", self.values, 1024)?;
        check_size("width", self.width, 1024)?;
        if !(0.0..1.0).contains(&self.dropout) {
            let expected = "a number, at least 0 and less than 1";
            return Err(refuse("dropout", self.dropout, expected, "give another"));
        }
        Ok(())
    }

    fn layers(&self, data: &DataShape<'_>) -> Result<Sequential> {
        data.check_dtype(DType::I64, "positions")?;
        let count = Count {
            values: self.values,
        };
        let mut layers = Sequential::new()
            .then(count)
            .then(Linear::new(self.width))
            .then(Activate::gelu());
        if self.dropout != 0.0 {
            layers.push(Box::new(Dropout::new(self.dropout)));
        }
        Ok(layers.then(Linear::new(data.outputs)))
    }
}

/// Counts each value at each position: i64 (R, A, B) or (R, A) to floats (R, A, V). CPU only.
#[derive(Clone, Debug)]
struct Count {
    values: usize,
}

impl Module for Count {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        if !(2..=3).contains(&x.rank()) {
            let help = "give rows of [positions], or of [positions, integers at each]";
            return x.refuse("count", &[x], "rows of one or two dimensions", help);
        }
        m.custom(Arc::new(self.clone()), &[x])
    }

    fn input_dtype(&self) -> Option<DType> {
        Some(DType::I64)
    }
}

impl CustomOp for Count {
    fn shape(&self, inputs: &[Vec<usize>]) -> Result<Vec<usize>> {
        Ok(vec![inputs[0][0], inputs[0][1], self.values])
    }

    fn forward(&self, x: &[&Tensor], counts: &Tensor) -> Result<()> {
        let at_each = x[0].shape().get(2).copied().unwrap_or(1);
        let count = |x: &[i64], counts: &mut [f32]| {
            counts.fill(0.0);
            let positions = x.chunks(at_each).zip(counts.chunks_mut(self.values));
            for (integers, counts) in positions {
                integers.iter().for_each(|&one| counts[one as usize] += 1.0);
            }
        };
        let of = |x: &[i64]| counts.with_slice_mut(|counts: &mut [f32]| count(x, counts));
        Ok(x[0].with_slice(of)??)
    }

    fn backward(&self, _: &[&Tensor], _: [&Tensor; 2], _: &[&Tensor]) -> Result<()> {
        unreachable!("integers have no gradient")
    }
}
