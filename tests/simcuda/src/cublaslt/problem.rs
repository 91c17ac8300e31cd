//! Whether a matmul is valid: descriptors in, a checked [`Problem`] or a [`Refusal`] out. The
//! rules are those of the cuBLASLt documentation (cublasLtMatmul: supported types;
//! cublasLtEpilogue_t) plus two epilogues known not to exist (BGRADA with a transposed A, BGRADB
//! with a B that is not).

use std::ops::Range;

use super::attributes::{Layout, Operation};
use super::element::Type;
use super::epilogue::{Activation, Bias, Epilogue};
use super::matrix::{Matrix, Refusal, lines_of};
use crate::work::Address;

/// The precision of a matmul.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compute {
    F32,
    Tf32,
    F64,
}

/// The auxiliary matrix of an activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Aux {
    pub(super) address: Address,
    /// In bits for RELU, in elements of D's type for GELU.
    pub(super) ld: u64,
    pub(super) batch_stride: u64,
}

/// The vector at the bias pointer: read or written, as the epilogue says, in D's type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BiasVector {
    pub(super) address: Address,
    pub(super) elements: u64,
    pub(super) batch_stride: u64,
}

/// A matmul that is supported: D = epilogue(alpha op(A) op(B) + beta C).
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Problem {
    pub(super) compute: Compute,
    pub(super) epilogue: Epilogue,
    /// Whether alpha and beta are read from the device, when it runs.
    pub(super) scalars_on_device: bool,
    pub(super) transpose_a: bool,
    pub(super) transpose_b: bool,
    /// op(A): m x k.
    pub(super) a: Matrix,
    /// op(B): k x n.
    pub(super) b: Matrix,
    pub(super) c: Matrix,
    pub(super) d: Matrix,
    pub(super) bias: Option<BiasVector>,
    pub(super) aux: Option<Aux>,
    /// How many multiprocessors the search plans for; 0: all of them.
    pub(super) multiprocessors: i32,
}

impl Problem {
    /// Checks the descriptors against each other. Bias and aux pointers may still be null: the
    /// search does not need them.
    pub(super) fn new(operation: &Operation, [a, b, c, d]: [&Layout; 4]) -> Result<Self, Refusal> {
        let (a, b, c, d) = (
            Matrix::new('A', a)?,
            Matrix::new('B', b)?,
            Matrix::new('C', c)?,
            Matrix::new('D', d)?,
        );
        let transpose_a = transposes('A', operation.transpose[0])?;
        let transpose_b = transposes('B', operation.transpose[1])?;
        if operation.transpose[2] != 0 {
            return Err(Refusal::Unsupported(
                "C is transposed, which the library does not support".into(),
            ));
        }
        let a = if transpose_a { a.transposed() } else { a };
        let b = if transpose_b { b.transposed() } else { b };
        if a.columns != b.rows
            || (c.rows, c.columns) != (d.rows, d.columns)
            || (d.rows, d.columns) != (a.rows, b.columns)
        {
            return Err(Refusal::Invalid(format!(
                "op(A) is {}x{}, op(B) {}x{}, C {}x{}, D {}x{}: they do not fit",
                a.rows, a.columns, b.rows, b.columns, c.rows, c.columns, d.rows, d.columns
            )));
        }
        if [a.batch, b.batch, c.batch] != [d.batch; 3] {
            return Err(Refusal::Invalid(format!(
                "batch counts of A {}, B {}, C {}, D {}",
                a.batch, b.batch, c.batch, d.batch
            )));
        }
        if operation.fill_mode != 2 {
            return Err(Refusal::Unsupported(format!(
                "the fill mode {} is not FULL",
                operation.fill_mode
            )));
        }
        let compute = compute(operation, a.kind, b.kind, c.kind, d.kind)?;
        let scalars_on_device = match operation.pointer_mode {
            0 => false,
            1 => true,
            mode => {
                return Err(Refusal::Unsupported(format!(
                    "the pointer mode {mode}; modelled: HOST, DEVICE"
                )));
            }
        };
        let epilogue = Epilogue::from_raw(operation.epilogue).ok_or_else(|| {
            Refusal::Invalid(format!("there is no epilogue {}", operation.epilogue))
        })?;
        let mut problem = Self {
            compute,
            epilogue,
            scalars_on_device,
            transpose_a,
            transpose_b,
            a,
            b,
            c,
            d,
            bias: None,
            aux: None,
            multiprocessors: operation.multiprocessors,
        };
        problem.check_epilogue()?;
        problem.bias = problem.bias_vector(operation)?;
        problem.aux = problem.auxiliary(operation)?;
        Ok(problem)
    }

