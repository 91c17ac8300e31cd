//! The matmul itself as stream work: which bytes it touches, and the arithmetic.
//!
//! One rounding at the end: sums accumulate in f32 (f64 for COMPUTE_64F); alpha, beta C, bias and
//! activation follow in the same precision; only the stored value is rounded to D's type. But where
//! C in bf16 is added, the product is rounded before, as cuBLASLt 13.1 does on an H200. The order
//! of a sum is along k: the same in every run, but not a GPU's.

use std::ops::Range;

use ddp_ptx::Dense;

use super::element::{Real, Type};
use super::epilogue::{Activation, Bias, gelu, gelu_derivative, relu};
use super::matrix::Matrix;
use super::problem::{Compute, Problem};
use super::variant::Variant;
use crate::error::CUresult;
use crate::work::{Address, Failure, Memory, Touched, Work};

/// alpha or beta.
#[derive(Clone, Copy, Debug)]
pub(super) enum Scalar {
    /// Read from the host when the matmul was queued.
    Value(f64),
    /// Read from the device when it runs.
    At(Address),
}

/// One matmul, with all its pointers.
#[derive(Clone, Debug)]
pub(super) struct Matmul {
    pub(super) problem: Problem,
    pub(super) variant: Variant,
    pub(super) alpha: Scalar,
    pub(super) beta: Scalar,
    pub(super) a: Address,
    pub(super) b: Address,
    pub(super) c: Address,
    pub(super) d: Address,
    /// The workspace that the algorithm overwrites.
    pub(super) workspace: Range<Address>,
}

impl Matmul {
    fn scalar_bytes(&self) -> u64 {
        if self.problem.compute == Compute::F64 {
            8
        } else {
            4
        }
    }

    /// What it touches, whether C is read or not.
    fn touches(&self, reads_c: bool) -> Touched {
        let problem = &self.problem;
        let mut touched = Touched::default();
        touched.reads.extend(problem.a.ranges(self.a));
        touched.reads.extend(problem.b.ranges(self.b));
        if reads_c {
            touched.reads.extend(problem.c.ranges(self.c));
        }
        for scalar in [self.alpha, self.beta] {
            if let Scalar::At(address) = scalar {
                touched.reads.push(address..address + self.scalar_bytes());
            }
        }
        touched.writes.extend(problem.d.ranges(self.d));
        let aux = problem.aux_ranges();
        if problem.epilogue.backward {
            touched.reads.extend(aux)
        } else {
            touched.writes.extend(aux)
        }
        let bias = problem.bias_ranges();
        if problem.epilogue.bias == Bias::Add {
            touched.reads.extend(bias)
        } else {
            touched.writes.extend(bias)
        }
        if !self.workspace.is_empty() {
            touched.writes.push(self.workspace.clone());
        }
        touched
    }

    fn scalar<T: Real>(&self, run: &MatmulRun<'_>, scalar: Scalar) -> Result<T, Failure> {
        let address = match scalar {
            Scalar::Value(value) => return Ok(T::from_f64(value)),
            Scalar::At(address) => address,
        };
        let kind = if self.problem.compute == Compute::F64 {
            Type::F64
        } else {
            Type::F32
        };
        let pointer = run.pointer("alpha or beta", address..address + self.scalar_bytes())?;
        // SAFETY: `pointer` has checked that these bytes are live memory. Work runs one piece at a
        // time, so nothing writes them.
        Ok(unsafe { T::load(kind, pointer) })
    }

    /// alpha op(A) op(B) + beta C of one member of the batch, column by column.
    fn sums<T: Real>(
        &self,
        run: &MatmulRun<'_>,
        member: u64,
        alpha: T,
        beta: T,
    ) -> Result<Vec<T>, Failure> {
        let problem = &self.problem;
        let mut a = run.load_dense::<T>("A", &problem.a, self.a, member)?;
        let mut b = run.load_dense::<T>("B", &problem.b, self.b, member)?;
        if problem.compute == Compute::Tf32 {
            a.values
                .iter_mut()
                .chain(&mut b.values)
                .for_each(|value| *value = value.to_tf32());
        }
        let sizes = [problem.d.rows, problem.d.columns, problem.a.columns];
        let mut sums = T::product(&a, &b, sizes.map(|size| size as usize));
        if beta == T::default() {
            // C is not read at all, even if it holds NaN.
            sums.iter_mut().for_each(|sum| *sum = alpha * *sum);
        } else {
            let c = run.load::<T>("C", &problem.c, self.c, member)?;
            let rounds = problem.c.kind == Type::Bf16;
            sums.iter_mut().zip(c).for_each(|(sum, c)| {
                let product = alpha * *sum;
                *sum = if rounds { product.to_bf16() } else { product } + beta * c;
            });
        }
        Ok(sums)
    }

