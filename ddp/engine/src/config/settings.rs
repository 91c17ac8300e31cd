//! Every setting of a training run, in one list.
//!
//! `Config`, which the trainer takes, its TOML form and `SETTINGS` follow from the list and from
//! the settings of the model families; flags, help, variables and the printed settings follow from
//! `SETTINGS`. A new setting is one entry here: scope, name, what help calls its value, other
//! commands that take it, type, default and limits.

mod of_models;

use std::fmt;
use std::path::PathBuf;
use std::sync::LazyLock;

use ddp_data::DataSpec;
use ddp_kernels::setting::{Choice, SettingName};
use ddp_kernels::threads;
use ddp_nn::models::ModelSpec;
use ddp_nn::models::family::{FamilySetting, SettingField};
use serde::Serialize;
use serde_json::Value;

use self::of_models::default_of;
pub use self::of_models::{model_names, model_of};
use super::values::{
    BestBy, ClassWeights, Decayed, DeviceChoice, EXACT_MAX, FloatType, Form, GraphChoice, Groups,
    Limits, LogLevel, LoraSetting, LossOn, MemorySize, Missing, NcclChoice, OptimizerKind, Overlap,
    Packing, Precision, Resident, Resume, Scaling, Schedule, TIMEOUT_S, TaskKind, TraceSteps,
    WHOLE_MAX, When, as_flag,
};
use crate::error::Error;
use crate::reducer::SHARDS_MAX;

/// Where a setting must be equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedBy {
    /// On all ranks and whenever the run is resumed: what is computed depends on it.
    Run,
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
    pub group: String,
    /// What help calls its value.
    pub value_name: &'static str,
    /// Where it must be equal.
    pub scope: SharedBy,
    /// How its values are written.
    pub form: Form,
    /// Its values and their help, if it takes one of a few names.
    pub choices: Vec<(&'static str, &'static str)>,
    /// Its default; null if that follows from other settings or from the data.
    pub default: Value,
    /// The model families that have it; empty for a setting of every run.
    pub families: Vec<&'static str>,
    /// The commands that take it besides those that train.
    commands: &'static [&'static str],
    /// The numbers that it takes.
    limits: Limits,
    /// Its value; None if the model does not have it.
    field: GetField,
}

type GetField = Box<dyn Fn(&mut Config) -> Option<&mut dyn SettingField> + Send + Sync>;

fn get_field(
    field: impl Fn(&mut Config) -> Option<&mut dyn SettingField> + Send + Sync + 'static,
) -> GetField {
    Box::new(field)
}

impl Setting {
    /// Its name in flags and TOML files: `batch-size`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether a run of this model has it.
    pub fn applies_to(&self, model: &ModelSpec) -> bool {
        self.families.is_empty() || self.families.contains(&model.name())
    }

    /// Whether this command, which does not train, takes it.
    pub fn is_taken_by(&self, command: &str) -> bool {
        self.commands.contains(&&*command.replace('-', "_"))
    }

    /// Sets it from the text of a flag. The error says what was expected.
    pub fn set(&self, config: &mut Config, text: &str) -> Result<(), String> {
        if self.name == MODEL {
            config.model = model_of(text, Some(&config.model))?;
            return Ok(());
        }
        self.field_of(config)?.set(text)
    }

    /// Sets it from TOML or JSON. The error says what was expected.
    pub(super) fn set_value(&self, config: &mut Config, value: Value) -> Result<(), String> {
        self.field_of(config)?.set_value(value)
    }

    /// Sets it to its default.
    pub fn reset(&self, config: &mut Config) {
        let reset = self.set_value(config, self.default.clone());
        reset.expect("a setting takes its default");
    }

    /// Refuses a value from TOML or JSON that no run can have.
    pub(super) fn try_value(&self, value: &Value) -> Result<(), String> {
        if value.is_null() {
            return Err("expected a finite number".into());
        }
        let families = self.families.iter();
        let mut models: Vec<_> = families.filter_map(|name| default_of(name).ok()).collect();
        if models.is_empty() {
            models.push(ModelSpec::default());
        }
        let mut tried = Err(String::new());
        for model in models {
            let mut config = Config {
                model,
                ..Config::default()
            };
            tried = tried.or_else(|_| self.set_value(&mut config, value.clone()));
        }
        tried
    }

