//! `ddp-train bench allreduce`: how long the ranks take to sum a tensor, or to bring each other one in another way.
//!
//! In the terms of NCCL's tests, in place: `bytes` is the tensor that each rank has (of reduce_scatter and all_gather, the slices of
//! all ranks), `alg_gb_per_s` that over the time, `bus_gb_per_s` what must cross a rank's link for it.

use ddp_comm::{Group, Reduce, World};
use ddp_kernels::stream::{Graph, Stream, synchronize};
use ddp_kernels::{DType, Device, Tensor, ops};
use serde_json::{Value, json};

use super::{Say, group_on, round, rounds, start};
use crate::config::{self, AllreduceConfig, BenchOperation};
use crate::error::{Error, Result};

/// Calls that are captured together.
const CAPTURED: usize = 20;

/// Measures, on all ranks: a line for each size.
pub fn on_ranks(bench: &AllreduceConfig, world: &World, say: Say<'_>) -> Result<()> {
    let device = start(&bench.common, &format!("{bench:?}"), world)?;
    if bench.captured && !device.is_accelerator() {
        let text = "--captured: expected --device cuda: graphs are CUDA's. Leave it out, or measure on a GPU";
        return Err(Error::Usage(text.into()));
    }
    if world.size() == 1 {
        tracing::warn!("one rank has nothing to bring to others: start it with mpirun -n 2");
    }
    let main = world.group("main")?;
    // As the reducer has it.
    let stream = if device.is_accelerator() { Stream::urgent(device)? } else { Stream::default_of(device)? };
    let group = group_on(device, "bench", world)?;
    let bench = Bench { config: bench, device, main, group, stream };
    for &mb in &bench.config.sizes_mb {
        say(&bench.measure(mb)?)?;
    }
    Ok(())
}

/// What is measured, and with what.
struct Bench<'a> {
    config: &'a AllreduceConfig,
    device: Device,
    /// Of host memory: for what is agreed on.
    main: Group,
    /// What is measured.
    group: Group,
    stream: Stream,
}

impl Bench<'_> {
    fn measure(&self, mb: f64) -> Result<Value> {
        let (operation, dtype) = (self.config.operation, self.config.dtype.dtype());
        let tensor = self.right_tensor(self.config.count(mb, self.group.size()), dtype)?;
        if operation == BenchOperation::AllReduce {
            // Random numbers would grow to infinity over so many sums. Zeros stay zeros, and take as long to move and to add.
            self.stream.scope(|| ops::zero(&tensor))?;
        }
        let (times, calls) = if self.config.captured {
            let graph = Graph::capture(&self.stream, || (0..CAPTURED).try_for_each(|_| self.call(&tensor)))?;
            let launch = |_| Ok(self.stream.scope(|| graph.launch())?);
            (rounds(&self.main, self.device, &self.config.common, launch)?, CAPTURED)
        } else {
            (rounds(&self.main, self.device, &self.config.common, |_| self.call(&tensor))?, 1)
        };
        let seconds = times.median_s() / calls as f64;
        let alg_gb_per_s = tensor.bytes() as f64 / seconds / 1e9;
        Ok(json!({
            "system": "ddp-train",
            "version": env!("CARGO_PKG_VERSION"),
            "bench": "allreduce",
            "operation": operation.to_string(),
            "bytes": tensor.bytes(),
            "ranks": self.group.size(),
            "dtype": dtype.to_string(),
            "device": config::described(self.device),
            "transport": self.group.transport(),
            "captured": self.config.captured,
            "in_place": true,
            "ms": round(seconds * 1e3, 5),
            "ms_best": round(times.least_s() / calls as f64 * 1e3, 5),
            "time_us": round(seconds * 1e6, 2),
            "alg_gb_per_s": round(alg_gb_per_s, 3),
            "bus_gb_per_s": round(alg_gb_per_s * operation.bus_factor(self.group.size()), 3),
            "repetitions": times.repetitions * calls as u64,
        }))
    }

    fn call(&self, tensor: &Tensor) -> Result<()> {
        call(self.config.operation, &self.group, tensor, &self.stream)
    }

    /// A tensor on which one call has been made, and what it gave was right. Figures of wrong sums are worth nothing.
    fn right_tensor(&self, count: usize, dtype: DType) -> Result<Tensor> {
        let (rank, ranks) = (self.group.rank(), self.group.size());
        let given: Vec<f32> = (0..count).map(|index| given(rank, ranks, index)).collect();
        // Made on the stream that uses it, or that would have to wait for another each time.
        let tensor = self.stream.scope(|| -> Result<Tensor> {
            let given = Tensor::from_slice(&given, &[count], self.device)?;
            Ok(given.to_dtype(dtype)?.named("bench"))
        })?;
        self.call(&tensor)?;
        synchronize(self.device)?;
        let got: Vec<f32> = tensor.to(Device::Cpu)?.to_dtype(DType::F32)?.to_vec()?;
        match first_wrong(self.config.operation, rank, ranks, &got) {
            None => Ok(tensor),
            Some((index, expected)) => Err(Error::Internal(format!(
                "bench allreduce: {} of {count} elements of {dtype} over {ranks} ranks ({}): expected {expected} at element \
                 {index} on rank {rank}, got {}",
                self.config.operation,
                self.group.transport(),
                got[index],
            ))),
        }
    }
}

