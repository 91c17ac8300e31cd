//! Everything before the first step: data, model, the folder of the run, and the ranks' agreement that they are at the same
//! thing.

use ddp_comm::{Field, Group, Signal, Stops, World};
use ddp_kernels::ops::{AdamwConstants, SgdConstants};
use ddp_kernels::{Device, simd, threads};

use super::desk::{Beginning, open_desk, places, settled, state, versions};
use super::model::{loss, models};
use super::{Done, Pulse, Saving, Trainer, finished, resuming};
use crate::audit::Share;
use crate::checkpoint::{self, Opened, Saver};
use crate::config::{self, Config, GraphChoice, Plan, Resident};
use crate::data::{self, Data, DataRequest, DataSpec, InOrder, Loader, Source};
use crate::error::{Error, Result};
use crate::faults::{self, Place};
use crate::models::Model;
use crate::optim::{Optimizer, Rule, Schedule};
use crate::params::Params;
use crate::reducer::plan::BucketSizes;
use crate::reducer::{self, ReducerOptions};
use crate::report::evidence::HeldOut;
use crate::step::{Part, Stage, Step, StepOptions};

/// Rows that go through the model at a time in evaluation.
const EVAL_ROWS: usize = 512;

/// All that takes steps, before there is a folder for what comes of them.
pub(super) struct Assembled {
    /// From where a run goes on.
    resumed: Option<Opened>,
    overridden: Vec<String>,
    pub(super) devices: Vec<Device>,
    pub(super) data: Data,
    pub(super) plan: Plan,
    pub(super) main: Group,
    pub(super) step: Step,
    pub(super) loader: Loader,
    pub(super) held_out: InOrder,
    /// What the data take that are kept on a GPU.
    kept_bytes: Option<usize>,
    /// Where each rank trains.
    pub(super) places: Vec<String>,
}

impl Assembled {
    /// Steps that are done.
    pub(super) fn taken(&self) -> u64 {
        self.resumed.as_ref().map_or(0, |opened| opened.state.step)
    }
}

/// What is to be done.
pub(super) enum Run {
    /// Nothing: this is the last checkpoint of a run that is resumed and finished already.
    Finished(Box<Opened>),
    Ready(Box<Assembled>),
}

pub(super) fn assemble(config: &Config, world: &World) -> Result<Run> {
    let mut resumed = resuming::find(config, world)?;
    faults::at_step(Place::Setup, 0)?;
    threads::set_count(config.threads.unwrap_or_else(|| world.default_threads()))?;
    let devices = config::find_devices(config.device, config.devices_per_rank, config.share_gpus, world)?;
    let device = devices[0];
    config.check_device(device)?;
    let data = data::prepare(&DataRequest::of(config), world)?;
    let mut plan = config.plan(&data)?;
    let mut overridden = Vec::new();
    if let Some(opened) = resumed.take_if(|opened| opened.state.step == plan.steps) {
        return Ok(Run::Finished(Box::new(opened)));
    }
    if let Some(Opened { state, .. }) = &resumed {
        resuming::check_length(state, &plan)?;
        plan = resuming::plan(config, plan, state);
        overridden = resuming::check(config, &plan, &data, device, state)?;
    }
    check_batches(config, world, &data)?;

    let main = world.group("main")?;
    let mut step = step(config, world, &data, &devices)?;
    match &resumed {
        Some(opened) => resuming::restore(config, opened, &mut step, &mut overridden)?,
        None => begin_from(config, world, &step)?,
    }
    checkpoint::wait_for_all(world)?;
    agree(config, world, &data, &step)?;

    let (rank, size) = (world.rank(), world.size());
    // Features lie where the first layers are, targets where the last are.
    let ends = [device, devices[devices.len() - 1]];
    // After the model's memory: what is kept on a GPU is what is left.
    let keeps = match config.data_on_device {
        // Ranks that share a GPU all see the same free memory, and do not know how much of it is theirs.
        Resident::Auto if world.share_gpus() => Resident::Off,
        choice => choice,
    };
    let train = Source::kept_on_device(data.train.clone(), ends, keeps)?;
    let kept_bytes = train.bytes_on_device();
    let held_out = Source::new(data.held_out.clone(), ends);
    let mut loader = Loader::from_source(train, plan.sampler, rank, size, config.micro_batch)?;
    loader.ends_before(plan.steps);
    let held_out = InOrder::from_source(held_out, rank, size, EVAL_ROWS)?;
    let places = places(world, &devices)?;
    let assembled =
        Assembled { resumed, overridden, devices, data, plan, main, step, loader, held_out, kept_bytes, places };
    Ok(Run::Ready(Box::new(assembled)))
}

