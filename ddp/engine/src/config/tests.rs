//! Claims about configurations.

use proptest::prelude::*;

use super::values::WHOLE_MAX;
use super::*;
use ddp_nn::models::ModelSpec;
use ddp_nn::models::mlp::MlpSpec;

fn config(change: impl FnOnce(&mut Config)) -> Config {
    let mut config = Config::default();
    change(&mut config);
    config.check().unwrap();
    config
}

#[test]
fn the_saved_file_is_the_settings_with_every_value_settled() {
    let text = Config::default().to_toml();
    assert!(text.contains("hidden = [256, 128]\n"), "{text}");
    assert!(
        text.contains("data = \"glyphs,rows=20000,held-out=2000,seed=0\"\n")
            && text.contains("lr = 0.001\n"),
        "{text}"
    );
    assert!(
        !text.contains("momentum") && !text.contains("steps = "),
        "{text}"
    );
    assert_eq!(
        Config::from_toml(&text).unwrap(),
        Config::default().with_defaults()
    );
    assert_eq!(Config::from_toml("").unwrap(), Config::default());
}

/// `hidden none` with `dropout 0.3` trained as if there were no dropout, and did not say so.
#[test]
fn dropout_without_hidden_layers_is_said_to_change_nothing() {
    let ignored = |hidden: Vec<usize>, dropout: f64| {
        let spec = MlpSpec {
            hidden,
            dropout,
            ..MlpSpec::default()
        };
        config(|config| config.model = spec.into()).ignored()
    };
    let text = "`dropout` 0.3 changes nothing: no layer is hidden";
    assert_eq!(ignored(vec![], 0.3), Some(text.to_string()));
    assert_eq!((ignored(vec![], 0.0), ignored(vec![8], 0.3)), (None, None));
}

#[test]
fn groups_are_tables_that_come_back() {
    let text = "optimizer = \"muon\"\n[[group]]\nmatch = \"0.*\"\nlr = 0.01\n\
                [[group]]\nmatch = \"*\"\nweight-decay = 0.5\n";
    let config = Config::from_toml(text).unwrap();
    assert_eq!(config.group.as_ref().unwrap().0.len(), 2);
    assert_eq!(
        (
            config.group.as_ref().unwrap().0[0].lr,
            config.group.as_ref().unwrap().0[1].weight_decay
        ),
        (Some(0.01), Some(0.5))
    );
    let rates: Vec<_> = config
        .groups()
        .unwrap()
        .iter()
        .map(|group| group.rate)
        .collect();
    assert_eq!(rates, [Some(0.5), None]);
    assert_eq!(
        Config::from_toml(&config.to_toml()).unwrap(),
        config.with_defaults()
    );
    let json = serde_json::Value::Object(config.to_json());
    assert_eq!(as_flag(&json["group"]), "0.*:lr=0.01,*:weight-decay=0.5");
    assert_eq!(
        serde_json::from_value::<Config>(json).unwrap(),
        config.with_defaults()
    );
    let wrong = Config::from_toml("[[group]]\nmatch = \"a\"\nrate = 1.0\n").unwrap_err();
    assert!(wrong.to_string().contains("rate"), "{wrong}");
}

#[test]
fn a_file_is_checked_as_flags_are() {
    for (text, part) in [
        ("lr = -1.0", "`lr` -1"),
        ("learning-rate = 1.0", "learning-rate"),
        ("lr = \"fast\"", "fast"),
        ("optimizer = \"sgd\"\nbeta1 = 0.5", "`beta1`"),
        ("data = \"synthetic:mnist\"", "mnist"),
        (
            "schedule-steps = 0",
            "`schedule-steps` 0: expected a whole number from 1",
        ),
        ("stop-after = 3\neval-every = 0", "leave `eval-every` 0 out"),
        ("best = \"f1\"", "unknown variant `f1`"),
        ("lr = ", "configuration"),
        ("hidden = [1, -2]", "-2"),
    ] {
        let error = Config::from_toml(text).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(part), "{text}: {error}");
    }
}

