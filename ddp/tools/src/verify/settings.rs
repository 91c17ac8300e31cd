//! With which settings a run is repeated: those that its log claims, which come from a stranger,
//! but data, base weights and tokenizer only from where the person who verifies says or confirms,
//! and nothing of what a run writes, shows or takes of the machine.

use std::path::{Path, PathBuf};

use ddp_data::DataSpec;
use ddp_kernels::memory::machine_available_bytes;
use ddp_kernels::setting::SettingName;
use serde_json::{Map, Value};

use crate::checkpoint;
use crate::config::values::MemorySize;
use crate::config::{Config, DeviceChoice, GraphChoice, Resident, Resume, SETTINGS, SharedBy};
use crate::error::{Error, Result};
use crate::setting::{DATA, INIT_FROM, LABELS};
use crate::units::plural;

/// What the person who verifies says of data and machine.
#[derive(Clone, Debug, Default)]
pub struct Given {
    /// The training data.
    pub data: Option<DataSpec>,
    /// Their labels.
    pub labels: Option<String>,
    /// The held-out data.
    pub val_data: Option<DataSpec>,
    /// Their labels.
    pub val_labels: Option<String>,
    /// Whether paths that are not given are right as the log has them.
    pub as_logged: bool,
    /// Base weights, tokenizer, device, threads, memory, cache and timeout.
    pub machine: Config,
}

/// No folder can be there.
const NOWHERE: &str = "/dev/null/verify";

/// The settings that are claimed, with what is given. `place` is where the first rank trained,
/// `local_ranks` how many ranks share this machine's memory.
pub(super) fn settled(
    claimed: &Map<String, Value>,
    given: &Given,
    place: &str,
    local_ranks: usize,
) -> Result<Config> {
    let config = Config::from_checkpoint(claimed);
    let unusable = |why| Error::Data(format!("the settings that the log claims: {why}"));
    let mut config = config.map_err(unusable)?;
    confirm(&mut config, given)?;
    for setting in SETTINGS.iter().filter(|it| it.scope == SharedBy::Rank) {
        setting.reset(&mut config);
    }
    let machine = given.machine.clone();
    let device = match machine.device {
        DeviceChoice::Auto if place.starts_with("cpu") => DeviceChoice::Cpu,
        DeviceChoice::Auto => DeviceChoice::Cuda,
        given => given,
    };
    let available = machine_available_bytes().map(|all| all as u64 / local_ranks as u64);
    // In whole units, as it is printed.
    let available = available.map(|bytes| MemorySize(bytes / 100_000_000 * 100_000_000));
    // On a GPU the plan counts the GPU's memory.
    let available = available.filter(|_| device == DeviceChoice::Cpu);
    // The limit chooses these, which change no bit.
    for setting in SETTINGS
        .iter()
        .filter(|it| it.name().starts_with("recompute"))
    {
        if setting.applies_to(&config.model) {
            setting.reset(&mut config);
        }
    }
    Ok(Config {
        out: NOWHERE.into(),
        device,
        share_gpus: machine.share_gpus,
        threads: machine.threads,
        timeout_s: machine.timeout_s,
        cache_dir: machine.cache_dir,
        memory: machine.memory.or(available),
        graph: GraphChoice::Off,
        data_on_device: Resident::Off,
        resume: Resume::Never,
        override_: true,
        sample: None,
        sample_held_out: 0,
        trace: None,
        ..config
    })
}

/// The settings that repeat steps from `from` on up to `to`, in a run that planned `planned` steps
/// when it came to the last of them.
pub(super) fn between(
    settled: &Config,
    [from, to]: [u64; 2],
    planned: Option<u64>,
    run: &Path,
) -> Config {
    let (resume, out) = match from {
        0 => (Resume::Never, settled.out.clone()),
        _ => (Resume::From(checkpoint::folder(run, from)), run.into()),
    };
    let (steps, epochs) = match planned {
        Some(planned) => (Some(planned.max(to)), None),
        None => (settled.steps, settled.epochs),
    };
    Config {
        steps,
        epochs,
        resume,
        out,
        ..settled.clone()
    }
}

