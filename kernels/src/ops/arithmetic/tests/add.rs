//! Tests of add.

use super::super::*;
use crate::ops::testing::{SIZES, cpu, cpu_of, random_f32};

#[test]
fn sums_are_exact_for_every_size_apart_and_in_place() {
    for size in SIZES {
        let (a, b) = (random_f32(size, 21), random_f32(size, 22));
        let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        let (a, b) = (cpu(&a, &[size]), cpu(&b, &[size]));
        assert_eq!(add(&a, &b).unwrap().to_vec::<f32>().unwrap(), expected);
        add_into(&a, &a, &b).unwrap();
        assert_eq!(a.to_vec::<f32>().unwrap(), expected);
    }
}

#[test]
fn f64_is_added_in_f64() {
    let sum = add(
        &cpu_of(&[1.0f64, 0.1], &[2]),
        &cpu_of(&[f64::EPSILON, 0.2], &[2]),
    )
    .unwrap();
    assert_eq!(
        sum.to_vec::<f64>().unwrap(),
        [1.0 + f64::EPSILON, 0.1 + 0.2]
    );
}

#[test]
fn operands_that_do_not_fit_are_named_with_the_callers_line() {
    let (a, b) = (cpu(&[1.0, 2.0], &[2]), cpu(&[0.0; 3], &[3]).named("bias"));
    let line = line!() + 1;
    let error = add(&a, &b).unwrap_err().to_string();
    assert!(
        error.contains(r#"add: b "bias" f32[3] on cpu: expected shape [2], as a has"#),
        "{error}"
    );
    assert!(error.contains(&format!("add.rs:{line}")), "{error}");
    let error = add(&a, &cpu_of(&[1.0f64; 2], &[2]))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("add: b f64[2] on cpu: expected dtype f32, as a has"),
        "{error}"
    );
    let whole = cpu(&[1.0, 2.0, 3.0], &[3]);
    let error = add_into(&whole.slice(0..2).unwrap(), &a, &whole.slice(1..3).unwrap())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("add: out f32[2] on cpu and b f32[2] on cpu share memory"),
        "{error}"
    );
}

type Operation = fn(&Tensor, &Tensor, &Tensor) -> Result<()>;

/// What an operation does to two numbers.
type OfTwo = fn(f32, f32) -> f32;

#[test]
fn a_vector_is_broadcast_to_each_row_or_each_column() {
    let operations: [(Operation, OfTwo); 3] = [
        (add_into, |a, b| a + b),
        (crate::ops::sub_into, |a, b| a - b),
        (crate::ops::mul_into, |a, b| a * b),
    ];
    for (rows, columns) in [
        (0, 3),
        (1, 1),
        (1, 7),
        (7, 1),
        (5, 33),
        (300, 257),
        (2, 60_001),
    ] {
        let (a, b) = (
            random_f32(rows * columns, 23),
            random_f32(rows.max(columns), 24),
        );
        let matrix = cpu(&a, &[rows, columns]);
        for (operation, of_two) in operations {
            for (shape, by_row) in [(vec![columns], false), (vec![rows, 1], true)] {
                let of = |index: usize| {
                    b[if by_row {
                        index / columns
                    } else {
                        index % columns
                    }]
                };
                let indexed = a.iter().enumerate();
                let expected: Vec<f32> = indexed.map(|(i, &a)| of_two(a, of(i))).collect();
                let vector = cpu(&b[..shape[0]], &shape);
                let (out, copy) = (matrix.empty_like().unwrap(), matrix.empty_like().unwrap());
                copy.copy_from(&matrix).unwrap();
                operation(&out, &matrix, &vector).unwrap();
                operation(&copy, &copy, &vector).unwrap();
                for got in [out, copy] {
                    assert_eq!(got.to_vec::<f32>().unwrap(), expected, "{rows} × {columns}");
                }
            }
        }
    }
}

#[test]
fn only_the_second_operand_is_broadcast_and_only_as_a_vector() {
    let (matrix, row) = (cpu(&[0.0; 6], &[2, 3]), cpu(&[0.0; 3], &[3]));
    let error = add(&row, &matrix).unwrap_err().to_string();
    assert!(
        error.contains("b f32[2, 3] on cpu: expected shape [3], as a has, or a vector")
            && error.contains("help: reshape it: only b is broadcast"),
        "{error}"
    );
    for shape in [&[2][..], &[1, 3], &[3, 1], &[2, 2]] {
        let count = shape.iter().product();
        assert!(
            add(&matrix, &cpu(&vec![0.0; count], shape)).is_err(),
            "{shape:?}"
        );
    }
    // Rows of any number of dimensions.
    let (cube, numbers) = (
        cpu(&[1.0; 8], &[2, 2, 2]),
        cpu(&[1.0, 2.0, 3.0, 4.0], &[2, 2, 1]),
    );
    let sum = add(&cube, &numbers).unwrap().to_vec::<f32>().unwrap();
    assert_eq!(sum, [2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0, 5.0]);
}
