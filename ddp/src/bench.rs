//! `ddp-train bench`: how fast training steps, matmuls and collectives are here, as lines of JSON.
//!
//! Benchmarks call what training calls: the engine's step, the matmul of linear layers, the groups
//! of the reducer. Rows are random and stay in memory, so reading data is not measured. A GPU is
//! timed from the host: many calls are queued, and a round ends when the device has done them.

mod addmm;
mod allreduce;
mod explain;
mod measure;
mod models;
mod timed;
mod training;

use clap::Subcommand;
use ddp_comm::World;

use self::addmm::AddmmFlags;
use self::allreduce::AllreduceFlags;
use self::models::{GptFlags, MlpFlags};
use crate::error::Result;
use crate::flags::RankFlags;
use crate::output::Say;

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
    /// What a rank has.
    pub(crate) fn ranks(&self) -> &RankFlags {
        match self {
            Bench::Mlp(flags) => &flags.step.common.ranks,
            Bench::Gpt(flags) => &flags.step.common.ranks,
            Bench::Addmm(flags) => &flags.common.ranks,
            Bench::Allreduce(flags) => &flags.common.ranks,
        }
    }

    /// Measures on all ranks.
    pub(crate) fn run(&self, world: &World, say: Say<'_>) -> Result<()> {
        match self {
            Bench::Mlp(flags) => {
                let (step, key) = (&flags.step, format!("{flags:?}"));
                training::measure(step, &key, world, say, flags.subject())
            }
            Bench::Gpt(flags) => {
                let (step, key) = (&flags.step, format!("{flags:?}"));
                training::measure(step, &key, world, say, flags.subject()?)
            }
            Bench::Addmm(flags) => addmm::measure(flags, world, say),
            Bench::Allreduce(flags) => allreduce::measure(flags, world, say),
        }
    }
}
