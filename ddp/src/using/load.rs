//! Loads model and rows on all ranks: the same checkpoint, and data like those it was trained on.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use ddp_comm::{Field, World};
use ddp_kernels::ops::set_bf16_order;
use ddp_kernels::{DType, Device, threads};
use ddp_tools::metrics::check_run;

use super::choose::{choose, rebase};
use super::forward::LoadedModel;
use crate::checkpoint::{self, Chosen, MODEL_FILE, Opened, STATE_FILE, State};
use crate::config::{Config, FloatType, Precision, SettingValue};
use crate::data::{
    self, DataRequest, DataSpec, Dataset, InOrder, RowSpec, Source, TaskSpec, Trained,
};
use crate::error::{Error, Result, refuse};
use crate::flags::{RankFlags, Taken, whole};
use crate::hugging_face;
use crate::initial;
use crate::models::{DataShape, Model, ModelSpec};
use crate::ranks::WorldRanks;
use crate::shown::shown;
use crate::tables::READER;
use crate::trainer::{self, EVAL_TOKENS_MAX, data_shape};

/// The most rows that go through a model at a time.
const BATCH_MAX: usize = 1 << 32;

/// The flags of both commands.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct UsingFlags {
    /// Folder of a checkpoint, of a run (its best checkpoint by validation, else its newest), of
    /// Hugging Face, or of an adapter that names the folder of its base model
    #[arg(long, value_name = "PATH")]
    pub checkpoint: PathBuf,
    /// Of a Hugging Face folder, the tokens of a row [default: the model's context]
    #[arg(long, value_name = "N", value_parser = whole(1..=data::TOKENS_MAX as usize))]
    pub context: Option<usize>,
    /// Rows, in the form of --data in training
    #[arg(long, value_name = "SPEC", value_parser = DataSpec::read)]
    pub data: DataSpec,
    /// Rows that pass through the model at a time; of tokens, at most 16384 tokens
    #[arg(long, value_name = "ROWS", default_value = "512", value_parser = whole(1..=BATCH_MAX), allow_negative_numbers = true)]
    pub batch_size: usize,
    /// Take the rows of the training data that --val-split kept out of training
    #[arg(long, num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true")]
    #[arg(action = clap::ArgAction::Set)]
    pub held_out: bool,
    /// Its ranks.
    #[command(flatten)]
    pub ranks: RankFlags,
}

/// The requests of both commands.
pub(super) struct Given<'a> {
    pub(super) using: &'a UsingFlags,
    /// The labels, if they are not those of training.
    pub(super) labels: Option<&'a str>,
    pub(super) needs_labels: bool,
    /// Whether held-out rows come in their order in the data, not in that of training's evaluation.
    pub(super) sorted: bool,
    /// Settings of the output, which must be equal on all ranks.
    pub(super) output: String,
}

/// A model and the rows it is used on, on one rank.
#[derive(Debug)]
pub(super) struct ReadyModel {
    pub(super) chosen: Chosen,
    pub(super) forward: LoadedModel,
    /// The rows of all ranks.
    pub(super) rows: Arc<dyn Dataset>,
    /// Batch k is that of rank k mod N.
    pub(super) batches: InOrder,
}

/// Loads both. All ranks call it together.
pub(super) fn ready(asked: &Given<'_>, world: &World) -> Result<ReadyModel> {
    let using = asked.using;
    threads::set_count(using.ranks.settings.thread_count(world))?;
    let device = using.ranks.settings.find_device(world)?;
    let chosen = choose_together(using, world)?;
    let opened = &chosen.opened;
    if world.rank() == 0 {
        check_run(opened)?;
    }
    let trained = Config::of_checkpoint(opened)?;
    let rows = rows(asked, world, opened, &trained)?;
    let forward = LoadedModel::new(model(opened, trained, rows.spec(), device, world)?)?;
    world.barrier()?;
    agree(asked, world, opened, &*rows)?;
    let most = match rows.task() {
        TaskSpec::NextToken { .. } => (EVAL_TOKENS_MAX / rows.spec().positions().max(1)).max(1),
        TaskSpec::Classification(_) | TaskSpec::Regression { .. } => usize::MAX,
    };
    let all = usize::try_from(rows.rows()).unwrap_or(usize::MAX);
    let batch = using.batch_size.min(all).min(most);
    let source = Source::new(rows.clone(), [device; 2]);
    let batches = InOrder::in_turns(source, world.rank(), world.size(), batch)?;
    Ok(ReadyModel {
        chosen,
        forward,
        rows,
        batches,
    })
}

