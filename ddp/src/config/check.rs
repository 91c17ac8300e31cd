//! Checks of settings against each other; the list of settings has their limits. An error names the
//! flag, what was expected and what helps.

use std::path::Path;

use ddp_kernels::choice::Choice;

use super::defaults::Optimizer;
use super::settings::{Config, SETTINGS};
use super::values::{ClassWeights, Limits, Number, OptimizerKind, Schedule};
use crate::error::{Error, Result, with_flags};
use crate::trainer::Length;

impl Config {
    /// Checks every setting, as far as that is possible without the data.
    pub fn check(&self) -> Result<()> {
        for setting in SETTINGS.iter() {
            if let Some(text) = setting.refusal(self) {
                return Err(Error::Usage(text));
            }
        }
        let check = self.model.check();
        check.map_err(|error| Error::Usage(with_flags(&error.to_string())))?;
        self.check_length()?;
        self.check_optimization()?;
        self.check_devices()?;
        if self.out.as_os_str().is_empty() {
            let help = "choose another folder for this run";
            return Err(refuse("--out", "", "the name of a folder", help));
        }
        check_utf8("--out", Some(&self.out))?;
        check_utf8("--cache-dir", self.cache_dir.as_deref())?;
        check_utf8("--init-from", self.init_from.as_deref())
    }

    fn check_length(&self) -> Result<()> {
        if let Some(tokens) = self.batch_tokens {
            self.check_tokens(tokens)?;
        }
        if let (Some(steps), Some(epochs)) = (self.steps, self.epochs) {
            let help = format!("leave --epochs {epochs} out");
            let expected = "either --steps or --epochs";
            return Err(refuse("--steps", steps, expected, &help));
        }
        if self.epochs == Some(0) {
            let help = "--steps 0 saves the untrained model";
            return Err(refuse("--epochs", 0, "a whole number, 1 or more", help));
        }
        if let (Some(warmup), Length::Steps(steps)) = (self.warmup_steps, self.length())
            && warmup > steps
        {
            let expected = format!("at most the {steps} steps of the run");
            let help = "warm up for less, or train for more";
            return Err(refuse("--warmup-steps", warmup, &expected, help));
        }
        Ok(())
    }

    fn check_tokens(&self, tokens: u64) -> Result<()> {
        if let Some(rows) = self.batch_size {
            let help = format!("leave --batch-size {rows} out");
            let expected = "either --batch-size or --batch-tokens";
            return Err(refuse("--batch-tokens", tokens, expected, &help));
        }
        let Some(context) = self.model.context().map(|context| context as u64) else {
            let help = "give --batch-size ROWS";
            return Err(refuse(
                "--batch-tokens",
                tokens,
                "a model of tokens, such as gpt",
                help,
            ));
        };
        if tokens.is_multiple_of(context) {
            return Ok(());
        }
        let below = tokens / context * context;
        let above = below.saturating_add(context);
        let help = match below {
            0 => format!("give {above}"),
            _ => format!("give {below} or {above}"),
        };
        let expected = format!("a multiple of the model's context, {context} tokens");
        Err(refuse("--batch-tokens", tokens, &expected, &help))
    }

    /// Refuses groups that say nothing, or whose learning rate has no scale.
    fn check_groups(&self) -> Result<()> {
        for group in &self.group.0 {
            let got = &group.pattern;
            for (name, value) in [("lr", group.lr), ("weight-decay", group.weight_decay)] {
                let value = value.unwrap_or_default();
                if let Some(expected) = Limits::Real(0.0, f64::MAX).refusal(Number::Real(value)) {
                    let got = format!("{got}:{name}={value}");
                    return Err(refuse("--group", got, &expected, "give another"));
                }
            }
            if group.lr.is_none() && group.weight_decay.is_none() {
                let help = "as in --group '*.bias:weight-decay=0'";
                return Err(refuse("--group", got, "an lr or a weight-decay", help));
            }
            if group.lr.is_some() && self.peak_lr() == 0.0 {
                let help = "rates of groups follow the schedule of --lr";
                return Err(refuse("--group", got, "an --lr above 0", help));
            }
        }
        self.groups().map(|_| ())
    }

