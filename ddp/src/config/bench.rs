//! What `ddp-train bench …` measures, checked.

use super::check::{WIDTH_MAX, refuse, threads, timeout, whole, within};
use super::values::{DeviceChoice, FloatType, GraphChoice, Overlap};
use crate::cli::{AllreduceFlags, MlpBenchFlags};
use crate::error::Result;

/// `bench mlp`: training steps of a perceptron.
#[derive(Clone, Debug, PartialEq)]
pub struct MlpBenchConfig {
    /// Widths, the input's first, the classes last.
    pub layers: Vec<usize>,
    /// Rows of the global batch.
    pub batch: u64,
    /// Threads of a rank; none for its share of the cores.
    pub threads: Option<usize>,
    /// Where.
    pub device: DeviceChoice,
    /// How long in all.
    pub seconds: f64,
    /// In how many rounds.
    pub rounds: usize,
    /// How large a bucket of gradients may be, in MB of 10⁶ bytes.
    pub bucket_mb: f64,
    /// What travels between ranks.
    pub reduce_dtype: FloatType,
    /// Whether gradients are reduced while backward runs.
    pub overlap: Overlap,
    /// Whether a step is captured once and launched as a whole.
    pub graph: GraphChoice,
    /// How long a rank waits for the others, in seconds.
    pub timeout_s: f64,
}

/// `bench allreduce`: sums of a tensor over all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct AllreduceConfig {
    /// MB (10⁶ bytes) that each rank gives.
    pub mb: f64,
    /// Their type.
    pub dtype: FloatType,
    /// Threads of a rank; none for its share of the cores.
    pub threads: Option<usize>,
    /// Where.
    pub device: DeviceChoice,
    /// How long in all.
    pub seconds: f64,
    /// In how many rounds.
    pub rounds: usize,
    /// How long a rank waits for the others, in seconds.
    pub timeout_s: f64,
}

impl MlpBenchConfig {
    /// Settles and checks what was written.
    pub fn resolve(flags: MlpBenchFlags) -> Result<MlpBenchConfig> {
        let config = MlpBenchConfig {
            layers: flags.layers.0,
            batch: flags.batch,
            threads: flags.common.threads,
            device: flags.common.device,
            seconds: flags.common.seconds,
            rounds: flags.common.rounds as usize,
            bucket_mb: flags.bucket_mb,
            reduce_dtype: flags.reduce_dtype,
            overlap: flags.overlap,
            graph: flags.graph,
            timeout_s: flags.common.timeout_s,
        };
        if flags.dtype != FloatType::F32 {
            return Err(refuse("--dtype", "bf16", "f32", "Models in bf16 come in a later release"));
        }
        let way_out = "Give the input's width, the hidden ones and the classes, as in --layers 784,1024,10";
        if config.layers.len() < 2 || !config.layers.iter().all(|width| (1..=WIDTH_MAX).contains(width)) {
            let got = config.layers.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
            return Err(refuse("--layers", got, &format!("two widths or more, from 1 to {}", WIDTH_MAX), way_out));
        }
        whole("--batch", config.batch, 1, 1 << 32)?;
        within("--bucket-mb", config.bucket_mb, 0.001, 65_536.0, "It is the size of a bucket of gradients in MB")?;
        check_common(config.threads, config.seconds, config.rounds, config.timeout_s)?;
        Ok(config)
    }
}

impl AllreduceConfig {
    /// Settles and checks what was written.
    pub fn resolve(flags: AllreduceFlags) -> Result<AllreduceConfig> {
        let config = AllreduceConfig {
            mb: flags.mb,
            dtype: flags.dtype,
            threads: flags.common.threads,
            device: flags.common.device,
            seconds: flags.common.seconds,
            rounds: flags.common.rounds as usize,
            timeout_s: flags.common.timeout_s,
        };
        within("--mb", config.mb, 0.000_004, 1e6, "It is what each rank gives, in MB")?;
        check_common(config.threads, config.seconds, config.rounds, config.timeout_s)?;
        Ok(config)
    }

    /// Bytes that each rank gives: whole elements, at least one.
    pub fn bytes(&self) -> usize {
        let element = self.dtype.dtype().bytes();
        ((self.mb * 1e6) as usize / element).max(1) * element
    }
}

fn check_common(count: Option<usize>, seconds: f64, rounds: usize, timeout_s: f64) -> Result<()> {
    threads(count)?;
    within("--seconds", seconds, 0.01, 86_400.0, "It is how long the measurement takes in all")?;
    whole("--rounds", rounds as u64, 1, 1000)?;
    timeout(timeout_s)
}
