//! Training in the test's process: ranks as threads, data made from row numbers, and a step with
//! every option.

use std::sync::Arc;
use std::time::Duration;

use ddp::checkpoint::{Position, ScheduleState, State, WorldState};
use ddp::config::{Config, GraphChoice, Precision};
use ddp::data::sampler::Shards;
use ddp::data::{Dataset, Loader, RowSpec, Sampler, Source, TaskSpec};
use ddp::models::{Mlp, Model};
use ddp::nn::{Linear, Sequential};
use ddp::optim::{Method, Optimizer, Rule};
use ddp::params::{Parameter, Params};
use ddp::reducer::ReducerOptions;
use ddp::reducer::plan::BucketSizes;
use ddp::step::{Step, StepOptions};
use ddp::tasks::{self, LossOptions};
use ddp::{Error, Result};
use ddp_comm::World;
use ddp_kernels::dtype::bf16;
use ddp_kernels::ops::{Activation, SgdConstants};
use ddp_kernels::{DType, Device, Tensor, threads};

use super::random::mixed;
use super::test_name;

#[path = "../../engine/src/checkpoint/tests/testing.rs"]
mod testing;

/// Rows whose numbers are drawn by a function of stream and index.
#[derive(Debug)]
pub(crate) struct Rows {
    pub(crate) rows: u64,
    pub(crate) spec: RowSpec,
    pub(crate) draw: fn(u64, u64) -> f32,
}

impl Rows {
    pub(crate) fn new(rows: u64, width: usize, task: TaskSpec, draw: fn(u64, u64) -> f32) -> Rows {
        let spec = RowSpec::features(width, task);
        Rows { rows, spec, draw }
    }

    /// Fills a tensor of floats (R, F) with numbers of stream `stream`.
    fn draw(&self, stream: u64, rows: &[u64], into: &Tensor) -> ddp::data::Result<()> {
        let width = into.shape()[1] as u64;
        Ok(into.with_slice_mut(|into: &mut [f32]| {
            for (row, numbers) in rows.iter().zip(into.chunks_mut(width as usize)) {
                let numbers = numbers.iter_mut().enumerate();
                numbers.for_each(|(at, x)| *x = (self.draw)(stream, row * width + at as u64));
            }
        })?)
    }
}

impl Dataset for Rows {
    fn rows(&self) -> u64 {
        self.rows
    }
    fn spec(&self) -> &RowSpec {
        &self.spec
    }
    fn fingerprint(&self) -> ddp::data::Result<String> {
        Ok(format!("rows of a test: {}", self.rows))
    }
    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> ddp::data::Result<()> {
        self.draw(1, rows, inputs)?;
        if targets.dtype() == DType::F32 {
            return self.draw(2, rows, targets);
        }
        let count = self.spec.task.outputs() as u64;
        Ok(targets.with_slice_mut(|classes: &mut [i64]| {
            for (row, class) in rows.iter().zip(classes) {
                *class = (mixed(2, *row) % count) as i64;
            }
        })?)
    }
}

/// Where ranks train, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// On the CPU, over shared memory.
    Cpu,
    /// Each on its own GPU, over NCCL.
    Gpus(GraphChoice),
}

impl Way {
    /// The case, trained in this way.
    pub(crate) fn of(self, case: &Case) -> Case {
        let Way::Gpus(graph) = self else {
            return case.clone();
        };
        // The first two steps of a kind run eagerly and are captured; there are two slots.
        let captured = graph != GraphChoice::Off && case.steps.end - case.steps.start < 6;
        Case {
            on_gpus: true,
            graph,
            warm_up: if captured { 6 } else { 0 },
            ..case.clone()
        }
    }

    /// Seeds of the order in which ranks take turns, apart from work on GPUs.
    pub(crate) fn seeds(self) -> std::ops::Range<u64> {
        match self {
            Way::Cpu => 0..2,
            Way::Gpus(_) => 0..1,
        }
    }

    /// The largest number of ranks tried.
    pub(crate) fn ranks_max(self) -> usize {
        match self {
            Way::Cpu => 4,
            Way::Gpus(_) => ddp_kernels::device::discover().gpus.len().min(4),
        }
    }
}

