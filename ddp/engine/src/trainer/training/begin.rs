//! Everything up to the first step with the ranks of a world, and what is carried to the next one.

use ddp_comm::{StopSignals, World};
use ddp_data::DataSpec;
use ddp_nn::optim::Schedule;

use super::Trainer;
use crate::checkpoint::{Saver, State};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::model::data_shape;
use crate::record::LockedRecord;
use crate::samples::HeldOut;
use crate::tasks;
use crate::trace::RunTrace;
use crate::trainer::carried::{self, Carried, Kept};
use crate::trainer::opening::{self, Settings};
use crate::trainer::prepare::prepare;
use crate::trainer::program::Program;
use crate::trainer::setup::Assembled;
use crate::trainer::stop_poll::StopPoll;
use crate::trainer::{matmuls, resume};

/// What a run shares with the ranks of a world, once its folder is open.
struct Begun {
    schedule: Schedule,
    times_products: bool,
    state: State,
    lost_checkpoint: bool,
    stop_poll: StopPoll,
    trace: RunTrace,
    saver: Saver,
}

impl Begun {
    /// Opens the record, which stays in `carried`, and what else a run needs besides `run`.
    fn new(
        options: &Config,
        program: &mut dyn Program,
        world: &World,
        stops: StopSignals,
        run: &mut Assembled,
        locked: Option<LockedRecord>,
        carried: &mut Carried,
    ) -> Result<Begun> {
        let settings = Settings::of(options, run, world);
        let mut state = opening::state(options, &settings, run, world)?;
        let times_products = matmuls::are_timed(options.products, run.devices[0], world);
        if !times_products {
            state.products = None;
        }
        if world.rank() == 0 && carried.record.is_none() {
            let record = match run.continues {
                true => opening::take_over(options, program, &settings, run, world)?,
                false => opening::open_record(options, program, &settings, run, world, locked)?,
            };
            carried.record = Some(record);
        }
        if let (Some(bytes), 0, false) = (run.kept_bytes, world.rank(), run.continues) {
            let mb = bytes as f64 / 1e6;
            tracing::info!("the training data, {mb:.1} MB, are kept on the GPU");
        }
        let kept = &mut run.kept;
        let mut lost_checkpoint = false;
        match &run.resumed {
            _ if run.continues => {
                state.products = kept.products.clone();
                let record = carried.record.as_mut();
                lost_checkpoint = kept.complete_record(record, &options.out, world)?;
                kept.totals.restart_clock();
            }
            Some(opened) => {
                let before = &opened.state;
                if resume::has_other_held_out_rows(state.held_out.as_ref(), before) {
                    (kept.totals.best, kept.totals.last) = (None, None);
                }
                kept.held_out = before.held_out.clone();
                kept.totals.begin();
            }
            None => kept.totals.begin(),
        }
        // The best stays what it was while there is nothing to compare.
        state.held_out = state.held_out.or(kept.held_out.clone());
        let (taken, plan) = (kept.totals.steps, &run.plan);
        let stop_poll = StopPoll::new(world, stops, taken)?;
        let traced = options.trace.filter(|_| !run.continues);
        let trace = RunTrace::new(traced, [taken + 1, plan.steps], &run.devices, world);
        // No rank trains before the record is open.
        world.barrier()?;
        let mut saver = Saver::new(world, &options.out, options.keep)?;
        if let Some(record) = &mut carried.record {
            let (file, path) = record.handle()?;
            saver.write_behind(file, path);
            if world.generation() > 1 {
                carried::say_change(record, world, taken, carried.noticed)?;
            }
        }
        carried.noticed = None;
        if let Some(tokenizer) = &run.data.tokenizer {
            saver.write_tokenizer(tokenizer.clone());
        }
        Ok(Begun {
            schedule: options.learning_rate(plan)?,
            times_products,
            state,
            lost_checkpoint,
            stop_poll,
            trace,
            saver,
        })
    }
}

impl<'a> Trainer<'a> {
    /// Everything up to the first step. None for a resumed run that is already finished. After an
    /// error, what this rank has is `carried`.
    pub(in crate::trainer) fn new(
        options: &'a Config,
        program: &'a mut dyn Program,
        world: &'a World,
        stops: StopSignals,
        carried: &mut Carried,
    ) -> Result<Option<Trainer<'a>>> {
        let Some((mut run, locked)) = prepare(options, program, world, &stops, carried)? else {
            return Ok(None);
        };
        let began = Begun::new(options, program, world, stops, &mut run, locked, carried);
        let begun = match began {
            Ok(begun) => begun,
            Err(error) => {
                carried.kept = Some(run.kept);
                return Err(error);
            }
        };
        let Assembled {
            data,
            plan,
            main,
            loader,
            held_out,
            sample,
            kept,
            ..
        } = run;
        let shape = data_shape(data.train.spec());
        Ok(Some(Trainer {
            options,
            program,
            world,
            schedule: begun.schedule,
            plan,
            task: tasks::of(data.train.task()),
            times_products: begun.times_products,
            loader,
            held_out,
            held_out_rows: data.held_out.rows(),
            sample,
            samples: HeldOut::of(&data, !matches!(options.data, DataSpec::Synthetic(_))),
            step: kept.step,
            main,
            saver: begun.saver,
            state: begun.state,
            saved: kept.saved,
            lost_checkpoint: begun.lost_checkpoint,
            record: carried.record.take(),
            totals: kept.totals,
            stop_poll: begun.stop_poll,
            trace: begun.trace,
            workload: kept.workload,
            line: kept.line,
            flop_of_a_row: options.model.flop_of_a_row(&shape),
            product_tflops: None,
        }))
    }

    /// Ends what it shares with the ranks of this world, because of `why`. The rest is `carried` to
    /// the next one.
    pub(super) fn leave(self, why: Option<&Error>, carried: &mut Carried) {
        let why = why.and_then(|error| match error {
            Error::Comm(error) => Some(error),
            _ => None,
        });
        let Trainer {
            saver,
            loader,
            world,
            step,
            totals,
            workload,
            saved,
            state,
            line,
            record,
            ..
        } = self;
        let mut kept = Kept {
            step,
            totals,
            workload,
            saved,
            held_out: state.held_out,
            line,
            products: state.products,
        };
        world.end_generation(why);
        if let Err(error) = kept.halt(loader.sampler()) {
            world.leave(&error, carried::EXIT_LOST);
        }
        // Both wait for threads.
        drop((saver, loader));
        carried.record = record;
        carried.kept = Some(kept);
    }
}
