//! gather_rows: chosen rows of a table on a device, of any dtype and at any alignment.

use ddp_kernels::graph::Graph;
use ddp_kernels::stream::Stream;
use ddp_kernels::transfer::forbid_transfers;
use ddp_kernels::{DType, Device, Tensor, ops};

use crate::{assert_same_bits, devices};

/// `count` of the rows of a table, some of them twice, in no order.
fn chosen(count: usize, table_rows: usize) -> Vec<i64> {
    (0..count)
        .map(|at| (at * 7919 % table_rows) as i64)
        .collect()
}

/// 0 to 126, which every dtype holds.
fn numbers(count: usize, dtype: DType) -> Tensor {
    let numbers: Vec<u8> = (0..count).map(|index| (index * 31 % 127) as u8).collect();
    Tensor::from_slice(&numbers, &[count], Device::Cpu)
        .unwrap()
        .to_dtype(dtype)
        .unwrap()
}

/// The elements of `tensor` on `device`, from element `first` of a buffer on, so that addresses are
/// multiples of little.
fn placed(tensor: &Tensor, first: usize, device: Device) -> Tensor {
    let buffer = Tensor::zeros(&[first + tensor.count()], tensor.dtype(), device).unwrap();
    let part = buffer
        .slice(first..first + tensor.count())
        .unwrap()
        .reshape(tensor.shape())
        .unwrap();
    part.copy_from(&tensor.to(device).unwrap()).unwrap();
    part
}

fn on(device: Device, rows: &[i64]) -> Tensor {
    Tensor::from_slice(rows, &[rows.len()], device).unwrap()
}

#[test]
fn rows_of_every_dtype_width_and_alignment_are_those_of_the_cpu() {
    for device in devices() {
        // One element, less than a word, words of every width, several blocks a row; more rows and
        // columns than a grid takes at once, at odd addresses, where a byte is a word.
        let shapes = [
            (1, 1, 5),
            (9, 3, 0),
            (9, 0, 4),
            (9, 2, 33),
            (40, 4, 100),
            (7, 16, 9),
            (3, 784, 5),
            (2, 9000, 3),
        ];
        for (table_rows, width, count) in shapes.into_iter().chain([(3, 257, 2300)]) {
            let rows = chosen(count, table_rows);
            for (dtype, first) in DType::ALL
                .into_iter()
                .flat_map(|dtype| [0, 1, 4].map(|first| (dtype, first)))
                .filter(|(dtype, _)| count < 1000 || *dtype == DType::U8)
            {
                let table = numbers(table_rows * width, dtype)
                    .reshape(&[table_rows, width])
                    .unwrap();
                let expected = Tensor::zeros(&[count, width], dtype, Device::Cpu).unwrap();
                ops::gather_rows(&expected, &table, &on(Device::Cpu, &rows)).unwrap();
                let (there, rows) = (placed(&table, first, device), on(device, &rows));
                // Aligned otherwise than the table.
                let got = placed(&expected.zeros_like().unwrap(), 2 * first, device);
                forbid_transfers(|| ops::gather_rows(&got, &there, &rows)).unwrap();
                assert_same_bits(
                    &got,
                    &expected,
                    &format!("{count} of {dtype}[{table_rows}, {width}] from {first} on"),
                );
            }
        }
    }
}

#[test]
fn an_invalid_row_number_writes_all_ones_and_reads_nothing() {
    const WRONG: [i64; 5] = [3, -1, i64::MAX, i64::MIN, 1 << 40];
    for device in devices() {
        for (dtype, width) in DType::ALL
            .into_iter()
            .flat_map(|dtype| [1, 5, 16].map(|width| (dtype, width)))
        {
            // The first rows of a buffer: what lies behind them could be read, and is not.
            let whole = numbers(9 * width, dtype)
                .reshape(&[9, width])
                .unwrap()
                .to(device)
                .unwrap();
            let table = whole.slice(0..3).unwrap();
            // A right one first and last.
            let rows: Vec<i64> = [2].into_iter().chain(WRONG).chain([0]).collect();
            let out = Tensor::zeros(&[rows.len(), width], dtype, device).unwrap();
            ops::gather_rows(&out, &table, &on(device, &rows)).unwrap();
            let here = out.to(Device::Cpu).unwrap();
            let row_bytes = width * dtype.bytes();
            let at = std::panic::Location::caller();
            here.with_bytes("look", at, |bytes| {
                let wrong = &bytes[row_bytes..(1 + WRONG.len()) * row_bytes];
                assert!(
                    wrong.iter().all(|&byte| byte == 0xff),
                    "{dtype} [{width}]: {wrong:x?}"
                );
            })
            .unwrap();
            assert_same_bits(
                &out.index(0).unwrap(),
                &table.index(2).unwrap(),
                "the first",
            );
            assert_same_bits(&out.index(6).unwrap(), &table.index(0).unwrap(), "the last");
        }
        // A table without rows has none to read.
        let none = Tensor::zeros(&[0, 4], DType::F32, device).unwrap();
        let out = Tensor::zeros(&[1, 4], DType::F32, device).unwrap();
        ops::gather_rows(&out, &none, &on(device, &[0])).unwrap();
        assert!(out.to_vec::<f32>().unwrap().iter().all(|x| x.is_nan()));
    }
}

#[test]
fn a_graph_gathers_the_rows_that_are_asked_for_at_each_launch() {
    for device in devices() {
        let stream = Stream::new(device).unwrap();
        let table = numbers(50 * 6, DType::F32).reshape(&[50, 6]).unwrap();
        let there = table.to(device).unwrap();
        let (rows, out) = (
            on(device, &[0; 4]),
            Tensor::zeros(&[4, 6], DType::F32, device).unwrap(),
        );
        let body = || ops::gather_rows(&out, &there, &rows);
        stream.scope(body).unwrap();
        stream.synchronize().unwrap();
        let graph = Graph::capture(&stream, body).unwrap();
        for launch in 0..3i64 {
            let wanted = [launch, 49 - launch, 7 * launch, 5];
            rows.copy_from(&on(Device::Cpu, &wanted)).unwrap();
            graph.launch().unwrap();
            let expected = Tensor::zeros(&[4, 6], DType::F32, Device::Cpu).unwrap();
            ops::gather_rows(&expected, &table, &on(Device::Cpu, &wanted)).unwrap();
            assert_same_bits(&out, &expected, &format!("launch {launch}"));
        }
    }
}
