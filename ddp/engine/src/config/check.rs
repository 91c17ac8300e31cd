//! Checks of settings against each other; the list of settings has their limits. An error names the
//! setting, what was expected and what helps.

use std::fmt::Display;
use std::path::Path;

use ddp_kernels::setting::{Choice, SettingName};

use super::derived::{CONSTANTS, Length};
use super::settings::{Config, SETTINGS};
use super::values::{
    ClassWeights, DeviceChoice, GraphChoice, Limits, Number, OptimizerKind, Resident, Schedule,
};
use crate::error::{Error, Result};
use crate::setting::{
    BATCH_SIZE, BATCH_TOKENS, DEVICE, DEVICES_PER_RANK, DROPOUT, EPOCHS, EVAL_EVERY, FREEZE, GRAPH,
    GROUP, INIT_FROM, LR, MEMORY, MIN_LR, MOMENTUM, NESTEROV, OPTIMIZER, RECOMPUTE,
    RECOMPUTE_PARTS, SCHEDULE, STEPS,
};

impl Config {
    /// Checks every setting, as far as that is possible without the data.
    pub fn check(&self) -> Result<()> {
        self.check_limits()?;
        self.model.check()?;
        self.check_length()?;
        self.check_optimization()?;
        self.check_devices()?;
        self.check_memory()?;
        let has_name = !self.out.as_os_str().is_empty();
        let name = "the name of a folder; help: choose another folder for this run";
        require(has_name, "out", "", name)?;
        check_utf8("out", Some(&self.out))?;
        check_utf8("cache-dir", self.cache_dir.as_deref())?;
        check_utf8("tokenizer", self.tokenizer.as_deref())?;
        check_utf8("init-from", self.init_from.as_deref())?;
        let Some(lora) = &self.lora else {
            return Ok(());
        };
        let text = format!("{INIT_FROM} with the weights beside them; help: give a folder");
        require(self.init_from.is_some(), "lora", lora, &text)
    }

    /// Checks the settings that are numbers.
    pub fn check_limits(&self) -> Result<()> {
        let mut copy = self.clone();
        let refusal = SETTINGS.iter().find_map(|one| one.refusal(&mut copy));
        refusal.map_or(Ok(()), Err)
    }

    fn check_length(&self) -> Result<()> {
        if let Some(tokens) = self.batch_tokens {
            self.check_tokens(tokens)?;
        }
        if let (Some(steps), Some(epochs)) = (self.steps, self.epochs) {
            let text = format!("either {STEPS} or {EPOCHS}; help: leave {EPOCHS} {epochs} out");
            require(false, "steps", steps, &text)?;
        }
        let text = format!("evaluations during training; help: leave {EVAL_EVERY} 0 out");
        let evaluates = self.patience().is_none() || self.eval_every != Some(0);
        require(evaluates, "stop-after", self.patience().unwrap_or(0), &text)?;
        let text = format!("a whole number, 1 or more; help: {STEPS} 0 saves the untrained model");
        require(self.epochs != Some(0), "epochs", 0, &text)?;
        let length = match (self.schedule_steps, self.length()) {
            (Some(steps), _) => Length::Steps(steps),
            (None, length) => length,
        };
        if let (Some(warmup), Length::Steps(steps)) = (self.warmup_steps, length) {
            let text = format!(
                "at most the {steps} steps of the run; help: warm up for less, or train for more"
            );
            require(warmup <= steps, "warmup-steps", warmup, &text)?;
        }
        Ok(())
    }

    fn check_tokens(&self, tokens: u64) -> Result<()> {
        let context = self.model.context().unwrap_or(0) as u64;
        let below = tokens - tokens.checked_rem(context).unwrap_or(0);
        let above = below.saturating_add(context);
        let text = match (self.batch_size, below) {
            (Some(rows), _) => format!(
                "either {BATCH_SIZE} or {BATCH_TOKENS}; help: leave {BATCH_SIZE} {rows} out"
            ),
            _ if context == 0 => {
                format!("a model of tokens, such as gpt; help: give {BATCH_SIZE} ROWS")
            }
            (None, 0) => {
                format!("a multiple of the model's context, {context} tokens; help: give {above}")
            }
            (None, below) => format!(
                "a multiple of the model's context, {context} tokens; help: give {below} or {above}"
            ),
        };
        let fits = self.batch_size.is_none() && context > 0 && below == tokens;
        require(fits, "batch-tokens", tokens, &text)
    }

