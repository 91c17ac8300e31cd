//! Short trainings on simulated GPUs whose losses and weights are pinned to the bit. A real GPU's
//! matmuls add in another order, so these run only on simulated ones.

use crate::orders::machine_of;
use crate::support::golden::{DATA, Golden, check};

const CASES: &[Golden] = &[
    Golden {
        name: "gpu: dropout, momentum, GELU, clipping, micro-batches in bf16",
        ranks: 1,
        data: DATA,
        flags: "--epochs 3 --hidden 32,30 --dtype bf16 --micro-batch 9 --activation gelu \
                --dropout 0.2 --optimizer sgd --momentum 0.9 --lr 0.05 --grad-clip 0.5",
        ways: &["--graph on"],
    },
    Golden {
        name: "gpu: two ranks in f32",
        ranks: 2,
        data: DATA,
        flags: "--epochs 3 --hidden 32,30 --dropout 0.1 --grad-clip 0.5 --bucket-mb 0.001",
        ways: &["--graph on --zero 1"],
    },
];

#[test]
fn simulated_gpus_give_the_pinned_bits() {
    let Some(_gpu) = machine_of(2) else { return };
    check(CASES, |case, folder, flags| {
        let flags = format!("{flags} --device cuda --threads 1");
        let job = match case.ranks {
            1 => folder.alone(&flags),
            ranks => folder.ranks(ranks, &flags),
        };
        job.on_gpus().run()
    });
}
