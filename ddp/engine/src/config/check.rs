//! Checks of settings against each other; the list of settings has their limits. An error names the
//! setting in backquotes, what was expected and what helps.

use std::fmt::Display;
use std::path::Path;

use super::derived::{CONSTANTS, Length};
use super::settings::{Config, SETTINGS};
use super::values::{
    ClassWeights, DeviceChoice, GraphChoice, Limits, Number, OptimizerKind, Precision, Resident,
    Schedule,
};
use crate::error::{Error, Result};

impl Config {
    /// Checks every setting, as far as that is possible without the data.
    pub fn check(&self) -> Result<()> {
        self.check_limits()?;
        self.model.check()?;
        self.check_length()?;
        self.check_optimization()?;
        self.check_devices()?;
        let help = "choose another folder for this run";
        let has_no_name = self.out.as_os_str().is_empty();
        refuse_if(has_no_name, "out", "", "the name of a folder", help)?;
        check_utf8("out", Some(&self.out))?;
        check_utf8("cache-dir", self.cache_dir.as_deref())?;
        check_utf8("init-from", self.init_from.as_deref())
    }

    /// Checks the settings that are numbers.
    pub fn check_limits(&self) -> Result<()> {
        let mut copy = self.clone();
        let refusal = SETTINGS.iter().find_map(|one| one.refusal(&mut copy));
        refusal.map_or(Ok(()), |text| Err(Error::Usage(text)))
    }

    fn check_length(&self) -> Result<()> {
        if let Some(tokens) = self.batch_tokens {
            self.check_tokens(tokens)?;
        }
        if let (Some(steps), Some(epochs)) = (self.steps, self.epochs) {
            let help = format!("leave `epochs` {epochs} out");
            let expected = "either `steps` or `epochs`";
            return Err(refuse("steps", steps, expected, &help));
        }
        let help = "`steps` 0 saves the untrained model";
        let is_zero = self.epochs == Some(0);
        refuse_if(is_zero, "epochs", 0, "a whole number, 1 or more", help)?;
        if let (Some(warmup), Length::Steps(steps)) = (self.warmup_steps, self.length()) {
            let expected = format!("at most the {steps} steps of the run");
            let help = "warm up for less, or train for more";
            refuse_if(warmup > steps, "warmup-steps", warmup, &expected, help)?;
        }
        Ok(())
    }

    fn check_tokens(&self, tokens: u64) -> Result<()> {
        const NAME: &str = "batch-tokens";
        if let Some(rows) = self.batch_size {
            let help = format!("leave `batch-size` {rows} out");
            let expected = "either `batch-size` or `batch-tokens`";
            return Err(refuse(NAME, tokens, expected, &help));
        }
        let Some(context) = self.model.context().map(|context| context as u64) else {
            let help = "give `batch-size` ROWS";
            return Err(refuse(NAME, tokens, "a model of tokens, such as gpt", help));
        };
        let below = tokens / context * context;
        let above = below.saturating_add(context);
        let help = match below {
            0 => format!("give {above}"),
            _ => format!("give {below} or {above}"),
        };
        let expected = format!("a multiple of the model's context, {context} tokens");
        refuse_if(below != tokens, NAME, tokens, &expected, &help)
    }

    /// Refuses groups that say nothing, or whose learning rate has no scale.
    fn check_groups(&self) -> Result<()> {
        for group in &self.group.0 {
            let got = &group.pattern;
            for (name, value) in [("lr", group.lr), ("weight-decay", group.weight_decay)] {
                let value = value.unwrap_or_default();
                if let Some(expected) = Limits::Real(0.0, f64::MAX).refusal(Number::Real(value)) {
                    let got = format!("{got}:{name}={value}");
                    return Err(refuse("group", got, &expected, "give another"));
                }
            }
            let help = "as in `group` '*.bias:weight-decay=0'";
            let is_bare = group.lr.is_none() && group.weight_decay.is_none();
            refuse_if(is_bare, "group", got, "an lr or a weight-decay", help)?;
            let help = "rates of groups follow the schedule of `lr`";
            let has_no_scale = group.lr.is_some() && self.peak_lr() == 0.0;
            refuse_if(has_no_scale, "group", got, "an `lr` above 0", help)?;
        }
        self.groups().map(|_| ())
    }

    fn check_optimization(&self) -> Result<()> {
        let (lr, min_lr) = (self.peak_lr(), self.min_lr);
        let expected = format!("at most `lr` {lr}");
        let help = "the schedule ends there";
        refuse_if(min_lr > lr, "min-lr", min_lr, &expected, help)?;
        let help = "give `schedule` cosine, or leave `min-lr` out";
        let expected = "a schedule that goes down";
        let has_no_end = self.schedule == Schedule::Constant && min_lr != 0.0;
        refuse_if(has_no_end, "min-lr", min_lr, expected, help)?;
        self.check_optimizer()?;
        self.check_groups()?;
        if let Some(eps) = self.eps {
            let is_wrong = !(eps > 0.0 && eps <= 1.0);
            let help = "a usual value is 1e-8";
            refuse_if(is_wrong, "eps", eps, "a number above 0, up to 1", help)?;
        }
        let (name, got) = ("class-weights", &self.class_weights);
        let weights = got.numbers();
        let is_wrong = weights.iter().any(|weight| !(0.0..=1e30).contains(weight));
        let help = "give a weight for each class, as in 1,1,2.5";
        refuse_if(is_wrong, name, got, "numbers from 0 to 1e30", help)?;
        // Weights are used as f32, which rounds the smallest f64 to 0. Unnamed classes have 1.
        let is_zero = weights.iter().all(|&weight| weight as f32 == 0.0)
            && matches!(self.class_weights, ClassWeights::InOrder(_));
        let help = "with weights of 0 nothing is learned";
        refuse_if(is_zero, name, got, "a weight above 0", help)?;
        let has_empty = self.freeze.iter().any(String::is_empty);
        let (got, expected) = ("an empty name", "names of layers or parameters");
        refuse_if(
            has_empty,
            "freeze",
            got,
            expected,
            "as in `freeze` 0,2.bias",
        )
    }

