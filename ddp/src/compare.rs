//! `ddp-train compare A B`: at which step, and in which layer, two runs part, and what differs
//! between them. It reads only their metrics logs.
//!
//! `part.rs` finds the first difference, `differences.rs` what the runs were started with, and
//! `logged.rs` reads the logs.

mod differences;
mod logged;
mod part;

use std::fmt::Display;

use ddp_comm::World;
use serde_json::json;

use self::differences::differences;
use self::logged::Logged;
use self::part::{Parting, apart_text, common, parting};
use crate::cli::CompareFlags;
use crate::error::{Error, Result};
use crate::shown::shown;
use crate::units::{plural, relative};

/// Compares two runs, on rank 0. Runs that part are an error with exit code 1.
pub fn compare(
    flags: &CompareFlags,
    world: &World,
    say: &mut dyn FnMut(&dyn Display) -> Result<()>,
) -> Result<()> {
    if world.rank() > 0 {
        return Ok(());
    }
    let (a, b) = (Logged::read(&flags.first)?, Logged::read(&flags.second)?);
    let steps = || common(&a, &b).filter(|(a, _)| a.step > 0);
    let with_digests = steps().filter(|(a, b)| a.digests.is_some() && b.digests.is_some());
    let (steps, with_digests) = (steps().count(), with_digests.count());
    let (parting, differences) = (parting(&a, &b), differences(&a.run, &b.run));
    if steps == 0 && parting.is_none() {
        return Err(Error::Usage(format!(
            "compare {} {}: expected a step that both runs logged, got none; help: compare runs \
             that have trained, with the same --log-every",
            flags.first.display(),
            flags.second.display()
        )));
    }
    if flags.json {
        say(&json!({
            "same": parting.is_none(),
            "first": parting,
            "differences": differences,
            "steps": steps,
            "steps_with_digests": with_digests,
        }))?;
    } else {
        let mut say = |line: String| say(&shown(&line));
        say(format!(
            "A {}, B {}",
            flags.first.display(),
            flags.second.display()
        ))?;
        match &parting {
            None => say(format!(
                "the same in all {} that both logged",
                plural(steps as u64, "step")
            ))?,
            Some(parting) => {
                say(format!("they part in {parting}"))?;
                let lines = parting
                    .details()
                    .into_iter()
                    .chain(distance(&a, &b, parting));
                lines
                    .into_iter()
                    .try_for_each(|line| say(format!("  {line}")))?;
            }
        }
        if with_digests < steps {
            let without = plural((steps - with_digests) as u64, "step");
            say(format!(
                "{without} without digests, of an older version: only losses are compared"
            ))?;
        }
        match &differences[..] {
            [] => say("settings, data, devices, ranks and versions are the same".into())?,
            _ => say("what differs between them:".into())?,
        }
        for it in &differences {
            say(format!("  {}: {} in A, {} in B", it.name, it.a, it.b))?;
        }
    }
    match parting {
        None => Ok(()),
        Some(parting) => Err(Error::Parted(format!("the runs part in {parting}"))),
    }
}

/// How far apart the runs are at the last step that both logged, if they trained on.
fn distance(a: &Logged, b: &Logged, parting: &Parting) -> Option<String> {
    let (a, b) = common(a, b).last().filter(|(a, _)| a.step > parting.step)?;
    let loss = apart_text(relative(a.loss?, b.loss?));
    let (step, layers) = (a.step, a.digests.iter().zip(&b.digests));
    let layers = layers.flat_map(|(a, b)| a.weights.iter().zip(&b.weights));
    let norms = layers.filter_map(|(a, b)| Some(relative(a.2?, b.2?)));
    let norms = norms.reduce(f64::max).map_or(String::new(), |norms| {
        format!(", norms of layers {}", apart_text(norms))
    });
    Some(format!(
        "at step {step}, relative to the larger value: losses {loss}{norms}"
    ))
}
