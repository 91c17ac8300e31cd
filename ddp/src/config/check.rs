//! What a configuration's values may be: each error names the flag, what was given, what may be given, and the way out.

use std::path::Path;
use std::time::Duration;

use super::{Config, Length, List, Optimizer, Schedule};
use crate::data::Task;
use crate::error::{Error, Result};

/// Whole numbers of a TOML file end here.
pub(super) const WHOLE_MAX: u64 = i64::MAX as u64;

/// The widest layer.
pub(super) const WIDTH_MAX: usize = 1 << 24;

impl Config {
    /// The command line's numbers, each against what it may be.
    pub(super) fn check(&self) -> Result<()> {
        self.check_model_and_data()?;
        self.check_optimization()?;
        within("--bucket-mb", self.bucket_mb, 0.001, 65_536.0, "It is the size of a bucket of gradients in MB")?;
        whole("--zero", self.zero, 0, 1)?;
        whole("--devices-per-rank", self.devices_per_rank as u64, 1, 64)?;
        self.check_devices()?;
        timeout(self.timeout_s)?;
        threads(self.threads)?;
        whole("--seed", self.seed, 0, WHOLE_MAX)?;
        whole("--log-every", self.log_every, 1, WHOLE_MAX)?;
        whole("--checkpoint-every", self.checkpoint_every.unwrap_or(0), 0, WHOLE_MAX)?;
        whole("--keep", self.keep, 1, WHOLE_MAX)?;
        whole("--eval-every", self.eval_every.unwrap_or(0), 0, WHOLE_MAX)?;
        if self.out.as_os_str().is_empty() {
            return Err(refuse("--out", "", "the name of a folder", "Choose another folder for this run"));
        }
        texts([
            ("--out", Some(&self.out)),
            ("--cache-dir", self.cache_dir.as_deref()),
            ("--init-from", self.init_from.as_deref()),
        ])
    }

    fn check_model_and_data(&self) -> Result<()> {
        let widths = "Give widths with commas between, as in --hidden 256,128, or none for a linear model";
        if let Some(width) = self.hidden.iter().find(|&&width| !(1..=WIDTH_MAX).contains(&width)) {
            return Err(refuse("--hidden", width, &format!("widths from 1 to {WIDTH_MAX}"), widths));
        }
        below_one("--val-split", self.val_split, "It is the part of the rows that is kept for evaluation")?;
        below_one("--dropout", self.dropout, "It is the probability of dropping an element; 0 turns it off")?;
        whole("--batch-size", self.batch_size, 1, WHOLE_MAX)?;
        if let Some(rows) = self.micro_batch {
            whole("--micro-batch", rows as u64, 1, WHOLE_MAX)?;
        }
        match self.length {
            Length::Steps(steps) => whole("--steps", steps, 0, WHOLE_MAX),
            Length::Epochs(epochs) => whole("--epochs", epochs, 1, WHOLE_MAX)
                .map_err(|error| Error::Usage(format!("{error}. --steps 0 saves the model without training it"))),
        }
    }

    fn check_optimization(&self) -> Result<()> {
        within("--lr", self.lr, 0.0, f64::MAX, "A usual value is 0.001 for adamw, 0.1 for sgd")?;
        let lowest = "It is where the schedule ends, at most --lr";
        within("--min-lr", self.min_lr, 0.0, self.lr, lowest)?;
        if self.schedule == Schedule::Constant && self.min_lr != 0.0 {
            let expected = "a schedule that goes down";
            return Err(refuse("--min-lr", self.min_lr, expected, "Give --schedule cosine, or leave --min-lr out"));
        }
        within("--weight-decay", self.weight_decay, 0.0, f64::MAX, "0 turns it off")?;
        match self.optimizer {
            Optimizer::Adamw { beta1, beta2, eps } => {
                below_one("--beta1", beta1, "A usual value is 0.9")?;
                below_one("--beta2", beta2, "A usual value is 0.999")?;
                if !(eps > 0.0 && eps <= 1.0) {
                    return Err(refuse("--eps", eps, "a number above 0, up to 1", "A usual value is 1e-8"));
                }
            }
            Optimizer::Sgd { momentum } => below_one("--momentum", momentum, "A usual value is 0.9; 0 turns it off")?,
        }
        if let (Some(warmup), Length::Steps(steps)) = (self.warmup_steps, self.length)
            && warmup > steps
        {
            return Err(warmup_too_long(warmup, steps));
        }
        whole("--warmup-steps", self.warmup_steps.unwrap_or(0), 0, WHOLE_MAX)?;
        within("--grad-clip", self.grad_clip, 0.0, f64::MAX, "0 turns clipping off")?;
        below_one("--label-smoothing", self.label_smoothing, "0 turns it off")?;
        for &weight in &self.class_weights {
            within("--class-weights", weight, 0.0, 1e30, "Give a weight for each class, as in 1,1,2.5")?;
        }
        // They are used in f32, where the smallest of f64 are 0.
        if !self.class_weights.is_empty() && self.class_weights.iter().all(|&weight| weight as f32 == 0.0) {
            let got = List(self.class_weights.clone());
            return Err(refuse(
                "--class-weights",
                show(&got.0),
                "a weight above 0",
                "Nothing would be learned from 0 alone",
            ));
        }
        match self.freeze.iter().find(|prefix| prefix.is_empty()) {
            Some(_) => {
                Err(refuse("--freeze", "an empty name", "names of layers or parameters", "As in --freeze 0,2.bias"))
            }
            None => Ok(()),
        }
    }

