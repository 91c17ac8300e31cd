//! Operands of one matmul that share bytes. cuBLASLt allows only two of them to: C and D at the
//! same address with the same layout ("in-place"). Its kernels read and write in any order.

use std::ops::Range;

use super::epilogue::Bias;
use super::matmul::{Matmul, Scalar};
use crate::work::Address;

/// The names of two operands that share bytes although one of them is written, and the bytes.
pub(super) fn overlap(matmul: &Matmul) -> Option<([&'static str; 2], Range<Address>)> {
    let problem = &matmul.problem;
    let reads_c = !matches!(matmul.beta, Scalar::Value(beta) if beta == 0.0);
    let is_in_place = matmul.c == matmul.d && problem.c == problem.d;
    let c = (reads_c && !is_in_place).then(|| problem.c.ranges(matmul.c));
    let operands = [
        ("D", true, problem.d.ranges(matmul.d)),
        ("aux", !problem.epilogue.backward, problem.aux_ranges()),
        (
            "the bias",
            problem.epilogue.bias != Bias::Add,
            problem.bias_ranges(),
        ),
        ("the workspace", true, vec![matmul.workspace.clone()]),
        ("A", false, problem.a.ranges(matmul.a)),
        ("B", false, problem.b.ranges(matmul.b)),
        ("C", false, c.unwrap_or_default()),
    ];
    operands.iter().enumerate().find_map(|(at, first)| {
        let second = |second: &&(&str, bool, _)| first.1 || second.1;
        operands[at + 1..].iter().filter(second).find_map(|second| {
            shared(&first.2, &second.2).map(|range| ([first.0, second.0], range))
        })
    })
}

/// The first bytes that are in both; each list is in the order of addresses.
fn shared(first: &[Range<Address>], second: &[Range<Address>]) -> Option<Range<Address>> {
    let (mut first, mut second) = (first.iter().peekable(), second.iter().peekable());
    while let (Some(one), Some(other)) = (first.peek(), second.peek()) {
        let both = one.start.max(other.start)..one.end.min(other.end);
        if both.start < both.end {
            return Some(both);
        }
        if one.end <= other.end {
            first.next();
        } else {
            second.next();
        }
    }
    None
}