/// None of a run that is resumed and finished already.
pub(super) fn prepare<'a>(config: &'a Config, world: &'a World, stops: Stops) -> Result<Option<Trainer<'a>>> {
    // Reading data may take long, and nothing is lost meanwhile.
    let ending =
        world.fail_when_asked(&stops, stopped(Signal::User1).exit_code(), |signal| stopped(signal).to_string())?;
    let held = resuming::hold(config, world)?;
    let run = assemble(config, world)?;
    drop(ending);
    // Nobody changes what is in the folder while another rank may still end the job.
    world.barrier()?;
    let assembled = match run {
        Run::Finished(opened) => return finished::complete(config, held, &opened).map(|()| None),
        Run::Ready(assembled) => *assembled,
    };
    let Assembled { resumed, overridden, devices, data, plan, main, step, loader, held_out, kept_bytes, places } =
        assembled;
    let (resumed, rank, device) = (resumed.as_ref(), world.rank(), devices[0]);
    let settled = settled(config, &plan, &step, kept_bytes.is_some());
    let mut state = state(&settled, world, &data, &plan, &places)?;
    let desk = if rank == 0 {
        let beginning = Beginning::of(config, resumed, &overridden);
        Some(open_desk(&settled, world, &data, &plan, &step, &places, (beginning, held))?)
    } else {
        None
    };
    if let (Some(bytes), 0) = (kept_bytes, rank) {
        tracing::info!("the training data, {:.1} MB, are kept on the GPU (--data-on-device)", bytes as f64 / 1e6);
    }
    let mut done = Done::from(resumed.map(|opened| &opened.state), !config::is_simulated(device));
    if let Some(Opened { state: then, .. }) = resumed {
        if resuming::is_evaluated_elsewise(state.held_out.as_ref(), then) {
            (done.best, done.last) = (None, None);
        }
        // The best stays what it was while there is nothing to compare.
        state.held_out = state.held_out.or_else(|| then.held_out.clone());
    }
    let pulse = Pulse::new(world, stops, done.steps)?;
    // Nobody trains before the record is open.
    world.barrier()?;
    let mut saver = Saver::new(world, &config.out, config.keep)?;
    if let Some(desk) = &desk {
        let (record, path) = desk.record.handle()?;
        saver.write_behind(record, path);
    }
    let saved = resumed.filter(|opened| resuming::is_in_place(opened, &config.out)).map(|opened| opened.state.step);
    let saving = Saving { saver, state, saved };
    let schedule = Schedule::new(config.schedule.shape(), config.lr, config.min_lr, plan.warmup_steps, plan.steps)?;
    let held_out_rows = data.held_out.rows();
    let shown = HeldOut::of(&data, !matches!(config.data, DataSpec::Synthetic(_)));
    let (task, share) = (data.train.task().clone(), Share::default());
    Ok(Some(Trainer {
        config,
        world,
        plan,
        task,
        schedule,
        loader,
        held_out,
        held_out_rows,
        shown,
        step,
        main,
        desk,
        done,
        pulse,
        saving,
        share,
    }))
}

/// How a run ends that is asked to stop before it has begun.
fn stopped(signal: Signal) -> Error {
    Error::Stopped(format!(
        "stopped by {signal} while the run was set up, before any step: nothing is lost; go on with the same command and --resume auto"
    ))
}

/// Refuses batches that are too small for the ranks, and warns of those that are too large for the data.
fn check_batches(config: &Config, world: &World, data: &Data) -> Result<()> {
    let (ranks, rows) = (world.size(), data.train.rows());
    let full_batch = config.batch_size.min(rows);
    if config.graph == GraphChoice::On && full_batch < ranks as u64 {
        return Err(Error::Usage(format!(
            "--graph on: expected a row for each of {ranks} ranks in every batch, got batches of {full_batch}. Give a larger --batch-size, or \
             --graph auto"
        )));
    }
    if config.batch_size > rows && world.rank() == 0 {
        let batch = config.batch_size;
        tracing::warn!("--batch-size {batch} is more than the {rows} rows of the data: every step is a whole epoch");
    }
    Ok(())
}

/// Puts the values of `--init-from` in the place of those that the seed has drawn, if it is given. Rank 0 checks the file's bytes, if it is of a
/// checkpoint; that the others have the same values is compared later.
fn begin_from(config: &Config, world: &World, step: &Step) -> Result<()> {
    let Some(path) = &config.init_from else { return Ok(()) };
    let path = if path.is_dir() { path.join(checkpoint::MODEL_FILE) } else { path.clone() };
    let parts: Vec<&Params> = step.stages().iter().map(|stage| &stage.model().params).collect();
    match world.rank() {
        0 => checkpoint::load_model(&path, &parts),
        _ => checkpoint::load_unchecked(&path, &parts),
    }
}

