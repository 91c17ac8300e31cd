//! Claims about `state.json` and `manifest.json` from untrusted sources.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{Scratch, save, state};
use crate::checkpoint::manifest::{FileEntry, Manifest};
use crate::checkpoint::{Best, Plateau, State};
use crate::tasks::BestBy;
use ddp_data::TaskSpec;

/// The state with `value` at `path`.
fn with(path: &str, value: Value) -> Result<State, String> {
    let mut json: Value = serde_json::from_slice(&state(3).to_bytes()).unwrap();
    let (parent, name) = path.rsplit_once('/').unwrap();
    let parent = json
        .pointer_mut(parent)
        .unwrap_or_else(|| panic!("no {path}"));
    parent.as_object_mut().unwrap().insert(name.into(), value);
    State::parse(json.to_string().as_bytes())
}

#[test]
fn a_state_reads_back_as_it_was_written() {
    let told = State {
        last: Some(Best {
            step: 3,
            loss: 0.1 + 0.2,
            accuracy: Some(0.7),
            by: Some((BestBy::Auc, 0.1 + 0.7)),
        }),
        progress: Plateau {
            best: Some(Best::default()),
            since: 2,
            step: 3,
        },
        ..state(3)
    };
    assert_eq!(State::parse(&told.to_bytes()).unwrap(), told);
    let names = ["a", "b", "c"].map(String::from).into();
    let classes = State {
        task: TaskSpec::named_classes(names),
        optimizer_since: 2,
        ..state(3)
    };
    assert_eq!(State::parse(&classes.to_bytes()).unwrap(), classes);
}

#[test]
fn an_evaluation_that_is_not_finite_is_left_out() {
    for loss in [f64::NAN, f64::INFINITY] {
        let told = State {
            last: Some(Best {
                step: 3,
                loss,
                ..Best::default()
            }),
            ..state(3)
        };
        assert_eq!(State::parse(&told.to_bytes()).unwrap(), state(3));
    }
}

#[test]
fn what_is_not_known_is_refused_by_name() {
    assert_eq!(
        with("/step", json!(4)).unwrap(),
        State {
            step: 4,
            ..state(3)
        }
    );
    for (path, part) in [
        ("/more", "`more`"),
        ("/position/more", "`more`"),
        ("/world/more", "`more`"),
        ("/task/regression/more", "task.regression.more"),
    ] {
        let why = with(path, json!(1)).unwrap_err();
        assert!(why.contains(part), "{path}: {why}");
    }
    let twice = String::from_utf8(state(3).to_bytes()).unwrap().replacen(
        "\"step\": 3",
        "\"step\": 3, \"step\": 4",
        1,
    );
    assert!(
        State::parse(twice.as_bytes())
            .unwrap_err()
            .contains("duplicate field")
    );
}

#[test]
fn another_format_is_refused_with_what_to_do() {
    for format in [0, 2, 1_u64 << 40] {
        let why = with("/format", json!(format)).unwrap_err();
        assert!(
            why.contains(&format!("of format {format}"))
                && why.contains("use the version that wrote it"),
            "{why}"
        );
    }
    assert!(
        with("/format", json!("1"))
            .unwrap_err()
            .contains("does not say its format")
    );
    let manifest =
        String::from_utf8(Manifest::new("ddp-train 0.8.0", 3, vec![]).to_bytes()).unwrap();
    let why = Manifest::parse(
        manifest
            .replace("\"format\": 1", "\"format\": 2")
            .as_bytes(),
    )
    .unwrap_err();
    assert!(why.contains("of format 2"), "{why}");
}

