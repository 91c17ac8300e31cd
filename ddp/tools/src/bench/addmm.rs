//! `ddp-train bench addmm`: matmuls of random rows with a weight, plus a bias, as in the forward
//! pass of a linear layer.

use std::fmt;
use std::str::FromStr;

use ddp_comm::{Group, World};
use ddp_kernels::ops;
use ddp_kernels::{Device, Random, Tensor, threads};
use serde_json::{Value, json};

use super::measure::{BenchOptions, line, round, rounds, start};
use crate::error::Result;
use crate::exchange::gather_numbers;
use crate::output::Say;
use crate::params::Numerics;

/// Bytes of all sets of operands, several times the largest cache (60 MB on a large GPU). A matmul
/// then reads memory, as a layer does, whose operands were last used a step ago.
const ROTATED_BYTES: usize = 256 << 20;
/// The most sets of operands.
const SETS_MAX: usize = 1024;
/// The longest side of a matmul.
pub const SIDE_MAX: usize = 1 << 24;

/// One matmul: `[m, k]` rows times a weight `[n, k]`. Reads and prints as `MxNxK`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatmulShape {
    /// Rows.
    pub m: usize,
    /// Outputs of a row.
    pub n: usize,
    /// Inputs of a row.
    pub k: usize,
}

impl MatmulShape {
    /// Its multiplications and additions.
    fn flop(self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64
    }
}

impl fmt::Display for MatmulShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}x{}", self.m, self.n, self.k)
    }
}

impl FromStr for MatmulShape {
    type Err = String;

    fn from_str(text: &str) -> Result<MatmulShape, String> {
        let side = |text: &str| {
            text.parse()
                .ok()
                .filter(|side| (1..=SIDE_MAX).contains(side))
        };
        let sides: Option<Vec<usize>> = text.split('x').map(side).collect();
        match sides.as_deref() {
            Some(&[m, n, k]) => Ok(MatmulShape { m, n, k }),
            _ => Err("expected MxNxK, as in 128x1024x784".into()),
        }
    }
}

/// Measures matmuls on all ranks: a line for each shape.
pub fn addmm(
    shapes: &[MatmulShape],
    bench: &BenchOptions,
    world: &World,
    say: Say<'_>,
) -> Result<()> {
    let device = start(bench, world)?;
    let main = &world.group("main")?;
    for &shape in shapes {
        say(&measure_shape(bench, shape, device, main, world)?)?;
    }
    Ok(())
}

fn measure_shape(
    bench: &BenchOptions,
    shape: MatmulShape,
    device: Device,
    main: &Group,
    world: &World,
) -> Result<Value> {
    let wanted = bench.config.dtype;
    let (format, MatmulShape { m, n, k }) = (Numerics::from(wanted), shape);
    let dtype = format.layers;
    // As many sets as fill `ROTATED_BYTES`, so that none is in a cache when it is used again.
    let bytes = (m * k + n * k + n + m * n) * dtype.bytes();
    let mut random = Random::new(world.rank() as u64);
    // Random numbers, since matmuls of zeros are faster.
    let operands = |_| -> Result<[Tensor; 4]> {
        Ok([
            Tensor::randn(&[m, k], dtype, device, &mut random)?.named("input"),
            Tensor::randn(&[n, k], dtype, device, &mut random)?.named("weight"),
            Tensor::randn(&[n], dtype, device, &mut random)?.named("bias"),
            Tensor::zeros(&[m, n], dtype, device)?.named("output"),
        ])
    };
    let count = ROTATED_BYTES.div_ceil(bytes).min(SETS_MAX);
    let sets = (0..count).map(operands).collect::<Result<Vec<_>>>()?;
    let times = ops::with_f32_math(format.f32_math, || {
        rounds(main, device, bench, |repetition| {
            let [x, weight, bias, y] = &sets[repetition as usize % sets.len()];
            Ok(ops::linear_into(y, x, weight, Some(bias), None, None)?)
        })
    })?;
    let ranks_s = gather_numbers(world, &[times.own_median_s])?.concat();
    let slowest_s = ranks_s.iter().copied().fold(0.0, f64::max);
    let ranks_ms: Vec<f64> = ranks_s.iter().map(|s| round(s * 1e3, 5)).collect();
    let fields = json!({
        "bench": "addmm",
        "shape": shape.to_string(),
        "m": m,
        "n": n,
        "k": k,
        "dtype": wanted,
        "ranks": world.size(),
        "threads": threads::count(),
        // The slowest rank's; each computes its own matmuls.
        "ms": round(slowest_s * 1e3, 5),
        "ms_of_ranks": ranks_ms,
        "tflop_per_s": round(shape.flop() / slowest_s / 1e12, 4),
        "gflop_per_s": round(shape.flop() / slowest_s / 1e9, 2),
        "rotated_mb": round((sets.len() * bytes) as f64 / 1e6, 2),
        "repetitions": times.repetitions,
    });
    Ok(line(device, &[fields]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_reads_back_as_it_prints() {
        let shape: MatmulShape = "128x1024x784".parse().unwrap();
        let (m, n, k) = (128, 1024, 784);
        assert_eq!(shape, MatmulShape { m, n, k });
        assert_eq!(shape.to_string(), "128x1024x784");
        assert_eq!(shape.flop(), 2.0 * 128.0 * 1024.0 * 784.0);
        for text in ["", "1x2", "1x2x3x4", "1x2x", "1x2x-3", "1x0x3", "1×2×3"] {
            assert!(text.parse::<MatmulShape>().is_err(), "{text:?}");
        }
    }
}