#[test]
fn ranks_agree_on_everything_that_changes_the_numbers_and_on_nothing_else() {
    let base = Config::default().equal_on_all_ranks();
    let has = |name: &str| {
        base.lines()
            .any(|line| line.starts_with(&format!("{name} = ")))
    };
    for name in [
        "seed",
        "lr",
        "data",
        "hidden",
        "reduce-dtype",
        "device",
        "log-every",
        "overlap",
        "devices-per-rank",
        "dtype",
        "data-on-device",
        "graph",
        "zero",
    ] {
        assert!(has(name), "{name}");
    }
    let own = config(|settings| {
        settings.out = "elsewhere".into();
        settings.threads = Some(3);
        settings.progress = When::Never;
        settings.log_level = LogLevel::Error;
        settings.timeout_s = 1.0;
        settings.share_gpus = true;
    });
    assert_eq!(own.equal_on_all_ranks(), base);
    for changed in [
        config(|settings| settings.seed = 1),
        config(|settings| settings.devices_per_rank = 2),
        config(|settings| settings.dtype = Precision::Tf32),
        config(|settings| settings.data_on_device = Resident::Off),
        config(|settings| settings.graph = GraphChoice::Off),
        config(|settings| settings.zero = 1),
        config(|settings| settings.bucket_mb = Some(4.0)),
    ] {
        assert_ne!(changed.equal_on_all_ranks(), base);
    }
    let cuda = |index| config(|settings| settings.device = DeviceChoice::CudaAt(index));
    assert_eq!(cuda(0).equal_on_all_ranks(), cuda(1).equal_on_all_ranks());
    assert_ne!(cuda(0).equal_on_all_ranks(), base);
}

proptest! {
    #[test]
    fn a_configuration_reads_back_as_itself(
        hidden in prop::collection::vec(1usize..5000, 0..4),
        numbers in (0.0f64..1.0, 1e-12f64..10.0, 0.0f64..1.0, 0.0f64..0.999),
        wholes in (1u64..1 << 40, 0u64..=WHOLE_MAX, prop::option::of(0u64..1000), prop::option::of(1usize..1000)),
        weights in prop::collection::vec(0.5f64..9.0, 0..4),
        sgd: bool,
        steps: bool,
        gpus in (1usize..=64, any::<bool>(), 0u64..=1),
    ) {
        let (dropout, lr, decay, beta) = numbers;
        let (batch, seed, eval_every, micro) = wholes;
        let config = config(|settings| {
            settings.model = ModelSpec::from(MlpSpec { hidden, dropout, ..MlpSpec::default() });
            settings.lr = Some(lr);
            settings.weight_decay = Some(decay);
            settings.batch_size = Some(batch);
            settings.seed = seed;
            settings.eval_every = eval_every;
            settings.micro_batch = micro;
            settings.class_weights = weights.into();
            (settings.devices_per_rank, settings.share_gpus, settings.zero) = gpus;
            settings.dtype = if gpus.1 { Precision::Bf16 } else { Precision::Tf32 };
            settings.data_on_device = if gpus.1 { Resident::On } else { Resident::Off };
            if steps { settings.steps = Some(seed >> 10) } else { settings.epochs = Some(batch) }
            if sgd {
                (settings.optimizer, settings.momentum) = (OptimizerKind::Sgd, Some(beta));
            } else {
                settings.beta1 = Some(beta);
            }
        });
        prop_assert_eq!(Config::from_toml(&config.to_toml()).unwrap(), config.with_defaults());
        let json: Config = serde_json::from_value(config.to_json().into()).unwrap();
        prop_assert_eq!(json, config.with_defaults());
    }
}

#[test]
fn the_settings_in_a_checkpoint_are_checked() {
    let saved = |change: fn(&mut serde_json::Map<String, Value>)| {
        let mut settings = Config::default().to_json();
        change(&mut settings);
        Config::from_checkpoint(&settings)
    };
    assert_eq!(saved(|_| ()).unwrap(), Config::default().with_defaults());
    let refusal = |change| saved(change).unwrap_err();
    let why = refusal(|settings| _ = settings.insert("more".into(), 1.into()));
    assert!(why.contains(r#""more""#), "{why}");
    let why = refusal(|settings| _ = settings.insert("batch-size".into(), 0.into()));
    assert!(why.contains("`batch-size`"), "{why}");
}