    /// Refuses groups that say nothing, or whose learning rate has no scale.
    fn check_groups(&self) -> Result<()> {
        for group in self.group.iter().flat_map(|all| &all.0) {
            let got = &group.pattern;
            for (name, value) in [("lr", group.lr), ("weight-decay", group.weight_decay)] {
                let value = value.unwrap_or_default();
                let expected = Limits::Real(0.0, f64::MAX).refusal(Number::Real(value));
                let text = format!("{}; help: give another", expected.as_deref().unwrap_or(""));
                let got = format!("{got}:{name}={value}");
                require(expected.is_none(), "group", got, &text)?;
            }
            let says = group.lr.is_some() || group.weight_decay.is_some();
            let text =
                format!("an lr or a weight-decay; help: as in {GROUP} '*.bias:weight-decay=0'");
            require(says, "group", got, &text)?;
            let has_scale = group.lr.is_none() || self.peak_lr() != 0.0;
            let text =
                format!("an {LR} above 0; help: rates of groups follow the schedule of {LR}");
            require(has_scale, "group", got, &text)?;
        }
        self.groups().map(|_| ())
    }

    fn check_optimization(&self) -> Result<()> {
        let (lr, min_lr) = (self.peak_lr(), self.min_lr);
        let text = format!("at most {LR} {lr}; help: the schedule ends there");
        require(min_lr <= lr, "min-lr", min_lr, &text)?;
        let text = format!(
            "a schedule that goes down; help: give {SCHEDULE} cosine, or leave {MIN_LR} out"
        );
        let goes_down = self.schedule != Schedule::Constant || min_lr == 0.0;
        require(goes_down, "min-lr", min_lr, &text)?;
        self.check_optimizer()?;
        self.check_groups()?;
        let eps = self.eps.unwrap_or(1.0);
        let text = "a number above 0, up to 1; help: a usual value is 1e-8";
        require(eps > 0.0 && eps <= 1.0, "eps", eps, text)?;
        let (name, got) = ("class-weights", &self.class_weights);
        let weights = got.numbers();
        let are_in_range = weights.iter().all(|weight| (0.0..=1e30).contains(weight));
        let text = "numbers from 0 to 1e30; help: give a weight for each class, as in 1,1,2.5";
        require(are_in_range, name, got, text)?;
        // Weights are used as f32, which rounds the smallest f64 to 0. Unnamed classes have 1.
        let learns = weights.iter().any(|&weight| weight as f32 != 0.0)
            || !matches!(self.class_weights, ClassWeights::InOrder(_));
        let text = "a weight above 0; help: with weights of 0 nothing is learned";
        require(learns, name, got, text)?;
        let are_names = !self.freeze.iter().flatten().any(String::is_empty);
        let text = format!("names of layers or parameters; help: as in {FREEZE} 0,2.bias");
        require(are_names, "freeze", "an empty name", &text)
    }

    /// Refuses constants of other optimizers, and constants with which this one does nothing.
    fn check_optimizer(&self) -> Result<()> {
        let (mut given, mut settled) = (self.clone(), self.with_defaults());
        let (kind, declared) = (self.optimizer, self.optimizer.declared());
        for (name, field) in CONSTANTS {
            let (default, value) = (kind.default_of(name), *field(&mut given));
            let owners = owners(name);
            let text = format!(
                "{OPTIMIZER} {owners}; help: leave {} out",
                SettingName(name)
            );
            let applies = value.is_none() || default.is_some();
            require(applies, name, value.unwrap_or_default(), &text)?;
            let can_be = *field(&mut settled) != Some(0.0) || !declared.above_zero.contains(&name);
            let (kind, usual) = (kind.name(), default.unwrap_or_default());
            let text =
                format!("a number above 0 with {OPTIMIZER} {kind}; help: a usual value is {usual}");
            require(can_be, name, 0, &text)?;
        }
        let owners = owners("nesterov");
        let text =
            format!("{OPTIMIZER} {owners} with a {MOMENTUM} above 0; help: leave {NESTEROV} out");
        let can_be = kind.default_of("nesterov").is_some() && settled.momentum != Some(0.0);
        require(!self.nesterov || can_be, "nesterov", true, &text)
    }

