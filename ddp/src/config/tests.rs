//! Claims about configurations.

use proptest::prelude::*;

use super::*;
use crate::data::open;

fn flags(change: impl FnOnce(&mut Flags)) -> Flags {
    let mut flags = Flags::default();
    change(&mut flags);
    flags
}

fn config(change: impl FnOnce(&mut Flags)) -> Config {
    Config::resolve(flags(change)).unwrap()
}

fn data(spec: &str) -> Data {
    open(&spec.parse().unwrap()).unwrap()
}

#[test]
fn a_run_in_epochs_becomes_steps_once_the_data_are_known() {
    let glyphs = data("glyphs,rows=1000");
    let plan = Config::default().plan(&glyphs).unwrap();
    assert_eq!((plan.steps, plan.warmup_steps, plan.eval_every), (40, 4, 8));
    let plan = config(|flags| flags.steps = Some(5000)).plan(&glyphs).unwrap();
    assert_eq!((plan.steps, plan.warmup_steps, plan.eval_every), (5000, 100, 8));
    let plan = config(|flags| (flags.steps, flags.eval_every) = (Some(0), Some(0))).plan(&glyphs).unwrap();
    assert_eq!((plan.steps, plan.warmup_steps, plan.eval_every), (0, 0, 0));
}

#[test]
fn what_does_not_fit_the_data_is_refused_before_training() {
    let (glyphs, numbers) = (data("glyphs,rows=10"), data("synthetic:regression,rows=10"));
    let refusal = |config: Config, data: &Data| {
        let error = config.plan(data).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    };
    let weights = || config(|flags| flags.class_weights = Some(List(vec![1.0, 2.0])));
    let text = refusal(weights(), &glyphs);
    assert!(text.contains("--class-weights 2 of them: expected 10 weights"), "{text}");
    assert!(refusal(weights(), &numbers).contains("data that have classes"));
    assert!(refusal(config(|flags| flags.label_smoothing = Some(0.1)), &numbers).contains("--label-smoothing 0.1"));
    assert!(refusal(config(|flags| flags.drop_last = Some(true)), &glyphs).contains("--drop-last"));
    assert!(refusal(config(|flags| flags.warmup_steps = Some(6)), &glyphs).contains("at most the 5 steps"));
    assert!(
        refusal(config(|flags| (flags.epochs, flags.batch_size) = (Some(WHOLE_MAX), Some(1))), &glyphs)
            .contains("--epochs")
    );
}

#[test]
fn freezing_goes_by_whole_names() {
    let config = config(|flags| flags.freeze = Some("0,2.bias,4.".parse().unwrap()));
    let names = ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "40.weight", "02.bias"];
    let frozen: Vec<_> = names.into_iter().filter(|name| config.is_frozen(name)).collect();
    assert_eq!(frozen, ["0.weight", "0.bias", "2.bias", "4.weight"]);
    config.check_freeze(names.into_iter()).unwrap();
    let text = config.check_freeze(["0.weight", "2.bias"].into_iter()).unwrap_err().to_string();
    assert!(text.contains("--freeze 4.:") && text.contains("0.weight, 2.bias"), "{text}");
}

#[test]
fn the_saved_file_is_the_flags_with_every_value_settled() {
    let text = Config::default().to_toml();
    assert!(text.contains("hidden = [256, 128]\n"), "{text}");
    assert!(
        text.contains("data = \"glyphs,rows=20000,held-out=2000,seed=0\"\n") && text.contains("epochs = 5\n"),
        "{text}"
    );
    assert!(!text.contains("momentum") && !text.contains("steps = "), "{text}");
    assert_eq!(Config::from_toml(&text).unwrap(), Config::default());
    assert_eq!(Config::from_toml("").unwrap(), Config::default());
}

#[test]
fn a_file_is_checked_as_flags_are() {
    for (text, part) in [
        ("lr = -1.0", "--lr -1"),
        ("learning-rate = 1.0", "learning-rate"),
        ("lr = \"fast\"", "fast"),
        ("optimizer = \"sgd\"\nbeta1 = 0.5", "--beta1"),
        ("data = \"synthetic:mnist\"", "mnist"),
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
    let fields = Config::default().trajectory();
    let has = |name: &str| fields.iter().any(|(field, _)| field == name);
    for name in [
        "seed",
        "lr",
        "batch-size",
        "data",
        "hidden",
        "reduce-dtype",
        "bucket-mb",
        "epochs",
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
    let base = Config::default().trajectory_text();
    let own = config(|flags| {
        flags.out = Some("elsewhere".into());
        flags.threads = Some(3);
        flags.progress = Some(When::Never);
        flags.log_level = Some(LogLevel::Error);
        flags.timeout_s = Some(1.0);
        flags.share_gpus = Some(true);
    });
    assert_eq!(own.trajectory_text(), base);
    for changed in [
        config(|flags| flags.seed = Some(1)),
        config(|flags| flags.devices_per_rank = Some(2)),
        config(|flags| flags.dtype = Some(Precision::Tf32)),
        config(|flags| flags.data_on_device = Some(Resident::Off)),
        config(|flags| flags.graph = Some(GraphChoice::Off)),
        config(|flags| flags.zero = Some(1)),
    ] {
        assert_ne!(changed.trajectory_text(), base);
    }
    let cuda = |index| config(|flags| flags.device = Some(DeviceChoice::CudaAt(index)));
    assert_eq!(cuda(0).trajectory_text(), cuda(1).trajectory_text());
    assert_ne!(cuda(0).trajectory_text(), base);
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
        let config = config(|flags| {
            flags.hidden = Some(List(hidden));
            flags.dropout = Some(dropout);
            flags.lr = Some(lr);
            flags.weight_decay = Some(decay);
            flags.batch_size = Some(batch);
            flags.seed = Some(seed);
            flags.eval_every = eval_every;
            flags.micro_batch = micro;
            flags.class_weights = Some(List(weights));
            (flags.devices_per_rank, flags.share_gpus, flags.zero) = (Some(gpus.0), Some(gpus.1), Some(gpus.2));
            flags.dtype = Some(if gpus.1 { Precision::Bf16 } else { Precision::Tf32 });
            flags.data_on_device = Some(if gpus.1 { Resident::On } else { Resident::Off });
            if steps { flags.steps = Some(seed) } else { flags.epochs = Some(batch) }
            if sgd {
                (flags.optimizer, flags.momentum) = (Some(OptimizerKind::Sgd), Some(beta));
            } else {
                flags.beta1 = Some(beta);
            }
        });
        prop_assert_eq!(Config::from_toml(&config.to_toml()).unwrap(), config.clone());
        let json: Config = serde_json::from_value(config.to_json()).unwrap();
        prop_assert_eq!(json, config);
    }
}
