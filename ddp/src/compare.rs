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
use serde_json::{Value, json};

use self::differences::{Difference, differences};
use self::logged::Logged;
use self::part::{Parting, common, parting};
use crate::cli::CompareFlags;
use crate::error::{Error, Result};
use crate::shown::{shown, significant};
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
    let (parting, differences) = (parting(&a, &b), differences(&a.run, &b.run));
    let (parting, steps) = (parting.as_ref(), common(&a, &b).count());
    if steps == 0 && parting.is_none() {
        return Err(Error::Usage(format!(
            "compare {} {}: expected a step that both runs logged, got none; help: compare runs \
             that have trained, with the same --log-every",
            flags.first.display(),
            flags.second.display()
        )));
    }
    let with_digests = common(&a, &b).filter(|(a, b)| a.digests.is_some() && b.digests.is_some());
    let with_digests = with_digests.count();
    if flags.json {
        let apart: Vec<Value> = apart(&a, &b, parting).map(apart_json).collect();
        say(&json!({
            "same": parting.is_none(),
            "first": parting,
            "differences": differences,
            "steps": steps,
            "steps_with_digests": with_digests,
            "apart": apart,
        }))?;
    } else {
        for (letter, folder) in [("A", &flags.first), ("B", &flags.second)] {
            say(&format!(
                "{letter}  {}",
                shown(&folder.display().to_string())
            ))?;
        }
        for line in text(&a, &b, parting, &differences) {
            say(&shown(&line))?;
        }
        if with_digests < steps {
            let without = plural((steps - with_digests) as u64, "step");
            say(&format!(
                "{without} without digests, of an older version: only the loss is compared"
            ))?;
        }
    }
    match parting {
        None => Ok(()),
        Some(parting) => Err(Error::Parted(format!("the runs part in {parting}"))),
    }
}

/// The comparison for people.
fn text(
    a: &Logged,
    b: &Logged,
    parting: Option<&Parting>,
    differences: &[Difference],
) -> Vec<String> {
    let mut lines = Vec::new();
    let ends = [a, b].map(|run| run.steps.keys().next_back().copied().unwrap_or(0));
    match parting {
        None => {
            let steps = plural(common(a, b).count() as u64, "step");
            lines.push(format!(
                "the same in all {steps} that both logged, up to {}",
                ends[0].min(ends[1])
            ));
        }
        Some(parting) => {
            lines.push(format!("they part in {parting}"));
            lines.extend(
                parting
                    .details()
                    .into_iter()
                    .map(|line| format!("  {line}")),
            );
            lines.extend(distance(a, b, parting));
        }
    }
    if ends[0] != ends[1] {
        lines.push(format!(
            "A was logged up to step {}, B up to step {}",
            ends[0], ends[1]
        ));
    }
    lines.push(match differences {
        [] => "the logs name the same settings, data, devices, ranks and versions for both".into(),
        _ => "what differs between them:".into(),
    });
    lines.extend(
        differences
            .iter()
            .map(|it| format!("  {}: {} in A, {} in B", it.name, it.a, it.b)),
    );
    lines
}

/// How far apart the runs are at the last step that both logged, if they trained on.
fn distance(a: &Logged, b: &Logged, parting: &Parting) -> Option<String> {
    let (step, [loss, weights]) = apart(a, b, Some(parting)).last()?;
    let far = |value: f64| match value {
        0.0 => "equal".to_string(),
        value => format!("{} apart", significant(value, 2)),
    };
    let text = format!(
        "  at step {step}, relative to the larger value: losses {}, norms of layers {}",
        far(loss),
        far(weights)
    );
    (step > parting.step).then_some(text)
}

/// How far apart the runs are at each step from where they part: the loss, and the layer whose norm
/// differs most, both relative to the larger value.
fn apart<'a>(
    a: &'a Logged,
    b: &'a Logged,
    parting: Option<&Parting>,
) -> impl Iterator<Item = (u64, [f64; 2])> + use<'a> {
    let from = parting.map_or(u64::MAX, |parting| parting.step);
    common(a, b)
        .filter(move |(a, _)| a.step >= from)
        .map(|(a, b)| {
            let loss = a.loss.zip(b.loss).map_or(f64::NAN, |(a, b)| relative(a, b));
            let layers = a.digests.iter().zip(&b.digests);
            let layers = layers.flat_map(|(a, b)| a.weights.iter().zip(&b.weights));
            let norms = layers.filter_map(|(a, b)| Some(relative(a.2?, b.2?)));
            (a.step, [loss, norms.reduce(f64::max).unwrap_or(f64::NAN)])
        })
}

fn apart_json((step, [loss, weights]): (u64, [f64; 2])) -> Value {
    json!({ "step": step, "loss": loss, "weights": weights })
}
