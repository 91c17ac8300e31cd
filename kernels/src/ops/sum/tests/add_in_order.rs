//! Tests of add_in_order.

use super::super::*;
use crate::ops::testing::{SIZES, cpu, random_f32};

/// Four parts. This rank's are the second, in a row, and the third, in the output.
const PARTS: [(bool, usize); 4] = [(false, 0), (true, 0), (true, 2), (false, 1)];

#[test]
fn sums_have_the_order_of_the_tree_for_every_size() {
    for size in SIZES {
        let [a, b, c, d] = [61, 62, 63, 64].map(|seed| random_f32(size, seed));
        let sum = |i: usize| (a[i] + (b[i] + c[i])) + d[i];
        let expected: Vec<f32> = (0..size).map(sum).collect();
        let others = cpu(&[a.clone(), d.clone()].concat(), &[2 * size]);
        // The row has three elements more before, and two after.
        let row = [vec![9.0; 3], b.clone(), vec![9.0; 2]].concat();
        let (out, rows) = (cpu(&c, &[size]), cpu(&row, &[size + 5]));
        let order = AddOrder::new(&PARTS, Device::Cpu).unwrap();
        add_in_order(&out, &others, &rows, 3, &order).unwrap();
        assert_eq!(out.to_vec::<f32>().unwrap(), expected, "{size}");
    }
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let order = AddOrder::new(&PARTS, Device::Cpu).unwrap();
    let of = |others: usize, rows: usize, start: usize| {
        let [out, others, rows] = [2, others, rows].map(|size| cpu(&vec![0.0; size], &[size]));
        add_in_order(&out, &others, &rows, start, &order)
    };
    assert!(of(4, 3, 1).is_ok());
    for (refused, expected) in [
        (
            of(3, 3, 1),
            "add_in_order: others f32[3] on cpu: expected shape [4]",
        ),
        (
            of(4, 3, 2),
            "add_in_order: rows f32[3] on cpu: expected rows of 4 elements or more",
        ),
    ] {
        let error = refused.unwrap_err().to_string();
        assert!(
            error.contains(expected) && error.contains("help: "),
            "{error}"
        );
    }
}

#[test]
#[should_panic(expected = "[(false, 0), (true, 2)]")]
fn an_order_adds_what_there_is() {
    _ = AddOrder::new(&[(false, 0), (true, 2)], Device::Cpu);
}
