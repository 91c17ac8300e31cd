//! Which of cuBLASLt's algorithms matmuls use. On simulated GPUs, where SIMCUDA_ALGORITHMS sets how
//! the algorithms differ. Each case runs in its own process.

use std::fs;
use std::path::Path;
use std::process::Command;

use ddp_kernels::graph::Graph;
use ddp_kernels::matmuls::{self, Algorithms};
use ddp_kernels::ops::{self, Activation};
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor};
use serde_json::Value;

use crate::skip;

/// Set for the processes that `child` starts.
const CHILD: &str = "DDP_TEST_ALGORITHMS";
const GPU: Device = Device::Cuda(0);
/// Larger than any matmul with which a library could be tried once for all.
const SIDE: usize = 48;
/// Epilogues: a bias, and relu after it.
const BIAS: u64 = 4;
const RELU_BIAS: u64 = 6;
const GELU: u64 = 32;

fn full(value: f64, shape: &[usize]) -> Tensor {
    Tensor::full(shape, value, DType::F32, GPU).unwrap()
}

/// relu(x·weightᵀ + bias), where x is `value` all over.
fn layer(value: f64) -> f32 {
    let [x, weight, y] = [value, 1.0, 0.0].map(|value| full(value, &[SIDE, SIDE]));
    let bias = full(0.0, &[SIDE]);
    ops::linear_into(&y, &x, &weight, Some(&bias), Activation::Relu, None).unwrap();
    y.to_vec::<f32>().unwrap()[SIDE * SIDE - 1]
}

/// The algorithm of each kind of matmul: its epilogue, and its place in the heuristic's answer.
fn places(algorithms: &Value) -> Vec<(u64, u64)> {
    let matmuls = algorithms["products"].as_array().unwrap();
    let place = |matmul: &Value| {
        let (kind, words) = (&matmul[0], &matmul[1]);
        (
            kind["epilogue"].as_u64().unwrap(),
            words[7].as_u64().unwrap(),
        )
    };
    let mut places: Vec<(u64, u64)> = matmuls.iter().map(place).collect();
    places.sort();
    places
}

/// NaN stays, before matmuls are timed and after. What a child prints: what is the fastest.
#[test]
fn in_a_process_of_its_own() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    assert_eq!(layer(2.0), 2.0 * SIDE as f32);
    assert!(layer(f64::NAN).is_nan());
    ops::addmm(
        &full(0.0, &[8, 8]),
        &full(1.0, &[8, 8]),
        &full(1.0, &[8, 8]),
        1.0,
        1.0,
    )
    .unwrap();
    let chosen = matmuls::fastest(GPU, matmuls::kinds(GPU).unwrap()).unwrap();
    assert_eq!(chosen.measured_on(), matmuls::measured_on(GPU).unwrap());
    let mut text = serde_json::to_value(&chosen).unwrap();
    println!("\nresult: {:?}", places(&text));
    assert_eq!(chosen.use_on(GPU).unwrap(), 0, "all can be used");
    assert!(layer(f64::NAN).is_nan(), "timing loses NaN");
    assert_eq!(layer(2.0), 2.0 * SIDE as f32);
    // Words that no library made, as a damaged file may have them.
    for matmul in text["products"].as_array_mut().unwrap() {
        matmul[1][0] = 7.into();
    }
    let damaged: Algorithms = serde_json::from_value(text).unwrap();
    assert_eq!(damaged.use_on(GPU).unwrap(), damaged.count());
    assert_eq!(layer(2.0), 2.0 * SIDE as f32);
}

