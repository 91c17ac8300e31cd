//! `same-bits`: whole runs with batches in 12 shards give bit-identical models, losses and
//! evaluations on any number of ranks, also if resumed on another number. Ranks are threads.
//!
//! The hashes of the models are pinned: a change of any order of additions shows here.

mod by_bf16;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use ddp::config::{Config, OptimizerKind, find, model_of};
use ddp::data::sampler::Shards;
use ddp::data::{InOrder, Source};
use ddp::{Result, checkpoint, train};
use ddp_comm::Group;
use ddp_kernels::Device;
use ddp_kernels::ops::{Bf16Order, with_bf16_order};
use ddp_kernels::setting::Choice;
use serde_json::Value;

use crate::support::random::uniform;
use crate::support::training::{Case, on_ranks, try_on_ranks};

/// Settings of all runs: batches of 26 rows, so that shards have 2 or 3, and of 9 at the end of
/// each epoch, so that some have none.
const ALL: &str = "same-bits=12 batch-size=26 epochs=2 eval-every=2 log-every=1 progress=never \
                   device=cpu threads=1 checkpoint-every=0 bucket-mb=0.009";
const GLYPHS: &str = "data=glyphs,rows=61,held-out=31";
const TOKENS: &str = "data=tokens:TEXT val-split=0.2";
const SIZES: [usize; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 12];

/// Runs: a name, the hash of its model, its model, and its settings.
const CASES: [(&str, &str, &str, &str); 9] = [
    (
        "mlp, adamw, clipping, dropout, micro-batches",
        "b2d161d7bcd45fa9",
        "mlp,dropout=0.2",
        "hidden=24 grad-clip=0.5 micro-batch=2",
    ),
    (
        "mlp, sgd, ZeRO-1, bf16",
        "b00ee21746af91a7",
        "mlp",
        "hidden=24 optimizer=sgd zero=1 reduce-dtype=bf16",
    ),
    (
        "mlp, muon, ZeRO-1, clipping",
        "5b8d8871ebf0deda",
        "mlp",
        "hidden=24,16 optimizer=muon zero=1 grad-clip=0.5",
    ),
    (
        "mlp, frozen, bf16, no overlap",
        "6f126febfabdd0eb",
        "mlp",
        "hidden=24,16 freeze=2 reduce-dtype=bf16 overlap=off",
    ),
    (
        "gpt, tied, adamw, dropout, clipping",
        "2c598e6ea94d2c3d",
        "gpt,context=8,layers=2,width=16,heads=2,dropout=0.1",
        "grad-clip=1",
    ),
    (
        "gpt, untied, muon, ZeRO-1, micro-batches",
        "b434c65adc688d5a",
        "gpt,context=8,layers=1,width=16,heads=2,tied=false",
        "optimizer=muon zero=1 micro-batch=1",
    ),
    (
        "gpt, tied, sgd, bf16",
        "b262a0146f3e9a6b",
        "gpt,context=8,layers=1,width=16,heads=2",
        "optimizer=sgd reduce-dtype=bf16",
    ),
    (
        "vit, adamw, ZeRO-1, clipping, dropout",
        "634973ee232a71cb",
        "vit,layers=1,width=16,heads=2,patch=7,dropout=0.1",
        "zero=1 grad-clip=0.5",
    ),
    (
        "mlp that learns two numbers",
        "45488a4d2f99329e",
        "mlp",
        "data=synthetic:regression,rows=61,held-out=700,features=5,outputs=2 hidden=24",
    ),
];

/// A folder that is removed with everything in it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("ddp-same-bits-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir(&folder).unwrap();
        Folder(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}

/// What a run computed: the hash of its model, and what its steps and evaluations say.
#[derive(Clone, Debug, PartialEq)]
struct Computed {
    model: String,
    lines: Vec<String>,
}

/// A run with these settings, into a folder.
fn config(model: &str, settings: &str, folder: &Path) -> Config {
    let text = folder.join("text.txt");
    let words = "the quick brown fox jumps over the lazy dog. pack my box with jugs. ";
    fs::write(&text, words.repeat(11)).unwrap();
    let data = if model.starts_with("gpt") {
        TOKENS
    } else {
        GLYPHS
    };
    let mut config = Config {
        model: model_of(model, None).unwrap(),
        out: folder.join("out"),
        ..Config::default()
    };
    for word in format!("{ALL} {data} {settings}").split_whitespace() {
        let (name, value) = word.split_once('=').unwrap();
        let value = value.replace("TEXT", text.to_str().unwrap());
        let set = find(name).unwrap().set(&mut config, &value);
        set.unwrap_or_else(|why| panic!("{word}: {why}"));
    }
    config
}

