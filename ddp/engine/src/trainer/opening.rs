//! The folder of a run before its first step: settings, the first line of the metrics log or the
//! line that it resumes, and what every checkpoint says.

use ddp_comm::World;
use ddp_data::Dataset;
use ddp_data::setting::{STRATIFY, VAL_SPLIT};
use ddp_kernels::files as disk;
use ddp_kernels::{matmuls, threads};
use ddp_nn::params::{Parameter, Params};

use super::program::RunProgram;
use super::run::Run;
use super::setup::AgreedRun;
use super::{agree, bf16, resume};
use crate::checkpoint::{self, Opened, Position, ScheduleState, State, WorldState};
use crate::config::{Config, GraphChoice, Resident, Resume};
use crate::devices;
use crate::digest::{self, LayerDigest};
use crate::elastic::run::RankRun;
use crate::error::Result;
use crate::metrics_log::{
    self, Contents, LockedLog, LogEvent, MetricsLog, ResumeEvent, StartWorld,
};
use crate::setting::{BATCH_SIZE, BATCH_TOKENS, EVAL_EVERY, SAME_BITS, STOP_AFTER};
use crate::shown::shown;
use crate::step::Step;
use crate::tasks;

impl Run<'_> {
    /// Opens the metrics log on rank 0, unless it is open: lines after the steps taken are cut, and
    /// those of ranks that the run does not know. All ranks call it together.
    pub(super) fn open_log(
        &mut self,
        run: &AgreedRun,
        state: &State,
        locked: Option<LockedLog>,
        world: &World,
        program: &mut dyn RunProgram,
    ) -> Result<()> {
        let initial_weights = initial_weights(self.built(), world)?;
        if world.rank() > 0 || self.metrics_log.is_some() {
            return Ok(());
        }
        let (out, taken) = (&run.settled.out, self.built().totals.steps);
        let is_lost =
            || run.settled.resume == Resume::Auto && metrics_log::check_free(out).is_err();
        let is_of_job = || world.generation() > 1 && metrics_log::is_of_job(out);
        let there = match &run.resumed {
            // Another rank wrote it.
            _ if run.continues => Some(LockedLog::of_job(out)?),
            // A metrics log that another process began meanwhile is refused.
            Some(_) => Some(locked.map_or_else(|| LockedLog::empty(out), Ok)?),
            // Nothing was saved: the run starts over. Its ranks' own metrics log is cut.
            None if locked.is_some() && is_of_job() => locked,
            None if is_lost() => {
                // That of an earlier job is put aside, unless another process has begun it since
                // this one looked.
                if locked.is_some() {
                    checkpoint::put_aside(&out.join(metrics_log::EVENTS_FILE))?;
                }
                drop(locked);
                Some(LockedLog::empty(out)?)
            }
            None => {
                drop(locked);
                None
            }
        };
        if run.continues || run.resumed.is_some() {
            // Before the metrics log is cut, so that it always reaches as far as the newest
            // checkpoint.
            checkpoint::put_aside_after(out, taken)?;
        }
        // Another run may have other ranks, devices or steps: it makes its own choices.
        let file = run.given().to_toml();
        let (mut log, has_start) = match there {
            Some(there) => MetricsLog::resume(out, &file, there, taken, self.logged)?,
            None => (MetricsLog::create(out, &file)?, false),
        };
        if !run.continues {
            run.write_tokenizer()?;
            tracing::info!("{}", shown(&run.data.description));
            log_places(&run.places, world);
            run.log_plan(&self.built().step);
            run.warn_of_evaluations();
        }
        if !has_start {
            let step = &self.built().step;
            run.write_start(&mut log, state, step, world, initial_weights)?;
        }
        program.begin(out, taken, run.plan.steps)?;
        if let Some(opened) = &run.resumed {
            run.write_resume(&mut log, opened, state)?;
        }
        self.metrics_log = Some(log);
        Ok(())
    }
}

/// Digests of the weights before the first step, on rank 0. All ranks call it together: they may
/// have divided the weights.
fn initial_weights(rank_run: &RankRun, world: &World) -> Result<Vec<LayerDigest>> {
    let stages = rank_run.step.stages().iter();
    let parts = stages.map(|stage| (&stage.model().params, stage.reducer().group()));
    let is_wanted = world.rank() == 0 || parts.clone().any(|it| it.0.is_divided());
    if is_wanted && rank_run.totals.steps == 0 {
        return digest::of_weights(parts);
    }
    Ok(Vec::new())
}

impl AgreedRun {
    /// The settings as they were given: how a run was started is no property of the run.
    fn given(&self) -> Config {
        let mut given = Config {
            resume: Resume::Never,
            override_: false,
            ..self.settled.with_defaults()
        };
        if let (Some(_), Some(base)) = (&given.lora, &mut given.init_from) {
            // Whoever uses the adapters reads it again, from any folder.
            *base = std::path::absolute(&base).unwrap_or(base.clone());
        }
        given
    }

