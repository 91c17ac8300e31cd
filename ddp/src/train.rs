//! `ddp-train train`: a run with its settings, progress, curves and report.

use std::path::{Path, PathBuf};

use ddp_comm::World;
use ddp_kernels::Device;

use crate::config::Config;
use crate::data::Data;
use crate::device::{check_device, find_devices};
use crate::error::{Result, with_flags};
use crate::progress::{Figures, Progress};
use crate::record::{EvalEvent, StepEvent};
use crate::report;
use crate::tensorboard::EventFile;
use crate::trainer::{self, Program};

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

/// The same on a program's own data, whatever `config.data` is.
///
/// ```no_run
/// use ddp::config::Config;
/// use ddp::data::Data;
///
/// fn train(data: Data, world: &ddp_comm::World) -> ddp::Result<()> {
///     let config = Config::from_toml("epochs = 3\nout = \"own\"\n")?;
///     ddp::train::train_on(&config, data, world)
/// }
/// ```
pub fn train_on(config: &Config, data: Data, world: &World) -> Result<()> {
    let mut program = TrainProgram {
        data: Some(data),
        ..TrainProgram::new(config)
    };
    trainer::train(config, &mut program, world)
}

/// `ddp-train` as the trainer sees it.
pub(crate) struct TrainProgram<'a> {
    config: &'a Config,
    /// In place of what the settings name.
    data: Option<Data>,
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
            progress: None,
            curves: None,
        }
    }
}

impl Program for TrainProgram<'_> {
    fn devices(&self, world: &World) -> Result<Vec<Device>> {
        let config = self.config;
        let (per_rank, share) = (config.devices_per_rank, config.share_gpus);
        let devices = find_devices(config.device, per_rank, share, world)?;
        for device in &devices {
            check_device(config, *device)?;
        }
        Ok(devices)
    }

    fn data(&self) -> Option<Data> {
        self.data.clone()
    }

    fn named(&self, text: &str) -> String {
        with_flags(text)
    }

    fn begin(&mut self, out: &Path, taken: u64, steps: u64) -> Result<()> {
        if self.config.tensorboard {
            self.curves = Some(EventFile::create(out, taken + 1)?);
        }
        let progress = Progress::new(self.config.progress, steps);
        if taken > 0 {
            progress.step(taken);
        }
        self.progress = Some(progress);
        Ok(())
    }

    fn step(&mut self, step: u64) {
        if let Some(progress) = &self.progress {
            progress.step(step);
        }
    }

    fn logged(&mut self, event: &StepEvent) -> Result<()> {
        if let Some(progress) = &mut self.progress {
            progress.figures(&Figures {
                step: event.step,
                epoch: event.epoch,
                loss: event.loss,
                accuracy: event.accuracy,
                rate: match event.tokens_per_s {
                    Some(tokens) => (tokens, "tokens/s"),
                    None => (event.samples_per_s, "samples/s"),
                },
                tflops: event.tflops.map(|tflops| (tflops, event.product_share)),
            });
        }
        match &mut self.curves {
            Some(curves) => curves.step(event),
            None => Ok(()),
        }
    }

    fn evaluated(&mut self, event: &EvalEvent) -> Result<()> {
        match &mut self.curves {
            Some(curves) => curves.evaluation(event),
            None => Ok(()),
        }
    }

    fn note(&mut self, line: &str) {
        if let Some(progress) = &self.progress {
            progress.note(line);
        }
    }

    fn finish(&mut self) {
        if let Some(progress) = &mut self.progress {
            progress.finish();
        }
    }

    fn report(&self, out: &Path) -> Result<PathBuf> {
        report::make(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(flags: &str) -> Config {
        let words = ["ddp-train"].into_iter().chain(flags.split_whitespace());
        let crate::cli::Command::Train(config) = crate::cli::parse(words).unwrap() else {
            panic!("{flags} is a run")
        };
        *config
    }

    #[test]
    fn flags_that_alter_what_is_computed_are_named_with_what_they_were() {
        let then = config("--lr 0.001 --class-weights 1,2");
        let changed = |flags: &str| with_flags(&config(flags).changes(&then).join("; "));
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
