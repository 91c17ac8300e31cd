//! Tests of embedding.

use super::*;
use crate::Element;
use crate::ops::testing::{alone_with_the_pool, assert_close, cpu, cpu_of, random_f32};

/// Half the distance from 1 to the next f32.
const UNIT: f64 = 1.0 / (1 << 24) as f64;

/// Rows, vocabulary, columns: none, one of each, odd, around a run, and one token everywhere.
const SIZES: [[usize; 3]; 8] = [
    [0, 3, 2],
    [1, 1, 1],
    [5, 4, 0],
    [63, 9, 3],
    [64, 300, 65],
    [65, 2, 1],
    [200, 1, 7],
    [331, 11, 130],
];

/// A token for each row, in no order.
fn tokens(rows: usize, vocabulary: usize) -> Vec<i64> {
    let token = |row: usize| (row * 7919 + row * row / 3) % vocabulary;
    (0..rows).map(|row| token(row) as i64).collect()
}

/// The tokens in every dtype that holds them.
fn in_every_dtype(tokens: &[i64]) -> Vec<Tensor> {
    let wide = cpu_of(tokens, &[tokens.len()]);
    let fits = |dtype: &DType| *dtype != DType::U8 || tokens.iter().all(|&token| token < 256);
    let dtypes = TARGET_DTYPES.into_iter().filter(fits);
    dtypes.map(|dtype| wide.to_dtype(dtype).unwrap()).collect()
}

fn vec<T: Element>(tensor: &Tensor) -> Vec<T> {
    tensor.to_vec().unwrap()
}

/// The gradient of the table, from what is there if it accumulates.
fn table_gradient(dtable: &Tensor, dout: &Tensor, tokens: &Tensor, accumulate: bool) {
    let [rows, columns] = [dout.shape().dims()[0], dout.shape().dims()[1]];
    let scratch = EmbeddingScratch {
        order: &Tensor::zeros(&[2, rows], DType::I64, dout.device()).unwrap(),
        sums: &dtable
            .new_full(&[embedding_sums_of(rows), columns], 9.0)
            .unwrap(),
    };
    embedding_backward_into(dtable, dout, tokens, scratch, accumulate).unwrap();
}

#[test]
fn each_token_gives_its_row_and_that_of_its_position() {
    for [rows, vocabulary, columns] in SIZES {
        let wanted = tokens(rows, vocabulary);
        let table = random_f32(vocabulary * columns, 71);
        // The largest number of positions up to 13 that divides the rows.
        let context = (1..14).rev().find(|context| rows % context == 0).unwrap();
        let positions = random_f32(context * columns, 72);
        for tokens in in_every_dtype(&wanted) {
            let table = cpu(&table, &[vocabulary, columns]);
            for with_positions in [false, true] {
                let places = cpu(&positions, &[context, columns]);
                let out = cpu(&vec![9.0; rows * columns], &[rows, columns]);
                embedding_into(&out, &table, &tokens, with_positions.then_some(&places)).unwrap();
                let mut expected = vec![];
                for (row, &token) in wanted.iter().enumerate() {
                    let entry = &vec::<f32>(&table)[token as usize * columns..][..columns];
                    let place = &positions[row % context * columns..][..columns];
                    let sum = |(a, b)| if with_positions { a + b } else { a };
                    expected.extend(entry.iter().copied().zip(place.iter().copied()).map(sum));
                }
                assert_eq!(
                    vec::<f32>(&out),
                    expected,
                    "{rows} of [{vocabulary}, {columns}]"
                );
            }
        }
    }
}

#[test]
fn the_gradient_of_a_token_is_the_sum_over_its_rows_and_zero_or_unchanged_without_any() {
    for [rows, vocabulary, columns] in SIZES {
        let wanted = tokens(rows, vocabulary);
        let dout = random_f32(rows * columns, 73);
        for (tokens, accumulate) in (in_every_dtype(&wanted).into_iter())
            .flat_map(|tokens| [false, true].map(|accumulate| (tokens.clone(), accumulate)))
        {
            let old = if accumulate { 0.25 } else { 0.0 };
            let mut sums = vec![(old, old); vocabulary * columns];
            for (&token, dout) in wanted.iter().zip(dout.chunks(columns.max(1))) {
                let entry = &mut sums[token as usize * columns..][..columns];
                for ((sum, size), &x) in entry.iter_mut().zip(dout) {
                    (*sum, *size) = (*sum + f64::from(x), *size + f64::from(x).abs());
                }
            }
            let dtable = cpu(&vec![0.25; vocabulary * columns], &[vocabulary, columns]);
            table_gradient(&dtable, &cpu(&dout, &[rows, columns]), &tokens, accumulate);
            let (sums, sizes): (Vec<f64>, Vec<f64>) = sums.into_iter().unzip();
            // A term is part of up to 64 sums of a run, of one for each run, and of the last.
            let roundings = (RUN + rows.div_ceil(RUN) + 1) as f64;
            assert_close(&vec(&dtable), &sums, |index, _| {
                roundings * UNIT * sizes[index]
            });
        }
    }
}

