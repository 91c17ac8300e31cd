//! Makes the parts of a run: data, model and loaders.

use std::path::Path;
use std::sync::Arc;

use ddp_comm::World;
use ddp_data::sampler::Shards;
use ddp_data::tables::Tables;
use ddp_data::text::{TOKENIZER_FILE, Vocabulary};
use ddp_data::{Data, InOrder, LeftOpen, Loader, Resident, RowSpec, Source, TaskSpec};
use ddp_kernels::Device;
use ddp_nn::Loss;
use ddp_nn::models::Model;
use ddp_nn::optim::{Optimizer, check_groups};
use ddp_nn::params::{Parameter, Params};

use super::division::{eval_rows, rows_of_shard, sharing, step_options};
use super::linear_start;
use super::plan::Plan;
use super::program::RunProgram;
use crate::checkpoint::Opened;
use crate::config::Config;
use crate::elastic::run::RankRun;
use crate::error::{Error, Result};
use crate::exchange;
use crate::initial;
use crate::lora;
use crate::model::data_shape;
use crate::ranks::WorldRanks;
use crate::reducer;
use crate::setting::{
    BATCH_SIZE, DATA, DEVICES_PER_RANK, FREEZE, GRAPH, INIT_FROM, MIN_RANKS, OPTIMIZER, SAME_BITS,
    ZERO,
};
use crate::step::{
    GRADIENT_GROUPS, GraphChoice, StageSpec, Step, gradient_group, several_in_a_shard,
};
use crate::tasks;

/// The data of the program itself, or those that the settings name. All ranks call it together.
pub(super) fn data(
    options: &Config,
    program: &dyn RunProgram,
    world: &World,
    resumed: Option<&Opened>,
) -> Result<Data> {
    program
        .data()
        .map_or_else(|| open(options, program.tables(), world, resumed), Ok)
}

/// Opens the data that the settings name. All ranks call it together.
pub(super) fn open(
    options: &Config,
    tables: Option<&'static dyn Tables>,
    world: &World,
    resumed: Option<&Opened>,
) -> Result<Data> {
    let mut request = options.data_request();
    // A run that began with targets as they are continues with them.
    request.normalizes_targets =
        resumed.is_none_or(|opened| opened.state.target_normalization.is_some());
    if let Some(opened) = resumed {
        request.left_open = LeftOpen::default();
        let targets = opened.state.target_normalization.as_ref();
        request.clips_targets &= targets.is_none_or(|targets| !targets.range.is_empty());
    }
    Ok(ddp_data::prepare(&request, tables, &WorldRanks(world))?)
}

/// The loaders of training and of held-out rows, and the bytes of training data in GPU memory.
pub(super) fn loaders(
    options: &Config,
    world: &World,
    data: &Data,
    plan: &Plan,
    devices: &[Device],
) -> Result<(Loader, InOrder, Option<usize>)> {
    let (rank, size) = (world.rank(), world.size());
    let shards = Shards::of_rank(options.same_bits.unwrap_or(size), rank, size);
    // Features are on the device of the first layers, targets on that of the last.
    let ends = [devices[0], devices[devices.len() - 1]];
    let keeps = match options.data_on_device {
        // Ranks that share a GPU see the same free memory and cannot tell how much is theirs.
        Resident::Auto if world.share_gpus() => Resident::Off,
        // The plan has no data.
        Resident::Auto if options.memory.is_some() => Resident::Off,
        choice => choice,
    };
    let train = Source::kept_on_device(data.train.clone(), ends, keeps)?;
    let kept_bytes = train.bytes_on_device();
    let mut loader = Loader::in_shards(train, plan.sampler, shards, options.micro_batch)?;
    loader.ends_before(plan.steps);
    let held_out = Source::new(data.held_out.clone(), ends);
    let held_out = InOrder::in_shards(held_out, shards, eval_rows(data.held_out.spec()))?;
    Ok((loader, held_out, kept_bytes))
}

