//! `ddp-train bench addmm`: products of random rows with a weight, with a bias, as the forward pass of a linear layer makes them.

use ddp_comm::{Group, World};
use ddp_kernels::ops::{self, Activation};
use ddp_kernels::{DType, Device, Random, Tensor, threads};
use serde_json::{Value, json};

use super::{Say, name_of, of_all_ranks, precision, round, rounds, start};
use crate::config::{self, AddmmConfig, ProductShape};
use crate::error::Result;

/// Operands of products in turn have so many bytes together, several times the last cache (60 MB on a large GPU), so that each
/// product reads memory as a layer's does, whose operands were last used a step ago.
const ROTATED_BYTES: usize = 256 << 20;
/// But no more sets of operands than this: what is smaller still costs its launch and little else.
const SETS_MAX: usize = 1024;

/// Measures, on all ranks: a line for each shape.
pub fn on_ranks(bench: &AddmmConfig, world: &World, say: Say<'_>) -> Result<()> {
    let device = start(&bench.common, &format!("{bench:?}"), world)?;
    precision(bench.dtype, device)?;
    let main = &world.group("main")?;
    for &shape in &bench.shapes {
        say(&measure(bench, shape, device, main)?)?;
    }
    Ok(())
}

/// What one product works on. Letters as in `--m`, `--n`, `--k`.
struct Operands {
    x: Tensor,      // [m, k]
    weight: Tensor, // [n, k]
    bias: Tensor,   // [n]
    y: Tensor,      // [m, n]
}

impl Operands {
    /// Random numbers: products of zeros are faster than any others.
    fn random(shape: ProductShape, dtype: DType, device: Device, random: &mut Random) -> Result<Operands> {
        let ProductShape { m, n, k } = shape;
        Ok(Operands {
            x: Tensor::randn(&[m, k], dtype, device, random)?.named("input"),
            weight: Tensor::randn(&[n, k], dtype, device, random)?.named("weight"),
            bias: Tensor::randn(&[n], dtype, device, random)?.named("bias"),
            y: Tensor::zeros(&[m, n], dtype, device)?.named("output"),
        })
    }

    /// So many sets that they are not in any cache when their turn comes again.
    fn sets(shape: ProductShape, dtype: DType, device: Device, rank: usize) -> Result<Vec<Operands>> {
        let mut random = Random::new(rank as u64);
        let ProductShape { m, n, k } = shape;
        let bytes = (m * k + n * k + n + m * n) * dtype.bytes();
        let count = ROTATED_BYTES.div_ceil(bytes).min(SETS_MAX);
        (0..count).map(|_| Operands::random(shape, dtype, device, &mut random)).collect()
    }

    fn bytes(&self) -> usize {
        [&self.x, &self.weight, &self.bias, &self.y].iter().map(|tensor| tensor.bytes()).sum()
    }
}

fn measure(bench: &AddmmConfig, shape: ProductShape, device: Device, main: &Group) -> Result<Value> {
    let (dtype, math) = precision(bench.dtype, device)?;
    let sets = Operands::sets(shape, dtype, device, main.rank())?;
    let times = ops::with_f32_math(math, || {
        rounds(main, device, &bench.common, |repetition| {
            let Operands { x, weight, bias, y } = &sets[repetition as usize % sets.len()];
            Ok(ops::linear_into(y, x, weight, Some(bias), Activation::Identity, None)?)
        })
    })?;
    let ranks_s = of_all_ranks(main, times.own_median_s())?;
    let slowest_s = ranks_s.iter().copied().fold(0.0, f64::max);
    let ranks_ms: Vec<f64> = ranks_s.iter().map(|s| round(s * 1e3, 5)).collect();
    Ok(json!({
        "system": "ddp-train",
        "version": env!("CARGO_PKG_VERSION"),
        "bench": "addmm",
        "shape": shape.to_string(),
        "m": shape.m,
        "n": shape.n,
        "k": shape.k,
        "dtype": name_of(bench.dtype),
        "device": config::described(device),
        "ranks": main.size(),
        "threads": threads::count(),
        // Of the slowest rank; each computes products of its own beside the others.
        "ms": round(slowest_s * 1e3, 5),
        "ms_of_ranks": ranks_ms,
        "tflop_per_s": round(shape.flop() / slowest_s / 1e12, 4),
        "gflop_per_s": round(shape.flop() / slowest_s / 1e9, 2),
        "rotated_mb": round((sets.len() * sets[0].bytes()) as f64 / 1e6, 2),
        "repetitions": times.repetitions,
    }))
}