fn call(operation: BenchOperation, group: &Group, tensor: &Tensor, stream: &Stream) -> Result<()> {
    match operation {
        BenchOperation::AllReduce => group.all_reduce(tensor, Reduce::Sum, stream)?,
        BenchOperation::ReduceScatter => group.reduce_scatter(tensor, Reduce::Sum, stream)?,
        BenchOperation::AllGather => group.all_gather(tensor, stream)?,
        BenchOperation::Broadcast => group.broadcast(tensor, 0, stream)?,
    }
    Ok(())
}

/// What a rank brings at an element: whole numbers that follow from both. Their sums are up to 256, exact in bf16, in whatever order
/// they are added.
fn given(rank: usize, ranks: usize, index: usize) -> f32 {
    const EXACT: usize = 256;
    let most = (EXACT / ranks).clamp(1, 7) as u32;
    if rank >= EXACT {
        return 0.0;
    }
    // Any mixing will do whose numbers differ from element to element and from rank to rank.
    let mixed = (index as u32).wrapping_mul(0x9e37_79b1) ^ (rank as u32).wrapping_mul(0x85eb_ca6b);
    ((mixed ^ (mixed >> 15)).wrapping_mul(0x2c1b_3c6d) >> 16) as f32 % (most + 1) as f32
}

/// What an element must be after one call; none where a rank is left with anything.
fn expected(operation: BenchOperation, rank: usize, ranks: usize, count: usize, index: usize) -> Option<f32> {
    let sum = || (0..ranks).map(|rank| given(rank, ranks, index)).sum();
    let slice = index / (count / ranks).max(1);
    match operation {
        BenchOperation::AllReduce => Some(sum()),
        BenchOperation::ReduceScatter => (slice == rank).then(sum),
        BenchOperation::AllGather => Some(given(slice, ranks, index)),
        BenchOperation::Broadcast => Some(given(0, ranks, index)),
    }
}

/// The first element that is not what it must be after one call, and what that is.
fn first_wrong(operation: BenchOperation, rank: usize, ranks: usize, got: &[f32]) -> Option<(usize, f32)> {
    let wrong = |(index, &value): (usize, &f32)| {
        let expected = expected(operation, rank, ranks, got.len(), index)?;
        (value != expected).then_some((index, expected))
    };
    got.iter().enumerate().find_map(wrong)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const OPERATIONS: [BenchOperation; 4] = [
        BenchOperation::AllReduce,
        BenchOperation::ReduceScatter,
        BenchOperation::AllGather,
        BenchOperation::Broadcast,
    ];

    /// What each rank has after one call, made by the groups themselves.
    fn after(operation: BenchOperation, ranks: usize, dtype: DType, count: usize) -> Vec<Vec<f32>> {
        let worlds = World::threads(ranks, Some(1), Duration::from_secs(60)).unwrap();
        let rank = |world: World| {
            let stream = Stream::default_of(Device::Cpu).unwrap();
            let given: Vec<f32> = (0..count).map(|index| given(world.rank(), ranks, index)).collect();
            let tensor = Tensor::from_slice(&given, &[count], Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            call(operation, &world.group("bench").unwrap(), &tensor, &stream).unwrap();
            tensor.to_dtype(DType::F32).unwrap().to_vec::<f32>().unwrap()
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = worlds.into_iter().map(|world| scope.spawn(|| rank(world))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn what_collectives_give_is_right() {
        for (ranks, dtype) in [(1, DType::F32), (3, DType::F32), (4, DType::BF16)] {
            let count = ranks * 41;
            for operation in OPERATIONS {
                for (rank, got) in after(operation, ranks, dtype, count).iter().enumerate() {
                    assert_eq!(first_wrong(operation, rank, ranks, got), None, "{operation} on {rank} of {ranks}");
                }
            }
        }
    }

    #[test]
    fn one_wrong_element_is_found() {
        for operation in OPERATIONS {
            let mut got = after(operation, 3, DType::F32, 123).swap_remove(1);
            // In rank 1's slice, from 41 on: reduce_scatter promises no other.
            got[57] += 1.0;
            let (index, expected) = first_wrong(operation, 1, 3, &got).unwrap();
            assert_eq!((index, expected), (57, got[57] - 1.0), "{operation}");
        }
    }

    #[test]
    fn a_call_that_did_nothing_is_found() {
        for (rank, operation) in OPERATIONS.into_iter().enumerate() {
            let rank = rank.max(1);
            let untouched: Vec<f32> = (0..160).map(|index| given(rank, 4, index)).collect();
            assert!(first_wrong(operation, rank, 4, &untouched).is_some(), "{operation} on {rank}");
        }
    }

    #[test]
    fn sums_of_many_ranks_are_exact_in_bf16() {
        for ranks in [1, 2, 36, 37, 255, 256, 300] {
            let largest = (0..500).map(|index| (0..ranks).map(|rank| given(rank, ranks, index)).sum::<f32>());
            let largest = largest.fold(0.0, f32::max);
            assert!((1.0..=256.0).contains(&largest), "{ranks} ranks: {largest}");
        }
    }
}