/// The model in training on this rank's devices, its layers split over them if they are several.
fn step(config: &Config, world: &World, data: &Data, devices: &[Device]) -> Result<Step> {
    let reducer = ReducerOptions {
        sizes: BucketSizes::of_bytes((config.bucket_mb * 1e6) as usize),
        dtype: config.reduce_dtype.dtype(),
        overlap: reducer::overlaps(config.overlap, world),
        zero: config.zero == 1,
    };
    if world.size() > 1 && devices.len() > GROUPS.len() {
        return Err(Error::Usage(format!(
            "--devices-per-rank {}: expected from 1 to {} where there are several ranks. Use fewer devices a rank",
            devices.len(),
            GROUPS.len()
        )));
    }
    let frozen = |name: &str| config.is_frozen(name);
    let train = &data.train;
    let models = models(config, train.row_shape(), train.task(), devices, &frozen, reducer.shares(world.size()))?;
    check_trained(config, &models)?;
    let part = |(index, model): (usize, Model)| -> Result<Part> {
        let device = devices[index];
        let name = GROUPS[index.min(GROUPS.len() - 1)];
        let group = if device.is_accelerator() { world.gpu_group(name, device)? } else { world.group(name)? };
        let optimizer = Optimizer::of_rank(rule(config), &model.params, &group, reducer)?;
        Ok(Part { model, optimizer, group })
    };
    let parts = models.into_iter().enumerate().map(part).collect::<Result<Vec<_>>>()?;
    let options = StepOptions { reducer, clip_norm: config.grad_clip, seed: config.seed, graph: config.graph };
    let last = devices[devices.len() - 1];
    Step::over(parts, loss(config, data.train.task(), last)?, &options)
}

/// What the ranks that have the same layers sum their gradients in, by the place of these layers among a rank's.
const GROUPS: [&str; 6] = [
    "gradients",
    "gradients of part 1",
    "gradients of part 2",
    "gradients of part 3",
    "gradients of part 4",
    "gradients of part 5",
];

/// Refuses to freeze what is not there, or all there is.
fn check_trained(config: &Config, models: &[Model]) -> Result<()> {
    // In the order in which people know them: from the input on.
    let names: Vec<&str> = models.iter().flat_map(|model| model.params.in_order()).map(|p| p.name.as_str()).collect();
    config.check_freeze(names.into_iter())?;
    if !config.freeze.is_empty() && models.iter().all(|model| model.params.trained_count() == 0) {
        let text = "expected some parameters that are not frozen. Nothing is left to train: freeze fewer";
        return Err(Error::Usage(format!("--freeze {}: {text}", config.freeze.join(","))));
    }
    Ok(())
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

/// Ends all ranks, with an error that names what differs, unless they run the same program on the same data.
fn agree(config: &Config, world: &World, data: &Data, step: &Step) -> Result<()> {
    let mut fields = fields(config, data, step)?;
    faults::disagree(&mut fields);
    Ok(world.handshake(&fields)?)
}

/// What the ranks compare.
fn fields(config: &Config, data: &Data, step: &Step) -> Result<Vec<Field>> {
    let program = "Start every rank with the same build of ddp-train.";
    let flags = "Start every rank with the same flags.";
    let same_data = "Give every rank the same data: compare the files on the hosts.";
    let bits = "Products of matrices may differ in their last bits between these ranks.";
    let device = step.model().params.device();
    let of_stages =
        |text: &dyn Fn(&Stage) -> Result<String>| -> Result<String> { step.stages().iter().map(text).collect() };
    let shapes = of_stages(&|stage| Ok(shapes(&stage.model().params)))?;
    let values = of_stages(&|stage| Ok(format!("{:016x}", stage.model().params.values_hash()?)))?;
    let buckets = of_stages(&|stage| Ok(stage.reducer().plan_text()))?;
    // The names of simulated ones have numbers.
    let name = |stage: &Stage| config::name_of(stage.device()).filter(|_| !config::is_simulated(stage.device()));
    let gpus: Vec<&str> = step.stages().iter().map(|stage| name(stage).unwrap_or("none")).collect();
    let cuda = versions(device).into_iter().filter(|_| device.is_accelerator());
    let cuda: Vec<String> = cuda.map(|(name, version)| format!("{name} {version}")).collect();
    Ok(vec![
        Field::must_match("the program's version", env!("CARGO_PKG_VERSION"), program),
        Field::must_match("the configuration", config.trajectory_text(), flags),
        Field::must_match("the parameters' names and shapes", shapes, program),
        Field::must_match("the model's first values", values, program),
        Field::must_match("the plan of buckets", buckets, flags),
        Field::must_match("the training data", data.train.fingerprint()?, same_data),
        Field::must_match("the held-out data", data.held_out.fingerprint()?, same_data),
        Field::warn("the processor's vector instructions", format!("{:?}", simd::level()), bits),
        Field::warn("the model of GPU", gpus.join(", "), bits),
        Field::warn("the versions of CUDA's parts", cuda.join(", "), bits),
    ])
}

/// A line for each parameter.
fn shapes(params: &Params) -> String {
    let line = |p: &crate::params::Parameter| {
        format!("{} {:?}{}\n", p.name, p.shape, if p.is_trained() { "" } else { ", not trained" })
    };
    params.list().iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fields of a run with these flags, by name.
    fn fields_of(flags: &[&str]) -> Vec<(String, String)> {
        let parsed = crate::cli::parse(["ddp-train"].iter().chain(flags)).unwrap();
        let crate::cli::Command::Train(config) = parsed else { panic!("{flags:?} is a run") };
        let data = data::open(&config.data).unwrap();
        let world = World::single().unwrap();
        let step = step(&config, &world, &data, &[Device::Cpu]).unwrap();
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
