//! What a matmul does beyond the product: bias, activations and their derivatives.

use super::*;

#[test]
fn relu_with_bias_writes_a_bit_where_z_is_at_least_zero_and_its_derivative_reads_it() {
    let layouts = layouts([F32, F32], 10, 3, 3, [0, 0]);
    let forward = problem_of(&operation(134, [0, 0]), &layouts).unwrap();
    let memory = filled(&forward);
    let bias = -expected(&forward, 1.0, 0.0, 3, 1);
    memory.put(BIAS, &[bias; 10], Type::F32);
    let touched = run(&matmul(forward.clone(), 1.0, 0.0), &memory);
    assert!(
        touched.writes.contains(&(AUX + 16..AUX + 18))
            && touched.reads.contains(&(BIAS..BIAS + 40))
    );
    let mut zeros = 0;
    for (row, column) in (0..10).flat_map(|row| (0..3).map(move |column| (row, column))) {
        let z = expected(&forward, 1.0, 0.0, row, column) + bias;
        zeros += u32::from(z == 0.0);
        assert_eq!(element_of(&memory, &forward.d, D, row, column), z.max(0.0));
        let bit = memory.bytes(AUX + column * 16 + row / 8, 1)[0] >> (row % 8) & 1;
        assert_eq!(bit == 1, z >= 0.0);
    }
    assert!(
        zeros > 0,
        "no element is zero: the test does not show what happens there"
    );
    let backward = problem_of(&operation(152, [0, 0]), &layouts).unwrap();
    let mut work = matmul(backward.clone(), 1.0, 0.0);
    work.d = C;
    assert!(run(&work, &memory).reads.contains(&(AUX..AUX + 2)));
    for row in 0..10 {
        let masked = |column| {
            let z = expected(&forward, 1.0, 0.0, row, column) + bias;
            if z >= 0.0 { z - bias } else { 0.0 }
        };
        let sum: f32 = (0..3).map(masked).sum();
        assert_eq!(element_of(&memory, &backward.d, C, row, 2), masked(2));
        assert_eq!(memory.get(BIAS, 10, Type::F32)[row as usize], sum);
    }
}

#[test]
fn gelu_keeps_z_and_its_derivative_is_that_of_the_function() {
    let layouts = layouts([F32, F32], 5, 4, 3, [0, 0]);
    let problem = problem_of(&operation(160, [0, 0]), &layouts).unwrap();
    let memory = filled(&problem);
    run(&matmul(problem.clone(), 0.5, 0.0), &memory);
    let z = expected(&problem, 0.5, 0.0, 2, 1);
    assert_eq!(memory.get(AUX + (128 + 2) * 4, 1, Type::F32), [z]);
    assert_eq!(element_of(&memory, &problem.d, D, 2, 1), epilogue::gelu(z));
    let backward = problem_of(&operation(192, [0, 0]), &layouts).unwrap();
    run(&matmul(backward, 1.0, 0.0), &memory);
    let got = element_of(&memory, &problem.d, D, 2, 1);
    assert_eq!(
        got,
        expected(&problem, 1.0, 0.0, 2, 1) * epilogue::gelu_derivative(z)
    );
    for z in [-3.0f32, -0.7, 0.0, 0.4, 2.5] {
        // Central difference: its error is h² |f'''| / 6 < 2e-5 for h = 1e-2 (|f'''| < 1.2), plus
        // rounding 2 eps |f| / 2h < 4e-5.
        let difference = (epilogue::gelu(z + 0.01) - epilogue::gelu(z - 0.01)) / 0.02;
        assert!(
            (difference - epilogue::gelu_derivative(z)).abs() < 6e-5,
            "at {z}: {difference}"
        );
    }
}

#[test]
fn a_bias_gradient_is_the_sum_over_k_of_the_operand() {
    let transpose = [0, 1];
    let problem = problem_of(
        &operation(512, transpose),
        &layouts([BF16, F32], 5, 4, 3, transpose),
    )
    .unwrap();
    let memory = filled(&problem);
    let touched = run(&matmul(problem, 1.0, 0.0), &memory);
    let sums: Vec<f32> = (0..4)
        .map(|column| (0..3).map(|k| integer(2, k, column)).sum())
        .collect();
    assert_eq!(memory.get(BIAS, 4, Type::F32), sums);
    assert!(touched.writes.contains(&(BIAS..BIAS + 16)));
    let problem = problem_of(
        &operation(256, [0, 0]),
        &layouts([F32, F32], 5, 4, 3, [0, 0]),
    )
    .unwrap();
    let memory = filled(&problem);
    run(&matmul(problem, 1.0, 0.0), &memory);
    let sums: Vec<f32> = (0..5)
        .map(|row| (0..3).map(|k| integer(1, row, k)).sum())
        .collect();
    assert_eq!(memory.get(BIAS, 5, Type::F32), sums);
}