    /// Refuses settings of devices that exclude each other on any machine.
    fn check_devices(&self) -> Result<()> {
        let (device, per_rank) = (self.device, self.devices_per_rank);
        let text = format!(
            "{DEVICES_PER_RANK} 1: a step over several GPUs of a rank is not captured; \
                    help: leave {GRAPH} out, or give each rank one GPU"
        );
        let can_capture = per_rank == 1 || self.graph != GraphChoice::On;
        require(can_capture, "graph", "on", &text)?;
        let is_on_cpu = device == DeviceChoice::Cpu;
        let text = format!(
            "GPUs to train on: {DEVICE} auto or cuda; help: leave it out: ranks on the CPU \
                    share nothing"
        );
        require(!is_on_cpu || !self.share_gpus, "share-gpus", true, &text)?;
        let text = format!(
            "{DEVICE} cuda with {DEVICES_PER_RANK} {per_rank}; help: give {DEVICE} cuda: each \
             rank then takes as many as it needs; or leave {DEVICES_PER_RANK} out"
        );
        let can_split = per_rank == 1 || !matches!(device, DeviceChoice::CudaAt(_));
        require(can_split, "device", device, &text)?;
        if is_on_cpu { self.check_cpu() } else { Ok(()) }
    }

    /// Refuses `memory` beside what it chooses.
    fn check_memory(&self) -> Result<()> {
        let Some(memory) = self.memory else {
            return Ok(());
        };
        let text = format!(
            "either {MEMORY} or {RECOMPUTE}; help: give {RECOMPUTE} none, or leave {MEMORY} out"
        );
        let is_free = ["none", ""].contains(&self.model.value("recompute").as_str().unwrap_or(""));
        require(is_free, "memory", memory, &text)?;
        let text = format!(
            "either {MEMORY} or {RECOMPUTE_PARTS}; help: give {RECOMPUTE_PARTS} 0, or leave {MEMORY} \
             out"
        );
        require(self.recompute_parts == 0, "memory", memory, &text)
    }

    /// The message that a setting of the model has no effect.
    pub fn ignored(&self) -> Option<String> {
        let value = |name| self.model.value(name).to_string();
        let (hidden, dropout) = (value("hidden"), value("dropout"));
        let drops = !["0.0", "null"].contains(&&*dropout);
        let text = format!("{DROPOUT} {dropout} changes nothing: no layer is hidden");
        (hidden == "[]" && drops).then_some(text)
    }

    /// Refuses settings that need a GPU, for a run on the CPU.
    pub fn check_cpu(&self) -> Result<()> {
        let cpu_only = |is_right, name, got: &dyn Display, why| {
            let text = format!(
                "{DEVICE} cuda: {why}; help: leave {} out, or train on GPUs: this run is on \
                 the CPU",
                SettingName(name)
            );
            require(is_right, name, got, &text)
        };
        let per_rank = &self.devices_per_rank;
        let why = "layers can only be split over GPUs";
        cpu_only(*per_rank == 1, "devices-per-rank", per_rank, why)?;
        let is_kept = self.data_on_device == Resident::On;
        let why = "data can only be kept in GPU memory";
        cpu_only(!is_kept, "data-on-device", &"on", why)?;
        let is_captured = self.graph == GraphChoice::On;
        cpu_only(!is_captured, "graph", &"on", "only CUDA has graphs")
    }
}

/// The names of the optimizers that have a setting.
fn owners(name: &str) -> String {
    let all = OptimizerKind::ALL.iter();
    let owners = all.filter(|(kind, ..)| kind.default_of(name).is_some());
    let owners: Vec<_> = owners.map(|(_, name, _)| *name).collect();
    owners.join(" or ")
}

/// Refuses a wrong value of a setting. The text says what is expected and what helps.
fn require(is_right: bool, name: &str, got: impl Display, text: &str) -> Result<()> {
    if is_right {
        return Ok(());
    }
    Err(Error::Setting {
        setting: name.to_string(),
        text: format!("{got}: expected {text}"),
    })
}

/// Refuses a path that is not UTF-8: TOML files and the metrics log cannot hold it.
fn check_utf8(name: &str, path: Option<&Path>) -> Result<()> {
    let path = path.unwrap_or(Path::new(""));
    let text = "a name in UTF-8; help: give another, or rename the file or folder";
    require(path.to_str().is_some(), name, path.display(), text)
}
