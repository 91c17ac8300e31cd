//! Attention in f32 and in bf16: both directions are within rounding of the textbook, and have the
//! same bits in every run. The textbook is stricter than the CPU's bf16: that rounds weights and
//! gradients of scores too, but of other blocks, and so is as far from the textbook as a GPU may
//! be.

mod barriers;

#[path = "../../src/ops/attention/tests/reference.rs"]
mod reference;

use std::ffi::OsStr;
use std::process::{Command, Output};

use ddp_kernels::device::{FoundGpu, discover};
use ddp_kernels::graph::Graph;
use ddp_kernels::ops::{self, Attention, attention_backward_into, attention_into};
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Error, Random, Tensor};

use crate::reductions::upload;
use crate::tiles::constant;
use crate::{assert_same_bits, devices, next_device, skip};
use reference::Reference;

fn attention(time: usize, [heads, kv_heads, head_size]: [usize; 3], causal: bool) -> Attention {
    Attention {
        time,
        heads,
        kv_heads,
        head_size,
        causal,
        scale: None,
        window: None,
        cap: None,
    }
}

/// `qkv`, `dout`, `out`, `log_sum_exp`, `delta` and `dqkv` on a device.
struct Run {
    attention: Attention,
    begins: Option<Tensor>,
    tensors: [Tensor; 6],
}

impl Run {
    fn new(
        batch: usize,
        attention: Attention,
        dtype: DType,
        (device, skipped): (Device, usize),
    ) -> Run {
        let rows = batch * attention.time;
        let width = attention.heads * attention.head_size;
        let all = width + 2 * attention.kv_heads * attention.head_size;
        let lines = [batch * attention.heads, attention.time];
        let random = |columns: usize, seed: u64| {
            let (shape, mut random) = ([rows, columns], Random::new(seed));
            let x = Tensor::randn(&shape, DType::F32, Device::Cpu, &mut random).unwrap();
            upload(&x.to_dtype(dtype).unwrap(), device, skipped)
        };
        let full = |shape: &[usize], dtype| {
            let nan = Tensor::full(shape, f64::NAN, dtype, Device::Cpu).unwrap();
            upload(&nan, device, skipped)
        };
        let tensors = [
            random(all, 1),
            random(width, 2),
            full(&[rows, width], dtype),
            full(&lines, DType::F32),
            full(&lines, DType::F32),
            full(&[rows, all], dtype),
        ];
        Run {
            attention,
            begins: None,
            tensors,
        }
    }

    /// The same with documents that begin at these tokens of each sequence.
    fn with_documents(self, starts: &[usize]) -> Run {
        let (time, rows) = (self.attention.time, self.tensors[0].shape()[0]);
        let begin = |row: usize| *starts.iter().rfind(|&&it| it <= row % time).unwrap() as i32;
        let begins: Vec<i32> = (0..rows).map(begin).collect();
        let begins = Tensor::from_slice(&begins, &[rows], self.tensors[0].device()).unwrap();
        Run {
            begins: Some(begins),
            ..self
        }
    }

    fn packed(&self) {
        let [qkv, dout, out, lse, delta, dqkv] = &self.tensors;
        let (begins, of) = (self.begins.as_ref(), &self.attention);
        attention_into(out, lse, qkv, begins, of).unwrap();
        attention_backward_into(dqkv, delta, [dout, out], lse, qkv, begins, of).unwrap();
    }

    fn check(&self) {
        self.packed();
        self.compare();
    }

    fn compare(&self) {
        let [qkv, dout, out, lse, _, dqkv] = self.tensors.each_ref().map(wide);
        let narrow = match self.tensors[0].dtype() {
            DType::BF16 => 1.0 / 512.0,
            _ => 0.0,
        };
        let epsilon = f64::from(f32::EPSILON) / 2.0;
        let begins = self.begins.as_ref().map(|begins| begins.to_vec().unwrap());
        let begins = begins.unwrap_or_default();
        Reference::new(&self.attention, &begins, &qkv, &dout).check(
            &self.attention,
            epsilon,
            narrow,
            [&out, &lse, &dqkv],
        );
    }
}

fn wide(tensor: &Tensor) -> Vec<f64> {
    let wide = tensor.to_dtype(DType::F64).unwrap();
    wide.to_vec().unwrap()
}

/// More than five blocks of rows with several heads of q a head of k, around a block, a token, and
/// heads of one column more than whole chunks, for every kernel. Rescaling shows from the second
/// block of keys on.
#[test]
fn both_directions_are_within_rounding_of_the_textbook() {
    both_directions(&[DType::F32, DType::BF16]);
}

