//! Claims about settings from several places.

use super::super::Cli;
use super::*;
use crate::config::{Config, Length};
use crate::flags::spell_settings_as_flags;
use crate::models::ModelSpec;
use crate::models::gpt::GptSpec;
use crate::models::mlp::MlpSpec;
use crate::models::vit::VitSpec;
use crate::shown::is_unseen;

/// What a command line comes to with these variables and this file.
fn asked(line: &str, variables: &[(&str, &str)], file: Option<&str>) -> Result<Command> {
    let folder = crate::files::testing::Scratch::new();
    let cli = <Cli as clap::Parser>::try_parse_from(
        std::iter::once("ddp-train").chain(line.split_ascii_whitespace()),
    )
    .unwrap();
    let config = file.map(|text| {
        let path = folder.path().join("run.toml");
        std::fs::write(&path, text).unwrap();
        path
    });
    let how = LayerFlags {
        config: config.or(cli.train.layers.config),
        ..cli.train.layers
    };
    layered(
        &cli.train.flags,
        &how,
        &variables
            .iter()
            .map(|(name, value)| (name.into(), value.into()))
            .collect(),
    )
}

fn config(line: &str, variables: &[(&str, &str)], file: Option<&str>) -> Config {
    match asked(line, variables, file).unwrap() {
        Command::Train(config) => *config,
        other => panic!("{other:?}"),
    }
}

fn refusal(line: &str, variables: &[(&str, &str)], file: Option<&str>) -> String {
    spell_settings_as_flags();
    let error = asked(line, variables, file).expect_err(&format!("{line} {variables:?} {file:?}"));
    assert_eq!(error.exit_code(), 2);
    error.to_string()
}

#[test]
fn flags_win_over_variables_and_these_over_the_file() {
    let file = Some("batch-size = 1\nlr = 0.5\nhidden = [3, 4]\nseed = 9\ndrop-last = true\n");
    let variables = [
        ("DDP_BATCH_SIZE", "2"),
        ("DDP_LR", "0.25"),
        ("DDP_DROP_LAST", "false"),
        ("DDP_HIDDEN", "5,6"),
    ];
    let config = config("--batch-size 3", &variables, file);
    assert_eq!(
        (config.batch_size, config.peak_lr(), config.seed),
        (Some(3), 0.25, 9)
    );
    let model = ModelSpec::from(MlpSpec {
        hidden: vec![5, 6],
        ..MlpSpec::default()
    });
    assert_eq!((config.model, config.drop_last), (model, false));
}

#[test]
fn every_setting_can_stand_in_the_environment_and_in_a_file() {
    let whole = Config::default();
    let text = whole.to_toml();
    assert_eq!(config("", &[], Some(&text)), whole.with_defaults());
    // Each setting, as its own default, in a variable.
    for line in text.lines() {
        let (name, value) = line.split_once(" = ").unwrap();
        let value = value.trim_matches(['"', '[', ']']).replace(' ', "");
        let value = if value.is_empty() {
            "none".to_string()
        } else {
            value
        };
        assert_eq!(
            config("", &[(&variable(name), &value)], None).with_defaults(),
            whole.with_defaults(),
            "{line}"
        );
    }
}

#[test]
fn a_higher_layer_overrides_conflicting_settings() {
    assert_eq!(
        config("--steps 7", &[], Some("epochs = 3")).length(),
        Length::Steps(7)
    );
    assert_eq!(
        config("", &[("DDP_EPOCHS", "2")], Some("steps = 3")).length(),
        Length::Epochs(2)
    );
    // In one layer they are a mistake.
    assert!(refusal("", &[], Some("epochs = 3\nsteps = 7")).contains("either --steps or --epochs"));
    assert!(refusal("--epochs 3 --steps 7", &[], None).contains("either --steps or --epochs"));
}

