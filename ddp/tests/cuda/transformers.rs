//! Transformers on GPUs, through the program: a captured step is bit-identical to an eager one,
//! also where backward recomputes activations; so is a step over several devices. Losses are those
//! of the CPU up to rounding.

use crate::support::job::{Folder, Job, all_at_once};
use crate::support::metrics_log::{MetricsLog, model_bytes};
use crate::support::test_name;
use crate::{gpus_of_jobs, is_simulated, simulated_gpus_of_jobs};

const VIT: &str = "--model vit,layers=1,heads=2,width=8,patch=14,pool=class \
                   --data glyphs,rows=8,held-out=0 --batch-size 4 --epochs 2 --log-every 1 \
                   --dropout 0.1 --micro-batch 3 --threads 1 --out OUT";
/// 2 steps in each epoch.
const STEPS: u64 = 4;

/// The losses of a run, and the bytes of its model.
fn run(words: &str) -> (Vec<f64>, Vec<u8>) {
    let folder = Folder::new("transformers");
    let ended = folder.alone(words).on_gpus().run();
    ended.assert_well();
    (
        folder.metrics_log().losses(),
        model_bytes(&folder.out(), STEPS),
    )
}

#[test]
fn patches_are_learned_as_on_the_cpu_captured_and_eager() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    let (cpu, _) = run(&format!("{VIT} --device cpu"));
    for (dtype, apart_max) in [("f32", 1e-4), ("bf16", 0.05)] {
        let [captured, eager] = ["on", "off"].map(|graph| {
            run(&format!(
                "{VIT} --device cuda --dtype {dtype} --graph {graph}"
            ))
        });
        assert!(captured == eager, "{dtype}");
        for recompute in ddp_testing::cases_of(dtype, ["attention", "block"], 1) {
            let flags = format!("--device cuda --dtype {dtype} --recompute {recompute}");
            assert!(run(&format!("{VIT} {flags}")) == captured, "{flags}");
        }
        for (gpu, cpu) in captured.0.iter().zip(&cpu) {
            let apart = (gpu - cpu).abs();
            assert!(
                apart < apart_max,
                "{dtype}: {gpu} on the GPU, {cpu} on the CPU"
            );
        }
    }
}

/// What downloaded models have beyond a plain Llama: norms of queries and keys, norms after a part,
/// windows, gates of GELU, stretched and partial rotary positions, tokens that are not trained.
#[test]
fn families_of_downloaded_models_learn_as_on_the_cpu_captured_and_eager() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    let folder = with_text();
    let llama = "--model gpt,layers=2,heads=2,width=16,context=16,vocab=300,norm=rms,position=rope,\
                 bias=false";
    for (name, settings) in [
        (
            "qwen",
            "mlp=swiglu,qkv-bias=true,head-size=12,qk-norm=head,rope-scaling=llama3:8:1:4:8",
        ),
        (
            "olmo",
            "mlp=swiglu,norm-place=after,qk-norm=heads,rope-skip=2,untrained-tokens=101",
        ),
        (
            "gemma",
            "mlp=geglu,norm-place=both,window=5,window-skip=2,window-rope-base=50,\
             scale-embedding=true,attention-scalar=3,rope-share=0.5,kv-heads=1",
        ),
        (
            "gemma2",
            "mlp=geglu,norm-place=both,window=5,window-skip=2,attention-cap=0.5,logit-cap=0.5",
        ),
    ] {
        let run = |how: &str| {
            let out = format!("{name}{}", how.replace(' ', ""));
            let words = format!(
                "{llama},{settings} --data t.txt --batch-size 4 --threads 1 --steps 3 --lr 0.01 \
                 --log-every 1 --device {how} --out {out}"
            );
            folder.alone(&words).on_gpus().run().assert_well();
            let out = folder.path().join(out);
            (MetricsLog::read(&out).losses(), model_bytes(&out, 3))
        };
        let cpu = run("cpu");
        for (dtype, apart_max) in ddp_testing::cases_of(name, [("f32", 1e-4), ("bf16", 0.05)], 1) {
            let captured = run(&format!("cuda --dtype {dtype} --graph on"));
            assert!(captured == run(&format!("cuda --dtype {dtype} --graph off")));
            for (gpu, cpu) in captured.0.iter().zip(&cpu.0) {
                let apart = (gpu - cpu).abs();
                assert!(
                    apart < apart_max,
                    "{name}, {dtype}: {gpu} on the GPU, {cpu}"
                );
            }
        }
    }
}