fn both_directions(wanted: &[DType]) {
    let (side, chunk) = (
        constant!("attention.cu", SIDE),
        constant!("attention.cu", CHUNK),
    );
    let step = constant!("attention_bf16.cu", BACKWARD_STEP);
    let hopper = constant!("attention_bf16.cu", HOPPER_STEP);
    let both = &[DType::F32, DType::BF16][..];
    let bf16 = &both[1..];
    // Scores are so far apart that later tiles have weights far larger than those before.
    let steep = Attention {
        scale: Some(4.0),
        ..attention(2 * side + 2, [1, 1, 64], true)
    };
    // Its kernels have no other case.
    let widest = attention(side + 5, [1, 1, 7 * chunk + 1], false);
    let cases = [
        (0, attention(3, [2, 1, 16], true), both),
        (2, attention(1, [2, 1, 3], true), both),
        (1, attention(5 * side + 10, [4, 2, 16], true), both),
        (2, attention(side - 1, [6, 2, chunk + 1], false), both),
        (1, attention(side + 1, [2, 2, 2 * chunk + 1], true), both),
        (1, widest, &both[..1]),
        (1, attention(step + 1, [1, 1, 7 * chunk + 1], true), bf16),
        (1, attention(2 * side + 2, [1, 1, 64], true), both),
        (1, attention(side, [4, 2, 64], false), both),
        (1, attention(2 * hopper, [1, 1, 64], false), bf16),
        (1, attention(2 * hopper + 1, [1, 1, 64], true), bf16),
        (1, attention(side + step + 1, [2, 1, 112], false), bf16),
        (1, attention(side + 7, [6, 2, 64], true), bf16),
        (1, steep, both),
        (1, attention(2 * side + 9, [3, 1, 128], true), bf16),
    ];
    let cases = cases.iter().flat_map(|&(batch, attention, dtypes)| {
        let dtypes = dtypes.iter().filter(|dtype| wanted.contains(dtype));
        dtypes.map(move |&dtype| (batch, attention, dtype))
    });
    let always = wanted
        .contains(&DType::F32)
        .then_some((1, widest, DType::F32));
    for (batch, attention, dtype) in a_third("attention", cases).into_iter().chain(always) {
        if let Some(device) = next_device() {
            Run::new(batch, attention, dtype, (device, 0)).check();
        }
    }
}

/// Every kernel with windows, documents and caps. Windows and documents have one token, less than a
/// tile, or several tiles.
/// Some heads share one of k, and some scores are so far apart that hidden ones would show.
#[test]
fn windows_documents_and_caps_are_within_rounding_of_the_textbook() {
    windows_documents_and_caps(&[DType::F32, DType::BF16]);
}

fn windows_documents_and_caps(wanted: &[DType]) {
    let both = &[DType::F32, DType::BF16][..];
    let windowed = |window: usize, attention: Attention| Attention {
        window: Some(window),
        ..attention
    };
    let capped = |cap: f64, attention: Attention| Attention {
        cap: Some(cap),
        ..attention
    };
    let steep = Attention {
        scale: Some(1.0),
        ..attention(200, [1, 1, 64], true)
    };
    let cases = [
        (
            2,
            windowed(1, attention(70, [2, 1, 16], true)),
            vec![0],
            both,
        ),
        (
            1,
            windowed(65, attention(300, [4, 2, 64], true)),
            vec![0],
            both,
        ),
        (
            2,
            windowed(9, attention(150, [3, 1, 128], true)),
            vec![0],
            &both[1..],
        ),
        (
            2,
            attention(300, [4, 2, 16], true),
            vec![0, 1, 2, 30, 64, 200, 299],
            both,
        ),
        (
            2,
            attention(260, [1, 1, 128], true),
            vec![0, 129, 250],
            &both[1..],
        ),
        (2, windowed(50, steep), vec![0, 20, 130], both),
        (1, capped(0.5, steep), vec![0, 20, 130], both),
        (
            1,
            capped(3.0, attention(300, [4, 2, 128], true)),
            vec![0],
            both,
        ),
        (1, steep, vec![0, 70, 71], both),
    ];
    let cases = cases.iter().flat_map(|(batch, attention, starts, dtypes)| {
        let dtypes = dtypes.iter().filter(|dtype| wanted.contains(dtype));
        dtypes.map(move |&dtype| (*batch, *attention, starts, dtype))
    });
    for (batch, attention, starts, dtype) in a_third("attention in windows", cases) {
        let Some(device) = next_device() else {
            continue;
        };
        let run = Run::new(batch, attention, dtype, (device, 0));
        if starts.len() > 1 {
            run.with_documents(starts).check();
        } else {
            run.check();
        }
    }
}

/// A third of the cases: the simulator takes seconds for each.
fn a_third<T>(check: &str, cases: impl Iterator<Item = T>) -> Vec<T> {
    let cases: Vec<T> = cases.collect();
    let third = cases.len().div_ceil(3);
    ddp_testing::cases_of(check, cases, third)
}

