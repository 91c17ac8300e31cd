//! What a run needs of memory, from its model on a device that does not exist
//! (`Device::planned`): arenas and moments are counted, and a step's forward, loss and backward run
//! without computing anything, so that they take the buffers for activations which a real step
//! takes.

use std::collections::BTreeSet;

use ddp_comm::World;
use ddp_data::sampler::{self, Shards};
use ddp_data::{Data, RowSpec, TensorSpec};
use ddp_kernels::{DType, Device, Tensor, matmuls};
use ddp_nn::models::Model;
use ddp_nn::optim::Optimizer;
use ddp_nn::params::{ParamId, Params};
use ddp_nn::{Loss, Pass, PassOptions, Saved, Scratch};

use super::division;
use crate::config::Config;
use crate::digest::DeviceDigests;
use crate::error::Result;
use crate::model::data_shape;
use crate::reducer::ReducerOptions;
use crate::tasks;

/// What a step of GPT-2 124M took of an H200 beyond its tensors and pools
/// (tests/evidence/h200.md): a context, the code of kernels and libraries, graphs. cuBLASLt's
/// workspace is a tensor.
const CONTEXT_BYTES: u64 = 561_000_000;
/// What a communicator of one rank took of an H200 (NCCL 2.28), and 10 MiB for each connection and
/// channel (NCCL's issue 1685): for a ring with two neighbours on 16 channels.
const NCCL_BYTES: u64 = 604_000_000 + 2 * 16 * (10 << 20);
/// A driver's pool of memory grows by pieces of this size (H100, H200).
const PIECE_BYTES: u64 = 32 << 20;

/// Bytes of the model of a rank, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelBytes {
    /// Parameters, f32: with ZeRO and bf16 a part of them.
    pub values: u64,
    /// Their rounded copies, which layers read.
    pub copies: u64,
    /// Frozen weights to which adapters are added.
    pub base: u64,
    /// Values and gradients of tied parameters on later devices of a split model.
    pub tied: u64,
    /// Gradients.
    pub gradients: u64,
    /// The optimizer's moments.
    pub moments: u64,
    /// Those that it keeps for another rank, and copies of what a lost rank may spoil.
    pub kept_for_others: u64,
    /// Partial sums of gradients over shards.
    pub partial_sums: u64,
    /// All parameters in host memory, for a checkpoint.
    pub model: u64,
}

impl ModelBytes {
    /// Everything, with the copy that is being saved.
    pub fn total(&self) -> u64 {
        self.on_device() + self.saved()
    }

    /// All but that copy.
    pub fn on_device(&self) -> u64 {
        let kept = self.gradients + self.partial_sums + self.moments + self.kept_for_others;
        self.values + self.copies + self.base + self.tied + kept
    }

    /// The copy that is being saved, in host memory.
    pub fn saved(&self) -> u64 {
        self.model + self.moments
    }

    /// Adds those of a stage.
    pub(super) fn add(&mut self, params: &Params, optimizer: &Optimizer, partial_sums: usize) {
        self.values += params.values().bytes() as u64;
        self.base += params.base().bytes() as u64;
        self.gradients += params.gradient_bytes() as u64;
        self.partial_sums += partial_sums as u64;
        self.model += (params.arena_count() * DType::F32.bytes()) as u64;
        if params.dtype() != params.master_dtype() {
            self.copies += params.read_arena().bytes() as u64;
        }
        for tied in params.tied_copies() {
            let gradient = params.gradient(tied.id).map_or(0, Tensor::bytes);
            self.tied += (params.value(tied.id).bytes() + gradient) as u64;
        }
        let moments = optimizer.moments();
        let owned = moments.map(|(_, moment)| moment.bytes()).sum::<usize>();
        self.moments += owned as u64;
        self.kept_for_others += (optimizer.moment_bytes() - owned) as u64;
    }
}

/// Bytes of a rank's GPU besides those of its model. With several GPUs of a rank: of all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepBytes {
    /// Of one micro-batch, or of held-out rows.
    pub activations: u64,
    /// Of two batches.
    pub batches: u64,
    /// Matmuls' workspace, digests, norms, gradients in the type that travels.
    pub workspace: u64,
    /// CUDA's own.
    pub context: u64,
    /// NCCL's buffers.
    pub nccl: u64,
    /// A bucket of divided masters, which ranks gather to save them.
    pub gathered: u64,
    /// The rest of the last piece that the driver's pool takes.
    pub rest_of_piece: u64,
}

