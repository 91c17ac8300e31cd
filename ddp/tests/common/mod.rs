//! What the tests of training share: ranks as threads of this process, data made from a row's number, and a step with
//! everything that can be set.

#![allow(dead_code)]

use std::sync::Arc;
use std::time::Duration;

use ddp::checkpoint::{Position, ScheduleState, State, WorldState};
use ddp::config::{Config, GraphChoice, Precision};
use ddp::data::{Dataset, Loader, Sampler, Targets, Task};
use ddp::models::{Mlp, Model};
use ddp::nn::{CrossEntropy, Loss, Mse};
use ddp::optim::{Optimizer, Rule};
use ddp::params::Params;
use ddp::reducer::ReducerOptions;
use ddp::reducer::plan::BucketSizes;
use ddp::step::{Step, StepOptions};
use ddp::{Error, Result};
use ddp_comm::World;
use ddp_kernels::ops::{Activation, SgdConstants};
use ddp_kernels::{DType, Device, Tensor, threads};

/// Numbers from a stream and an index: splitmix64, as in tests/peers/golden_torch.py.
pub(crate) fn mixed(stream: u64, index: u64) -> u64 {
    let mut z = (index + 1)
        .wrapping_mul(0x9E37_79B9_7F4A_7C15)
        .wrapping_add(stream.wrapping_mul(0xD134_2543_DE82_EF95).wrapping_add(0x632B_E59B_D9B4_E019));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// In [-1, 1), exact in f32.
pub(crate) fn uniform(stream: u64, index: u64) -> f32 {
    (mixed(stream, index) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// Rows whose numbers are drawn by a function of stream and index.
#[derive(Debug)]
pub(crate) struct Rows {
    pub(crate) rows: u64,
    pub(crate) features: Vec<usize>,
    pub(crate) task: Task,
    pub(crate) draw: fn(u64, u64) -> f32,
}

impl Dataset for Rows {
    fn rows(&self) -> u64 {
        self.rows
    }
    fn row_shape(&self) -> &[usize] {
        &self.features
    }
    fn task(&self) -> &Task {
        &self.task
    }
    fn fingerprint(&self) -> Result<String> {
        Ok(format!("rows of a test: {}", self.rows))
    }
    fn gather(&self, rows: &[u64], x: &mut [f32], targets: Targets<'_>) -> Result<()> {
        let width = self.features[0] as u64;
        for (row, features) in rows.iter().zip(x.chunks_mut(width as usize)) {
            features.iter_mut().enumerate().for_each(|(at, x)| *x = (self.draw)(1, row * width + at as u64));
        }
        match targets {
            Targets::Classes(classes) => {
                let count = self.task.outputs() as u64;
                rows.iter().zip(classes).for_each(|(row, class)| *class = (mixed(2, *row) % count) as i64);
            }
            Targets::Values(values) => {
                let width = self.task.outputs() as u64;
                for (row, values) in rows.iter().zip(values.chunks_mut(width as usize)) {
                    values.iter_mut().enumerate().for_each(|(at, y)| *y = (self.draw)(2, row * width + at as u64));
                }
            }
        }
        Ok(())
    }
}

/// Where ranks train, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// On the CPU, over shared memory.
    Cpu,
    /// Each on a GPU of its own, over NCCL.
    Gpus(GraphChoice),
}

impl Way {
    /// The case, trained in this way.
    pub(crate) fn of(self, case: &Case) -> Case {
        let Way::Gpus(graph) = self else { return case.clone() };
        // The first two steps of a kind run eagerly and are captured; there are two slots.
        let captured = graph != GraphChoice::Off && case.steps.end - case.steps.start < 6;
        Case { on_gpus: true, graph, warm_up: if captured { 6 } else { 0 }, ..case.clone() }
    }

    /// Orders of turns that are tried: what GPUs do has orders of its own.
    pub(crate) fn seeds(self) -> std::ops::Range<u64> {
        match self {
            Way::Cpu => 0..2,
            Way::Gpus(_) => 0..1,
        }
    }

    /// As many ranks as are tried.
    pub(crate) fn ranks_max(self) -> usize {
        match self {
            Way::Cpu => 4,
            Way::Gpus(_) => ddp_kernels::device::discover().gpus.len().min(4),
        }
    }
}

/// One way of training.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) data: Arc<Rows>,
    pub(crate) hidden: Vec<usize>,
    pub(crate) activation: Activation,
    pub(crate) dropout: f64,
    pub(crate) batch: u64,
    pub(crate) micro: Option<usize>,
    pub(crate) rule: Rule,
    pub(crate) clip_norm: f64,
    pub(crate) frozen: &'static str,
    pub(crate) reduce_dtype: DType,
    /// What layers compute in: on GPUs. On the CPU it is f32.
    pub(crate) precision: Precision,
    pub(crate) bucket_elements: usize,
    pub(crate) overlap: bool,
    /// ZeRO-1.
    pub(crate) zero: bool,
    /// Draws the model's first values.
    pub(crate) values: fn(u64, u64) -> f32,
    pub(crate) learning_rate: f64,
    pub(crate) device: Device,
    /// Whether each rank has a GPU of its own, in place of `device`.
    pub(crate) on_gpus: bool,
    pub(crate) graph: GraphChoice,
    /// So many steps with a learning rate of 0 come first: of a rule without momentum they change nothing.
    pub(crate) warm_up: u64,
    /// The steps taken, counted from 0.
    pub(crate) steps: std::ops::Range<u64>,
}

/// What a rank has after each step.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    /// The bits of every trained value.
    pub(crate) values: Vec<Vec<u32>>,
    pub(crate) losses: Vec<f64>,
    pub(crate) rows: Vec<f64>,
}