    fn run_as<T: Real>(
        &self,
        run: &MatmulRun<'_>,
        touched: &mut Touched,
        epilogue: impl Fn(&Self, &MatmulRun<'_>, u64, &mut [T]) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let (alpha, beta) = (
            self.scalar::<T>(run, self.alpha)?,
            self.scalar::<T>(run, self.beta)?,
        );
        *touched = self.touches(beta != T::default());
        for member in 0..self.problem.d.batch {
            let mut sums = self.sums(run, member, alpha, beta)?;
            epilogue(self, run, member, &mut sums)?;
            run.store("D", &self.problem.d, self.d, member, &sums)?;
        }
        Ok(())
    }

    /// Bias and activation, in place on one column-major matrix of D's shape.
    fn epilogue(&self, run: &MatmulRun<'_>, member: u64, z: &mut [f32]) -> Result<(), Failure> {
        let problem = &self.problem;
        let rows = problem.d.rows as usize;
        if problem.epilogue.bias == Bias::Add {
            let bias = self.bias(run, member, None)?;
            z.chunks_exact_mut(rows).for_each(|column| {
                column
                    .iter_mut()
                    .zip(&bias)
                    .for_each(|(z, bias)| *z += bias)
            });
        }
        match (problem.epilogue.activation, problem.epilogue.backward) {
            (Some(Activation::Relu), false) => {
                self.write_mask(run, member, z)?;
                z.iter_mut().for_each(|z| *z = relu(*z));
                if self.variant == Variant::HidesNan && rows > 16 {
                    z.iter_mut().filter(|z| z.is_nan()).for_each(|z| *z = 0.0);
                }
            }
            (Some(Activation::Gelu), false) => {
                if let Some((matrix, address)) = self.aux_matrix() {
                    run.store("the aux matrix", &matrix, address, member, z)?;
                }
                z.iter_mut().for_each(|z| *z = gelu(*z));
            }
            (Some(Activation::Relu), true) => self.apply_mask(run, member, z)?,
            (Some(Activation::Gelu), true) => {
                if let Some((matrix, address)) = self.aux_matrix() {
                    let aux = run.load::<f32>("the aux matrix", &matrix, address, member)?;
                    z.iter_mut()
                        .zip(aux)
                        .for_each(|(z, aux)| *z *= gelu_derivative(aux));
                }
            }
            (None, _) => {}
        }
        if let Some(gradient) = self.bias_gradient(run, member, z)? {
            self.bias(run, member, Some(&gradient))?;
        }
        Ok(())
    }

    fn bias_gradient(
        &self,
        run: &MatmulRun<'_>,
        member: u64,
        d: &[f32],
    ) -> Result<Option<Vec<f32>>, Failure> {
        let problem = &self.problem;
        let operand = |name, matrix, address| run.load::<f32>(name, matrix, address, member);
        Ok(match problem.epilogue.bias {
            Bias::None | Bias::Add => None,
            Bias::GradientOfOutput => Some(row_sums(d, problem.d.rows as usize)),
            Bias::GradientOfA => Some(row_sums(
                &operand("A", &problem.a, self.a)?,
                problem.a.rows as usize,
            )),
            Bias::GradientOfB => {
                let b = operand("B", &problem.b, self.b)?;
                Some(
                    b.chunks_exact(problem.b.rows as usize)
                        .map(|column| column.iter().sum())
                        .collect(),
                )
            }
        })
    }

    /// Reads the bias, or writes it.
    fn bias(
        &self,
        run: &MatmulRun<'_>,
        member: u64,
        values: Option<&[f32]>,
    ) -> Result<Vec<f32>, Failure> {
        let Some(bias) = self.problem.bias else {
            return Ok(Vec::new());
        };
        let vector = Matrix {
            kind: self.problem.d.kind,
            rows: bias.elements,
            columns: 1,
            row_stride: 1,
            column_stride: bias.elements,
            batch: self.problem.d.batch,
            batch_stride: bias.batch_stride,
        };
        match values {
            None => run.load("the bias", &vector, bias.address, member),
            Some(values) => run
                .store("the bias", &vector, bias.address, member, values)
                .map(|()| Vec::new()),
        }
    }

