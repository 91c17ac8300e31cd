//! A second model family, which only tests have: integer inputs of two dimensions and a loss for
//! each position. It is the folder ddp/nn/tests/positions and its lines in ddp/nn/src/models.rs.

mod support;

use std::path::Path;
use std::sync::Arc;

use ddp::checkpoint::{self, Position, Saver, ScheduleState, State, WorldState};
use ddp::cli::{self, Command};
use ddp::config::Config;
use ddp::data::{Dataset, InOrder, Loader, RowSpec, Sampler, TaskSpec, TensorSpec};
use ddp::models::mlp::MlpSpec;
use ddp::models::positions::PositionsSpec;
use ddp::models::{DataShape, Model, ModelSpec};
use ddp::nn::CrossEntropy;
use ddp::optim::{Optimizer, Rule};
use ddp::step::{Step, StepOptions};
use ddp::{Error, Result};
use ddp_comm::World;
use ddp_kernels::{DType, Device, Tensor};

use crate::support::job::Folder;
use crate::support::random::mixed;
use crate::support::training::{bits, on_ranks, quietly};

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
    fn new(rows: u64, first: u64) -> Arc<Integers> {
        let names = ["low", "high"].map(String::from).to_vec();
        Arc::new(Integers {
            rows,
            first,
            spec: RowSpec {
                inputs: TensorSpec::new(DType::I64, &[POSITIONS, AT_EACH]),
                targets: TensorSpec::new(DType::I64, &[POSITIONS]),
                task: TaskSpec::named_classes(names),
            },
        })
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
    ModelSpec::Positions(PositionsSpec {
        dropout,
        ..PositionsSpec::default()
    })
}

/// The step of a model of this spec, which `zero` says how to share.
fn step(spec: &ModelSpec, world: &World, zero: bool) -> Result<Step> {
    let data = Integers::new(1, 0);
    let shape = DataShape {
        row_shape: data.row_shape(),
        dtype: data.spec.inputs.dtype,
        outputs: data.task().outputs(),
    };
    let mut options = StepOptions::default();
    options.reducer.zero = zero;
    let model = Model::with_shares(
        Box::new(spec.layers(&shape)?),
        shape.row_shape,
        DType::F32,
        Device::Cpu,
        3,
        &|_| false,
        options.reducer.shares(world.size()),
    )?;
    let gradients = world.group("gradients")?;
    let owned = ddp::reducer::owned(&model.params, &gradients, options.reducer);
    let optimizer = Optimizer::of_slices(Rule::adamw(), &model.params, &owned)?;
    let loss = Box::new(CrossEntropy::default());
    Step::new(model, loss, optimizer, gradients, &options)
}

fn train(world: &World, step: &mut Step, steps: std::ops::Range<u64>) -> Result<f64> {
    let data = Integers::new(200, 0);
    let sampler = Sampler::new(data.rows(), 16, 7, false)?;
    let (rank, ranks) = (world.rank(), world.size());
    let mut loader = Loader::new(data, sampler, rank, ranks, Some(3), Device::Cpu)?;
    for step0 in steps {
        step.run(loader.load(step0)?, 0.02, false)?;
    }
    step.gather()?;
    Ok(step.report(false)?.stats.loss())
}

/// What a checkpoint says of a run of this model besides its tensors.
fn state(spec: &ModelSpec, ranks: usize, step: u64) -> State {
    let data = Integers::new(200, 0);
    let config = Config {
        model: spec.clone(),
        ..Config::default()
    };
    State {
        format: 1,
        program: "a test".into(),
        step,
        samples: 16 * step,
        config: config.to_json(),
        position: Position {
            seed: 7,
            epoch: 0,
            in_epoch: step,
            rows: data.rows,
            batch: 16,
            drop_last: false,
        },
        schedule: ScheduleState {
            steps: 100,
            warmup_steps: 10,
            learning_rate: 0.02,
        },
        optimizer_since: 0,
        world: WorldState {
            ranks,
            optimizer_parts: 1,
            devices: vec!["cpu".into(); ranks],
        },
        task: data.task().clone(),
        row_shape: data.row_shape().to_vec(),
        normalization: None,
        columns: None,
        label: None,
        fingerprint: "integers".into(),
        held_out: None,
        best: None,
        last: None,
    }
}