/// What a child prints: where gelu is computed by default, and the kinds of nodes of a layer with
/// gelu by default, with the fastest algorithms, and with gelu left to a pass of ours.
#[test]
fn gelu_in_a_process_of_its_own() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let [x, weight, y] = [1.0, 0.5, 0.0].map(|value| full(value, &[SIDE, SIDE]));
    let [x, weight, y] = [&x, &weight, &y].map(|it| it.to_dtype(DType::BF16).unwrap());
    let layer = || {
        let gelu = Activation::Gelu(ops::Gelu::Tanh);
        ops::linear_into(&y, &x, &weight, None, gelu, None)
    };
    let nodes = || {
        layer().unwrap();
        let graph = Graph::capture(&Stream::default_of(GPU).unwrap(), layer).unwrap();
        let kinds: Vec<_> = graph.nodes().iter().map(|node| node.kind).collect();
        format!("{kinds:?}")
    };
    let mut said = vec![matmuls::gelu(GPU).unwrap().to_string(), nodes()];
    let fastest = matmuls::fastest(GPU, matmuls::kinds(GPU).unwrap()).unwrap();
    assert_eq!(fastest.use_on(GPU).unwrap(), 0);
    said.push(nodes());
    // Timing that found gelu faster apart.
    let mut apart = serde_json::to_value(&fastest).unwrap();
    for matmul in apart["products"].as_array_mut().unwrap() {
        if matmul[0]["epilogue"].as_u64().unwrap() & GELU != 0 {
            matmul[1] = vec![u64::MAX; 8].into();
        }
    }
    let apart: Algorithms = serde_json::from_value(apart).unwrap();
    assert_eq!(apart.use_on(GPU).unwrap(), 0);
    said.push(nodes());
    println!("\nresult: {}", said.join("; "));
}

#[track_caller]
fn child(cache: &Path, algorithms: &str, version: &str) -> String {
    child_of("in_a_process_of_its_own", cache, algorithms, version)
}

#[track_caller]
fn child_of(test: &str, cache: &Path, algorithms: &str, version: &str) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("algorithms::{test}"), "--nocapture"])
        .env(CHILD, "1")
        .env("DDP_KERNEL_CACHE", cache)
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

/// A folder of a test's own, removed at the end.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let name = format!("ddp-algorithms-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
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
    let folder = Folder::new("nan");
    // In small matmuls it keeps NaN. The matmul only adds the bias, and relu is a pass of ours.
    let result = child(&folder.0, "100:nan", "130000");
    assert_eq!(result, format!("[(1, 0), ({BIAS}, 0)]"));
}

#[test]
fn after_a_refused_algorithm_comes_the_heuristics_next() {
    if !is_simulated() {
        return;
    }
    let folder = Folder::new("refused");
    // The trial of a fused relu is refused, so relu is a pass of ours.
    let result = child(&folder.0, "100:refused,100:refused,300", "130000");
    assert_eq!(result, format!("[(1, 2), ({BIAS}, 2)]"));
}

#[test]
fn the_fastest_is_kept_on_disk_until_the_library_changes() {
    if !is_simulated() {
        return;
    }
    let cases = [
        ("100,50,200", "130000", 1, 1),
        // As the first process measured it.
        ("50,100,200", "130000", 1, 1),
        ("50,100,200", "130100", 0, 0),
        ("100,50:refused,70:nan,80", "130200", 3, 2),
    ];
    let folder = Folder::new("fastest");
    for (algorithms, version, of_relu, of_others) in cases {
        let expected = format!("[(1, {of_others}), ({RELU_BIAS}, {of_relu})]");
        assert_eq!(
            child(&folder.0, algorithms, version),
            expected,
            "{algorithms} {version}"
        );
    }
}

#[test]
fn gelu_is_an_epilogue_where_that_is_known_to_be_fast_or_was_timed() {
    if !is_simulated() {
        return;
    }
    let fused = "[Matmul]";
    let apart = "[Matmul, Kernel]";
    for (version, by_default) in [("130000", true), ("120400", false)] {
        let folder = Folder::new("gelu");
        let (said, first) = match by_default {
            true => ("cuBLASLt's epilogue", fused),
            false => ("a separate kernel", apart),
        };
        // All simulated algorithms take as long, so that a pass of ours is time lost.
        assert_eq!(
            child_of("gelu_in_a_process_of_its_own", &folder.0, "100", version),
            format!("{said}; {first}; {fused}; {apart}"),
            "{version}"
        );
    }
}