    /// GELU's auxiliary matrix.
    fn aux_matrix(&self) -> Option<(Matrix, Address)> {
        let aux = self.problem.aux?;
        let matrix = Matrix {
            row_stride: 1,
            column_stride: aux.ld,
            batch_stride: aux.batch_stride,
            ..self.problem.d
        };
        Some((matrix, aux.address))
    }

    /// ReLU's auxiliary matrix, as bytes: address of a column of one member, and bytes a column.
    fn mask_columns(&self, member: u64) -> impl Iterator<Item = Range<Address>> {
        let bytes = self.problem.d.rows.div_ceil(8);
        let aux = self.problem.aux;
        aux.into_iter().flat_map(move |aux| {
            (0..self.problem.d.columns).map(move |column| {
                let start = aux.address + (member * aux.batch_stride + column * aux.ld) / 8;
                start..start + bytes
            })
        })
    }

    fn write_mask(&self, run: &MatmulRun<'_>, member: u64, z: &[f32]) -> Result<(), Failure> {
        for (range, column) in self
            .mask_columns(member)
            .zip(z.chunks_exact(self.problem.d.rows as usize))
        {
            let pointer = run.pointer("the aux matrix", range)?;
            for (at, eight) in column.chunks(8).enumerate() {
                let bits = eight
                    .iter()
                    .enumerate()
                    .fold(0, |bits, (bit, &z)| bits | (u8::from(z >= 0.0) << bit));
                // SAFETY: `at` is below rows / 8 rounded up, the length of the range that was just
                // checked.
                unsafe { pointer.add(at).write(bits) };
            }
        }
        Ok(())
    }

    fn apply_mask(&self, run: &MatmulRun<'_>, member: u64, z: &mut [f32]) -> Result<(), Failure> {
        for (range, column) in self
            .mask_columns(member)
            .zip(z.chunks_exact_mut(self.problem.d.rows as usize))
        {
            let pointer = run.pointer("the aux matrix", range)?;
            for (at, eight) in column.chunks_mut(8).enumerate() {
                // SAFETY: `at` is below rows / 8 rounded up, the length of the range that was just
                // checked.
                let bits = unsafe { pointer.add(at).read() };
                eight
                    .iter_mut()
                    .enumerate()
                    .filter(|(bit, _)| bits >> bit & 1 == 0)
                    .for_each(|(_, z)| *z = 0.0);
            }
        }
        Ok(())
    }
}

impl Work for Matmul {
    fn describe(&self) -> String {
        format!("cublasLtMatmul {}", self.problem.describe())
    }

    fn known_ranges(&self) -> Touched {
        self.touches(matches!(self.beta, Scalar::Value(beta) if beta != 0.0))
    }

    fn run(
        &self,
        device: usize,
        memory: &dyn Memory,
        touched: &mut Touched,
    ) -> Result<(), Failure> {
        let run = MatmulRun {
            device,
            memory,
            work: self,
        };
        *touched = self.known_ranges();
        if !self.workspace.is_empty() {
            let pointer = run.pointer("the workspace", self.workspace.clone())?;
            let bytes = (self.workspace.end - self.workspace.start) as usize;
            // The caller's data in the workspace is lost, as with a real algorithm.
            // SAFETY: the range was just checked to be live memory, and nothing else runs now.
            unsafe { pointer.write_bytes(0xff, bytes) };
        }
        match self.problem.compute {
            Compute::F64 => self.run_as::<f64>(&run, touched, |_, _, _, _| Ok(())),
            Compute::F32 | Compute::Tf32 => self.run_as::<f32>(&run, touched, Self::epilogue),
        }
    }

    fn duration_ns(&self) -> u64 {
        let Problem { a, d, .. } = &self.problem;
        // The rate is arbitrary: it is the same for all, and never shown.
        let terms = d
            .batch
            .saturating_mul(d.rows)
            .saturating_mul(d.columns)
            .saturating_mul(a.columns);
        2000 + terms / 25_000
    }
}

