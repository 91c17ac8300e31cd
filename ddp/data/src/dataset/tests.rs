//! Tests of datasets in memory.

use ddp_kernels::Element;

use super::*;
use crate::read_rows;

fn tensor<T: Element>(data: &[T], shape: &[usize]) -> Tensor {
    Tensor::from_slice(data, shape, Device::Cpu).unwrap()
}

fn points() -> Tensor {
    tensor(&[0.0f32, 0.1, 1.0, 1.1, 2.0, 2.1], &[3, 2])
}

fn error_of(inputs: Tensor, targets: Tensor, task: TaskSpec) -> (u8, String) {
    let error = InMemory::new(inputs, targets, task).unwrap_err();
    (error.exit_code(), error.to_string())
}

#[test]
fn rows_come_back_in_any_order_with_their_targets() {
    let classes = tensor(&[2i64, 0, 1], &[3]);
    let data = InMemory::new(points(), classes, TaskSpec::numbered_classes(3)).unwrap();
    assert_eq!((data.rows(), data.row_shape()), (3, &[2][..]));
    let [x, y] = read_rows(&data, &[2, 0, 2]).unwrap();
    assert_eq!(x.to_vec::<f32>().unwrap(), [2.0, 2.1, 0.0, 0.1, 2.0, 2.1]);
    assert_eq!(y.to_vec::<i64>().unwrap(), [1, 2, 1]);

    // Transposed views are read as they look, and rows may have positions.
    let columns = tensor(&[0.0f32, 1.0, 2.0, 0.1, 1.1, 2.1], &[2, 3])
        .t()
        .unwrap();
    let numbers = tensor(&[0.5f32; 12], &[3, 2, 2]);
    let data = InMemory::new(columns, numbers, TaskSpec::Regression { outputs: 2 }).unwrap();
    let [x, _] = read_rows(&data, &[1]).unwrap();
    assert_eq!(
        (x.to_vec::<f32>().unwrap(), data.spec().positions()),
        (vec![1.0, 1.1], 2)
    );
}

#[test]
fn the_fingerprint_changes_with_every_value_shape_and_task() {
    let of = |inputs: Tensor, targets: &[i64], classes| {
        let targets = tensor(targets, &[targets.len()]);
        let data = InMemory::new(inputs, targets, TaskSpec::numbered_classes(classes)).unwrap();
        data.fingerprint().unwrap()
    };
    let one = of(points(), &[2, 0, 1], 3);
    assert_eq!(of(points(), &[2, 0, 1], 3), one);
    let other = tensor(&[0.0f32, 0.1, 1.0, 1.1, 2.0, 2.2], &[3, 2]);
    let others = [
        of(other, &[2, 0, 1], 3),
        of(points(), &[2, 0, 2], 3),
        of(points(), &[2, 0, 1], 4),
        of(points().reshape(&[3, 1, 2]).unwrap(), &[2, 0, 1], 3),
    ];
    assert!(others.iter().all(|other| *other != one), "{others:?}");
}

#[test]
fn tensors_that_do_not_fit_are_named_with_what_was_expected() {
    let (classes, numbers) = (
        TaskSpec::numbered_classes(3),
        TaskSpec::Regression { outputs: 1 },
    );
    let (code, text) = error_of(
        points(),
        tensor(&[0i64; 2], &[2]).named("y"),
        classes.clone(),
    );
    assert_eq!(code, 2);
    let expected = "data in memory: targets: expected 3 rows, as inputs f32[3, 2] on cpu have, got \
                    \"y\" i64[2] on cpu; help: give a target for each row";
    assert_eq!(text, expected);
    let (_, text) = error_of(points(), tensor(&[0.0f32; 3], &[3]), numbers);
    let expected = "targets: expected f32[1] for each row, for regression of 1 number, got f32[3]";
    assert!(text.contains(expected), "{text}");
    let (_, text) = error_of(points(), tensor(&[0i32; 3], &[3]), classes.clone());
    assert!(
        text.contains("expected i64[] for each row") && text.contains("got i32[3]"),
        "{text}"
    );
    let (_, text) = error_of(tensor(&[1.0f32], &[]), tensor(&[0i64], &[1]), classes);
    assert!(text.contains("inputs and targets: expected rows"), "{text}");
}

#[test]
fn values_that_cannot_be_trained_on_are_named_with_their_row() {
    let classes = || TaskSpec::numbered_classes(3);
    let (code, text) = error_of(points(), tensor(&[0i64, 3, 1], &[3]), classes());
    assert_eq!(code, 65);
    assert!(
        text.contains("targets: expected a class, in 0..3, got 3 in row 1, element 0"),
        "{text}"
    );
    let next = || TaskSpec::NextToken {
        packed: false,
        vocabulary: 3,
        are_bytes: false,
        tokenizer: None,
    };
    let tokens = |tokens: [i64; 4]| tensor(&tokens, &[2, 2]);
    for (inputs, targets, part) in [
        (
            [0, 1, 3, 0],
            [1, 2, 0, 0],
            "inputs: expected a token, in 0..3, got 3 in row 1, element 0",
        ),
        (
            [0, 1, 2, 0],
            [1, 2, 0, -1],
            "targets: expected a token, in 0..3, got -1 in row 1",
        ),
    ] {
        let (code, text) = error_of(tokens(inputs), tokens(targets), next());
        assert!(code == 65 && text.contains(part), "{text}");
    }
    let (_, text) = error_of(points(), tensor(&[0i64; 3], &[3]), next());
    assert!(
        text.contains("inputs: expected tokens, i64, got f32"),
        "{text}"
    );
    let inputs = tensor(&[0.0, 0.1, 1.0, f32::NAN, 2.0, 2.1], &[3, 2]);
    let (code, text) = error_of(inputs, tensor(&[0i64, 2, -100], &[3]), classes());
    assert_eq!(code, 65);
    assert!(
        text.contains("inputs: expected finite numbers, got NaN in row 1, element 1"),
        "{text}"
    );
}

#[test]
fn numbers_may_be_f64_and_then_are_finite() {
    let targets = |last: f64| tensor(&[0.1, 0.2, last], &[3, 1]);
    let data = InMemory::numbers(points(), targets(0.3)).unwrap();
    assert_eq!(data.spec().targets.dtype, DType::F64);
    let [_, y] = read_rows(&data, &[2]).unwrap();
    assert_eq!(y.to_vec::<f64>().unwrap(), [0.3]);
    let error = InMemory::numbers(points(), targets(f64::NAN)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("finite numbers, got NaN in row 2"),
        "{error}"
    );
}
