//! `ddp-train bench allreduce`: how long the ranks take for an all-reduce or another collective.
//!
//! Figures are those of NCCL's tests, in place: `bytes` is the size of the tensor on each rank (for
//! reduce_scatter and all_gather, of all slices together), `alg_gb_per_s` that over the time,
//! `bus_gb_per_s` what must cross a rank's link for it over the time.

use ddp_comm::{Group, Reduce, World};
use ddp_kernels::graph::Graph;
use ddp_kernels::setting::{Choice, SettingName};
use ddp_kernels::stream::{Stream, synchronize};
use ddp_kernels::{DType, Device, Tensor, ops};
use serde_json::{Value, json};

use super::measure::{BenchOptions, line, round, rounds, start};
use crate::config::FloatType;
use crate::error::{Error, Result};
use crate::output::Say;
use crate::setting::DEVICE;

/// Calls in one graph.
const CAPTURED: usize = 20;

/// What `allreduce` measures.
#[derive(Clone, Debug)]
pub struct AllreduceOptions {
    /// Sizes of the tensor on each rank, in MB (10⁶ bytes).
    pub sizes_mb: Vec<f64>,
    /// The collective.
    pub operation: BenchOperation,
    /// The type of elements.
    pub dtype: FloatType,
    /// On a GPU: capture many calls in one graph and replay it.
    pub captured: bool,
}

ddp_kernels::choices! {
    /// A collective.
    #[derive(Default)]
    pub enum BenchOperation {
        /// Every rank gets the sum of all
        #[default]
        AllReduce = "all_reduce",
        /// Every rank gets its slice of the sum
        ReduceScatter = "reduce_scatter",
        /// Every rank gets the slices of the others
        AllGather = "all_gather",
        /// Every rank gets the tensor of rank 0
        Broadcast = "broadcast",
    }
}

impl BenchOperation {
    /// The part of a tensor's bytes that must cross each rank's link, as NCCL's tests count it. So
    /// bus bandwidths compare with the hardware's, for any operation and any number of ranks.
    fn bus_factor(self, ranks: usize) -> f64 {
        let others = (ranks - 1) as f64 / ranks as f64;
        match self {
            BenchOperation::AllReduce => 2.0 * others,
            BenchOperation::ReduceScatter | BenchOperation::AllGather => others,
            BenchOperation::Broadcast => 1.0,
        }
    }

    /// Elements of a tensor of `mb` MB: at least one, and for operations with slices a multiple of
    /// the ranks, where slices are large enough of 16 bytes a rank.
    fn count(self, mb: f64, dtype: DType, ranks: usize) -> usize {
        let count = (mb * 1e6) as usize / dtype.bytes();
        let aligned = ranks * 16 / dtype.bytes();
        let unit = match self {
            BenchOperation::AllReduce | BenchOperation::Broadcast => 1,
            BenchOperation::ReduceScatter | BenchOperation::AllGather if count >= aligned => {
                aligned
            }
            BenchOperation::ReduceScatter | BenchOperation::AllGather => ranks,
        };
        (count / unit).max(1) * unit
    }
}

/// Measures a collective on all ranks: a line for each size.
pub fn allreduce(
    options: &AllreduceOptions,
    common: &BenchOptions,
    world: &World,
    say: Say<'_>,
) -> Result<()> {
    let device = start(common, world)?;
    let operation = options.operation;
    if options.captured && !device.is_accelerator() {
        let captured = SettingName("captured");
        return Err(Error::Usage(format!(
            "{captured}: expected {DEVICE} cuda; help: leave it out, or measure on a GPU"
        )));
    }
    if world.size() == 1 {
        tracing::warn!("one rank has no others to exchange with; help: start it with mpirun -n 2");
    }
    // As the reducer has it.
    let stream = if device.is_accelerator() {
        Stream::urgent(device)?
    } else {
        Stream::default_of(device)?
    };
    let bench = AllreduceBench {
        options,
        common,
        device,
        main: world.group("main")?,
        group: world.group_on(device, "bench")?,
        stream,
    };
    for &mb in &options.sizes_mb {
        let count = operation.count(mb, options.dtype.dtype(), world.size());
        say(&bench.measure(&bench.checked_tensor(count)?)?)?;
    }
    Ok(())
}