/// Batches of 8 rows in 4 shards.
fn in_fours() -> Case {
    Case {
        batch: 8,
        shards: Some(4),
        ..Case::regression(24, uniform)
    }
}

#[test]
fn steps_refuse_more_shards_than_there_may_be_and_rows_in_other_shards() {
    let _turn = TURN.lock().unwrap();
    let refused = |result: Result<()>, expected: &str| {
        let text = result.unwrap_err().to_string();
        assert!(text.contains(expected), "{text}");
    };
    on_ranks(1, None, |world| {
        let many = Case {
            shards: Some(1025),
            ..in_fours()
        };
        refused(many.step(world).map(drop), "expected at most 1024");
        let mut step = in_fours().step(world)?;
        let group = Group::alone();
        for shards in [None, Some(5)] {
            let shards = Shards::of_rank(shards.unwrap_or(1), 0, 1);
            let source = Source::new(in_fours().data, [Device::Cpu; 2]);
            let mut rows = InOrder::in_shards(source, shards, 9)?;
            let evaluated = step.evaluate(&mut rows, &group).map(drop);
            refused(evaluated, "expected a batch in as many shards");
        }
        Ok(())
    });
}

/// Runs of threads in one process take turns: signals and settings of threads are the process's.
static TURN: Mutex<()> = Mutex::new(());

fn run(config: &Config, ranks: usize) {
    config.check().unwrap();
    on_ranks(ranks, Some(ranks as u64), |world| {
        train::train(config, world)
    });
}

fn computed(config: &Config) -> Computed {
    let (newest, _) = checkpoint::newest(&config.out).unwrap();
    let folder = newest.expect("the run was saved").folder;
    let model = fs::read(folder.join("model.safetensors")).unwrap();
    let log = fs::read_to_string(config.out.join("metrics.jsonl")).unwrap();
    let lines = log.lines().filter_map(|line| {
        let event: Value = serde_json::from_str(line).unwrap();
        let kind = event["event"].as_str()?.to_string();
        let names = [
            "step",
            "loss",
            "accuracy",
            "grad_norm",
            "mean_r2",
            "columns",
            "perplexity",
        ];
        let values = names.map(|name| event[name].to_string());
        matches!(&kind[..], "step" | "eval").then(|| format!("{kind} {}", values.join(" ")))
    });
    Computed {
        lines: lines.collect(),
        model: blake3::hash(&model).to_hex()[..16].to_string(),
    }
}

fn trained(model: &str, settings: &str, ranks: usize) -> Computed {
    let folder = Folder::new();
    let config = config(model, settings, &folder.0);
    run(&config, ranks);
    computed(&config)
}

#[test]
fn any_number_of_ranks_computes_the_same_bits() {
    let _turn = TURN.lock().unwrap();
    let all = CASES
        .iter()
        .flat_map(|case| SIZES[1..].iter().map(move |&size| (case, size)));
    let chosen = ddp_testing::cases_of("same-bits, ranks", all, 9);
    let mut wrong = Vec::new();
    for (name, hash, model, settings) in CASES {
        let one = trained(model, settings, 1);
        // The loss is null if it is not finite.
        let has_loss = |line: &String| line.split(' ').nth(2) != Some("null");
        assert!(
            one.lines.len() > 6 && one.lines.iter().all(has_loss),
            "{:?}",
            one.lines
        );
        if one.model != hash {
            wrong.push(format!("{name}: {}, not {hash}", one.model));
        }
        for (_, size) in chosen.iter().filter(|(case, _)| case.0 == name) {
            assert_eq!(
                trained(model, settings, *size),
                one,
                "{name}: {size} ranks and 1"
            );
        }
    }
    assert!(
        wrong.is_empty(),
        "other models than before:\n{}",
        wrong.join("\n")
    );
}

/// All combinations of models, optimizers and what else changes the additions.
fn combinations() -> Vec<(&'static str, String)> {
    let models = [
        "mlp",
        "gpt,context=8,layers=1,width=16,heads=2",
        "gpt,context=8,layers=1,width=16,heads=2,tied=false",
        "vit,layers=1,width=16,heads=2,patch=7",
    ];
    let choices = [
        "zero=1",
        "grad-clip=0.5",
        "dropout=0.1",
        "micro-batch=2",
        "reduce-dtype=bf16",
    ];
    let mut all = Vec::new();
    for model in models {
        for (_, optimizer, _) in OptimizerKind::ALL {
            for chosen in 0..1 << choices.len() {
                let mut settings = format!("optimizer={optimizer}");
                if model == "mlp" {
                    settings += " hidden=24,16";
                }
                for (number, choice) in choices.iter().enumerate() {
                    if chosen >> number & 1 == 1 {
                        settings += &format!(" {choice}");
                    }
                }
                all.push((model, settings));
            }
        }
    }
    all
}