    /// The refusal of a number outside of its limits.
    pub(super) fn refusal(&self, config: &mut Config) -> Option<Error> {
        let number = (self.field)(config)?.number()?;
        let expected = self.limits.refusal(number)?;
        Some(Error::Setting {
            setting: self.name.clone(),
            text: format!("{number}: expected {expected}"),
        })
    }

    fn field_of<'a>(&self, config: &'a mut Config) -> Result<&'a mut dyn SettingField, String> {
        let (name, got) = (&self.name, config.model.name());
        let owners = self.families.join(" or ");
        (self.field)(config).ok_or_else(|| {
            let (model, name) = (SettingName(MODEL), SettingName(name));
            format!("requires {model} {owners}, got {model} {got}; help: leave {name} out")
        })
    }
}

impl fmt::Debug for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "setting {}", self.name)
    }
}

impl Config {
    /// Sets `name` unless it has a value or the model has no such setting. Returns whether it did.
    pub(crate) fn set_if_open(&mut self, name: &str, value: &Value) -> bool {
        let field = find(name).and_then(|setting| (setting.field)(self));
        let Some(field) = field.filter(|field| field.value().is_null() && !value.is_null()) else {
            return false;
        };
        field
            .set_value(value.clone())
            .expect("a value of this setting");
        true
    }
}

/// The name of the setting in this field: `batch-size` of `batch_size`.
fn name_of(field: &str) -> String {
    field.trim_end_matches('_').replace('_', "-")
}

/// The help, with the defaults that optimizers declare: `[default: 0.9, 0.95 for muon]`.
fn with_default(name: &str, help: String, default: &Value) -> String {
    let declared = OptimizerKind::ALL.iter();
    let declared = declared.filter_map(|(kind, of, _)| Some((kind.default_of(name)?, of)));
    let declared: Vec<_> = declared.filter(|_| default.is_null()).collect();
    let Some(&(usual, _)) = declared.first() else {
        return help;
    };
    let number = |it: f64| format!("{it:?}").trim_end_matches(".0").to_string();
    let others = declared.iter().filter(|(it, _)| *it != usual);
    let others: String = others
        .map(|(it, of)| format!(", {} for {of}", number(*it)))
        .collect();
    format!("{help} [default: {}{others}]", number(usual))
}