/// Where a matmul runs.
struct MatmulRun<'a> {
    device: usize,
    memory: &'a dyn Memory,
    work: &'a Matmul,
}

impl MatmulRun<'_> {
    /// Where the bytes of `range` are, after a check that the device may access all of them.
    fn pointer(&self, what: &str, range: Range<Address>) -> Result<*mut u8, Failure> {
        self.memory
            .check(self.device, range.clone())
            .map_err(|why| Failure {
                code: CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
                message: format!("{}: {what}: {why}", self.work.describe()),
            })?;
        Ok(self.memory.host_pointer(range.start))
    }

    /// One matrix of the batch as stored, without gaps.
    fn load_dense<T: Real>(
        &self,
        what: &str,
        matrix: &Matrix,
        address: Address,
        member: u64,
    ) -> Result<Dense<T>, Failure> {
        let base = self.pointer(what, matrix.span(address))?;
        let mut values = Vec::with_capacity((matrix.rows * matrix.columns) as usize);
        let lines = Lines::of(matrix);
        for line in 0..lines.count {
            let at = (member * matrix.batch_stride + line * lines.stride) * matrix.kind.bytes();
            // SAFETY: the line lies in the span that was just checked, and nothing runs that could
            // write it.
            unsafe {
                T::load_run(
                    matrix.kind,
                    base.add(at as usize),
                    lines.elements,
                    &mut values,
                )
            };
        }
        let (row_stride, column_stride) = if lines.are_columns {
            (1, lines.elements)
        } else {
            (lines.elements, 1)
        };
        Ok(Dense {
            values,
            row_stride,
            column_stride,
        })
    }

    /// One matrix of the batch, column by column without gaps.
    fn load<T: Real>(
        &self,
        what: &str,
        matrix: &Matrix,
        address: Address,
        member: u64,
    ) -> Result<Vec<T>, Failure> {
        let dense = self.load_dense(what, matrix, address, member)?;
        if dense.row_stride == 1 {
            return Ok(dense.values);
        }
        let (rows, columns) = (matrix.rows as usize, matrix.columns as usize);
        Ok((0..rows * columns)
            .map(|at| dense.values[at % rows * dense.row_stride + at / rows])
            .collect())
    }

    /// The opposite of `load`.
    fn store<T: Real>(
        &self,
        what: &str,
        matrix: &Matrix,
        address: Address,
        member: u64,
        values: &[T],
    ) -> Result<(), Failure> {
        let base = self.pointer(what, matrix.span(address))?;
        let (lines, rows) = (Lines::of(matrix), matrix.rows as usize);
        assert_eq!(
            values.len() as u64,
            matrix.rows * matrix.columns,
            "as many values as the matrix has elements"
        );
        let mut row = Vec::new();
        for line in 0..lines.count as usize {
            let at =
                (member * matrix.batch_stride + line as u64 * lines.stride) * matrix.kind.bytes();
            let values = if lines.are_columns {
                &values[line * rows..(line + 1) * rows]
            } else {
                row.clear();
                row.extend(values.iter().skip(line).step_by(rows));
                &row
            };
            // SAFETY: the line lies in the span that was just checked, and nothing else runs
            // meanwhile.
            unsafe { T::store_run(values, matrix.kind, base.add(at as usize)) };
        }
        Ok(())
    }
}

/// The lines of a matrix in memory: its columns or rows, each without gaps.
struct Lines {
    are_columns: bool,
    count: u64,
    elements: usize,
    /// In elements, from one line to the next.
    stride: u64,
}

impl Lines {
    fn of(matrix: &Matrix) -> Self {
        if matrix.row_stride == 1 {
            Self {
                are_columns: true,
                count: matrix.columns,
                elements: matrix.rows as usize,
                stride: matrix.column_stride,
            }
        } else {
            Self {
                are_columns: false,
                count: matrix.rows,
                elements: matrix.columns as usize,
                stride: matrix.row_stride,
            }
        }
    }
}

fn row_sums(matrix: &[f32], rows: usize) -> Vec<f32> {
    let mut sums = vec![0.0; rows];
    matrix.chunks_exact(rows).for_each(|column| {
        sums.iter_mut()
            .zip(column)
            .for_each(|(sum, value)| *sum += value)
    });
    sums
}
