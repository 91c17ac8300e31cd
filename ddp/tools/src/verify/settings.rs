//! With which settings a run is repeated. It keeps the claimed settings that affect bits. Paths of
//! data, base weights and tokenizer are given or confirmed by the person who verifies.

use std::path::Path;

use ddp_data::DataSpec;
use ddp_kernels::memory::machine_available_bytes;
use ddp_kernels::setting::SettingName;
use serde_json::{Map, Value};

use crate::checkpoint;
use crate::config::values::MemorySize;
use crate::config::{Config, GraphChoice, Resident, Resume, SharedBy, as_flag, find};
use crate::error::{Error, Result};
use crate::units::plural;

/// What the person who verifies says of data and machine.
#[derive(Clone, Debug, Default)]
pub struct Given {
    /// Data, base weights, tokenizer, device and memory, where they are not at their default.
    pub settings: Config,
    /// Whether paths that are not given are right as the log has them.
    pub as_logged: bool,
}

/// No folder can be there.
const NOWHERE: &str = "/dev/null/verify";
/// Settings that name what is read.
const READ: [&str; 4] = ["init-from", "tokenizer", "labels", "val-labels"];
const DATA: [&str; 2] = ["data", "val-data"];
/// What of the claimed settings is left out, besides what each rank has for itself.
const LEFT_OUT: [&str; 5] = ["memory", "resume", "sample", "sample-held-out", "trace"];

/// The settings that are claimed, with what is given. `place` is where the first rank trained,
/// `local_ranks` how many ranks share this machine's memory.
pub(super) fn settled(
    claimed: &Map<String, Value>,
    given: &Given,
    place: &str,
    local_ranks: usize,
) -> Result<Config> {
    let is_of_rank = |name: &str| find(name).is_some_and(|it| it.scope == SharedBy::Rank);
    let mut config = claimed.clone();
    // How much is computed again changes no bit.
    config.retain(|name, _| {
        !is_of_rank(name) && !LEFT_OUT.contains(&&**name) && !name.starts_with("recompute")
    });
    let (own, changed) = (given.settings.to_json(), given.settings.changed());
    let is_given = |name: &str| changed.iter().any(|it| it == name);
    if !given.as_logged {
        refuse_paths(&config, is_given)?;
    }
    for (name, value) in own {
        let is_taken = [&DATA[..], &READ, &["memory"]].concat().contains(&&*name);
        if is_given(&name) && (is_taken || is_of_rank(&name)) {
            config.insert(name, value);
        }
    }
    let device = if place.starts_with("cpu") {
        "cpu"
    } else {
        "cuda"
    };
    let device = config.entry("device").or_insert(device.into()).clone();
    // On a GPU the plan counts the GPU's memory.
    if let Some(bytes) = machine_available_bytes().filter(|_| device == "cpu") {
        // In whole units, as it is printed.
        let bytes = (bytes / local_ranks) as u64 / 100_000_000 * 100_000_000;
        let memory = MemorySize(bytes).to_string();
        config.entry("memory").or_insert(memory.into());
    }
    let config = Config::from_checkpoint(&config);
    let config = config.map_err(|why| Error::Data(format!("the settings of the log: {why}")))?;
    Ok(Config {
        out: NOWHERE.into(),
        graph: GraphChoice::Off,
        data_on_device: Resident::Off,
        override_: true,
        ..config
    })
}

/// Refuses paths given only by the log.
fn refuse_paths(claimed: &Map<String, Value>, is_given: impl Fn(&str) -> bool) -> Result<()> {
    let is_built_in = |text: &str| {
        matches!(
            text.parse(),
            Ok(DataSpec::Glyphs(_) | DataSpec::Synthetic(_))
        )
    };
    let is_path = |name: &str, text: &str| match name {
        _ if DATA.contains(&name) => !is_built_in(text),
        // A name of a column or an array is no path.
        "labels" | "val-labels" => text.contains('/') || Path::new(text).exists(),
        "lora" => text.contains("from="),
        _ => READ.contains(&name),
    };
    let texts = claimed.iter().map(|(name, value)| (name, as_flag(value)));
    let named = texts.filter(|(name, text)| !is_given(name) && is_path(name, text));
    let named = named.map(|(name, text)| format!("{} {text}", SettingName(name)));
    let named: Vec<String> = named.collect();
    if named.is_empty() {
        return Ok(());
    }
    Err(Error::Usage(format!(
        "verify: the log names {}, and nothing is read only because a log says so: {}; help: give \
         your own, or {} if these are right here",
        plural(named.len() as u64, "path"),
        named.join(", "),
        SettingName("as-logged")
    )))
}

/// The settings that repeat steps from `from` on up to `to`, in a run that planned `planned` steps
/// when it came to the last of them.
pub(super) fn between(
    settled: &Config,
    [from, to]: [u64; 2],
    planned: Option<u64>,
    run: &Path,
) -> Config {
    let mut config = settled.clone();
    if from > 0 {
        config.resume = Resume::From(checkpoint::folder(run, from));
        config.out = run.into();
    }
    if let Some(planned) = planned {
        (config.steps, config.epochs) = (Some(planned.max(to)), None);
    }
    config
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::DeviceChoice;

    fn of(claimed: &Value, given: &Given) -> Result<Config> {
        let claimed = claimed.as_object().unwrap();
        settled(claimed, given, "cpu on a, 2 threads", 1)
    }

    #[test]
    fn what_a_stranger_claims_is_neither_read_unasked_nor_written_to() {
        let claimed = json!({
            "data": "/etc/passwd", "val-data": "b.csv", "labels": "../c.npy", "init-from": "d",
            "tokenizer": "e", "out": "/home/f", "cache-dir": "/home/g", "tensorboard": true,
            "trace": "2..4", "sample": "h", "threads": 64, "timeout-s": 1e5, "device": "cuda:7",
            "resume": "auto", "share-gpus": true, "progress": "always", "log-level": "debug",
        });
        let error = of(&claimed, &Given::default()).unwrap_err();
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
        let own = Config {
            data: "mine.csv".parse().unwrap(),
            val_data: Some("mine.csv".parse().unwrap()),
            labels: Some("y".into()),
            init_from: Some("w".into()),
            tokenizer: Some("t".into()),
            cache_dir: Some("mine".into()),
            threads: Some(3),
            ..Config::default()
        };
        let given = Given {
            settings: own.clone(),
            as_logged: false,
        };
        let config = of(&claimed, &given).unwrap();
        let expected = Config {
            out: NOWHERE.into(),
            device: DeviceChoice::Cpu,
            memory: config.memory,
            graph: GraphChoice::Off,
            data_on_device: Resident::Off,
            override_: true,
            ..own
        };
        assert_eq!(config.to_json(), expected.to_json());
        // A column's name is no path, and built-in data need no file.
        let built_in = json!({ "data": "glyphs", "labels": "digit" });
        assert!(of(&built_in, &Given::default()).is_ok());
        let lora = json!({ "data": "glyphs", "lora": "from=d" });
        assert_eq!(of(&lora, &Given::default()).unwrap_err().exit_code(), 2);
        let other = json!({ "data": "glyphs", "lr": "fast" });
        assert_eq!(of(&other, &given).unwrap_err().exit_code(), 65);
    }
}
