//! Everything up to the first step with the ranks of a world.

use ddp_comm::{StopSignals, World};
use ddp_data::DataSpec;

use super::Trainer;
use crate::checkpoint::Saver;
use crate::config::Config;
use crate::error::Result;
use crate::model::data_shape;
use crate::record::Record;
use crate::samples::HeldOut;
use crate::tasks;
use crate::trace::RunTrace;
use crate::trainer::carried::{self, Carried, Kept};
use crate::trainer::opening::Opening;
use crate::trainer::prepare::prepare;
use crate::trainer::program::Program;
use crate::trainer::setup::Assembled;
use crate::trainer::stop_poll::StopPoll;
use crate::trainer::totals::Clock;
use crate::trainer::{matmuls, resume};

impl<'a> Trainer<'a> {
    /// Everything up to the first step. None for a resumed run that is already finished.
    pub(in crate::trainer) fn new(
        options: &'a Config,
        program: &'a mut dyn Program,
        world: &'a World,
        stops: StopSignals,
        carried: &'a mut Carried,
    ) -> Result<Option<Trainer<'a>>> {
        let Some((run, locked)) = prepare(options, program, world, &stops, carried)? else {
            return Ok(None);
        };
        let times_products = matmuls::are_timed(options.products, run.devices[0], world);
        let (kept, record, noticed) = carried.parts();
        let opening = Opening::new(options, &run, kept, world);
        let mut state = opening.state()?;
        if world.rank() == 0 && record.is_none() {
            *record = Some(opening.record(program, locked)?);
        }
        if let (Some(bytes), 0, false) = (run.kept_bytes, world.rank(), run.continues) {
            let mb = bytes as f64 / 1e6;
            tracing::info!("the training data, {mb:.1} MB, are kept on the GPU");
        }
        let held_out = state.held_out.take();
        let lost_checkpoint = match run.continues {
            true => kept.complete_record(record.as_mut(), &options.out, world)?,
            false => {
                begin(&run, kept, held_out.as_ref(), times_products);
                false
            }
        };
        kept.clock.restart();
        // The best stays what it was while there is nothing to compare.
        let totals = &mut kept.totals;
        totals.held_out = held_out.or(totals.held_out.take());
        let taken = totals.steps;
        let stop_poll = StopPoll::new(world, stops, taken)?;
        let traced = options.trace.filter(|_| !run.continues);
        let trace = RunTrace::new(traced, [taken + 1, run.plan.steps], &run.devices, world);
        // No rank trains before the record is open.
        world.barrier()?;
        let behind = record.as_ref().map(Record::handle).transpose()?;
        let tokenizer = run.data.tokenizer.clone();
        let saver = Saver::of_run(world, &options.out, options.keep, behind, tokenizer)?;
        if let Some(record) = record
            && world.generation() > 1
        {
            carried::say_change(record, world, taken, *noticed)?;
        }
        *noticed = None;
        let shape = data_shape(run.data.train.spec());
        Ok(Some(Trainer {
            options,
            program,
            world,
            task: tasks::of(run.data.train.task()),
            schedule: options.learning_rate(&run.plan)?,
            times_products,
            samples: HeldOut::of(&run.data, !matches!(options.data, DataSpec::Synthetic(_))),
            saver,
            state,
            lost_checkpoint,
            stop_poll,
            trace,
            flop_of_a_row: options.model.flop_of_a_row(&shape),
            product_tflops: None,
            run,
            kept,
            record,
            noticed,
        }))
    }
}

/// Begins a new run, or one that resumes a checkpoint.
fn begin(run: &Assembled, kept: &mut Kept, held_out: Option<&String>, times_products: bool) {
    kept.clock = Clock::new(kept.clock.has_rates);
    let Some(before) = run.resumed.as_ref().map(|opened| &opened.state) else {
        return;
    };
    let totals = &mut kept.totals;
    if resume::has_other_held_out_rows(held_out, before) {
        (totals.best, totals.last) = (None, None);
    }
    totals.held_out = before.held_out.clone();
    // Another number of ranks makes products of other shapes.
    if times_products && before.world.ranks == run.places.len() {
        totals.products = before.products.clone();
    }
}
