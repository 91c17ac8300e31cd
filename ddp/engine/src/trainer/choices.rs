//! Defaults that depend on the data. For tables they are what suits most tables, for other data
//! those of version 0.8. They are chosen once and written to config.toml and to checkpoints, and a
//! resumed run takes them from there.

use ddp_comm::World;
use ddp_data::setting::{NORMALIZE, STRATIFY, VAL_SPLIT};
use ddp_data::{Data, SMALL_ROWS_MAX};
use serde_json::{Map, Value, json};

use super::folds;
use crate::config::{Config, Length, as_flag};
use crate::error::{Error, Result};
use crate::metrics_log::OutOfFold;
use crate::setting::{
    BATCH_SIZE, EVAL_EVERY, FREEZE, GRAD_CLIP, GROUP, LINEAR_PATH, LINEAR_START, PLAIN,
    SCHEDULE_STEPS, STEPS, STOP_AFTER, WARMUP_STEPS,
};

/// Tables of more rows have larger batches.
const MANY_ROWS: u64 = 10_000;
/// The steps of a run on a table with held-out rows: so many epochs, within these bounds.
const EPOCHS_OF_TABLES: u64 = 20;
const STEPS_OF_TABLES: [u64; 2] = [1_500, 10_000];
/// Evaluations of such a run, the fewest steps between two, and how many without a better one end
/// it.
const EVALUATIONS: u64 = 50;
const EVAL_EVERY_MIN: u64 = 20;
const PATIENCE: u64 = 15;
/// Checkpoints of a run on a table, at most.
const CHECKPOINTS: u64 = 20;

