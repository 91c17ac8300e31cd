//! Training on CUDA devices, real or simulated (`launch/with-simulated-gpus 1`). Without a device
//! each test is skipped (`ddp_testing::skip`).

#[path = "../support/mod.rs"]
mod support;

#[path = "../claims/own_losses.rs"]
mod own_losses;
#[path = "../claims/ranks.rs"]
mod ranks;
#[path = "../claims/shards.rs"]
mod shards;
#[path = "../claims/zero.rs"]
mod zero;

mod agree;
mod captured;
#[cfg(feature = "mpi")]
mod compare;
#[cfg(feature = "mpi")]
mod golden;
#[cfg(feature = "mpi")]
mod jobs;
mod libraries;
mod loader;
mod losing;
mod modules;
#[cfg(feature = "mpi")]
mod nonfinite;
mod older;
#[cfg(feature = "mpi")]
mod orders;
mod precision;
mod program;
mod split;
mod steady;
#[cfg(feature = "mpi")]
mod timeline;
mod transformers;
#[cfg(feature = "mpi")]
mod using;
#[cfg(feature = "mpi")]
mod waits;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::support::lines::ToFloats;
use crate::support::training::{self, Way, quietly};
use ddp::Result;
use ddp::config::{GraphChoice, Precision};
use ddp::data::{Dataset, Loader, Sampler, Source};
use ddp::models::{Mlp, Model};
use ddp::nn::Sequential;
use ddp::optim::{Optimizer, Rule};
use ddp::reducer::ReducerOptions;
use ddp::step::{Step, StepOptions};
use ddp::tasks::{self, LossOptions};
use ddp_comm::Group;
use ddp_kernels::ops::Activation;
use ddp_kernels::{DType, Device};

/// The first usable CUDA device, for one test at a time: all tests use its default stream, and
/// while one captures it no other may allocate on it.
struct Gpu {
    device: Device,
    _turn: Option<MutexGuard<'static, ()>>,
}

fn gpu() -> Option<Gpu> {
    gpu_of(1)
}

/// The same where there are at least this many GPUs.
fn gpu_of(count: usize) -> Option<Gpu> {
    gpus(count, true)
}

/// The same for tests that only start programs: simulated GPUs are those of a process, so several
/// tests run at once.
fn gpus_of_jobs(count: usize) -> Option<Gpu> {
    gpus(count, !is_simulated())
}

fn gpus(count: usize, in_turn: bool) -> Option<Gpu> {
    static TURN: Mutex<()> = Mutex::new(());
    quietly();
    let found = Device::usable().len() - 1;
    if found < count {
        ddp_testing::skip(&format!("{count} CUDA devices are needed, {found} found"));
        return None;
    }
    // A test that failed under this lock leaves no state.
    let turn = || TURN.lock().unwrap_or_else(PoisonError::into_inner);
    Some(Gpu {
        device: Device::best(),
        _turn: in_turn.then(turn),
    })
}

/// The same where they are simulated.
fn simulated_gpu_of(count: usize) -> Option<Gpu> {
    is_simulated_or_skips().then(|| gpu_of(count))?
}

fn simulated_gpus_of_jobs(count: usize) -> Option<Gpu> {
    is_simulated_or_skips().then(|| gpus_of_jobs(count))?
}

fn is_simulated_or_skips() -> bool {
    if !is_simulated() {
        ddp_testing::skip("real GPUs do not do on demand what this needs, or there are none");
    }
    is_simulated()
}

/// Whether faults can be asked of the GPUs, which have time of their own.
fn is_simulated() -> bool {
    let gpus = &ddp_kernels::device::discover().gpus;
    gpus.first()
        .is_some_and(|gpu| gpu.name.contains("Simulated"))
}

/// A GPU for one test at a time.
fn turn() -> Option<Gpu> {
    gpu()
}

/// How ranks train.
fn ways() -> Vec<Way> {
    vec![Way::Gpus(GraphChoice::Off), Way::Gpus(GraphChoice::On)]
}

/// One way of training.
#[derive(Clone)]
struct Setup {
    data: Arc<dyn Dataset>,
    hidden: Vec<usize>,
    activation: Activation,
    dropout: f64,
    batch: u64,
    micro: Option<usize>,
    rule: Rule,
    clip_norm: f64,
    reduce_dtype: DType,
    /// What layers compute in: on a GPU. On the CPU it is f32.
    precision: Precision,
}

/// The seed of what is drawn by sample and step.
const SEED: u64 = 5;

impl Setup {
    /// A perceptron of one hidden layer, AdamW, on the training data of this `--data`.
    fn new(data: &str) -> Setup {
        Setup {
            data: ddp::data::open(&data.parse().unwrap()).unwrap().train,
            hidden: vec![24],
            activation: Activation::Relu,
            dropout: 0.0,
            batch: 16,
            micro: None,
            rule: Rule::adamw(),
            clip_norm: 0.0,
            reduce_dtype: DType::F32,
            precision: Precision::F32,
        }
    }

    fn start(&self, device: Device, graph: GraphChoice) -> Result<Training> {
        let precision = if device == Device::Cpu {
            Precision::F32
        } else {
            self.precision
        };
        self.start_in(precision, device, graph)
    }

    fn start_in(
        &self,
        precision: Precision,
        device: Device,
        graph: GraphChoice,
    ) -> Result<Training> {
        let (hidden, outputs) = (self.hidden.clone(), self.data.task().outputs());
        let layers = Mlp {
            hidden,
            outputs,
            activation: self.activation,
            dropout: self.dropout,
        }
        .layers();
        let layers = match self.data.spec().inputs.dtype {
            DType::I64 => Sequential::new().then(ToFloats).then(layers),
            _ => layers,
        };
        let model = Model::new(
            Box::new(layers),
            self.data.row_shape(),
            precision,
            device,
            3,
            &|_| false,
        )?;
        let optimizer = Optimizer::new(self.rule, &model.params)?;
        let loss = tasks::of(self.data.task()).loss(&LossOptions::default(), Device::Cpu)?;
        let reducer = ReducerOptions {
            dtype: self.reduce_dtype,
            ..ReducerOptions::default()
        };
        let options = StepOptions {
            reducer,
            clip_norm: self.clip_norm,
            seed: SEED,
            graph,
        };
        let step = Step::new(model, loss, optimizer, Group::alone(), &options)?;
        let sampler = Sampler::new(self.data.rows(), self.batch, 7, false)?;
        Ok(Training {
            step,
            loader: Loader::new(
                Source::new(self.data.clone(), [device; 2]),
                sampler,
                0,
                1,
                self.micro,
            )?,
        })
    }
}

/// A training that has begun.
struct Training {
    step: Step,
    loader: Loader,
}

impl Training {
    /// Takes the step called `step0`, from 0.
    fn take(&mut self, step0: u64, learning_rate: f64, measure_norm: bool) -> Result<()> {
        self.step.measure_norm(measure_norm);
        self.step.run(self.loader.load(step0)?, learning_rate)
    }

    /// The bits of all values, moments and gradients, and of what layers read.
    fn bits(&self) -> Result<Vec<u32>> {
        let params = &self.step.stages()[0].model().params;
        let mut all = training::bits(params)?;
        let moments = self.step.stages()[0]
            .optimizer()
            .moments()
            .map(|(_, moment)| moment.clone());
        let read = params.read_arena().to_dtype(DType::F32)?;
        // The gradients last.
        for tensor in moments.chain([read, params.gradients().clone()]) {
            all.extend(tensor.to_vec::<f32>()?.iter().map(|value| value.to_bits()));
        }
        Ok(all)
    }
}
