//! The flags of `ddp-train bench`.

use clap::Args;

use super::{count, number, whole};
use crate::config::{
    BenchOperation, DeviceChoice, FloatType, GraphChoice, List, Overlap, Precision, ProductShape, Sweep,
};

/// The flags of `bench mlp`.
#[derive(Args, Clone, Debug)]
pub struct MlpBenchFlags {
    /// Widths: the input's, the hidden ones, the classes
    #[arg(long, value_name = "WIDTHS", default_value = "784,1024,1024,10", hide_default_value = false)]
    pub layers: List<usize>,
    /// Rows of a step, over all ranks
    #[arg(long, value_name = "ROWS", default_value = "128", value_parser = whole, allow_negative_numbers = true)]
    pub batch: u64,
    /// In what the model computes; its values, gradients and moments are f32 in any case
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    pub dtype: Precision,
    /// Size of a bucket of gradients, in MB
    #[arg(long, value_name = "MB", default_value = "4", value_parser = number, allow_negative_numbers = true)]
    pub bucket_mb: f64,
    /// Type in which gradients travel
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    pub reduce_dtype: FloatType,
    /// What is kept once over all ranks, in place of once a rank: 0 nothing, 1 the optimizer's moments
    #[arg(long, value_name = "LEVEL", default_value = "0", value_parser = whole, allow_negative_numbers = true)]
    pub zero: u64,
    /// Reduce gradients beside the backward pass, while it runs
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    pub overlap: Overlap,
    /// On a GPU: capture a step once, and launch it as a whole from then on
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    pub graph: GraphChoice,
    /// What all have.
    #[command(flatten)]
    pub common: BenchFlags,
}

/// The flags of `bench addmm`.
#[derive(Args, Clone, Debug)]
pub struct AddmmFlags {
    /// Rows of the input
    #[arg(long, value_name = "ROWS", default_value = "2048", value_parser = count, allow_negative_numbers = true)]
    pub m: usize,
    /// Outputs of a row
    #[arg(long, value_name = "OUTPUTS", default_value = "2048", value_parser = count, allow_negative_numbers = true)]
    pub n: usize,
    /// Inputs of a row: what is summed over
    #[arg(long, value_name = "INPUTS", default_value = "2048", value_parser = count, allow_negative_numbers = true)]
    pub k: usize,
    /// Several shapes in turn, as MxNxK with commas between; instead of --m, --n and --k
    #[arg(long, value_name = "SHAPES", conflicts_with_all = ["m", "n", "k"])]
    pub shapes: Option<List<ProductShape>>,
    /// Type of the numbers; tf32 and bf16 on a GPU alone
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    pub dtype: Precision,
    /// What all have.
    #[command(flatten)]
    pub common: BenchFlags,
}

/// The flags of `bench allreduce`.
#[derive(Args, Clone, Debug)]
pub struct AllreduceFlags {
    /// MB (10⁶ bytes) of the tensor that each rank has: of reduce_scatter and all_gather, the slices of all ranks together
    #[arg(long, value_name = "MB", default_value = "7.4", value_parser = number, allow_negative_numbers = true)]
    pub mb: f64,
    /// Several sizes, from MB to MB by doubling; instead of --mb
    #[arg(long, value_name = "FROM:TO", conflicts_with = "mb")]
    pub sweep: Option<Sweep>,
    /// What the ranks do with it
    #[arg(long, value_name = "NAME", default_value = "all_reduce")]
    pub operation: BenchOperation,
    /// Type of the numbers
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    pub dtype: FloatType,
    /// On a GPU: many calls captured once, and launched as a whole
    #[arg(long)]
    pub captured: bool,
    /// What all have.
    #[command(flatten)]
    pub common: BenchFlags,
}

/// The flags that all benches have.
#[derive(Args, Clone, Debug)]
pub struct BenchFlags {
    /// Threads of a rank [default: its share of the cores]
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true)]
    #[arg(env = "DDP_THREADS", hide_env_values = true)]
    pub threads: Option<usize>,
    /// Where: auto, cpu, cuda (each rank has a GPU of its own) or cuda:N (one rank alone)
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    #[arg(env = "DDP_DEVICE", hide_env_values = true)]
    pub device: DeviceChoice,
    /// Let several ranks have the same GPU: to see that it works, never for speed
    #[arg(long)]
    #[arg(env = "DDP_SHARE_GPUS", hide_env_values = true)]
    pub share_gpus: bool,
    /// How long to measure, in all; of several shapes or sizes, each
    #[arg(long, value_name = "S", default_value = "5", value_parser = number, allow_negative_numbers = true)]
    pub seconds: f64,
    /// In how many rounds, of which the median counts
    #[arg(long, value_name = "N", default_value = "5", value_parser = whole, allow_negative_numbers = true)]
    pub rounds: u64,
    /// Seconds that a rank waits for the others
    #[arg(long, value_name = "S", default_value = "600", value_parser = number, allow_negative_numbers = true)]
    #[arg(env = "DDP_TIMEOUT_S", hide_env_values = true)]
    pub timeout_s: f64,
}
