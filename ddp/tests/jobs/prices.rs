//! Numbers of an ordinary size, such as prices: learned in standardized units, and predicted in
//! their own.

use std::fs;

use serde_json::{Value, json};

use crate::reading::forge;
use crate::support::job::Folder;
use crate::support::metrics_log::{model_bytes, number};
use crate::using::{bytes, evaluated, table};

/// The flags of the README for a table with a number to learn.
const RUN: &str = "--data prices.csv --labels price --drop id --categorical auto --missing mean \
                   --normalize standard --val-split 0.2 --epochs 20 --batch-size 32 --device cpu";

/// A folder with `prices.csv`, whose prices are from 60,000 to 243,000.
fn folder(name: &str) -> Folder {
    let folder = Folder::new(name);
    let row = |row: u32| {
        let (town, place) = [("Bern", 900), ("Oslo", 600), ("Rome", 300)][row as usize % 3];
        let size = 50 + row * 37 % 121;
        format!("F{row},{town},{size},{}.5\n", 45_000 + size * (place + 250))
    };
    let text = "id,town,size,price\n".to_string() + &(0..600).map(row).collect::<String>();
    fs::write(folder.path().join("prices.csv"), text).unwrap();
    folder
}

#[test]
fn prices_are_learned_by_the_flags_of_the_readme() {
    let folder = folder("prices");
    let ended = folder.alone(&format!("{RUN} --out OUT")).run();
    ended.assert_well();
    assert!(
        ended
            .stderr
            .contains("1 is the loss of predicting the mean"),
        "{ended}"
    );
    let use_it = "--checkpoint OUT --data prices.csv --device cpu";
    folder
        .alone(&format!("predict {use_it} --out a.csv"))
        .run()
        .assert_well();
    let column = |name: &str, column: usize| -> Vec<f64> {
        let lines = table(&folder, name);
        let cells = lines[1..]
            .iter()
            .map(|line| f64::from(line[column].parse::<f32>().unwrap()));
        cells.collect()
    };
    let (predicted, prices) = (column("a.csv", 1), column("prices.csv", 3));
    let found = evaluated(folder.alone(&format!("eval {use_it} --json")));
    let rows = prices.len() as f64;
    let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / rows;
    let apart: Vec<f64> = predicted.iter().zip(&prices).map(|(a, b)| a - b).collect();
    let squared = mean(&mut apart.iter().map(|a| a * a));
    let middle = mean(&mut prices.iter().copied());
    let variance = mean(&mut prices.iter().map(|b| (b - middle) * (b - middle)));
    let expected = [
        ("mean_squared_error", squared),
        ("root_mean_squared_error", squared.sqrt()),
        (
            "mean_absolute_error",
            mean(&mut apart.iter().map(|a| a.abs())),
        ),
        ("r2", 1.0 - squared / variance),
    ];
    // 600 additions in f64 in another order, and a squared mean ten times the variance.
    for (name, value) in expected {
        let got = number(&found, name);
        assert!((got / value - 1.0).abs() < 1e-9, "{name}: {got} {value}");
    }
    // Predicting the mean has an R² of 0.
    assert!(number(&found, "r2") > 0.99, "{found}");
    let ended = folder.alone(&format!("eval {use_it}")).run();
    assert!(ended.stdout.contains("R² 0.999"), "{ended}");
    let shown = folder.alone("inspect OUT/checkpoints/step-00000300").run();
    let parts = [
        "standardized: (label - ",
        "in the units of the labels: model(x) / ",
    ];
    assert!(
        parts.iter().all(|part| shown.stdout.contains(part)),
        "{shown}"
    );
    // What torch gives: the state has the numbers.
    let state = state(&folder);
    let shift = state["target_normalization"]["shift"][0].as_f64().unwrap();
    assert!((60_000.0..243_000.0).contains(&shift), "{state}");
}

