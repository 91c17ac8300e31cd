//! Short trainings on simulated GPUs whose losses and weights are pinned to the bit. A real GPU's
//! matmuls add in another order, so these run only on simulated ones.

use crate::orders::machine_of;
use crate::support::golden::{DATA, Golden, TEXT, check};

const CASES: &[Golden] = &[
    Golden {
        name: "gpu: AdamW in f32",
        ranks: 1,
        data: DATA,
        flags: "--epochs 3 --hidden 32,30",
        ways: &["--graph off", "--graph on", "--devices-per-rank 2"],
    },
    Golden {
        name: "gpu: dropout, momentum, GELU, clipping, micro-batches in bf16",
        ranks: 1,
        data: DATA,
        flags: "--epochs 3 --hidden 32,30 --dtype bf16 --micro-batch 9 --activation gelu \
                --dropout 0.2 --optimizer sgd --momentum 0.9 --lr 0.05 --grad-clip 0.5",
        ways: &["--graph off", "--graph on"],
    },
    Golden {
        name: "gpu: two ranks in f32",
        ranks: 2,
        data: DATA,
        flags: "--epochs 3 --hidden 32,30 --dropout 0.1 --grad-clip 0.5 --bucket-mb 0.001",
        ways: &["--graph off", "--graph on", "--graph on --zero 1"],
    },
    Golden {
        name: "gpu: two ranks in bf16, gradients travel in bf16",
        ranks: 2,
        data: DATA,
        flags: "--epochs 2 --hidden 32 --dtype bf16 --reduce-dtype bf16",
        ways: &["--graph off", "--graph on"],
    },
    Golden {
        name: "gpu: two ranks, a transformer in bf16",
        ranks: 2,
        data: TEXT,
        flags: "--epochs 1 --width 32 --dtype bf16",
        ways: &["--graph off", "--graph on --zero 1"],
    },
];

const ON_FOUR: &[Golden] = &[Golden {
    name: "gpu: four ranks, a transformer in bf16",
    ranks: 4,
    data: TEXT,
    flags: "--epochs 1 --width 32 --dtype bf16 --dropout 0.1",
    ways: &["--graph on"],
}];

#[test]
fn simulated_gpus_give_the_pinned_bits() {
    let Some(_gpu) = machine_of(2) else { return };
    check_on_gpus(CASES);
}

#[test]
fn four_simulated_gpus_give_the_pinned_bits() {
    let Some(_gpu) = machine_of(4) else { return };
    check_on_gpus(ON_FOUR);
}

fn check_on_gpus(cases: &[Golden]) {
    check(cases, |case, folder, flags| {
        let flags = format!("{flags} --device cuda --threads 1");
        let job = match case.ranks {
            1 => folder.alone(&flags),
            ranks => folder.ranks(ranks, &flags),
        };
        job.on_gpus().run()
    });
}
