//! `ddp-train eval`: how good a model is on rows with labels. Losses are computed as in training's
//! evaluation and added in the order of batches.

use clap::Args;
use ddp_comm::World;
use ddp_kernels::Device;
use ddp_kernels::transfer::{Phase, announced, in_phase};
use serde_json::json;

use super::choose::described;
use super::load::{self, Given, ReadyModel, UsingFlags};
use super::outputs::{check_finite, rescaled};
use crate::config::Config;
use crate::data::{LabelName, Normalization, counted};
use crate::error::{Error, Result};
use crate::exchange;
use crate::nn::Loss;
use crate::shown::shown;
use crate::tasks::{self, Evaluation, Totals};
use ddp_tools::output::Say;

/// Printed after the help of `eval`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  ddp-train eval --checkpoint out --data test.npz
  ddp-train eval --checkpoint out --data train.csv --held-out
  ddp-train eval --checkpoint out/checkpoints/step-00000785 --data glyphs --json
  mpirun -n 4 ddp-train eval --checkpoint out --data test.csv --labels species

Normalization, columns, class names and the loss (class weights, label smoothing) are those of training. The result does not \
depend on the number of ranks. Of built-in data (glyphs, synthetic:…) the held-out rows are used, if there are any.";

/// The flags of `eval`.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct EvalFlags {
    /// The flags of both commands.
    #[command(flatten)]
    pub using: UsingFlags,
    /// Labels, in the form of --labels in training [default: the label it was trained on, by name;
    /// with --held-out, as in training]
    #[arg(long, value_name = "SPEC")]
    pub labels: Option<String>,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
}

/// Rounds between two exchanges of sums.
const ROUNDS_A_TIME: u64 = 1024;

/// Says how good the model is on data with labels.
pub(crate) fn eval(flags: &EvalFlags, world: &World, say: Say<'_>) -> Result<()> {
    let asked = Given {
        using: &flags.using,
        labels: flags.labels.as_deref(),
        needs_labels: true,
        sorted: false,
        output: format!("json = {}", flags.json),
    };
    let mut ready = in_phase(Phase::Setup, || load::ready(&asked, world))?;
    let (totals, evaluation) = in_phase(Phase::Evaluation, || totals(world, &mut ready))?;
    let (opened, data) = (&ready.chosen.opened, flags.using.data.to_string());
    let (rows, loss) = (totals.rows, totals.loss);
    if flags.json {
        let (folder, step) = (opened.folder.to_string_lossy(), opened.state.step);
        let mut json =
            json!({ "checkpoint": folder, "step": step, "data": data, "rows": rows, "loss": loss });
        for (name, value) in evaluation.json(&totals).as_object().into_iter().flatten() {
            json[name] = value.clone();
        }
        return say(&json);
    }
    let (model, data) = (described(&ready.chosen), shown(&data));
    let text = evaluation.text(&totals);
    say(&format!("{model}\n{data}: {rows} rows\n{text}"))
}

/// The sums of all batches, on all ranks.
fn totals(world: &World, ready: &mut ReadyModel) -> Result<(Totals, Box<dyn Evaluation>)> {
    let state = ready.chosen.opened.state.clone();
    let task = tasks::of(&state.task);
    let mut options = Config::of_checkpoint(&ready.chosen.opened)?.model_options();
    if !state.class_weights.is_empty() {
        options.loss.class_weights = state.class_weights.clone().into();
        task.check(&options.loss, "the training data")?;
    }
    let loss = task.loss(&options.loss, Device::Cpu)?;
    let mut evaluation = task.evaluation(state.label.as_ref().map(LabelName::columns));
    let width = 2 + evaluation.width();
    let (mut sums, mut mine) = (vec![0.0; width], Vec::new());
    let rounds = ready.batches.rounds();
    for round in 0..rounds {
        if round < ready.batches.count() {
            mine.extend(batch(ready, round, &*loss, &mut *evaluation)?);
        }
        if (round + 1) % ROUNDS_A_TIME == 0 || round + 1 == rounds {
            let numbers = exchange::gather_numbers(world, &std::mem::take(&mut mine))?;
            // In the order of batches. No rank has more of them than rank 0.
            for first in (0..numbers[0].len()).step_by(width) {
                let batches = numbers.iter().filter_map(|of| of.get(first..first + width));
                for (sum, part) in batches.flat_map(|batch| (0..width).zip(batch)) {
                    sums[sum] += part;
                }
            }
        }
    }
    ready.rows.check_unchanged()?;
    let task_sums = sums.split_off(2);
    let (loss_sum, weight_sum) = (sums[0], sums[1]);
    if !loss_sum.is_finite() || weight_sum == 0.0 {
        let why = match weight_sum {
            0.0 => "every row has the weight 0",
            _ => "the sum of losses overflows",
        };
        let text = format!("the loss over all rows is not finite: {why}");
        return Err(Error::NonFinite(text));
    }
    evaluation.add_up(&world.group("evaluation")?)?;
    let (rows, loss, sums) = (ready.rows.rows(), loss_sum / weight_sum, task_sums);
    let totals = Totals { rows, loss, sums };
    Ok((totals, evaluation))
}

/// The sums of this rank's batch in round `round`: losses, the weights to divide them by, and the
/// task's own sums.
fn batch(
    ready: &mut ReadyModel,
    round: u64,
    loss: &dyn Loss,
    evaluation: &mut dyn Evaluation,
) -> Result<Vec<f64>> {
    let batch = ready.batches.load(round)?;
    let first = batch.first;
    let number = |row| ready.rows.number(first + row);
    let targets = announced("the labels", || batch.targets.to(Device::Cpu))?;
    if !evaluation.needs_outputs() {
        let losses = ready.forward.losses_of(loss, &batch.x, &batch.targets)?;
        let of_row = losses.count() / batch.mine.max(1);
        let values = losses.to_vec::<f32>()?;
        check_finite("the loss is", &values, of_row, number)?;
        let sum = values.iter().map(|&loss| f64::from(loss)).sum();
        let mut sums = vec![sum, counted(&targets)? as f64];
        sums.extend(evaluation.count(&losses, &targets)?);
        return Ok(sums);
    }
    let output = ready.forward.run(&batch.x)?;
    let outputs = output.count() / batch.mine.max(1);
    output
        .with_slice(|values: &[f32]| check_finite("the model gives", values, outputs, number))??;
    // The loss is that of training, of clipped outputs; errors are in the units of the labels.
    let normalization = ready.chosen.opened.state.target_normalization.as_ref();
    let learned = rescaled(&targets, normalization, Normalization::apply)?;
    let clipped = rescaled(&output, normalization, Normalization::clip)?;
    let mut sums = ready.forward.losses(loss, &clipped, &learned)?.to_vec();
    let output = rescaled(&output, normalization, Normalization::undo_clipped)?;
    sums.extend(evaluation.count(&output, &targets)?);
    Ok(sums)
}
