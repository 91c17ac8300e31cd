//! What `ddp-train bench …` measures, checked.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;

use super::check::{WIDTH_MAX, refuse, threads, timeout, whole, within};
use super::values::{DeviceChoice, FloatType, GraphChoice, Overlap, Precision};
use crate::cli::{AddmmFlags, AllreduceFlags, BenchFlags, MlpBenchFlags};
use crate::error::{Error, Result};

/// What all benches have.
#[derive(Clone, Debug, PartialEq)]
pub struct BenchConfig {
    /// Threads of a rank; none for its share of the cores.
    pub threads: Option<usize>,
    /// Where.
    pub device: DeviceChoice,
    /// Whether several ranks may have the same GPU.
    pub share_gpus: bool,
    /// How long in all.
    pub seconds: f64,
    /// In how many rounds.
    pub rounds: usize,
    /// How long a rank waits for the others, in seconds.
    pub timeout_s: f64,
}

/// `bench mlp`: training steps of a perceptron.
#[derive(Clone, Debug, PartialEq)]
pub struct MlpBenchConfig {
    /// Widths, the input's first, the classes last.
    pub layers: Vec<usize>,
    /// Rows of the global batch.
    pub batch: u64,
    /// In what the model computes.
    pub dtype: Precision,
    /// How large a bucket of gradients may be, in MB of 10⁶ bytes.
    pub bucket_mb: f64,
    /// What travels between ranks.
    pub reduce_dtype: FloatType,
    /// What is kept once over all ranks: 0 nothing, 1 the optimizer's moments.
    pub zero: u64,
    /// Whether gradients are reduced while backward runs.
    pub overlap: Overlap,
    /// Whether a step is captured once and launched as a whole.
    pub graph: GraphChoice,
    /// What all benches have.
    pub common: BenchConfig,
}

/// `bench addmm`: products with a bias.
#[derive(Clone, Debug, PartialEq)]
pub struct AddmmConfig {
    /// One after the other.
    pub shapes: Vec<ProductShape>,
    /// In what they are computed.
    pub dtype: Precision,
    /// What all benches have.
    pub common: BenchConfig,
}

/// `bench allreduce`: sums of a tensor over all ranks, or another collective.
#[derive(Clone, Debug, PartialEq)]
pub struct AllreduceConfig {
    /// MB (10⁶ bytes) of the tensor that each rank has, one size after the other.
    pub sizes_mb: Vec<f64>,
    /// What the ranks do with it.
    pub operation: BenchOperation,
    /// The type of its elements.
    pub dtype: FloatType,
    /// Whether calls are captured and launched as a whole.
    pub captured: bool,
    /// What all benches have.
    pub common: BenchConfig,
}

/// `--operation` of `bench allreduce`, called as in `ddp_comm`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum BenchOperation {
    /// Every rank gets the sum of all
    #[default]
    AllReduce,
    /// Every rank gets its slice of the sum
    ReduceScatter,
    /// Every rank gets the slices of the others
    AllGather,
    /// Every rank gets what rank 0 has
    Broadcast,
}

impl BenchOperation {
    /// What of a tensor's bytes a perfect algorithm must bring over each rank's link, as NCCL's tests count it: bandwidths of the
    /// bus can be compared with the hardware's, whatever the operation and however many the ranks.
    pub fn bus_factor(self, ranks: usize) -> f64 {
        let others = (ranks - 1) as f64 / ranks as f64;
        match self {
            BenchOperation::AllReduce => 2.0 * others,
            BenchOperation::ReduceScatter | BenchOperation::AllGather => others,
            BenchOperation::Broadcast => 1.0,
        }
    }
}

impl fmt::Display for BenchOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value().expect("no value is skipped");
        f.write_str(value.get_name())
    }
}

/// One product of `bench addmm`: `[m, k]` rows times a weight `[n, k]`. Reads and prints as `MxNxK`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductShape {
    /// Rows.
    pub m: usize,
    /// Outputs of a row.
    pub n: usize,
    /// Inputs of a row.
    pub k: usize,
}

impl ProductShape {
    /// Multiplications and additions of it.
    pub fn flop(self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64
    }
}

impl fmt::Display for ProductShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}x{}", self.m, self.n, self.k)
    }
}

impl FromStr for ProductShape {
    type Err = String;

