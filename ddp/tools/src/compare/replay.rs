//! `compare --replay`: repeats the steps around the first difference of two runs, and finds the
//! first tensor that differs.
//!
//! Both runs are repeated side by side, each on a thread, from the newest checkpoint that both have
//! before they differ, or from the seed. Each shows what it computes, tensor after tensor. A run of
//! several ranks without `--same-bits` is repeated with a shard for each rank.

use std::collections::BTreeSet;
use std::panic::resume_unwind;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use ddp_comm::World;
use ddp_kernels::setting::SettingName;
use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Device};
use ddp_nn::pass::{Observer, observed};

use super::logged::{Logged, LoggedStep};
use super::part::{Parting, parting};
use crate::checkpoint;
use crate::config::{Config, GraphChoice, Resume};
use crate::error::{Error, Result};
use crate::metrics::check_run;
use crate::setting::SAME_BITS;
use crate::shown::significant;
use crate::trainer::{Logs, Replay, RunProgram};
use crate::units::plural;

/// The program around a run with these settings.
pub type MakeProgram = for<'a> fn(&'a Config) -> Box<dyn RunProgram + 'a>;

/// The most steps that are repeated.
const STEPS_MAX: u64 = 1000;

const REPLAY: SettingName<'static> = SettingName("replay");

/// What a step computes of micro-batches.
const OF_BATCH: [&str; 4] = [": targets", ": forward", ": gradient", ": backward"];

/// A tensor that a step computed.
#[derive(Debug, PartialEq)]
struct Seen {
    /// What computed it, in which step.
    name: String,
    shape: Vec<usize>,
    /// Of its elements, as f64.
    bits: Vec<u64>,
}

/// Repeats both runs up to their first difference. Returns what was found, as lines.
pub(super) fn replay(
    runs: [&Logged; 2],
    parting_of_logs: &Parting,
    make: MakeProgram,
    program: &str,
) -> Result<Vec<String>> {
    let last = parting_of_logs.step.max(1);
    let is_intact = |run: &Logged, step: u64| {
        let opened = checkpoint::open(&checkpoint::folder(&run.folder, step));
        opened.and_then(|opened| check_run(&opened)).is_ok()
    };
    let saved: BTreeSet<u64> = runs[0].run.checkpoints.iter().copied().collect();
    let before = saved
        .range(..=parting_of_logs.same_until.unwrap_or(0))
        .rev();
    let mut intact = before.filter(|step| runs.iter().all(|run| is_intact(run, **step)));
    let from = intact.next().copied().unwrap_or(0);
    if last - from > STEPS_MAX {
        return Err(Error::Usage(format!(
            "compare {REPLAY}: expected a checkpoint of both runs at most {STEPS_MAX} steps before \
             step {last}, got {from}; help: train both again with {} and {}",
            SettingName("checkpoint-every"),
            SettingName("keep")
        )));
    }
    let shards = |run: &Logged| {
        let config = config_of(run, [from, last], program)?;
        Ok::<_, Error>(config.same_bits.unwrap_or(1))
    };
    let (a, b) = (shards(runs[0])?, shards(runs[1])?);
    if a != b {
        return Err(Error::Usage(format!(
            "compare {REPLAY}: expected runs that cut batches into as many parts, got {a} in A and \
             {b} in B; help: sums of other parts have other roundings: train both on as many ranks, \
             or with the same {SAME_BITS}"
        )));
    }
    let mut found = "all outputs have the same bits".to_string();
    let ended = thread::scope(|scope| {
        let spawn = |index: usize| {
            let (sender, receiver) = sync_channel(1);
            let run = runs[index];
            let body = move || repeated(run, [from, last], make, program, &sender);
            (receiver, scope.spawn(body))
        };
        let ((seen_a, a), (seen_b, b)) = (spawn(0), spawn(1));
        let mut batch = String::new();
        for (a, b) in seen_a.into_iter().zip(seen_b) {
            if a != b {
                let is_of_batch = OF_BATCH.iter().any(|what| a.name.contains(what));
                let batch = if is_of_batch { &*batch } else { "" };
                let (name, how) = (&a.name, difference(&a, &b));
                found = format!("the first difference is in {name}{batch}: {how}");
                break;
            }
            if let Some((_, of)) = a.name.split_once("inputs of ") {
                batch = format!(" ({of})");
            }
        }
        [a, b].map(|run| run.join().unwrap_or_else(|panic| resume_unwind(panic)))
    });
    let mut lines = vec![format!("replayed after step {from}: {found}")];
    for ((name, run), steps) in ["A", "B"].into_iter().zip(runs).zip(ended) {
        let steps = steps?.into_iter().map(|line| {
            let step: LoggedStep = serde_json::from_str(&line).expect("it is as a log has it");
            (step.step, step)
        });
        if let Some(parting) = parting(&run.steps, &steps.collect()) {
            lines.push(format!(
                "the replay of {name} does not match its log in {parting}: the data or the machine \
                 has changed, more than 2 ranks without {SAME_BITS} added in another order, or the \
                 run's machine had a fault"
            ));
        }
    }
    Ok(lines)
}