    fn check_epilogue(&self) -> Result<(), Refusal> {
        let unsupported = |why: &str| {
            Err(Refusal::Unsupported(format!(
                "the epilogue {} {why}",
                self.epilogue.name
            )))
        };
        if self.epilogue.name == "DEFAULT" {
            return Ok(());
        }
        if self.compute == Compute::F64 {
            return unsupported("with COMPUTE_64F");
        }
        if self.d.row_stride != 1 {
            return unsupported("with a D of order ROW");
        }
        match self.epilogue.bias {
            Bias::GradientOfA if self.transpose_a => unsupported("with op(A) = T"),
            Bias::GradientOfB if !self.transpose_b => unsupported("with op(B) = N"),
            _ => Ok(()),
        }
    }

    fn bias_vector(&self, operation: &Operation) -> Result<Option<BiasVector>, Refusal> {
        let elements = match self.epilogue.bias {
            Bias::None => return Ok(None),
            Bias::GradientOfB => self.d.columns,
            _ => self.d.rows,
        };
        self.same_type_as_d("bias", operation.bias_type)?;
        Ok(Some(BiasVector {
            address: operation.bias,
            elements,
            batch_stride: batch_stride("bias", operation.bias_batch_stride)?,
        }))
    }

    fn auxiliary(&self, operation: &Operation) -> Result<Option<Aux>, Refusal> {
        let (Some(activation), true) = (self.epilogue.activation, self.epilogue.aux) else {
            return Ok(None);
        };
        let multiple = match activation {
            Activation::Relu => 128,
            Activation::Gelu => {
                self.same_type_as_d("aux", operation.aux_type)?;
                8
            }
        };
        let ld = u64::try_from(operation.aux_ld).unwrap_or(0);
        if ld < self.d.rows || !ld.is_multiple_of(multiple) {
            return Err(Refusal::Invalid(format!(
                "the aux matrix of {} has a leading dimension of {}: it must be a multiple of {multiple} and at least {}",
                self.epilogue.name, operation.aux_ld, self.d.rows
            )));
        }
        let batch_stride = batch_stride("aux", operation.aux_batch_stride)?;
        if activation == Activation::Relu && !batch_stride.is_multiple_of(8) {
            return Err(Refusal::Invalid(format!(
                "the aux batch stride of {batch_stride} bits is not a whole number of bytes"
            )));
        }
        Ok(Some(Aux {
            address: operation.aux,
            ld,
            batch_stride,
        }))
    }

    fn same_type_as_d(&self, what: &str, raw: i32) -> Result<(), Refusal> {
        if raw == -1 || u32::try_from(raw) == Ok(self.d.kind.raw()) {
            return Ok(());
        }
        Err(Refusal::Unsupported(format!(
            "the {what} data type {raw} is not that of D, {}",
            self.d.kind.name()
        )))
    }

    /// The bytes of the auxiliary matrix: whole bytes of the mask, or elements.
    pub(super) fn aux_ranges(&self) -> Vec<Range<Address>> {
        let (Some(aux), Some(activation)) = (self.aux, self.epilogue.activation) else {
            return Vec::new();
        };
        let Matrix {
            rows,
            columns,
            batch,
            ..
        } = self.d;
        match activation {
            Activation::Relu => lines_of(
                aux.address,
                1,
                rows.div_ceil(8),
                columns,
                aux.ld / 8,
                batch,
                aux.batch_stride / 8,
            ),
            Activation::Gelu => lines_of(
                aux.address,
                self.d.kind.bytes(),
                rows,
                columns,
                aux.ld,
                batch,
                aux.batch_stride,
            ),
        }
    }

