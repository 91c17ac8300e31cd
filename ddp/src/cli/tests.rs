//! Claims about the command line.

mod help;
mod refusals;

use super::*;
use crate::config::*;
use crate::flags::PlaceFlags;
use crate::flags::bench::Bench;
use crate::flags::tools::DoctorFlags;
use crate::kernels::ops::Activation;
use crate::models::ModelSpec;
use crate::models::gpt::{
    GptSpec, MlpKind, NormKind, NormPlace, PositionKind, QkNorm, RecomputeKind,
};
use crate::models::mlp::MlpSpec;
use crate::models::vit::{Pool, VitSpec};
use crate::optim::Method;

fn train(line: &str) -> Config {
    match parse(words(line)).unwrap_or_else(|error| panic!("{line}: {error}")) {
        Command::Train(config) => *config,
        other => panic!("{line}: {other:?}"),
    }
}

fn refusal(line: &str) -> String {
    crate::flags::spell_settings_as_flags();
    let error = parse(words(line)).expect_err(line);
    assert_eq!(error.exit_code(), 2, "{line}");
    error.to_string()
}

fn parse(words: Vec<String>) -> Result<Command> {
    super::parse(words).map(|(command, _)| command)
}

fn words(line: &str) -> Vec<String> {
    std::iter::once("ddp-train")
        .chain(line.split_ascii_whitespace())
        .map(String::from)
        .collect()
}

#[test]
fn the_definition_of_the_command_line_is_sound() {
    command().debug_assert();
}

#[test]
fn train_is_what_happens_without_a_command() {
    assert_eq!(train(""), Config::default());
    assert_eq!(train("train"), Config::default());
    assert_eq!(train("--steps 10"), train("train --steps 10"));
    assert_eq!(train("--steps 10").length(), Length::Steps(10));
}

/// Every flag of a transformer.
const GPT: &str = "--model gpt --layers 3 --heads 2 --kv-heads 1 --width 16 --mlp-width 24 --context 32 --vocab 99 --norm rms \
                   --position rope --mlp swiglu --bias false --tied false --dropout 0.25 --norm-epsilon 0.5 --rope-base 7 --recompute block --recompute-blocks 2 \
                   --head-size 10 --longest-context 64 --norm-place after --qk-norm head --qkv-bias true --rope-scaling linear:2 \
                   --rope-share 0.4 --rope-skip 3 --window 32 --window-skip 4 --window-rope-base 9 --attention-scalar 5 --attention-cap 6 --logit-cap 7 --scale-embedding true --untrained-tokens 2 --export-class Qwen3ForCausalLM";
const VIT: &str = "--model vit --layers 3 --patch 7 --pool class --image 28x14 --memory 40GiB";

fn group(pattern: &str, lr: Option<f64>, weight_decay: Option<f64>) -> GroupSetting {
    GroupSetting {
        pattern: pattern.into(),
        lr,
        weight_decay,
    }
}

#[test]
fn a_batch_of_tokens_is_rows_of_the_model_s_context() {
    let config =
        train("--model gpt --context 32 --batch-tokens 4096 --optimizer muon --adam-lr 0.002");
    assert_eq!(config.batch_rows(), 128);
    assert_eq!(config.with_defaults().batch_size, None);
    let rule = config.rule();
    let Some(Method::Muon(constants)) = rule.hidden else {
        panic!("{rule:?}");
    };
    assert_eq!(
        (rule.rate, constants.momentum, constants.nesterov),
        (0.002 / 0.02, 0.95, true)
    );
}