#[test]
fn it_learns_the_class_of_each_position_on_one_and_on_two_ranks() {
    quietly();
    for ranks in [1, 2] {
        for (loss, accuracy) in on_ranks(ranks, Some(1), |world| {
            let mut step = step(&spec(0.0), world, false)?;
            let loss = train(world, &mut step, 0..300)?;
            let held_out = Integers::new(64, 1000);
            let (rank, ranks) = (world.rank(), world.size());
            let mut held_out = InOrder::new(held_out, rank, ranks, 10, Device::Cpu)?;
            let stats = step.evaluate(&mut held_out, &world.group("evaluation")?)?;
            assert_eq!(
                stats.rows,
                (64 * POSITIONS) as f64,
                "a loss for each position"
            );
            Ok((loss, stats.accuracy()))
        }) {
            assert!(
                loss < 0.2 && accuracy > 0.95,
                "{ranks} ranks: {loss} {accuracy}"
            );
        }
    }
}

#[test]
fn a_saved_run_resumes_to_the_same_bits() {
    quietly();
    for (ranks, zero) in [(1, false), (2, false), (2, true)] {
        let (spec, folder) = (spec(0.25), Folder::new("positions"));
        let out: &Path = &folder.out();
        std::fs::create_dir_all(out).unwrap();
        let whole = on_ranks(ranks, Some(1), |world| {
            let mut step = step(&spec, world, zero)?;
            let mut saver = Saver::new(world, out, 3)?;
            train(world, &mut step, 0..5)?;
            saver.save(&mut step, state(&spec, ranks, 5))?;
            saver.finish()?;
            let loss = train(world, &mut step, 5..9)?;
            Ok((loss, bits(&step.model().params)?))
        });
        let (opened, _) = checkpoint::newest(out).unwrap();
        let opened = opened.unwrap();
        let config = Config::of_checkpoint(&opened).unwrap();
        assert_eq!(config.model, spec, "what the checkpoint says the model is");
        let resumed = on_ranks(ranks, Some(2), |world| {
            let mut step = step(&config.model, world, zero)?;
            checkpoint::restore(&opened, &mut step)?;
            let loss = train(world, &mut step, 5..9)?;
            Ok((loss, bits(&step.model().params)?))
        });
        assert!(whole == resumed, "{ranks} ranks, ZeRO {zero}");
    }
}

#[test]
fn parameters_are_counted_without_data() {
    let shape = DataShape {
        row_shape: &[POSITIONS, AT_EACH],
        dtype: DType::I64,
        outputs: CLASSES,
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
    match cli::parse(words)? {
        Command::Train(config) => Ok(*config),
        Command::Show(text) => Err(Error::Usage(text)),
        other => panic!("{line}: {other:?}"),
    }
}

fn refusal(line: &str) -> String {
    parse(line).expect_err(line).to_string()
}

#[test]
fn its_flags_follow_from_its_settings() {
    let config = parse("--model positions --values 9 --width 4 --dropout 0.5").unwrap();
    let expected = PositionsSpec {
        values: 9,
        width: 4,
        dropout: 0.5,
    };
    assert_eq!(config.model, ModelSpec::Positions(expected));
    // --dropout is a setting of both families.
    let expected = MlpSpec {
        dropout: 0.5,
        ..MlpSpec::default()
    };
    assert_eq!(
        parse("--dropout 0.5").unwrap().model,
        ModelSpec::Mlp(expected)
    );
    assert!(refusal("--model positions --width 0").contains("--width 0: expected"));
}

#[test]
fn a_setting_of_another_family_is_refused() {
    for (line, parts) in [
        (
            "--hidden 5 --model positions",
            ["--hidden", "requires --model mlp"],
        ),
        (
            "--width 5",
            ["--width", "requires --model positions, got --model mlp"],
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
    let text = text.unwrap_err().to_string();
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
        config.settled()
    );
    let json: Config = serde_json::from_value(config.to_json().into()).unwrap();
    assert_eq!(json, config.settled());
    let lines = config.equal_on_all_ranks();
    assert!(
        lines.contains("model = \"positions\"\n") && lines.contains("width = 3\n"),
        "{lines}"
    );
}

#[test]
fn help_leaves_it_out() {
    let help = refusal("--help");
    for hidden in ["positions", "--width", "--values"] {
        assert!(!help.contains(hidden), "{hidden} in {help}");
    }
}