impl StepBytes {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.of_tensors() + self.context + self.nccl + self.rest_of_piece
    }

    fn of_tensors(&self) -> u64 {
        self.activations + self.batches + self.workspace + self.gathered
    }
}

/// What a rank needs: the most of any.
pub(super) fn plan(
    options: &Config,
    data: &Data,
    world: &World,
    devices: &[Device],
) -> Result<(ModelBytes, StepBytes)> {
    let spec = data.train.spec();
    let mut reducer = division::step_options(options, world).reducer;
    reducer.sizes = Some(reducer.sizes_on(devices[0]));
    let models = models(options, spec, world, devices, reducer)?;
    let (ranks, groups) = (world.size(), options.groups()?);
    let (mut bytes, mut step) = (ModelBytes::default(), StepBytes::default());
    for model in &models {
        let params = &model.params;
        let [owned, kept] = &reducer.ranges(params, reducer.slicing(0, [0, ranks]));
        let optimizer = Optimizer::of_groups(options.rule(), &groups, params, [owned, kept])?;
        let (all, device) = (params.trained_part().len(), devices[0]);
        let longest = reducer.sizes_on(device).elements.min(all);
        let sums = |rank| reducer.partial_sum_bytes((rank, ranks, device), all, longest);
        bytes.add(params, &optimizer, (0..ranks).map(sums).max().unwrap_or(0));
        if kept.is_empty() {
            continue;
        }
        let spoiled: usize = optimizer.prepared_moments().map(Tensor::bytes).sum();
        let values: usize = owned.iter().chain(kept).map(|range| 4 * range.len()).sum();
        let values = if device.is_accelerator() { values } else { 0 };
        bytes.kept_for_others += (spoiled + values) as u64;
    }
    let shards = Shards::of_rank(options.same_bits.unwrap_or(ranks), 0, ranks);
    let [of_shard, micro] = division::rows_of_shard(options, data, shards.of);
    let loss = tasks::of(data.train.task());
    let settled = loss.with_weights(&options.loss_options(), data, options.data.name())?;
    let loss = loss.loss(&settled, devices[0].planned())?;
    let batch = options.batch_rows().min(data.train.rows());
    let of_ranks = (0..ranks).map(|rank| {
        let shards = Shards::of_rank(shards.of, rank, ranks);
        let held_out = (data.held_out.rows(), division::eval_rows(spec));
        [(batch, micro), held_out].map(|(rows, most)| lengths(&shards, rows, most))
    });
    for lengths in of_ranks.collect::<BTreeSet<_>>() {
        let of_rank = activations(&models, &*loss, spec, &lengths)? as u64;
        step.activations = step.activations.max(of_rank);
    }
    if !devices[0].is_accelerator() {
        return Ok((bytes, step));
    }
    let of_row = spec.inputs.bytes() + spec.targets.bytes();
    step.batches = 2 * (of_shard * shards.count() * of_row) as u64;
    let longest = reducer.sizes_on(devices[0]).elements;
    for model in &models {
        let (params, part) = (&model.params, model.params.trained_part());
        let travels = match (reducer.dtype, params.windows().is_some()) {
            (DType::F32, _) => 0,
            (dtype, false) => dtype.bytes() * part.len(),
            (dtype, true) => dtype.bytes() * longest.min(part.len()),
        };
        if params.is_divided() {
            step.gathered += (DType::F32.bytes() * longest.min(part.len())) as u64;
        }
        // A sum of squares for each quantum.
        let squares = DType::F64.bytes() * params.chunks()?.quanta();
        let measured = DeviceDigests::new(params)?.quanta.bytes() + squares;
        step.workspace += (matmuls::WORKSPACE_BYTES + travels + measured) as u64;
    }
    step.context = CONTEXT_BYTES * devices.len() as u64;
    step.nccl = if ranks > 1 {
        NCCL_BYTES * devices.len() as u64
    } else {
        0
    };
    let tensors = bytes.on_device() + step.of_tensors();
    step.rest_of_piece = tensors.next_multiple_of(PIECE_BYTES) - tensors;
    Ok((bytes, step))
}