    fn from_str(text: &str) -> Result<ProductShape, String> {
        let sides: Option<Vec<usize>> = text.split('x').map(|side| side.parse().ok()).collect();
        match sides.as_deref() {
            Some(&[m, n, k]) => Ok(ProductShape { m, n, k }),
            _ => Err("expected MxNxK, as in 128x1024x784".into()),
        }
    }
}

/// `--sweep`: sizes in MB, each twice the one before.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sweep {
    /// The first.
    pub from_mb: f64,
    /// None is above this.
    pub to_mb: f64,
}

impl Sweep {
    fn sizes_mb(self) -> Vec<f64> {
        let sizes = std::iter::successors(Some(self.from_mb), |size| Some(size * 2.0));
        // 1 to 4, with sizes that doubling rounds upwards.
        sizes.take_while(|&size| size <= self.to_mb * 1.000_001).collect()
    }
}

impl FromStr for Sweep {
    type Err = String;

    fn from_str(text: &str) -> Result<Sweep, String> {
        let ends = text.split_once(':').and_then(|(from, to)| Some((from.parse().ok()?, to.parse().ok()?)));
        match ends {
            Some((from_mb, to_mb)) => Ok(Sweep { from_mb, to_mb }),
            None => Err("expected two sizes in MB, as in 0.001:64".into()),
        }
    }
}

impl BenchConfig {
    fn resolve(flags: &BenchFlags) -> Result<BenchConfig> {
        threads(flags.threads)?;
        within("--seconds", flags.seconds, 0.01, 86_400.0, "It is how long the measurement takes in all")?;
        whole("--rounds", flags.rounds, 1, 1000)?;
        timeout(flags.timeout_s)?;
        Ok(BenchConfig {
            threads: flags.threads,
            device: flags.device,
            share_gpus: flags.share_gpus,
            seconds: flags.seconds,
            rounds: flags.rounds as usize,
            timeout_s: flags.timeout_s,
        })
    }
}

impl MlpBenchConfig {
    /// Settles and checks what was written.
    pub fn resolve(flags: MlpBenchFlags) -> Result<MlpBenchConfig> {
        let config = MlpBenchConfig {
            layers: flags.layers.0,
            batch: flags.batch,
            dtype: flags.dtype,
            bucket_mb: flags.bucket_mb,
            reduce_dtype: flags.reduce_dtype,
            zero: flags.zero,
            overlap: flags.overlap,
            graph: flags.graph,
            common: BenchConfig::resolve(&flags.common)?,
        };
        let way_out = "Give the input's width, the hidden ones and the classes, as in --layers 784,1024,10";
        if config.layers.len() < 2 || !config.layers.iter().all(|width| (1..=WIDTH_MAX).contains(width)) {
            let got = config.layers.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
            return Err(refuse("--layers", got, &format!("two widths or more, from 1 to {}", WIDTH_MAX), way_out));
        }
        whole("--batch", config.batch, 1, 1 << 32)?;
        whole("--zero", config.zero, 0, 1)?;
        within("--bucket-mb", config.bucket_mb, 0.001, 65_536.0, "It is the size of a bucket of gradients in MB")?;
        Ok(config)
    }
}

impl AddmmConfig {
    /// Settles and checks what was written.
    pub fn resolve(flags: AddmmFlags) -> Result<AddmmConfig> {
        let of_flags = || vec![ProductShape { m: flags.m, n: flags.n, k: flags.k }];
        let shapes = flags.shapes.map_or_else(of_flags, |list| list.0);
        if shapes.is_empty() {
            return Err(refuse("--shapes", "none", "at least one", "As in --shapes 2048x2048x2048,128x1024x784"));
        }
        for shape in &shapes {
            for (flag, side) in [("--m", shape.m), ("--n", shape.n), ("--k", shape.k)] {
                whole(flag, side as u64, 1, WIDTH_MAX as u64)?;
            }
        }
        Ok(AddmmConfig { shapes, dtype: flags.dtype, common: BenchConfig::resolve(&flags.common)? })
    }
}