#[test]
fn what_is_wrong_says_where_it_stands() {
    for (variables, file, parts) in [
        (
            &[("DDP_LR", "fast")][..],
            None,
            &["DDP_LR in the environment", "'fast'", "expected a number"][..],
        ),
        (
            &[("DDP_LR", "-1")],
            None,
            &["--lr -1:", "(--lr is set in DDP_LR)"],
        ),
        (
            &[("DDP_BATCHSIZE", "3")],
            None,
            &["DDP_BATCHSIZE", "no such setting", "DDP_BATCH_SIZE"],
        ),
        (
            &[("DDP_JOB_MACS", "all")],
            None,
            &["DDP_JOB_MACS", "no such setting", "write DDP_JOB_MAC "],
        ),
        (
            &[("DDP_LEARNING_RATE", "0.1")],
            None,
            &["DDP_LEARNING_RATE", "no such setting", "--lr"],
        ),
        (
            &[("DDP_BATCH", "3")],
            None,
            &["DDP_BATCH ", "no such setting", "--batch-size"],
        ),
        (&[], Some("lr = -1"), &["--lr -1:", "run.toml)"]),
        (
            &[],
            Some("lr = \"fast\""),
            &["--config", "run.toml", "line 1"],
        ),
        (
            &[],
            Some("seed = 1\nhidden = \"wide\""),
            &["run.toml", "line 2, column 10", "a sequence"],
        ),
        (
            &[],
            Some("learning-rate = 1"),
            &["run.toml", "learning-rate", "as a flag, write --lr RATE"],
        ),
        (
            &[],
            Some("batch_size = 1"),
            &["as a flag, write --batch-size"],
        ),
        (&[], Some("rate-of-all = 1"), &["rate-of-all", ", lr, "]),
        (
            &[],
            Some("micro-batch = \"all\""),
            &["micro-batch", "expected a whole number"],
        ),
        (
            &[],
            Some("momentum = 0.5"),
            &["--momentum 0.5:", "--optimizer sgd", "run.toml)"],
        ),
    ] {
        let text = refusal("", variables, file);
        parts
            .iter()
            .for_each(|part| assert!(text.contains(part), "{text} lacks {part}"));
    }
    let missing = asked("--config nowhere.toml", &[], None).unwrap_err();
    assert_eq!(missing.exit_code(), 74);
}

#[test]
fn variables_of_other_meanings_are_left_alone() {
    let others = [
        ("DDP_KERNEL_CACHE", "x"),
        ("DDP_TEST_FAULT", "x"),
        ("DDP_SOMETHING_ELSE", "x"),
    ];
    assert_eq!(config("", &others, None), Config::default());
    // What other programs call theirs is two letters away from some short name of ours.
    let others =
        ["RANK", "PORT", "NODE", "LOG", "HOST", "PATH"].map(|name| (format!("DDP_{name}"), "x"));
    let others = others
        .each_ref()
        .map(|(name, value)| (name.as_str(), *value));
    assert_eq!(config("", &others, None), Config::default());
    for (meant, name) in [
        ("DDP_SEED", "DDP_SEDE_"),
        ("DDP_SEED", "DDP_SEEDS"),
        ("DDP_CONFIG", "DDP_CONFIGS"),
    ] {
        let text = asked("", &[(name, "1")], None)
            .map_or_else(|error| error.to_string(), |_| String::new());
        assert_eq!(text.contains(meant), name != "DDP_SEDE_", "{name}: {text}");
    }
}

#[test]
fn what_is_done_with_settings_may_stand_in_the_environment() {
    let folder = crate::files::testing::Scratch::new();
    let path = folder.path().join("run.toml");
    std::fs::write(&path, "seed = 9\nlr = 0.5\n").unwrap();
    let path = path.to_str().unwrap();
    let found = config("--lr 0.25", &[("DDP_CONFIG", path)], None);
    assert_eq!((found.seed, found.peak_lr()), (9, 0.25));
    // A flag names another file.
    assert_eq!(
        config("", &[("DDP_CONFIG", "nowhere.toml")], Some("seed = 3")).seed,
        3
    );
    assert_eq!(
        asked("", &[("DDP_CONFIG", "nowhere.toml")], None)
            .unwrap_err()
            .exit_code(),
        74
    );
    for value in ["true", "false"] {
        let is = value == "true";
        let command = |name: &str| asked("", &[(name, value)], None).unwrap();
        assert_eq!(matches!(command("DDP_DRY_RUN"), Command::DryRun(_)), is);
        assert_eq!(matches!(command("DDP_PRINT_CONFIG"), Command::Show(_)), is);
    }
    assert!(
        refusal("", &[("DDP_DRY_RUN", "yes")], None)
            .contains("DDP_DRY_RUN in the environment: expected true or false")
    );
}

