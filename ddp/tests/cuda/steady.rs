//! After its first steps a training allocates nothing, and only batches and a few numbers cross
//! between host and GPU.

use std::collections::BTreeMap;

use ddp::config::{GraphChoice, Precision};
use ddp_kernels::transfer::{Ledger, Phase, TransferKind, with_ledger};
use ddp_kernels::{Device, memory};

use crate::{Setup, gpu};

/// Enough for every kind of step to have been captured and launched.
const WARM_UP: u64 = 16;
const STEPS: u64 = 10;

/// Everything that a step can have, in epochs of three batches and a short one.
fn setup() -> Setup {
    let plain = Setup::new("glyphs,rows=50,held-out=0");
    Setup {
        dropout: 0.25,
        clip_norm: 0.5,
        micro: Some(5),
        ..plain
    }
}

fn ways() -> [(GraphChoice, Precision); 3] {
    [
        (GraphChoice::Off, Precision::F32),
        (GraphChoice::On, Precision::F32),
        (GraphChoice::On, Precision::Bf16),
    ]
}

#[test]
fn a_steady_training_makes_no_tensor_on_any_side() {
    let Some(gpu) = gpu() else { return };
    let device = gpu.device;
    for (graph, precision) in ways() {
        let mut training = Setup {
            precision,
            ..setup()
        }
        .start(device, graph)
        .unwrap();
        (0..WARM_UP).for_each(|step0| training.take(step0, 0.01, step0 % 5 == 0).unwrap());
        // Other tests of this process count too, because allocations are not counted by thread. So
        // the smallest of several windows counts.
        let mut least = [u64::MAX; 3];
        let mut next = WARM_UP;
        for _ in 0..4 {
            let counts = || {
                [
                    memory::stats(device),
                    memory::stats(Device::Cpu),
                    memory::pinned_stats(),
                ]
                .map(|s| s.allocation_count)
            };
            let before = counts();
            (next..next + STEPS)
                .for_each(|step0| training.take(step0, 0.01, step0 % 5 == 0).unwrap());
            next += STEPS;
            for ((least, after), before) in least.iter_mut().zip(counts()).zip(before) {
                *least = (*least).min(after - before);
            }
        }
        assert_eq!(
            least, [0; 3],
            "on the GPU, in host memory, in pinned memory; graph {graph:?}, {precision:?}"
        );
    }
}

#[test]
fn only_batches_numbers_and_logs_cross() {
    let Some(gpu) = gpu() else { return };
    let device = gpu.device;
    for (graph, precision) in ways() {
        let mut training = Setup {
            precision,
            ..setup()
        }
        .start(device, graph)
        .unwrap();
        let ledger = Ledger::new();
        // The first step brings the optimizer's table of chunks to the GPU.
        training.take(0, 0.01, true).unwrap();
        with_ledger(&ledger, || {
            (1..=STEPS).for_each(|step0| training.take(step0, 0.01, step0 % 5 == 0).unwrap());
            training.step.report().unwrap();
        });
        let mut seen = BTreeMap::new();
        for row in ledger.rows() {
            assert!(!row.implicit, "{row:?}");
            *seen
                .entry((row.kind == TransferKind::Upload, row.announced))
                .or_insert(0) += row.count;
        }
        let expected = [
            // Statistics, two flags, scale and norm.
            ((false, Some("the log")), 4),
            // Positions and rates together.
            ((true, Some("numbers of the step")), STEPS),
            // Features and targets.
            ((true, Some("the batch of this step")), 2 * STEPS),
        ];
        assert_eq!(seen, BTreeMap::from(expected), "graph {graph:?}");
        let in_steps: u64 = ledger
            .rows()
            .iter()
            .filter(|row| row.phase == Phase::Step)
            .map(|row| row.count)
            .sum();
        assert_eq!(in_steps, STEPS, "a step itself sends its numbers");
    }
}
