//! `ddp-train bench allreduce`: how long the ranks take to sum a tensor.

use ddp_comm::{Reduce, World};
use ddp_kernels::Tensor;
use ddp_kernels::stream::Stream;
use serde_json::{Value, json};

use super::{agree, find_device, pin, rounds};
use crate::config::{self, AllreduceConfig};
use crate::error::Result;

/// Measures, on all ranks.
pub fn on_ranks(bench: &AllreduceConfig, world: &World) -> Result<Value> {
    pin(bench.threads, world)?;
    agree(world, &format!("{bench:?}"))?;
    let device = find_device(bench.device, world)?;
    if world.size() == 1 {
        tracing::warn!("one rank has nothing to sum: start it with mpirun -n 2");
    }
    let group = &world.group("main")?;
    let stream = Stream::default_of(device)?;
    let dtype = bench.dtype.dtype();
    let count = bench.bytes() / dtype.bytes();
    // Zeros stay zeros: random numbers would grow to infinity over so many sums.
    let tensor = Tensor::zeros(&[count], dtype, device)?.named("bench");
    let sum = |_| Ok(group.all_reduce(&tensor, Reduce::Sum, &stream)?);
    let times = rounds(group, device, bench.seconds, bench.rounds, sum)?;
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
        "dtype": dtype.to_string(),
        "device": config::described(device),
        "transport": group.transport(),
        "ms": round(times.median_s() * 1e3, 1e4),
        "ms_best": round(times.least_s() * 1e3, 1e4),
        "bus_gb_per_s": round(bus_bytes / times.median_s() / 1e9, 1e3),
        "repetitions": times.repetitions,
    }))
}
