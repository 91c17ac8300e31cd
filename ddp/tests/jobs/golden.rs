//! Short trainings on the CPU whose losses and weights are pinned to the bit.

use crate::support::golden::{DATA, Golden, TEXT, check};

const ONE: &[Golden] = &[
    Golden {
        name: "cpu: default perceptron, AdamW",
        ranks: 1,
        data: "--data synthetic:classification,rows=1000,held-out=100,features=40,classes=10",
        flags: "--epochs 2",
        ways: &["--threads 1", "--threads 2"],
    },
    Golden {
        name: "cpu: dropout, momentum, GELU, clipping, micro-batches",
        ranks: 1,
        data: DATA,
        flags: "--epochs 3 --micro-batch 9 --hidden 32,30 --activation gelu \
                --dropout 0.2 --optimizer sgd --momentum 0.9 --lr 0.05 --grad-clip 0.5 \
                --label-smoothing 0.1 --threads 1",
        ways: &[""],
    },
    Golden {
        name: "cpu: regression",
        ranks: 1,
        data: "--data synthetic:regression,rows=135,held-out=27,features=20,outputs=32 --batch-size 36",
        flags: "--epochs 2 --hidden 32 --activation gelu-tanh --threads 1",
        ways: &[""],
    },
    Golden {
        name: "cpu: a transformer as GPT-2",
        ranks: 1,
        data: TEXT,
        flags: "--epochs 2 --dropout 0.1 --micro-batch 3",
        ways: &["--threads 1", "--threads 2"],
    },
];

/// A table, with the defaults of version 0.8, whose program made these bits.
macro_rules! plain_table {
    ($part:literal) => {
        concat!(
            "--plain --data ",
            env!("CARGO_MANIFEST_DIR"),
            "/../tests/golden/table.csv",
            $part
        )
    };
}

const PLAIN: &[Golden] = &[
    Golden {
        name: "cpu: 0.8's defaults, a table with classes",
        ranks: 1,
        data: plain_table!("#rooms,age --labels kind --missing mean"),
        flags: "--batch-size 32 --threads 1 --cache-dir cache",
        ways: &[""],
    },
    Golden {
        name: "cpu: 0.8's defaults, a table with numbers",
        ranks: 1,
        data: plain_table!(" --labels rent --drop id --categorical auto --missing mean"),
        flags: "--normalize standard --val-split 0.2 --batch-size 32 --epochs 3 --threads 1 --cache-dir cache",
        ways: &[""],
    },
];

const SEVERAL: &[Golden] = &[
    Golden {
        name: "cpu: two ranks",
        ranks: 2,
        data: DATA,
        flags: "--epochs 3 --hidden 32,30 --dropout 0.1 --grad-clip 0.5 \
                --bucket-mb 0.001 --threads 1",
        ways: &["--overlap on", "--overlap off", "--zero 1"],
    },
    Golden {
        name: "cpu: two ranks, gradients travel in bf16",
        ranks: 2,
        data: DATA,
        flags: "--epochs 2 --hidden 32 --optimizer sgd --reduce-dtype bf16 \
                --threads 1",
        ways: &[""],
    },
    Golden {
        name: "cpu: three ranks",
        ranks: 3,
        data: DATA,
        flags: "--epochs 2 --hidden 32 --threads 1",
        ways: &[""],
    },
    Golden {
        name: "cpu: four ranks",
        ranks: 4,
        data: DATA,
        flags: "--epochs 2 --hidden 32 --dropout 0.1 --grad-clip 0.5 --bucket-mb 0.001 --threads 1",
        ways: &["--overlap on", "--zero 1"],
    },
    Golden {
        name: "cpu: four ranks, ZeRO-2 with micro-batches",
        ranks: 4,
        data: DATA,
        flags: "--epochs 2 --hidden 32 --micro-batch 3 --bucket-mb 0.001 --zero 2 --threads 1",
        ways: &[""],
    },
    Golden {
        name: "cpu: four ranks, gradients travel in bf16",
        ranks: 4,
        data: DATA,
        flags: "--epochs 2 --hidden 32 --optimizer sgd --reduce-dtype bf16 --threads 1",
        ways: &["", "--zero 1"],
    },
    Golden {
        name: "cpu: four ranks in bf16, along a tree",
        ranks: 4,
        data: DATA,
        flags: "--epochs 2 --hidden 32 --reduce-dtype bf16 --same-bits 6 --threads 1",
        ways: &["", "--zero 1"],
    },
    Golden {
        name: "cpu: four ranks in bf16",
        ranks: 4,
        data: DATA,
        flags: "--epochs 2 --hidden 32 --dtype bf16 --threads 1",
        ways: &["", "--zero 1"],
    },
    Golden {
        name: "cpu: five ranks",
        ranks: 5,
        data: DATA,
        flags: "--epochs 2 --hidden 32 --grad-clip 0.5 --threads 1",
        ways: &[""],
    },
    Golden {
        name: "cpu: eight ranks",
        ranks: 8,
        data: DATA,
        flags: "--epochs 2 --hidden 32 --threads 1",
        ways: &["", "--zero 2"],
    },
    Golden {
        name: "cpu: two ranks, a transformer as Llama",
        ranks: 2,
        data: TEXT,
        flags: "--norm rms --position rope --mlp swiglu --kv-heads 1 --tied false --bias false \
                --epochs 2 --bucket-mb 0.01 --threads 1",
        ways: &["--overlap on", "--zero 1"],
    },
];

#[test]
fn one_process_gives_the_pinned_bits() {
    check(ONE, |_, folder, flags| folder.alone(flags).run());
}

#[test]
fn plain_gives_the_bits_of_version_0_8() {
    check(PLAIN, |_, folder, flags| folder.alone(flags).run());
}

#[test]
fn ranks_give_the_pinned_bits() {
    check(SEVERAL, |case, folder, flags| {
        folder.ranks(case.ranks, flags).run()
    });
}
