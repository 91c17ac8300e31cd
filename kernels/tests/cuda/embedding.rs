//! Embeddings and their gradients: the CPU's bits, whatever the tokens. In bf16 too: both round
//! once, and their sums are f32.

use ddp_kernels::graph::Graph;
use ddp_kernels::ops::{self, EmbeddingScratch};
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor};

use crate::reductions::{cpu, finite, upload};
use crate::tiles::{Odd, around, constant, placing};
use crate::{assert_same_bits, devices, next_device};

/// Rows, vocabulary, columns: none, one of each, around a run of sorted rows and more than five,
/// also of one token, and around the parts that are sorted and those that one pass merges.
fn sizes() -> Vec<[usize; 3]> {
    let (run, part) = (
        constant!("embedding.cu", RUN),
        constant!("embedding.cu", PART),
    );
    let merged = part * constant!("embedding.cu", MERGED);
    let mut sizes = vec![
        [0, 3, 4],
        [5, 3, 0],
        [run, 300, 3],
        PACKED,
        [4 * run + 4, 1, 4],
        [24, 7, 300],
    ];
    sizes.extend(around(run).map(|rows| [rows, 5, 8]));
    sizes.extend(
        [part, part + 1, 3 * part + 3, merged, merged + part + 7].map(|rows| [rows, 40, 1]),
    );
    sizes
}

/// A shape whose rows can be accessed in packs.
const PACKED: [usize; 3] = [65, 2, 12];

fn tokens(rows: usize, vocabulary: usize) -> Vec<i64> {
    let token = |row: usize| (row * 7919 + row * row / 3) % vocabulary;
    (0..rows).map(|row| token(row) as i64).collect()
}

/// Standard normals, rounded to `dtype`.
fn normals(shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    let values = cpu(&finite(shape.iter().product(), seed), shape);
    values.to_dtype(dtype).unwrap()
}

/// Adds the gradient of a table to what is there, or replaces that.
fn table_gradient(dtable: &Tensor, dout: &Tensor, tokens: &Tensor, accumulate: bool) {
    let [rows, columns] = [dout.shape().dims()[0], dout.shape().dims()[1]];
    let sums = [ops::embedding_sums_of(rows), columns];
    let scratch = EmbeddingScratch {
        order: &Tensor::zeros(&[2, rows], DType::I64, dout.device()).unwrap(),
        sums: &dtable.new_empty(&sums).unwrap(),
    };
    ops::embedding_backward_into(dtable, dout, tokens, scratch, accumulate).unwrap();
}

#[test]
fn embeddings_and_their_gradients_have_the_cpu_s_bits() {
    for (number, size) in sizes().into_iter().enumerate() {
        let [rows, vocabulary, columns] = size;
        let wide_tokens = cpu(&tokens(rows, vocabulary), &[rows]);
        // Each size with one of the dtypes, so that all are met.
        let token_dtype = match [DType::I64, DType::I32, DType::U8][number % 3] {
            DType::U8 if vocabulary > 256 => DType::I32,
            dtype => dtype,
        };
        let context = (1..14).rev().find(|context| rows % context == 0).unwrap();
        for dtype in [DType::F32, DType::BF16] {
            let table = normals(&[vocabulary, columns], dtype, 81);
            let positions = normals(&[context, columns], dtype, 82);
            let dout = normals(&[rows, columns], dtype, 83);
            let old_table = normals(&[vocabulary, columns], DType::F32, 84);
            let old_positions = normals(&[context, columns], DType::F32, 85);
            let odd = Odd::each(6).take(if size == PACKED { 8 } else { 1 + number % 2 });
            for (odd, device) in odd.filter_map(|odd| Some((odd, next_device()?))) {
                let place = placing(device, odd);
                let tokens = place(&wide_tokens.to_dtype(token_dtype).unwrap());
                let what =
                    format!("{rows} of {dtype}[{vocabulary}, {columns}], {odd:?} at odd addresses");
                for with_positions in [false, true] {
                    let expected = dout.zeros_like().unwrap();
                    let places = with_positions.then_some(&positions);
                    ops::embedding_into(&expected, &table, &wide_tokens, places).unwrap();
                    let out = place(&dout);
                    let places = with_positions.then(|| place(&positions));
                    ops::embedding_into(&out, &place(&table), &tokens, places.as_ref()).unwrap();
                    assert_same_bits(&out, &expected, &what);
                }
                for accumulate in [false, true] {
                    let expected = upload(&old_table, Device::Cpu, 0);
                    table_gradient(&expected, &dout, &wide_tokens, accumulate);
                    let got = place(&old_table);
                    table_gradient(&got, &place(&dout), &tokens, accumulate);
                    assert_same_bits(&got, &expected, &format!("gradient of {what}"));

                    let expected = upload(&old_positions, Device::Cpu, 0);
                    let add = ops::embedding_positions_backward_into;
                    add(&expected, &dout, accumulate).unwrap();
                    let got = place(&old_positions);
                    add(&got, &place(&dout), accumulate).unwrap();
                    assert_same_bits(&got, &expected, &format!("positions of {what}"));
                }
            }
        }
    }
}

