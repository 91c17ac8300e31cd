//! Operands of one matmul that share bytes.

use super::super::overlap::overlap;
use super::*;

const RELU_AUX_BIAS: u32 = 128 | 4 | 2;
const DRELU_BGRAD: u32 = 128 | 16 | 8;
const ALL: [&str; 7] = ["D", "aux", "the bias", "the workspace", "A", "B", "C"];

/// A matmul with every operand. None of them overlap.
fn matmul_of(epilogue: u32) -> Matmul {
    let layouts = layouts([F32, F32], 5, 4, 3, [0, 0]);
    let problem = problem_of(&operation(epilogue, [0, 0]), &layouts).unwrap();
    Matmul {
        workspace: BASE + 0xc000..BASE + 0xc040,
        ..matmul(problem, 1.0, 1.0)
    }
}

fn ranges(matmul: &Matmul, operand: &str) -> Vec<std::ops::Range<Address>> {
    let problem = &matmul.problem;
    match operand {
        "D" => problem.d.ranges(matmul.d),
        "aux" => problem.aux_ranges(),
        "the bias" => problem.bias_ranges(),
        "the workspace" => vec![matmul.workspace.clone()],
        "A" => problem.a.ranges(matmul.a),
        "B" => problem.b.ranges(matmul.b),
        _ => problem.c.ranges(matmul.c),
    }
}

fn put(matmul: &mut Matmul, operand: &str, address: Address) {
    let problem = &mut matmul.problem;
    match operand {
        "D" => matmul.d = address,
        "aux" => problem.aux.as_mut().unwrap().address = address,
        "the bias" => problem.bias.as_mut().unwrap().address = address,
        "the workspace" => matmul.workspace = address..address + 64,
        "A" => matmul.a = address,
        "B" => matmul.b = address,
        _ => matmul.c = address,
    }
}

/// What is found where `second` begins in the last byte of `first`.
fn found(epilogue: u32, first: &str, second: &str) -> Option<[&'static str; 2]> {
    let mut matmul = matmul_of(epilogue);
    assert_eq!(overlap(&matmul), None);
    let last = ranges(&matmul, first).last().unwrap().end - 1;
    put(&mut matmul, second, last);
    let (names, bytes) = overlap(&matmul)?;
    assert_eq!(bytes, last..last + 1, "{first} and {second}");
    Some(names)
}

#[test]
fn no_operand_shares_a_byte_with_one_that_is_written() {
    // Forward, ReLU writes its mask and reads the bias; backward it is the other way round.
    for (epilogue, written) in [
        (RELU_AUX_BIAS, ["D", "aux", "the workspace"]),
        (DRELU_BGRAD, ["D", "the bias", "the workspace"]),
    ] {
        for first in ALL {
            for second in ALL.into_iter().filter(|second| *second != first) {
                let mut named = found(epilogue, first, second).map(Vec::from);
                let is_mistake = written.contains(&first) || written.contains(&second);
                let mut expected = is_mistake.then(|| vec![first, second]);
                named
                    .iter_mut()
                    .chain(&mut expected)
                    .for_each(|it| it.sort());
                assert_eq!(named, expected, "epilogue {epilogue}");
            }
        }
    }
}

#[test]
fn c_may_be_d_and_is_not_read_where_beta_is_zero() {
    let mut matmul = matmul_of(RELU_AUX_BIAS);
    matmul.c = matmul.d;
    assert_eq!(overlap(&matmul), None);
    matmul.c += 4;
    assert_eq!(overlap(&matmul).map(|(names, _)| names), Some(["D", "C"]));
    matmul.beta = Scalar::Value(0.0);
    assert_eq!(overlap(&matmul), None);
}