#[test]
fn the_gradient_of_a_position_is_the_sum_over_the_sequences() {
    for [sequences, context, columns] in [[0, 3, 2], [1, 1, 1], [5, 4, 0], [70, 3, 7], [0, 0, 3]] {
        let dout = random_f32(sequences * context * columns, 74);
        for old in [0.0, 0.5] {
            let mut sums = vec![(old, old); context * columns];
            for sequence in dout.chunks((context * columns).max(1)) {
                for ((sum, size), &x) in sums.iter_mut().zip(sequence) {
                    (*sum, *size) = (*sum + f64::from(x), *size + f64::from(x).abs());
                }
            }
            let dpositions = cpu(&vec![0.5; context * columns], &[context, columns]);
            let dout = cpu(&dout, &[sequences * context, columns]);
            embedding_positions_backward_into(&dpositions, &dout, old != 0.0).unwrap();
            let (sums, sizes): (Vec<f64>, Vec<f64>) = sums.into_iter().unzip();
            let bound = |index: usize, _| (sequences + 2) as f64 * UNIT * sizes[index];
            assert_close(&vec(&dpositions), &sums, bound);
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let _alone = alone_with_the_pool();
    let [rows, vocabulary, columns] = [330, 7, 150];
    let dout = cpu(&random_f32(rows * columns, 75), &[rows, columns]);
    let tokens = cpu_of(&tokens(rows, vocabulary), &[rows]);
    let results = [1, 2, 3].map(|threads| {
        threads::set_count(threads).unwrap();
        let dtable = cpu(&vec![0.5; vocabulary * columns], &[vocabulary, columns]);
        table_gradient(&dtable, &dout, &tokens, true);
        let out = dout.empty_like().unwrap();
        embedding_into(&out, &dtable, &tokens, Some(&dout)).unwrap();
        [vec::<f32>(&dtable), vec::<f32>(&out)]
    });
    assert!(results[0] == results[1] && results[0] == results[2]);
}

#[test]
fn a_token_outside_the_table_is_named_and_nothing_is_written() {
    let (table, out) = (cpu(&[0.0; 6], &[3, 2]), cpu(&[9.0; 4], &[2, 2]));
    let order = Tensor::zeros(&[2, 2], DType::I64, out.device()).unwrap();
    let scratch = EmbeddingScratch {
        order: &order,
        sums: &cpu(&[9.0; 4], &[2, 2]),
    };
    for bad in [3, -1, i64::MIN] {
        let tokens = cpu_of(&[0, bad], &[2]);
        let told = format!("tokens[1]: expected a token of the vocabulary, in 0..3, got {bad}");
        let error = embedding_into(&out, &table, &tokens, None).unwrap_err();
        assert!(
            error.to_string().contains(&format!("embedding: {told}")),
            "{error}"
        );
        let error = embedding_backward_into(&table, &out, &tokens, scratch, false).unwrap_err();
        assert!(
            error
                .to_string()
                .contains(&format!("embedding_backward: {told}")),
            "{error}"
        );
        assert_eq!(vec::<f32>(&out), [9.0; 4]);
    }
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let (table, out) = (cpu(&[0.0; 6], &[3, 2]), cpu(&[9.0; 4], &[2, 2]));
    let tokens = cpu_of(&[0i64, 1], &[2]);
    let told = |out: &Tensor, table: &Tensor, tokens: &Tensor, positions: Option<&Tensor>| {
        embedding_into(out, table, tokens, positions)
            .unwrap_err()
            .to_string()
    };
    let error = told(&cpu(&[9.0; 2], &[1, 2]), &table, &tokens, None);
    assert!(
        error.contains("out f32[1, 2] on cpu: expected shape [2, 2]"),
        "{error}"
    );
    let error = told(&out, &table, &cpu(&[0.0; 2], &[2]), None);
    assert!(
        error.contains("tokens f32[2] on cpu: expected dtype u8 or i32 or i64"),
        "{error}"
    );
    let error = told(&out, &table, &tokens, Some(&table));
    let expected = "positions f32[3, 2] on cpu: expected as many rows as positions in a sequence, \
                    which divide 2 tokens";
    assert!(error.contains(expected), "{error}");
    let vast = cpu(&[], &[1 << 31, 0]);
    let error = told(&cpu(&[], &[2, 0]), &vast, &tokens, None);
    let expected = "rows of the table: expected at most 2147483647, got 2147483648";
    assert!(error.contains(expected), "{error}");
    let scratch = EmbeddingScratch {
        order: &cpu_of(&[0i64; 4], &[2, 2]),
        sums: &cpu(&[9.0; 2], &[1, 2]),
    };
    let error = embedding_backward_into(&table, &out, &tokens, scratch, false).unwrap_err();
    let expected =
        "sums f32[1, 2] on cpu: expected shape [2, 2], that is two rows for each 64 tokens";
    assert!(error.to_string().contains(expected), "{error}");
}

#[test]
fn codes_are_split_into_tokens_and_where_documents_begin() {
    let codes = cpu_of(&[5i64, (3 << 32) | 7, (9 << 32) | 0xffff_ffff], &[3]);
    let (tokens, begins) = (cpu_of(&[0i64; 3], &[3]), cpu_of(&[0i32; 3], &[3]));
    split_documents_into(&tokens, &begins, &codes).unwrap();
    assert_eq!(vec::<i64>(&tokens), [5, 7, 0xffff_ffff]);
    assert_eq!(vec::<i32>(&begins), [0, 3, 9]);
    let error = split_documents_into(&begins, &begins, &codes).unwrap_err();
    assert!(error.to_string().contains("tokens"), "{error}");
}