#[test]
fn a_graph_sorts_the_tokens_of_each_launch_and_ignores_those_outside_the_table() {
    const ROWS: usize = 150;
    for device in devices() {
        let stream = Stream::new(device).unwrap();
        let table = normals(&[6, 5], DType::F32, 86);
        let [there, dtable] = [(); 2].map(|()| upload(&table, device, 0));
        let given = cpu(&[0i64; ROWS], &[ROWS]).to(device).unwrap();
        let dout = normals(&[ROWS, 5], DType::F32, 87);
        let (dout_there, out) = (upload(&dout, device, 0), upload(&dout, device, 0));
        let sums = Tensor::zeros(&[ops::embedding_sums_of(ROWS), 5], DType::F32, device).unwrap();
        let order = Tensor::zeros(&[2, ROWS], DType::I64, device).unwrap();
        let body = || {
            let scratch = EmbeddingScratch {
                order: &order,
                sums: &sums,
            };
            ops::embedding_into(&out, &there, &given, None)?;
            ops::embedding_backward_into(&dtable, &dout_there, &given, scratch, false)
        };
        stream.scope(body).unwrap();
        stream.synchronize().unwrap();
        let graph = Graph::capture(&stream, body).unwrap();
        for launch in 0..4 {
            // Some tokens are outside of the table, at last more than two runs of them.
            let mut tokens: Vec<i64> = tokens(ROWS, 6 - launch);
            let mut bad = vec![(3, 6), (70, -1), (71, i64::MIN), (149, 1 << 33)];
            bad.extend((0..ROWS - 10).map(|row| (row, 6)));
            bad.truncate([0, 2, 4, ROWS][launch]);
            bad.iter().for_each(|&(row, token)| tokens[row] = token);
            given.copy_from(&cpu(&tokens, &[ROWS])).unwrap();
            graph.launch().unwrap();

            let looked_up = out.to_vec::<f32>().unwrap();
            for (row, found) in looked_up.chunks(5).enumerate() {
                let is_bad = bad.iter().any(|&(bad, _)| bad == row);
                assert_eq!(found.iter().all(|x| x.is_nan()), is_bad, "row {row}");
            }
            // Without those rows: the others keep their order, so exact sums are the same.
            let good: Vec<usize> = (0..ROWS)
                .filter(|row| (0..6).contains(&tokens[*row]))
                .collect();
            let mut expected = vec![(0.0f64, 0.0f64); 30];
            let all = dout.to_vec::<f32>().unwrap();
            for row in good {
                for column in 0..5 {
                    let x = f64::from(all[row * 5 + column]);
                    let (sum, size) = &mut expected[tokens[row] as usize * 5 + column];
                    (*sum, *size) = (*sum + x, *size + x.abs());
                }
            }
            for (got, (sum, size)) in dtable.to_vec::<f32>().unwrap().into_iter().zip(expected) {
                // A term is rounded in up to 64 sums of a run and 3 runs.
                let bound = 67.0 * 2f64.powi(-24) * size;
                assert!(
                    (f64::from(got) - sum).abs() <= bound,
                    "launch {launch}: {got}, {sum}"
                );
            }
        }
    }
}

#[test]
fn codes_of_documents_are_split_as_on_the_cpu() {
    const ROWS: usize = 1000;
    let codes: Vec<i64> = (0..ROWS as i64)
        .map(|row| (row * 77) | ((row / 9 * 9) << 32))
        .collect();
    for device in devices() {
        let split = |device: Device| {
            let codes = Tensor::from_slice(&codes, &[ROWS], device).unwrap();
            let [tokens, begins] = [DType::I64, DType::I32]
                .map(|dtype| Tensor::zeros(&[ROWS], dtype, device).unwrap());
            ops::split_documents_into(&tokens, &begins, &codes).unwrap();
            (
                tokens.to_vec::<i64>().unwrap(),
                begins.to_vec::<i32>().unwrap(),
            )
        };
        assert_eq!(split(device), split(Device::Cpu));
    }
}