#[test]
fn a_captured_run_has_the_bits_of_an_eager_one() {
    for device in devices() {
        for dtype in [DType::F32, DType::BF16] {
            let new = || Run::new(1, attention(20, [2, 1, 16], true), dtype, (device, 0));
            let (eager, captured) = (new(), new());
            eager.packed();
            let stream = Stream::new(device).unwrap();
            let done = Stream::default_of(device).unwrap().record().unwrap();
            stream.wait(&done).unwrap();
            let body = || {
                captured.packed();
                Ok::<(), Error>(())
            };
            // The first use loads the kernels.
            stream.scope(body).unwrap();
            let graph = Graph::capture(&stream, body).unwrap();
            for output in &captured.tensors[2..] {
                stream.scope(|| ops::fill_into(output, f64::NAN)).unwrap();
            }
            graph.launch().unwrap();
            stream.synchronize().unwrap();
            for (captured, eager) in captured.tensors.iter().zip(&eager.tensors) {
                assert_same_bits(captured, eager, "captured");
            }
        }
    }
}

/// Tensor cores need addresses of whole packs, so other kernels read these.
#[test]
fn odd_addresses_are_within_rounding_too() {
    for device in devices() {
        let attention = attention(20, [2, 1, 16], true);
        Run::new(1, attention, DType::BF16, (device, 1)).check();
    }
}

#[test]
#[ignore = "a part of a_run_without_tensor_cores_says_so_once"]
fn odd_heads() {
    for device in devices() {
        Run::new(1, attention(5, [1, 1, 24], true), DType::BF16, (device, 0)).check();
    }
}

#[test]
#[ignore = "a part of a_run_without_tensor_cores_says_so_once"]
fn a_scale_below_zero() {
    for device in devices() {
        let scale = Some(-0.5);
        let attention = attention(5, [1, 1, 16], true);
        let attention = Attention { scale, ..attention };
        Run::new(1, attention, DType::BF16, (device, 0)).check();
    }
}

#[test]
fn a_run_without_tensor_cores_says_so_once() {
    let is_new = |gpu: &FoundGpu| gpu.compute_capability >= (8, 0);
    if devices().is_empty() || !discover().gpus.iter().all(is_new) {
        return skip("no GPU with tensor cores for bf16");
    }
    let old: &[(&str, &OsStr)] = &[("SIMCUDA_CAPABILITY", "7.5".as_ref())];
    let mut cases = vec![
        (
            "odd_heads",
            &[][..],
            "bf16 heads of 24 columns, expected a multiple of 16 up to 128; help: choose",
        ),
        (
            "odd_addresses_are_within_rounding_too",
            &[],
            "not a multiple of 16 bytes; help: begin views",
        ),
        (
            "a_scale_below_zero",
            &[],
            "a scale above 0, got 5·1² and -0.5; help: choose",
        ),
        ("several_tiles", &[], ""),
    ];
    if discover().gpus.iter().all(is_simulated) {
        cases.push(("several_tiles", old, "capability 7.5, expected 8.0"));
    }
    for (test, variables, expected) in cases {
        let said = child(test, variables);
        let said = String::from_utf8_lossy(&said.stderr);
        let lines = said
            .matches("attention does not run on tensor cores")
            .count();
        assert!(
            lines == usize::from(!expected.is_empty()) && said.contains(expected),
            "{said}"
        );
    }
}

/// Simulated GPUs are Hopper by default; here they are 8.0, which multiplies by `mma.sync`.
#[test]
fn tensor_cores_before_hopper_are_within_rounding_too() {
    if !discover().gpus.iter().all(is_simulated) || devices().is_empty() {
        return skip("no simulated GPU, whose architecture can be chosen");
    }
    let output = child("in_bf16", &[("SIMCUDA_CAPABILITY", "8.0".as_ref())]);
    let said = String::from_utf8_lossy(&output.stdout);
    let is_passed = output.status.success() && said.contains("1 passed");
    assert!(is_passed, "{said}");
}

#[test]
#[ignore = "a part of tensor_cores_before_hopper_are_within_rounding_too"]
fn in_bf16() {
    for gpu in &discover().gpus {
        assert_eq!(gpu.compute_capability, (8, 0));
    }
    both_directions(&[DType::BF16]);
    windows_documents_and_caps(&[DType::BF16]);
}

fn is_simulated(gpu: &FoundGpu) -> bool {
    gpu.name.contains("Simulated")
}

/// This program, as a process that runs one of these tests.
fn child(test: &str, variables: &[(&str, &OsStr)]) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--include-ignored", "--nocapture"])
        .arg(format!("attention::{test}"))
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

/// Three tiles of keys in forward; in backward five of the other side, on Hopper three.
fn several(head_size: usize) {
    for device in devices() {
        let attention = attention(130, [1, 1, head_size], true);
        Run::new(1, attention, DType::BF16, (device, 0)).check();
    }
}

#[test]
#[ignore = "a part of a_missing_wait_or_barrier_is_found_in_every_order"]
fn several_tiles() {
    several(16);
}

#[test]
#[ignore = "a part of a_missing_wait_or_barrier_is_found_in_every_order"]
fn several_wide_tiles() {
    several(128);
}
