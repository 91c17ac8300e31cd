//! The limits of settings. An error names the flag, what was expected and what helps.

use std::ops::RangeInclusive;
use std::path::Path;

use super::defaults::Optimizer;
use super::settings::Config;
use super::values::{OptimizerKind, Schedule};
use crate::error::{Error, Result, with_flags};
use crate::trainer::Length;

/// The largest whole number in a TOML file.
pub(super) const WHOLE_MAX: u64 = i64::MAX as u64;

/// Seconds that `--timeout-s` takes.
pub(crate) const TIMEOUT_S: RangeInclusive<f64> = 0.1..=1e9;

impl Config {
    /// Checks every setting, as far as that is possible without the data.
    pub fn check(&self) -> Result<()> {
        self.check_model_and_data()?;
        self.check_optimization()?;
        within(
            "--bucket-mb",
            self.bucket_mb,
            0.001,
            65_536.0,
            "it is the size of a bucket of gradients in MB",
        )?;
        whole("--zero", self.zero, 0, 1)?;
        whole("--devices-per-rank", self.devices_per_rank as u64, 1, 64)?;
        self.check_devices()?;
        within(
            "--timeout-s",
            self.timeout_s,
            *TIMEOUT_S.start(),
            *TIMEOUT_S.end(),
            "it is how many seconds a rank waits for the others; usual are 600",
        )?;
        threads(self.threads)?;
        whole("--seed", self.seed, 0, WHOLE_MAX)?;
        whole("--log-every", self.log_every, 1, WHOLE_MAX)?;
        whole(
            "--checkpoint-every",
            self.checkpoint_every.unwrap_or(0),
            0,
            WHOLE_MAX,
        )?;
        whole("--keep", self.keep, 1, WHOLE_MAX)?;
        whole("--eval-every", self.eval_every.unwrap_or(0), 0, WHOLE_MAX)?;
        if self.out.as_os_str().is_empty() {
            return Err(refuse(
                "--out",
                "",
                "the name of a folder",
                "choose another folder for this run",
            ));
        }
        texts([
            ("--out", Some(&self.out)),
            ("--cache-dir", self.cache_dir.as_deref()),
            ("--init-from", self.init_from.as_deref()),
        ])
    }

    fn check_model_and_data(&self) -> Result<()> {
        let check = self.model.check();
        check.map_err(|error| Error::Usage(with_flags(&error.to_string())))?;
        below_one(
            "--val-split",
            self.val_split,
            "it is the part of the rows that is kept for evaluation",
        )?;
        whole("--batch-size", self.batch_size, 1, WHOLE_MAX)?;
        if let Some(rows) = self.micro_batch {
            whole("--micro-batch", rows as u64, 1, WHOLE_MAX)?;
        }
        if let (Some(steps), Some(epochs)) = (self.steps, self.epochs) {
            let help = format!("leave --epochs {epochs} out");
            return Err(refuse(
                "--steps",
                steps,
                "either --steps or --epochs",
                &help,
            ));
        }
        match self.length() {
            Length::Steps(steps) => whole("--steps", steps, 0, WHOLE_MAX),
            Length::Epochs(epochs) => whole("--epochs", epochs, 1, WHOLE_MAX).map_err(|error| {
                Error::Usage(format!("{error}; --steps 0 saves the untrained model"))
            }),
        }
    }

