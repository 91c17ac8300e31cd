//! Everything before the first step: data, model, the folder of the run, and the ranks' agreement that they are at the same
//! thing.

use ddp_comm::{Field, World};
use ddp_kernels::device::discover;
use ddp_kernels::ops::{AdamwConstants, SgdConstants};
use ddp_kernels::{DType, Device, Tensor, simd, threads};

use super::{Desk, Done, Trainer};
use crate::config::{self, Config, Plan};
use crate::data::{self, Data, InOrder, Loader, Task};
use crate::error::{Error, Result};
use crate::faults;
use crate::metrics::{Record, Start};
use crate::models::{Mlp, Model};
use crate::nn::{CrossEntropy, Loss, Mse};
use crate::optim::{Optimizer, Rule, Schedule};
use crate::params::Params;
use crate::progress::Progress;
use crate::reducer::plan::BucketSizes;
use crate::reducer::{self, ReducerOptions};
use crate::step::{Step, StepOptions};

/// Rows that go through the model at a time in evaluation.
const EVAL_ROWS: usize = 512;

pub(super) fn prepare<'a>(config: &'a Config, world: &'a World) -> Result<Trainer<'a>> {
    threads::set_count(config.threads.unwrap_or_else(|| world.default_threads()))?;
    let device = config::find_device(config.device, world.rank(), world.size())?;
    config::check_graph(config.graph, device)?;
    let data = data::open(&config.data)?;
    let plan = config.plan(&data)?;
    let task = data.train.task().clone();

    let model = model(config, &data, device)?;
    // In the order in which people know them: from the input on.
    let mut parameters: Vec<_> = model.params.list().iter().collect();
    parameters.sort_by_key(|parameter| parameter.id);
    config.check_freeze(parameters.iter().map(|parameter| parameter.name.as_str()))?;
    if !config.freeze.is_empty() && model.params.trained_count() == 0 {
        let text = "expected some parameters that are not frozen. Nothing is left to train: freeze fewer";
        return Err(Error::Usage(format!("--freeze {}: {text}", config.freeze.join(","))));
    }
    if config.batch_size > data.train.rows() && world.rank() == 0 {
        let (batch, rows) = (config.batch_size, data.train.rows());
        tracing::warn!("--batch-size {batch} is more than the {rows} rows of the data: every step is a whole epoch");
    }
    let optimizer = Optimizer::new(rule(config), &model.params)?;
    let reducer = ReducerOptions {
        sizes: BucketSizes::of_bytes((config.bucket_mb * 1e6) as usize),
        dtype: config.reduce_dtype.dtype(),
        overlap: reducer::overlaps(config.overlap, world),
    };
    let options = StepOptions { reducer, clip_norm: config.grad_clip, seed: config.seed, graph: config.graph };
    let (main, gradients) = (world.group("main")?, world.group("gradients")?);
    let step = Step::new(model, loss(config, &task, device)?, optimizer, gradients, &options)?;
    agree(config, world, &data, &step)?;

    let (rank, size) = (world.rank(), world.size());
    let (train, held_out) = (data.train.clone(), data.held_out.clone());
    let loader = Loader::new(train, plan.sampler, rank, size, config.micro_batch, device)?;
    let held_out = InOrder::new(held_out, rank, size, EVAL_ROWS, device)?;
    let devices = devices(world, device)?;
    let desk = if rank == 0 { Some(open_desk(config, world, &data, &plan, &step, &devices)?) } else { None };
    // Nobody trains before the record is open.
    world.barrier()?;
    let schedule = Schedule::new(config.schedule.shape(), config.lr, config.min_lr, plan.warmup_steps, plan.steps)?;
    let held_out_rows = data.held_out.rows();
    let done = Done::nothing(!config::is_simulated(device));
    Ok(Trainer { config, world, plan, task, schedule, loader, held_out, held_out_rows, step, main, desk, done })
}

