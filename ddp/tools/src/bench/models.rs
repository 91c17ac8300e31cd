//! What `bench mlp` and `bench gpt` train: a perceptron with ReLU, and a transformer.

use ddp_kernels::DType;
use ddp_kernels::ops::Activation;
use serde_json::json;

use super::training::{RandomRows, Subject};
use crate::config::TaskKind;
use crate::error::{Error, Result};
use crate::models::{DataShape, Mlp, ModelSpec};
use crate::nn::{CrossEntropy, Loss, Mse};
use crate::setting::MODEL;

/// A perceptron with ReLU of these widths: of the input, the hidden layers and the output.
pub fn mlp(widths: &[usize], task: TaskKind, batch: u64) -> Subject {
    let (inputs, outputs) = (widths[0], widths[widths.len() - 1]);
    let mlp = Mlp {
        hidden: widths[1..widths.len() - 1].to_vec(),
        outputs,
        activation: Activation::Relu,
        dropout: 0.0,
    };
    let (loss, targets): (Box<dyn Loss>, _) = match task {
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
        batch,
        micro_batch: 0,
        clip_norm: 0.0,
        flop: 2.0 * batch as f64 * matmuls.sum::<usize>() as f64,
        described: json!({ "layers": layers.join(","), "task": task }),
        unit: ("samples", 1),
    }
}

/// Different tokens, if the model does not say: those of GPT-2, padded.
const VOCABULARY: usize = 50_304;

/// A model of tokens, such as gpt.
pub fn gpt(model: &ModelSpec, batch: u64, micro_batch: u64) -> Result<Subject> {
    let Some(context) = model.context() else {
        let got = model.name();
        return Err(Error::Usage(format!(
            "{MODEL}: expected a model of tokens, such as gpt, got {got}; help: use bench {got}"
        )));
    };
    model.check()?;
    let vocabulary = model.vocabulary().unwrap_or(VOCABULARY);
    let data = DataShape {
        row_shape: &[context],
        image: &[],
        dtype: DType::I64,
        outputs: vocabulary,
        documents: false,
    };
    let sizes = ["layers", "heads", "width"].map(|name| model.value(name).to_string());
    Ok(Subject {
        layers: model.layers(&data)?,
        loss: Box::new(CrossEntropy::default()),
        inputs: RandomRows::Below(vocabulary, vec![context]),
        targets: RandomRows::Below(vocabulary, vec![context]),
        batch,
        micro_batch,
        clip_norm: 1.0,
        flop: batch as f64 * model.flop_of_a_row(&data).unwrap_or(0.0),
        described: json!({
            "model": sizes.join(","),
            "vocab": vocabulary,
            "context": context,
            "micro_batch": micro_batch,
        }),
        unit: ("tokens", context as u64),
    })
}
