//! The flags of `ddp-train bench`.

use clap::{Args, Subcommand};
use ddp_comm::World;
use ddp_tools::bench::{self, AllreduceOptions, BenchOperation, BenchOptions, MatmulShape};
use ddp_tools::output::Say;

use super::{RankFlags, choice, number, parsed, whole};
use crate::config::{FloatType, List, TaskKind, model_of};
use crate::error::Result;
use crate::models::ModelSpec;
use crate::models::mlp::WIDTH_MAX;

/// The smallest and the largest tensor: one f32, and 1 TB.
const MB_MIN: f64 = 0.000_004;
const MB_MAX: f64 = 1e6;

/// A benchmark and its flags.
#[derive(Subcommand, Clone, Debug, PartialEq)]
pub(crate) enum Bench {
    /// Training steps of a perceptron with ReLU, cross-entropy and AdamW
    Mlp(MlpFlags),
    /// Training steps of a transformer with cross-entropy, clipping and AdamW
    Gpt(GptFlags),
    /// Matmuls with a bias, as in a linear layer's forward pass
    Addmm(AddmmFlags),
    /// All-reduce of a tensor over all ranks, or another collective
    Allreduce(AllreduceFlags),
}

impl Bench {
    /// The flags that all have.
    pub(crate) fn common(&self) -> &BenchFlags {
        match self {
            Bench::Mlp(flags) => &flags.step.common,
            Bench::Gpt(flags) => &flags.step.common,
            Bench::Addmm(flags) => &flags.common,
            Bench::Allreduce(flags) => &flags.common,
        }
    }

    /// Measures on all ranks.
    pub(crate) fn run(&self, world: &World, say: Say<'_>) -> Result<()> {
        let common = self.common();
        let options = BenchOptions {
            config: common.ranks.settings.0.clone(),
            seconds: common.seconds,
            rounds: common.rounds,
            flags: format!("{self:?}"),
        };
        let (step, subject) = match self {
            Bench::Mlp(it) => (&it.step, bench::mlp(&it.layers.0, it.task, it.batch)),
            Bench::Gpt(it) => (&it.step, bench::gpt(&it.model, it.batch, it.micro_batch)?),
            Bench::Addmm(it) => return bench::addmm(&it.shapes.0, &options, world, say),
            Bench::Allreduce(it) => {
                let call = AllreduceOptions {
                    sizes_mb: it
                        .sweep
                        .as_ref()
                        .map_or(vec![it.mb], |sizes| sizes.0.clone()),
                    operation: it.operation,
                    dtype: it.dtype,
                    captured: it.captured,
                };
                return bench::allreduce(&call, &options, world, say);
            }
        };
        bench::steps(subject, (step.explain, step.timed), &options, world, say)
    }
}

/// The flags of all benchmarks.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct BenchFlags {
    /// What a rank has.
    #[command(flatten)]
    pub ranks: RankFlags,
    /// Seconds to measure, for each shape or size
    #[arg(long, value_name = "S", default_value = "5", value_parser = number(0.01..=86_400.0), allow_negative_numbers = true)]
    pub seconds: f64,
    /// Rounds; the median is reported
    #[arg(long, value_name = "N", default_value = "5", value_parser = whole(1..=1000usize), allow_negative_numbers = true)]
    pub rounds: usize,
}

/// The flags of all benchmarks of training steps, beside the settings of a run that they take.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct StepFlags {
    /// List the nodes of a captured step and what each moves, instead of timing steps
    #[arg(long)]
    pub explain: bool,
    /// With --explain: time each node of an eager step between two events, the longest first, and
    /// the captured step beside it
    #[arg(long, requires = "explain")]
    pub timed: bool,
    /// The flags of all benchmarks.
    #[command(flatten)]
    pub common: BenchFlags,
}

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

/// The flags of `bench addmm`.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct AddmmFlags {
    /// Shapes, in turn: MxNxK (rows, outputs, inputs), with commas between
    #[arg(long, value_name = "SHAPES", value_parser = shapes, default_value = "2048x2048x2048")]
    pub shapes: List<MatmulShape>,
    /// The flags of all benchmarks.
    #[command(flatten)]
    pub common: BenchFlags,
}

fn shapes(text: &str) -> Result<List<MatmulShape>, String> {
    let expected = "expected at least one shape MxNxK, as in 2048x2048x2048,128x1024x784";
    let has_some = |shapes: &List<MatmulShape>| !shapes.0.is_empty();
    parsed(text, has_some, || expected.into())
}

/// The flags of `bench allreduce`.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct AllreduceFlags {
    /// Size of the tensor on each rank, in MB (10⁶ bytes); for reduce_scatter and all_gather, of
    /// all slices together
    #[arg(long, value_name = "MB", default_value = "7.4", value_parser = number(MB_MIN..=MB_MAX), allow_negative_numbers = true)]
    pub mb: f64,
    /// Several sizes, from MB to MB by doubling; instead of --mb
    #[arg(long, value_name = "FROM:TO", value_parser = sweep, conflicts_with = "mb")]
    pub sweep: Option<List<f64>>,
    /// The collective
    #[arg(long, value_name = "NAME", default_value = "all_reduce", value_parser = choice::<BenchOperation>())]
    pub operation: BenchOperation,
    /// Element type
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = choice::<FloatType>())]
    pub dtype: FloatType,
    /// On a GPU: capture many calls in one graph and replay it
    #[arg(long)]
    pub captured: bool,
    /// The flags of all benchmarks.
    #[command(flatten)]
    pub common: BenchFlags,
}

/// `--sweep`: sizes in MB, each twice the one before.
fn sweep(text: &str) -> Result<List<f64>, String> {
    let size = number(MB_MIN..=MB_MAX);
    let ends = text.split_once(':');
    match ends.map(|(from, to)| (size(from), size(to))) {
        Some((Ok(from), Ok(to))) if from <= to => {
            let sizes = std::iter::successors(Some(from), |size| Some(size * 2.0));
            // Doubling may round up the last size.
            let sizes = sizes.take_while(|&size| size <= to * 1.000_001);
            Ok(List(sizes.collect()))
        }
        _ => Err(format!(
            "expected two sizes from {MB_MIN} to {MB_MAX} MB, the smaller first, as in 0.001:64"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_doubles_up_to_its_end() {
        let sizes = |text: &str| sweep(text).unwrap().0;
        assert_eq!(sizes("1:8"), [1.0, 2.0, 4.0, 8.0]);
        assert_eq!(sizes("3:11.9"), [3.0, 6.0]);
        assert_eq!(sizes("0.1:0.8"), [0.1, 0.2, 0.4, 0.8]);
        for text in ["1", "1:", "a:b", "1:2:3", "2:1", "0:1"] {
            assert!(sweep(text).is_err(), "{text}");
        }
    }
}
