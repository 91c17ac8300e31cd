//! What `bench mlp` and `bench gpt` train: a perceptron with ReLU, and a transformer.

use clap::Args;
use ddp_kernels::DType;
use ddp_kernels::ops::Activation;
use serde_json::json;

use super::training::{RandomRows, StepFlags, Subject};
use crate::config::{List, TaskKind, model_of};
use crate::error::{Error, Result};
use crate::flags::{choice, parsed, whole};
use crate::models::mlp::WIDTH_MAX;
use crate::models::{DataShape, Mlp, ModelSpec};
use crate::nn::{CrossEntropy, Loss, Mse};

/// The flags of `bench mlp`.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct MlpFlags {
    /// Widths of the input, the hidden layers and the output
    #[arg(long, value_name = "WIDTHS", default_value = "784,1024,1024,10", value_parser = widths)]
    pub layers: List<usize>,
    /// Rows of a step, over all ranks
    #[arg(long, value_name = "ROWS", default_value = "128", value_parser = whole(1..=1u64 << 32), allow_negative_numbers = true)]
    pub batch: u64,
    /// What is learned: classes by cross-entropy, or numbers by the squared error
    #[arg(long, value_name = "TASK", default_value = "classification", value_parser = choice::<TaskKind>())]
    pub task: TaskKind,
    /// The flags of all benchmarks of training steps.
    #[command(flatten)]
    pub step: StepFlags,
}

fn widths(text: &str) -> Result<List<usize>, String> {
    let is_width = |width: &usize| (1..=WIDTH_MAX).contains(width);
    let are_valid = |it: &List<usize>| it.0.len() >= 2 && it.0.iter().all(is_width);
    parsed(text, are_valid, || {
        format!("expected two widths or more, from 1 to {WIDTH_MAX}, as in 784,1024,10")
    })
}

impl MlpFlags {
    pub(super) fn subject(&self) -> Subject {
        let widths = &self.layers.0;
        let (inputs, outputs) = (widths[0], widths[widths.len() - 1]);
        let mlp = Mlp {
            hidden: widths[1..widths.len() - 1].to_vec(),
            outputs,
            activation: Activation::Relu,
            dropout: 0.0,
        };
        let (loss, targets): (Box<dyn Loss>, _) = match self.task {
            TaskKind::Classification => {
                let targets = RandomRows::Below(outputs, Vec::new());
                (Box::new(CrossEntropy::default()), targets)
            }
            TaskKind::Regression => (Box::new(Mse), RandomRows::Normal(vec![outputs])),
        };
        // One matmul forward and two backward, but none for the gradient of the input.
        let pairs = widths.windows(2).enumerate();
        let matmuls = pairs.map(|(index, pair)| pair[0] * pair[1] * if index == 0 { 2 } else { 3 });
        let layers: Vec<String> = widths.iter().map(usize::to_string).collect();
        Subject {
            layers: mlp.layers(),
            loss,
            inputs: RandomRows::Normal(vec![inputs]),
            targets,
            batch: self.batch,
            micro_batch: 0,
            clip_norm: 0.0,
            flop: 2.0 * self.batch as f64 * matmuls.sum::<usize>() as f64,
            described: json!({ "layers": layers.join(","), "task": self.task }),
            unit: ("samples", 1),
        }
    }
}

/// Different tokens, if the model does not say: those of GPT-2, padded.
const VOCABULARY: usize = 50_304;

/// The flags of `bench gpt`.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct GptFlags {
    /// The model, as train takes it
    #[arg(long, value_name = "MODEL", default_value = "gpt,layers=4,heads=4,width=256,vocab=50304,context=256", value_parser = |text: &str| model_of(text, None))]
    pub model: ModelSpec,
    /// Sequences of a step, over all ranks
    #[arg(long, value_name = "ROWS", default_value = "8", value_parser = whole(1..=1u64 << 32), allow_negative_numbers = true)]
    pub batch: u64,
    /// Sequences that a rank computes at a time; 0 for all
    #[arg(long, value_name = "ROWS", default_value = "0", value_parser = whole(0..=1u64 << 32), allow_negative_numbers = true)]
    pub micro_batch: u64,
    /// The flags of all benchmarks of training steps.
    #[command(flatten)]
    pub step: StepFlags,
}

impl GptFlags {
    pub(super) fn subject(&self) -> Result<Subject> {
        let model = &self.model;
        let Some(context) = model.context() else {
            let got = model.name();
            return Err(Error::Usage(format!(
                "--model: expected a model of tokens, as gpt, got {got}; help: use bench {got}"
            )));
        };
        model.check()?;
        let vocabulary = model.vocabulary().unwrap_or(VOCABULARY);
        let data = DataShape {
            row_shape: &[context],
            image: &[],
            dtype: DType::I64,
            outputs: vocabulary,
        };
        let sizes = ["layers", "heads", "width"].map(|name| model.value(name).to_string());
        Ok(Subject {
            layers: model.layers(&data)?,
            loss: Box::new(CrossEntropy::default()),
            inputs: RandomRows::Below(vocabulary, vec![context]),
            targets: RandomRows::Below(vocabulary, vec![context]),
            batch: self.batch,
            micro_batch: self.micro_batch,
            clip_norm: 1.0,
            flop: self.batch as f64 * model.flop_of_a_row(&data).unwrap_or(0.0),
            described: json!({
                "model": sizes.join(","),
                "vocab": vocabulary,
                "context": context,
                "micro_batch": self.micro_batch,
            }),
            unit: ("tokens", context as u64),
        })
    }
}
