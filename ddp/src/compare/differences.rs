//! What two runs were started with that differs: settings, data, devices, ranks, versions.

use std::collections::BTreeSet;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::config::as_flag;
use crate::metrics::{ResumeLine, Run};

/// Something that differs between two runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Difference {
    pub(super) name: String,
    pub(super) a: String,
    pub(super) b: String,
}

/// What a run that lacks a setting has in its place.
const NONE: &str = "none";

/// What differs, in the order in which it matters: data, settings, ranks, devices, versions.
pub(super) fn differences(a: &Run, b: &Run) -> Vec<Difference> {
    let mut all = Vec::new();
    let mut compare = |name: &str, [a, b]: [String; 2]| {
        if a != b {
            let name = name.to_string();
            all.push(Difference { name, a, b });
        }
    };
    let runs = [a, b];
    let starts = runs.map(|run| &run.start);
    compare(
        "the content of the data",
        starts.map(|start| start.fingerprint.clone()),
    );
    // Where a run writes changes nothing.
    for name in names(starts.map(|start| &start.config)).filter(|name| *name != "out") {
        let value = |value: Option<&Value>| value.map_or(NONE.into(), as_flag);
        compare(
            &format!("--{name}"),
            starts.map(|start| value(start.config.get(name))),
        );
    }
    let worlds = starts.map(|start| &start.world);
    compare("ranks", worlds.map(|world| world.ranks.to_string()));
    compare("hosts", worlds.map(|world| world.hosts.to_string()));
    compare("transport", worlds.map(|world| world.transport.clone()));
    compare("buckets", worlds.map(|world| world.buckets.to_string()));
    compare("devices", starts.map(|start| kinds(&start.devices)));
    for name in names(starts.map(|start| &start.versions)) {
        let value = |value: Option<&Value>| {
            value.map_or(NONE.into(), |value| {
                value.as_str().unwrap_or_default().to_string()
            })
        };
        compare(
            &format!("version of {name}"),
            starts.map(|start| value(start.versions.get(name))),
        );
    }
    compare(
        "resumed",
        runs.map(|run| {
            run.resumes
                .iter()
                .map(resume)
                .collect::<Vec<_>>()
                .join("; ")
        }),
    );
    all
}

fn names<'a>(maps: [&'a Map<String, Value>; 2]) -> impl Iterator<Item = &'a str> {
    let names: BTreeSet<&str> = maps
        .iter()
        .flat_map(|map| map.keys())
        .map(String::as_str)
        .collect();
    names.into_iter()
}

/// The models of devices, each once: their hosts and numbers change nothing.
fn kinds(devices: &[String]) -> String {
    let kind = |device: &String| {
        let device = device.split(" on ").next().unwrap_or_default();
        device
            .split_once(' ')
            .map_or(device, |(_, model)| model)
            .to_string()
    };
    let kinds: BTreeSet<String> = devices.iter().map(kind).collect();
    kinds.into_iter().collect::<Vec<_>>().join(", ")
}

fn resume(resume: &ResumeLine) -> String {
    let mut text = format!("after step {}", resume.step);
    if let Some(ranks) = resume.ranks {
        text += &format!(" on {ranks} ranks");
    }
    resume
        .overridden
        .iter()
        .fold(text, |text, change| text + " with " + change)
}