/// Of layers in one part and in three, with dropout, beside a base in f32 or bf16.
#[test]
fn adapters_learn_as_on_the_cpu_captured_eager_and_split() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    let folder = with_text();
    let run = |out: &str, words: &str| {
        let model = "--model gpt,layers=2,heads=2,width=8,context=8 --data t.txt --batch-size 4";
        let words = format!("{model} --threads 1 --steps 4 --log-every 1 {words} --out {out}");
        folder.alone(&words).on_gpus().run().assert_well();
        let out = folder.path().join(out);
        (MetricsLog::read(&out).losses(), model_bytes(&out, 4))
    };
    run("base", "--device cpu");
    for (dtype, apart_max) in [("f32", 1e-4), ("bf16", 0.05)] {
        let adapted = |how: &str| {
            let out = format!("{dtype}{}", how.replace(' ', ""));
            let lora = "--init-from base --lora rank=2,alpha=8,dropout=0.2 --lr 0.02";
            run(
                &out,
                &format!("{lora} --warmup-steps 0 --dtype {dtype} --device {how}"),
            )
        };
        let (cpu, captured) = (adapted("cpu"), adapted("cuda --graph on"));
        assert!(captured == adapted("cuda --graph off"), "{dtype}");
        if dtype == "bf16" && ddp_kernels::Device::usable().len() > 2 {
            assert!(captured == adapted("cuda --devices-per-rank 2"));
        }
        for (gpu, cpu) in captured.0.iter().zip(&cpu.0) {
            assert!(
                (gpu - cpu).abs() < apart_max,
                "{dtype}: {gpu} on the GPU, {cpu}"
            );
        }
    }
}

#[test]
fn a_sample_is_what_generate_makes_of_the_checkpoint_also_of_split_layers_in_bf16() {
    let Some(_gpu) = gpus_of_jobs(2) else { return };
    let folder = Folder::new("sample");
    std::fs::write(folder.path().join("t.txt"), "To be. ".repeat(40)).unwrap();
    let words = "--model gpt,layers=2,heads=2,width=8,context=8 --data t.txt --steps 2 \
                 --batch-size 4 --dtype bf16 --device cuda --devices-per-rank 2 --threads 1 \
                 --seed 3 --sample To --out OUT";
    folder.alone(words).on_gpus().run().assert_well();
    let words = "generate --checkpoint OUT --prompt To --max-tokens 64 --seed 3";
    let made = folder.alone(words).run();
    let text = made.stdout.strip_suffix('\n').unwrap();
    assert_eq!(folder.metrics_log().all("sample")[0]["text"], text);
}

/// Its head is tied to the embedding.
const GPT: &str = "--model gpt,layers=3,heads=1,width=16,context=8 --data t.txt --val-split 0.05 \
                   --batch-size 8 --eval-every 2 --log-every 1 --schedule constant --warmup-steps 0 \
                   --dropout 0.1 --grad-clip 0.5 --threads 1 --device cuda --out OUT";

fn with_text() -> Folder {
    let folder = Folder::new("tied");
    std::fs::write(folder.path().join("t.txt"), "To be, or not. ".repeat(60)).unwrap();
    folder
}

/// The losses and the model after this many steps of these words in the folder.
#[track_caller]
fn trained(folder: &Folder, ranks: usize, steps: u64, words: &str) -> (Vec<f64>, Vec<u8>) {
    let words = format!("{GPT} --steps {steps} {words}");
    let job = match ranks {
        1 => folder.alone(&words),
        _ => folder.ranks(ranks, &words),
    };
    let ended = job.on_gpus().run();
    ended.assert_well();
    assert!(!ended.stderr.contains("simcuda:"), "{ended}");
    (
        folder.metrics_log().losses(),
        model_bytes(&folder.out(), steps),
    )
}

#[test]
fn a_tied_gpt_split_over_devices_is_the_one_on_one_device() {
    let Some(_gpu) = gpus_of_jobs(2) else { return };
    let gpus = ddp_kernels::Device::usable().len() - 1;
    let cases = [
        (1, "--micro-batch 3"),
        (1, "--dtype bf16 --recompute block"),
        (1, "--optimizer muon --micro-batch 3 --dtype bf16"),
        (2, "--zero 1 --dtype bf16 --micro-batch 3 --bucket-mb 0.01"),
        (2, "--reduce-dtype bf16"),
    ];
    let cases = cases.into_iter().filter(|(ranks, _)| ranks * 2 <= gpus);
    // With 4 devices the head, as large as a block, is a part.
    let cases = cases.flat_map(|(ranks, flags)| {
        (2..=gpus.min(4) / ranks).map(move |parts| (ranks, flags, parts))
    });
    all_at_once(
        ddp_testing::cases_of(&test_name(), cases, 2),
        |(ranks, flags, parts)| {
            let whole = trained(&with_text(), ranks, 4, flags);
            let flags = format!("{flags} --devices-per-rank {parts}");
            assert!(
                trained(&with_text(), ranks, 4, &flags) == whole,
                "{ranks} ranks {flags}"
            );
        },
    );
}

