//! Elementwise chains: the kernels that are written for them have the CPU's bits, in f32 and bf16.

use ddp_kernels::ops::{Chain, ChainStep, ChainView, Function, chain_into};
use ddp_kernels::{DType, Device, Tensor};

use crate::{SIZES, assert_same_bits, next_device, random_f32};

/// Runs a chain on the CPU and on a device, in f32 and bf16.
fn check(what: &str, chain: &Chain, outputs: &[&[usize]], inputs: &[Tensor]) {
    for dtype in [DType::F32, DType::BF16] {
        let run = |device: Device| -> Vec<Tensor> {
            let on = |x: &Tensor| x.to_dtype(dtype).unwrap().to(device).unwrap();
            let inputs: Vec<Tensor> = inputs.iter().map(on).collect();
            let new = |dims: &&[usize]| Tensor::full(dims, 9.0, dtype, device).unwrap();
            let outputs: Vec<Tensor> = outputs.iter().map(new).collect();
            let [out, x] = [&outputs, &inputs].map(|all| all.iter().collect::<Vec<&Tensor>>());
            chain_into(chain, &out, &x).unwrap();
            outputs
        };
        let Some(device) = next_device() else { return };
        for (got, expected) in run(device).iter().zip(&run(Device::Cpu)) {
            assert_same_bits(got, expected, &format!("{what} in {dtype}"));
        }
    }
}

fn tensor(dims: &[usize], seed: u64) -> Tensor {
    let values = random_f32(dims.iter().product(), seed);
    Tensor::from_slice(&values, dims, Device::Cpu).unwrap()
}

#[test]
fn each_function_has_the_cpu_s_bits() {
    for (at, function) in Function::all().into_iter().enumerate() {
        let count = SIZES[at % SIZES.len()].max(100);
        let x: Vec<Tensor> = (0..3).map(|seed| tensor(&[count], seed)).collect();
        let arguments = function.arguments();
        let mut steps: Vec<ChainStep> = (0..arguments).map(ChainStep::Load).collect();
        steps.push(ChainStep::Apply(function, [0, 1, 2]));
        steps.push(ChainStep::Store(0, arguments));
        let whole = ChainView::whole(&[count]);
        let views = [vec![whole.clone(); arguments], vec![whole]];
        let chain = Chain::new("chain", &[count], 0, steps, views).unwrap();
        check(
            &format!("{function:?} of {count}"),
            &chain,
            &[&[count]],
            &x[..arguments],
        );
    }
}

#[test]
fn rows_are_reduced_in_the_cpu_s_order() {
    use Function::*;
    for [rows, columns] in [[0, 3], [5, 1], [9, 31], [3, 33], [17, 1024], [2, 2500]] {
        let dims = [rows, columns];
        let (by_row, by_column) = (
            ChainView {
                offset: 0,
                strides: vec![1, 0],
            },
            ChainView {
                offset: 0,
                strides: vec![0, 1],
            },
        );
        // A softmax of x · gain, and the largest of each row.
        let steps = vec![
            ChainStep::Load(0),
            ChainStep::Load(1),
            ChainStep::Apply(Mul, [0, 1, 0]),
            ChainStep::Max(2),
            ChainStep::Apply(Sub, [2, 3, 0]),
            ChainStep::Apply(Exp, [4, 0, 0]),
            ChainStep::Sum(5),
            ChainStep::Apply(Div, [5, 6, 0]),
            ChainStep::Store(0, 7),
            ChainStep::Store(1, 3),
        ];
        let views = [
            vec![ChainView::whole(&dims), by_column],
            vec![ChainView::whole(&dims), by_row],
        ];
        let chain = Chain::new("softmax", &dims, 1, steps, views).unwrap();
        let x = [tensor(&dims, 3), tensor(&[columns], 12)];
        check(
            &format!("softmax of {dims:?}"),
            &chain,
            &[&dims, &[rows, 1]],
            &x,
        );
    }
}

#[test]
fn views_are_read_and_written_where_they_lie() {
    let dims = [5, 3, 7];
    let loads = vec![
        ChainView {
            offset: 0,
            strides: vec![1, 5, 15],
        },
        ChainView {
            offset: 1,
            strides: vec![0, 1, 0],
        },
    ];
    let store = ChainView {
        offset: 2,
        strides: vec![40, 8, 1],
    };
    let steps = vec![
        ChainStep::Load(0),
        ChainStep::Load(1),
        ChainStep::Constant(0.3),
        ChainStep::Apply(Function::Mul, [0, 2, 0]),
        ChainStep::Apply(Function::Add, [3, 1, 0]),
        ChainStep::Store(0, 4),
    ];
    let chain = Chain::new("chain", &dims, 0, steps, [loads, vec![store]]).unwrap();
    let x = [tensor(&[7, 3, 5], 5), tensor(&[4], 6)];
    check("views", &chain, &[&[200]], &x);
}