/// Takes paths as they are given. Refuses others, unless they are confirmed.
fn confirm(config: &mut Config, given: &Given) -> Result<()> {
    let mut named: Vec<(&str, String)> = Vec::new();
    let is_built_in =
        |spec: &DataSpec| matches!(spec, DataSpec::Glyphs(_) | DataSpec::Synthetic(_));
    match &given.data {
        Some(data) => config.data = data.clone(),
        None if is_built_in(&config.data) => {}
        None => named.push((DATA.0, config.data.to_string())),
    }
    match (&given.val_data, &config.val_data) {
        (Some(data), _) => config.val_data = Some(data.clone()),
        (None, Some(data)) if !is_built_in(data) => named.push(("val-data", data.to_string())),
        _ => {}
    }
    // A name of a column or an array is no path.
    let is_path = |text: &str| text.contains('/') || Path::new(text).exists();
    let labels = [
        (LABELS.0, &given.labels, &mut config.labels),
        ("val-labels", &given.val_labels, &mut config.val_labels),
    ];
    for (name, given, claimed) in labels {
        match (given, &*claimed) {
            (Some(_), _) => claimed.clone_from(given),
            (None, Some(text)) if is_path(text) => named.push((name, text.clone())),
            _ => {}
        }
    }
    let shown = |path: &PathBuf| path.display().to_string();
    let machine = &given.machine;
    let paths = [
        (INIT_FROM.0, &machine.init_from, &mut config.init_from),
        ("tokenizer", &machine.tokenizer, &mut config.tokenizer),
    ];
    for (name, given, claimed) in paths {
        match (given, &*claimed) {
            (Some(_), _) => claimed.clone_from(given),
            (None, Some(path)) => named.push((name, shown(path))),
            _ => {}
        }
    }
    let from = config.lora.iter().filter_map(|lora| lora.from.as_ref());
    named.extend(from.map(|path| ("lora", format!("from={}", shown(path)))));
    if named.is_empty() || given.as_logged {
        return Ok(());
    }
    let all = named.iter();
    let all: Vec<_> = all
        .map(|(name, text)| format!("{} {text}", SettingName(name)))
        .collect();
    Err(Error::Usage(format!(
        "verify: the log names {}, which are not read only because it says so: {}; help: give these \
         as they are here, or {} if the log's own are right here",
        plural(all.len() as u64, "path"),
        all.join(", "),
        SettingName("as-logged")
    )))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(claimed: Value, given: &Given) -> Result<Config> {
        settled(
            claimed.as_object().unwrap(),
            given,
            "cpu on a, 2 threads",
            1,
        )
    }

    #[test]
    fn what_a_stranger_claims_is_neither_read_unasked_nor_written_to() {
        let claimed = json!({
            "data": "/etc/passwd", "val-data": "b.csv", "labels": "../c.npy", "init-from": "d",
            "tokenizer": "e", "out": "/home/f", "cache-dir": "/home/g", "tensorboard": true,
            "trace": "2..4", "sample": "h", "threads": 64, "timeout-s": 1e5, "device": "cuda:7",
            "resume": "auto", "share-gpus": true, "progress": "always", "log-level": "debug",
        });
        let error = of(claimed.clone(), &Given::default()).unwrap_err();
        let text = error.to_string();
        for name in [
            "/etc/passwd",
            "b.csv",
            "../c.npy",
            "`init-from` d",
            "`tokenizer` e",
        ] {
            assert!(
                text.contains(name) && error.exit_code() == 2,
                "{name}: {text}"
            );
        }
        let given = Given {
            data: Some("mine.csv".parse().unwrap()),
            val_data: Some("glyphs".parse().unwrap()),
            labels: Some("y".into()),
            machine: Config {
                init_from: Some("w".into()),
                tokenizer: Some("t".into()),
                cache_dir: Some("mine".into()),
                threads: Some(3),
                ..Config::default()
            },
            ..Given::default()
        };
        let config = of(claimed, &given).unwrap();
        let own = Config {
            data: "mine.csv".parse().unwrap(),
            val_data: given.val_data.clone(),
            labels: given.labels.clone(),
            init_from: Some("w".into()),
            tokenizer: Some("t".into()),
            cache_dir: Some("mine".into()),
            threads: Some(3),
            out: NOWHERE.into(),
            device: DeviceChoice::Cpu,
            memory: config.memory,
            graph: GraphChoice::Off,
            data_on_device: Resident::Off,
            override_: true,
            ..Config::default()
        };
        assert_eq!(config.to_json(), own.to_json());
        // A column's name is no path, and built-in data need no file.
        let built_in = json!({ "data": "glyphs", "labels": "digit" });
        assert!(of(built_in, &Given::default()).is_ok());
        assert_eq!(of(json!({ "out": 3 }), &given).unwrap_err().exit_code(), 65);
    }
}
