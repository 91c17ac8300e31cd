//! Every setting of a training run, in one list.
//!
//! `Config`, its TOML form and `SETTINGS` follow from the list and from the settings of the model
//! families; flags, `--help`, environment variables and `--print-config` follow from `SETTINGS`. A
//! new setting is one entry here, with its limits, or one entry in its model family.

use std::fmt;
use std::path::PathBuf;
use std::sync::LazyLock;

use ddp_kernels::threads;
use serde::Serialize;
use serde::de::MapAccess;
use serde_json::Value;

use super::meant as others;
use super::values::{
    ClassWeights, Decayed, DeviceChoice, FloatType, Form, GraphChoice, Groups, Limits, LogLevel,
    Missing, NcclChoice, Normalize, Number, OptimizerKind, Overlap, Precision, ProductChoice,
    Resident, Resume, Schedule, SettingValue, TIMEOUT_S, TaskKind, TraceSteps, WHOLE_MAX, When,
};
use crate::data::DataSpec;
use crate::models::family::Setting as FamilySetting;
use crate::models::{FamilyInfo, ModelSpec};

/// Where a setting must be equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// On all ranks and whenever the run is resumed: what is computed depends on it.
    Fixed,
    /// On all ranks; it may change when the run is resumed.
    Job,
    /// Nowhere: each rank may have its own.
    Rank,
}

/// An entry of the list.
pub struct Setting {
    name: String,
    /// Its help, without the default.
    pub help: String,
    /// The heading that help lists it under.
    pub group: &'static str,
    /// What help calls its value.
    pub value_name: &'static str,
    /// Where it must be equal.
    pub scope: Scope,
    /// How its values are written.
    pub form: Form,
    /// Its values, if it takes one of a few names.
    pub choices: Vec<SettingChoice>,
    /// Its default; null if that follows from other settings or from the data.
    pub default: Value,
    /// The model families that have it; empty for a setting of every run.
    pub families: Vec<&'static str>,
    /// Whether help leaves it out.
    pub is_hidden: bool,
    /// The numbers that it takes.
    limits: Limits,
    /// Its value, if it is a number.
    number: fn(&Config) -> Option<Number>,
    /// Sets it from text. The error says what was expected.
    pub set: SetText,
    /// Sets it to its default.
    pub reset: fn(&mut Config),
}

type SetText = Box<dyn Fn(&mut Config, &str) -> Result<(), String> + Send + Sync>;

/// One of the names that a setting takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct SettingChoice {
    pub name: &'static str,
    pub help: &'static str,
    pub is_hidden: bool,
}

impl Setting {
    /// Its name in flags and TOML files: `batch-size`.
    pub fn name(&self) -> String {
        self.name.clone()
    }

    /// Whether a run of this model has it.
    pub fn applies_to(&self, model: &ModelSpec) -> bool {
        self.families.is_empty() || self.families.contains(&model.name())
    }

    /// The refusal of a number outside of its limits.
    pub(super) fn refusal(&self, config: &Config) -> Option<String> {
        let number = (self.number)(config)?;
        let expected = self.limits.refusal(number)?;
        Some(format!("--{} {number}: expected {expected}", self.name))
    }
}

impl fmt::Debug for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "setting {}", self.name)
    }
}

/// The name of the setting in this field: `batch-size` of `batch_size`.
fn name_of(field: &str) -> String {
    field.trim_end_matches('_').replace('_', "-")
}

fn listed(names: Vec<(&'static str, &'static str)>) -> Vec<SettingChoice> {
    let choice = |(name, help)| SettingChoice {
        name,
        help,
        is_hidden: false,
    };
    names.into_iter().map(choice).collect()
}

pub(super) fn as_value(value: &impl Serialize) -> Value {
    serde_json::to_value(value).expect("settings fit JSON")
}