    pub(super) fn check_task(&self, task: &Task) -> Result<()> {
        let weights = &self.class_weights;
        match task {
            Task::Classification { classes, .. } if !weights.is_empty() && weights.len() != *classes => {
                let expected = format!("{classes} weights, one for each class of {}", self.data.name());
                let way_out = "Give as many, or leave --class-weights out";
                Err(refuse("--class-weights", format!("{} of them", weights.len()), &expected, way_out))
            }
            Task::Regression { .. } if !weights.is_empty() => {
                let (got, expected) = (show(weights), "data that have classes");
                Err(refuse("--class-weights", got, expected, &format!("{} has none: leave it out", self.data.name())))
            }
            Task::Regression { .. } if self.label_smoothing != 0.0 => {
                let (got, expected) = (self.label_smoothing, "data that have classes");
                Err(refuse("--label-smoothing", got, expected, &format!("{} has none: leave it out", self.data.name())))
            }
            _ => Ok(()),
        }
    }
}

pub(crate) fn refuse(flag: &str, got: impl std::fmt::Display, expected: &str, way_out: &str) -> Error {
    Error::Usage(format!("{flag} {got}: expected {expected}. {way_out}"))
}

pub(super) fn warmup_too_long(warmup: u64, steps: u64) -> Error {
    let expected = format!("at most the {steps} steps of the run");
    refuse("--warmup-steps", warmup, &expected, "Warm up for less, or train for more")
}

pub(super) fn show(values: &[f64]) -> String {
    values.iter().map(f64::to_string).collect::<Vec<_>>().join(",")
}

pub(super) fn within(flag: &str, value: f64, least: f64, most: f64, way_out: &str) -> Result<()> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    let expected = match most {
        f64::MAX => format!("a finite number, {least} or more"),
        _ => format!("a number from {least} to {most}"),
    };
    Err(refuse(flag, value, &expected, way_out))
}

pub(super) fn below_one(flag: &str, value: f64, way_out: &str) -> Result<()> {
    if (0.0..1.0).contains(&value) {
        return Ok(());
    }
    Err(refuse(flag, value, "a number from 0 on, below 1", way_out))
}

pub(super) fn whole(flag: &str, value: u64, least: u64, most: u64) -> Result<()> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(refuse(flag, value, &format!("a whole number from {least} to {most}"), "Give another"))
}

/// How long a rank waits for the others: the one place where the seconds that people write become a time.
pub fn timeout(seconds: f64) -> Result<Duration> {
    within("--timeout-s", seconds, 0.1, 1e9, "It is how many seconds a rank waits for the others; usual are 600")?;
    Ok(Duration::from_secs_f64(seconds))
}

/// Refuses paths that a TOML file and the record cannot hold.
pub(crate) fn texts(paths: [(&str, Option<&Path>); 3]) -> Result<()> {
    match paths.iter().find_map(|(flag, path)| path.filter(|path| path.to_str().is_none()).map(|path| (flag, path))) {
        None => Ok(()),
        Some((flag, path)) => {
            Err(refuse(flag, path.display(), "a name in UTF-8", "Give another, or rename the file or folder"))
        }
    }
}

pub(super) fn threads(count: Option<usize>) -> Result<()> {
    let most = ddp_kernels::threads::COUNT_MAX;
    match count {
        Some(count) if count == 0 || count > most => {
            let way_out = "Leave it out for this rank's share of the cores";
            Err(refuse("--threads", count, &format!("a whole number from 1 to {most}"), way_out))
        }
        _ => Ok(()),
    }
}
