//! The trait of tasks: everything that differs between learning classes, numbers and tokens.
//!
//! Letters: B rows of a batch, O outputs for a target.

use std::fmt::Debug;

use ddp_comm::Group;
use ddp_data::{Data, TensorSpec};
use ddp_kernels::setting::SettingName;
use ddp_kernels::{Device, Tensor};
use ddp_nn::Loss;
use serde_json::Value;

use super::best::BestBy;
use super::classes::ClassWeights;
use super::differences::Differences;
use crate::confusion::ClassCounts;
use crate::error::{Error, Result};
use crate::shown::significant;
use crate::step::Stats;

/// A task.
pub trait Task: Debug + Send + Sync {
    /// What it learns, for messages.
    fn learns(&self) -> &'static str;

    /// The settings of its loss. Those of other tasks are refused.
    fn loss_settings(&self) -> &'static [&'static str] {
        &[]
    }

    /// Refuses values of these settings that do not fit the data.
    fn check_values(&self, _options: &LossOptions, _data: &str) -> Result<()> {
        Ok(())
    }

    /// Refuses options of the loss that do not fit this task. `data` is the name of the data.
    fn check(&self, options: &LossOptions, data: &str) -> Result<()> {
        let own = self.loss_settings();
        if let Some((setting, got)) = options.given().find(|(it, _)| !own.contains(it)) {
            return Err(Error::Usage(format!(
                "{} {got}: expected classes, and {data} are learned as {}; help: leave it out",
                SettingName(setting),
                self.learns()
            )));
        }
        self.check_values(options, data)
    }

    /// These options with a number for the weight of each class. `name` is that of the data.
    fn with_weights(
        &self,
        options: &LossOptions,
        _data: &Data,
        _name: &str,
    ) -> Result<LossOptions> {
        Ok(options.clone())
    }

    /// The loss with such options, on the last of the model's devices.
    fn loss(&self, options: &LossOptions, device: Device) -> Result<Box<dyn Loss>>;

    /// The fraction of correct answers, for the log and evaluations; None if they are not counted.
    fn accuracy(&self, _stats: &Stats) -> Option<f64> {
        None
    }

    /// The figures of held-out rows with such targets by which the best evaluation can be found.
    fn measures(&self, _targets: &TensorSpec) -> Vec<BestBy> {
        vec![BestBy::Loss]
    }

    /// Other figures, by name, that follow from a mean loss.
    fn figures(&self, _loss: f64) -> Vec<(&'static str, f64)> {
        Vec::new()
    }

    /// Why this target makes its loss non-finite, if it does.
    fn wrong_target(&self, _target: f64) -> Option<String> {
        None
    }

    /// Starts to count an evaluation's answers by class, for targets like these; None unless each
    /// row has one class.
    fn class_counts(&self, _targets: &TensorSpec) -> Option<ClassCounts> {
        None
    }

    /// Starts to add up how far answers are from their targets, for each evaluation of a run; None
    /// unless answers are numbers. `columns` are the names of the targets, if they have any.
    fn differences(&self, _columns: Option<Vec<String>>) -> Option<Differences> {
        None
    }

    /// Starts an evaluation of a saved model. `columns` as above.
    fn evaluation(&self, columns: Option<Vec<String>>) -> Box<dyn Evaluation>;

    /// Starts a file of predictions.
    fn predictions(&self, options: PredictionOptions) -> Result<Box<dyn Predictions>>;
}

/// The figures of an evaluation besides loss and accuracy, and how they are called.
const FIGURES: [(&str, &str); 5] = [
    ("perplexity", "perplexity"),
    ("bits_per_byte", "bits per byte"),
    ("rmse", "RMSE"),
    ("r2", "R²"),
    ("mean_r2", "mean R²"),
];

/// Those that `figure` has, as they follow a loss: `, perplexity 10.32, bits per byte 3.367`.
pub fn figures_text(figure: impl Fn(&str) -> Option<f64>) -> String {
    let one =
        |(name, shown): (&str, &str)| Some(format!(", {shown} {}", significant(figure(name)?, 4)));
    let of_classes = [BestBy::Balanced, BestBy::Auc];
    let of_classes = of_classes.map(|by| Some(format!(", {}", by.text(figure(by.names()[0])?))));
    let all = FIGURES.into_iter().map(one).chain(of_classes);
    all.flatten().collect()
}

/// Options of the loss. Each belongs to some tasks only.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LossOptions {
    /// The part of the target that is spread over all classes.
    pub label_smoothing: f64,
    /// The weight of each class in the loss.
    pub class_weights: ClassWeights,
}

impl LossOptions {
    /// Those that are not at their default, by setting.
    fn given(&self) -> impl Iterator<Item = (&'static str, String)> {
        let has_weights = self.class_weights != ClassWeights::Equal;
        let weights = has_weights.then(|| ("class-weights", self.class_weights.to_string()));
        let smoothing = (self.label_smoothing != 0.0).then_some(self.label_smoothing);
        let smoothing = smoothing.map(|it| ("label-smoothing", it.to_string()));
        weights.into_iter().chain(smoothing)
    }
}

/// Sums up the quality of answers.
pub trait Evaluation {
    /// How many numbers `count` returns.
    fn width(&self) -> usize;

    /// Whether `count` reads the model's outputs. Otherwise it gets the losses of all targets.
    fn needs_outputs(&self) -> bool {
        true
    }

    /// The counts of one batch. `output`, f32 (B, …, O), and `targets` are in host memory, in the
    /// units of the labels. The caller adds up the counts of all batches, in their order.
    fn count(&mut self, output: &Tensor, targets: &Tensor) -> Result<Vec<f64>>;

    /// Adds up the counts of all ranks, which call it together.
    fn add_up(&mut self, _group: &Group) -> Result<()> {
        Ok(())
    }

    /// The result, for people.
    fn text(&self, totals: &Totals) -> String;

    /// The same as a JSON object.
    fn json(&self, totals: &Totals) -> Value;
}

/// The totals of an evaluation.
#[derive(Clone, Debug)]
pub struct Totals {
    /// The number of rows.
    pub rows: u64,
    /// The mean loss, in the units of training.
    pub loss: f64,
    /// The sums of what `Evaluation::count` returned.
    pub sums: Vec<f64>,
}

/// Which predictions to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PredictionOptions {
    /// The format of the file.
    pub format: SaveAs,
    /// Whether to write the probability of each class.
    pub probabilities: bool,
    /// Whether to write the logit of each class.
    pub logits: bool,
    /// The names of the columns to predict, if each has one; else columns are numbered.
    pub names: Option<Vec<String>>,
}

/// The format of a file of predictions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveAs {
    /// Text, a line for each row.
    Csv,
    /// An array for numpy.
    Npy,
}

/// Encodes predictions as the bytes of a file.
pub trait Predictions {
    /// The start of the file.
    fn head(&self, rows: usize) -> Result<Vec<u8>>;

    /// Appends row `row`, which has these outputs (O).
    fn row(&self, row: u64, values: &[f32], into: &mut Vec<u8>);
}
