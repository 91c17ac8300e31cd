//! A model family of another program, this one: integer inputs of two dimensions and a loss for
//! each position. It is the file positions.rs and a call of `models::register`.

mod positions;
#[path = "../support/mod.rs"]
mod support;

use std::path::Path;

use ddp::Trainer;
use ddp::checkpoint;
use ddp::config::Config;
use ddp::data::{Data, Dataset, RowSpec, TaskSpec, TensorSpec};
use ddp::models::mlp::MlpSpec;
use ddp::models::{DataShape, ModelSpec};
use ddp::nn::CrossEntropy;
use ddp::train;
use ddp::{Result, ShownError};
use ddp_kernels::setting::spell_settings;
use ddp_kernels::{DType, Tensor};

use crate::positions::PositionsSpec;
use crate::support::job::Folder;
use crate::support::metrics_log::{MetricsLog, model_bytes, number};
use crate::support::random::mixed;
use crate::support::training::{cpu, on_ranks, quietly};

/// Positions of a row, integers at each, and classes.
const POSITIONS: usize = 5;
const AT_EACH: usize = 3;
const CLASSES: usize = 2;

/// Integers below 16; the class of a position is whether its first integers are in the upper half
/// more often than not.
#[derive(Debug)]
struct Integers {
    rows: u64,
    /// The number of the first row.
    first: u64,
    spec: RowSpec,
}

impl Integers {
    fn new(rows: u64, first: u64) -> Integers {
        let names = ["low", "high"].map(String::from).to_vec();
        Integers {
            rows,
            first,
            spec: RowSpec {
                inputs: TensorSpec::new(DType::I64, &[POSITIONS, AT_EACH]),
                targets: TensorSpec::new(DType::I64, &[POSITIONS]),
                image: Vec::new(),
                task: TaskSpec::named_classes(names),
            },
        }
    }

    fn integer(&self, row: u64, at: usize) -> i64 {
        let index = (self.first + row) * (POSITIONS * AT_EACH) as u64 + at as u64;
        (mixed(3, index) % 16) as i64
    }
}

impl Dataset for Integers {
    fn rows(&self) -> u64 {
        self.rows
    }

    fn spec(&self) -> &RowSpec {
        &self.spec
    }

    fn fingerprint(&self) -> ddp::data::Result<String> {
        Ok(format!("integers {} {}", self.rows, self.first))
    }

    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> ddp::data::Result<()> {
        let fill = |inputs: &mut [i64], targets: &mut [i64]| {
            let each = inputs.chunks_mut(AT_EACH).zip(targets).enumerate();
            for (place, (integers, class)) in each {
                let (row, position) = (rows[place / POSITIONS], place % POSITIONS);
                for (at, integer) in integers.iter_mut().enumerate() {
                    *integer = self.integer(row, position * AT_EACH + at);
                }
                let high = integers.iter().filter(|&&integer| integer >= 8).count();
                *class = i64::from(2 * high > AT_EACH);
            }
        };
        inputs.with_slice_mut(|inputs: &mut [i64]| {
            targets.with_slice_mut(|targets: &mut [i64]| fill(inputs, targets))
        })??;
        Ok(())
    }
}

fn spec(dropout: f64) -> ModelSpec {
    ModelSpec::from(PositionsSpec {
        dropout,
        ..PositionsSpec::default()
    })
}

const FLAGS: &str = "--model positions --batch-size 16 --lr 0.02 --progress never \
                     --schedule constant --warmup-steps 0";

/// Trains on integers as this command line says, on `ranks` ranks.
fn train(ranks: usize, flags: &str, out: &Path) {
    let flags = format!("--model positions --batch-size 16 --lr 0.02 --progress never {flags}");
    let parsed = parse(&flags).unwrap();
    let out = out.to_path_buf();
    let config = Config { out, ..parsed };
    on_ranks(ranks, Some(1), |world| {
        let data = Data::own(Integers::new(200, 0), Integers::new(64, 1000));
        Trainer::builder(config.model.clone(), CrossEntropy::default(), data)
            .config(config.clone())
            .run(world)
    });
}

#[test]
fn it_learns_the_class_of_each_position_on_one_and_on_two_ranks() {
    quietly();
    for ranks in [1, 2] {
        let folder = Folder::new("positions");
        train(ranks, "--steps 300 --micro-batch 3", &folder.out());
        let log = folder.metrics_log();
        let end = log.end().unwrap();
        let (loss, accuracy) = (number(end, "eval_loss"), number(end, "accuracy"));
        assert!(
            loss < 0.2 && accuracy > 0.95,
            "{ranks} ranks: {loss} {accuracy}"
        );
    }
}