impl AllreduceConfig {
    /// Settles and checks what was written.
    pub fn resolve(flags: AllreduceFlags) -> Result<AllreduceConfig> {
        let way_out = "It is the size of the tensor that each rank has, in MB";
        let check = |flag: &str, mb: f64| within(flag, mb, 0.000_004, 1e6, way_out);
        let sizes_mb = match flags.sweep {
            None => {
                check("--mb", flags.mb)?;
                vec![flags.mb]
            }
            Some(sweep) => {
                check("--sweep from", sweep.from_mb)?;
                check("--sweep to", sweep.to_mb)?;
                sweep.sizes_mb()
            }
        };
        if sizes_mb.is_empty() {
            return Err(Error::Usage("--sweep FROM:TO: expected FROM to be the smaller, as in 0.001:64".into()));
        }
        Ok(AllreduceConfig {
            sizes_mb,
            operation: flags.operation,
            dtype: flags.dtype,
            captured: flags.captured,
            common: BenchConfig::resolve(&flags.common)?,
        })
    }

    /// Elements of a tensor of so many MB: at least one; where it is slices, as many in each, which begin at multiples of
    /// 16 bytes where they are that large.
    pub fn count(&self, mb: f64, ranks: usize) -> usize {
        let element = self.dtype.dtype().bytes();
        let count = (mb * 1e6) as usize / element;
        let unit = match self.operation {
            BenchOperation::AllReduce | BenchOperation::Broadcast => 1,
            BenchOperation::ReduceScatter | BenchOperation::AllGather if count >= ranks * 16 / element => {
                ranks * 16 / element
            }
            BenchOperation::ReduceScatter | BenchOperation::AllGather => ranks,
        };
        (count / unit).max(1) * unit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_reads_back_as_it_prints() {
        let shape: ProductShape = "128x1024x784".parse().unwrap();
        assert_eq!((shape, shape.to_string()), (ProductShape { m: 128, n: 1024, k: 784 }, "128x1024x784".into()));
        assert_eq!(shape.flop(), 2.0 * 128.0 * 1024.0 * 784.0);
        for text in ["", "1x2", "1x2x3x4", "1x2x", "1x2x-3", "1×2×3"] {
            assert!(text.parse::<ProductShape>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_sweep_doubles_up_to_its_end() {
        let sizes = |text: &str| text.parse::<Sweep>().unwrap().sizes_mb();
        assert_eq!(sizes("1:8"), [1.0, 2.0, 4.0, 8.0]);
        assert_eq!(sizes("3:11.9"), [3.0, 6.0]);
        assert_eq!(sizes("0.1:0.8"), [0.1, 0.2, 0.4, 0.8]);
        assert!(sizes("2:1").is_empty());
        assert!(["1", "1:", "a:b", "1:2:3"].iter().all(|text| text.parse::<Sweep>().is_err()));
    }

    #[test]
    fn the_bus_is_counted_as_nccls_tests_count_it() {
        // From the performance notes of NCCL's tests: all_reduce 2(n-1)/n, reduce_scatter and all_gather (n-1)/n, broadcast 1.
        let factors = |ranks| {
            use BenchOperation::{AllGather, AllReduce, Broadcast, ReduceScatter};
            [AllReduce, ReduceScatter, AllGather, Broadcast].map(|operation| operation.bus_factor(ranks))
        };
        assert_eq!(factors(4), [1.5, 0.75, 0.75, 1.0]);
        assert_eq!(factors(1), [0.0, 0.0, 0.0, 1.0]);
    }

    #[test]
    fn elements_are_whole_slices_and_never_none() {
        let config = |operation, dtype| AllreduceConfig {
            sizes_mb: vec![],
            operation,
            dtype,
            captured: false,
            common: BenchConfig {
                threads: None,
                device: DeviceChoice::Cpu,
                share_gpus: false,
                seconds: 1.0,
                rounds: 1,
                timeout_s: 1.0,
            },
        };
        let all_reduce = config(BenchOperation::AllReduce, FloatType::F32);
        assert_eq!([0.000_001, 0.000_004, 7.4].map(|mb| all_reduce.count(mb, 3)), [1, 1, 1_850_000]);
        let gather = config(BenchOperation::AllGather, FloatType::Bf16);
        // 3 slices of at least one element; of 5 where that is all; of whole 8s, which are 16 bytes.
        assert_eq!([0.000_004, 0.000_03, 0.001].map(|mb| gather.count(mb, 3)), [3, 15, 480]);
    }
}