    pub(super) fn bias_ranges(&self) -> Vec<Range<Address>> {
        self.bias.map_or_else(Vec::new, |bias| {
            lines_of(
                bias.address,
                self.d.kind.bytes(),
                bias.elements,
                1,
                0,
                self.d.batch,
                bias.batch_stride,
            )
        })
    }

    /// For reports.
    pub(super) fn describe(&self) -> String {
        let operation = |transposed| if transposed { 'T' } else { 'N' };
        let batch = if self.d.batch == 1 {
            String::new()
        } else {
            format!(", batch {}", self.d.batch)
        };
        let planned = match self.multiprocessors {
            0 => String::new(),
            count => format!(", for {count} multiprocessors"),
        };
        format!(
            "{}x{}x{} {}{} {} to {}, {}{batch}{planned}",
            self.d.rows,
            self.d.columns,
            self.a.columns,
            operation(self.transpose_a),
            operation(self.transpose_b),
            self.a.kind.name(),
            self.d.kind.name(),
            self.epilogue.name
        )
    }

    /// What an algorithm is valid for: problems that differ only in pointers share it.
    pub(super) fn key(&self) -> u64 {
        let order =
            |matrix: &Matrix, transposed: bool| u64::from((matrix.row_stride == 1) != transposed);
        let shape = [&self.a, &self.b, &self.c, &self.d].map(|matrix| {
            let Matrix {
                rows,
                columns,
                row_stride,
                column_stride,
                batch,
                batch_stride,
                ..
            } = *matrix;
            [
                rows,
                columns,
                row_stride,
                column_stride,
                batch,
                batch_stride,
            ]
        });
        let kind = [
            self.compute as u64,
            self.a.kind as u64,
            self.b.kind as u64,
            self.c.kind as u64,
            self.d.kind as u64,
            u64::from(self.transpose_a),
            u64::from(self.transpose_b),
            order(&self.c, false),
            order(&self.d, false),
            self.epilogue
                .activation
                .map_or(0, |activation| 1 + activation as u64),
            u64::from(self.epilogue.backward),
            u64::from(self.epilogue.aux),
            self.epilogue.bias as u64,
        ]
        .into_iter()
        .fold(1, |key, part| key * 8 + part);
        // A hash of all (FNV-1a by words): two matmuls with one key are unlikely enough.
        shape.as_flattened().iter().fold(kind, |key: u64, part| {
            (key ^ part).wrapping_mul(0x0100_0000_01b3).rotate_left(29)
        })
    }
}

fn transposes(operand: char, raw: u32) -> Result<bool, Refusal> {
    match raw {
        0 => Ok(false),
        // Conjugated (2): the same for real numbers.
        1 | 2 => Ok(true),
        _ => Err(Refusal::Invalid(format!(
            "there is no operation {raw} for {operand}"
        ))),
    }
}

fn batch_stride(what: &str, raw: i64) -> Result<u64, Refusal> {
    u64::try_from(raw)
        .map_err(|_| Refusal::Unsupported(format!("the {what} batch stride of {raw} is negative")))
}

/// The table of supported types.
fn compute(operation: &Operation, a: Type, b: Type, c: Type, d: Type) -> Result<Compute, Refusal> {
    let (compute, scale) = match operation.compute {
        68 | 69 => (Compute::F32, Type::F32),
        77 => (Compute::Tf32, Type::F32),
        70 | 71 => (Compute::F64, Type::F64),
        other => {
            return Err(Refusal::Unsupported(format!(
                "the compute type {other}; modelled: 32F, 32F_FAST_TF32, 64F"
            )));
        }
    };
    let fits = match compute {
        Compute::F64 => [a, b, c, d] == [Type::F64; 4],
        Compute::Tf32 => [a, b, c, d] == [Type::F32; 4],
        Compute::F32 => a == b && c == d && a != Type::F64 && (d == a || d == Type::F32),
    };
    if !fits || operation.scale != scale.raw() {
        return Err(Refusal::Unsupported(format!(
            "A {}, B {}, C {}, D {} with the scale type {} in {compute:?}",
            a.name(),
            b.name(),
            c.name(),
            d.name(),
            operation.scale
        )));
    }
    Ok(compute)
}