/// The defaults of version 0.8.
fn of_plain() -> [(&'static str, Value); 11] {
    [
        ("freeze", json!([])),
        ("group", json!([])),
        ("val-split", json!(0.0)),
        ("stratify", json!(false)),
        ("categorical", json!([])),
        ("missing", json!("error")),
        ("normalize", json!("none")),
        ("grad-clip", json!(0.0)),
        ("stop-after", json!(0)),
        ("linear-path", json!(false)),
        ("linear-start", json!(0.0)),
    ]
}

/// What else a resumed run takes over.
const TAKEN_OVER: [&str; 6] = [
    "task",
    "batch-size",
    "schedule-steps",
    "warmup-steps",
    "eval-every",
    "checkpoint-every",
];

/// `options`, with what a run with the settings `then` had chosen.
pub(super) fn taken_over(options: &Config, then: &Map<String, Value>) -> Config {
    let mut config = options.clone();
    let value = |name: &str| then.get(name).unwrap_or(&Value::Null);
    config.plain |= value("plain") == true;
    if config.steps.is_none() && config.epochs.is_none() {
        config.set_if_open("steps", value("steps"));
        let is_in_steps = config.steps.is_some();
        config.set_if_open(
            "epochs",
            if is_in_steps {
                &Value::Null
            } else {
                value("epochs")
            },
        );
    }
    for name in TAKEN_OVER {
        let is_other = match name {
            "batch-size" => config.batch_tokens.is_some(),
            // More steps are asked for: the schedule goes on to their end.
            "schedule-steps" => config
                .steps
                .is_some_and(|steps| Some(steps) > value(name).as_u64()),
            // Fewer steps are asked for.
            "warmup-steps" => config
                .steps
                .is_some_and(|steps| value(name).as_u64() > Some(steps)),
            _ => false,
        };
        config.set_if_open(name, if is_other { &Value::Null } else { value(name) });
    }
    for (name, plain) in of_plain() {
        config.set_if_open(name, then.get(name).unwrap_or(&plain));
    }
    config
}

/// The same settings, but the perceptron stays at zero, so that the model is linear; None if it is
/// already, or parameters are frozen for another reason.
fn linear_alone(options: &Config) -> Option<Config> {
    let hidden = options.model.value("hidden").as_array().map_or(0, Vec::len);
    let has_path = options.model.value(LINEAR_PATH.0) == true;
    let layers = (0..hidden).map(|layer| (2 * layer).to_string());
    // The bias of the last layer is the linear model's.
    let freeze = layers.chain([format!("{}.weight", 2 * hidden)]).collect();
    let trains_hidden = options.rule().hidden_and_rest().is_some();
    let can_be = hidden > 0 && has_path && options.freeze.is_none() && !trains_hidden;
    can_be.then(|| Config {
        freeze: Some(freeze),
        ..options.clone()
    })
}

/// The settings of a run.
pub(super) struct Choices {
    pub(super) options: Config,
    /// What was chosen and why, for people.
    pub(super) lines: Vec<String>,
    pub(super) out_of_fold: Option<OutOfFold>,
}

/// Chooses what `options` of a run that `begins` leave open. All ranks call it together. Without
/// `trains` no folds are trained, and the steps are the most that they might choose.
pub(super) fn choose(
    options: &Config,
    data: &Data,
    world: &World,
    [begins, trains]: [bool; 2],
) -> Result<Choices> {
    let mut choices = Choices {
        options: options.clone(),
        lines: Vec::new(),
        out_of_fold: None,
    };
    if let Some(request) = data.of_table.as_ref().filter(|_| begins && !options.plain) {
        let chosen = [
            ("val-split", json!(request.val_split)),
            ("stratify", json!(request.stratify)),
            ("categorical", json!(request.table.categorical)),
            ("missing", json!(request.table.missing)),
            ("normalize", json!(request.normalize)),
            ("task", json!(data.train.task().kind())),
        ];
        for (name, value) in &chosen {
            choices.options.set_if_open(name, value);
        }
        if options.stratify == Some(true) && options.val_data.is_none() && data.held_out.rows() == 0
        {
            let rows = data.train.rows();
            return Err(Error::Usage(format!(
                "{STRATIFY}: expected held-out rows, got a table of {rows} rows, which are all trained on; help: give \
                 {VAL_SPLIT} 0.2, or leave it out"
            )));
        }
        choices.say_data(options, data);
        choices.of_training(data);
        choices.length(data, world, trains)?;
        let plan = choices.options.plan(data)?;
        let every = plan.sampler.steps_per_epoch().max(plan.steps / CHECKPOINTS);
        choices
            .options
            .set_if_open("checkpoint-every", &json!(every));
    }
    let options = &mut choices.options;
    for (name, plain) in of_plain() {
        options.set_if_open(name, &plain);
    }
    if options.batch_tokens.is_none() {
        options.batch_size = Some(options.batch_rows());
    }
    if let Length::Epochs(epochs) = options.length() {
        options.epochs = Some(epochs);
    }
    Ok(choices)
}

impl Choices {
    /// Says how features and rows were prepared. Files' columns are said where they are read.
    fn say_data(&mut self, given: &Config, data: &Data) {
        if given.normalize.is_none() {
            self.lines.push(format!(
                "{NORMALIZE} standard: features, and labels that are numbers, get mean 0 and deviation 1"
            ));
        }
        let (trained, held_out) = (data.train.rows(), data.held_out.rows());
        if given.val_split.is_none() && given.val_data.is_none() && held_out > 0 {
            let part = self.options.val_split.unwrap_or_default();
            let stratified = self.options.stratify == Some(true);
            let all = trained + held_out;
            self.lines.push(format!(
                "{VAL_SPLIT} {part}, {STRATIFY} {stratified}: {held_out} of {all} rows are not trained on, to \
                 find the best model and to say how good it is"
            ));
        }
    }

    /// How a step is taken.
    fn of_training(&mut self, data: &Data) {
        let rows = data.train.rows() + data.held_out.rows();
        let batch = if rows > MANY_ROWS { 256 } else { 128 };
        let chosen = [
            (LINEAR_PATH, json!(true)),
            (GRAD_CLIP, json!(1.0)),
            (
                GROUP,
                json!([{ "match": "linear.*", "lr": 10.0 * self.options.peak_lr() }]),
            ),
            (BATCH_SIZE, json!(batch)),
        ];
        let mut said = Vec::new();
        for (setting, value) in chosen {
            let has_path = self.options.model.value(LINEAR_PATH.0) == true;
            let is_other = setting == BATCH_SIZE && self.options.batch_tokens.is_some()
                || setting == GROUP
                    && (self.options.peak_lr() == 0.0
                        || !has_path
                        || self.options.freeze.is_some());
            if !is_other && self.options.set_if_open(setting.0, &value) {
                said.push(format!("{setting} {}", as_flag(&value)));
            }
        }
        if !said.is_empty() {
            let said = said.join(", ");
            self.lines.push(format!(
                "{said}: what suits most tables ({PLAIN} true keeps the defaults of version 0.8)"
            ));
        }
    }

    /// How long the run is.
    fn length(&mut self, data: &Data, world: &World, trains: bool) -> Result<()> {
        if self.options.steps.is_some() || self.options.epochs.is_some() {
            return Ok(());
        }
        let (rows, held_out) = (data.train.rows(), data.held_out.rows());
        if held_out == 0 && (folds::FOLDS..=SMALL_ROWS_MAX).contains(&rows) {
            return self.length_of_folds(data, world, trains);
        }
        let batches = rows.div_ceil(self.options.batch_rows());
        let [least, most] = STEPS_OF_TABLES;
        let steps = (EPOCHS_OF_TABLES * batches).clamp(least, most);
        self.options.steps = Some(steps);
        let mut line = format!(
            "{STEPS} {steps}: {EPOCHS_OF_TABLES} epochs, but at least {least} and at most {most} steps"
        );
        if held_out > 0 {
            let every = (steps / EVALUATIONS).max(EVAL_EVERY_MIN);
            self.options.set_if_open("eval-every", &json!(every));
            self.options.set_if_open("stop-after", &json!(PATIENCE));
            let [every, most] = [self.options.eval_every, self.options.stop_after];
            line += &format!(
                "; {EVAL_EVERY} {}, {STOP_AFTER} {}: it ends when the held-out rows show no progress",
                every.unwrap_or_default(),
                most.unwrap_or_default()
            );
        }
        self.lines.push(line);
        Ok(())
    }

    /// The penalty of a linear model that the linear path may start at.
    fn linear_start(&self, data: &Data, world: &World) -> Result<Option<f64>> {
        let options = &self.options;
        let has_path = options.model.value(LINEAR_PATH.0) == true;
        if !has_path || options.linear_start.is_some() || options.init_from.is_some() {
            return Ok(None);
        }
        folds::penalty(options, data, world)
    }

    fn length_of_folds(&mut self, data: &Data, world: &World, trains: bool) -> Result<()> {
        self.options
            .set_if_open("schedule-steps", &json!(folds::STEPS));
        let of_schedule = self.options.schedule_steps.unwrap_or(folds::STEPS);
        let warmup = (of_schedule / 10).min(100);
        self.options.set_if_open("warmup-steps", &json!(warmup));
        if !trains {
            self.options.steps = Some(folds::STEPS);
            return Ok(());
        }
        if world.rank() == 0 {
            tracing::info!(
                "{} folds of the rows, of up to {} steps each, show how long to train ({STEPS} N trains at once)",
                folds::FOLDS,
                folds::STEPS
            );
        }
        let mut found = folds::find(&self.options, data, world)?;
        if let Some(penalty) = self.linear_start(data, world)? {
            let options = Config {
                linear_start: Some(penalty),
                ..self.options.clone()
            };
            let started = folds::find(&options, data, world)?;
            let (at_zero, there) = (found.describe(), started.describe());
            let is_better = started.loss <= found.loss;
            let penalty = if is_better { penalty } else { 0.0 };
            self.lines.push(format!(
                "{LINEAR_START} {penalty}: out of fold, a linear path that starts at its closed form has {there}, and one \
                 that starts at zero {at_zero}"
            ));
            if is_better {
                (self.options, found) = (options, started);
            }
        }
        if let Some(linear) = linear_alone(&self.options) {
            let alone = folds::find(&linear, data, world)?;
            let (one, other) = (alone.describe(), found.describe());
            if alone.suffices_beside(&found) {
                let freeze = as_flag(&json!(linear.freeze));
                self.lines.push(format!(
                    "{FREEZE} {freeze}: a linear model is enough: out of fold it has {one}, and with the perceptron {other}"
                ));
                (self.options, found) = (linear, alone);
            }
        }
        self.options.steps = Some(found.steps);
        let warmup = self.options.warmup_steps.unwrap_or_default();
        self.lines.push(format!(
            "{STEPS} {}, {SCHEDULE_STEPS} {of_schedule}, {WARMUP_STEPS} {warmup}: after so many steps, of up to {}, \
             rows that were not trained on have {}",
            found.steps,
            folds::STEPS,
            found.describe()
        ));
        self.out_of_fold = Some(found);
        Ok(())
    }
}