/// The checkpoint that rank 0 chooses: a run in progress may have a newer one a moment later.
fn choose_together(using: &UsingFlags, world: &World) -> Result<Chosen> {
    let (path, base) = (&using.checkpoint, using.ranks.settings.init_from.as_deref());
    if hugging_face::is_folder(path) {
        return choose(path, base, using.context);
    }
    if let Some(context) = using.context {
        let help = "leave it out: the model sees as many as in training";
        return Err(refuse("--context", context, "a Hugging Face folder", help));
    }
    let mut why = "as rank 0 chose".to_string();
    let opened = checkpoint::open_together(world, || {
        let chosen = choose(path, None, None)?;
        why = chosen.why;
        Ok(Some(chosen.opened))
    })?;
    let none = || Error::Internal("no checkpoint was chosen".into());
    let mut opened = opened.ok_or_else(none)?;
    rebase(&mut opened, base)?;
    Ok(Chosen { opened, why })
}

/// The rows, as the model needs them.
fn rows(
    asked: &Given<'_>,
    world: &World,
    opened: &Opened,
    config: &Config,
) -> Result<Arc<dyn Dataset>> {
    let state = &opened.state;
    let trained = Trained {
        task: state.task.clone(),
        row_shape: state.row_shape.clone(),
        normalization: state.normalization.clone(),
        plan: state.plan.clone(),
        columns: state.columns.clone(),
        label: state.label.clone(),
        needs_labels: asked.needs_labels,
    };
    let spec = &asked.using.data;
    let is_split = is_split(asked, config, world)?;
    let request = DataRequest {
        val_split: config.val_split.filter(|_| is_split).unwrap_or(0.0),
        stratify: is_split && config.stratify == Some(true),
        sorted: asked.sorted,
        normalize: config.normalize.filter(|_| is_split).unwrap_or_default(),
        normalizes_targets: false,
        labels: asked
            .labels
            .or(config.labels.as_deref().filter(|_| is_split))
            .map(String::from),
        seed: config.seed,
        task: state.task.kind(),
        tokenizer: opened.tokenizer_in.clone(),
        loss_on: config.loss_on,
        shortens: config.model.generates(),
        cache_dir: asked.using.ranks.settings.cache_dir.clone(),
        trained: Some(trained),
        ..DataRequest::new(asked.using.data.clone())
    };
    let data = data::prepare(&request, Some(READER), &WorldRanks(world))?;
    if asked.using.held_out {
        let now = data.train.fingerprint()?;
        if !are_same(&now, &state.fingerprint) || data.held_out.rows() == 0 {
            let [now, then] = [&now, &state.fingerprint].map(|text| text.split(", labels ").next());
            let (now, then) = (now.unwrap_or_default(), then.unwrap_or_default());
            let others = if now == then {
                ", other values or none held out"
            } else {
                ""
            };
            let expected = format!("the rows of training, {then}");
            let got = format!("{spec}, {now}{others}");
            let help = "give the data of training, with its labels, as they were";
            return Err(refuse("--held-out --data", got, &expected, help));
        }
    }
    if world.rank() == 0 {
        tracing::info!("{}", shown(&data.description));
    }
    // Only built-in and split data have held-out rows.
    let rows = match data.held_out.rows() {
        0 => data.train,
        _ => data.held_out,
    };
    check_rows(spec, &*rows, state)?;
    Ok(rows)
}

