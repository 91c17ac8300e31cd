//! `ddp-train compare A B`: the first step and layer in which two runs differ, and what else is
//! different. It reads their metrics logs; with `--replay` it repeats steps of both.
//!
//! `logged.rs` reads the logs, `part.rs` finds the first difference, and `replay.rs` the operation.

mod logged;
mod part;
mod replay;

use std::path::Path;

use ddp_comm::World;
use ddp_kernels::setting::SettingName;
use serde::Serialize;
use serde_json::{Value, json};

pub(crate) use self::logged::{Logged, LoggedStep};
use self::logged::{Steps, differences};
pub(crate) use self::part::{Parting, parting_in};
use self::part::{apart_text, common, parting};
pub use self::replay::MakeProgram;
use crate::error::{Error, Result};
use crate::output::Say;
use crate::shown::shown;
use crate::trainer::program_version;
use crate::units::{plural, relative};

/// Compares two runs. Runs that differ are an error with exit code 1. With `replay`, the steps
/// around the first difference are repeated.
pub fn compare(
    [first, second]: [&Path; 2],
    replay: Option<MakeProgram>,
    as_json: bool,
    world: &World,
    say: Say<'_>,
) -> Result<()> {
    let (a, b) = (Logged::read(first)?, Logged::read(second)?);
    let steps = || common(&a.steps, &b.steps).filter(|(a, _)| a.step > 0);
    let with_digests = steps().filter(|(a, b)| a.digests.is_some() && b.digests.is_some());
    let (steps, with_digests) = (steps().count(), with_digests.count());
    let (parting, differences) = (parting(&a.steps, &b.steps), differences(&a.run, &b.run));
    if steps == 0 && parting.is_none() {
        return Err(Error::Usage(format!(
            "compare {} {}: expected a step that both runs logged, got none; help: compare runs \
             that have trained, with the same {}",
            first.display(),
            second.display(),
            SettingName("log-every")
        )));
    }
    let apart = parting.as_ref();
    let apart = apart.and_then(|parting| Apart::since(parting, &a.steps, &b.steps));
    let replayed = parting.as_ref().zip(replay);
    let replayed = replayed
        .map(|(parting, make)| replay::replay([&a, &b], parting, make, &program_version(world)));
    // The comparison comes first, also where a replay is refused.
    let (replayed, refusal) = match replayed.transpose() {
        Ok(replayed) => (replayed, None),
        Err(error) => (None, Some(error)),
    };
    let only_in = |of: &Steps, other: &Steps| {
        let own = of.keys().filter(|step| **step > 0);
        own.filter(|step| !other.contains_key(step)).count()
    };
    let [only_a, only_b] = [only_in(&a.steps, &b.steps), only_in(&b.steps, &a.steps)];
    if as_json {
        let difference = |[name, a, b]: &[String; 3]| json!({ "name": name, "a": a, "b": b });
        say(&json!({
            "same": parting.is_none(),
            "first": parting,
            "apart": apart,
            "differences": differences.iter().map(difference).collect::<Value>(),
            "steps": steps,
            "steps_with_digests": with_digests,
            "steps_only_in_a": only_a,
            "steps_only_in_b": only_b,
            "replay": replayed,
        }))?;
    } else {
        let [a_name, b_name] = [first, second].map(|folder| folder.display());
        let mut lines = vec![format!("A {a_name}, B {b_name}")];
        let all = plural(steps as u64, "step");
        lines.push(match &parting {
            Some(parting) => format!("they first differ in {parting}"),
            None => format!("the same in all {all} that both logged"),
        });
        if let Some(parting) = &parting {
            let details = parting.details().into_iter();
            let details = details.chain(apart.map(|apart| apart.text()));
            let details = details.chain(replayed.unwrap_or_default());
            lines.extend(details.map(|line| format!("  {line}")));
        }
        for (count, run) in [(only_a, 'A'), (only_b, 'B')] {
            if count > 0 {
                let steps = plural(count as u64, "step");
                lines.push(format!("{steps} that only {run} logged: not compared"));
            }
        }
        if with_digests < steps {
            let without = plural((steps - with_digests) as u64, "step");
            let text = "without digests, of an older version: only losses are compared";
            lines.push(format!("{without} {text}"));
        }
        lines.push(if differences.is_empty() {
            "settings, data, devices, ranks and versions are the same".into()
        } else {
            "what differs between them:".into()
        });
        let difference = |[name, a, b]: &[String; 3]| format!("  {name}: {a} in A, {b} in B");
        lines.extend(differences.iter().map(difference));
        lines.iter().try_for_each(|line| say(&shown(line)))?;
    }
    if let Some(refusal) = refusal {
        return Err(refusal);
    }
    parting.map_or(Ok(()), |parting| {
        Err(Error::Parted(format!("the runs first differ in {parting}")))
    })
}

/// How far apart the runs are at the last step that both logged, relative to the larger value.
#[derive(Serialize)]
struct Apart {
    step: u64,
    loss: f64,
    /// The most that the norms of a layer are apart; None without digests.
    norms: Option<f64>,
}

impl Apart {
    /// Of runs that trained on after they first differed.
    fn since(parting: &Parting, a: &Steps, b: &Steps) -> Option<Apart> {
        let (a, b) = common(a, b).last().filter(|(a, _)| a.step > parting.step)?;
        let of_a = a.digests.iter().flat_map(|of| &of.weights);
        let of_b = |name: &str| b.digests.as_ref()?.weights.iter().find(|b| b.0 == name);
        let norms = of_a.filter_map(|a| Some(relative(a.2?, of_b(&a.0)?.2?)));
        Some(Apart {
            step: a.step,
            loss: relative(a.loss?, b.loss?),
            norms: norms.reduce(f64::max),
        })
    }

    fn text(&self) -> String {
        let norms = |norms| format!(", norms of layers {}", apart_text(norms));
        format!(
            "at step {}, relative to the larger value: losses {}{}",
            self.step,
            apart_text(self.loss),
            self.norms.map_or(String::new(), norms)
        )
    }
}