impl Case {
    pub(crate) fn sgd() -> Rule {
        Rule::Sgd { constants: SgdConstants { momentum: 0.0, nesterov: false }, weight_decay: 0.0 }
    }

    /// Regression of 4 numbers from 6, drawn by `draw`.
    pub(crate) fn regression(rows: u64, draw: fn(u64, u64) -> f32) -> Case {
        let task = Task::Regression { outputs: 4 };
        Case {
            data: Arc::new(Rows { rows, features: vec![6], task, draw }),
            hidden: vec![16],
            activation: Activation::Relu,
            dropout: 0.0,
            batch: 12,
            micro: None,
            rule: Case::sgd(),
            clip_norm: 0.0,
            frozen: "nothing",
            reduce_dtype: DType::F32,
            precision: Precision::F32,
            bucket_elements: 1024,
            overlap: true,
            zero: false,
            values: draw,
            learning_rate: 0.125,
            device: Device::Cpu,
            on_gpus: false,
            graph: GraphChoice::Auto,
            warm_up: 0,
            steps: 0..1,
        }
    }

    /// Trains with `size` ranks, whose turns come in an order drawn from `seed`.
    pub(crate) fn train(&self, size: usize, seed: u64) -> Vec<Outcome> {
        on_ranks(size, Some(seed), |world| self.run(world))
    }

    pub(crate) fn run(&self, world: &World) -> Result<Outcome> {
        let mut step = self.step(world)?;
        let sampler = Sampler::new(self.data.rows, self.batch, 7, false)?;
        let data = self.data.clone();
        let device = self.device_of(world);
        let mut loader = Loader::new(data, sampler, world.rank(), world.size(), self.micro, device)?;
        for step0 in 0..self.warm_up {
            step.run(loader.load(step0)?, 0.0, false)?;
        }
        let mut outcome = Outcome { values: Vec::new(), losses: Vec::new(), rows: Vec::new() };
        for step0 in self.steps.clone() {
            step.run(loader.load(step0)?, self.learning_rate, false)?;
            let report = step.report(false)?;
            outcome.losses.push(report.stats.loss());
            outcome.rows.push(report.stats.rows);
            step.gather()?;
            check_copies(&step.model().params)?;
            outcome.values.push(bits(&step.model().params)?);
        }
        Ok(outcome)
    }

    pub(crate) fn device_of(&self, world: &World) -> Device {
        if self.on_gpus { Device::Cuda(world.rank()) } else { self.device }
    }