    /// What every checkpoint of this run says, besides how far it is.
    pub(super) fn state(&self, rank_run: &RankRun, world: &World) -> Result<State> {
        let captured = rank_run.step.graphs().is_some();
        // With the run's choices in place of defaults.
        let chosen = Config {
            graph: [GraphChoice::Off, GraphChoice::On][usize::from(captured)],
            data_on_device: [Resident::Off, Resident::On][usize::from(self.kept_bytes.is_some())],
            warmup_steps: Some(self.plan.warmup_steps),
            eval_every: Some(self.plan.eval_every),
            checkpoint_every: Some(self.plan.checkpoint_every),
            threads: Some(threads::count()),
            ..self.given()
        };
        let program = devices::program(world);
        let mut versions = devices::versions(self.devices[0]);
        versions.insert("program".into(), program.clone());
        bf16::note(self.bf16_order, &mut versions);
        let (data, plan, ranks) = (&self.data, &self.plan, world.size());
        let options = &self.settled;
        let held_out = match data.held_out.rows() {
            0 => None,
            _ => Some(data.held_out.fingerprint()?),
        };
        let loss = tasks::of(data.train.task()).with_weights(
            &options.loss_options(),
            data,
            options.data.name(),
        )?;
        Ok(State {
            // The saver and the trainer fill in zeros and None.
            format: 0,
            program,
            versions,
            step: 0,
            samples: 0,
            config: chosen.to_json(),
            position: Position {
                seed: options.seed,
                epoch: 0,
                in_epoch: 0,
                rows: plan.sampler.rows(),
                batch: options.batch_rows(),
                drop_last: options.drop_last,
            },
            schedule: ScheduleState {
                steps: plan.steps,
                warmup_steps: plan.warmup_steps,
                learning_rate: 0.0,
            },
            optimizer_since: 0,
            world: WorldState {
                ranks,
                optimizer_parts: if options.zero > 0 { ranks } else { 1 },
                devices: self.places.clone(),
            },
            task: data.train.task().clone(),
            row_shape: data.train.row_shape().to_vec(),
            image: data.train.spec().image.clone(),
            normalization: data.normalization.clone(),
            target_normalization: data.target_normalization.clone(),
            plan: data.plan.clone(),
            columns: data.columns.clone(),
            label: data.label.clone(),
            class_weights: loss.class_weights.numbers(),
            own_loss: self.own_loss.clone(),
            base: rank_run.base.clone(),
            fingerprint: data.train.fingerprint()?,
            held_out,
            best: None,
            last: None,
            progress: checkpoint::Plateau::default(),
        })
    }

    fn write_tokenizer(&self) -> Result<()> {
        let Some(tokenizer) = &self.data.tokenizer else {
            return Ok(());
        };
        let mut files = tokenizer.files();
        files.try_for_each(|(name, bytes)| {
            Ok(disk::replace_with(&self.settled.out.join(name), bytes)?)
        })
    }

    fn write_resume(&self, log: &mut MetricsLog, opened: &Opened, state: &State) -> Result<()> {
        let (step, folder) = (opened.state.step, &opened.folder);
        let from = folder.strip_prefix(&self.settled.out).unwrap_or(folder);
        let overridden = &self.overridden;
        tracing::info!("resuming after step {step}, from {}", folder.display());
        let (then, now) = (opened.state.world.ranks, self.places.len());
        if then != now && self.settled.same_bits.is_none() {
            tracing::warn!(
                "the number of ranks changes from {then} to {now}: sums have another order, so \
                 the last bits differ; help: resume with {then}, or begin runs with {SAME_BITS}"
            );
        }
        if !overridden.is_empty() {
            let overridden = overridden.join(", ");
            tracing::warn!("what is computed changes from here on: {overridden}");
        }
        let batches = [BATCH_SIZE, BATCH_TOKENS].map(|setting| format!("{setting} "));
        let is_batch = |change: &String| batches.iter().any(|batch| change.starts_with(batch));
        if overridden.iter().any(is_batch) {
            tracing::warn!(
                "epochs are counted as if all steps had had this batch: rows of the current one are repeated or left out"
            );
        }
        let here = (&self.places[..], &state.versions);
        resume::warn_of_other_bits(&self.settled, here, &opened.state);
        log.write(&LogEvent::Resume(ResumeEvent {
            time_unix_s: metrics_log::unix_s(),
            step,
            from: from.to_string_lossy().into(),
            ranks: Some(self.places.len() as u64),
            devices: self.places.clone(),
            versions: state.versions.clone(),
            blake3: self.blake3()?,
            overridden: overridden.clone(),
            config: state.config.clone(),
            steps: Some(self.plan.steps),
            job: ddp_comm::job_number(),
        }))
    }

    fn blake3(&self) -> Result<Contents> {
        let data = &self.data;
        Ok(Contents {
            data_blake3: data.train.blake3()?,
            held_out_blake3: data.held_out.blake3()?,
            program_blake3: agree::program_blake3()?,
        })
    }

