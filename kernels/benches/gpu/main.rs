//! The speed of operations on a GPU, measured by the device's own clock: one JSON line a case,
//! `{"case", "value", "unit", …}`. `launch/gpu-check` runs it in turn with PyTorch's side,
//! `tests/peers/gpu_torch.py`, which prints the same cases.
//!
//! `cargo bench -p ddp-kernels --bench gpu`. On simulated GPUs every case runs once on small
//! shapes, and no figure is printed.

use std::time::Duration;

use ddp_kernels::graph::Graph;
use ddp_kernels::ops::{self, AdamwConstants, AdamwScalars, Attention, ChunkTable, F32Math};
use ddp_kernels::stream::{self, Stream};
use ddp_kernels::{DType, Device, Random, Result, Tensor, device, transfer};
use serde_json::json;

const GPU: Device = Device::Cuda(0);
/// Takes of each case; the median counts.
const ROUNDS: usize = 7;

fn main() -> Result<()> {
    let Some(gpu) = device::discover()
        .gpus
        .first()
        .filter(|_| Device::usable().contains(&GPU))
    else {
        eprintln!("skipped: no CUDA device");
        return Ok(());
    };
    let simulated = gpu.name.contains("Simulated");
    println!(
        "{}",
        json!({ "case": "device", "name": gpu.name, "simulated": simulated })
    );
    let bench = Bench {
        simulated,
        stream: Stream::default_of(GPU)?,
    };
    // `--bench`, which cargo adds, names no part.
    let part = std::env::args().nth(1);
    bench.attention()?;
    if part.as_deref() == Some("attention") {
        return Ok(());
    }
    bench.matmuls()?;
    bench.memory_bound()?;
    bench.launches()?;
    bench.uploads()
}

struct Bench {
    simulated: bool,
    stream: Stream,
}

impl Bench {
    /// A size for the real thing, or a small one for the simulator.
    fn size(&self, real: usize, small: usize) -> usize {
        if self.simulated { small } else { real }
    }

    /// Seconds that `count` calls of `body` take together, the median of several takes after one
    /// that does not count.
    fn seconds(&self, count: usize, body: impl Fn() -> Result<()>) -> Result<f64> {
        let mut takes: Vec<Duration> = Vec::new();
        for round in 0..=self.size(ROUNDS, 0) {
            let start = self.stream.record_timed()?;
            (0..count).try_for_each(|_| body())?;
            let took = self.stream.record_timed()?.since(&start)?;
            if round > 0 || self.simulated {
                takes.push(took);
            }
        }
        takes.sort();
        Ok(takes[takes.len() / 2].as_secs_f64())
    }

    fn say(&self, case: &str, value: f64, unit: &str) {
        if self.simulated {
            println!("{}", json!({ "case": case, "simulated": true }));
        } else {
            println!("{}", json!({ "case": case, "value": value, "unit": unit }));
        }
    }

    fn randn(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        Tensor::randn(shape, dtype, GPU, &mut Random::new(shape.len() as u64))
    }

    /// TFLOP/s of matmuls, of random numbers: zeros run faster than anything real.
    fn matmuls(&self) -> Result<()> {
        let square = |side: usize| [side; 3];
        let cases = [
            (
                "addmm bf16 8192",
                square(self.size(8192, 64)),
                DType::BF16,
                F32Math::Strict,
            ),
            (
                "addmm tf32 4096",
                square(self.size(4096, 64)),
                DType::F32,
                F32Math::Tf32,
            ),
            (
                "addmm f32 4096",
                square(self.size(4096, 64)),
                DType::F32,
                F32Math::Strict,
            ),
            (
                "linear bf16 128x1024x784",
                [128, 1024, 784],
                DType::BF16,
                F32Math::Strict,
            ),
        ];
        for (case, [m, n, k], dtype, math) in cases {
            let (x, weight) = (self.randn(&[m, k], dtype)?, self.randn(&[n, k], dtype)?);
            let out = x.new_empty(&[m, n])?;
            let count = self.size(10, 1);
            let seconds = ops::with_f32_math(math, || {
                self.seconds(count, || {
                    ops::addmm_into(&out, &out, &x, &weight.t()?, 1.0, 0.0)
                })
            })?;
            self.say(
                case,
                (2 * m * n * k * count) as f64 / seconds / 1e12,
                "TFLOP/s",
            );
        }
        Ok(())
    }