#[test]
fn every_flag_of_training_arrives() {
    let line = "--model mlp --hidden 32,16 --activation gelu-tanh --dropout 0.1 --linear-path --linear-start 0.5 --plain --data glyphs,rows=100 --batch-size 64 \
                --micro-batch 8 --recompute-parts 3 --steps 0 --drop-last --optimizer sgd --lr 0.5 --min-lr 0.25 --weight-decay 0.001 \
                --momentum 0.5 --nesterov --decay all --schedule wsd --warmup-steps 0 --schedule-steps 9 --grad-clip 1 --label-smoothing 0.125 \
                --class-weights 1,2,3,4,5,6,7,8,9,10 --freeze 0,2.bias --device cuda --devices-per-rank 2 \
                --share-gpus --dtype bf16 --data-on-device on --graph off --threads 3 --seed 7 --out a/b \
                --eval-every 3 --best auc --stop-after 4 --sample To --sample-held-out 3 --log-every 1 --bucket-mb 0.5 --reduce-dtype bf16 --same-bits 12 --zero 1 --nccl fast --timeout-s 0.5 --progress never \
                --overlap off --log-level trace --labels y --val-data v.csv --val-labels z --val-split 0.25 --stratify \
                --task classification --drop id,name --categorical auto --missing mean \
                --normalize standard --cache-dir c --checkpoint-every 5 --keep 2 --resume auto \
                --override --init-from m.safetensors --lora rank=4,alpha=2,on=0,2 --tokenizer t --loss-on all \
                --packing off --tensorboard --trace 3.. --group *.bias:weight-decay=0,2.*:lr=3:weight-decay=1";
    let config = train(line);
    let expected = Config {
        model: ModelSpec::from(MlpSpec {
            hidden: vec![32, 16],
            activation: Activation::GeluTanh,
            dropout: 0.1,
            linear_path: Some(true),
        }),
        data: "glyphs,rows=100".parse().unwrap(),
        batch_size: Some(64),
        batch_tokens: None,
        micro_batch: Some(8),
        recompute_parts: 3,
        memory: None,
        steps: Some(0),
        epochs: None,
        drop_last: true,
        optimizer: OptimizerKind::Sgd,
        momentum: Some(0.5),
        nesterov: true,
        decay: Decayed::All,
        beta1: None,
        beta2: None,
        eps: None,
        lr: Some(0.5),
        adam_lr: None,
        group: Some(Groups(vec![
            group("*.bias", None, Some(0.0)),
            group("2.*", Some(3.0), Some(1.0)),
        ])),
        min_lr: 0.25,
        weight_decay: Some(0.001),
        schedule: Schedule::Wsd,
        schedule_steps: Some(9),
        linear_start: Some(0.5),
        warmup_steps: Some(0),
        grad_clip: Some(1.0),
        label_smoothing: 0.125,
        class_weights: (1..=10).map(f64::from).collect::<Vec<_>>().into(),
        freeze: Some(vec!["0".into(), "2.bias".into()]),
        plain: true,
        lora: Some("rank=4,alpha=2,on=0,2".parse().unwrap()),
        device: DeviceChoice::Cuda,
        devices_per_rank: 2,
        share_gpus: true,
        dtype: Precision::Bf16,
        data_on_device: Resident::On,
        graph: GraphChoice::Off,
        threads: Some(3),
        seed: 7,
        out: "a/b".into(),
        eval_every: Some(3),
        best: BestBy::Auc,
        stop_after: Some(4),
        sample: Some("To".into()),
        sample_held_out: 3,
        log_every: 1,
        bucket_mb: Some(0.5),
        reduce_dtype: FloatType::Bf16,
        same_bits: Some(12),
        zero: 1,
        nccl: NcclChoice::Fast,
        timeout_s: 0.5,
        progress: When::Never,
        overlap: Overlap::Off,
        log_level: LogLevel::Trace,
        labels: Some("y".into()),
        val_data: Some("v.csv".parse().unwrap()),
        val_labels: Some("z".into()),
        val_split: Some(0.25),
        stratify: Some(true),
        task: Some(TaskKind::Classification),
        drop: vec!["id".into(), "name".into()],
        categorical: Some(vec!["auto".into()]),
        missing: Some(Missing::Mean),
        normalize: Some(Scaling::Standard),
        cache_dir: Some("c".into()),
        checkpoint_every: Some(5),
        keep: 2,
        resume: Resume::Auto,
        override_: true,
        init_from: Some("m.safetensors".into()),
        tokenizer: Some("t".into()),
        loss_on: LossOn::All,
        packing: Packing::Off,
        tensorboard: true,
        trace: Some("3..".parse().unwrap()),
    };
    assert_eq!(config, expected);
    let flags = command()
        .get_arguments()
        // Those of families that only tests have.
        .filter(|flag| !flag.is_hide_set())
        .filter_map(|flag| flag.get_long())
        .map(|flag| format!("--{flag}"))
        .collect::<Vec<_>>();
    for flag in flags.iter().filter(|flag| {
        ![
            "--help",
            "--epochs",
            "--batch-tokens",
            "--adam-lr",
            "--beta1",
            "--beta2",
            "--eps",
            "--config",
            "--print-config",
            "--dry-run",
            // In `start.rs`.
            "--ranks",
            "--hosts",
            "--hostfile",
            "--spares",
            "--min-ranks",
            "--restarts",
            "--grace-s",
        ]
        .contains(&flag.as_str())
    }) {
        let is_tried = [line, GPT, VIT]
            .iter()
            .any(|line| line.contains(flag.as_str()));
        assert!(is_tried, "{flag} is not tried here");
    }
    let expected = GptSpec {
        layers: 3,
        heads: 2,
        kv_heads: 1,
        width: 16,
        mlp_width: 24,
        context: 32,
        vocab: 99,
        norm: NormKind::Rms,
        position: PositionKind::Rope,
        mlp: MlpKind::Swiglu,
        bias: false,
        tied: false,
        dropout: 0.25,
        norm_epsilon: 0.5,
        rope_base: 7.0,
        recompute: RecomputeKind::Block,
        recompute_blocks: 2,
        head_size: 10,
        longest_context: 64,
        norm_place: NormPlace::After,
        qk_norm: QkNorm::Head,
        qkv_bias: true,
        rope_scaling: "linear:2".into(),
        rope_share: 0.4,
        rope_skip: 3,
        window: 32,
        window_skip: 4,
        window_rope_base: 9.0,
        attention_scalar: 5,
        attention_cap: 6.0,
        logit_cap: 7.0,
        scale_embedding: true,
        untrained_tokens: vec![2],
        export_class: "Qwen3ForCausalLM".into(),
    };
    assert_eq!(train(GPT).model, ModelSpec::from(expected.clone()));
    let patches = VitSpec {
        layers: 3,
        patch: 7,
        pool: Pool::Class,
        image: "28x14".into(),
        ..VitSpec::default()
    };
    assert_eq!(train(VIT).model, ModelSpec::from(patches));
    // The same after commas.
    let words: Vec<_> = GPT
        .split(" --")
        .skip(1)
        .map(|word| word.replace(' ', "="))
        .collect();
    let text = format!("--model gpt,{}", words.join(","));
    assert_eq!(train(&text).model, ModelSpec::from(expected));
    let config = train(
        "--epochs 3 --beta1 0.5 --beta2 0.75 --eps 1e-6 --drop-last=false --share-gpus=false",
    );
    assert!(!config.share_gpus);
    assert_eq!(config.length(), Length::Epochs(3));
    assert_eq!(
        {
            let settled = config.with_defaults();
            (settled.beta1, settled.beta2, settled.eps)
        },
        (Some(0.5), Some(0.75), Some(1e-6))
    );
    assert!(!config.drop_last);
    assert!(train("--drop-last true --steps 3").drop_last);
    assert!(train("--drop-last --steps 3").drop_last);
}

