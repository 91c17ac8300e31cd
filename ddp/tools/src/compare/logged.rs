//! What `compare` reads from a metrics log: the digests of each logged step, and how the run was
//! started.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use ddp_kernels::setting::SettingName;
use serde::Deserialize;

use crate::config::as_flag;
use crate::devices::models;
use crate::error::{Error, Result};
use crate::metrics::{Run, event_of};
use crate::metrics_log::EVENTS_FILE;

/// A layer: its name, a hash of its bits, its norm and its sum. The numbers are null where they
/// are not finite.
pub(crate) type LoggedLayer = (String, String, Option<f64>, Option<f64>);

/// See `StepDigests` of the engine.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Digests {
    pub(crate) batch: String,
    pub(crate) gradients: Vec<LoggedLayer>,
    pub(crate) weights: Vec<LoggedLayer>,
}

/// A logged step, or the initial weights as step 0. Version 0.6 and older wrote no digests.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct LoggedStep {
    pub(crate) step: u64,
    pub(crate) loss: Option<f64>,
    pub(crate) lr: Option<f64>,
    pub(crate) digests: Option<Digests>,
}

/// Steps by number.
pub(crate) type Steps = BTreeMap<u64, LoggedStep>;

/// A run to compare.
#[derive(Debug)]
pub(crate) struct Logged {
    pub(crate) folder: PathBuf,
    pub(crate) run: Run,
    pub(crate) steps: Steps,
}

impl Logged {
    /// Reads the run in `folder`.
    pub(crate) fn read(folder: &Path) -> Result<Logged> {
        let (mut steps, mut line_number, mut damage) = (BTreeMap::new(), 0, None);
        let run = Run::read_log(folder, |line| {
            line_number += 1;
            match event_of(line).as_deref() {
                Some("step") => {}
                // Not compared, and there may be millions.
                Some("eval" | "sample") => return false,
                _ => return true,
            }
            match serde_json::from_slice::<LoggedStep>(line) {
                Ok(step) => _ = steps.insert(step.step, step),
                Err(why) => _ = damage.get_or_insert((line_number, format!("no step: {why}"))),
            }
            false
        });
        let run = run?.begun()?;
        if let Some((line, why)) = damage.as_ref().or(run.bad_lines.first()) {
            return Err(Error::Data(format!(
                "{}: line {line} of {EVENTS_FILE} is {why}; help: remove the line; its step \
                 is then not compared",
                folder.display()
            )));
        }
        let weights = Vec::deserialize(&run.last["start"]["initial_weights"]);
        if let Some(weights) = weights.ok().filter(|layers: &Vec<_>| !layers.is_empty()) {
            let mut first = LoggedStep::default();
            first.digests.get_or_insert_default().weights = weights;
            steps.insert(first.step, first);
        }
        let folder = folder.to_path_buf();
        Ok(Logged { folder, run, steps })
    }
}

/// What differs between the starts of two runs: its name, and what it is in each.
pub(crate) fn differences(a: &Run, b: &Run) -> Vec<[String; 3]> {
    let [a, b] = [a, b].map(facts);
    let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let of = |facts: &BTreeMap<String, String>, name: &String| {
        facts.get(name).map_or("none", String::as_str).to_string()
    };
    let all = names.into_iter();
    let all = all.map(|name| [name.clone(), of(&a, name), of(&b, name)]);
    all.filter(|[_, a, b]| a != b).collect()
}

/// What a run was started with, by name: settings, data, devices, ranks, versions.
fn facts(run: &Run) -> BTreeMap<String, String> {
    let (start, world) = (&run.start, &run.start.world);
    // Where data are is a setting.
    let description = start.data.split_once(": ").map_or(&*start.data, |it| it.1);
    // Where a run writes and what it shows changes nothing.
    let shows = |name: &str| matches!(name, "out" | "progress" | "log-level");
    let settings = start.config.iter().filter(|(name, _)| !shows(name));
    let settings = settings.map(|(name, value)| (SettingName(name).to_string(), as_flag(value)));
    let settings = settings.filter(|(_, value)| !value.is_empty());
    let versions = start.versions.iter();
    let versions = versions.map(|(name, value)| (format!("version of {name}"), value.clone()));
    let models = |places: &[String]| Vec::from_iter(models(places).into_keys()).join(", ");
    let resumed = run.resumes.iter();
    let devices = resumed.clone().filter(|it| !it.devices.is_empty());
    let devices = devices.map(|it| (it.step, models(&it.devices)));
    let resumes = resumed.map(|resume| {
        let is_other = |(name, now): &(&String, &String)| start.versions.get(*name) != Some(*now);
        let others = resume.versions.iter().filter(is_other);
        let others = others.map(|(name, now)| format!("{name} {now}"));
        let changes: Vec<String> = resume.overridden.iter().cloned().chain(others).collect();
        let with = if changes.is_empty() { "" } else { " with " };
        format!("after step {}{with}{}", resume.step, changes.join(", "))
    });
    let resumes = Vec::from_iter(resumes).join("; ");
    let others = [
        ("description of the data", description.to_string()),
        ("content of the data", start.fingerprint.clone()),
        (
            "content of the held-out data",
            start.held_out_fingerprint.clone(),
        ),
        ("ranks", over_time(run.ranks.iter().cloned())),
        ("hosts", world.hosts.to_string()),
        ("transport", world.transport.clone()),
        (
            "devices",
            over_time([(0, models(&start.devices))].into_iter().chain(devices)),
        ),
        ("resumed", resumes),
    ];
    let others = others.into_iter().filter(|(_, value)| !value.is_empty());
    let others = others.map(|(name, value)| (name.to_string(), value));
    settings.chain(versions).chain(others).collect()
}

/// The value at the start, and later ones with the step after which they hold: `3, 2 after step 8`.
fn over_time<T: PartialEq + ToString>(values: impl Iterator<Item = (u64, T)>) -> String {
    let mut values: Vec<_> = values.collect();
    values.dedup_by(|(_, now), (_, before)| now == before);
    let text = |(step, value): (u64, T)| match step {
        0 => value.to_string(),
        step => format!("{} after step {step}", value.to_string()),
    };
    Vec::from_iter(values.into_iter().map(text)).join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_a_run_shows_and_where_it_writes_is_no_difference() {
        let run = |out: &str, progress: &str, log_level: &str, lr: f64| {
            let mut run = Run::default();
            let config =
                json!({"out": out, "progress": progress, "log-level": log_level, "lr": lr});
            run.start.config = config.as_object().unwrap().clone();
            run
        };
        let [a, b] = [
            run("a", "auto", "info", 0.1),
            run("b", "never", "error", 0.5),
        ];
        assert_eq!(differences(&a, &b), [["`lr`", "0.1", "0.5"]]);
    }
}