fn state(folder: &Folder) -> Value {
    let path = folder.checkpoint(300).join("state.json");
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn prices_as_they_are_get_a_warning_with_the_flag() {
    let folder = folder("prices-plain");
    let plain = RUN.replace("--normalize standard", "--normalize unit");
    let ended = folder.alone(&format!("{plain} --out OUT --dry-run")).run();
    ended.assert_well();
    let parts = [
        "expected numbers of a size near 1",
        "help: set --normalize to standard",
    ];
    assert!(
        parts.iter().all(|part| ended.stderr.contains(part)),
        "{ended}"
    );
}

#[test]
fn predictions_and_a_resumed_run_have_the_same_bytes() {
    let folder = folder("prices-same");
    let run = RUN.replace("--epochs 20", "--schedule constant --warmup-steps 5");
    folder
        .alone(&format!("{run} --steps 40 --out OUT"))
        .run()
        .assert_well();
    let predict = "predict --checkpoint OUT --data prices.csv --device cpu --out";
    let eval = "eval --checkpoint OUT --data prices.csv --device cpu --json";
    folder
        .alone(&format!("{predict} one.csv"))
        .run()
        .assert_well();
    folder
        .together(&format!("{predict} two.csv"))
        .run()
        .assert_well();
    assert!(bytes(&folder, "one.csv") == bytes(&folder, "two.csv"));
    assert_eq!(
        evaluated(folder.alone(eval)),
        evaluated(folder.together(eval))
    );
    for steps in [25, 40] {
        let words = format!("{run} --steps {steps} --out part --resume auto");
        folder.alone(&words).run().assert_well();
    }
    let part = folder.path().join("part");
    assert!(model_bytes(&folder.out(), 40) == model_bytes(&part, 40));
}

/// Versions up to 0.6 standardized features only. Features that are -1 and 1 stay as they are, so
/// that a run without normalization is a run of such a version once its state says so.
#[test]
fn a_run_of_a_version_that_scaled_features_only_goes_on_as_before() {
    let folder = Folder::new("prices-old");
    let row = |row: u32| format!("{},{}.5\n", row as i32 % 2 * 2 - 1, row % 2 * 300 + row % 7);
    let text = "a,y\n".to_string() + &(0..64).map(row).collect::<String>();
    fs::write(folder.path().join("old.csv"), text).unwrap();
    let run = "--data old.csv --plain --hidden 4 --batch-size 16 --schedule constant --warmup-steps 1 --device cpu";
    let whole = format!("{run} --steps 8 --out OUT");
    folder.alone(&whole).run().assert_well();
    folder
        .alone(&format!("{run} --steps 4 --out old"))
        .run()
        .assert_well();
    let old = folder.path().join("old");
    let checkpoint = old.join("checkpoints/step-00000004");
    for (path, value) in [
        ("/normalization", json!({ "shift": [0.0], "scale": [1.0] })),
        ("/config/normalize", json!("standard")),
    ] {
        let state = fs::read(checkpoint.join("state.json")).unwrap();
        forge(&checkpoint, &state, path, &value);
    }
    let log = fs::read_to_string(old.join("metrics.jsonl")).unwrap();
    let forged = log.replace(r#""normalize":"none""#, r#""normalize":"standard""#);
    assert!(forged != log);
    fs::write(old.join("metrics.jsonl"), forged).unwrap();
    let words = format!("{run} --normalize standard --steps 8 --out old --resume auto");
    folder.alone(&words).run().assert_well();
    assert!(model_bytes(&folder.out(), 8) == model_bytes(&old, 8));
    for (checkpoint, name) in [("OUT", "a.csv"), ("old", "b.csv")] {
        let words =
            format!("predict --checkpoint {checkpoint} --data old.csv --device cpu --out {name}");
        folder.alone(&words).run().assert_well();
    }
    assert!(bytes(&folder, "a.csv") == bytes(&folder, "b.csv"));
}