#[test]
fn every_combination_of_settings_has_the_same_bits_on_other_ranks() {
    let _turn = TURN.lock().unwrap();
    let all = combinations();
    for number in ddp_testing::cases("same-bits, combinations", all.len(), 3) {
        let (model, settings) = &all[number];
        let one = trained(model, settings, 1);
        let sizes = if ddp_testing::all_cases() {
            SIZES[1..].to_vec()
        } else {
            vec![SIZES[1 + number % 8], SIZES[1 + (number / 8 + 3) % 8]]
        };
        for size in sizes {
            assert_eq!(
                trained(model, settings, size),
                one,
                "{model} {settings}: {size} ranks"
            );
        }
    }
}

#[test]
fn without_the_setting_bits_depend_on_the_number_of_ranks() {
    let _turn = TURN.lock().unwrap();
    let (_, _, model, settings) = CASES[0];
    let of = |ranks: usize| {
        let folder = Folder::new();
        let mut config = config(model, settings, &folder.0);
        config.same_bits = None;
        run(&config, ranks);
        computed(&config).model
    };
    assert_ne!(of(1), of(3));
}

#[test]
fn a_run_resumed_on_other_ranks_computes_the_same_bits() {
    let _turn = TURN.lock().unwrap();
    // The number of ranks, of which step it stops after, and so on.
    let chain = |seed: usize| -> Vec<(usize, u64)> {
        let mut state = (seed as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1;
        let mut draw = |end: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % end
        };
        let (first, second) = (1 + draw(4), 1 + draw(4));
        let stops = [first.min(second), first.max(second), 6];
        stops.map(|stop| (SIZES[draw(9) as usize], stop)).to_vec()
    };
    for number in ddp_testing::cases("same-bits, chains", 200, 4) {
        let (name, _, model, settings) = CASES[number % CASES.len()];
        let fixed =
            format!("{settings} schedule=constant warmup-steps=1 checkpoint-every=1 keep=9");
        let folder = Folder::new();
        let whole = config(model, &fixed, &folder.0);
        let (steps, epochs) = (Some(6), None);
        let whole = Config {
            steps,
            epochs,
            ..whole
        };
        run(&whole, 1);
        let again = Folder::new();
        let chain = chain(number);
        for &(ranks, stop) in &chain {
            let part = Config {
                steps: Some(stop),
                out: again.0.join("out"),
                resume: "auto".parse().unwrap(),
                ..whole.clone()
            };
            run(&part, ranks);
        }
        let part = Config {
            out: again.0.join("out"),
            ..whole.clone()
        };
        assert_eq!(
            computed(&part).model,
            computed(&whole).model,
            "{name}: {chain:?}"
        );
    }
}

fn refusal(ranks: usize, model: &str, settings: &str, before: Option<(&str, usize)>) -> String {
    let folder = Folder::new();
    if let Some((settings, ranks)) = before {
        run(&config(model, settings, &folder.0), ranks);
    }
    let config = config(model, settings, &folder.0);
    let refused = |result: Result<()>| result.unwrap_err().to_string();
    match config.check() {
        Err(error) => error.to_string(),
        Ok(()) => {
            let ended = try_on_ranks(ranks, None, |world| train::train(&config, world));
            refused(ended.into_iter().next().unwrap())
        }
    }
}

#[test]
fn what_cannot_be_is_refused_with_numbers_that_work() {
    let _turn = TURN.lock().unwrap();
    let mlp = CASES[0].2;
    let cases = [
        (
            refusal(1, mlp, "same-bits=0", None),
            "expected a whole number from 1 to 1024",
        ),
        (
            refusal(3, mlp, "same-bits=2", None),
            "start at most 2 ranks, or begin a run with `same-bits` 3 or more",
        ),
        (refusal(1, mlp, "same-bits=27", None), "expected at most 26"),
        (
            refusal(1, mlp, "same-bits=62 batch-size=70", None),
            "expected at most 61",
        ),
        (
            refusal(
                2,
                mlp,
                "same-bits=8 resume=auto epochs=3",
                Some(("epochs=1", 1)),
            ),
            "`same-bits` 8 (was 12)",
        ),
    ];
    for (text, expected) in cases {
        assert!(text.contains(expected), "{text}\nexpected {expected}");
        assert!(text.contains("expected"), "{text}");
    }
}
