//! Help and the version.

use super::*;

#[test]
fn help_says_what_the_defaults_are() {
    let Ok(Command::Show(help)) = parse(words("--help")) else {
        panic!("no help")
    };
    let defaults = Config::default();
    let section = |flag: &str| {
        let start = help
            .find(&format!("--{flag} "))
            .or(help.find(&format!("--{flag}[")))
            .unwrap_or_else(|| panic!("{flag} in {help}"));
        // Up to the next flag, on one line.
        let rest = &help[start..];
        let end = rest.find("\n      --").unwrap_or(rest.len());
        rest[..end]
            .split_ascii_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
    };
    let MlpSpec {
        hidden, dropout, ..
    } = MlpSpec::default();
    let hidden = hidden
        .iter()
        .map(usize::to_string)
        .collect::<Vec<_>>()
        .join(",");
    for (flag, default) in [
        ("hidden", hidden),
        ("dropout", dropout.to_string()),
        ("data", defaults.data.to_string()),
        (
            "batch-size",
            format!(
                "{}; of tables with more than 10,000 rows 256",
                defaults.batch_rows()
            ),
        ),
        ("epochs", "5; tables choose --steps".to_string()),
        ("lr", "0.001, 0.1 for sgd, 0.02 for muon".to_string()),
        ("min-lr", defaults.min_lr.to_string()),
        ("weight-decay", "0.01, 0 for sgd".to_string()),
        ("beta1", "0.9".to_string()),
        ("beta2", "0.999, 0.95 for muon".to_string()),
        ("eps", "1e-8, 1e-10 for muon".to_string()),
        ("momentum", "0.9, 0.95 for muon".to_string()),
        ("adam-lr", "0.0003".to_string()),
        ("grad-clip", "0; for tables 1".to_string()),
        ("label-smoothing", defaults.label_smoothing.to_string()),
        ("seed", defaults.seed.to_string()),
        (
            "bucket-mb",
            "25 on GPUs, 50 on those of several hosts, 4 on the CPU".to_string(),
        ),
        ("timeout-s", defaults.timeout_s.to_string()),
        ("out", defaults.out.display().to_string()),
        ("log-every", defaults.log_every.to_string()),
        ("drop-last", defaults.drop_last.to_string()),
        ("devices-per-rank", defaults.devices_per_rank.to_string()),
        ("share-gpus", defaults.share_gpus.to_string()),
        ("zero", defaults.zero.to_string()),
    ] {
        let text = section(flag);
        assert!(
            text.contains(&format!("[default: {default}]")),
            "{flag}: {text}"
        );
    }
    let toml: toml::Table = toml::from_str(&defaults.to_toml()).unwrap();
    for flag in [
        "model",
        "activation",
        "optimizer",
        "schedule",
        "device",
        "dtype",
        "data-on-device",
        "graph",
        "reduce-dtype",
        "overlap",
        "progress",
        "log-level",
    ] {
        let default = toml[flag].as_str().unwrap();
        assert!(
            section(flag).contains(&format!("[default: {default}]")),
            "{flag}: {}",
            section(flag)
        );
    }
    assert_eq!(defaults.length(), Length::Epochs(5));
}

#[test]
fn help_is_in_groups_with_examples_that_parse() {
    let Ok(Command::Show(help)) = parse(words("train --help")) else {
        panic!("no help")
    };
    for group in SETTINGS.iter().map(|setting| &setting.group) {
        assert!(help.contains(&format!("\n{group}:\n")), "{group} in {help}");
    }
    let examples = EXAMPLES.lines().filter_map(|line| {
        line.split("ddp-train")
            .nth(1)
            .filter(|_| line.starts_with("  "))
    });
    for example in examples.clone() {
        let line = example.split("  ").next().unwrap();
        assert!(parse(words(line)).is_ok(), "{line}");
    }
    assert_eq!(examples.count(), 9);
    assert!(help.lines().all(|line| line.chars().count() <= 120));
}

#[test]
fn short_help_shows_the_flags_that_people_use_most() {
    for line in ["-h", "train -h", "resume x -h"] {
        let Ok(Command::Show(help)) = parse(words(line)) else {
            panic!("no help")
        };
        let flags = help
            .lines()
            .filter_map(|line| line.strip_prefix("      --"));
        let flags: Vec<&str> = flags.filter_map(|flag| flag.split(' ').next()).collect();
        // A default in brackets was cut at its first semicolon.
        let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
        let defaults = words.split("[default: ").skip(1);
        let is_whole = |it: &str| it.find(']').is_some_and(|end| !it[..end].contains('['));
        assert!(defaults.into_iter().all(is_whole), "{help}");
        assert_eq!(flags.len(), OFTEN.split(' ').count(), "{line}: {flags:?}");
        assert!(
            OFTEN.split(' ').all(|name| flags.contains(&name)),
            "{flags:?}"
        );
    }
}

#[test]
fn the_version_is_shown() {
    let shown = parse(words("--version")).unwrap();
    assert_eq!(
        shown,
        Command::Show(format!("ddp-train {}\n", env!("CARGO_PKG_VERSION")))
    );
}

#[test]
fn the_python_package_gets_every_flag_with_its_help_and_default() {
    let Ok(Command::Show(text)) = parse(words("settings")) else {
        panic!("no list")
    };
    let listed: serde_json::Value = serde_json::from_str(&text).unwrap();
    let flags = listed["flags"].as_array().unwrap();
    let flag = |name: &str| flags.iter().find(|flag| flag["name"] == name);
    for setting in SETTINGS.iter() {
        let help = &flag(setting.name()).unwrap()["help"];
        assert!(
            help.as_str().is_some_and(|help| !help.is_empty()),
            "{setting:?}"
        );
    }
    assert_eq!(flag("restarts").unwrap()["default"], "0");
    assert_eq!(flag("zero").unwrap()["group"], "Between ranks");
    assert_eq!(
        flag("stratify").unwrap()["choices"],
        serde_json::json!(["true", "false"])
    );
}