/// Whether the rows are split as in training, for `--held-out`. Warns of data by whose name the
/// model was trained.
fn is_split(asked: &Given<'_>, config: &Config, world: &World) -> Result<bool> {
    let data = &asked.using.data;
    let is_built_in = matches!(data, DataSpec::Glyphs(_) | DataSpec::Synthetic(_));
    if is_built_in || !asked.needs_labels {
        return Ok(false);
    }
    let was_split = config.val_split.is_some_and(|part| part > 0.0);
    let help = match &config.val_data {
        Some(others) => format!("give --data {others}"),
        None if was_split => "--held-out takes only the rows that --val-split kept out".into(),
        None => "train with --val-split 0.1, and add --held-out here".into(),
    };
    if asked.using.held_out && !was_split {
        let text = format!("--held-out: the model was trained without --val-split; help: {help}");
        return Err(Error::Usage(text));
    }
    if !asked.using.held_out && are_one(data, &config.data) && world.rank() == 0 {
        tracing::warn!(
            "--data {data}: the model was trained on data of this name; if they are the same, the result says little \
             about new rows; help: {help}"
        );
    }
    Ok(asked.using.held_out)
}

/// Whether both name the same file or folder.
fn are_one(one: &DataSpec, other: &DataSpec) -> bool {
    let (DataSpec::Files(a), DataSpec::Files(b)) = (one, other) else {
        return one == other;
    };
    let found = |path: &str| {
        Path::new(path)
            .canonicalize()
            .unwrap_or_else(|_| path.into())
    };
    found(&a.path) == found(&b.path)
}

/// Whether two fingerprints are of the same rows, however their targets are normalized.
fn are_same(now: &str, then: &str) -> bool {
    let [now, then] = [now, then].map(|text| text.split(", "));
    let is_kept = |part: &&str| !part.starts_with("sampled ");
    now.filter(is_kept).eq(then.filter(is_kept))
}

/// Refuses rows that do not fit the model.
fn check_rows(spec: &DataSpec, rows: &dyn Dataset, state: &State) -> Result<()> {
    let (mut got, mut expected) = (rows.row_shape(), &state.row_shape[..]);
    let image = &rows.spec().image[..];
    if RowSpec::images_differ(image, &state.image) {
        (got, expected) = (image, &state.image);
    }
    let refused = match rows.rows() {
        0 => "expected rows, got none; help: give data that have some".to_string(),
        _ if got == expected => return Ok(()),
        _ => format!(
            "expected rows of shape {expected:?}, as the model was trained on, got {got:?}; help: \
             give data like those it was trained on, or another --checkpoint"
        ),
    };
    Err(Error::Data(format!("--data {spec}: {refused}")))
}

/// The model of a checkpoint, on this rank's device, without gradients and moments.
fn model(
    opened: &Opened,
    mut config: Config,
    rows: &RowSpec,
    device: Device,
    world: &World,
) -> Result<Model> {
    let mut shape = data_shape(rows);
    if !opened.state.image.is_empty() {
        shape.image = &opened.state.image;
    } else if !shape.image.is_empty() {
        // The model was given a shape, which these images may contradict.
        let counted = config.model.parameter_count(&shape);
        counted.map_err(|error| Error::Data(error.to_string()))?;
    }
    if !device.is_accelerator() && config.dtype == Precision::Tf32 {
        if world.rank() == 0 {
            tracing::info!("the model was trained in tf32 and is used in f32: this is a CPU");
        }
        config.dtype = Precision::F32;
    }
    saved(opened, &config, &shape, device)
}

