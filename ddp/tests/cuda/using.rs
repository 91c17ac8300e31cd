//! `ddp-train eval` and `ddp-train predict` on GPUs, under the real `mpirun`: as many ranks as GPUs
//! give what one gives, and what the CPU gives within rounding.

use ddp_kernels::{Device, Tensor};
use serde_json::Value;

use crate::gpus_of_jobs;
use crate::support::job::{Folder, Job};
use crate::support::metrics_log::{model, number};

const DATA: &str = "--data glyphs,rows=256,held-out=301";

#[track_caller]
fn trained(flags: &str) -> Folder {
    let folder = Folder::new("using");
    let words = format!(
        "{DATA} --hidden 16 --batch-size 32 --epochs 2 --lr 0.01 --out OUT --threads 1 --device cuda {flags}"
    );
    folder.alone(&words).on_gpus().run().assert_well();
    folder
}

#[track_caller]
fn evaluated(job: Job) -> Value {
    let ended = job.on_gpus().run();
    ended.assert_well();
    serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended}"))
}

#[test]
fn gpus_say_what_the_cpu_says_and_any_number_of_them_the_same() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    let gpus = (Device::usable().len() - 1).min(3);
    for (flags, unit) in [
        ("", f64::from(f32::EPSILON) / 2.0),
        ("--dtype bf16", 2f64.powi(-8)),
    ] {
        let folder = trained(flags);
        let use_it = |device: &str| {
            format!("--checkpoint OUT {DATA} --batch-size 64 --threads 1 --device {device}")
        };
        let found = evaluated(folder.alone(&format!("eval {} --json", use_it("cuda"))));
        assert_eq!(found["rows"], 301);
        folder
            .alone(&format!("predict {} --out 1.npy --logits", use_it("cuda")))
            .on_gpus()
            .run()
            .assert_well();
        for ranks in 2..=gpus {
            assert_eq!(
                evaluated(folder.ranks(ranks, &format!("eval {} --json", use_it("cuda")))),
                found,
                "{ranks} ranks {flags}"
            );
            let words = format!("predict {} --out {ranks}.npy --logits", use_it("cuda"));
            folder.ranks(ranks, &words).on_gpus().run().assert_well();
            let file = |name: String| std::fs::read(folder.path().join(name)).unwrap();
            assert!(
                file(format!("{ranks}.npy")) == file("1.npy".into()),
                "{ranks} ranks {flags}"
            );
        }
        folder
            .alone(&format!("predict {} --out cpu.npy --logits", use_it("cpu")))
            .run()
            .assert_well();
        let logits = |name: &str| {
            Tensor::load_npy(folder.path().join(name), Device::Cpu)
                .unwrap()
                .to_vec::<f32>()
                .unwrap()
        };
        let bound = bound(&folder, unit);
        let worst = logits("1.npy")
            .iter()
            .zip(logits("cpu.npy"))
            .map(|(a, b)| f64::from((a - b).abs()))
            .fold(0.0, f64::max);
        assert!(worst <= bound, "{worst} is above {bound} {flags}");
        let at_cpu = evaluated(folder.alone(&format!("eval {} --json", use_it("cpu"))));
        let apart = (number(&at_cpu, "loss") - number(&found, "loss")).abs();
        // A loss moves by at most twice as much as the logits.
        assert!(
            apart <= 2.0 * bound + 301.0 * f64::from(f32::EPSILON),
            "{apart} is above twice {bound} {flags}"
        );
    }
}

/// How far two logits may differ, one computed in f32, the other with unit roundoff `unit`. A
/// hidden number is at most the sum of its weights' magnitudes times its features', and is off by
/// `unit` for its features, its weights and itself, and by f32's for each of 784 additions; a logit
/// likewise.
fn bound(folder: &Folder, unit: f64) -> f64 {
    let model = model(&folder.out(), 16);
    let f32_unit = f64::from(f32::EPSILON) / 2.0;
    let largest_row = |weight: &str, bias: &str, each: &[f64]| -> Vec<f64> {
        let ((shape, weight), (_, bias)) = (&model[weight], &model[bias]);
        let row = |(row, bias): (&[f32], &f32)| {
            row.iter()
                .zip(each)
                .map(|(w, x)| f64::from(w.abs()) * x)
                .sum::<f64>()
                + f64::from(bias.abs())
        };
        weight.chunks(shape[1]).zip(bias).map(row).collect()
    };
    let hidden = largest_row("0.weight", "0.bias", &largest_features());
    let off: Vec<f64> = hidden
        .iter()
        .map(|size| size * (4.0 * unit + 2.0 * 785.0 * f32_unit))
        .collect();
    let (second, biases) = (&model["2.weight"].1, vec![0f32; 10]);
    let carried = second.chunks(16).zip(&biases).map(|(row, _)| {
        row.iter()
            .zip(&off)
            .map(|(w, off)| f64::from(w.abs()) * off)
            .sum::<f64>()
    });
    let own = largest_row("2.weight", "2.bias", &hidden);
    carried
        .zip(own)
        .map(|(carried, size)| carried + size * (4.0 * unit + 2.0 * 17.0 * f32_unit))
        .fold(0.0, f64::max)
}

/// Each feature's largest magnitude over the rows.
fn largest_features() -> Vec<f64> {
    let rows = ddp::data::open(&DATA[7..].parse().unwrap())
        .unwrap()
        .held_out;
    let numbers: Vec<u64> = (0..rows.rows()).collect();
    let [x, _] = ddp::data::read_rows(&*rows, &numbers).unwrap();
    let x = x.to_vec::<f32>().unwrap();
    (0..784)
        .map(|feature| {
            x.chunks(784)
                .map(|row| f64::from(row[feature].abs()))
                .fold(0.0, f64::max)
        })
        .collect()
}
