//! Claims about the options of a run.

use super::*;
use crate::trainer::setup;
use ddp_comm::World;

fn changed(data: &str, change: impl FnOnce(&mut Config)) -> (Config, Data) {
    let mut options = Config {
        data: data.parse().unwrap(),
        ..Config::default()
    };
    change(&mut options);
    let data = setup::open(&options, &World::single().unwrap(), None).unwrap();
    (options, data)
}

#[test]
fn a_run_in_epochs_becomes_steps_once_the_data_are_known() {
    let plan = |change: fn(&mut Config)| {
        let (options, data) = changed("glyphs,rows=1000", change);
        let plan = options.plan(&data).unwrap();
        (plan.steps, plan.warmup_steps, plan.eval_every)
    };
    assert_eq!(plan(|_| ()), (40, 4, 8));
    assert_eq!(plan(|options| options.steps = Some(5000)), (5000, 100, 8));
    assert_eq!(
        plan(|options| (options.steps, options.eval_every) = (Some(0), Some(0))),
        (0, 0, 0)
    );
}

#[test]
fn options_that_do_not_fit_the_data_are_refused() {
    let (classes, numbers) = ("glyphs,rows=10", "synthetic:regression,rows=10");
    let refusal = |data: &str, change: fn(&mut Config)| {
        let (options, data) = changed(data, change);
        let error = options.plan(&data).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    };
    let weights = |options: &mut Config| options.class_weights = vec![1.0, 2.0].into();
    for (text, part) in [
        (
            refusal(classes, weights),
            "`class-weights` 1,2: expected 10 weights",
        ),
        (
            refusal(numbers, weights),
            "`class-weights` 1,2: expected classes",
        ),
        (
            refusal(numbers, |options| options.label_smoothing = 0.1),
            "`label-smoothing` 0.1",
        ),
        (
            refusal(classes, |options| options.drop_last = true),
            "`drop-last`",
        ),
        (
            refusal(classes, |options| options.warmup_steps = Some(6)),
            "at most the 5 steps",
        ),
        (
            refusal(classes, |options| {
                (options.epochs, options.batch_size) = (Some(STEPS_MAX), Some(1))
            }),
            "`epochs`",
        ),
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn names_of_layers_freeze_their_parameters() {
    let (options, _) = changed("glyphs,rows=10", |options| {
        options.freeze = ["0", "2.bias", "4."].map(String::from).into();
    });
    let names = [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
        "4.weight",
        "40.weight",
        "02.bias",
    ];
    let frozen: Vec<_> = names
        .into_iter()
        .filter(|name| options.is_frozen(name))
        .collect();
    assert_eq!(frozen, ["0.weight", "0.bias", "2.bias", "4.weight"]);
    options.check_freeze(&names).unwrap();
    let text = options.check_freeze(&["0.weight", "2.bias"]).unwrap_err();
    let text = text.to_string();
    assert!(
        text.contains("`freeze` 4.:") && text.contains("0.weight, 2.bias"),
        "{text}"
    );
}

/// `group` took patterns, and `freeze` only names.
#[test]
fn patterns_freeze_what_they_match() {
    let names = ["blocks.0.up.weight", "blocks.10.up.weight", "head.bias"];
    for (pattern, expected) in [
        ("*.bias", vec!["head.bias"]),
        ("blocks.?", vec!["blocks.0.up.weight"]),
        ("blocks.*", names[..2].to_vec()),
    ] {
        let options = Config {
            freeze: vec![pattern.into()],
            ..Config::default()
        };
        let frozen = names.into_iter().filter(|name| options.is_frozen(name));
        assert_eq!(frozen.collect::<Vec<_>>(), expected, "{pattern}");
        options.check_freeze(&names).unwrap();
    }
    let options = Config {
        freeze: vec!["[".into()],
        ..Config::default()
    };
    let text = options.check_freeze(&names).unwrap_err().to_string();
    assert!(
        text.contains("`freeze` [: expected a name or pattern"),
        "{text}"
    );
}