/// The model of a checkpoint, in the precision of `config`. Refuses a configuration that claims a
/// larger model than the file holds, before memory is allocated for it.
fn saved(opened: &Opened, config: &Config, shape: &DataShape<'_>, device: Device) -> Result<Model> {
    let file = opened.files.iter().find(|entry| entry.name == MODEL_FILE);
    let bytes = file.map_or(0, |entry| entry.bytes);
    let claimed = match &config.lora {
        _ if opened.is_foreign() => 0,
        Some(lora) => lora.count(&config.model, shape)?,
        None => config.model.parameter_count(shape)?,
    };
    if claimed * 4 > u128::from(bytes) {
        return Err(Error::Data(format!(
            "{}: expected a model of {claimed} parameters, as {STATE_FILE} says, got a file of \
             {bytes} bytes; help: the checkpoint is damaged: use another",
            opened.model_file().display(),
        )));
    }
    // From here on, as it was trained.
    set_bf16_order(trainer::bf16_order_of(&opened.state.versions));
    let model = empty(config, shape, device)?;
    initial::load_opened(opened, config, &[&model.params])?;
    Ok(model)
}

/// A model with initial weights.
fn empty(config: &Config, shape: &DataShape<'_>, device: Device) -> Result<Model> {
    let (options, everything) = (config.model_options(), |_: &str| true);
    let mut models = options.models(shape, &[device], &everything, 1)?;
    Ok(models.pop().expect("a model for one device"))
}

/// The precision of a model in this type.
fn precision(dtype: FloatType) -> Precision {
    match dtype {
        FloatType::F32 => Precision::F32,
        FloatType::Bf16 => Precision::Bf16,
    }
}

/// The transformer of the checkpoint that `path` means, on the CPU and without gradients, in the
/// checkpoint's precision unless another is given. `first` is what may fail before weights are
/// read.
pub(crate) fn on_cpu<T>(
    path: &Path,
    settings: &Taken,
    dtype: Option<FloatType>,
    first: impl FnOnce(&Opened) -> Result<T>,
) -> Result<(Chosen, Model, T)> {
    let chosen = choose(path, settings.init_from.as_deref(), None)?;
    let opened = &chosen.opened;
    check_run(opened)?;
    let mut config = Config::of_checkpoint(opened)?;
    config.dtype = match (dtype, config.dtype) {
        (Some(dtype), _) => precision(dtype),
        (None, Precision::Bf16) => Precision::Bf16,
        (None, Precision::F32 | Precision::Tf32) => Precision::F32,
    };
    if !config.model.generates() {
        return Err(Error::Usage(format!(
            "--checkpoint {}: expected a model of the family {}, got {}; help: for other models \
             there are eval, predict and model.safetensors",
            path.display(),
            ModelSpec::that_generate(),
            config.model.name()
        )));
    }
    let state = &opened.state;
    let shape = DataShape {
        row_shape: &state.row_shape,
        image: &state.image,
        dtype: DType::I64,
        outputs: state.task.outputs(),
        documents: false,
    };
    let first = first(opened)?;
    let model = saved(opened, &config, &shape, Device::Cpu)?;
    Ok((chosen, model, first))
}

/// Ends all ranks, with an error that names what differs, unless they use the same model and rows.
fn agree(asked: &Given<'_>, world: &World, opened: &Opened, rows: &dyn Dataset) -> Result<()> {
    let flags = "start every rank with the same flags";
    let program = "start every rank with the same build of ddp-train";
    let same_model = "give every rank the same checkpoint: compare the folders on the hosts";
    let same_data = "give every rank the same data: compare the files on the hosts";
    let (using, labels, output) = (asked.using, asked.labels, &asked.output);
    let settings = format!(
        "batch-size = {}\nheld-out = {}\nlabels = {labels:?}\n{output}\n",
        using.batch_size, using.held_out
    );
    let state = serde_json::json!(opened.state).to_string();
    Ok(world.handshake(&[
        Field::must_match("the program's version", env!("CARGO_PKG_VERSION"), program),
        Field::must_match("the flags of this command", settings, flags),
        Field::must_match("the checkpoint", state, same_model),
        Field::must_match("the data", rows.fingerprint()?, same_data),
    ])?)
}