    fn check_optimization(&self) -> Result<()> {
        within(
            "--lr",
            self.peak_lr(),
            0.0,
            f64::MAX,
            "a usual value is 0.001 for adamw, 0.1 for sgd",
        )?;
        let lowest = "the schedule ends there, at most at --lr";
        within("--min-lr", self.min_lr, 0.0, self.peak_lr(), lowest)?;
        if self.schedule == Schedule::Constant && self.min_lr != 0.0 {
            let expected = "a schedule that goes down";
            return Err(refuse(
                "--min-lr",
                self.min_lr,
                expected,
                "give --schedule cosine, or leave --min-lr out",
            ));
        }
        within(
            "--weight-decay",
            self.decay(),
            0.0,
            f64::MAX,
            "0 turns it off",
        )?;
        self.check_owner()?;
        match self.optimizer() {
            Optimizer::Adamw { beta1, beta2, eps } => {
                below_one("--beta1", beta1, "a usual value is 0.9")?;
                below_one("--beta2", beta2, "a usual value is 0.999")?;
                if !(eps > 0.0 && eps <= 1.0) {
                    return Err(refuse(
                        "--eps",
                        eps,
                        "a number above 0, up to 1",
                        "a usual value is 1e-8",
                    ));
                }
            }
            Optimizer::Sgd { momentum } => below_one(
                "--momentum",
                momentum,
                "a usual value is 0.9; 0 turns it off",
            )?,
        }
        if let (Some(warmup), Length::Steps(steps)) = (self.warmup_steps, self.length())
            && warmup > steps
        {
            return Err(warmup_too_long(warmup, steps));
        }
        whole(
            "--warmup-steps",
            self.warmup_steps.unwrap_or(0),
            0,
            WHOLE_MAX,
        )?;
        within(
            "--grad-clip",
            self.grad_clip,
            0.0,
            f64::MAX,
            "0 turns clipping off",
        )?;
        below_one("--label-smoothing", self.label_smoothing, "0 turns it off")?;
        for &weight in &self.class_weights {
            within(
                "--class-weights",
                weight,
                0.0,
                1e30,
                "give a weight for each class, as in 1,1,2.5",
            )?;
        }
        // Weights are used as f32, which rounds the smallest f64 to 0.
        if !self.class_weights.is_empty()
            && self
                .class_weights
                .iter()
                .all(|&weight| weight as f32 == 0.0)
        {
            return Err(refuse(
                "--class-weights",
                show(&self.class_weights),
                "a weight above 0",
                "nothing would be learned from 0 alone",
            ));
        }
        match self.freeze.iter().find(|prefix| prefix.is_empty()) {
            Some(_) => Err(refuse(
                "--freeze",
                "an empty name",
                "names of layers or parameters",
                "as in --freeze 0,2.bias",
            )),
            None => Ok(()),
        }
    }

    /// Refuses constants of the optimizer that was not chosen.
    fn check_owner(&self) -> Result<()> {
        let (owner, others) = match self.optimizer {
            OptimizerKind::Adamw => (
                "sgd",
                [("--momentum", self.momentum), ("", None), ("", None)],
            ),
            OptimizerKind::Sgd => (
                "adamw",
                [
                    ("--beta1", self.beta1),
                    ("--beta2", self.beta2),
                    ("--eps", self.eps),
                ],
            ),
        };
        for (flag, value) in others {
            if let Some(value) = value {
                let expected = format!("--optimizer {owner}");
                return Err(refuse(flag, value, &expected, &format!("leave {flag} out")));
            }
        }
        Ok(())
    }
}

/// The error of a setting with a wrong value.
pub(crate) fn refuse(flag: &str, got: impl std::fmt::Display, expected: &str, help: &str) -> Error {
    Error::Usage(format!("{flag} {got}: expected {expected}; help: {help}"))
}

pub(super) fn warmup_too_long(warmup: u64, steps: u64) -> Error {
    let expected = format!("at most the {steps} steps of the run");
    refuse(
        "--warmup-steps",
        warmup,
        &expected,
        "warm up for less, or train for more",
    )
}

pub(super) fn show(values: &[f64]) -> String {
    values
        .iter()
        .map(f64::to_string)
        .collect::<Vec<_>>()
        .join(",")
}

pub(super) fn within(flag: &str, value: f64, least: f64, most: f64, help: &str) -> Result<()> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    let expected = match most {
        f64::MAX => format!("a finite number, {least} or more"),
        _ => format!("a number from {least} to {most}"),
    };
    Err(refuse(flag, value, &expected, help))
}

pub(super) fn below_one(flag: &str, value: f64, help: &str) -> Result<()> {
    if (0.0..1.0).contains(&value) {
        return Ok(());
    }
    Err(refuse(flag, value, "a number from 0 on, below 1", help))
}

pub(super) fn whole(flag: &str, value: u64, least: u64, most: u64) -> Result<()> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(refuse(
        flag,
        value,
        &format!("a whole number from {least} to {most}"),
        "give another",
    ))
}

/// Refuses paths that are not UTF-8: TOML files and the record cannot hold them.
pub(crate) fn texts(paths: [(&str, Option<&Path>); 3]) -> Result<()> {
    match paths.iter().find_map(|(flag, path)| {
        path.filter(|path| path.to_str().is_none())
            .map(|path| (flag, path))
    }) {
        None => Ok(()),
        Some((flag, path)) => Err(refuse(
            flag,
            path.display(),
            "a name in UTF-8",
            "give another, or rename the file or folder",
        )),
    }
}

pub(super) fn threads(count: Option<usize>) -> Result<()> {
    let most = ddp_kernels::threads::COUNT_MAX;
    match count {
        Some(count) if count == 0 || count > most => {
            let help = "leave it out for this rank's share of the cores";
            Err(refuse(
                "--threads",
                count,
                &format!("a whole number from 1 to {most}"),
                help,
            ))
        }
        _ => Ok(()),
    }
}
