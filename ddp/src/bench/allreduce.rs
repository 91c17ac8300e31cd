//! `ddp-train bench allreduce`: how long the ranks take to sum a tensor.

use ddp_comm::{Group, Reduce};
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor};
use serde_json::{Value, json};

use super::{dtype_name, rounds};
use crate::error::Result;

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub struct AllreduceBench {
    /// Bytes of the tensor that every rank has.
    pub bytes: usize,
    /// F32 or BF16.
    pub dtype: DType,
    /// Where.
    pub device: Device,
    /// How long in all.
    pub seconds: f64,
    /// In how many rounds.
    pub rounds: usize,
}

/// Measures, on all ranks.
pub fn run(bench: &AllreduceBench, group: &Group) -> Result<Value> {
    let stream = Stream::default_of(bench.device)?;
    let count = (bench.bytes / bench.dtype.bytes()).max(1);
    // Zeros stay zeros: random numbers would grow to infinity over so many sums.
    let tensor = Tensor::zeros(&[count], bench.dtype, bench.device)?.named("bench");
    let times = rounds(group, bench.seconds, bench.rounds, |_| {
        Ok(group.all_reduce(&tensor, Reduce::Sum, &stream)?)
    })?;
    let (bytes, ranks) = (tensor.bytes() as f64, group.size() as f64);
    // As NCCL's tests count it: what a perfect algorithm must move over each rank's link.
    let bus_bytes = bytes * 2.0 * (ranks - 1.0) / ranks;
    let round = |value: f64, unit: f64| (value * unit).round() / unit;
    Ok(json!({
        "system": "ddp-train",
        "version": env!("CARGO_PKG_VERSION"),
        "bench": "allreduce",
        "bytes": tensor.bytes(),
        "ranks": group.size(),
        "dtype": dtype_name(bench.dtype),
        "device": bench.device.to_string(),
        "transport": group.transport(),
        "ms": round(times.median_s() * 1e3, 1e4),
        "ms_best": round(times.least_s() * 1e3, 1e4),
        "bus_gb_per_s": round(bus_bytes / times.median_s() / 1e9, 1e3),
        "repetitions": times.repetitions,
    }))
}
