//! Training on simulated GPUs in many orders: in any order that CUDA allows, nothing races and the
//! model has the same bytes.
//!
//! Every job is a separate process, because the simulator reads its seed when it is loaded. There
//! are 1000 seeds, of which a few run.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::support::job::{Folder, Job, all_at_once};
use crate::support::metrics_log::model_bytes;
use crate::support::test_name;
use crate::{Gpu, gpus_of_jobs};

/// A step with everything that waits: several buckets, two micro-batches, clipping, AdamW, and
/// evaluations. The host seldom waits for a device, because that would impose an order. Eight
/// steps: each of the loader's two slots runs eagerly once, is captured once, and is launched.
pub(crate) const TRAINING: &str = "--data glyphs,rows=192,held-out=8 --hidden 16 --batch-size 24 --micro-batch 6 --bucket-mb 0.02 \
                                   --grad-clip 0.1 --epochs 1 --log-every 100 --eval-every 5 --threads 1 --timeout-s 60 --out OUT \
                                   --device cuda";
pub(crate) const STEPS: u64 = 8;

/// Jobs at a time.
const SIDE_BY_SIDE: usize = 3;

/// One way of training.
pub(crate) struct Way {
    pub(crate) ranks: usize,
    /// How many GPUs the job takes.
    pub(crate) gpus: usize,
    pub(crate) flags: &'static str,
}

const fn way(ranks: usize, gpus: usize, flags: &'static str) -> Way {
    Way { ranks, gpus, flags }
}

// Ways of several ranks: not even ZeRO-1 changes a bit where two ranks are added.
const EAGER: [Way; 2] = [
    way(2, 2, "--graph off --data-on-device off"),
    way(2, 2, "--graph off --data-on-device on --zero 1"),
];
const CAPTURED: [Way; 2] = [
    way(2, 2, "--graph on --data-on-device on"),
    way(2, 2, "--graph on --data-on-device off --zero 1"),
];
const SPLIT: [Way; 2] = [
    way(2, 4, "--devices-per-rank 2"),
    way(2, 4, "--devices-per-rank 2 --data-on-device off --zero 1"),
];

// Ways of one rank.
const EAGER_ALONE: [Way; 2] = [
    way(1, 1, "--graph off"),
    way(1, 1, "--graph off --data-on-device off"),
];
const CAPTURED_ALONE: [Way; 2] = [
    way(1, 1, "--graph on"),
    way(1, 1, "--graph on --data-on-device off"),
];
const SPLIT_ALONE: [Way; 2] = [
    way(1, 2, "--devices-per-rank 2"),
    way(1, 2, "--devices-per-rank 2 --data-on-device off"),
];

// Ways of the same shards.
const SHARDS_ALONE: Way = way(1, 4, "--same-bits 4 --graph off");
const SHARDS: [Way; 5] = [
    way(2, 4, "--same-bits 4 --graph off"),
    way(3, 4, "--same-bits 4 --graph on --data-on-device on"),
    way(4, 4, "--same-bits 4 --graph on --zero 1"),
    way(3, 4, "--same-bits 4 --zero 1 --data-on-device off"),
    way(2, 4, "--same-bits 4 --devices-per-rank 2"),
];

impl Way {
    /// The job. Rank 0 has `variables` (NAME=VALUE) in its environment.
    pub(crate) fn job(&self, folder: &Folder, variables: &str) -> Job {
        // What a shell is given as "$@" is the program and its words.
        let before = match self.ranks {
            1 => format!("set -- env {variables} \"$@\""),
            ranks => {
                // As launchers tell a rank who it is.
                let rank = "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}";
                let own =
                    format!("[ \"{rank}\" != 0 ] || exec env {variables} \"$@\"; exec \"$@\"");
                format!(
                    "set -- mpirun --oversubscribe --bind-to none -n {ranks} sh -c '{own}' sh \"$@\""
                )
            }
        };
        let job = folder
            .in_shell(&before, &format!("{TRAINING} {}", self.flags))
            .on_gpus();
        // Test machines are often containers, in which everybody is root.
        let job = job
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        job.env("SIMCUDA_DEVICES", &self.gpus.to_string())
    }