/// Refuses batches that are too small for the ranks, and warns of those that are too large for the
/// data.
pub(super) fn check_batches(options: &Config, world: &World, data: &Data) -> Result<()> {
    let (ranks, rows) = (world.size(), data.train.rows());
    let batch = options.batch_rows();
    let full_batch = batch.min(rows);
    if options.graph == GraphChoice::On && full_batch < ranks as u64 {
        return Err(Error::Usage(format!(
            "{GRAPH} on: expected a row for each of {ranks} ranks in every batch, got batches of \
             {full_batch}; help: give a larger {BATCH_SIZE}, or {GRAPH} auto"
        )));
    }
    if let Some(shards) = options.same_bits {
        reducer::check_ranks(shards, ranks)?;
        if full_batch < shards as u64 {
            return Err(Error::Usage(format!(
                "{SAME_BITS} {shards}: expected at most {full_batch}, a row of every full batch \
                 for each shard; help: give {SAME_BITS} {full_batch} or less, or a larger \
                 {BATCH_SIZE} (of at most the rows of the data)"
            )));
        }
    }
    let is_chosen = data.of_table.is_some() && !options.plain;
    if batch > rows && world.rank() == 0 && !is_chosen {
        tracing::warn!(
            "{BATCH_SIZE} {batch} is more than the {rows} rows of the data: every step is a whole \
             epoch"
        );
    }
    if let (0, Some(text)) = (world.rank(), options.ignored()) {
        tracing::warn!("{text}");
    }
    Ok(())
}

/// The parts of the model.
pub(super) fn params(step: &Step) -> Vec<&Params> {
    step.params().collect()
}

/// Loads the values of `init_from`, if it is given, or of the adapters beside them; else those of
/// `linear_start`. The handshake compares the values of all ranks.
pub(super) fn load_initial(
    options: &Config,
    world: &World,
    run: &RankRun,
    data: &Data,
) -> Result<()> {
    let Some(path) = &options.init_from else {
        if options.linear_start.unwrap_or_default() == 0.0 {
            return Ok(());
        }
        let start = exchange::broadcast(world, 0, || linear_start::of(options, &*data.train))?;
        return start.map_or(Ok(()), |start| {
            linear_start::set(options, &start, &params(&run.step))
        });
    };
    check_tokenizer(path, data)?;
    let (parts, rank) = (params(&run.step), world.rank());
    match &options.lora {
        Some(lora) => {
            let base = (path.as_path(), run.base.as_deref());
            lora::load(lora, &options.model, &parts, base, rank)
        }
        None => initial::load(path, &parts, rank).map(drop),
    }
}

/// Refuses initial weights of a model that takes the tokens of another tokenizer.
fn check_tokenizer(path: &Path, data: &Data) -> Result<()> {
    let file = path.join(TOKENIZER_FILE);
    let (Some(own), true) = (&data.tokenizer, file.exists()) else {
        return Ok(());
    };
    if Vocabulary::read(&file)?.hash == own.hash {
        return Ok(());
    }
    Err(Error::Data(format!(
        "{INIT_FROM} {}: expected a model with the tokenizer of {DATA}, got another; help: \
         tokenize the texts with {}",
        path.display(),
        file.display()
    )))
}

/// The model in training on this rank's devices: its layers are split over several.
pub(super) fn step(
    options: &Config,
    world: &World,
    data: &Data,
    devices: &[Device],
    own_loss: Option<Arc<dyn Loss>>,
) -> Result<Step> {
    let step_options = step_options(options, world);
    let reducer = step_options.reducer;
    if world.is_elastic() && options.zero == 2 {
        return Err(Error::Usage(format!(
            "{ZERO} 2: expected 0 or 1 with {MIN_RANKS}: the sums of a slice are on one rank alone, \
             and would be lost with it; help: use {ZERO} 1, or leave {MIN_RANKS} out"
        )));
    }
    if let (2, Some(shards), true) = (options.zero, options.same_bits, world.size() > 1) {
        let [of_shard, micro] = rows_of_shard(options, data, shards);
        if of_shard > micro {
            return Err(several_in_a_shard(of_shard.div_ceil(micro)));
        }
    }
    if world.size() > 1 && devices.len() > GRADIENT_GROUPS.len() {
        return Err(Error::Usage(format!(
            "{DEVICES_PER_RANK} {}: expected from 1 to {} where there are several ranks; help: \
             use fewer devices per rank",
            devices.len(),
            GRADIENT_GROUPS.len()
        )));
    }
    let (task, shape) = (data.train.task(), data_shape(data.train.spec()));
    let frozen = |name: &str| options.is_frozen(name);
    let sharing = sharing(reducer, world, world.rank());
    let (rule, groups) = (options.rule(), options.groups()?);
    let models = options
        .model_options()
        .models(&shape, devices, &frozen, sharing)?;
    check_trained(options, &models)?;
    let outputs = models
        .last()
        .map_or(Vec::new(), |model| model.output_shape.clone());
    let part = |(index, model): (usize, Model)| -> Result<StageSpec> {
        let group = gradient_group(world, index, devices[index])?;
        let slicing = reducer.slicing(0, [group.rank(), group.size()]);
        let [owned, kept] = &reducer.ranges(&model.params, slicing);
        let optimizer = Optimizer::of_groups(rule, &groups, &model.params, [owned, kept])?;
        Ok(StageSpec {
            model,
            optimizer,
            group,
        })
    };
    let parts = models.into_iter().enumerate().map(part);
    let last = devices[devices.len() - 1];
    let task = tasks::of(task);
    let mut ranges = Vec::new();
    let loss = match own_loss {
        Some(loss) => loss,
        None => {
            check_outputs(data.train.spec(), &outputs)?;
            let settled = task.with_weights(&options.loss_options(), data, options.data.name())?;
            ranges = data.target_ranges();
            task.loss(&settled, last)?.into()
        }
    };
    // The handshake compares the ranks, after values are loaded.
    let mut step = Step::of_agreeing(parts.collect::<Result<Vec<_>>>()?, loss, &step_options)?;
    step.clip_outputs(ranges);
    Ok(step)
}