macro_rules! settings {
    ($(
        [$group:literal]
        $(
            $(#[doc = $help:literal])+
            $(@$attribute:meta)?
            $scope:ident $field:ident $value_name:literal $([$($command:ident)+])?: $kind:ty = $default:expr $(, $limits:expr)?;
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

        /// The settings that every run has, in the order of the help.
        fn settings_of_runs() -> Vec<Setting> {
            let mut defaults = Config::default();
            vec![$($({
                let field: &mut dyn SettingField = &mut defaults.$field;
                let lines: &[&str] = &[$($help.trim_ascii()),+];
                Setting {
                    name: name_of(stringify!($field)),
                    help: with_default(&name_of(stringify!($field)), lines.join(" "), &field.value()),
                    group: $group.to_string(),
                    value_name: $value_name,
                    scope: SharedBy::$scope,
                    form: field.form(),
                    choices: field.choices(),
                    default: field.value(),
                    families: Vec::new(),
                    commands: &[$($(stringify!($command)),+)?],
                    limits: [$($limits,)? Limits::Any][0],
                    field: get_field(|config| Some(&mut config.$field)),
                }
            },)+)+]
        }
    };
}

/// Whole numbers from 1 on.
const COUNT: Limits = Limits::Whole(1, WHOLE_MAX);
const BATCH: Limits = Limits::Whole(1, EXACT_MAX);
/// Finite numbers from 0 on.
const POSITIVE: Limits = Limits::Real(0.0, f64::MAX);

settings! {
    ["Model"]
    /// Names or patterns of layers or parameters that are not trained, separated by commas, as in
    /// 0,2.bias or 'blocks.?,*.bias' [default: none; of small tables all but a linear model, if
    /// that suffices]
    Run freeze "NAMES": Option<Vec<String>> = None;
    /// Train adapters of low rank (LoRA) beside the weights of `init-from`, which stay as they are:
    /// rank=16,alpha=32,on=all-linear; on may be names or patterns of layers, as in
    /// on=q_proj,v_proj; dropout=P and rslora=true may follow. Or from=FOLDER: those that PEFT or
    /// export wrote
    Run lora "SETTINGS": Option<LoraSetting> = None;

    /// Keep the defaults of version 0.8, in which tables choose nothing
    Run plain "BOOL": bool = false;

    ["Data"]
    /// Training data: a file (.npy, .npz, .csv, .tsv, .parquet, .safetensors, .bin, IDX, and .gz of
    /// csv, npy and IDX), a folder of files or a pattern, followed by #NAME to choose one of
    /// several arrays. Tokens: tokens:FILE,context=N (.bin of llm.c or nanoGPT, .txt, arrays); with
    /// vocabulary=N if the file does not say it. Conversations: .jsonl, or .parquet with a
    /// tokenizer, with messages, prompt and completion, or text. Or built-in data: glyphs,
    /// synthetic:classification or synthetic:regression, followed by options, as in
    /// glyphs,rows=50000 (rows, held-out, seed; features, classes or outputs, noise)
    Job data "SPEC" [verify]: DataSpec = DataSpec::default();
    /// Labels: a column or an array of `data`, by name, or another file; a,b for several columns of
    /// numbers [default: the last column of the first table; for arrays, y next to x, labels next
    /// to features or images, …]
    Job labels "SPEC" [verify]: Option<String> = None;
    /// Data to evaluate on, in the form of `data` [default: none]
    Job val_data "SPEC" [verify]: Option<DataSpec> = None;
    /// Labels of `val-data` [default: as in `labels`]
    Job val_labels "SPEC" [verify]: Option<String> = None;
    /// Fraction of the rows of `data`, chosen by `seed`, to keep for evaluation (of tokens: the
    /// last ones); an alternative to `val-data` [default: 0; of tables with more than 5,000 rows
    /// 0.2, at most 10,000 rows]
    Run val_split "F": Option<f64> = None, Limits::BelowOne;
    /// Whether `val-split` keeps the same fraction of each class [default: where tables choose it]
    Run stratify "BOOL": Option<bool> = None;
    /// Whether labels are classes or numbers [default: classes if they are text, or whole numbers:
    /// in tables at most 10 consecutive ones, each in at least 8 rows]
    Run task "TASK": Option<TaskKind> = None;
    /// Columns of tables to leave out, separated by commas
    Run drop "NAMES": Vec<String> = vec![];
    /// Columns of tables whose values are categories, separated by commas: each value becomes a
    /// feature that is 0 or 1. auto: every column of texts, with at most 256 values. common: of
    /// each column of texts the 40 commonest values; dates become numbers, and free text,
    /// identifiers and columns without a name are left out [default: common]
    Run categorical "NAMES": Option<Vec<String>> = None;
    /// How missing numbers (empty cells, NA, null, ?, - or NaN) are treated [default: error; in
    /// tables indicator]
    Run missing "HOW": Option<Missing> = None;
    /// How features are normalized: unit scales all of them to 0 to 1, standard gives each mean 0
    /// and standard deviation 1, and numeric labels, too [default: none; of tables standard]
    Run normalize "HOW": Option<Scaling> = None;
    /// Folder with the tokenizer.json and the chat template that make tokens of conversations
    /// [default: that of `init-from`]
    Job tokenizer "FOLDER" [show_tokens verify]: Option<PathBuf> = None;
    /// Tokens of conversations that are trained
    Run loss_on "TOKENS" [show_tokens]: LossOn = LossOn::Assistant;
    /// Whether several conversations share a row; auto: if the model has rotary positions
    Run packing "WHEN" [show_tokens]: Packing = Packing::Auto;
    /// Folder for converted copies of files that cannot be memory-mapped
    /// [default: beside the files, else ~/.cache/ddp-train/copies]
    Rank cache_dir "DIR" [eval predict show_tokens verify]: Option<PathBuf> = None;

    ["Batches and length"]
    /// Global batch size: rows per step, summed over all ranks [default: 128; of tables with more
    /// than 10,000 rows 256]
    Run batch_size "ROWS": Option<u64> = None, BATCH;
    /// Global batch size in tokens, a multiple of the model's context; an alternative to
    /// `batch-size`
    Run batch_tokens "TOKENS": Option<u64> = None, BATCH;
    /// Largest number of rows that a rank processes at once; gradients accumulate over the rest
    /// [default: all of its rows]
    Run micro_batch "ROWS": Option<usize> = None, COUNT;
    /// Steps to train, instead of `epochs`; 0 saves the untrained model
    Job steps "N": Option<u64> = None, Limits::Whole(0, EXACT_MAX);
    /// Passes through the data [default: 5; tables choose `steps`]
    Job epochs "N": Option<u64> = None;
    /// Skip an epoch's last batch if it is smaller than the others
    Run drop_last "BOOL": bool = false;

    ["Optimization"]
    /// Optimizer
    Run optimizer "NAME" [mlp gpt]: OptimizerKind = OptimizerKind::Adamw;
    /// Peak learning rate
    Run lr "RATE": Option<f64> = None, POSITIVE;
    /// muon: peak learning rate of the parameters that adamw updates, on the same schedule
    Run adam_lr "RATE": Option<f64> = None, POSITIVE;
    /// Learning rate of the last step, unless the schedule is constant
    Run min_lr "RATE": f64 = 0.0, POSITIVE;
    /// Learning rate schedule after the warm-up
    Run schedule "NAME": Schedule = Schedule::Cosine;
    /// Steps over which the schedule falls, if not over those of the run
    Run schedule_steps "N": Option<u64> = None, Limits::Whole(1, EXACT_MAX);
    /// The linear path starts at ridge regression with this penalty, for classes at linear
    /// discriminants; 0: at zero [default: 0; tables of up to 5,000 rows choose]
    Run linear_start "PENALTY": Option<f64> = None, POSITIVE;
    /// Steps to reach the peak learning rate [default: a tenth of all steps, at most 100]
    Job warmup_steps "N": Option<u64> = None;
    /// Weight decay
    Run weight_decay "X": Option<f64> = None, POSITIVE;
    /// What weight decay applies to
    Run decay "WHAT": Decayed = Decayed::Matrices;
    /// adamw, muon: first-moment decay β₁
    Run beta1 "X": Option<f64> = None, Limits::BelowOne;
    /// adamw, muon: second-moment decay β₂
    Run beta2 "X": Option<f64> = None, Limits::BelowOne;
    /// adamw, muon: added to the denominator
    Run eps "X": Option<f64> = None;
    /// sgd, muon: momentum; muon always uses Nesterov's
    Run momentum "X": Option<f64> = None, Limits::BelowOne;
    /// sgd: Nesterov's momentum
    Run nesterov "BOOL": bool = false;
    /// Parameters with another learning rate or weight decay, by name, as in
    /// *.bias:weight-decay=0,head.*:lr=0.003; in TOML, tables called group with match, lr and
    /// weight-decay. The first group that matches a name counts
    /// [default: none; for tables linear.*, ten times `lr`]
    Run group "GROUPS": Option<Groups> = None;
    /// Largest norm of all gradients together; 0 turns clipping off [default: 0; for tables 1]
    Run grad_clip "NORM": Option<f64> = None, POSITIVE;
    /// Share of the target probability that is spread evenly over all classes
    Run label_smoothing "X": f64 = 0.0, Limits::Real(0.0, 1.0);
    /// Weight of each class in the loss: balanced (all classes count the same, however many rows
    /// they have), numbers in the order of the classes, as in 1,2.5, or by name, as in
    /// stays=1,moves=4
    Run class_weights "WEIGHTS": ClassWeights = ClassWeights::Equal;
    /// Seed of everything random in training
    Run seed "N": u64 = 0;

    ["Machine"]
    /// Device: cpu, cuda (each rank on its own GPU), cuda:N (one rank, on that GPU), or
    /// auto: cuda if every rank can, else cpu
    Rank device "DEVICE" [eval predict mlp gpt addmm allreduce verify]: DeviceChoice = DeviceChoice::Auto;
    /// GPUs of each rank, over which the model is split: for models too large for one GPU
    Job devices_per_rank "N": usize = 1, Limits::Whole(1, 64);
    /// Let several ranks share a GPU if there are too few: for tests, slow
    Rank share_gpus "BOOL" [eval predict mlp gpt addmm allreduce verify]: bool = false;
    /// Precision of the model's computation. tf32 on a CPU: matmuls by three of bf16. Parameters,
    /// gradients and moments stay f32
    Run dtype "TYPE" [mlp gpt addmm]: Precision = Precision::F32;
    /// Keep all training data in GPU memory; auto: where it fits
    Job data_on_device "WHEN": Resident = Resident::Auto;
    /// Capture a step as a CUDA graph and replay it; auto: on a GPU, unless the layers are split
    /// over several
    Job graph "WHEN" [mlp gpt]: GraphChoice = GraphChoice::Auto;
    /// How many parts of the model, from the first on, backward computes again. A part ends where
    /// only one value goes on. For models of blocks there is also `recompute`
    Job recompute_parts "N": usize = 0, Limits::Whole(0, 1 << 20);
    /// Memory that a rank may use, as in 40GiB: chooses `recompute` and `recompute-blocks`, or
    /// `recompute-parts`, so that its plan fits with as little recomputing as possible
    Job memory "SIZE" [verify]: Option<MemorySize> = None;
    /// CPU threads of a rank [default: its share of the cores]
    Rank threads "N" [eval predict generate chat mlp gpt addmm allreduce verify]: Option<usize> = None, Limits::Whole(1, threads::COUNT_MAX as u64);

    ["Between ranks"]
    /// Size of a gradient bucket, the unit of reduction, in MB; the first is at most 1 MB
    /// [default: 25 on GPUs, 50 on those of several hosts, 4 on the CPU]
    Job bucket_mb "MB" [mlp gpt]: Option<f64> = None, Limits::Real(0.001, 65_536.0);
    /// Type of gradients in transit
    Run reduce_dtype "TYPE" [mlp gpt]: FloatType = FloatType::F32;
    /// Make the bits of the model the same on any number of ranks up to V: each batch is cut into V
    /// shards, which are processed one by one and summed in a fixed tree. See docs/same-bits.md
    Run same_bits "V" [mlp gpt]: Option<usize> = None, Limits::Whole(1, SHARDS_MAX as u64);
    /// ZeRO stage: 0 keeps all state on every rank; 1 divides the optimizer's moments among the
    /// ranks, and with bf16 the f32 weights; 2 divides the gradients, too
    Job zero "STAGE" [mlp gpt]: u64 = 0, Limits::Whole(0, 2);
    /// Reduce gradients while the backward pass still runs; auto: with several ranks
    Job overlap "WHEN" [mlp gpt]: Overlap = Overlap::Auto;
    /// How NCCL adds up gradients: fixed has the same bits in every run; fast leaves the choice to
    /// NCCL, and bits may differ
    Job nccl "HOW": NcclChoice = NcclChoice::Fixed;
    /// Seconds without a sign of progress after which a rank counts as lost: the job ends with exit
    /// code 77
    Rank timeout_s "S" [eval predict mlp gpt addmm allreduce verify]: f64 = 600.0, Limits::Real(*TIMEOUT_S.start(), *TIMEOUT_S.end());

    ["Checkpoints and resuming"]
    /// Steps between checkpoints; 0 for the best and the last only [default: an epoch; for tables
    /// at least a twentieth of the run]
    Job checkpoint_every "N": Option<u64> = None;
    /// Number of newest checkpoints to keep; the best by validation is kept as well
    Job keep "N": u64 = 3, COUNT;
    /// Resume a run: never, auto (from the newest intact checkpoint in `out`, from the start if
    /// there is none), or the folder of one of its checkpoints
    Job resume "WHICH": Resume = Resume::Never;
    /// With `resume`: continue although settings differ that change the results
    @serde(rename = "override")
    Job override_ "BOOL": bool = false;
    /// Start training from saved parameters: of a run, a checkpoint or a Hugging Face folder (Qwen,
    /// Llama, Mistral, Gemma, GPT-2 and others), from which the model follows, or of a
    /// model.safetensors that matches the model. If adapters are resumed or used: the folder
    /// where their base is now
    Job init_from "PATH" [show_tokens eval predict generate chat export verify]: Option<PathBuf> = None;

    ["Output"]
    /// Folder of the run; it must not contain another run, unless that is resumed
    Rank out "DIR": PathBuf = "out".into();
    /// Steps between evaluations on held-out rows; 0 for one at the end only [default: an epoch;
    /// for tables a fiftieth of the run]
    Job eval_every "N": Option<u64> = None;
    /// Metric on held-out rows that decides which evaluation is the best; its checkpoint is kept
    /// and used by eval, predict and export
    Job best "FIGURE": BestBy = BestBy::Loss;
    /// End the run early, after this many evaluations without one that is better by `best`; 0 to
    /// train all steps [default: 0; where tables choose `steps` 15]
    Job stop_after "N": Option<u64> = None;
    /// gpt: a text to continue at each evaluation and at the end, with up to 64 tokens, for the
    /// metrics log and the report; in a run on conversations, a question to answer
    Job sample "PROMPT": Option<String> = None;
    /// The same for the prompts of N held-out conversations, beside the answers that these have
    Job sample_held_out "N": u64 = 0, Limits::Whole(0, 1000);
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
    Rank log_level "LEVEL" [eval predict verify]: LogLevel = LogLevel::Info;
}

/// The setting that decides which others there are.
pub const MODEL: &str = "model";

/// Every setting, in the order of the help: the model, the rest, then what model families have.
pub static SETTINGS: LazyLock<Vec<Setting>> = LazyLock::new(|| {
    let mut all = vec![model_setting()];
    all.extend(settings_of_runs());
    for one in settings_of_families() {
        let mut runs = all.iter().filter(|it| it.families.is_empty());
        let name = &one.name;
        let is_free = runs.all(|it| it.name != *name);
        assert!(is_free, "rename the setting {name}: all runs have it");
        all.push(one);
    }
    all
});

/// The setting `model`.
fn model_setting() -> Setting {
    let mut lines = Vec::new();
    for family in ModelSpec::families() {
        let (name, help) = (family.name, family.help);
        let names: Vec<_> = family.presets.iter().map(|(name, _)| *name).collect();
        lines.push(match names.len() {
            0 => format!("{name}: {help}"),
            _ => format!("{name}: {help} (presets: {})", names.join(", ")),
        });
    }
    Setting {
        name: MODEL.to_string(),
        help: format!(
            "Model family or preset; settings may follow, as in gpt,layers=6,width=384. {}",
            lines.join("; ")
        ),
        group: "Model".to_string(),
        value_name: "MODEL",
        scope: SharedBy::Run,
        form: Form::One,
        choices: Vec::new(),
        default: ModelSpec::default().name().into(),
        families: Vec::new(),
        commands: &[],
        limits: Limits::Any,
        field: get_field(|_| None),
    }
}

/// The settings of all families, grouped by the families that have them. Families may share a name;
/// its help is that of the first family.
fn settings_of_families() -> Vec<Setting> {
    let mut all: Vec<Setting> = Vec::new();
    for mut family in ModelSpec::families() {
        let name = family.name;
        for setting in family.default.settings() {
            let known = all.iter_mut().find(|known| known.name == setting.name);
            match known {
                Some(known) => {
                    known.families.push(name);
                    let default = setting.field.value();
                    if default != known.default {
                        known.help += &format!(" ({name}: {})", as_flag(&default));
                    }
                }
                None => all.push(family_setting(name, setting)),
            }
        }
    }
    for setting in &mut all {
        setting.group = format!("Model {}", setting.families.join(", "));
    }
    all.sort_by_key(|setting| setting.families.len());
    all
}

fn family_setting(family: &'static str, setting: FamilySetting<'_>) -> Setting {
    let (name, fixed) = (setting.name.clone(), setting.changes_results);
    Setting {
        name: setting.name,
        help: setting.help,
        group: String::new(),
        value_name: setting.value_name,
        scope: if fixed { SharedBy::Run } else { SharedBy::Job },
        form: setting.field.form(),
        choices: setting.field.choices(),
        default: setting.field.value(),
        families: vec![family],
        commands: &[],
        // The family checks it.
        limits: Limits::Any,
        field: get_field(move |config| Some(config.model.setting(&name)?.field)),
    }
}

/// The setting `name`.
pub fn find(name: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.name == name)
}
