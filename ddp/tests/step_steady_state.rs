//! After its first steps a rank allocates nothing in a step, communication included.

mod support;

use std::sync::{Arc, Barrier};

use crate::support::random::uniform;
use crate::support::training::{Case, on_ranks, quietly};
use counting::allocations;
use ddp::Result;
use ddp::optim::Rule;
use ddp_comm::World;
use ddp_kernels::{DType, Device, memory};

#[path = "../../tests/counting.rs"]
mod counting;
#[global_allocator]
static COUNTING: counting::Counting = counting::Counting;

const STEPS: u64 = 20;
const WINDOWS: u64 = 8;

/// The smallest number of heap allocations that `size` ranks made together in `STEPS` steps, of
/// `WINDOWS` tries: the harness, or a thread's first use of a buffer, may add to some.
fn heap_allocations(case: &Case, size: usize) -> u64 {
    let together = Arc::new(Barrier::new(size));
    let run = |world: &World| -> Result<u64> {
        let mut step = case.step(world)?;
        let mut loader = case.loader(world)?;
        let mut number = 0;
        let mut steps = |count: u64| -> Result<()> {
            for _ in 0..count {
                step.run(loader.load(number)?, 1e-3)?;
                number += 1;
            }
            Ok(())
        };
        steps(5)?;
        together.wait();
        let tensors = memory::stats(Device::Cpu).allocation_count;
        let mut least = u64::MAX;
        for _ in 0..WINDOWS {
            together.wait();
            let before = allocations();
            together.wait();
            steps(STEPS)?;
            together.wait();
            least = least.min(allocations() - before);
        }
        together.wait();
        assert_eq!(
            memory::stats(Device::Cpu).allocation_count,
            tensors,
            "a step made a tensor's memory"
        );
        Ok(least)
    };
    on_ranks(size, None, run)[0]
}

#[test]
fn a_step_with_its_reductions_takes_nothing_from_the_system() {
    quietly();
    let ways = [(false, DType::F32), (true, DType::F32), (true, DType::BF16)];
    for (zero, (overlap, reduce_dtype)) in [false, true]
        .into_iter()
        .flat_map(|zero| ways.map(|way| (zero, way)))
    {
        let case = Case {
            zero,
            // Muon has AdamW's updates, too.
            rule: if overlap { Rule::muon() } else { Rule::adamw() },
            clip_norm: 1.0,
            dropout: 0.1,
            overlap,
            reduce_dtype,
            batch: 8,
            ..Case::regression(4096, uniform)
        };
        for ranks in [1, 2] {
            assert_eq!(
                heap_allocations(&case, ranks),
                0,
                "{ranks} ranks, overlap {overlap}, reduced in {reduce_dtype}, ZeRO-1 {zero}"
            );
        }
    }
}
