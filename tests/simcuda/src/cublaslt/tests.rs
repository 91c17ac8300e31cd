//! Matmuls compared with explicit sums, on memory that is a plain vector.

mod calls;
mod epilogues;
mod overlaps;
mod refusals;

use half::bf16;

use super::algorithm::{Algorithm, fits};
use super::attributes::{Layout, Operation};
use super::element::Type;
use super::matmul::{Matmul, Scalar};
use super::matrix::{Matrix, Refusal};
use super::problem::Problem;
use super::variant::Variant;
use super::*;
use crate::work::{Memory, Touched, Work};

/// Device memory: 64 KiB of live addresses from `BASE` on.
struct Fake(Vec<std::cell::UnsafeCell<u64>>);

const BASE: Address = 0x10000;
const BYTES: u64 = 1 << 16;

// SAFETY: the tests use one from one thread; the trait asks for it.
unsafe impl Sync for Fake {}

impl Fake {
    /// Filled with NaN, as new memory is.
    fn new() -> Self {
        Self(
            (0..BYTES / 8)
                .map(|_| std::cell::UnsafeCell::new(u64::MAX))
                .collect(),
        )
    }

    fn put(&self, address: Address, values: &[f32], kind: Type) {
        for (at, &value) in values.iter().enumerate() {
            let to = self.host_pointer(address + at as u64 * kind.bytes());
            // SAFETY: the tests' matrices lie within the memory, which the assert of host_pointer
            // begins to check.
            unsafe { element::Real::store_run(&[value], kind, to) };
        }
    }

    fn get(&self, address: Address, count: usize, kind: Type) -> Vec<f32> {
        let at = |at: usize| self.host_pointer(address + at as u64 * kind.bytes());
        // SAFETY: as in `put`.
        (0..count)
            .map(|index| unsafe { element::Real::load(kind, at(index)) })
            .collect()
    }

    fn bytes(&self, address: Address, count: usize) -> Vec<u8> {
        // SAFETY: as in `put`.
        (0..count)
            .map(|at| unsafe { self.host_pointer(address).add(at).read() })
            .collect()
    }
}

impl Memory for Fake {
    fn check(&self, _: usize, range: std::ops::Range<Address>) -> Result<(), String> {
        let fits = range.start >= BASE && range.end <= BASE + BYTES;
        fits.then_some(())
            .ok_or_else(|| format!("{range:x?} is out of bounds"))
    }

    fn allocation(&self, _: usize, _: Address) -> Result<std::ops::Range<Address>, String> {
        Ok(BASE..BASE + BYTES)
    }

    fn host_pointer(&self, address: Address) -> *mut u8 {
        assert!((BASE..BASE + BYTES).contains(&address));
        // SAFETY: the address was just seen to lie within the vector.
        unsafe {
            self.0
                .as_ptr()
                .cast_mut()
                .cast::<u8>()
                .add((address - BASE) as usize)
        }
    }
}

const A: Address = BASE;
const B: Address = BASE + 0x2000;
const C: Address = BASE + 0x4000;
const D: Address = BASE + 0x6000;
const BIAS: Address = BASE + 0x8000;
const AUX: Address = BASE + 0xa000;

const F32: u32 = 0;
const BF16: u32 = 14;
const COMPUTE_32F: u32 = 68;

fn operation(epilogue: u32, transpose: [u32; 2]) -> Operation {
    Operation {
        epilogue,
        bias: BIAS,
        aux: AUX,
        aux_ld: 128,
        transpose: [transpose[0], transpose[1], 0],
        ..Operation::new(COMPUTE_32F, F32)
    }
}

fn layouts(kinds: [u32; 2], m: u64, n: u64, k: u64, transpose: [u32; 2]) -> [Layout; 4] {
    let stored = |kind, rows, columns, transposed| {
        let (rows, columns) = if transposed == 1 {
            (columns, rows)
        } else {
            (rows, columns)
        };
        // Two elements of padding after each column.
        Layout::new(kind, rows, columns, rows as i64 + 2)
    };
    let output = Layout::new(kinds[1], m, n, m as i64 + 2);
    [
        stored(kinds[0], m, k, transpose[0]),
        stored(kinds[0], k, n, transpose[1]),
        output.clone(),
        output,
    ]
}

fn problem_of(operation: &Operation, layouts: &[Layout; 4]) -> Result<Problem, Refusal> {
    Problem::new(operation, layouts.each_ref())
}

fn matmul(problem: Problem, alpha: f64, beta: f64) -> Matmul {
    Matmul {
        variant: Variant::Sound,
        problem,
        alpha: Scalar::Value(alpha),
        beta: Scalar::Value(beta),
        a: A,
        b: B,
        c: C,
        d: D,
        workspace: 0..0,
    }
}

fn run(matmul: &Matmul, memory: &Fake) -> Touched {
    let mut touched = Touched::default();
    matmul
        .run(0, memory, &mut touched)
        .expect("all of it lies in memory");
    touched
}

