//! Tests of add.

use super::*;
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
    assert!(error.contains(&format!("tests.rs:{line}")), "{error}");
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
