//! The length of a run in steps, and what else its settings mean for its data and its model.

use ddp_data::setting::VAL_SPLIT;
use ddp_data::{Data, DataSpec, Sampler};
use ddp_kernels::setting::Choice;
use ddp_nn::optim::{ParameterGroup, Schedule};

use crate::checkpoint::Plateau;
use crate::config::values::EXACT_MAX;
use crate::config::{BestBy, Config, Length};
use crate::error::{Error, Result};
use crate::setting::{BATCH_SIZE, BEST, DATA, DROP_LAST, EPOCHS, FREEZE, STOP_AFTER, WARMUP_STEPS};
use crate::tasks::{self, Task};

/// A run in steps, once the data are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The order of rows.
    pub sampler: Sampler,
    /// Steps of the whole run.
    pub steps: u64,
    /// Steps until the peak of the learning rate.
    pub warmup_steps: u64,
    /// Steps between evaluations; 0 for one at the end only.
    pub eval_every: u64,
    /// Steps between checkpoints; 0 for the best and the last only.
    pub checkpoint_every: u64,
}

impl Plan {
    /// Whether a run that has taken this many steps has taken all.
    pub fn is_over(&self, taken: u64) -> bool {
        taken >= self.steps
    }
}

impl Config {
    /// The run in steps, over these data. Checks the options that depend on them.
    pub fn plan(&self, data: &Data) -> Result<Plan> {
        let task = tasks::of(data.train.task());
        let loss = self.loss_options();
        task.check(&loss, self.data.name())?;
        task.with_weights(&loss, data, self.data.name())?;
        self.check_best(&*task, data)?;
        let rows = data.train.rows();
        self.check_rows(rows)?;
        let sampler = Sampler::new(rows, self.batch_rows(), self.seed, self.drop_last)?;
        let per_epoch = sampler.steps_per_epoch();
        let steps = match self.length() {
            Length::Steps(steps) => steps,
            Length::Epochs(epochs) => epochs
                .checked_mul(per_epoch)
                .filter(|&steps| steps <= EXACT_MAX)
                .ok_or_else(|| {
                    let epochs_max = EXACT_MAX / per_epoch;
                    Error::Usage(format!(
                        "{EPOCHS} {epochs}: expected at most {epochs_max} times {per_epoch} \
                         steps; help: give fewer"
                    ))
                })?,
        };
        let of_schedule = self.schedule_steps.unwrap_or(steps);
        let warmup_steps = self
            .warmup_steps
            .unwrap_or_else(|| (of_schedule / 10).min(100));
        if warmup_steps > of_schedule {
            return Err(Error::Usage(format!(
                "{WARMUP_STEPS} {warmup_steps}: expected at most the {of_schedule} steps of the run; \
                 help: warm up for less, or train for more"
            )));
        }
        Ok(Plan {
            sampler,
            steps,
            warmup_steps,
            eval_every: self.eval_every.unwrap_or(per_epoch),
            checkpoint_every: self.checkpoint_every.unwrap_or(per_epoch),
        })
    }

    /// Refuses a figure that held-out rows do not have, and to stop early where there are none.
    fn check_best(&self, task: &dyn Task, data: &Data) -> Result<()> {
        let (rows, best) = (&data.held_out, self.best.name());
        let measures = task.measures(&rows.spec().targets);
        let lacks_class = rows.rows_of_classes().is_some_and(|all| all.contains(&0));
        let text = if !measures.contains(&self.best) {
            let names: Vec<_> = measures.iter().map(|measure| measure.name()).collect();
            let (names, task) = (names.join(" or "), data.train.task());
            format!("{BEST} {best}: expected {names} for {task}; help: give one of these")
        } else if rows.rows() == 0 && (self.patience().is_some() || !self.best.is_loss()) {
            let setting = self.patience().map_or(BEST, |_| STOP_AFTER);
            format!("{setting}: expected held-out rows, got none; help: give {VAL_SPLIT} 0.2")
        } else if self.best == BestBy::Auc && lacks_class {
            format!("{BEST} {best}: expected held-out rows of both classes; help: hold out others")
        } else {
            return Ok(());
        };
        Err(Error::Usage(text))
    }

    /// Whether a run with this progress on held-out rows has ended early.
    pub(super) fn has_stopped_early(&self, progress: &Plateau) -> bool {
        self.patience().is_some_and(|most| progress.since >= most)
    }

    /// The learning rate of each step of a run.
    pub(super) fn learning_rate(&self, plan: &Plan) -> Result<Schedule> {
        let (peak, warmup) = (self.peak_lr(), plan.warmup_steps);
        let steps = self.schedule_steps.unwrap_or(plan.steps);
        let schedule = Schedule::new(self.schedule, peak, self.min_lr, warmup, steps);
        Ok(schedule?)
    }

    /// Refuses files with less than one batch if only full batches are trained on.
    fn check_rows(&self, rows: u64) -> Result<()> {
        let (data, batch) = (&self.data, self.batch_rows());
        let are_files = matches!(data, DataSpec::Files(_) | DataSpec::Tokens(_));
        if !(are_files && self.drop_last && rows < batch) {
            return Ok(());
        }
        Err(Error::Data(format!(
            "{DATA} {data}: expected at least {batch} rows, one {BATCH_SIZE}, because of \
             {DROP_LAST}, got {rows}; help: give {BATCH_SIZE} {} or less, or more data, or leave \
             {DROP_LAST} out",
            rows.max(1)
        )))
    }

    /// Whether the parameter `name` is not trained: `0` freezes all of layer 0, `0.bias` one
    /// parameter, `*.bias` all biases.
    pub fn is_frozen(&self, name: &str) -> bool {
        self.freeze
            .iter()
            .flatten()
            .any(|pattern| is_of(pattern, name))
    }

    /// Refuses a name or pattern in `freeze` that no layer and no parameter of the model has.
    pub(crate) fn check_freeze(&self, names: &[&str]) -> Result<()> {
        let is_unknown = |pattern: &&String| !names.iter().any(|name| is_of(pattern, name));
        match self.freeze.iter().flatten().find(is_unknown) {
            None => Ok(()),
            Some(pattern) => Err(Error::Usage(format!(
                "{FREEZE} {pattern}: expected a name or pattern of layers or parameters of the \
                 model; help: the model has {}",
                names.join(", ")
            ))),
        }
    }
}

/// Whether `pattern` matches the parameter `name` or a layer that it is of.
fn is_of(pattern: &str, name: &str) -> bool {
    let pattern = pattern.trim_end_matches('.');
    let patterns = [pattern, &format!("{pattern}.*")].map(|it| ParameterGroup::new(it, None, None));
    patterns.iter().flatten().any(|it| it.matches(name))
}

#[cfg(test)]
pub(super) mod tests;