#[test]
fn numbers_that_cannot_be_are_refused_by_name() {
    for (path, value, part) in [
        ("/step", json!(u64::MAX), "step"),
        ("/step", json!(-1), "cannot be read"),
        ("/position/rows", json!(0), "position.rows = 0"),
        ("/position/batch", json!(0), "position.batch"),
        ("/world/ranks", json!(0), "world.ranks = 0"),
        ("/world/ranks", json!(1u64 << 60), "ranks"),
        ("/world/optimizer_parts", json!(7), "7 parts"),
        ("/world/devices", json!([]), "0 devices"),
        ("/row_shape", json!([]), ""),
        ("/row_shape", json!([0]), "shape [0]"),
        ("/row_shape", json!([1u64 << 40, 1u64 << 40]), "shape"),
        ("/task", json!({"regression": {"outputs": 0}}), "task"),
        (
            "/task",
            json!({"classification": {"classes": 3, "names": ["a"]}}),
            "task",
        ),
        (
            "/task",
            json!({"classification": {"classes": 3, "names": []}}),
            "task",
        ),
        ("/optimizer_since", json!(4), "optimizer_since = 4"),
        (
            "/normalization",
            json!({"shift": [0.0, 0.0], "scale": [1.0, 1.0]}),
            "(2, 2) numbers for 5 features",
        ),
        (
            "/normalization",
            json!({"shift": [0.0], "scale": [1e39]}),
            "out of range",
        ),
        (
            "/target_normalization",
            json!({"shift": [0.0, 0.0], "scale": [1.0, 1.0]}),
            "(2, 2) numbers for 3 targets",
        ),
        ("/columns", json!(["a"]), "1 columns for 5 features"),
        ("/schedule/learning_rate", json!(-1.0), "schedule"),
        ("/schedule/warmup_steps", json!(101), "schedule"),
        (
            "/best",
            json!({"step": 4, "loss": 1.0, "accuracy": null}),
            "evaluation",
        ),
    ] {
        match with(path, value.clone()) {
            // One number a row.
            Ok(state) => assert_eq!((part, state.row_shape.len()), ("", 0), "{path} = {value}"),
            Err(why) => assert!(
                !part.is_empty() && why.contains(part),
                "{path} = {value}: {why}"
            ),
        }
    }
}

#[test]
fn the_plan_of_features_comes_back_and_has_to_fit() {
    let plain = state(1);
    let text = String::from_utf8(plain.to_bytes()).unwrap();
    // As versions up to 0.6 wrote it.
    assert!(!text.contains("\"plan\""), "{text}");
    let column = |name: &str, values: Option<&[&str]>| ddp_data::ColumnPlan {
        name: name.into(),
        values: values.map(|values| values.iter().map(|value| value.to_string()).collect()),
        more: ddp_data::MoreFeatures::None,
    };
    let columns = vec![
        column("town", Some(&["Oslo", "Rome", "Ulm"])),
        column("a", None),
        column("b", None),
    ];
    let plan = ddp_data::FeaturePlan {
        columns: Some(columns),
        fill: Some(vec![0.1; 5]),
    };
    let told = State { plan, ..plain };
    assert_eq!(State::parse(&told.to_bytes()).unwrap(), told);
    for (path, value, part) in [
        (
            "/plan/fill",
            json!([1.0]),
            "1 numbers for what is missing in 5 features",
        ),
        ("/plan/columns", json!([]), "columns for 0 of 5 features"),
        (
            "/plan/columns/0/values",
            json!(["a", "b", "a"]),
            "a column twice",
        ),
        ("/plan/columns/0/most", json!(1), "has plan.columns.most"),
    ] {
        let mut json = serde_json::to_value(&told).unwrap();
        let (parent, name) = path.rsplit_once('/').unwrap();
        json.pointer_mut(parent).unwrap()[name] = value;
        let why = State::parse(json.to_string().as_bytes()).unwrap_err();
        assert!(why.contains(part), "{path}: {why}");
    }
}

#[test]
fn a_manifest_has_one_form_only() {
    let entry = FileEntry {
        name: "a".into(),
        bytes: 3,
        blake3: "00".repeat(32),
    };
    let manifest = Manifest::new("ddp-train 0.8.0", 3, vec![entry]);
    let text = String::from_utf8(manifest.to_bytes()).unwrap();
    assert_eq!(Manifest::parse(text.as_bytes()).unwrap(), manifest);
    for other in [
        text.trim_end().to_string(),
        text.replace("  ", " "),
        format!("{text}\n"),
        text.replace(": 3", ": 03"),
    ] {
        Manifest::parse(other.as_bytes()).unwrap_err();
    }
    assert!(
        Manifest::parse(&b"[".repeat(100_000))
            .unwrap_err()
            .contains("cannot be read")
    );
}

/// A short version of the fuzz target in `ddp/fuzz`.
#[test]
fn changed_bytes_never_panic() {
    let scratch = Scratch::new();
    save(scratch.path(), &[1]);
    let folder = crate::checkpoint::folder(scratch.path(), 1);
    let files: Vec<Vec<u8>> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| std::fs::read(entry.unwrap().path()).unwrap())
        .collect();
    let change = (
        0usize..files.len(),
        any::<proptest::sample::Index>(),
        0usize..9,
        proptest::collection::vec(any::<u8>(), 0..9),
    );
    proptest!(ProptestConfig::with_cases(2000), |((file, at, gone, new) in change)| {
        let mut bytes = files[file].clone();
        let at = at.index(bytes.len());
        bytes.splice(at..(at + gone).min(files[file].len()), new);
        crate::checkpoint::read_as_anything(&bytes);
    });
}