/// How two tensors differ.
fn difference(a: &Seen, b: &Seen) -> String {
    if a.name != b.name {
        return format!("B computes {} there", b.name);
    }
    if a.shape != b.shape {
        return format!("its shape is {:?} in A, {:?} in B", a.shape, b.shape);
    }
    let rows = a.shape.first().map_or(1, |rows| *rows);
    let columns = a.bits.len() / rows;
    let differing = (0..a.bits.len()).filter(|&at| a.bits[at] != b.bits[at]);
    let differing: Vec<usize> = differing.collect();
    let of_row = differing.chunk_by(|at, next| at / columns == next / columns);
    let [in_a, in_b] = [a, b].map(|of| significant(f64::from_bits(of.bits[differing[0]]), 9));
    format!(
        "{} of {rows} rows, from row {} on: {in_a} in A, {in_b} in B",
        of_row.count(),
        differing[0] / columns
    )
}

/// The settings with which the steps of a run from one to another are repeated.
fn config_of(run: &Logged, [from, last]: [u64; 2], program: &str) -> Result<Config> {
    let (out, run) = (&run.folder, &run.run);
    let refused = |expected: String, help: &str| {
        let out = out.display();
        let text = format!("compare {REPLAY} {out}: expected {expected}; help: {help}");
        Err(Error::Usage(text))
    };
    let resumes = || run.resumes.iter().filter(|it| it.step < last);
    let begun = run.start.versions.get("program");
    let mut programs = resumes().filter_map(|it| it.versions.get("program"));
    if begun.is_none_or(|of| of != program) || programs.any(|of| of != program) {
        return refused(
            format!("a run of this program, which is {program}, got one of another"),
            "replay it with the program that trained it",
        );
    }
    let config = Config::from_checkpoint(&run.start.config).map_err(Error::Usage)?;
    let overridden = resumes().find(|it| !it.overridden.is_empty());
    let overridden = overridden.map(|it| (it.step, it.overridden.join(", ")));
    let since = run.ranks.partition_point(|(step, _)| *step <= from);
    let mut ranks = run.ranks[since.saturating_sub(1)..].iter();
    let first = ranks.next().map_or(1, |(_, ranks)| *ranks);
    let others = ranks.find(|it| it.0 < last && it.1 != first && config.same_bits.is_none());
    let others = others.map(|(step, ranks)| (*step, plural(*ranks, "rank")));
    if let Some((step, change)) = overridden.or(others) {
        return refused(
            format!("a run that did not change before step {last}, got {change} after step {step}"),
            &format!("compare it without {REPLAY}; with {SAME_BITS} it may have had other ranks"),
        );
    }
    let rows = config.batch_rows();
    if config.same_bits.is_none() && first > rows {
        return refused(
            format!("a run with a row of each batch for each rank, got {rows} for {first} ranks"),
            &format!("compare it without {REPLAY}"),
        );
    }
    // A run from the seed wants a folder without one.
    let (resume, own) = match from {
        0 => (Resume::Never, out.join("replay")),
        _ => (Resume::From(checkpoint::folder(out, from)), out.clone()),
    };
    // A run that was resumed may have become longer.
    let (steps, epochs) = match run.start.steps {
        Some(steps) if steps < last => (Some(last), None),
        _ => (config.steps, config.epochs),
    };
    Ok(Config {
        steps,
        epochs,
        same_bits: config.same_bits.or((first > 1).then_some(first as usize)),
        graph: GraphChoice::Off,
        override_: true,
        resume,
        out: own,
        ..config
    })
}

/// Repeats the steps of a run from one to another, and sends what it computes for as long as there
/// is a receiver. Returns what a log says of each step.
fn repeated(
    run: &Logged,
    steps: [u64; 2],
    make: MakeProgram,
    program: &str,
    sender: &SyncSender<Seen>,
) -> Result<Vec<String>> {
    let config = config_of(run, steps, program)?;
    let observer = |step: u64| -> Observer {
        let sender = sender.clone();
        Box::new(move |name, tensor| {
            let host = announced("a replay", || tensor.to(Device::Cpu))?;
            let values = host.to_dtype(DType::F64)?.to_vec::<f64>()?;
            // After a difference was found there is no receiver.
            _ = sender.send(Seen {
                name: format!("step {step}: {name}"),
                shape: tensor.shape().to_vec(),
                bits: values.into_iter().map(f64::to_bits).collect(),
            });
            Ok(())
        })
    };
    let world = World::single()?;
    let program = make(&config);
    let mut replay = Replay::new(&config, &*program, &world, None)?;
    let mut lines = Vec::new();
    while replay.taken() < steps[1] {
        let observer = observer(replay.taken() + 1);
        lines.extend(observed(observer, || replay.take(Logs::Step))?);
    }
    Ok(lines)
}