    pub(crate) fn step(&self, world: &World) -> Result<Step> {
        let device = self.device_of(world);
        let (hidden, outputs) = (self.hidden.clone(), self.data.task.outputs());
        let layers = Mlp { hidden, outputs, activation: self.activation, dropout: self.dropout }.layers();
        let frozen = |name: &str| name.starts_with(self.frozen);
        let sizes = BucketSizes { first_elements: self.bucket_elements, elements: self.bucket_elements };
        let reducer = ReducerOptions { sizes, dtype: self.reduce_dtype, overlap: self.overlap, zero: self.zero };
        let (features, shares) = (&self.data.features, reducer.shares(world.size()));
        let precision = if device == Device::Cpu { Precision::F32 } else { self.precision };
        let model = Model::with_shares(Box::new(layers), features, precision, device, 3, &frozen, shares)?;
        for (stream, parameter) in model.params.list().iter().enumerate() {
            let value = model.params.master(parameter.id);
            let values = (0..value.count()).map(|at| (self.values)(10 + stream as u64, at as u64));
            value.copy_from(&cpu(&values.collect::<Vec<f32>>(), value.shape()))?;
        }
        model.params.refresh(0..model.params.values().count())?;
        let group = if self.on_gpus { world.gpu_group("gradients", device)? } else { world.group("gradients")? };
        let optimizer = Optimizer::of_rank(self.rule, &model.params, &group, reducer)?;
        let loss: Box<dyn Loss> = match self.data.task {
            Task::Classification { .. } => Box::new(CrossEntropy::default()),
            Task::Regression { .. } => Box::new(Mse),
        };
        let options = StepOptions { reducer, clip_norm: self.clip_norm, seed: 5, graph: self.graph };
        Step::new(model, loss, optimizer, group, &options)
    }
}

/// What goes into a checkpoint besides tensors: of a run of `ranks` ranks on such rows, after `step` steps.
pub(crate) fn state(ranks: usize, rows: &Rows, step: u64) -> State {
    State {
        format: 1,
        program: "a test".into(),
        step,
        samples: 11 * step,
        config: Config::default(),
        position: Position { seed: 7, epoch: 0, in_epoch: step, rows: rows.rows, batch: 11, drop_last: false },
        schedule: ScheduleState { steps: 100, warmup_steps: 10, learning_rate: 0.1 + 0.2 },
        optimizer_since: 0,
        world: WorldState { ranks, optimizer_parts: 1, devices: vec!["cpu".into(); ranks] },
        task: rows.task.clone(),
        row_shape: rows.features.clone(),
        normalization: None,
        columns: None,
        label: None,
        fingerprint: "rows".into(),
        held_out: Some("other rows".into()),
        best: None,
        last: None,
    }
}

/// What layers read is the values, rounded once to what they compute in.
#[track_caller]
pub(crate) fn check_copies(params: &Params) -> Result<()> {
    let wide = |arena: &Tensor| -> Result<Vec<f32>> { Ok(arena.to_dtype(DType::F32)?.to_vec()?) };
    let rounded = params.values().to(Device::Cpu)?.to_dtype(params.dtype())?;
    let (read, rounded) = (wide(&params.read_arena().to(Device::Cpu)?)?, wide(&rounded)?);
    let first = read.iter().zip(&rounded).position(|(read, rounded)| read.to_bits() != rounded.to_bits());
    assert_eq!(first, None, "the first element of the arena that layers read as another than the master, rounded");
    Ok(())
}

/// The bits of all values, by parameter in the order of the arena.
pub(crate) fn bits(params: &Params) -> Result<Vec<u32>> {
    let mut all = Vec::new();
    for parameter in params.list() {
        let values: Vec<f32> = params.master(parameter.id).to_vec()?;
        all.extend(values.iter().map(|value| value.to_bits()));
    }
    Ok(all)
}

/// Runs `body` as each of `size` ranks, each on a thread, and returns what they returned in order of rank.
pub(crate) fn on_ranks<R: Send>(size: usize, seed: Option<u64>, body: impl Fn(&World) -> Result<R> + Sync) -> Vec<R> {
    let results = try_on_ranks(size, seed, body);
    results.into_iter().map(|result| result.unwrap()).collect()
}

/// As `on_ranks`, with errors.
pub(crate) fn try_on_ranks<R: Send>(
    size: usize,
    seed: Option<u64>,
    body: impl Fn(&World) -> Result<R> + Sync,
) -> Vec<Result<R, Error>> {
    let worlds = World::threads(size, seed, Duration::from_secs(60)).unwrap();
    let body = &body;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = worlds.into_iter().map(|world| scope.spawn(move || body(&world))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    })
}

/// Tests run side by side: one thread an operation keeps them out of each other's way.
pub(crate) fn quietly() {
    threads::set_count(1).unwrap();
}

/// A tensor in host memory.
pub(crate) fn cpu(values: &[f32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(values, shape, Device::Cpu).unwrap()
}