/// Refuses a model that has other outputs than the targets ask for. With more outputs than classes
/// it would train: the loss takes any number that is large enough.
fn check_outputs(rows: &RowSpec, of_row: &[usize]) -> Result<()> {
    let targets = &rows.targets.shape;
    let expected = match &rows.task {
        TaskSpec::Classification(classes) => [&targets[..], &[classes.count()]].concat(),
        TaskSpec::Regression { .. } => targets.clone(),
        TaskSpec::NextToken { .. } => return Ok(()),
    };
    if of_row == expected {
        return Ok(());
    }
    Err(Error::Usage(format!(
        "model: expected outputs of shape {expected:?} for a row, {}, got {of_row:?}; help: give \
         the last layer `outputs` of the DataShape that the model is made for",
        rows.task
    )))
}

/// Refuses to freeze unknown parameters, or all of them.
fn check_trained(options: &Config, models: &[Model]) -> Result<()> {
    let in_order = models.iter().flat_map(|model| model.params.in_order());
    let names: Vec<&str> = in_order.map(|parameter| parameter.name.as_str()).collect();
    options.check_freeze(&names)?;
    if let Some(lora) = &options.lora {
        let parts: Vec<&Params> = models.iter().map(|model| &model.params).collect();
        lora.check(&options.model, &parts)?;
    }
    check_groups(&options.groups()?, models.iter().map(|model| &model.params))?;
    let parameters = || models.iter().flat_map(|model| model.params.list());
    let is_hidden =
        |parameter: &Parameter| parameter.is_trained() && !parameter.matrices.is_empty();
    if let Some([name, other]) = options.rule().hidden_and_rest()
        && !parameters().any(is_hidden)
    {
        return Err(Error::Usage(format!(
            "{OPTIMIZER} {name}: expected a model with hidden layers that are trained, got none; \
             help: use {other}"
        )));
    }
    let trained: usize = models
        .iter()
        .map(|model| model.params.trained_count())
        .sum();
    let freeze = options.freeze.clone().unwrap_or_default();
    if !freeze.is_empty() && trained == 0 {
        return Err(Error::Usage(format!(
            "{FREEZE} {}: expected some parameters that are not frozen, got none; help: freeze \
             fewer",
            freeze.join(",")
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use ddp_data::TensorSpec;
    use ddp_kernels::DType;

    use super::*;

    #[test]
    fn a_model_has_the_outputs_that_the_targets_ask_for() {
        let classes = TaskSpec::named_classes(["a", "b", "c"].map(String::from).to_vec());
        let rows = |targets: &[usize], task: &TaskSpec| RowSpec {
            inputs: TensorSpec::new(DType::F32, &[4]),
            targets: TensorSpec::new(DType::I64, targets),
            image: Vec::new(),
            task: task.clone(),
        };
        let numbers = TaskSpec::Regression { outputs: 3 };
        let cases: [(&[usize], &TaskSpec, &[usize]); 3] = [
            (&[], &classes, &[3]),
            (&[5], &classes, &[5, 3]),
            (&[3], &numbers, &[3]),
        ];
        for (targets, task, right) in cases {
            let rows = rows(targets, task);
            check_outputs(&rows, right).unwrap();
            for wrong in [&[4][..], &[5, 6, 3], &[5, 1], &[]] {
                let text = check_outputs(&rows, wrong).unwrap_err().to_string();
                let expected =
                    format!("expected outputs of shape {right:?} for a row, {task}, got");
                assert!(text.contains(&expected), "{text}");
            }
        }
    }
}