#[test]
fn names_that_are_no_text_are_refused() {
    use std::os::unix::ffi::OsStringExt;
    let odd = || OsString::from_vec(b"a\xffb".to_vec());
    for flag in ["out", "cache-dir", "init-from"] {
        let words = [
            OsString::from("ddp-train"),
            OsString::from(format!("--{flag}")),
            odd(),
        ];
        let cli = <Cli as clap::Parser>::try_parse_from(words).unwrap();
        let errors = [
            layered(&cli.train.flags, &cli.train.layers, &Variables::new()).unwrap_err(),
            layered(
                &SettingFlags::default(),
                &LayerFlags::default(),
                &Variables::from([(variable(flag).into(), odd())]),
            )
            .unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.exit_code(), 2, "{error}");
            let text = error.to_string();
            assert!(
                text.contains(&format!("--{flag} a")) && text.contains("UTF-8"),
                "{text}"
            );
        }
    }
}

#[test]
fn what_is_printed_names_origins_and_reads_back() {
    let printed = asked(
        "--print-config --lr 0.5",
        &[("DDP_SEED", "4")],
        Some("epochs = 2"),
    )
    .unwrap();
    let Command::Show(text) = printed else {
        panic!("{printed:?}")
    };
    for part in [
        "lr = 0.5  # --lr\n",
        "seed = 4  # DDP_SEED\n",
        "log-every = 10  # default\n",
        // What data choose must not read back as a choice of the user.
        "# batch-size is not set\n",
        "# categorical is not set\n",
        "# linear-path is not set\n",
        "# micro-batch is not set\n",
    ] {
        assert!(text.contains(part), "{text} lacks {part}");
    }
    assert!(
        text.lines()
            .any(|line| line.starts_with("epochs = 2  # ") && line.ends_with("run.toml")),
        "{text}"
    );
    let read = config("", &[], Some(&text));
    assert_eq!(
        (read.peak_lr(), read.seed, read.length()),
        (0.5, 4, Length::Epochs(2))
    );
}

#[test]
fn what_is_printed_reads_back_whatever_stands_in_it() {
    let odd = [
        "a\nb",
        "a\nlr = 9",
        "a # b",
        "\"",
        "''\u{27}",
        "\\",
        "\u{1b}[31m",
        "\u{7f}\u{9b}\u{202e}",
        "=",
        "\r\n\t",
        "é字🦀",
    ];
    for text in odd {
        let mut expected = Config {
            labels: Some(text.into()),
            ..Config::default()
        };
        let freeze = format!("x{},2", text.replace(',', ""));
        let names = freeze.split(',').map(|name| name.trim().to_string());
        expected.freeze = Some(names.collect());
        let given = |name: &str, value: &str| (find(name).unwrap(), OsString::from(value));
        let flags = SettingFlags(vec![given("labels", text), given("freeze", &freeze)]);
        let how = LayerFlags {
            print_config: true,
            ..LayerFlags::default()
        };
        let Command::Show(printed) = layered(&flags, &how, &Variables::new()).unwrap() else {
            panic!("nothing printed")
        };
        assert!(
            !printed.contains(|character: char| character != '\n' && is_unseen(character)),
            "{printed:?}"
        );
        let read = config("", &[], Some(&printed));
        assert_eq!(read.with_defaults(), expected.with_defaults(), "{text:?}");
    }
    // A file's name cannot add a line either.
    let folder = crate::files::testing::Scratch::new();
    let path = folder.path().join("x\nlr = 9\n#");
    std::fs::write(&path, "seed = 4\n").unwrap();
    let how = LayerFlags {
        config: Some(path),
        print_config: true,
        ..LayerFlags::default()
    };
    let Command::Show(printed) =
        layered(&SettingFlags::default(), &how, &Variables::new()).unwrap()
    else {
        panic!("nothing printed")
    };
    let read = config("", &[], Some(&printed));
    assert_eq!((read.seed, read.peak_lr()), (4, 0.001), "{printed}");
}