/// The pairs of a way and a number of ranks that this test checks: all on the CPU, some of those
/// with several ranks on GPUs, whose simulation is slow.
pub(crate) fn worlds(
    ways: &[Way],
    sizes: impl Fn(Way) -> std::ops::RangeInclusive<usize>,
) -> Vec<(Way, usize)> {
    let all = ways
        .iter()
        .flat_map(|&way| sizes(way).map(move |size| (way, size)));
    if ways.contains(&Way::Cpu) {
        return all.collect();
    }
    // One rank says nothing of ranks: only all cases have it, and machines with one GPU.
    let (several, alone): (Vec<_>, Vec<_>) = all.partition(|(_, size)| *size > 1);
    if ddp_testing::all_cases() || several.is_empty() {
        return [alone, several].concat();
    }
    ddp_testing::cases_of(&test_name(), several, 1)
}

/// One way of training.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) data: Arc<Rows>,
    pub(crate) hidden: Vec<usize>,
    /// Between the layers; None for linear layers in a row.
    pub(crate) activation: Option<Activation>,
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
    /// The stage of ZeRO of a model that was made for a rank's part. With it `precision` is that of
    /// the CPU, too.
    pub(crate) stage: Option<u64>,
    /// `ReducerOptions::shards`.
    pub(crate) shards: Option<usize>,
    /// Draws the model's initial weights.
    pub(crate) values: fn(u64, u64) -> f32,
    pub(crate) learning_rate: f64,
    pub(crate) device: Device,
    /// Whether each rank has its own GPU instead of `device`.
    pub(crate) on_gpus: bool,
    pub(crate) graph: GraphChoice,
    /// The number of steps with a learning rate of 0 that come first. They change nothing if the
    /// optimizer has no state.
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
        Rule {
            weight_decay: 0.0,
            ..Rule::of(Method::Sgd(SgdConstants {
                momentum: 0.0,
                nesterov: false,
            }))
        }
    }

    /// Regression of 4 numbers from 6, drawn by `draw`.
    pub(crate) fn regression(rows: u64, draw: fn(u64, u64) -> f32) -> Case {
        let task = TaskSpec::Regression { outputs: 4 };
        Case {
            data: Arc::new(Rows::new(rows, 6, task, draw)),
            hidden: vec![16],
            activation: Some(Activation::Relu),
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
            stage: None,
            shards: None,
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
        self.run_step(world, self.step(world)?)
    }

    /// The batches of a rank.
    pub(crate) fn loader(&self, world: &World) -> Result<Loader> {
        let sampler = Sampler::new(self.data.rows, self.batch, 7, false)?;
        let shards = self.shards.unwrap_or(world.size());
        let shards = Shards::of_rank(shards, world.rank(), world.size());
        let source = Source::new(self.data.clone(), [self.device_of(world); 2]);
        Ok(Loader::in_shards(source, sampler, shards, self.micro)?)
    }

    /// The same with a step of `step_of`.
    pub(crate) fn run_step(&self, world: &World, mut step: Step) -> Result<Outcome> {
        let mut loader = self.loader(world)?;
        for step0 in 0..self.warm_up {
            step.run(loader.load(step0)?, 0.0)?;
        }
        let mut outcome = Outcome {
            values: Vec::new(),
            losses: Vec::new(),
            rows: Vec::new(),
        };
        for step0 in self.steps.clone() {
            step.run(loader.load(step0)?, self.learning_rate)?;
            let report = step.report()?;
            outcome.losses.push(report.stats.loss());
            outcome.rows.push(report.stats.rows);
            step.gather()?;
            let stage = &step.stages()[0];
            let params = &stage.model().params;
            if params.is_divided() {
                let all = Tensor::zeros(&[params.arena_count()], DType::F32, Device::Cpu)?;
                stage.reducer().copy_masters(params, Some(&all))?;
                let read = params.read_arena().to(Device::Cpu)?;
                let same = read.to_vec::<bf16>()? == all.to_dtype(DType::BF16)?.to_vec::<bf16>()?;
                assert!(same, "layers read other weights than the rounded masters");
                let of = |p: &Parameter| all.slice(p.range.clone())?.to_vec::<f32>();
                let parts = params
                    .list()
                    .iter()
                    .map(of)
                    .collect::<Result<Vec<_>, _>>()?;
                let bits = parts.concat().into_iter().map(f32::to_bits);
                outcome.values.push(bits.collect());
                continue;
            }
            check_copies(params)?;
            outcome.values.push(bits(params)?);
        }
        Ok(outcome)
    }

    pub(crate) fn device_of(&self, world: &World) -> Device {
        if self.on_gpus {
            Device::Cuda(world.rank())
        } else {
            self.device
        }
    }

    pub(crate) fn step(&self, world: &World) -> Result<Step> {
        let (hidden, outputs) = (self.hidden.clone(), self.data.task().outputs());
        let Some(activation) = self.activation else {
            let linear = |layers: Sequential, width: &usize| layers.then(Linear::new(*width));
            let layers = hidden.iter().fold(Sequential::new(), linear);
            return self.step_of(world, layers.then(Linear::new(outputs).outer()));
        };
        let mlp = Mlp {
            hidden,
            outputs,
            activation,
            dropout: self.dropout,
        };
        self.step_of(world, mlp.layers())
    }

    /// The same with these layers.
    pub(crate) fn step_of(&self, world: &World, layers: Sequential) -> Result<Step> {
        let device = self.device_of(world);
        let frozen = |name: &str| name.starts_with(self.frozen);
        let sizes = BucketSizes {
            first_elements: self.bucket_elements,
            elements: self.bucket_elements,
            cuts_parameters: true,
        };
        let reducer = ReducerOptions {
            sizes: Some(sizes),
            dtype: self.reduce_dtype,
            overlap: self.overlap,
            zero: self.stage.unwrap_or(u64::from(self.zero)),
            shards: self.shards,
            ..ReducerOptions::default()
        };
        let features = self.data.row_shape();
        let sharing = match self.stage {
            None => reducer.shares(world.size()).into(),
            Some(_) => reducer.sharing(world.rank(), world.size()),
        };
        let precision = if device == Device::Cpu && self.stage.is_none() {
            Precision::F32
        } else {
            self.precision
        };
        let model = Model::with_shares(
            Box::new(layers),
            features,
            precision,
            device,
            3,
            &frozen,
            sharing,
        )?;
        for (stream, parameter) in model.params.list().iter().enumerate() {
            let (count, stream) = (parameter.range.len(), 10 + stream as u64);
            let values = (0..count).map(|at| (self.values)(stream, at as u64));
            let values = cpu(&values.collect::<Vec<f32>>(), &parameter.shape);
            model.params.set(parameter, &values, "the test's values")?;
        }
        let group = world.group_on(device, "gradients")?;
        let optimizer = Optimizer::of_slices(
            self.rule,
            &model.params,
            &ddp::reducer::owned(&model.params, &group, reducer),
        )?;
        let loss = tasks::of(self.data.task()).loss(&LossOptions::default(), Device::Cpu)?;
        let options = StepOptions {
            reducer,
            clip_norm: self.clip_norm,
            seed: 5,
            graph: self.graph,
        };
        Step::new(model, loss, optimizer, group, &options)
    }
}

