//! `ddp-train eval`: how good a model is on rows with labels. Loss and sums are those of training's own evaluation, added up in the order of batches.

use std::fmt::{self, Display};
use std::path::PathBuf;

use ddp_comm::{Reduce, World};
use ddp_kernels::stream::Stream;
use ddp_kernels::transfer::{Phase, announced, in_phase};
use ddp_kernels::{Device, Tensor};
use serde_json::{Value, json};

use super::load::{self, Ready};
use super::outputs::{check_finite, first_largest};
use crate::config::UseConfig;
use crate::data::Task;
use crate::error::{Error, Result};
use crate::nn::Loss;
use crate::shown::shown;
use crate::trainer::model::loss;

/// Up to so many classes every pair of target and answer is counted: 8 MB.
const PAIRS_CLASSES_MAX: usize = 1024;
/// Rounds between two exchanges of what the ranks' batches came to.
const ROUNDS_A_TIME: u64 = 1024;
/// Classes that are listed for people, and mistakes.
const CLASSES_SHOWN: usize = 20;
const MISTAKES_SHOWN: usize = 5;

/// Says how good the model is on data with labels.
pub fn eval(config: &UseConfig, world: &World, say: &mut dyn FnMut(&dyn Display) -> Result<()>) -> Result<()> {
    let ready = in_phase(Phase::Setup, || load::ready(config, world, true))?;
    let report = in_phase(Phase::Evaluation, || report(config, world, ready))?;
    if config.json { say(&report.to_json()) } else { say(&report) }
}

/// What came of an evaluation.
#[derive(Debug)]
struct Report {
    checkpoint: PathBuf,
    /// Why it was this one.
    why: String,
    step: u64,
    data: String,
    rows: u64,
    loss: f64,
    answers: Answers,
}

/// What is known of the answers.
#[derive(Debug)]
enum Answers {
    /// By class.
    Classes { names: Vec<String>, counts: Counts },
    /// The mean over all numbers of the absolute difference to the label.
    Numbers { mean_absolute_error: f64 },
}

/// Whole numbers, so that it does not matter in which order they are added.
#[derive(Debug)]
struct Counts {
    /// By class: rows that are of it.
    rows: Vec<i64>,
    /// By class: rows of it that are said to be.
    right: Vec<i64>,
    /// By class, and then by answer; empty where there are many classes.
    pairs: Vec<i64>,
}

/// What a batch came to: the sum of losses, what to divide it by, and of numbers the absolute differences.
type Sums = [f64; 3];

fn report(config: &UseConfig, world: &World, mut ready: Ready) -> Result<Report> {
    let state = ready.opened.state.clone();
    let loss = loss(&state.config, &state.task, Device::Cpu)?;
    let mut counts = Counts::of(&state.task);
    let mut sums = [0.0; 3];
    let mut mine = Vec::new();
    let rounds = ready.dealt.rounds();
    for round in 0..rounds {
        if let Some((first, _)) = ready.dealt.turn(round, world.rank()) {
            mine.push(batch(&mut ready, round, first, &*loss, &mut counts)?);
        }
        if (round + 1) % ROUNDS_A_TIME == 0 || round + 1 == rounds {
            add_up(world, &mut mine, &mut sums)?;
        }
    }
    let [loss_sum, weight_sum, absolute_sum] = sums;
    if !loss_sum.is_finite() || weight_sum == 0.0 {
        let why = if weight_sum == 0.0 {
            "every row has the weight 0"
        } else {
            "the sum of losses is too large for a number"
        };
        return Err(Error::NonFinite(format!("the loss over all rows is not finite: {why}")));
    }
    let rows = ready.dealt.all_rows();
    let answers = match &state.task {
        Task::Classification { names, .. } => {
            counts.add_up(world)?;
            Answers::Classes { names: names.clone(), counts }
        }
        Task::Regression { outputs } => {
            Answers::Numbers { mean_absolute_error: absolute_sum / (rows as f64 * *outputs as f64) }
        }
    };
    let (checkpoint, why, step) = (ready.opened.folder, ready.why, state.step);
    let data = config.using.data.to_string();
    Ok(Report { checkpoint, why, step, data, rows, loss: loss_sum / weight_sum, answers })
}