/// The fourth training was refused: each took three groups of twelve.
#[test]
fn a_process_trains_as_often_as_it_wants() {
    quietly();
    for ranks in [1, 2] {
        let folders: Vec<Folder> = (0..6).map(|_| Folder::new("positions-again")).collect();
        on_ranks(ranks, Some(1), |world| {
            for folder in &folders {
                let data = Data::own(Integers::new(200, 0), Integers::new(64, 1000));
                let config = Config {
                    out: folder.out(),
                    ..parse(&format!("--steps 1 {FLAGS}")).unwrap()
                };
                Trainer::builder(config.model.clone(), CrossEntropy::default(), data)
                    .config(config)
                    .run(world)?;
            }
            Ok(())
        });
    }
}

#[test]
fn a_saved_run_resumes_to_the_same_bits() {
    quietly();
    for (ranks, zero) in [(1, 0), (2, 0), (2, 1)] {
        let flags = format!("--dropout 0.25 --schedule constant --warmup-steps 0 --zero {zero}");
        let whole = Folder::new("positions-whole");
        train(ranks, &format!("{flags} --steps 9"), &whole.out());
        let folder = Folder::new("positions-resumed");
        train(ranks, &format!("{flags} --steps 5"), &folder.out());
        let (opened, _) = checkpoint::newest(&folder.out()).unwrap();
        let config = Config::of_checkpoint(&opened.unwrap()).unwrap();
        assert_eq!(config.model, spec(0.25), "the model in the checkpoint");
        train(
            ranks,
            &format!("{flags} --steps 9 --resume auto"),
            &folder.out(),
        );
        let bytes = [&whole, &folder].map(|folder| model_bytes(&folder.out(), 9));
        assert!(bytes[0] == bytes[1], "{ranks} ranks, ZeRO {zero}");
    }
}

/// It continued with the other loss, and said nothing.
#[test]
fn a_run_is_not_resumed_with_another_loss() {
    quietly();
    let folder = Folder::new("positions-loss");
    let resumed = |steps: u64, label_smoothing: f64, weight: f32| {
        let flags = format!("--steps {steps} --resume auto {FLAGS}");
        let config = Config {
            out: folder.out(),
            ..parse(&flags).unwrap()
        };
        let loss = CrossEntropy {
            label_smoothing,
            class_weights: Some(cpu(&[weight; CLASSES], &[CLASSES])),
            ..CrossEntropy::default()
        };
        let outcomes = on_ranks(1, Some(1), |world| {
            let data = Data::own(Integers::new(200, 0), Integers::new(64, 1000));
            let trainer = Trainer::builder(config.model.clone(), loss.clone(), data);
            Ok(trainer.config(config.clone()).run(world))
        });
        outcomes.into_iter().next().unwrap()
    };
    resumed(3, 0.0, 1.0).unwrap();
    let text = resumed(6, 0.1, 1.0).unwrap_err().to_string();
    let expected = "that change the results: the loss CrossEntropy { label_smoothing: 0.1, ";
    assert!(
        text.contains(expected) && text.contains(" (was CrossEntropy { label_smoothing: 0.0, "),
        "{text}"
    );
    let text = resumed(6, 0.0, 1.5).unwrap_err().to_string();
    assert!(
        text.contains("Some([1.5, ") && text.contains("Some([1.0, "),
        "{text}"
    );
    resumed(6, 0.0, 1.0).unwrap();
}

/// Trains on a text as this command line says, on `ranks` ranks.
fn train_on_text(ranks: usize, text: &Path, flags: &str, out: &Path) {
    let text = text.display();
    let flags = format!(
        "--data tokens:{text},context=8 --model positions --values 256 --batch-size 8 --lr 0.05 \
         --val-split 0.2 --progress never {flags}"
    );
    let parsed = parse(&flags).unwrap();
    let out = out.to_path_buf();
    let config = Config { out, ..parsed };
    on_ranks(ranks, Some(1), |world| train::train(&config, world));
}

#[test]
fn the_next_byte_of_a_text_is_learned_and_a_run_resumes_to_the_same_bits() {
    quietly();
    let folder = Folder::new("text");
    std::fs::create_dir_all(folder.out()).unwrap();
    let text = folder.out().join("book.txt");
    // Each letter has one successor.
    std::fs::write(&text, "tokens abdfghijl.".repeat(40)).unwrap();
    for ranks in [1, 3] {
        let [whole, resumed] =
            ["whole", "resumed"].map(|name| folder.out().join(format!("{name}-{ranks}")));
        let flags = "--schedule constant --warmup-steps 0";
        train_on_text(ranks, &text, &format!("{flags} --steps 60"), &whole);
        // In the middle of the second epoch of 9 steps.
        train_on_text(ranks, &text, &format!("{flags} --steps 13"), &resumed);
        train_on_text(
            ranks,
            &text,
            &format!("{flags} --steps 60 --resume auto"),
            &resumed,
        );
        let bytes = [&whole, &resumed].map(|out| model_bytes(out, 60));
        assert!(bytes[0] == bytes[1], "{ranks} ranks");
        let log = MetricsLog::read(&whole);
        let loss = number(log.end().unwrap(), "eval_loss");
        assert!(loss < 0.1, "{ranks} ranks: {loss}");
    }
}

