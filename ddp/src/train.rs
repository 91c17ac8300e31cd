//! `ddp-train train`: a run with its settings, progress, curves and report.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ddp_comm::World;
use ddp_engine::setting::{CLASS_WEIGHTS, LABEL_SMOOTHING};
use ddp_tools::report;
use ddp_tools::tensorboard::EventFile;

use crate::config::{ClassWeights, Config};
use crate::data::Data;
use crate::data::tables::Tables;
use crate::error::{Error, Result};
use crate::metrics_log::{EvalEvent, StepEvent};
use crate::models::{self, ModelSpec, OwnLayers};
use crate::nn::Loss;
use crate::progress::{self, Progress};
use crate::tables::READER;
use crate::trainer::{self, RunProgram};

/// Trains as `config` says, as one of the ranks of `world`.
pub fn train(config: &Config, world: &World) -> Result<()> {
    if world.rank() == 0 && *config == Config::default() {
        tracing::info!(
            "no settings were given: training a small network on built-in images of digits, into \
             {}; --data FILE trains on yours, and --help lists every command and flag",
            config.out.display()
        );
    }
    trainer::train(config, &mut TrainProgram::new(config), world)
}

/// A run with a program's own model, loss and data, and with everything else that `ddp-train` has:
/// checkpoints, resuming, evaluation, the metrics log and its report, signals.
///
/// ```no_run
/// use ddp::Trainer;
/// use ddp::config::{Config, Resume};
/// use ddp::data::Data;
/// use ddp::models::OwnLayers;
/// use ddp::nn::{Activate, CrossEntropy, Linear, Sequential};
///
/// fn train(data: Data, world: &ddp_comm::World) -> ddp::Result<()> {
///     let model = OwnLayers::new(|data| {
///         let hidden = Sequential::new().then(Linear::new(64)).then(Activate::relu());
///         Ok(hidden.then(Linear::new(data.outputs)))
///     });
///     Trainer::builder(model, CrossEntropy::default(), data)
///         .config(Config {
///             epochs: Some(3),
///             resume: Resume::Auto,
///             ..Config::default()
///         })
///         .run(world)
/// }
/// ```
#[derive(Debug)]
pub struct Trainer {
    config: Config,
    loss: Arc<dyn Loss>,
    data: Data,
}

impl Trainer {
    /// Trains `model`, layers or a family with its settings, on `data` with the default settings.
    pub fn builder(model: impl Into<ModelSpec>, loss: impl Loss + 'static, data: Data) -> Trainer {
        // Checkpoints name the model's family.
        models::register::<OwnLayers>();
        let config = Config {
            model: model.into(),
            ..Config::default()
        };
        let loss = Arc::new(loss);
        Trainer { config, loss, data }
    }

    /// With these settings: those of `ddp-train`, without the model's, the data's and the loss's.
    pub fn config(self, config: Config) -> Trainer {
        let model = self.config.model;
        let config = Config { model, ..config };
        Trainer { config, ..self }
    }

    /// Trains, as one of the ranks of `world`. Every rank calls it alike. Shows the log if the
    /// program has no subscriber.
    pub fn run(self, world: &World) -> Result<()> {
        let config = &self.config;
        config.check()?;
        progress::start_log(config.log_level, ddp_comm::likely_rank());
        if config.label_smoothing != 0.0 || config.class_weights != ClassWeights::Equal {
            return Err(Error::Usage(format!(
                "{LABEL_SMOOTHING} and {CLASS_WEIGHTS}: expected the defaults, since the trainer is given its loss; help: \
                 give them to the loss"
            )));
        }
        let mut program = TrainProgram {
            data: Some(self.data),
            loss: Some(self.loss),
            ..TrainProgram::new(config)
        };
        trainer::train(config, &mut program, world)
    }
}

/// `ddp-train` as the trainer sees it.
pub(crate) struct TrainProgram<'a> {
    config: &'a Config,
    /// In place of what the settings name.
    data: Option<Data>,
    /// In place of the one that follows from the data.
    loss: Option<Arc<dyn Loss>>,
    /// Once the run has begun, on rank 0.
    progress: Option<Progress>,
    /// With `--tensorboard`.
    curves: Option<EventFile>,
}