#[test]
fn help_takes_the_name_of_a_command() {
    for (words_of_help, flag) in [
        ("help", "--help"),
        ("help bench", "bench --help"),
        ("help bench mlp", "bench mlp --help"),
        ("help predict", "predict --help"),
    ] {
        let help = parse(words(words_of_help)).unwrap();
        assert_eq!(help, parse(words(flag)).unwrap(), "{words_of_help}");
        assert!(matches!(help, Command::Show(_)));
    }
    assert!(refusal("help nothing").contains("'nothing'"));
}

#[test]
fn flags_of_training_are_not_suggested_to_other_commands() {
    let text = refusal("predict --checkpoint a --data b --out c.csv --learning-rate 1");
    assert!(!text.contains("--lr"), "{text}");
}

/// Command lines that together have every flag of their command that excludes no other.
const WHOLE: [(&str, &str); 11] = [
    (
        "eval",
        "--checkpoint run --context 8 --init-from base --data rows.csv --batch-size 7 --device cuda:1 --share-gpus --threads 3 --cache-dir kept --timeout-s 5 \
         --log-level warn --labels kind --held-out --json",
    ),
    (
        "predict",
        "--checkpoint run --context 8 --init-from base --data rows.csv --batch-size 7 --device cuda:1 --share-gpus --threads 3 --cache-dir kept --timeout-s 5 \
         --log-level warn --out a.csv --probabilities --logits --keep id,town --held-out --overwrite",
    ),
    ("inspect", "out --lines 4 --json"),
    ("report", "out one --out page.html --svg page.svg"),
    ("watch", "out"),
    ("doctor", "--json --out runs --quick --timeout-s 5"),
    (
        "bench mlp",
        "--layers 784,10 --batch 64 --dtype bf16 --task regression --optimizer sgd --bucket-mb 2 --reduce-dtype bf16 --zero 1 --overlap off --graph off --threads 2 \
         --device cuda --share-gpus --seconds 1 --rounds 3 --timeout-s 5 --same-bits 8 --explain --timed",
    ),
    (
        "bench addmm",
        "--shapes 3x4x5 --dtype tf32 --threads 2 --device cuda --share-gpus --seconds 1 --rounds 3 --timeout-s 5",
    ),
    (
        "bench allreduce",
        "--mb 3 --operation broadcast --dtype bf16 --captured --threads 2 --device cuda --share-gpus --seconds 1 \
         --rounds 3 --timeout-s 5",
    ),
    ("compare", "one two --json --replay"),
    (
        "verify",
        "out --head 0000000000000000000000000000000000000000000000000000000000000000 --from 2 --to 4 --as-logged \
         --other-program --out here --json --data rows.csv --labels kind --val-data more.csv --val-labels kind --init-from base \
         --tokenizer base --memory 4GB --device cuda:1 --share-gpus --threads 3 --cache-dir kept --timeout-s 5 --log-level warn",
    ),
];