#[test]
fn parameters_are_counted_without_data() {
    let shape = DataShape {
        row_shape: &[POSITIONS, AT_EACH],
        image: &[],
        dtype: DType::I64,
        outputs: CLASSES,
        documents: false,
    };
    let count = spec(0.0).parameter_count(&shape).unwrap();
    assert_eq!(count, 16 * 8 + 8 + 8 * 2 + 2);
    let text = ModelSpec::default().layers(&shape).unwrap_err().to_string();
    assert!(
        text.contains("inputs of f32") && text.contains("i64"),
        "{text}"
    );
}

fn parse(line: &str) -> Result<Config> {
    let words = std::iter::once("ddp-train").chain(line.split_ascii_whitespace());
    ddp::program("ddp-train")
        .family::<PositionsSpec>()
        .settings(words)
}

fn refusal(line: &str) -> String {
    ShownError(parse(line).expect_err(line)).to_string()
}

#[test]
fn its_flags_follow_from_its_settings() {
    let config = parse("--model positions --values 9 --width 4 --dropout 0.5").unwrap();
    let expected = PositionsSpec {
        values: 9,
        width: 4,
        dropout: 0.5,
    };
    assert_eq!(config.model, ModelSpec::from(expected));
    // --dropout is a setting of both families.
    let expected = MlpSpec {
        dropout: 0.5,
        ..MlpSpec::default()
    };
    assert_eq!(
        parse("--dropout 0.5").unwrap().model,
        ModelSpec::from(expected)
    );
    assert!(refusal("--model positions --width 0").contains("--width 0: expected"));
}

#[test]
fn a_setting_of_another_family_is_refused() {
    spell_settings(|name| format!("--{name}"));
    for (line, parts) in [
        (
            "--hidden 5 --model positions",
            ["--hidden", "requires --model mlp"],
        ),
        (
            "--width 5",
            [
                "--width",
                "requires --model gpt or vit or positions, got --model mlp",
            ],
        ),
        ("--model mlp --values 5", ["--values", "leave --values out"]),
    ] {
        let text = refusal(line);
        assert!(
            parts.iter().all(|part| text.contains(part)),
            "{line}: {text}"
        );
    }
    let text = Config::from_toml("model = \"positions\"\nhidden = [5]\n");
    let text = ShownError(text.unwrap_err()).to_string();
    assert!(text.contains("--hidden requires --model mlp"), "{text}");
}

#[test]
fn another_family_starts_from_its_defaults() {
    let folder = Folder::new("families");
    std::fs::create_dir_all(folder.out()).unwrap();
    let file = folder.out().join("run.toml");
    std::fs::write(&file, "hidden = [5]\ndropout = 0.5\nseed = 3\n").unwrap();
    let line = format!("--config {} --model positions", file.display());
    let config = parse(&line).unwrap();
    assert_eq!((config.model, config.seed), (spec(0.0), 3));
    let shown = refusal(&format!("{line} --width 3 --print-config"));
    assert!(
        shown.contains("model = \"positions\"  # --model\n"),
        "{shown}"
    );
    assert!(shown.contains("width = 3  # --width\n"), "{shown}");
    assert!(shown.contains("dropout = 0.0  # default\n"), "{shown}");
    assert!(!shown.contains("hidden"), "{shown}");
}

#[test]
fn it_reads_back_as_itself() {
    let config = parse("--model positions --width 3").unwrap();
    assert_eq!(
        Config::from_toml(&config.to_toml()).unwrap(),
        config.with_defaults()
    );
    let json: Config = serde_json::from_value(config.to_json().into()).unwrap();
    assert_eq!(json, config.with_defaults());
    let lines = config.equal_on_all_ranks();
    assert!(
        lines.contains("model = \"positions\"\n") && lines.contains("width = 3\n"),
        "{lines}"
    );
}

#[test]
fn help_shows_it() {
    let help = refusal("--help");
    for part in ["positions: For tests", "--values <N>"] {
        assert!(help.contains(part), "{part} in {help}");
    }
}