impl TrainProgram<'_> {
    pub(crate) fn new(config: &Config) -> TrainProgram<'_> {
        TrainProgram {
            config,
            data: None,
            loss: None,
            progress: None,
            curves: None,
        }
    }
}

impl RunProgram for TrainProgram<'_> {
    fn loss(&self) -> Option<Arc<dyn Loss>> {
        self.loss.clone()
    }

    fn data(&self) -> Option<Data> {
        self.data.clone()
    }

    fn tables(&self) -> Option<&'static dyn Tables> {
        Some(READER)
    }

    fn begin(&mut self, out: &Path, taken: u64, steps: u64) -> Result<()> {
        if self.config.tensorboard {
            self.curves = Some(EventFile::create(out, taken + 1)?);
        }
        self.progress = Some(Progress::new(self.config.progress, taken, steps));
        Ok(())
    }

    fn step(&mut self, step: u64) {
        self.progress.iter().for_each(|shown| shown.step(step));
    }

    fn logged(&mut self, event: &StepEvent) -> Result<()> {
        self.progress.iter_mut().for_each(|it| it.figures(event));
        self.curves.iter_mut().try_for_each(|it| it.step(event))
    }

    fn evaluated(&mut self, event: &EvalEvent) -> Result<()> {
        self.curves
            .iter_mut()
            .try_for_each(|it| it.evaluation(event))
    }

    fn note(&mut self, line: &str) {
        self.progress.iter().for_each(|shown| shown.note(line));
    }

    fn finish(&mut self) {
        self.progress.iter_mut().for_each(Progress::finish);
    }

    fn report(&self, out: &Path) -> Result<PathBuf> {
        report::make(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::spell_settings_as_flags;

    fn config(flags: &str) -> Config {
        let words = ["ddp-train"].into_iter().chain(flags.split_whitespace());
        let (crate::cli::Command::Train(config), _) = crate::cli::parse(words).unwrap() else {
            panic!("{flags} is a run")
        };
        *config
    }

    #[test]
    fn flags_that_alter_what_is_computed_are_named_with_what_they_were() {
        spell_settings_as_flags();
        let then = config("--lr 0.001 --class-weights 1,2");
        let changed = |flags: &str| config(flags).changes(&then).join("; ");
        assert_eq!(changed("--lr 0.001 --class-weights 1,2"), "");
        assert_eq!(
            changed("--lr 0.01 --class-weights 1,2"),
            "--lr 0.01 (was 0.001)"
        );
        assert_eq!(
            changed("--class-weights 1,2 --micro-batch 4"),
            "--micro-batch 4 (was not given)"
        );
        assert_eq!(
            changed("--seed 7"),
            "--class-weights none (was 1,2); --seed 7 (was 0)"
        );
        let optimizer =
            changed("--class-weights 1,2 --optimizer sgd --lr 0.001 --weight-decay 0.01");
        assert!(
            optimizer.starts_with("--optimizer sgd (was adamw); --beta1 not given (was 0.9)")
                && optimizer.ends_with("--momentum 0.9 (was not given)"),
            "{optimizer}"
        );
    }

    #[test]
    fn settings_that_keep_the_result_may_change() {
        let then = config("");
        let flags = "--data glyphs,rows=7 --device cuda:0 --data-on-device off --graph off --zero 1 --bucket-mb 1 \
                     --overlap off --steps 3 --warmup-steps 1 --checkpoint-every 3 --keep 9 --eval-every 2 --log-every 3 --resume auto --override \
                     --init-from a.safetensors --out elsewhere --threads 1 --progress never --log-level error --timeout-s 9 --cache-dir c \
                     --tensorboard --sample a --trace 2..";
        assert_eq!(config(flags).changes(&then), [""; 0]);
        let others = Some("y".to_string());
        let elsewhere = Config {
            labels: others.clone(),
            val_labels: others,
            val_data: Some(then.data.clone()),
            ..then.clone()
        };
        assert_eq!(elsewhere.changes(&then), [""; 0]);
        assert_eq!(
            config("--epochs 9 --device cuda --share-gpus").changes(&then),
            [""; 0]
        );
    }
}