fn model(config: &Config, data: &Data, device: Device) -> Result<Model> {
    let layers = Mlp {
        hidden: config.hidden.clone(),
        outputs: data.train.task().outputs(),
        activation: config.activation.op(),
        dropout: config.dropout,
    };
    let frozen = |name: &str| config.is_frozen(name);
    Model::new(Box::new(layers.layers()), data.train.row_shape(), DType::F32, device, config.seed, &frozen)
}

fn rule(config: &Config) -> Rule {
    let weight_decay = config.weight_decay;
    match config.optimizer {
        config::Optimizer::Adamw { beta1, beta2, eps } => {
            Rule::AdamW { constants: AdamwConstants { beta1, beta2, epsilon: eps }, weight_decay }
        }
        config::Optimizer::Sgd { momentum } => {
            Rule::Sgd { constants: SgdConstants { momentum, nesterov: false }, weight_decay }
        }
    }
}

fn loss(config: &Config, task: &Task, device: Device) -> Result<Box<dyn Loss>> {
    let Task::Classification { .. } = task else { return Ok(Box::new(Mse)) };
    let class_weights = if config.class_weights.is_empty() {
        None
    } else {
        let weights: Vec<f32> = config.class_weights.iter().map(|&weight| weight as f32).collect();
        let weights = Tensor::from_slice(&weights, &[weights.len()], Device::Cpu)?.named("class weights");
        Some(ddp_kernels::transfer::announced("the class weights", || weights.to(device))?)
    };
    Ok(Box::new(CrossEntropy { label_smoothing: config.label_smoothing, class_weights, ignore_index: None }))
}

/// Ends all ranks, with an error that names what differs, unless they run the same program on the same data.
fn agree(config: &Config, world: &World, data: &Data, step: &Step) -> Result<()> {
    let mut fields = fields(config, data, step)?;
    faults::disagree(&mut fields);
    Ok(world.handshake(&fields)?)
}

/// What the ranks compare.
fn fields(config: &Config, data: &Data, step: &Step) -> Result<Vec<Field>> {
    let params = &step.model().params;
    let program = "Start every rank with the same build of ddp-train.";
    let flags = "Start every rank with the same flags.";
    let same_data = "Give every rank the same data: compare the files on the hosts.";
    let bits = "Products of matrices may differ in their last bits between these ranks.";
    Ok(vec![
        Field::must_match("the program's version", env!("CARGO_PKG_VERSION"), program),
        Field::must_match("the configuration", config.trajectory_text(), flags),
        Field::must_match("the parameters' names and shapes", shapes(params), program),
        Field::must_match("the model's first values", format!("{:016x}", params.values_hash()?), program),
        Field::must_match("the plan of buckets", step.reducer().plan_text(), flags),
        Field::must_match("the training data", data.train.fingerprint()?, same_data),
        Field::must_match("the held-out data", data.held_out.fingerprint()?, same_data),
        Field::warn("the processor's vector instructions", format!("{:?}", simd::level()), bits),
    ])
}

/// A line for each parameter.
fn shapes(params: &Params) -> String {
    let line = |p: &crate::params::Parameter| {
        format!("{} {:?}{}\n", p.name, p.shape, if p.is_trained() { "" } else { ", not trained" })
    };
    params.list().iter().map(line).collect()
}

/// The folder of this run and the first line of its record.
fn open_desk(
    config: &Config,
    world: &World,
    data: &Data,
    plan: &Plan,
    step: &Step,
    devices: &[String],
) -> Result<Desk> {
    // Every setting as it is, those that follow from the data and the machine too.
    let config = &Config {
        warmup_steps: Some(plan.warmup_steps),
        eval_every: Some(plan.eval_every),
        threads: Some(threads::count()),
        ..config.clone()
    };
    let mut record = Record::create(config)?;
    let device = step.model().params.device();
    if device.is_accelerator() {
        tracing::info!("training on {}", config::described(device));
    }
    let versions = versions(device);
    let steps_per_epoch = plan.sampler.steps_per_epoch();
    record.start(&Start {
        config,
        versions: &versions,
        devices,
        ranks: world.size(),
        hosts: world.hosts(),
        threads: threads::count(),
        transport: world.transport(),
        overlap: step.reducer().overlaps(),
        buckets: step.reducer().buckets().len(),
        data: &data.description,
        fingerprint: &data.train.fingerprint()?,
        parameters: step.model().params.count(),
        steps: plan.steps,
        steps_per_epoch,
    })?;
    Ok(Desk { record, progress: Progress::new(config.progress, plan.steps, true) })
}