/// Small integers: every sum is exact in f32 (and in bf16 what is at most 256), so results are
/// compared to the bit.
fn integer(seed: u64, row: u64, column: u64) -> f32 {
    ((row * 7 + column * 5 + seed * 3) % 5) as f32 - 2.0
}

fn place_of(matrix: &Matrix, row: u64, column: u64) -> u64 {
    (row * matrix.row_stride + column * matrix.column_stride) * matrix.kind.bytes()
}

fn fill(memory: &Fake, matrix: &Matrix, address: Address, seed: u64) {
    for row in 0..matrix.rows {
        for column in 0..matrix.columns {
            memory.put(
                address + place_of(matrix, row, column),
                &[integer(seed, row, column)],
                matrix.kind,
            );
        }
    }
}

fn element_of(memory: &Fake, matrix: &Matrix, address: Address, row: u64, column: u64) -> f32 {
    memory.get(address + place_of(matrix, row, column), 1, matrix.kind)[0]
}

/// alpha op(A) op(B) + beta C of the integers that `fill` writes with the seeds 1, 2, 3.
fn expected(problem: &Problem, alpha: f32, beta: f32, row: u64, column: u64) -> f32 {
    let sum: f32 = (0..problem.a.columns)
        .map(|k| integer(1, row, k) * integer(2, k, column))
        .sum();
    alpha * sum
        + if beta == 0.0 {
            0.0
        } else {
            beta * integer(3, row, column)
        }
}

fn filled(problem: &Problem) -> Fake {
    let memory = Fake::new();
    fill(&memory, &problem.a, A, 1);
    fill(&memory, &problem.b, B, 2);
    memory
}

#[test]
fn every_transpose_order_and_type_gives_the_sum_written_out() {
    for transpose in [[0, 0], [1, 0], [0, 1], [1, 1]] {
        for kinds in [[F32, F32], [BF16, BF16], [BF16, F32], [2, 2]] {
            for order in [0, 1] {
                let mut layouts = layouts(kinds, 5, 4, 3, transpose);
                layouts
                    .iter_mut()
                    .filter(|_| order == 1)
                    .for_each(|layout| {
                        *layout = Layout {
                            order,
                            ld: layout.columns as i64 + 1,
                            ..layout.clone()
                        };
                    });
                let problem = problem_of(&operation(1, transpose), &layouts).unwrap();
                let memory = filled(&problem);
                fill(&memory, &problem.c, C, 3);
                let work = matmul(problem.clone(), 2.0, 3.0);
                run(&work, &memory);
                for (row, column) in (0..5).flat_map(|row| (0..4).map(move |column| (row, column)))
                {
                    let got = element_of(&memory, &problem.d, D, row, column);
                    assert_eq!(
                        got,
                        expected(&problem, 2.0, 3.0, row, column),
                        "{} ({row}, {column})",
                        work.describe()
                    );
                }
            }
        }
    }
}

#[test]
fn with_beta_zero_c_is_not_read_and_ranges_are_exact_by_column() {
    let problem = problem_of(&operation(1, [0, 0]), &layouts([F32, F32], 5, 4, 3, [0, 0])).unwrap();
    let memory = filled(&problem);
    let touched = run(&matmul(problem.clone(), 1.0, 0.0), &memory);
    // C is NaN all over.
    assert_eq!(
        element_of(&memory, &problem.d, D, 4, 3),
        expected(&problem, 1.0, 0.0, 4, 3)
    );
    assert!(
        touched
            .reads
            .iter()
            .all(|range| !(C..D).contains(&range.start))
    );
    let columns: Vec<_> = (0..4)
        .map(|column| D + column * 28..D + column * 28 + 20)
        .collect();
    assert_eq!(touched.writes, columns);
    assert_eq!(touched.reads.len(), 3 + 4);
    // The padding between D's columns stays as it was.
    assert!(
        memory
            .get(D + 20, 2, Type::F32)
            .iter()
            .all(|value| value.is_nan())
    );
}

#[test]
fn matrices_without_gaps_are_one_range() {
    let dense = Layout::new(F32, 6, 8, 6);
    let square = |rows, columns| Layout::new(F32, rows, columns, rows as i64);
    let problem = problem_of(
        &operation(1, [0, 0]),
        &[dense, square(8, 5), square(6, 5), square(6, 5)],
    )
    .unwrap();
    let touched = matmul(problem, 1.0, 1.0).known_ranges();
    assert_eq!(touched.reads, [A..A + 192, B..B + 160, C..C + 120]);
    assert_eq!(
        (touched.writes.len(), &touched.writes[0]),
        (1, &(D..D + 120))
    );
}

