//! Which of cuBLASLt's algorithms matmuls use, and what is left to a pass of ours. Only on
//! simulated GPUs, where SIMCUDA_ALGORITHMS sets what the heuristic returns. Each case has its own
//! process.

use std::process::Command;

use ddp_kernels::graph::Graph;
use ddp_kernels::matmuls;
use ddp_kernels::ops::{self, Activation};
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor};

use crate::skip;

const GPU: Device = Device::Cuda(0);
/// Larger than any matmul with which a library could be tried once for all.
const SIDE: usize = 48;
/// The nodes of a layer whose activation is an epilogue, and of one that leaves it to a pass.
const FUSED: &str = "[Matmul]";
const APART: &str = "[Matmul, Kernel]";

fn full(value: f64, shape: &[usize]) -> Tensor {
    Tensor::full(shape, value, DType::F32, GPU).unwrap()
}

/// relu(x·weightᵀ + bias), where x is `value` all over.
fn layer(value: f64) -> f32 {
    let [x, weight, y] = [value, 1.0, 0.0].map(|value| full(value, &[SIDE, SIDE]));
    let bias = full(0.0, &[SIDE]);
    ops::linear_into(&y, &x, &weight, Some(&bias), Some(Activation::Relu), None).unwrap();
    y.to_vec::<f32>().unwrap()[SIDE * SIDE - 1]
}

/// The kinds of nodes of a layer with this activation.
fn nodes(activation: Activation, dtype: DType) -> String {
    let [x, weight, y] = [1.0, 0.5, 0.0].map(|value| full(value, &[SIDE, SIDE]));
    let [x, weight, y] = [&x, &weight, &y].map(|it| it.to_dtype(dtype).unwrap());
    let bias = full(0.0, &[SIDE]).to_dtype(dtype).unwrap();
    let layer = || ops::linear_into(&y, &x, &weight, Some(&bias), Some(activation), None);
    layer().unwrap();
    let graph = Graph::capture(&Stream::default_of(GPU).unwrap(), layer).unwrap();
    let kinds: Vec<_> = graph.nodes().iter().map(|node| node.kind).collect();
    format!("{kinds:?}")
}

/// NaN stays. What a child prints: the nodes of a layer with relu.
#[test]
#[ignore = "a part of tests below, as a process"]
fn relu_in_a_process_of_its_own() {
    assert_eq!(layer(2.0), 2.0 * SIDE as f32);
    assert!(layer(f64::NAN).is_nan());
    println!("\nresult: {}", nodes(Activation::Relu, DType::F32));
}

/// What a child prints: where gelu is computed, and the nodes of a layer with it.
#[test]
#[ignore = "a part of a test below, as a process"]
fn gelu_in_a_process_of_its_own() {
    let nodes = nodes(Activation::GeluTanh, DType::BF16);
    println!("\nresult: {}; {nodes}", matmuls::gelu(GPU).unwrap());
}

#[track_caller]
fn child(test: &str, algorithms: &str, version: &str) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--include-ignored", "--nocapture"])
        .arg(format!("algorithms::{test}"))
        .env("SIMCUDA_ALGORITHMS", algorithms)
        .env("SIMCUDA_CUBLASLT", version)
        .output()
        .unwrap();
    let [stdout, stderr] = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
    assert!(output.status.success(), "{stdout}\n{stderr}");
    let mut lines = stdout.lines();
    let result = lines.find_map(|line| line.strip_prefix("result: "));
    result
        .unwrap_or_else(|| panic!("{stdout}\n{stderr}"))
        .to_string()
}

fn is_simulated() -> bool {
    let found = ddp_kernels::device::discover();
    let is_simulated = found
        .gpus
        .first()
        .is_some_and(|gpu| gpu.name.contains("Simulated"));
    if !is_simulated {
        skip("no simulated GPU");
    }
    is_simulated
}

#[test]
fn an_algorithm_whose_relu_hides_nan_is_never_used() {
    if !is_simulated() {
        return;
    }
    // In small matmuls it keeps NaN. The matmul only adds the bias, and relu is a pass of ours.
    for (algorithms, expected) in [("sound", FUSED), ("nan", APART)] {
        let found = child("relu_in_a_process_of_its_own", algorithms, "130000");
        assert_eq!(found, expected, "{algorithms}");
    }
}

#[test]
fn after_a_refused_algorithm_comes_the_heuristics_next() {
    if !is_simulated() {
        return;
    }
    // The trial of a fused relu is refused, so relu is a pass of ours.
    let algorithms = "refused,refused,sound";
    let found = child("relu_in_a_process_of_its_own", algorithms, "130000");
    assert_eq!(found, APART);
}

#[test]
fn gelu_is_an_epilogue_where_that_is_known_to_be_fast() {
    if !is_simulated() {
        return;
    }
    for (version, place, nodes) in [
        ("130000", "cuBLASLt's epilogue", FUSED),
        ("120400", "a separate kernel", APART),
    ] {
        let found = child("gelu_in_a_process_of_its_own", "sound", version);
        assert_eq!(found, format!("{place}; {nodes}"), "{version}");
    }
}
