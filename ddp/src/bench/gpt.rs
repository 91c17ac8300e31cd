//! `ddp-train bench gpt`: training steps of a transformer.

use clap::Args;
use ddp_comm::World;
use ddp_kernels::{DType, Device, Random, Tensor};
use serde_json::json;

use super::measure::Say;
use super::training::{self, StepFlags, Subject};
use crate::config::model_of;
use crate::error::{Error, Result};
use crate::flags::whole;
use crate::models::{DataShape, ModelSpec};
use crate::nn::CrossEntropy;

/// Different tokens, if the model does not say: those of GPT-2, padded.
const VOCABULARY: usize = 50_304;

/// The flags of `bench gpt`.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct GptFlags {
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

/// Measures on all ranks.
pub(super) fn measure(flags: &GptFlags, world: &World, say: Say<'_>) -> Result<()> {
    let model = &flags.model;
    let Some(context) = model.context() else {
        let got = model.name();
        return Err(Error::Usage(format!(
            "--model: expected a model of tokens, as gpt, got {got}; help: use bench {got}"
        )));
    };
    model.check()?;
    let vocabulary = model.vocabulary().unwrap_or(VOCABULARY);
    let shape = [context];
    let data = DataShape {
        row_shape: &shape,
        image: &[],
        dtype: DType::I64,
        outputs: vocabulary,
    };
    let sizes = ["layers", "heads", "width"].map(|name| model.value(name).to_string());
    let subject = Subject {
        layers: model.layers(&data)?,
        loss: Box::new(CrossEntropy::default()),
        row_shape: shape.to_vec(),
        batch: flags.batch,
        micro_batch: flags.micro_batch,
        clip_norm: 1.0,
        flop: flags.batch as f64 * model.flop_of_a_row(&data).unwrap_or(0.0),
        described: json!({
            "model": sizes.join(","),
            "vocab": vocabulary,
            "context": context,
            "micro_batch": flags.micro_batch,
        }),
        unit: ("tokens", context as u64),
    };
    let mut rows = |rows: usize, device: Device, random: &mut Random| {
        let mut tokens = || {
            Tensor::randint(
                vocabulary as u32,
                &[rows, context],
                DType::I64,
                device,
                random,
            )
        };
        Ok([tokens()?, tokens()?])
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