#[test]
fn divided_gradients_train_the_same_captured_and_eager() {
    let Some(_gpu) = gpus_of_jobs(2) else { return };
    // Two ranks: NCCL adds the same two numbers in any order.
    let flags = "--dtype bf16 --bucket-mb 0.01";
    let plain = trained(&with_text(), 2, 4, flags);
    let ways = ["--graph on", "--graph off", "--overlap off"];
    for way in ddp_testing::cases_of(&test_name(), ways, 1) {
        let flags = format!("{flags} --zero 2 {way}");
        assert!(trained(&with_text(), 2, 4, &flags) == plain, "{way}");
    }
    let shards = |flags: &str| trained(&with_text(), 2, 3, &format!("{flags} --same-bits 4"));
    assert!(shards("--zero 2 --bucket-mb 0.01") == shards(""));
}

/// A GPT on some ranks.
fn planned_job(folder: &Folder, ranks: usize, model: &str, flags: &str) -> Job {
    std::fs::write(folder.path().join("t.txt"), "To be, or not. ".repeat(400)).unwrap();
    let words = format!(
        "--model gpt,{model} --data t.txt --val-split 0.1 --batch-size {} --threads 1 \
         --device cuda --data-on-device off --graph off --out OUT {flags}",
        2 * ranks
    );
    let job = match ranks {
        1 => folder.alone(&words),
        _ => folder.ranks(ranks, &words),
    };
    job.on_gpus()
}

/// `12.3 MB` or GB, in MB.
fn mb(text: &str) -> f64 {
    let (number, unit) = text.trim().split_once(' ').unwrap();
    let factor = if unit.starts_with("GB") { 1000.0 } else { 1.0 };
    factor * number.parse::<f64>().unwrap()
}

/// Memory as the simulated driver counts it, in MB: planned without a model, and measured.
fn planned_and_measured(ranks: usize, flags: &str) -> [f64; 2] {
    let folder = Folder::new("planned");
    let model = "layers=4,heads=4,width=256,context=64,vocab=4096";
    let flags = format!("--steps 8 --dry-run {flags}");
    let ended = planned_job(&folder, ranks, model, &flags).run();
    ended.assert_well();
    let line = |start: &str| {
        let mut lines = ended.stdout.lines();
        lines
            .find(|it| it.contains(start))
            .unwrap_or_else(|| panic!("{ended}"))
            .to_string()
    };
    let planned = line("planned GPU memory of a rank: ");
    let (_, parts) = planned.split_once("of a rank: ").unwrap();
    let (parts, _) = parts.split_once("; together").unwrap();
    // The simulator has neither.
    let counted = parts.split(", ").filter(|it| !it.contains(" about "));
    let number = |part: &str| {
        let words: Vec<_> = part.rsplitn(3, ' ').collect();
        mb(&format!("{} {}", words[1], words[0]))
    };
    let all: f64 = counted.map(number).sum();
    let measured = line("memory of a rank: about ");
    let measured = measured.split_once("at the peak, ").unwrap().1;
    [all, mb(measured.split_once(" of GPU").unwrap().0)]
}

#[test]
fn memory_is_what_a_dry_run_plans_without_a_model() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    let gpus = ddp_kernels::Device::usable().len() - 1;
    let cases = [
        (1, ""),
        (1, "--dtype bf16 --recompute block --micro-batch 1"),
        (1, "--dtype bf16 --recompute block --recompute-blocks 2"),
        (2, "--dtype bf16"),
        (2, "--dtype bf16 --zero 1"),
        (2, "--dtype bf16 --zero 2 --bucket-mb 1"),
        (
            2,
            "--zero 2 --bucket-mb 1 --reduce-dtype bf16 --micro-batch 1",
        ),
        (2, "--dtype bf16 --zero 2 --bucket-mb 1 --same-bits 4"),
    ];
    let cases = cases.into_iter().filter(|(ranks, _)| *ranks <= gpus);
    // A driver's pool takes pieces of 32 MiB (H100, H200), the simulated one of 2.
    let piece_mb: f64 = if is_simulated() { 0.0 } else { 33.56 };
    for (ranks, flags) in ddp_testing::cases_of(&test_name(), cases, 2) {
        let [planned, measured] = planned_and_measured(ranks, flags);
        let beyond = measured - planned;
        assert!(
            -0.02 * measured < beyond && beyond < piece_mb.max(0.02 * measured),
            "{flags}: {planned} MB, {measured}"
        );
    }
}