/// This rank's batch of round `round`, which begins with row `first` of all.
fn batch(ready: &mut Ready, round: u64, first: u64, loss: &dyn Loss, counts: &mut Counts) -> Result<Sums> {
    let batch = ready.batches.load(round)?;
    let output = ready.forward.run(&batch.x)?;
    let targets = announced("the labels", || batch.targets.to(Device::Cpu))?;
    let outputs = output.count() / batch.mine.max(1);
    output.with_slice(|values: &[f32]| check_finite(values, outputs, first))??;
    let [loss_sum, weight_sum] = ready.forward.losses(loss, &output, &targets)?;
    let absolute_sum = output.with_slice(|output: &[f32]| match &ready.opened.state.task {
        Task::Classification { .. } => {
            targets.with_slice(|targets: &[i64]| counts.count(output, targets)).map(|()| 0.0)
        }
        Task::Regression { .. } => targets.with_slice(|targets: &[f32]| {
            output.iter().zip(targets).map(|(&a, &b)| (f64::from(a) - f64::from(b)).abs()).sum::<f64>()
        }),
    })??;
    Ok([loss_sum, weight_sum, absolute_sum])
}

/// Adds what the batches of all ranks since the last time came to, in the order of batches. Empties `mine`.
fn add_up(world: &World, mine: &mut Vec<Sums>, sums: &mut Sums) -> Result<()> {
    let bytes: Vec<u8> = mine.drain(..).flatten().flat_map(f64::to_le_bytes).collect();
    let all = world.all_gather_bytes(&bytes)?;
    let of_ranks: Vec<Vec<Sums>> = all.iter().map(|bytes| read_sums(bytes)).collect();
    let turns = of_ranks.iter().map(Vec::len).max().unwrap_or(0);
    for turn in 0..turns {
        for batch in of_ranks.iter().filter_map(|batches| batches.get(turn)) {
            sums.iter_mut().zip(batch).for_each(|(sum, part)| *sum += part);
        }
    }
    Ok(())
}

fn read_sums(bytes: &[u8]) -> Vec<Sums> {
    let numbers: Vec<f64> = bytes.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect();
    numbers.as_chunks().0.to_vec()
}

impl Counts {
    /// None so far.
    fn of(task: &Task) -> Counts {
        let classes = match task {
            Task::Classification { classes, .. } => *classes,
            Task::Regression { .. } => 0,
        };
        let pairs = if classes <= PAIRS_CLASSES_MAX { classes * classes } else { 0 };
        Counts { rows: vec![0; classes], right: vec![0; classes], pairs: vec![0; pairs] }
    }

    /// Counts the answers of a batch: `logits` `[B, C]`, `targets` `[B]`, which are classes.
    fn count(&mut self, logits: &[f32], targets: &[i64]) {
        let classes = self.rows.len();
        for (logits, &target) in logits.chunks(classes).zip(targets) {
            let (target, answer) = (target as usize, first_largest(logits));
            self.rows[target] += 1;
            self.right[target] += i64::from(answer == target);
            if let Some(pair) = self.pairs.get_mut(target * classes + answer) {
                *pair += 1;
            }
        }
    }

    /// Those of all ranks.
    fn add_up(&mut self, world: &World) -> Result<()> {
        let group = world.group("evaluation")?;
        for counts in [&mut self.rows, &mut self.right, &mut self.pairs] {
            if counts.is_empty() {
                continue;
            }
            let tensor = Tensor::from_slice(counts, &[counts.len()], Device::Cpu)?.named("counts");
            group.all_reduce(&tensor, Reduce::Sum, &Stream::default_of(Device::Cpu)?)?;
            *counts = tensor.to_vec()?;
        }
        Ok(())
    }