    /// The model of a job that goes well and has nothing to complain of, in the order of `seed`.
    #[track_caller]
    fn model(&self, seed: u64) -> Vec<u8> {
        let folder = Folder::new("orders");
        let job = self.job(&folder, "").env("SIMCUDA_SEED", &seed.to_string());
        let ended = job.env("SIMCUDA_NCCL_CHECK", "1").run();
        ended.assert_well();
        assert!(
            !ended.stderr.contains("simcuda:"),
            "{}, seed {seed}: {ended}",
            self.flags
        );
        model_bytes(&folder.out(), STEPS)
    }
}

/// A machine with exactly as many simulated GPUs as a test needs: a larger one would only repeat
/// it.
pub(crate) fn machine_of(gpus: usize) -> Option<Gpu> {
    let machine = gpus_of_jobs(1)?;
    let there = ddp_kernels::device::discover()
        .gpus
        .iter()
        .filter(|gpu| gpu.name.contains("Simulated"))
        .count();
    if there != gpus {
        // With more GPUs a test does not lack any: these words are not taken for that.
        let needed = if there < gpus {
            format!("{gpus} simulated CUDA devices are needed")
        } else {
            format!("a machine of exactly {gpus} simulated GPUs is needed")
        };
        ddp_testing::skip(&format!("{needed}, {there} found"));
    }
    (there == gpus).then_some(machine)
}

/// A few seeds of this many.
fn seeds(all: usize) -> Vec<u64> {
    let seeds = ddp_testing::cases(&test_name(), all, 2);
    seeds.into_iter().map(|seed| seed as u64).collect()
}

/// Runs `body` with each of `cases`, a few at a time.
pub(crate) fn side_by_side<C: Sync>(cases: &[C], body: impl Fn(&C) + Sync) {
    let next = AtomicU64::new(0);
    all_at_once(0..SIDE_BY_SIDE, |_| {
        while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
            body(case);
        }
    });
}

/// Trains in the order of each of 1000 seeds, in one way of each of `kinds`, and expects the model
/// that `before` gives, without a finding of the simulator.
fn come_to_one_model(before: &Way, kinds: &[&[Way]]) {
    come_to_one_model_in(before, kinds, &seeds(1000));
}

/// The same in the orders of these seeds.
fn come_to_one_model_in(before: &Way, kinds: &[&[Way]], seeds: &[u64]) {
    let model = before.model(0);
    let of_seed = |&seed: &u64| {
        kinds
            .iter()
            .map(move |ways| (&ways[seed as usize % ways.len()], seed))
    };
    let cases: Vec<(&Way, u64)> = seeds.iter().flat_map(of_seed).collect();
    side_by_side(&cases, |(way, seed)| {
        assert!(
            way.model(*seed) == model,
            "{} with seed {seed} comes to another model",
            way.flags
        );
    });
}

#[test]
fn one_rank_comes_to_one_model_in_any_order() {
    let Some(_gpu) = machine_of(1) else { return };
    come_to_one_model(&EAGER_ALONE[0], &[&EAGER_ALONE, &CAPTURED_ALONE]);
}

#[test]
fn two_ranks_come_to_one_model_in_any_order() {
    let Some(_gpu) = machine_of(2) else { return };
    come_to_one_model(&EAGER[0], &[&EAGER, &CAPTURED]);
}

#[test]
fn a_split_model_is_the_unsplit_one_in_any_order() {
    let Some(_gpu) = machine_of(2) else { return };
    come_to_one_model(&EAGER_ALONE[0], &[&SPLIT_ALONE]);
}

#[test]
fn split_models_of_two_ranks_are_the_unsplit_one_in_any_order() {
    let Some(_gpu) = machine_of(4) else { return };
    come_to_one_model(&EAGER[0], &[&SPLIT]);
}

#[test]
fn with_shards_any_number_of_ranks_comes_to_the_model_of_one_in_any_order() {
    let Some(_gpu) = machine_of(4) else { return };
    come_to_one_model_in(&SHARDS_ALONE, &[&SHARDS], &seeds(100));
}