#[test]
fn every_flag_of_the_other_commands_arrives() {
    for (command, line) in WHOLE {
        let mut definition = super::command();
        let mut found = &mut definition;
        for name in command.split(' ') {
            found = found.find_subcommand_mut(name).unwrap();
        }
        // Those that exclude others, and those that start ranks, are tried elsewhere.
        let flags = found.get_arguments().filter_map(|flag| flag.get_long());
        let elsewhere = [
            "help",
            "sweep",
            "ranks",
            "hosts",
            "hostfile",
            "all",
            "intervals",
            "seed",
        ];
        for flag in flags.filter(|flag| !elsewhere.contains(flag)) {
            assert!(
                line.split(' ').any(|word| word == format!("--{flag}")),
                "{command}: --{flag} is not tried here"
            );
        }
        // Leaving out any one of them changes the command, or is refused if it has no default.
        let whole = parse(words(&format!("{command} {line}")))
            .unwrap_or_else(|error| panic!("{command}: {error}"));
        let mut parts: Vec<String> = Vec::new();
        for word in line.split_ascii_whitespace() {
            match parts.last_mut().filter(|_| !word.starts_with("--")) {
                Some(part) => *part += &format!(" {word}"),
                None => parts.push(word.to_string()),
            }
        }
        for left_out in 0..parts.len() {
            let rest = [&parts[..left_out], &parts[left_out + 1..]]
                .concat()
                .join(" ");
            let other = parse(words(&format!("{command} {rest}")));
            assert!(
                other.is_err() || other.is_ok_and(|other| other != whole),
                "{command}: {} does nothing",
                parts[left_out]
            );
        }
    }
    let Ok(Command::Doctor(doctor)) = parse(words(&format!("doctor {}", WHOLE[5].1))) else {
        panic!("doctor")
    };
    assert_eq!(
        doctor,
        DoctorFlags {
            json: true,
            out: "runs".into(),
            quick: true,
            places: PlaceFlags::default(),
            timeout_s: 5.0
        }
    );
}

#[test]
fn benches_have_their_own_flags() {
    let bench = |line: &str| match parse(words(line)).unwrap() {
        Command::Bench(bench) => bench,
        other => panic!("{other:?}"),
    };
    let Bench::Mlp(flags) = bench(
        "bench mlp --layers 784,32,10 --batch 64 --threads 2 --dtype bf16 --zero 1 --device cpu --seconds 1",
    ) else {
        panic!("not that bench")
    };
    assert_eq!((flags.layers.0, flags.batch), (vec![784, 32, 10], 64));
    let common = &flags.step.common;
    let ranks = &common.ranks.settings;
    assert_eq!((ranks.dtype, ranks.zero), (Precision::Bf16, 1));
    assert_eq!(ranks.bucket_mb, None);
    assert_eq!((common.seconds, common.rounds), (1.0, 5));
    assert_eq!((ranks.threads, ranks.device), (Some(2), DeviceChoice::Cpu));
    assert_eq!((ranks.share_gpus, ranks.timeout_s), (false, 600.0));

    let Bench::Addmm(flags) = bench("bench addmm --shapes 2x3x4,1x1x784") else {
        panic!("not that bench")
    };
    let texts: Vec<String> = flags.shapes.0.iter().map(ToString::to_string).collect();
    assert_eq!(texts, ["2x3x4", "1x1x784"]);
    let Bench::Allreduce(flags) = bench("bench allreduce --sweep 0.5:2") else {
        panic!("not that bench")
    };
    assert_eq!(flags.sweep, Some(List(vec![0.5, 1.0, 2.0])));
}