/// The state in a checkpoint besides tensors, after `step` steps of `ranks` ranks on these rows.
pub(crate) fn state(ranks: usize, rows: &Rows, step: u64) -> State {
    let state = testing::state(step);
    State {
        samples: 11 * step,
        config: Config::default().to_json(),
        position: Position {
            rows: rows.rows,
            batch: 11,
            ..state.position
        },
        world: WorldState {
            ranks,
            devices: vec!["cpu".into(); ranks],
            ..state.world
        },
        task: rows.task().clone(),
        row_shape: rows.row_shape().to_vec(),
        ..state
    }
}

/// What layers read is the values, rounded once to what they compute in.
#[track_caller]
pub(crate) fn check_copies(params: &Params) -> Result<()> {
    let wide = |arena: &Tensor| -> Result<Vec<f32>> { Ok(arena.to_dtype(DType::F32)?.to_vec()?) };
    let rounded = params.values().to(Device::Cpu)?.to_dtype(params.dtype())?;
    let (read, rounded) = (
        wide(&params.read_arena().to(Device::Cpu)?)?,
        wide(&rounded)?,
    );
    let first = read
        .iter()
        .zip(&rounded)
        .position(|(read, rounded)| read.to_bits() != rounded.to_bits());
    assert_eq!(
        first, None,
        "the first element of the arena that layers read as another than the master, rounded"
    );
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

/// Runs `body` as each of `size` ranks, each on a thread. Returns the results in order of rank.
pub(crate) fn on_ranks<R: Send>(
    size: usize,
    seed: Option<u64>,
    body: impl Fn(&World) -> Result<R> + Sync,
) -> Vec<R> {
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
        let ranks: Vec<_> = worlds
            .into_iter()
            .map(|world| scope.spawn(move || body(&world)))
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("a rank panicked"))
            .collect()
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
