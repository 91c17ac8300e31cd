//! Tests of rope.

use super::*;
use crate::ops::testing::{alone_with_the_pool, assert_close, cpu, cpu_of, random_f32};

/// Half the distance from 1 to the next f32.
const UNIT: f64 = 1.0 / (1 << 24) as f64;

/// Sequences, positions, heads, size of a head, columns of it that are turned, columns after the
/// heads.
const SIZES: [[usize; 6]; 9] = [
    [0, 3, 2, 4, 4, 0],
    [1, 1, 1, 2, 2, 0],
    [2, 3, 2, 6, 6, 5],
    [3, 2, 0, 4, 4, 3],
    [1, 4, 3, 0, 0, 2],
    [2, 5, 3, 64, 64, 64],
    [40, 7, 2, 34, 34, 1],
    [2, 3, 3, 7, 4, 2],
    [2, 3, 2, 64, 48, 64],
];

fn table(positions: usize, columns: usize) -> Tensor {
    let frequencies = rope_frequencies(columns, 10_000.0).unwrap();
    rope_table(positions, &frequencies, 1.0, Device::Cpu).unwrap()
}

#[test]
fn cosines_and_sines_are_scaled_and_turn_at_the_given_speeds() {
    let table = rope_table(2, &[0.25, 0.0], 2.0, Device::Cpu).unwrap();
    let expected = [2.0, 2.0, 0.0, 0.0, 1.937_824_8, 2.0, 0.494_807_92, 0.0];
    assert_eq!(table.to_vec::<f32>().unwrap(), expected);
}

#[test]
fn the_table_has_the_cosines_and_sines_of_llama() {
    // Positions 0, 1 and 7 with heads of 4: angles t and t / 100.
    let table: Vec<f32> = table(8, 4).to_vec().unwrap();
    assert_eq!(table[..4], [1.0, 1.0, 0.0, 0.0]);
    // cos 1, cos 0.01, sin 1, sin 0.01, and of 7 and 0.07: from tables of these functions.
    let one = [0.540_302_3, 0.999_950_f32, 0.841_471, 0.009_999_833];
    let seven = [0.753_902_25, 0.997_551, 0.656_986_6, 0.069_942_85];
    for (got, known) in (table[4..8].iter().chain(&table[28..])).zip(one.iter().chain(&seven)) {
        assert!((got - known).abs() < 1e-6, "{got} is not {known}");
    }
}

#[test]
fn heads_are_turned_as_in_llama_and_turned_back_by_backward() {
    for [sequences, positions, heads, head_size, turned, rest] in SIZES {
        let (rows, columns) = (sequences * positions, heads * head_size + rest);
        let x = random_f32(rows * columns, 31);
        let table = table(positions, turned);
        let angles: Vec<f32> = table.to_vec().unwrap();
        let half = turned / 2;
        // q · cos + rotate_half(q) · sin, where rotate_half(q) is (−second half, first half).
        let (mut expected, mut bounds) = (vec![], vec![]);
        for (at, &x_at) in x.iter().enumerate() {
            let (row, column) = (at / columns, at % columns);
            if column >= heads * head_size || column % head_size >= turned {
                expected.push(f64::from(x_at));
                bounds.push(0.0);
                continue;
            }
            let (point, is_second) = (column % head_size % half, column % head_size >= half);
            let angles = &angles[row % positions * turned..][..turned];
            let (cosine, sine) = (f64::from(angles[point]), f64::from(angles[half + point]));
            let other = if is_second {
                f64::from(x[at - half])
            } else {
                -f64::from(x[at + half])
            };
            expected.push(f64::from(x_at) * cosine + other * sine);
            // One product and the sum round.
            bounds.push(2.01 * UNIT * (f64::from(x_at).abs() + other.abs()));
        }
        let x = cpu(&x, &[rows, columns]);
        let out = x.empty_like().unwrap();
        rope_into(&out, &x, &table, [heads, head_size]).unwrap();
        let turned: Vec<f32> = out.to_vec().unwrap();
        assert_close(&turned, &expected, |index, _| bounds[index]);
        rope_into(&x, &x, &table, [heads, head_size]).unwrap();
        assert_eq!(x.to_vec::<f32>().unwrap(), turned);

        // In f64, turning back undoes it up to the rounding of the table.
        let wide = cpu_of(&expected, &[rows, columns]);
        let [there, back] = [(); 2].map(|()| wide.empty_like().unwrap());
        rope_into(&there, &wide, &table, [heads, head_size]).unwrap();
        rope_backward_into(&back, &there, &table, [heads, head_size]).unwrap();
        for (back, x) in back.to_vec::<f64>().unwrap().iter().zip(expected) {
            assert!(
                (back - x).abs() <= 3.0 * UNIT * x.abs(),
                "{back} is not {x}"
            );
        }
    }
}