/// What is measured, and with what.
struct AllreduceBench<'a> {
    options: &'a AllreduceOptions,
    common: &'a BenchOptions,
    device: Device,
    /// Of host memory, for what ranks agree on.
    main: Group,
    /// What is measured.
    group: Group,
    stream: Stream,
}

impl AllreduceBench<'_> {
    /// The time of the collective on `tensor`.
    fn measure(&self, tensor: &Tensor) -> Result<Value> {
        let (operation, dtype) = (self.options.operation, tensor.dtype());
        let ranks = self.group.size();
        let reduce = || call(operation, &self.group, tensor, &self.stream);
        let (main, common) = (&self.main, self.common);
        let (times, calls) = if self.options.captured {
            let capture = || (0..CAPTURED).try_for_each(|_| reduce());
            let graph = Graph::capture(&self.stream, capture)?;
            let launch = |_| Ok(self.stream.scope(|| graph.launch())?);
            (rounds(main, self.device, common, launch)?, CAPTURED)
        } else {
            (rounds(main, self.device, common, |_| reduce())?, 1)
        };
        let seconds = times.median_s / calls as f64;
        let alg_gb_per_s = tensor.bytes() as f64 / seconds / 1e9;
        let fields = json!({
            "bench": "allreduce",
            "operation": operation,
            "bytes": tensor.bytes(),
            "ranks": ranks,
            "dtype": dtype.to_string(),
            "transport": self.group.transport(),
            "captured": self.options.captured,
            "in_place": true,
            "ms": round(seconds * 1e3, 5),
            "ms_best": round(times.least_s / calls as f64 * 1e3, 5),
            "time_us": round(seconds * 1e6, 2),
            "alg_gb_per_s": round(alg_gb_per_s, 3),
            "bus_gb_per_s": round(alg_gb_per_s * operation.bus_factor(ranks), 3),
            "repetitions": times.repetitions * calls as u64,
        });
        Ok(line(self.device, &[fields]))
    }

    /// A tensor on which one call has been made, whose result was right.
    fn checked_tensor(&self, count: usize) -> Result<Tensor> {
        let (rank, ranks) = (self.group.rank(), self.group.size());
        let (operation, dtype) = (self.options.operation, self.options.dtype.dtype());
        let given: Vec<f32> = (0..count).map(|index| given(rank, ranks, index)).collect();
        // Made on the stream that uses it, so that it waits for no other.
        let tensor = self.stream.scope(|| -> Result<Tensor> {
            let given = Tensor::from_slice(&given, &[count], self.device)?;
            Ok(given.to_dtype(dtype)?.named("bench"))
        })?;
        call(operation, &self.group, &tensor, &self.stream)?;
        synchronize(self.device)?;
        let got: Vec<f32> = tensor.to(Device::Cpu)?.to_dtype(DType::F32)?.to_vec()?;
        if let Some((index, expected)) = first_wrong(operation, rank, ranks, &got) {
            return Err(Error::Internal(format!(
                "bench allreduce: {} of {count} elements of {dtype} over {ranks} ranks ({}): \
                 expected {expected} at element {index} on rank {rank}, got {}",
                operation.name(),
                self.group.transport(),
                got[index],
            )));
        }
        if operation == BenchOperation::AllReduce {
            // Random numbers would grow to infinity over that many sums. Zeros take as long.
            self.stream.scope(|| ops::zero(&tensor))?;
        }
        Ok(tensor)
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

/// What a rank contributes at an element: a whole number that follows from both. Sums over all
/// ranks are at most 256, so they are exact in bf16 in any order.
fn given(rank: usize, ranks: usize, index: usize) -> f32 {
    const EXACT: usize = 256;
    let most = (EXACT / ranks).clamp(1, 7) as u32;
    if rank >= EXACT {
        return 0.0;
    }
    // Any hash of both will do.
    let mixed = (index as u32).wrapping_mul(0x9e37_79b1) ^ (rank as u32).wrapping_mul(0x85eb_ca6b);
    ((mixed ^ (mixed >> 15)).wrapping_mul(0x2c1b_3c6d) >> 16) as f32 % (most + 1) as f32
}

/// The first element that is not what it must be after one call, and what that is. An operation may
/// promise nothing of an element.
fn first_wrong(
    operation: BenchOperation,
    rank: usize,
    ranks: usize,
    got: &[f32],
) -> Option<(usize, f32)> {
    let wrong = |(index, &value): (usize, &f32)| {
        let sum = || (0..ranks).map(|rank| given(rank, ranks, index)).sum();
        let slice = index / (got.len() / ranks).max(1);
        let expected = match operation {
            BenchOperation::AllReduce => sum(),
            BenchOperation::ReduceScatter if slice != rank => return None,
            BenchOperation::ReduceScatter => sum(),
            BenchOperation::AllGather => given(slice, ranks, index),
            BenchOperation::Broadcast => given(0, ranks, index),
        };
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
            let given: Vec<f32> = (0..count)
                .map(|index| given(world.rank(), ranks, index))
                .collect();
            let tensor = Tensor::from_slice(&given, &[count], Device::Cpu)
                .unwrap()
                .to_dtype(dtype)
                .unwrap();
            call(operation, &world.group("bench").unwrap(), &tensor, &stream).unwrap();
            tensor
                .to_dtype(DType::F32)
                .unwrap()
                .to_vec::<f32>()
                .unwrap()
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = worlds
                .into_iter()
                .map(|world| scope.spawn(|| rank(world)))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        })
    }

    #[test]
    fn what_collectives_give_is_right() {
        for (ranks, dtype) in [(1, DType::F32), (3, DType::F32), (4, DType::BF16)] {
            let count = ranks * 41;
            for operation in OPERATIONS {
                for (rank, got) in after(operation, ranks, dtype, count).iter().enumerate() {
                    assert_eq!(
                        first_wrong(operation, rank, ranks, got),
                        None,
                        "{operation:?} on {rank} of {ranks}"
                    );
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
            assert_eq!((index, expected), (57, got[57] - 1.0), "{operation:?}");
        }
    }

    #[test]
    fn a_call_that_did_nothing_is_found() {
        for (rank, operation) in OPERATIONS.into_iter().enumerate() {
            let rank = rank.max(1);
            let untouched: Vec<f32> = (0..160).map(|index| given(rank, 4, index)).collect();
            assert!(
                first_wrong(operation, rank, 4, &untouched).is_some(),
                "{operation:?} on {rank}"
            );
        }
    }

    #[test]
    fn sums_of_many_ranks_are_exact_in_bf16() {
        for ranks in [1, 2, 36, 37, 255, 256, 300] {
            let largest = (0..500).map(|index| {
                (0..ranks)
                    .map(|rank| given(rank, ranks, index))
                    .sum::<f32>()
            });
            let largest = largest.fold(0.0, f32::max);
            assert!((1.0..=256.0).contains(&largest), "{ranks} ranks: {largest}");
        }
    }

    #[test]
    fn the_bus_is_counted_as_nccls_tests_count_it() {
        // From the performance notes of NCCL's tests: all_reduce 2(n-1)/n, reduce_scatter and
        // all_gather (n-1)/n, broadcast 1.
        let factors = |ranks| OPERATIONS.map(|operation| operation.bus_factor(ranks));
        assert_eq!(factors(4), [1.5, 0.75, 0.75, 1.0]);
        assert_eq!(factors(1), [0.0, 0.0, 0.0, 1.0]);
    }

    #[test]
    fn elements_are_whole_slices_and_never_none() {
        let sums = |mb| BenchOperation::AllReduce.count(mb, DType::F32, 3);
        assert_eq!([0.000_001, 0.000_004, 7.4].map(sums), [1, 1, 1_850_000]);
        let gathers = |mb| BenchOperation::AllGather.count(mb, DType::BF16, 3);
        // 3 slices of one element; of 5, where that is all; of multiples of 8, which are 16 bytes.
        assert_eq!([0.000_004, 0.000_03, 0.001].map(gathers), [3, 15, 480]);
    }
}