#[test]
fn scalars_on_the_device_are_read_when_it_runs() {
    let operation = Operation {
        pointer_mode: 1,
        ..operation(1, [0, 0])
    };
    let problem = problem_of(&operation, &layouts([F32, F32], 5, 4, 3, [0, 0])).unwrap();
    let memory = filled(&problem);
    fill(&memory, &problem.c, C, 3);
    memory.put(BIAS, &[2.0, 0.0, 1.0], Type::F32);
    let mut work = matmul(problem.clone(), 0.0, 0.0);
    (work.alpha, work.beta) = (Scalar::At(BIAS), Scalar::At(BIAS + 4));
    let touched = run(&work, &memory);
    assert_eq!(
        element_of(&memory, &problem.d, D, 1, 2),
        expected(&problem, 2.0, 0.0, 1, 2)
    );
    assert!(
        touched.reads.contains(&(BIAS..BIAS + 4))
            && touched.reads.iter().all(|range| range.start != C)
    );
    work.beta = Scalar::At(BIAS + 8);
    assert!(
        run(&work, &memory)
            .reads
            .iter()
            .any(|range| range.start == C)
    );
    assert_eq!(
        element_of(&memory, &problem.d, D, 1, 2),
        expected(&problem, 2.0, 1.0, 1, 2)
    );
}

#[test]
fn tf32_drops_thirteen_bits_of_the_inputs_and_f32_does_not() {
    let (value, rounded) = (1.0 + 2f32.powi(-11), 1.0 + 2f32.powi(-10));
    for (compute, expected) in [(77, rounded), (COMPUTE_32F, value)] {
        let operation = Operation {
            compute,
            ..operation(1, [0, 0])
        };
        let one = Layout::new(F32, 1, 1, 1);
        let problem =
            problem_of(&operation, &[one.clone(), one.clone(), one.clone(), one]).unwrap();
        let memory = Fake::new();
        memory.put(A, &[value], Type::F32);
        memory.put(B, &[1.0], Type::F32);
        run(&matmul(problem, 1.0, 0.0), &memory);
        assert_eq!(memory.get(D, 1, Type::F32), [expected]);
    }
}

#[test]
fn sums_of_bf16_are_rounded_once_at_the_end() {
    // 256 + 1 + 1 is 258 in f32, which bf16 holds; rounding after each sum would give 256 twice.
    let operation = operation(1, [0, 0]);
    let (row, column) = (Layout::new(BF16, 1, 3, 1), Layout::new(BF16, 3, 1, 3));
    let one = Layout::new(BF16, 1, 1, 1);
    let problem = problem_of(&operation, &[row, column, one.clone(), one]).unwrap();
    let memory = Fake::new();
    memory.put(A, &[256.0, 1.0, 1.0], Type::Bf16);
    memory.put(B, &[1.0, 1.0, 1.0], Type::Bf16);
    run(&matmul(problem, 1.0, 0.0), &memory);
    assert_eq!(memory.get(D, 1, Type::Bf16), [258.0]);
    assert_eq!(bf16::from_f32(257.0).to_f32(), 256.0);
}

#[test]
fn batches_are_strided() {
    let mut layouts = layouts([F32, F32], 2, 2, 2, [0, 0]);
    layouts
        .iter_mut()
        .for_each(|layout| (layout.batch, layout.batch_stride) = (3, 16));
    // One B for all.
    layouts[1].batch_stride = 0;
    let problem = problem_of(&operation(1, [0, 0]), &layouts).unwrap();
    let memory = Fake::new();
    for member in 0..3 {
        fill(&memory, &problem.a, A + member * 64, 1 + member);
    }
    fill(&memory, &problem.b, B, 2);
    let touched = run(&matmul(problem.clone(), 1.0, 0.0), &memory);
    for member in 0..3 {
        let sum: f32 = (0..2)
            .map(|k| integer(1 + member, 1, k) * integer(2, k, 0))
            .sum();
        assert_eq!(element_of(&memory, &problem.d, D + member * 64, 1, 0), sum);
    }
    assert_eq!((touched.reads.len(), touched.writes.len()), (6 + 2, 6));
}

#[test]
fn a_workspace_is_written_whether_it_is_needed_or_not() {
    let problem = problem_of(&operation(1, [0, 0]), &layouts([F32, F32], 2, 2, 2, [0, 0])).unwrap();
    let algorithm = Algorithm::new(&problem, 32 << 20, [256; 4]);
    assert_eq!(algorithm.workspace_bytes, 1 << 20);
    assert_eq!(Algorithm::new(&problem, 1000, [256; 4]).workspace_bytes, 0);
    let work = |workspace| Matmul {
        workspace: workspace..workspace,
        ..matmul(problem.clone(), 1.0, 0.0)
    };
    assert!(
        with_workspace(work(0x1000), algorithm, 1000).is_err(),
        "too small"
    );
    assert!(
        with_workspace(work(0x1010), algorithm, 1 << 20).is_err(),
        "not aligned"
    );
    assert!(with_workspace(work(0), algorithm, 1 << 20).is_err(), "null");
    let work = with_workspace(work(0x1000), algorithm, 1 << 20).unwrap();
    assert!(work.known_ranges().writes.contains(&(0x1000..0x10_1000)));
}