#[test]
fn the_gradient_is_that_of_finite_differences() {
    let (table, shape) = (table(3, 4), [3, 5]);
    let values = |seed| {
        let values = cpu(&random_f32(15, seed), &shape);
        values.to_dtype(DType::F64).unwrap()
    };
    let (x, dout) = (values(32), values(33));
    let loss = |x: &Tensor| {
        let out = x.empty_like().unwrap();
        rope_into(&out, x, &table, [1, 4]).unwrap();
        let (out, dout) = (out.to_vec::<f64>().unwrap(), dout.to_vec::<f64>().unwrap());
        out.iter()
            .zip(dout)
            .map(|(out, dout)| out * dout)
            .sum::<f64>()
    };
    let dx = dout.empty_like().unwrap();
    rope_backward_into(&dx, &dout, &table, [1, 4]).unwrap();
    for (index, dx) in dx.to_vec::<f64>().unwrap().into_iter().enumerate() {
        let mut shifted: Vec<f64> = x.to_vec().unwrap();
        shifted[index] += 1.0;
        // It is linear, so a step of 1 leaves rounding only.
        let slope = loss(&cpu_of(&shifted, &shape)) - loss(&x);
        assert!(
            (dx - slope).abs() < 1e-13,
            "element {index}: {dx} is not {slope}"
        );
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let _alone = alone_with_the_pool();
    let x = cpu(&random_f32(300 * 130, 34), &[300, 130]);
    let table = table(100, 32);
    let results = [1, 2, 3].map(|threads| {
        threads::set_count(threads).unwrap();
        let out = x.empty_like().unwrap();
        rope_into(&out, &x, &table, [4, 32]).unwrap();
        out.to_vec::<f32>().unwrap()
    });
    assert!(results[0] == results[1] && results[0] == results[2]);
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let x = cpu(&[0.0; 20], &[4, 5]);
    let told = |table: &Tensor, heads| rope_into(&x, &x, table, heads).unwrap_err().to_string();
    let error = told(&table(3, 2), [1, 2]);
    let expected = "rope: table f32[3, 2] on cpu: expected as many rows as positions in a sequence, \
                    which divide 4 tokens";
    assert!(error.contains(expected), "{error}");
    let error = told(&table(4, 2), [3, 2]);
    assert!(
        error.contains("heads: expected at most 5 columns in heads of 2, got 3"),
        "{error}"
    );
    let error = told(&cpu(&[0.0; 12], &[4, 3]), [1, 4]);
    assert!(
        error.contains("table f32[4, 3] on cpu: expected an even number of columns, at most 4"),
        "{error}"
    );
    assert!(told(&table(4, 4), [1, 2]).contains("at most 2"));
    let error = rope_frequencies(3, 1e4).unwrap_err().to_string();
    assert!(
        error.contains("columns: expected an even number, got 3"),
        "{error}"
    );
    let error = rope_frequencies(2, 0.0).unwrap_err().to_string();
    assert!(
        error.contains("base: expected a finite number above 0, got 0"),
        "{error}"
    );
}