/// With a context, NCCL and pieces of the driver's pool as large as an H200's; not in a piece less.
#[test]
fn a_run_fits_in_the_memory_that_a_dry_run_plans() {
    let Some(_gpu) = simulated_gpus_of_jobs(2) else {
        return;
    };
    // Less for NCCL than the plan: the simulator adds memory for its connections.
    const OWN_MB: &str = "561,936,32";
    const MODEL: &str = "layers=1,heads=1,width=32,context=32,vocab=512";
    for (ranks, flags) in [(1, ""), (2, "--zero 1")] {
        let folder = Folder::new("plan");
        let flags = format!("--dtype bf16 --steps 1 {flags}");
        let plan = planned_job(&folder, ranks, MODEL, &format!("--dry-run {flags}")).run();
        plan.assert_well();
        let mut lines = plan.stdout.lines();
        let line = lines.find(|it| it.contains("planned GPU memory of a rank: "));
        let (_, together) = line.unwrap().split_once("; together ").unwrap();
        let run = |mb: f64| {
            let folder = Folder::new("fits");
            let mib = (mb * 1e6 / f64::from(1 << 20)).ceil().to_string();
            let job = planned_job(&folder, ranks, MODEL, &flags).env("SIMCUDA_MEMORY_MB", &mib);
            job.env("SIMCUDA_OWN_MB", OWN_MB).run()
        };
        // It is printed with a few digits.
        let rounding = if together.ends_with("GB") { 5.1 } else { 0.1 };
        run(mb(together) + rounding).assert_well();
        run(mb(together) - rounding - 36.0).assert_fails(71);
    }
}

/// Over more than 1,024 rows in bf16 a norm sums what it passes to the layers below it, for their
/// biases; it does not where these are on another device, or drop something.
#[test]
fn a_norm_that_sums_for_the_biases_below_changes_no_bit() {
    let Some(_gpu) = gpus_of_jobs(2) else { return };
    // 1,088 rows make sums of more than 64 blocks; few windows, since each head of one is a tile.
    let words = GPT.replace("context=8", "context=64");
    let words = words.replace("--batch-size 8", "--batch-size 17");
    let words = words.replace("--dropout 0.1", "--dtype bf16 --optimizer sgd --steps 1");
    let run = |flags: &str| {
        let folder = with_text();
        std::fs::write(folder.path().join("t.txt"), "To be, or not. ".repeat(250)).unwrap();
        let ended = folder.alone(&format!("{words} {flags}")).on_gpus().run();
        ended.assert_well();
        model_bytes(&folder.out(), 1)
    };
    let whole = run("");
    for flags in ["--devices-per-rank 2", "--recompute block --graph off"] {
        assert!(run(flags) == whole, "{flags}");
    }
}

#[test]
fn a_tied_gpt_goes_on_over_one_or_more_devices_and_starts_from_a_folder_split_as_whole() {
    let Some(_gpu) = gpus_of_jobs(2) else { return };
    let (first, model) = (with_text(), with_text());
    let whole = trained(&model, 1, 4, "");
    trained(&first, 1, 2, "--devices-per-rank 2");
    assert!(trained(&first, 1, 4, "--resume auto") == whole);
    let words = "export --format hf --checkpoint OUT folder";
    model.alone(words).run().assert_well();
    let from = |flags: &str| {
        let folder = with_text();
        let path = model.path().join("folder");
        let words = format!("--init-from {} {flags}", path.display());
        trained(&folder, 1, 2, &words)
    };
    assert!(from("--devices-per-rank 2") == from(""));
    for (parts, count) in [(1, 0), (2, 1)] {
        let flags = format!("--devices-per-rank {parts} --dry-run --out other");
        let words = GPT.replace("--out OUT", &flags);
        let ended = model.alone(&words).on_gpus().run();
        ended.assert_well();
        assert_eq!(
            ended.stdout.matches(", tied copies ").count(),
            count,
            "{ended}"
        );
    }
}