    /// The most frequent mistakes: (class, answer, rows), at most so many.
    fn mistakes(&self, most: usize) -> Vec<(usize, usize, i64)> {
        let classes = self.rows.len();
        let pair = |(index, &rows): (usize, &i64)| (index / classes, index % classes, rows);
        let all = self.pairs.iter().enumerate().map(pair);
        let mut mistakes: Vec<_> = all.filter(|&(class, answer, rows)| class != answer && rows > 0).collect();
        mistakes.sort_by_key(|&(_, _, rows)| std::cmp::Reverse(rows));
        mistakes.truncate(most);
        mistakes
    }
}

impl Report {
    fn to_json(&self) -> Value {
        let mut json = json!({
            "checkpoint": self.checkpoint.to_string_lossy(), "step": self.step, "data": self.data, "rows": self.rows, "loss": self.loss,
        });
        match &self.answers {
            Answers::Numbers { mean_absolute_error } => {
                json["mean_squared_error"] = json!(self.loss);
                json["mean_absolute_error"] = json!(mean_absolute_error);
            }
            Answers::Classes { names, counts } => {
                let right = counts.right.iter().sum::<i64>();
                json["right"] = json!(right);
                json["accuracy"] = json!(right as f64 / self.rows as f64);
                let class = |((name, rows), right): ((&String, &i64), &i64)| json!({ "name": name, "rows": rows, "right": right });
                let classes = names.iter().zip(&counts.rows).zip(&counts.right).map(class);
                json["classes"] = classes.collect();
                let mistake = |(class, answer, rows): (usize, usize, i64)| json!({ "class": names[class], "prediction": names[answer], "rows": rows });
                json["mistakes"] = counts.mistakes(CLASSES_SHOWN).into_iter().map(mistake).collect();
            }
        }
        json
    }

    fn show_classes(&self, f: &mut fmt::Formatter<'_>, names: &[String], counts: &Counts) -> fmt::Result {
        let names: Vec<String> = names.iter().map(|name| shown(name)).collect();
        let right = counts.right.iter().sum::<i64>();
        let (rows, percent) = (self.rows, 100.0 * right as f64 / self.rows as f64);
        writeln!(f, "loss {:.4}, accuracy {percent:.2}% ({right} of {rows} rows right)\n", self.loss)?;
        let mut shown: Vec<usize> = (0..names.len()).filter(|&class| counts.rows[class] > 0).collect();
        let share = |class: usize| counts.right[class] as f64 / counts.rows[class] as f64;
        let left_out = shown.len().saturating_sub(CLASSES_SHOWN);
        if left_out > 0 {
            shown.sort_by(|&a, &b| share(a).total_cmp(&share(b)));
            shown.truncate(CLASSES_SHOWN);
        }
        let width = shown.iter().map(|&class| names[class].chars().count()).max().unwrap_or(0).max(5);
        write!(f, "{:width$} {:>10} {:>8}", "class", "rows", "right")?;
        for &class in &shown {
            write!(f, "\n{:width$} {:>10} {:>7.2}%", names[class], counts.rows[class], 100.0 * share(class))?;
        }
        if left_out > 0 {
            write!(f, "\nand {left_out} classes more, of which more rows are right")?;
        }
        let mistakes = counts.mistakes(MISTAKES_SHOWN);
        let mistake = |&(class, answer, rows): &(usize, usize, i64)| {
            format!("{} for {} ({rows} of {} rows)", names[class], names[answer], counts.rows[class])
        };
        match mistakes.len() {
            0 => Ok(()),
            _ => write!(f, "\n\nmost often mistaken: {}", mistakes.iter().map(mistake).collect::<Vec<_>>().join(", ")),
        }
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { checkpoint, why, step, data, rows, loss, answers } = self;
        writeln!(f, "{} ({why}), after step {step}", shown(&checkpoint.to_string_lossy()))?;
        writeln!(f, "{}: {rows} rows", shown(data))?;
        match answers {
            Answers::Classes { names, counts } => self.show_classes(f, names, counts),
            Answers::Numbers { mean_absolute_error } => {
                write!(f, "mean squared error {loss:.6}, mean absolute error {mean_absolute_error:.6}")
            }
        }
    }
}