    /// TFLOP/s of causal attention in bf16, of the pairs of tokens that are not masked.
    fn attention(&self) -> Result<()> {
        for [batch, heads, time, head_size] in [[32, 12, 1024, 64], [4, 32, 4096, 128]] {
            let case = format!("{batch}x{heads}x{time}x{head_size}");
            let [batch, heads, time] = if self.simulated {
                [1, 2, 96]
            } else {
                [batch, heads, time]
            };
            let (rows, width) = (batch * time, heads * head_size);
            let randn = |columns| self.randn(&[rows, columns], DType::BF16);
            let (qkv, dqkv) = (randn(3 * width)?, randn(3 * width)?);
            let (out, dout) = (randn(width)?, randn(width)?);
            let lines = || Tensor::zeros(&[batch * heads, time], DType::F32, GPU);
            let (lse, delta) = (lines()?, lines()?);
            let attention = Attention {
                time,
                heads,
                kv_heads: heads,
                head_size,
                causal: true,
                scale: None,
                window: None,
                cap: None,
            };
            let forward = || ops::attention_into(&out, &lse, &qkv, None, &attention);
            let backward = || {
                ops::attention_backward_into(
                    &dqkv,
                    &delta,
                    [&dout, &out],
                    &lse,
                    &qkv,
                    None,
                    &attention,
                )
            };
            let calls = self.size(10, 1);
            // Two matmuls forward and five backward, of half of all pairs.
            let tflop = (2 * batch * heads * time * time * head_size * calls) as f64 / 2e12;
            let seconds = self.seconds(calls, forward)?;
            self.say(
                &format!("attention forward {case}"),
                2.0 * tflop / seconds,
                "TFLOP/s",
            );
            let seconds = self.seconds(calls, backward)?;
            self.say(
                &format!("attention backward {case}"),
                5.0 * tflop / seconds,
                "TFLOP/s",
            );
        }
        Ok(())
    }

    /// GB/s, reads and writes together, of operations that memory limits, beside a copy.
    fn memory_bound(&self) -> Result<()> {
        let count = self.size(256 << 20, 4096);
        let calls = self.size(5, 1);
        let (x, y) = (
            self.randn(&[count], DType::F32)?,
            self.randn(&[count], DType::F32)?,
        );
        let gb = |bytes_each: usize| (bytes_each * count * calls) as f64 / 1e9;
        self.say(
            "copy",
            gb(8) / self.seconds(calls, || x.copy_from(&y))?,
            "GB/s",
        );
        self.say(
            "relu f32",
            gb(8) / self.seconds(calls, || ops::activate_into(&x, &y, ops::Activation::Relu))?,
            "GB/s",
        );
        self.say(
            "gelu f32",
            gb(8)
                / self.seconds(calls, || {
                    ops::activate_into(&x, &y, ops::Activation::GeluTanh)
                })?,
            "GB/s",
        );
        self.say(
            "axpy f32",
            gb(12) / self.seconds(calls, || ops::axpy(&x, 1.0, &y))?,
            "GB/s",
        );
        drop((x, y));

        let count = self.size(124 << 20, 4096);
        let make = || self.randn(&[count], DType::F32);
        let (values, grads, first) = (make()?, make()?, make()?);
        let second = Tensor::ones(&[count], DType::F32, GPU)?;
        let constants = AdamwConstants::default();
        let scalars = AdamwScalars {
            learning_rate: 1e-4,
            weight_decay: 0.01,
            step: 10,
        }
        .to_array(&constants)?;
        let scalars = Tensor::from_slice(&scalars, &[4], GPU)?;
        let chunks = ChunkTable::whole(count);
        let step = || {
            ops::adamw(
                &ops::UpdateTensors::new([&values, &grads], &chunks, &scalars),
                [&first, &second],
                &constants,
            )
        };
        self.say(
            "adamw",
            (28 * count * calls) as f64 / 1e9 / self.seconds(calls, step)?,
            "GB/s",
        );
        let partials = Tensor::zeros(&[chunks.quanta()], DType::F64, GPU)?;
        let norm = || ops::grad_norm_partials(&partials, &grads, &chunks);
        self.say(
            "grad norm",
            (4 * count * calls) as f64 / 1e9 / self.seconds(calls, norm)?,
            "GB/s",
        );
        Ok(())
    }

    /// Microseconds of a launch, alone and in a graph.
    fn launches(&self) -> Result<()> {
        let calls = self.size(1000, 4);
        let x = self.randn(&[256], DType::F32)?;
        let many = || (0..calls).try_for_each(|_| ops::scale_into(&x, &x, 1.0));
        many()?;
        stream::synchronize(GPU)?;
        self.say(
            "launch, eager",
            self.seconds(1, many)? * 1e6 / calls as f64,
            "us",
        );
        let graph = Graph::capture(&self.stream, many)?;
        self.say(
            "launch, in a graph",
            self.seconds(1, || graph.launch())? * 1e6 / calls as f64,
            "us",
        );
        Ok(())
    }

    /// GB/s from the host.
    fn uploads(&self) -> Result<()> {
        let count = self.size(64 << 20, 4096);
        let there = Tensor::zeros(&[count], DType::F32, GPU)?;
        let pinned = Tensor::zeros_pinned(&[count], DType::F32)?;
        let pageable = Tensor::zeros(&[count], DType::F32, Device::Cpu)?;
        for (case, host) in [("upload, pinned", &pinned), ("upload, pageable", &pageable)] {
            let up = || transfer::copy_async(&there, host, &self.stream)?.wait();
            self.say(
                case,
                (4 * count) as f64 / 1e9 / self.seconds(1, up)?,
                "GB/s",
            );
        }
        Ok(())
    }
}
