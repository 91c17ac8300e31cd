//! What a flag of another program is called here: of PyTorch's scripts, torchrun, Hugging Face's
//! trainer and Lightning.

const RANKS: &str = "start a rank for each GPU: mpirun -n 8 ddp-train";
const MICRO_BATCH: &str = "--batch-size ROWS is the batch of one update, summed over all ranks, and \
                           --micro-batch ROWS what a rank processes at once; gradients accumulate";
const HELD_OUT: &str = "--val-data SPEC, or --val-split F for a part of --data";

/// Names in other programs, and what to write here.
const OTHERS: &[(&[&str], &str)] = &[
    (
        &[
            "gpus",
            "num-gpus",
            "nproc-per-node",
            "n-gpu",
            "world-size",
            "num-processes",
        ],
        RANKS,
    ),
    (
        &["gpu", "cuda", "gpu-id"],
        "--device cuda, or --device cuda:0 for that GPU",
    ),
    (&["devices"], RANKS),
    (
        &[
            "nnodes",
            "node-rank",
            "master-addr",
            "master-port",
            "rdzv-endpoint",
        ],
        "launch/mpirun --hosts a:8,b:8 ddp-train starts ranks on several hosts",
    ),
    (
        &[
            "checkpoint-dir",
            "save-dir",
            "output-dir",
            "log-dir",
            "logdir",
            "output",
            "default-root-dir",
        ],
        "--out DIR",
    ),
    (
        &[
            "accumulate",
            "gradient-accumulation-steps",
            "accumulate-grad-batches",
            "grad-accum",
            "accum-iter",
        ],
        MICRO_BATCH,
    ),
    (
        &["bs", "batch", "train-batch-size"],
        "--batch-size ROWS, summed over all ranks",
    ),
    (
        &["per-device-train-batch-size", "batch-size-per-gpu"],
        "--batch-size ROWS is summed over all ranks: multiply by their number",
    ),
    (
        &["learning-rate", "base-lr", "peak-lr", "alpha"],
        "--lr RATE",
    ),
    (
        &["lr-min", "eta-min", "end-lr", "final-lr"],
        "--min-lr RATE",
    ),
    (
        &[
            "scheduler",
            "lr-scheduler",
            "lr-scheduler-type",
            "lr-schedule",
        ],
        "--schedule NAME",
    ),
    (
        &["warmup", "num-warmup-steps", "warmup-iters"],
        "--warmup-steps N",
    ),
    (
        &["warmup-ratio", "warmup-epochs"],
        "--warmup-steps N, in steps",
    ),
    (
        &["num-epochs", "num-train-epochs", "max-epochs", "n-epochs"],
        "--epochs N",
    ),
    (
        &["max-steps", "num-steps", "iterations", "iters", "max-iters"],
        "--steps N",
    ),
    (&["optim", "opt"], "--optimizer NAME"),
    (&["wd", "l2"], "--weight-decay X"),
    (
        &["adam-beta1", "adam-beta2", "betas"],
        "--beta1 X and --beta2 X",
    ),
    (&["epsilon", "adam-epsilon"], "--eps X"),
    (
        &[
            "clip",
            "max-grad-norm",
            "gradient-clip-val",
            "clip-grad",
            "clip-grad-norm",
            "max-norm",
        ],
        "--grad-clip NORM",
    ),
    (
        &[
            "fp16",
            "bf16",
            "amp",
            "precision",
            "mixed-precision",
            "half",
        ],
        "--dtype bf16",
    ),
    (
        &["fsdp", "deepspeed", "zero-stage"],
        "--zero 1 divides the optimizer's moments among the ranks",
    ),
    (
        &[
            "dataset",
            "data-dir",
            "data-path",
            "train-data",
            "train-file",
            "input",
        ],
        "--data SPEC",
    ),
    (
        &["label", "target", "targets", "label-column"],
        "--labels SPEC",
    ),
    (
        &[
            "test-data",
            "eval-data",
            "validation-file",
            "valid-data",
            "test-size",
            "validation-split",
        ],
        HELD_OUT,
    ),
    (
        &[
            "layers",
            "hidden-size",
            "hidden-sizes",
            "hidden-dim",
            "units",
        ],
        "--hidden WIDTHS, as in 256,128",
    ),
    (
        &[
            "save-steps",
            "save-every",
            "save-interval",
            "checkpoint-interval",
        ],
        "--checkpoint-every N",
    ),
    (&["save-total-limit", "save-top-k"], "--keep N"),
    (
        &["eval-steps", "eval-interval", "val-interval"],
        "--eval-every N",
    ),
    (
        &[
            "logging-steps",
            "log-interval",
            "log-every-n-steps",
            "print-freq",
        ],
        "--log-every N",
    ),
    (
        &["resume-from-checkpoint", "ckpt-path", "continue"],
        "--resume auto",
    ),
    (
        &["checkpoint", "pretrained", "weights", "load"],
        "--init-from FILE starts from its parameters; --resume auto continues the run in --out",
    ),
    (&["random-state", "random-seed", "manual-seed"], "--seed N"),
    (
        &["num-workers", "workers", "num-threads"],
        "--threads N; rows are read by a thread of each rank",
    ),
    (&["bucket-cap-mb"], "--bucket-mb MB"),
    (&["verbose"], "--log-level debug"),
    (&["quiet", "silent"], "--progress never --log-level error"),
    (
        &["standardize", "normalise", "scale"],
        "--normalize standard",
    ),
];

/// What to write here for the flag `name`, given without dashes in front.
pub(super) fn here(name: &str) -> Option<&'static str> {
    let known = OTHERS.iter().find(|(names, _)| names.contains(&name));
    known.map(|(_, here)| *here)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SETTINGS;

    #[test]
    fn no_name_of_ours_and_no_name_twice_is_among_those_of_others() {
        let mut names: Vec<&str> = OTHERS
            .iter()
            .flat_map(|(names, _)| *names)
            .copied()
            .collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        let is_ours = |name: &&&str| SETTINGS.iter().any(|setting| setting.name() == **name);
        assert_eq!(names.iter().find(is_ours), None);
    }

    #[test]
    fn every_flag_that_is_advised_exists() {
        let words = OTHERS
            .iter()
            .flat_map(|(_, here)| here.split([' ', ',', ';', ':']));
        for flag in words.filter_map(|word| word.strip_prefix("--")) {
            let is_setting = SETTINGS.iter().any(|setting| setting.name() == flag);
            assert!(is_setting || flag == "hosts", "--{flag}");
        }
    }
}