    /// The first line of the metrics log.
    fn write_start(
        &self,
        log: &mut MetricsLog,
        state: &State,
        step: &Step,
        world: &World,
        initial_weights: Vec<LayerDigest>,
    ) -> Result<()> {
        let (data, plan) = (&self.data, &self.plan);
        let stages = step.stages();
        // Reducers of all stages communicate in the same way.
        let reducer = stages[0].reducer();
        let buckets = stages.iter().map(|stage| stage.reducer().buckets().len());
        let transport = reducer.group().transport();
        let bits_may_differ = match transport {
            "nccl" => ddp_comm::settings_of_free_order(),
            _ => Vec::new(),
        };
        log.write(&LogEvent::Start(metrics_log::StartEvent {
            time_unix_s: metrics_log::unix_s(),
            config: state.config.clone(),
            changed: Some(self.changed.clone()),
            versions: state.versions.clone(),
            devices: self.places.clone(),
            world: StartWorld {
                ranks: world.size() as u64,
                hosts: world.hosts() as u64,
                threads: threads::count() as u64,
                transport: transport.into(),
                overlap: reducer.overlaps(),
                buckets: buckets.sum::<usize>() as u64,
                bits_may_differ: bits_may_differ.into_iter().map(String::from).collect(),
            },
            data: data.description.clone(),
            fingerprint: state.fingerprint.clone(),
            held_out_fingerprint: data.held_out.fingerprint()?,
            blake3: self.blake3()?,
            parameters: Some(step.params().map(|params| params.count() as u64).sum()),
            steps: Some(plan.steps),
            steps_per_epoch: plan.sampler.steps_per_epoch(),
            out_of_fold: self.out_of_fold.clone().map(Box::new),
            initial_weights,
            job: ddp_comm::job_number(),
        }))
    }

    /// The size of the model, how long it is trained, and where results go.
    fn log_plan(&self, step: &Step) {
        let (options, params) = (&self.settled, || step.params());
        let parameters: usize = params().map(Params::count).sum();
        let trained: usize = params().map(Params::trained_count).sum();
        let trained = (trained < parameters).then(|| format!(", of which {trained} are trained"));
        let (steps, out) = (self.plan.steps, options.out.display().to_string());
        tracing::info!(
            "a model with {parameters} parameters{}, for {steps} steps of {} rows; results in {}",
            trained.unwrap_or_default(),
            options.batch_rows(),
            shown(&out)
        );
        if let Some([name, other]) = options.rule().hidden_and_rest() {
            let trained = params().flat_map(Params::list);
            let trained = trained.filter(|parameter| parameter.is_trained());
            let (hidden, others): (Vec<_>, Vec<_>) = trained.partition(|p| !p.matrices.is_empty());
            let matrices: usize = hidden.iter().map(|p| p.matrices.len()).sum();
            let values = |of: &[&Parameter]| -> usize { of.iter().map(|p| p.range.len()).sum() };
            tracing::info!(
                "{name} updates {matrices} matrices with {} parameters, {other} the other {}",
                values(&hidden),
                values(&others)
            );
        }
    }

    /// Warns of classes without held-out rows, and of too few evaluations to end early.
    fn warn_of_evaluations(&self) {
        let (data, plan) = (&self.data, &self.plan);
        let rows = |of: &dyn Dataset| of.rows_of_classes().unwrap_or_default();
        let (trained, held_out) = (rows(&*data.train), rows(&*data.held_out));
        let pairs = trained.iter().zip(&held_out);
        let missing = pairs.filter(|(trained, held_out)| **trained > 0 && **held_out == 0);
        let (missing, all) = (missing.count(), trained.len());
        if missing > 0 && data.held_out.rows() > 0 {
            tracing::warn!(
                "the held-out rows lack {missing} of {all} classes, so no figure measures them; help: hold out more \
                 rows, or give {STRATIFY} true with {VAL_SPLIT}"
            );
        }
        let evaluations = plan.steps.div_ceil(plan.eval_every.max(1));
        let few = |most: &u64| evaluations < most + 2 && self.resumed.is_none();
        if let Some(most) = self.settled.patience().filter(few) {
            tracing::warn!(
                "{STOP_AFTER} {most}: expected at least {} evaluations, got {evaluations}: the run cannot end early; \
                 help: give a smaller {EVAL_EVERY}, or train for longer",
                most + 2
            );
        }
    }
}

fn log_places(places: &[String], world: &World) {
    if let Some(count) = matmuls::multiprocessors() {
        tracing::info!("matmuls plan for {count} multiprocessors (DDP_MATMUL_MULTIPROCESSORS)");
    }
    match places {
        [place] => tracing::info!("training on {place}"),
        [first, rest @ ..] if rest.iter().all(|place| place == first) => {
            tracing::info!("{} ranks train, each on {first}", places.len());
        }
        _ => {
            for (rank, place) in places.iter().enumerate() {
                tracing::info!("rank {} trains on {place}", world.job_rank(rank));
            }
        }
    }
}
