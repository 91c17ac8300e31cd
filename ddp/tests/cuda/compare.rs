//! Digests on GPUs: `compare` finds no difference between a model that is captured, eager, split
//! over devices or cut into slices, and finds where TF32 begins.

use serde_json::Value;

use crate::gpus_of_jobs;
use crate::support::job::{Folder, all_at_once};

const SMALL: &str = "--data synthetic:classification,rows=72,held-out=0,features=20,classes=3 \
                     --hidden 40,9 --batch-size 24 --steps 9 --log-every 1 --device cuda";

/// What `compare` finds in two runs of this many ranks.
#[track_caller]
fn compared(ranks: usize, flags: [&str; 2], how: &str) -> Value {
    let folder = Folder::new("compare");
    for (name, flags) in ["one", "two"].into_iter().zip(flags) {
        let words = format!("{SMALL} {flags} --out {name}");
        let job = match ranks {
            1 => folder.alone(&words),
            ranks => folder.started(ranks, &words),
        };
        job.on_gpus().run().assert_well();
    }
    let ended = folder
        .alone(&format!("compare one two --json {how}"))
        .on_gpus()
        .run();
    serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{ended}"))
}

#[test]
fn the_same_bits_have_the_same_digests_captured_split_and_sliced() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    let gpus = ddp_kernels::Device::usable().len() - 1;
    let cases = [
        (
            1,
            [
                "--optimizer muon --graph on",
                "--optimizer muon --graph off",
            ],
        ),
        (1, ["", "--devices-per-rank 2"]),
        (2, ["", "--zero 1"]),
    ];
    let cases = cases.into_iter().take(if gpus > 1 { 3 } else { 1 });
    all_at_once(cases, |(ranks, flags)| {
        let value = compared(ranks, flags, "");
        assert_eq!(value["same"], true, "{ranks} ranks, {flags:?}: {value}");
        assert_eq!(value["steps_with_digests"], 9, "{value}");
    });
}

#[test]
fn tf32_parts_from_f32_in_the_loss_of_the_first_step() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    let value = compared(1, ["--dtype f32", "--dtype tf32"], "--replay");
    let first = &value["first"];
    assert_eq!(
        (&first["thing"], &first["step"]),
        (&"loss".into(), &1.into()),
        "{value}"
    );
    assert_eq!(value["differences"][0]["name"], "--dtype", "{value}");
    let found = value["replay"].to_string();
    let layer = "the first difference is in step 1: forward of layer 1 (relu) (micro-batch 0): ";
    assert!(
        found.contains(layer) && !found.contains("its log"),
        "{found}"
    );
}
