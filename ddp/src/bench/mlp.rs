//! `ddp-train bench mlp`: training steps of a perceptron with ReLU.

use clap::Args;
use ddp_comm::World;
use ddp_kernels::ops::Activation;
use ddp_kernels::{DType, Device, Random, Tensor};
use serde_json::json;

use super::measure::Say;
use super::training::{self, StepFlags, Subject};
use crate::config::{List, TaskKind};
use crate::error::Result;
use crate::flags::{choice, whole};
use crate::models::Mlp;
use crate::models::mlp::WIDTH_MAX;
use crate::nn::{CrossEntropy, Loss, Mse};

/// The flags of `bench mlp`.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct MlpFlags {
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
    let widths: List<usize> = text.parse()?;
    let are_valid = widths.0.iter().all(|width| (1..=WIDTH_MAX).contains(width));
    if widths.0.len() < 2 || !are_valid {
        return Err(format!(
            "expected two widths or more, from 1 to {WIDTH_MAX}, as in 784,1024,10"
        ));
    }
    Ok(widths)
}

/// Measures on all ranks.
pub(super) fn measure(flags: &MlpFlags, world: &World, say: Say<'_>) -> Result<()> {
    let widths = &flags.layers.0;
    let (inputs, outputs) = (widths[0], widths[widths.len() - 1]);
    let mlp = Mlp {
        hidden: widths[1..widths.len() - 1].to_vec(),
        outputs,
        activation: Activation::Relu,
        dropout: 0.0,
    };
    let loss: Box<dyn Loss> = match flags.task {
        TaskKind::Classification => Box::new(CrossEntropy::default()),
        TaskKind::Regression => Box::new(Mse),
    };
    let layers: Vec<String> = widths.iter().map(usize::to_string).collect();
    let subject = Subject {
        layers: mlp.layers(),
        loss,
        row_shape: vec![inputs],
        batch: flags.batch,
        micro_batch: 0,
        clip_norm: 0.0,
        flop: flags.flop(),
        described: json!({ "layers": layers.join(","), "task": flags.task }),
        unit: ("samples", 1),
    };
    let mut rows = |rows: usize, device: Device, random: &mut Random| {
        let x = Tensor::randn(&[rows, inputs], DType::F32, device, random)?;
        let targets = match flags.task {
            TaskKind::Classification => {
                Tensor::randint(outputs as u32, &[rows], DType::I64, device, random)?
            }
            TaskKind::Regression => Tensor::randn(&[rows, outputs], DType::F32, device, random)?,
        };
        Ok([x, targets])
    };
    training::measure(
        &flags.step,
        &format!("{flags:?}"),
        world,
        say,
        subject,
        &mut rows,
    )
}

impl MlpFlags {
    /// Multiplications and additions of a step's products: one forward and two backward, without
    /// the gradient of the input.
    fn flop(&self) -> f64 {
        let pairs = self.layers.0.windows(2).enumerate();
        let products: usize = pairs
            .map(|(index, pair)| pair[0] * pair[1] * if index == 0 { 2 } else { 3 })
            .sum();
        2.0 * self.batch as f64 * products as f64
    }
}
