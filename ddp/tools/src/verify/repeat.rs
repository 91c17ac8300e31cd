//! Repeats the steps of an interval, and finds the first thing in which they are not as the log and
//! the checkpoint at its end say.

use std::time::{Duration, Instant};

use ddp_comm::World;
use serde_json::json;

use super::claims::Claims;
use super::intervals::Interval;
use super::settings::between;
use crate::checkpoint::Opened;
use crate::compare::{LoggedStep, MakeProgram, Parting, parting_in};
use crate::config::Config;
use crate::devices::models;
use crate::error::Result;
use crate::exchange;
use crate::metrics_log::ResumeEvent;
use crate::trainer::{Logs, Replay, bf16_order_of};
use crate::units::plural;

/// How often progress is logged.
const SAID_EVERY: Duration = Duration::from_secs(10);

/// Where the run is not as it is claimed.
pub(super) enum Difference {
    /// In a step of the log: where, and the learning rates that the log and the settings have.
    Step(Parting, [Option<f64>; 2]),
    /// In the checkpoint at the end, by parameter.
    Saved(u64, Vec<String>),
}

/// What was found in an interval.
#[derive(Default)]
pub(super) struct Repeated {
    /// On rank 0.
    pub(super) difference: Option<Difference>,
    /// Data that are not those of the log.
    pub(super) other_data: Vec<String>,
    /// What of the machine is not as it was, which may change bits.
    pub(super) other_machine: Vec<String>,
    /// This machine has computed the same steps twice with different results.
    pub(super) is_unsteady: bool,
    /// Steps that were compared with the log.
    pub(super) compared: u64,
}

/// What is repeated.
pub(super) struct Repeats<'a> {
    pub(super) claims: &'a Claims,
    pub(super) make: MakeProgram,
    pub(super) world: &'a World,
    /// The settings in force in the interval.
    pub(super) settled: &'a Config,
    pub(super) interval: &'a Interval,
    /// The checkpoint at its end.
    pub(super) saved: Option<&'a Opened>,
}

/// The first difference, and what a log would say of its step.
type Outcome = (Option<Difference>, Option<String>);

impl Repeats<'_> {
    /// Repeats the steps; if something is different, twice. All ranks call it together.
    pub(super) fn run(&self) -> Result<Repeated> {
        let mut found = Repeated::default();
        let (difference, seen) = self.once(self.interval.to, &mut found)?;
        if self.any(difference.is_some())? {
            // The fault may be in this machine.
            let last = match &difference {
                Some(Difference::Step(parting, _)) => parting.step,
                _ => self.interval.to,
            };
            let last = exchange::gather(self.world, &last)?[0];
            let (_, again) = self.once(last, &mut Repeated::default())?;
            found.is_unsteady = self.any(self.world.rank() == 0 && again != seen)?;
        }
        found.difference = difference;
        Ok(found)
    }

    fn any(&self, mine: bool) -> Result<bool> {
        Ok(exchange::gather(self.world, &mine)?.contains(&true))
    }

    /// Repeats the steps up to `last`, or to the first difference.
    fn once(&self, last: u64, found: &mut Repeated) -> Result<Outcome> {
        let Interval { from, to, .. } = *self.interval;
        let (era, run) = (self.claims.era_after(from), self.claims.folder());
        let planned = self.claims.era_after(to - 1).steps;
        let config = between(self.settled, [from, to], planned, run);
        let program = (self.make)(&config);
        let order = bf16_order_of(&era.versions);
        let mut replay = Replay::new(&config, &*program, self.world, order)?;
        look(era, &replay, found)?;
        if era.blake3.data_blake3.is_empty() {
            let claimed = &self.claims.logged.run.start.fingerprint;
            let is_other = *claimed != replay.fingerprint()?;
            let text = "the training data have another fingerprint here than in the log";
            found.other_data.extend(is_other.then(|| text.to_string()));
        }
        let logged = &self.claims.logged.steps;
        if from == 0 {
            let weights = replay.initial_weights()?;
            let line = json!({ "step": 0, "digests": { "weights": weights } }).to_string();
            let difference = logged.get(&0).and_then(|claimed| differs(claimed, &line));
            if self.any(difference.is_some())? {
                return Ok((difference, Some(line)));
            }
        }
        let mut said = Instant::now();
        while replay.taken() < last {
            let step = replay.taken() + 1;
            let claimed = logged.get(&step);
            let line = replay.take(claimed.map_or(Logs::Nothing, |_| Logs::Step))?;
            if said.elapsed() > SAID_EVERY && self.world.rank() == 0 {
                said = Instant::now();
                tracing::info!("step {step} of those up to {to} is repeated");
            }
            let Some((claimed, line)) = claimed.zip(line) else {
                continue;
            };
            found.compared += 1;
            let is_first = self.world.rank() == 0;
            let difference = Some(claimed).filter(|_| is_first);
            let difference = difference.and_then(|claimed| differs(claimed, &line));
            if self.any(difference.is_some())? {
                return Ok((difference, Some(line)));
            }
        }
        let Some(saved) = self.saved.filter(|_| last == to) else {
            return Ok((None, None));
        };
        let others = replay.differences(saved)?;
        let text = others.join("\n");
        let difference = Some(Difference::Saved(to, others)).filter(|_| !text.is_empty());
        Ok((difference, Some(text)))
    }
}

/// How a step differs from what the log says of it.
fn differs(claimed: &LoggedStep, line: &str) -> Option<Difference> {
    let own: LoggedStep = serde_json::from_str(line).expect("it is as a log has it");
    let parting = parting_in([claimed, &own], None)?;
    Some(Difference::Step(parting, [claimed.lr, own.lr]))
}

/// Compares data and machine with what the log says of them.
fn look(era: &ResumeEvent, replay: &Replay<'_>, found: &mut Repeated) -> Result<()> {
    let names = ["the training data", "the held-out data"];
    let claimed = [&era.blake3.data_blake3, &era.blake3.held_out_blake3];
    for ((name, claimed), own) in names.into_iter().zip(claimed).zip(replay.data_blake3()?) {
        // Version 0.8 and older did not say it.
        if *claimed != own && !claimed.is_empty() {
            let text = format!("{name} have the BLAKE3 {own} here, and {claimed} in the log");
            found.other_data.push(text);
        }
    }
    let (places, versions) = replay.machine();
    let kinds = |places: &[String]| Vec::from_iter(models(places).into_keys()).join(" and ");
    let (here, then) = (kinds(places), kinds(&era.devices));
    if here != then {
        let text = format!("it was trained on {then}, and this is {here}");
        found.other_machine.push(text);
    }
    // All vector instructions give the same bits.
    for (name, here) in versions.iter().filter(|(name, _)| *name != "simd") {
        let then = era.versions.get(name).filter(|then| *then != here);
        let text = then.map(|then| format!("{name} was {then}, and is {here} here"));
        found.other_machine.extend(text);
    }
    Ok(())
}

/// For people.
pub(super) fn described(interval: &Interval) -> String {
    let Interval { from, to, .. } = interval;
    let start = match from {
        0 => "the seed".to_string(),
        step => format!("step {step}"),
    };
    let steps = plural(interval.steps(), "step");
    let end = if interval.is_saved {
        ""
    } else {
        ", without a checkpoint at the end"
    };
    format!("from {start} to step {to} ({steps}{end})")
}