#[test]
fn settings_may_come_through_a_pipe() {
    let (reader, mut writer) = std::io::pipe().unwrap();
    std::io::Write::write_all(&mut writer, b"seed = 4\n").unwrap();
    drop(writer);
    let pipe = std::os::fd::AsRawFd::as_raw_fd(&reader);
    let how = LayerFlags {
        config: Some(format!("/proc/self/fd/{pipe}").into()),
        ..LayerFlags::default()
    };
    match layered(&SettingFlags::default(), &how, &Variables::new()).unwrap() {
        Command::Train(config) => assert_eq!(config.seed, 4),
        other => panic!("{other:?}"),
    }
    // A rank that --ranks starts reads what its starter has read already.
    let error = layered(&SettingFlags::default(), &how, &Variables::new()).unwrap_err();
    assert!(error.to_string().contains("got an empty pipe"), "{error}");
}

#[test]
fn shells_complete_flags_and_commands() {
    for shell in [
        clap_complete::Shell::Bash,
        clap_complete::Shell::Zsh,
        clap_complete::Shell::Fish,
    ] {
        let text = crate::cli::completions(shell);
        for part in ["batch-size", "predict", "doctor", "cosine"] {
            assert!(text.contains(part), "{shell}: {part}");
        }
    }
}

#[test]
fn keys_of_a_models_table_are_refused_where_they_stand() {
    let model = config(
        "",
        &[],
        Some("[model]\nname = \"gpt\"\nlayers = 6\nbias = false"),
    )
    .model;
    let gpt = model.get::<GptSpec>().unwrap();
    assert_eq!((gpt.layers, gpt.bias, gpt.heads), (6, false, 4));
    let cases = [
        ("layers = -1", "3 | layers = -1"),
        ("width = 64.5", "3 | width = 64.5"),
        ("bias = \"no\"", "3 | bias = \"no\""),
        ("depth = 3", "[model] has no setting \"depth\", but name, "),
        ("lr = 0.1", "[model] has no setting \"lr\""),
        ("hidden = [3]", "--hidden requires --model mlp"),
    ];
    for (line, expected) in cases {
        let text = refusal("", &[], Some(&format!("[model]\nname = \"gpt\"\n{line}")));
        assert!(text.contains(expected), "{line}: {text}");
    }
    let both = "layers = 2\n[model]\nname = \"gpt\"\nlayers = 3";
    let text = refusal("", &[], Some(both));
    let expected = "layers: expected once, got it in [model] and above";
    assert!(text.contains(expected), "{text}");
    let text = refusal("", &[], Some("model = 3"));
    assert!(
        text.contains("expected the name of a model, or a table"),
        "{text}"
    );
}

#[test]
fn the_model_is_read_before_its_settings() {
    // Variables have no order.
    let variables = [("DDP_LAYERS", "3"), ("DDP_MODEL", "vit")];
    let expected = VitSpec {
        layers: 3,
        ..VitSpec::default()
    };
    let model = config("", &variables, Some("hidden = [5]")).model;
    assert_eq!(model, ModelSpec::from(expected));
    let text = refusal("", &[("DDP_HIDDEN", "5")], Some("model = \"vit\""));
    let expected = "DDP_HIDDEN in the environment: --hidden '5': requires --model mlp";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn a_damaged_file_of_settings_is_read_or_refused() {
    let file = "# A run.\nlr = 0.01\nbatch-size = 128\nhidden = [3, 4]\ndrop-last = true\n\
                data = \"glyphs,rows=64\"\nmodel = \"gpt\"\n[gpt]\nlayers = 2\nwidth = 16\n";
    for seed in ddp_testing::cases("damaged settings", 50_000, 500) {
        let damaged = ddp_testing::mutated(file.as_bytes(), seed);
        let damaged = String::from_utf8_lossy(&damaged);
        if let Err(error) = asked("", &[], Some(&damaged)) {
            assert!(
                [2, 65, 74].contains(&error.exit_code()),
                "{damaged}: {error}"
            );
        }
    }
}