macro_rules! settings {
    ($(
        [$group:literal]
        $(
            $(#[doc = $help:literal])+
            $(@$attribute:meta)?
            $scope:ident $field:ident $value_name:literal: $kind:ty = $default:expr $(, $limits:expr)?;
        )+
    )+) => {
        /// The settings of a training run. `None` follows from other settings or from the data.
        #[derive(Clone, Debug, PartialEq, Serialize)]
        #[serde(rename_all = "kebab-case")]
        pub struct Config {
            /// The model family and its settings.
            #[serde(flatten)]
            pub model: ModelSpec,
            $($($(#[doc = $help])+ $(#[$attribute])? pub $field: $kind,)+)+
        }

        impl Default for Config {
            fn default() -> Config {
                Config { model: ModelSpec::default(), $($($field: $default,)+)+ }
            }
        }

        impl Config {
            /// Reads the setting `name`, which is not one of the model's, from a table.
            pub(super) fn read_value<'de, M: MapAccess<'de>>(&mut self, name: &str, table: &mut M) -> Result<(), M::Error> {
                $($(if name == name_of(stringify!($field)) {
                    self.$field = table.next_value()?;
                    return Ok(());
                })+)+
                unreachable!("{name} is a setting")
            }
        }

        /// The settings that every run has, in the order of the help.
        fn settings_of_runs() -> Vec<Setting> {
            vec![$($({
                let default: $kind = $default;
                let lines: &[&str] = &[$($help.trim_ascii()),+];
                Setting {
                    name: name_of(stringify!($field)),
                    help: lines.join(" "),
                    group: $group,
                    value_name: $value_name,
                    scope: Scope::$scope,
                    form: <$kind as SettingValue>::FORM,
                    choices: listed(<$kind as SettingValue>::choices()),
                    default: as_value(&default),
                    families: Vec::new(),
                    is_hidden: false,
                    limits: [$($limits,)? Limits::Any][0],
                    number: |config| config.$field.number(),
                    set: Box::new(|config, text| {
                        config.$field = SettingValue::read(text)?;
                        Ok(())
                    }),
                    reset: |config| config.$field = $default,
                }
            },)+)+]
        }
    };
}

/// Whole numbers from 1 on.
const COUNT: Limits = Limits::Whole(1, WHOLE_MAX);
/// Finite numbers from 0 on.
const POSITIVE: Limits = Limits::Real(0.0, f64::MAX);

settings! {
    ["Model"]
    /// Names of layers or parameters that are not trained, separated by commas, as in 0,2.bias
    Fixed freeze "NAMES": Vec<String> = vec![];

    ["Data"]
    /// Training data: a file (.npy, .npz, .csv, .tsv, .parquet, .safetensors, .bin, IDX; csv, npy
    /// and IDX also .gz), a folder of files or a pattern, followed by #NAME to choose one of
    /// several arrays. Tokens: tokens:FILE,context=N (.bin of llm.c or nanoGPT, .txt, arrays); with
    /// vocabulary=N if the file does not say it. Or built-in data: glyphs,
    /// synthetic:classification or synthetic:regression, followed by options, as in
    /// glyphs,rows=50000 (rows, held-out, seed; features, classes or outputs, noise)
    Job data "SPEC": DataSpec = DataSpec::default();
    /// Labels: a column or an array of --data, by name, or another file; a,b for several columns of
    /// numbers [default: the last column of the first table; for arrays, y next to x, labels next
    /// to features or images, …]
    Job labels "SPEC": Option<String> = None;
    /// Data to evaluate on, in the form of --data [default: none]
    Job val_data "SPEC": Option<DataSpec> = None;
    /// Labels of --val-data [default: as in --labels]
    Job val_labels "SPEC": Option<String> = None;
    /// Fraction of the rows of --data to keep for evaluation, chosen by --seed (of tokens: the last
    /// ones); an alternative to --val-data
    Fixed val_split "F": f64 = 0.0, Limits::BelowOne;
    /// Whether labels are classes or numbers [default: classes if they are whole numbers or text]
    Fixed task "TASK": Option<TaskKind> = None;
    /// Columns of tables to leave out, separated by commas
    Fixed drop "NAMES": Vec<String> = vec![];
    /// Columns of tables whose values are categories, separated by commas: each value becomes a
    /// feature that is 0 or 1. auto: every column of texts, with at most 256 values
    Fixed categorical "NAMES": Vec<String> = vec![];
    /// What happens where a number is missing (an empty cell, NA, null, ?, - or NaN)
    Fixed missing "HOW": Missing = Missing::Error;
    /// How features are normalized: unit scales all of them to 0 to 1, standard gives each mean 0
    /// and standard deviation 1, and numeric labels, too
    Fixed normalize "HOW": Normalize = Normalize::None;
    /// Folder for converted copies of files that cannot be memory-mapped
    /// [default: beside the files, else ~/.cache/ddp-train/data]
    Rank cache_dir "DIR": Option<PathBuf> = None;

    ["Batches and length"]
    /// Global batch size: rows per step, summed over all ranks [default: 128]
    Fixed batch_size "ROWS": Option<u64> = None, COUNT;
    /// Global batch size in tokens, a multiple of the model's context; an alternative to
    /// --batch-size
    Fixed batch_tokens "TOKENS": Option<u64> = None, COUNT;
    /// Largest number of rows that a rank processes at once; gradients accumulate over the rest
    /// [default: all of its rows]
    Fixed micro_batch "ROWS": Option<usize> = None, COUNT;
    /// Steps to train, instead of --epochs; 0 saves the untrained model
    Job steps "N": Option<u64> = None;
    /// Passes through the data [default: 5]
    Job epochs "N": Option<u64> = None;
    /// Skip an epoch's last batch if it is smaller than the others
    Fixed drop_last "BOOL": bool = false;

    ["Optimization"]
    /// Optimizer
    Fixed optimizer "NAME": OptimizerKind = OptimizerKind::Adamw;
    /// Peak learning rate [default: 0.001 for adamw, 0.1 for sgd, 0.02 for muon]
    Fixed lr "RATE": Option<f64> = None, POSITIVE;
    /// muon: peak learning rate of the parameters that adamw updates, on the same schedule
    /// [default: 0.0003]
    Fixed adam_lr "RATE": Option<f64> = None, POSITIVE;
    /// Learning rate of the last step, unless the schedule is constant
    Fixed min_lr "RATE": f64 = 0.0, POSITIVE;
    /// Learning rate schedule after the warm-up
    Fixed schedule "NAME": Schedule = Schedule::Cosine;
    /// Steps to reach the peak learning rate [default: a tenth of all steps, at most 100]
    Job warmup_steps "N": Option<u64> = None;
    /// Weight decay [default: 0.01 for adamw and muon, 0 for sgd]
    Fixed weight_decay "X": Option<f64> = None, POSITIVE;
    /// What weight decay applies to
    Fixed decay "WHAT": Decayed = Decayed::Matrices;
    /// adamw, muon: first-moment decay β₁ [default: 0.9]
    Fixed beta1 "X": Option<f64> = None, Limits::BelowOne;
    /// adamw, muon: second-moment decay β₂ [default: 0.999, 0.95 for muon]
    Fixed beta2 "X": Option<f64> = None, Limits::BelowOne;
    /// adamw, muon: added to the denominator [default: 1e-8, 1e-10 for muon]
    Fixed eps "X": Option<f64> = None;
    /// sgd, muon: momentum, of muon always Nesterov's [default: 0.9, 0.95 for muon]
    Fixed momentum "X": Option<f64> = None, Limits::BelowOne;
    /// sgd: Nesterov's momentum
    Fixed nesterov "BOOL": bool = false;
    /// Parameters with a learning rate or weight decay of their own, by name, as in
    /// *.bias:weight-decay=0,head.*:lr=0.003; in TOML, tables called group with match, lr and
    /// weight-decay. The first group that matches a name counts
    Fixed group "GROUPS": Groups = Groups::default();
    /// Largest norm of all gradients together; 0 turns clipping off
    Fixed grad_clip "NORM": f64 = 0.0, POSITIVE;
    /// Share of the target probability that is spread evenly over all classes
    Fixed label_smoothing "X": f64 = 0.0, Limits::BelowOne;
    /// Weight of each class in the loss: balanced (all classes count the same, however many rows
    /// they have), numbers in the order of the classes, as in 1,2.5, or by name, as in
    /// stays=1,moves=4
    Fixed class_weights "WEIGHTS": ClassWeights = ClassWeights::Equal;
    /// Seed of everything random in training
    Fixed seed "N": u64 = 0;

    ["Machine"]
    /// Device to train on: cpu, cuda (each rank on its own GPU), cuda:N (one rank, on that GPU), or
    /// auto: cuda if every rank can, else cpu
    Rank device "DEVICE": DeviceChoice = DeviceChoice::Auto;
    /// GPUs of each rank, over which the layers are split: for models too large for one GPU
    Job devices_per_rank "N": usize = 1, Limits::Whole(1, 64);
    /// Let several ranks share a GPU if there are too few: for tests, slow
    Rank share_gpus "BOOL": bool = false;
    /// Precision of the model's computation; tf32 and bf16 need a GPU. Parameters, gradients and
    /// moments stay f32
    Fixed dtype "TYPE": Precision = Precision::F32;
    /// Keep all training data in GPU memory; auto: where it fits
    Job data_on_device "WHEN": Resident = Resident::Auto;
    /// Capture a step as a CUDA graph and replay it; auto: on a GPU, unless the layers are split
    /// over several
    Job graph "WHEN": GraphChoice = GraphChoice::Auto;
    /// Algorithms of matrix products on GPUs: first uses cuBLASLt's first one; timed tries several
    /// after the first step and keeps the fastest, whose bits may differ on another machine
    Job products "HOW": ProductChoice = ProductChoice::First;
    /// CPU threads of a rank [default: its share of the cores]
    Rank threads "N": Option<usize> = None, Limits::Whole(1, threads::COUNT_MAX as u64);

    ["Between ranks"]
    /// Size of a gradient bucket, the unit of reduction, in MB; the first is at most 1 MB
    /// [default: 25 on GPUs, 4 on the CPU]
    Job bucket_mb "MB": Option<f64> = None, Limits::Real(0.001, 65_536.0);
    /// Type of gradients in transit
    Fixed reduce_dtype "TYPE": FloatType = FloatType::F32;
    /// ZeRO stage: 0 keeps all state on every rank, 1 divides the optimizer's moments among the
    /// ranks
    Job zero "STAGE": u64 = 0, Limits::Whole(0, 1);
    /// Reduce gradients while the backward pass still runs; auto: with several ranks
    Job overlap "WHEN": Overlap = Overlap::Auto;
    /// How NCCL adds up gradients: fixed has the same bits in every run; fast leaves the choice to
    /// NCCL, and bits may differ
    Job nccl "HOW": NcclChoice = NcclChoice::Fixed;
    /// Seconds without a sign of progress after which a rank counts as lost: the job ends with exit
    /// code 77
    Rank timeout_s "S": f64 = 600.0, Limits::Real(*TIMEOUT_S.start(), *TIMEOUT_S.end());

    ["Checkpoints and resuming"]
    /// Steps between checkpoints; 0 for one at the end only [default: an epoch]
    Job checkpoint_every "N": Option<u64> = None;
    /// Number of newest checkpoints to keep; the best by validation is kept as well
    Job keep "N": u64 = 3, COUNT;
    /// Resume a run: never, auto (from the newest intact checkpoint in --out, from the start if
    /// there is none), or the folder of one of its checkpoints
    Job resume "WHICH": Resume = Resume::Never;
    /// With --resume: continue although settings differ that change the results
    @serde(rename = "override")
    Job override_ "BOOL": bool = false;
    /// Start from saved parameters instead of random ones: a run or checkpoint, or a folder of
    /// Hugging Face (GPT2LMHeadModel, LlamaForCausalLM), from which the model follows; or a
    /// model.safetensors that matches the model
    Job init_from "PATH": Option<PathBuf> = None;

    ["Output"]
    /// Folder of the run; it must not contain another run, unless that is resumed
    Rank out "DIR": PathBuf = "out".into();
    /// Steps between evaluations on held-out rows; 0 for one at the end only [default: an epoch]
    Job eval_every "N": Option<u64> = None;
    /// gpt: a text to continue at each evaluation and at the end, with up to 64 tokens, for the
    /// record and the report
    Job sample "PROMPT": Option<String> = None;
    /// Steps between entries in metrics.jsonl
    Job log_every "N": u64 = 10, COUNT;
    /// Steps of which to write a timeline of all ranks to OUT/trace.json, for ui.perfetto.dev or
    /// chrome://tracing: 100..110 (both included), 5, or 5.. for all from there
    Job trace "STEPS": Option<TraceSteps> = None;
    /// Also write event files for TensorBoard, to OUT/tensorboard
    Rank tensorboard "BOOL": bool = false;
    /// When progress is shown
    Rank progress "WHEN": When = When::Auto;
    /// Lowest severity to log on standard error
    Rank log_level "LEVEL": LogLevel = LogLevel::Info;
}

/// The model families.
static FAMILIES: LazyLock<Vec<FamilyInfo>> = LazyLock::new(ModelSpec::families);

/// Every setting, in the order of the help: the model and what its families have, then the rest.
pub static SETTINGS: LazyLock<Vec<Setting>> = LazyLock::new(|| {
    let mut all = settings_of_models();
    all.extend(settings_of_runs());
    all
});

/// `model`, then the settings of all families. Families may share a name; its help is that of the
/// first family.
fn settings_of_models() -> Vec<Setting> {
    let mut all = vec![model_setting()];
    for family in FAMILIES.iter() {
        for setting in &family.settings {
            let known = all.iter_mut().find(|known| known.name == setting.name);
            match known {
                Some(known) => known.families.push(family.name),
                None => all.push(family_setting(family, setting)),
            }
        }
    }
    all
}

fn model_setting() -> Setting {
    let families = FAMILIES.iter().filter(|family| !family.is_hidden);
    let families: Vec<_> = families
        .map(|family| {
            let presets: Vec<_> = family.presets.iter().map(|(name, _)| *name).collect();
            let presets = match presets.len() {
                0 => String::new(),
                _ => format!(" (presets: {})", presets.join(", ")),
            };
            format!("{}: {}{presets}", family.name, family.help)
        })
        .collect();
    Setting {
        name: "model".to_string(),
        help: format!(
            "Model family or preset; settings may follow, as in gpt,layers=6,width=384. {}",
            families.join("; ")
        ),
        group: "Model",
        value_name: "MODEL",
        scope: Scope::Fixed,
        form: Form::One,
        choices: Vec::new(),
        default: ModelSpec::default().name().into(),
        families: Vec::new(),
        is_hidden: false,
        limits: Limits::Any,
        number: |_| None,
        set: Box::new(|config, text| {
            config.model = model_of(text, Some(&config.model))?;
            Ok(())
        }),
        reset: |config| config.model = ModelSpec::default(),
    }
}

fn family_setting(family: &FamilyInfo, setting: &'static FamilySetting<ModelSpec>) -> Setting {
    let name = setting.name;
    Setting {
        name: name.to_string(),
        help: setting.help.to_string(),
        group: "Model",
        value_name: setting.value_name,
        scope: match setting.changes_results {
            true => Scope::Fixed,
            false => Scope::Job,
        },
        form: setting.form,
        choices: listed(setting.choices.clone()),
        default: as_value(&family.default)[name].take(),
        families: vec![family.name],
        is_hidden: family.is_hidden,
        // `ModelSpec::check` checks it.
        limits: Limits::Any,
        number: |_| None,
        set: Box::new(move |config, text| {
            let family = FAMILIES.iter().find(|one| one.name == config.model.name());
            let settings = family.into_iter().flat_map(|family| &family.settings);
            match settings.into_iter().find(|setting| setting.name == name) {
                Some(setting) => (setting.set)(&mut config.model, text),
                None => Err(requires_family(name, &config.model)),
            }
        }),
        reset: |_| (),
    }
}

/// The model that `gpt` or `gpt2,context=512` stands for. The name of a `current` model's family
/// keeps its settings.
pub fn model_of(text: &str, current: Option<&ModelSpec>) -> Result<ModelSpec, String> {
    let mut parts = text.split(',');
    let name = parts.next().unwrap_or_default();
    let current = current.filter(|current| current.name() == name);
    let mut model = current.map_or_else(|| default_of(name), Ok)?.clone();
    let info = FAMILIES.iter().find(|family| family.name == model.name());
    let settings = info.map_or(&[][..], |family| &family.settings);
    let mut given = Vec::new();
    for part in parts {
        let (name, value) = part.split_once('=').unwrap_or((part, "true"));
        if given.contains(&name) {
            return Err(format!(
                "{name}: expected once, got it twice; help: remove one"
            ));
        }
        given.push(name);
        let Some(setting) = settings.iter().find(|setting| setting.name == name) else {
            let names: Vec<_> = settings.iter().map(|setting| setting.name).collect();
            let (family, names) = (model.name(), names.join(", "));
            return Err(format!("{family} has no setting {name:?}, but {names}"));
        };
        (setting.set)(&mut model, value).map_err(|error| format!("{part}: {error}"))?;
    }
    Ok(model)
}

/// A model of the family or preset `name`.
pub(super) fn default_of(name: &str) -> Result<&'static ModelSpec, String> {
    let presets = || FAMILIES.iter().flat_map(|family| &family.presets);
    let family = FAMILIES.iter().find(|family| family.name == name);
    let preset = || presets().find(|(preset, _)| *preset == name);
    let found = family.map(|family| &family.default);
    found
        .or_else(|| preset().map(|(_, model)| model))
        .ok_or_else(|| format!("expected one of {}, got {name:?}", model_names().join(", ")))
}

/// The names that `--model` takes: families, then presets.
pub(crate) fn model_names() -> Vec<&'static str> {
    let families = FAMILIES.iter().filter(|family| !family.is_hidden);
    let presets = FAMILIES.iter().flat_map(|family| &family.presets);
    let presets = presets.map(|(name, _)| *name);
    families.map(|family| family.name).chain(presets).collect()
}

/// The refusal of a setting that `model` does not have.
pub(super) fn requires_family(name: &str, model: &ModelSpec) -> String {
    let owners = setting(name).map_or(String::new(), |setting| setting.families.join(" or "));
    let got = model.name();
    format!("requires --model {owners}, got --model {got}; help: leave --{name} out")
}

pub(super) fn setting(name: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.name == name)
}

/// The flag of ddp-train for `name`, which is misspelled or another program's.
pub(crate) fn meant(name: &str) -> Option<String> {
    let name = name
        .trim_start_matches('-')
        .replace('_', "-")
        .to_lowercase();
    let known = setting(&name).map(|setting| format!("write --{}", setting.name));
    known.or_else(|| others::here(&name).map(String::from))
}
