//! What two runs were started with that differs: settings, data, devices, ranks, versions.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::Value;

use crate::config::as_flag;
use crate::devices::models;
use crate::metrics::Run;

/// Something that differs between two runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Difference {
    pub(super) name: String,
    pub(super) a: String,
    pub(super) b: String,
}

/// What differs between two runs.
pub(super) fn differences(a: &Run, b: &Run) -> Vec<Difference> {
    let all = [a, b].map(facts);
    let names: BTreeSet<&String> = all.iter().flat_map(|facts| facts.keys()).collect();
    let difference = |name: &String| {
        let [a, b] = all
            .each_ref()
            .map(|facts| facts.get(name).map_or("none", String::as_str));
        let (name, a, b) = (name.clone(), a.into(), b.into());
        (a != b).then_some(Difference { name, a, b })
    };
    names.into_iter().filter_map(difference).collect()
}

/// What a run was started with, by name.
fn facts(run: &Run) -> BTreeMap<String, String> {
    let (start, world) = (&run.start, &run.start.world);
    // Where a run writes changes nothing.
    let settings = start.config.iter().filter(|(name, _)| *name != "out");
    let settings = settings.map(|(name, value)| (format!("--{name}"), as_flag(value)));
    let versions = start.versions.iter();
    let versions = versions.map(|(name, value)| (format!("version of {name}"), as_flag(value)));
    let devices = Vec::from_iter(models(run.devices())).join(", ");
    let resumes = run.resumes.iter().map(|resume| {
        let is_other = |(name, now): &(&String, &Value)| start.versions.get(*name) != Some(*now);
        let others = resume.versions.iter().filter(is_other);
        let others = others.map(|(name, now)| format!("{name} {}", as_flag(now)));
        let changes: Vec<String> = resume.overridden.iter().cloned().chain(others).collect();
        format!("after step {} {}", resume.step, changes.join(", "))
    });
    let others = [
        ("content of the data", start.fingerprint.clone()),
        ("ranks", run.ranks().to_string()),
        ("hosts", world.hosts.to_string()),
        ("transport", world.transport.clone()),
        ("devices", devices),
        ("resumed", Vec::from_iter(resumes).join("; ")),
    ];
    let others = others.map(|(name, value)| (name.to_string(), value));
    settings.chain(versions).chain(others).collect()
}