    fn check_optimization(&self) -> Result<()> {
        if self.min_lr > self.peak_lr() {
            let expected = format!("at most --lr {}", self.peak_lr());
            let help = "the schedule ends there";
            return Err(refuse("--min-lr", self.min_lr, &expected, help));
        }
        if self.schedule == Schedule::Constant && self.min_lr != 0.0 {
            let help = "give --schedule cosine, or leave --min-lr out";
            let expected = "a schedule that goes down";
            return Err(refuse("--min-lr", self.min_lr, expected, help));
        }
        self.check_owner()?;
        self.check_groups()?;
        if let Some(eps) = self.eps.filter(|&eps| !(eps > 0.0 && eps <= 1.0)) {
            let help = "a usual value is 1e-8";
            return Err(refuse("--eps", eps, "a number above 0, up to 1", help));
        }
        let weights = self.class_weights.numbers();
        if weights.iter().any(|weight| !(0.0..=1e30).contains(weight)) {
            let help = "give a weight for each class, as in 1,1,2.5";
            let expected = "numbers from 0 to 1e30";
            let got = &self.class_weights;
            return Err(refuse("--class-weights", got, expected, help));
        }
        // Weights are used as f32, which rounds the smallest f64 to 0. Unnamed classes have 1.
        let is_zero = weights.iter().all(|&weight| weight as f32 == 0.0);
        if is_zero && matches!(self.class_weights, ClassWeights::InOrder(_)) {
            let help = "with weights of 0 nothing is learned";
            let expected = "a weight above 0";
            let got = &self.class_weights;
            return Err(refuse("--class-weights", got, expected, help));
        }
        if self.freeze.iter().any(String::is_empty) {
            let (got, expected) = ("an empty name", "names of layers or parameters");
            return Err(refuse("--freeze", got, expected, "as in --freeze 0,2.bias"));
        }
        Ok(())
    }

    /// Refuses constants of the optimizer that was not chosen.
    fn check_owner(&self) -> Result<()> {
        use OptimizerKind::{Adamw, Muon, Sgd};
        let constants: [(_, _, &[OptimizerKind]); 5] = [
            ("--momentum", self.momentum, &[Sgd, Muon]),
            ("--adam-lr", self.adam_lr, &[Muon]),
            ("--beta1", self.beta1, &[Adamw, Muon]),
            ("--beta2", self.beta2, &[Adamw, Muon]),
            ("--eps", self.eps, &[Adamw, Muon]),
        ];
        for (flag, value, owners) in constants {
            if let Some(value) = value.filter(|_| !owners.contains(&self.optimizer)) {
                let owners: Vec<_> = owners.iter().map(|owner| owner.name()).collect();
                let expected = format!("--optimizer {}", owners.join(" or "));
                return Err(refuse(flag, value, &expected, &format!("leave {flag} out")));
            }
        }
        if self.optimizer == Muon && (self.momentum == Some(0.0) || self.peak_lr() == 0.0) {
            let (flag, help) = match self.momentum {
                Some(0.0) => ("--momentum", "a usual value is 0.95"),
                _ => ("--lr", "a usual value is 0.02"),
            };
            return Err(refuse(
                flag,
                0,
                "a number above 0 with --optimizer muon",
                help,
            ));
        }
        let is_without =
            !matches!(self.optimizer(), Optimizer::Sgd { momentum, .. } if momentum > 0.0);
        if self.nesterov && is_without {
            let expected = "--optimizer sgd with a --momentum above 0";
            return Err(refuse("--nesterov", true, expected, "leave --nesterov out"));
        }
        Ok(())
    }
}

/// The error of a setting with a wrong value.
pub(crate) fn refuse(flag: &str, got: impl std::fmt::Display, expected: &str, help: &str) -> Error {
    Error::Usage(format!("{flag} {got}: expected {expected}; help: {help}"))
}

/// Refuses a path that is not UTF-8: TOML files and the record cannot hold it.
fn check_utf8(flag: &str, path: Option<&Path>) -> Result<()> {
    match path.filter(|path| path.to_str().is_none()) {
        None => Ok(()),
        Some(path) => {
            let help = "give another, or rename the file or folder";
            Err(refuse(flag, path.display(), "a name in UTF-8", help))
        }
    }
}