    /// Refuses constants of other optimizers, and constants with which this one does nothing.
    fn check_optimizer(&self) -> Result<()> {
        let (mut given, settled) = (self.clone(), &mut self.settled());
        for constant in &CONSTANTS {
            let (name, owners) = (constant.name, constant.owners());
            let value = (constant.field)(&mut given).unwrap_or_default();
            let is_given = (constant.field)(&mut given).is_some();
            let is_of_another = is_given && !constant.applies_to(self.optimizer);
            let expected = format!("`optimizer` {}", owners.join(" or "));
            let help = format!("leave `{name}` out");
            refuse_if(is_of_another, name, value, &expected, &help)?;
        }
        let is_muon = self.optimizer == OptimizerKind::Muon;
        let expected = "a number above 0 with `optimizer` muon";
        let help = "a usual value is 0.95";
        let has_none = settled.momentum == Some(0.0);
        refuse_if(is_muon && has_none, "momentum", 0, expected, help)?;
        let help = "a usual value is 0.02";
        let is_still = settled.lr == Some(0.0);
        refuse_if(is_muon && is_still, "lr", 0, expected, help)?;
        let expected = "`optimizer` sgd with a `momentum` above 0";
        let is_plain = self.optimizer != OptimizerKind::Sgd || has_none;
        let help = "leave `nesterov` out";
        refuse_if(self.nesterov && is_plain, "nesterov", true, expected, help)
    }

    /// Refuses settings of devices that exclude each other on any machine.
    fn check_devices(&self) -> Result<()> {
        let (device, per_rank) = (self.device, self.devices_per_rank);
        let is_split = per_rank > 1;
        let expected = "`devices-per-rank` 1: a step over several GPUs of a rank is not captured";
        let help = "leave `graph` out, or give each rank one GPU";
        let is_captured = self.graph == GraphChoice::On;
        refuse_if(is_split && is_captured, "graph", "on", expected, help)?;
        let is_on_cpu = device == DeviceChoice::Cpu;
        let expected = "GPUs to train on: `device` auto or cuda";
        let help = "leave it out: ranks on the CPU share nothing";
        let shares = is_on_cpu && self.share_gpus;
        refuse_if(shares, "share-gpus", true, expected, help)?;
        let is_one = matches!(device, DeviceChoice::CudaAt(_));
        let expected = format!("`device` cuda with `devices-per-rank` {per_rank}");
        let help = "give `device` cuda: each rank then takes as many as it needs; or leave \
                    `devices-per-rank` out";
        refuse_if(is_one && is_split, "device", device, &expected, help)?;
        if is_on_cpu { self.check_cpu() } else { Ok(()) }
    }

    /// Refuses settings that need a GPU, for a run on the CPU.
    pub fn check_cpu(&self) -> Result<()> {
        let (dtype, kept) = (self.dtype, self.data_on_device == Resident::On);
        let per_rank = self.devices_per_rank.to_string();
        let needs_gpu = [
            (
                dtype == Precision::Tf32,
                "dtype",
                "tf32",
                "only GPUs multiply in tf32",
            ),
            (
                dtype == Precision::Bf16,
                "dtype",
                "bf16",
                "only GPUs compute in bf16",
            ),
            (
                per_rank != "1",
                "devices-per-rank",
                &per_rank,
                "layers can only be split over GPUs",
            ),
            (
                kept,
                "data-on-device",
                "on",
                "data can only be kept in GPU memory",
            ),
            (
                self.graph == GraphChoice::On,
                "graph",
                "on",
                "only CUDA has graphs",
            ),
        ];
        for (is_given, name, got, why) in needs_gpu {
            let help = format!("leave `{name}` out, or train on GPUs: this run is on the CPU");
            refuse_if(is_given, name, got, &format!("`device` cuda: {why}"), &help)?;
        }
        Ok(())
    }
}

/// The error of a setting with a wrong value.
fn refuse(name: &str, got: impl Display, expected: &str, help: &str) -> Error {
    let text = format!("`{name}` {got}: expected {expected}; help: {help}");
    Error::Usage(text)
}

fn refuse_if(
    is_wrong: bool,
    name: &str,
    got: impl Display,
    expected: &str,
    help: &str,
) -> Result<()> {
    match is_wrong {
        true => Err(refuse(name, got, expected, help)),
        false => Ok(()),
    }
}

/// Refuses a path that is not UTF-8: TOML files and the record cannot hold it.
fn check_utf8(name: &str, path: Option<&Path>) -> Result<()> {
    match path.filter(|path| path.to_str().is_none()) {
        None => Ok(()),
        Some(path) => {
            let help = "give another, or rename the file or folder";
            Err(refuse(name, path.display(), "a name in UTF-8", help))
        }
    }
}