/// Names and versions of what computes: this program's, and on a GPU those of CUDA's parts, as far as they tell.
fn versions(device: Device) -> Vec<(&'static str, String)> {
    let mut versions = vec![
        ("ddp-train", env!("CARGO_PKG_VERSION").to_string()),
        ("simd", format!("{:?}", simd::level()).to_lowercase()),
    ];
    if device.is_accelerator() {
        let found = discover();
        let driver = found.driver_version.map(|(major, minor)| format!("{major}.{minor}"));
        let parts = [
            ("cuda-driver", driver),
            ("nvrtc", found.nvrtc.version.clone()),
            ("cublaslt", found.cublaslt.version.clone()),
        ];
        versions.extend(parts.into_iter().filter_map(|(name, version)| Some((name, version?))));
    }
    versions
}

/// Where each rank trains: `cpu on node7, 8 threads`, `cuda:0 NVIDIA H200 on node7, 8 threads`.
fn devices(world: &World, device: Device) -> Result<Vec<String>> {
    let mine = format!("{} on {}, {} threads", config::described(device), world.host(), threads::count());
    let all = world.all_gather_bytes(mine.as_bytes())?;
    Ok(all.into_iter().map(|text| String::from_utf8_lossy(&text).into_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ddp_comm::Group;

    /// The fields of a run with these flags, by name.
    fn fields_of(flags: &[&str]) -> Vec<(String, String)> {
        let parsed = crate::cli::parse(["ddp-train"].iter().chain(flags)).unwrap();
        let crate::cli::Command::Train(config) = parsed else { panic!("{flags:?} is a run") };
        let data = data::open(&config.data).unwrap();
        let model = model(&config, &data, Device::Cpu).unwrap();
        let optimizer = Optimizer::new(rule(&config), &model.params).unwrap();
        let sizes = BucketSizes::of_bytes((config.bucket_mb * 1e6) as usize);
        let options = StepOptions { reducer: ReducerOptions { sizes, ..Default::default() }, ..Default::default() };
        let step = Step::new(model, Box::new(Mse), optimizer, Group::alone(), &options).unwrap();
        fields(&config, &data, &step).unwrap().into_iter().map(|field| (field.name, field.value)).collect()
    }

    #[test]
    fn each_field_changes_with_what_it_stands_for() {
        let base = ["--hidden", "8", "--data", "glyphs,rows=64,held-out=16"];
        let same = fields_of(&base);
        assert_eq!(fields_of(&[&base[..], &["--out", "elsewhere", "--threads", "1"]].concat()), same);
        let changes: [(&[&str], &[&str]); 5] = [
            (&["--lr", "0.5"], &["the configuration"]),
            (&["--hidden", "9"], &["the parameters' names and shapes", "the model's first values"]),
            (&["--seed", "1"], &["the model's first values"]),
            (&["--bucket-mb", "0.01"], &["the plan of buckets"]),
            (&["--data", "glyphs,rows=64,held-out=16,seed=1"], &["the training data", "the held-out data"]),
        ];
        for (flags, names) in changes {
            let kept = base.chunks(2).filter(|pair| pair[0] != flags[0]).flatten().copied();
            let flags: Vec<&str> = kept.chain(flags.iter().copied()).collect();
            let changed = fields_of(&flags);
            for name in names {
                let value = |fields: &[(String, String)]| fields.iter().find(|field| field.0 == *name).cloned();
                assert!(value(&same).is_some() && value(&changed) != value(&same), "{flags:?}: {name}");
            }
        }
    }
}
