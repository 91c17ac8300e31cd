//! Claims about the options of a run.

use super::*;
use crate::trainer::build;
use ddp_comm::World;
use safetensors::Dtype::{F32, I64};
use safetensors::tensor::TensorView;

fn changed(data: &str, change: impl FnOnce(&mut Config)) -> (Config, Data) {
    let mut options = Config {
        data: data.parse().unwrap(),
        ..Config::default()
    };
    change(&mut options);
    let data = build::open(&options, None, &World::single().unwrap(), None).unwrap();
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
                (options.epochs, options.batch_size) = (Some(EXACT_MAX), Some(1))
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
        options.freeze = Some(["0", "2.bias", "4."].map(String::from).into());
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
            freeze: Some(vec![pattern.into()]),
            ..Config::default()
        };
        let frozen = names.into_iter().filter(|name| options.is_frozen(name));
        assert_eq!(frozen.collect::<Vec<_>>(), expected, "{pattern}");
        options.check_freeze(&names).unwrap();
    }
    let options = Config {
        freeze: Some(vec!["[".into()]),
        ..Config::default()
    };
    let text = options.check_freeze(&names).unwrap_err().to_string();
    assert!(
        text.contains("`freeze` [: expected a name or pattern"),
        "{text}"
    );
}

#[test]
fn a_best_figure_that_held_out_rows_do_not_have_is_refused_by_name() {
    let (two, ten) = (
        "synthetic:classification,classes=2,rows=40",
        "glyphs,rows=10",
    );
    let numbers = "synthetic:regression,rows=10";
    let plan = |data: &str, best, stop_after| {
        let (options, data) = changed(data, |options| {
            (options.best, options.stop_after) = (best, stop_after);
        });
        options.plan(&data).map_err(|error| {
            assert_eq!(error.exit_code(), 2);
            error.to_string()
        })
    };
    use BestBy::{Accuracy, Auc, Balanced, Loss};
    for (data, best) in [
        (two, Auc),
        (ten, Balanced),
        (ten, Accuracy),
        (numbers, Loss),
    ] {
        plan(data, best, Some(1)).unwrap();
    }
    let [two_none, ten_none] = [two, ten].map(|data| format!("{data},held-out=0"));
    plan(&two_none, Loss, None).unwrap();
    for (data, best, stop_after, part) in [
        (
            ten,
            Auc,
            None,
            "`best` auc: expected loss or accuracy or balanced for",
        ),
        (
            numbers,
            Accuracy,
            None,
            "`best` accuracy: expected loss for regression",
        ),
        (&*two_none, Auc, None, "`best`: expected held-out rows"),
        (
            &*ten_none,
            Loss,
            Some(3),
            "`stop-after`: expected held-out rows",
        ),
    ] {
        let text = plan(data, best, stop_after).unwrap_err();
        assert!(text.contains(part), "{text}");
    }
    // Files of which each row is counted, and one class is held out.
    let folder = std::env::temp_dir().join(format!("ddp-best-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = |name: &str, classes: [i64; 2]| {
        let rows = (0..40).map(|row| row as f32);
        let x: Vec<u8> = rows.flat_map(f32::to_le_bytes).collect();
        let labels = (0..40).map(|row| classes[row % 2]);
        let y: Vec<u8> = labels.flat_map(i64::to_le_bytes).collect();
        let arrays = [
            ("x", TensorView::new(F32, vec![40, 1], &x).unwrap()),
            ("y", TensorView::new(I64, vec![40], &y).unwrap()),
        ];
        let path = folder.join(name);
        std::fs::write(&path, safetensors::serialize(arrays, None).unwrap()).unwrap();
        path.display().to_string()
    };
    let (train, held_out) = (
        file("train.safetensors", [0, 1]),
        file("held-out.safetensors", [0; 2]),
    );
    let (options, data) = changed(&train, |options| {
        (options.best, options.val_data) = (Auc, Some(held_out.parse().unwrap()));
    });
    std::fs::remove_dir_all(folder).unwrap();
    let text = options.plan(&data).unwrap_err().to_string();
    assert!(
        text.contains("`best` auc: expected held-out rows of both classes"),
        "{text}"
    );
}
