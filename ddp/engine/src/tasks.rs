//! Tasks: one file or folder for each. A new task is a folder here, a line in `of`, and a variant
//! of `TaskSpec`.

mod baselines;
mod best;
mod cells;
mod classes;
mod differences;
mod linear;
mod next_token;
mod numbers;
mod task;

use ddp_data::TaskSpec;

pub use self::baselines::Baselines;
pub(crate) use self::baselines::{beside, mean_of_folds};
pub use self::best::BestBy;
pub use self::cells::cell;
pub use self::classes::ClassWeights;
pub(crate) use self::differences::numbers_figures;
pub use self::differences::{ColumnErrors, mean_r2};
pub(crate) use self::linear::LinearModels;
pub use self::task::{
    Evaluation, LossOptions, PredictionOptions, Predictions, SaveAs, Task, Totals, figures_text,
};

/// The task that `spec` describes.
pub fn of(spec: &TaskSpec) -> Box<dyn Task> {
    match spec {
        TaskSpec::Classification(classes) => Box::new(classes::LearnClasses(classes.clone())),
        TaskSpec::Regression { outputs } => Box::new(numbers::LearnNumbers { outputs: *outputs }),
        TaskSpec::NextToken {
            vocabulary,
            are_bytes,
            ..
        } => Box::new(next_token::LearnNextToken {
            vocabulary: *vocabulary,
            are_bytes: *are_bytes,
        }),
    }
}

#[cfg(test)]
mod tests;