/// The parts of the model, without memory.
fn models(
    options: &Config,
    spec: &RowSpec,
    world: &World,
    devices: &[Device],
    reducer: ReducerOptions,
) -> Result<Vec<Model>> {
    let frozen = |name: &str| options.is_frozen(name);
    let sharing = division::sharing(reducer, world, 0);
    let devices: Vec<Device> = devices.iter().map(|it| it.planned()).collect();
    options
        .model_options()
        .models(&data_shape(spec), &devices, &frozen, sharing)
}

/// The distinct numbers of rows of a pass, of `rows` in these shards, in order of first use. Order
/// matters: a longer pass after a shorter one allocates more.
fn lengths(shards: &Shards, rows: u64, most: usize) -> Vec<usize> {
    let mut lengths = Vec::new();
    for shard in shards.numbers() {
        let own = sampler::share(&(0..rows), shard, shards.of);
        let count = (own.end - own.start) as usize;
        for length in [count.min(most), count % most.max(1)] {
            if length > 0 && !lengths.contains(&length) {
                lengths.push(length);
            }
        }
    }
    lengths
}

/// Bytes of activations of a step with micro-batches of these lengths, and of an evaluation with
/// those.
fn activations(
    models: &[Model],
    loss: &dyn Loss,
    spec: &RowSpec,
    [steps, evaluations]: &[Vec<usize>; 2],
) -> Result<usize> {
    let device = models[0].params.values().device();
    let part = |_: &Model| (Scratch::new(device), Saved::default());
    let mut parts: Vec<_> = models.iter().map(part).collect();
    let place = Tensor::empty(&[2], DType::I64, device)?;
    let mut listener = |_: ParamId| Ok(());
    let of_steps = steps.iter().map(|&rows| (rows, true));
    let of_evaluations = evaluations.iter().map(|&rows| (rows, false));
    for (rows, training) in of_steps.chain(of_evaluations) {
        let empty = |spec: &TensorSpec| {
            let shape = [&[rows], &spec.shape[..]].concat();
            Tensor::empty(&shape, spec.dtype, device)
        };
        let (mut output, targets) = (empty(&spec.inputs)?, empty(&spec.targets)?);
        let options = PassOptions {
            training,
            accumulate: false,
            last: true,
            seed: 0,
            position: &place,
        };
        for (index, (model, (scratch, saved))) in models.iter().zip(&mut parts).enumerate() {
            if index > 0 {
                // It comes from another device.
                output = scratch.take(output.shape(), output.dtype())?;
            }
            let pass = Pass::new(&model.params, scratch, saved, options, &mut listener);
            output = model.forward(&mut pass.leaving_head(loss.is_by_position()), &output)?;
        }
        let (model, (scratch, saved)) = models.iter().zip(&mut parts).last().expect("a part");
        let stats = Tensor::empty(&[4], model.params.master_dtype(), device)?;
        let pass = Pass::resume(&model.params, scratch, saved, options, &mut listener);
        let (mut pass, of) = (
            pass.leaving_head(loss.is_by_position()),
            [&output, &targets, &stats],
        );
        if !training {
            model.losses(&mut pass, loss, of)?;
            continue;
        }
        let mut gradient = model.loss_gradient(&mut pass, loss, of)?;
        for (index, (model, (scratch, saved))) in models.iter().zip(&mut parts).enumerate().rev() {
            if index + 1 < models.len() {
                gradient = scratch.take(gradient.shape(), gradient.dtype())?;
            }
            let trains = models[..index]
                .iter()
                .any(|it| !it.params.trained_part().is_empty());
            let pass = Pass::resume(&model.params, scratch, saved, options, &mut listener);
            let mut pass = pass.leaving_head(loss.is_by_position());
            if !trains {
                model.backward(&mut pass, &gradient)?;
                break;
            }
            match model.backward_to_input(&mut pass, &gradient)? {
                Some(next) => gradient = next,
                None => break,
            }
        }
    }
    Ok(parts.iter().map(|(scratch, _)| scratch.bytes()).sum())
}
