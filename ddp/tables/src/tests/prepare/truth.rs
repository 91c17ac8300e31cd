//! Wrong data never train in silence: labels that leave the task open are refused, what was
//! understood is said, and the fingerprint changes with every number.

use super::*;

/// A table of `rows` rows: a feature, and the label of each row.
fn table(scratch: &Scratch, name: &str, rows: usize, label: impl Fn(usize) -> String) -> PathBuf {
    let row = |row: usize| format!("{},{}\n", row as f64 / 8.0, label(row));
    let text: String = (0..rows).map(row).collect();
    put(scratch, name, &format!("x,y\n{text}"))
}

fn learned(data: &Path, task: Option<TaskKind>) -> Result<String, (u8, String)> {
    let request = DataRequest {
        task,
        ..request(data, None)
    };
    let data = prepare(&request, &Alone);
    let data = data.map_err(|error| (error.exit_code(), error.to_string()))?;
    Ok(data.train.task().to_string())
}

#[track_caller]
fn assert_refused(outcome: Result<String, (u8, String)>, parts: &[&str]) {
    let (code, text) = outcome.unwrap_err();
    let missing: Vec<_> = parts.iter().filter(|part| !text.contains(**part)).collect();
    assert!(
        code == 65 && missing.is_empty(),
        "{missing:?} in {code}: {text}"
    );
}

#[test]
fn one_cell_that_is_no_number_does_not_make_numbers_classes() {
    let scratch = Scratch::new();
    for cell in ["NA", "?", "null", "None", "-", "$120.5", "12O.5"] {
        let label = |row| match row {
            100 => cell.to_string(),
            _ => format!("{}.5", row * 3),
        };
        let path = table(&scratch, "t.csv", 200, label);
        let shown = format!("{cell:?}");
        let parts = [
            "t.csv, line 102, column \"y\"",
            &shown,
            "1 of 200",
            "`task`",
            "`labels`",
        ];
        assert_refused(learned(&path, None), &parts);
        let parts = ["t.csv, line 102, column \"y\": expected a number", &shown];
        assert_refused(learned(&path, Some(TaskKind::Regression)), &parts);
        let allowed = learned(&path, Some(TaskKind::Classification));
        assert_eq!(allowed.unwrap(), "classification into 200 classes");
    }
    // However many numbers are missing.
    let path = table(&scratch, "t.csv", 40, |row| match row % 4 {
        0 => "n/a".into(),
        rest => rest.to_string(),
    });
    assert_refused(
        learned(&path, None),
        &["10 of 40", "line 2,", "line 6,", "line 10,", "; …"],
    );
}

#[test]
fn prices_and_texts_that_all_differ_are_no_classes() {
    let scratch = Scratch::new();
    type LabelOf = fn(usize) -> String;
    let cases: [(LabelOf, &[&str]); 5] = [
        (
            |row| format!("\"{},000\"", row % 9 + 1),
            &["1200 of 1200 are not", "write plain numbers"],
        ),
        (
            |row| format!("\"{},5\"", row % 9),
            &["1200 of 1200", "plain numbers with a point"],
        ),
        (
            |row| format!("${}", row % 2 + 1),
            &["line 2,", "1200 of 1200", "plain numbers"],
        ),
        (
            |row| ["\"1,000\"", "900", "NA"][row % 3].into(),
            &["800 of 1200", "thousands"],
        ),
        (|row| format!("F{row}"), &["1200 classes for 1200 rows"]),
    ];
    for (label, parts) in cases {
        let path = table(&scratch, "p.csv", 1200, label);
        assert_refused(learned(&path, None), &[parts, &["`task`"]].concat());
        learned(&path, Some(TaskKind::Classification)).unwrap();
    }
    let path = table(&scratch, "p.csv", 30, |row| format!("F{row}"));
    assert_refused(learned(&path, None), &["30 classes for 30 rows"]);
    let path = table(&scratch, "p.csv", 400, |row| format!("${}", 91_100 + row));
    assert_refused(
        learned(&path, Some(TaskKind::Regression)),
        &["got \"$91100\"", "help: write plain numbers"],
    );
}

#[test]
fn one_fraction_does_not_make_classes_numbers() {
    let scratch = Scratch::new();
    let label = |row| match row {
        7 => "0.5".to_string(),
        _ => (row % 3).to_string(),
    };
    let path = table(&scratch, "t.csv", 60, label);
    assert_refused(
        learned(&path, None),
        &["line 9, column \"y\": 0.5", "1 of 60", "`task`"],
    );
    let given = learned(&path, Some(TaskKind::Regression));
    assert_eq!(given.unwrap(), "regression of 1 number");
    // Prices, of which few are round, and few have cents.
    for with_cents in [1, 9] {
        let price = |row: usize| {
            if row % 10 < with_cents {
                format!("{row}.25")
            } else {
                format!("{}", row * 17)
            }
        };
        let path = table(&scratch, "t.csv", 4000, price);
        assert_eq!(learned(&path, None).unwrap(), "regression of 1 number");
    }
}

#[test]
fn as_many_classes_as_a_tenth_of_the_rows_are_not_guessed() {
    let scratch = Scratch::new();
    let prices = table(&scratch, "t.csv", 1200, |row| (row / 9).to_string());
    let parts = [
        "t.csv, column \"y\"",
        "134 classes for 1200 rows",
        "`task` to regression",
    ];
    assert_refused(learned(&prices, None), &parts);
    let names = table(&scratch, "n.csv", 1200, |row| format!("name {}", row / 9));
    assert_refused(
        learned(&names, None),
        &["134 classes for 1200 rows", "`task` to classification"],
    );
    for task in [TaskKind::Classification, TaskKind::Regression] {
        learned(&prices, Some(task)).unwrap();
    }
    let few = table(&scratch, "t.csv", 1200, |row| (row % 100).to_string());
    assert_eq!(
        learned(&few, None).unwrap(),
        "classification into 100 classes"
    );
}

#[test]
fn what_was_understood_is_said() {
    let scratch = Scratch::new();
    let path = put(&scratch, "t.csv", "a,b,c,price\n1,2,3,12.5\n4,5,6,99\n");
    let said = |request: DataRequest| prepare(&request, &Alone).unwrap().description;
    assert_eq!(
        said(request(&path, None)),
        format!(
            "{}: 2 rows to train on, 0 held out, label column \"price\", regression of 1 number (12.5 to 99.0), \
             3 features: \"a\", \"b\", \"c\"",
            path.display()
        )
    );
    let part = PathBuf::from(format!("{}#a,c", path.display()));
    let text = said(request(&part, None));
    assert!(
        text.ends_with("2 features: \"a\", \"c\" (1 left out: \"b\")"),
        "{text}"
    );
    let kinds = put(&scratch, "k.csv", "a,kind\n1,ant\n4,bee\n");
    let text = said(request(&kinds, None));
    assert!(
        text.contains("classification into 2 classes (\"ant\", \"bee\"), 1 feature"),
        "{text}"
    );
}

#[test]
fn the_fingerprint_changes_with_any_number_and_not_with_the_format() {
    let scratch = Scratch::new();
    let print = |request: &DataRequest, size| {
        let all = ranks(size, |world| {
            let data = prepare(request, world).unwrap();
            data.train.fingerprint().unwrap()
        });
        assert!(all.iter().all(|of_rank| *of_rank == all[0]));
        all[0].clone()
    };
    let numbers = |odd: usize| -> Vec<f32> {
        (0..30_000)
            .map(|row| row as f32 / 4.0 + f32::from(u8::from(row == odd)))
            .collect()
    };
    let targets = |odd: usize| -> Vec<f32> {
        (0..30_000)
            .map(|row| (row % 77) as f32 + if row == odd { 0.5 } else { 0.25 })
            .collect()
    };
    let array = |name: &str, shape: &[usize], numbers: &[f32]| {
        npy(
            &scratch,
            name,
            "<f4",
            shape,
            &bytes(numbers, f32::to_le_bytes),
        )
    };
    let x = array("x.npy", &[30_000, 1], &numbers(usize::MAX));
    let y = array("y.npy", &[30_000], &targets(usize::MAX));
    let asked = request(&x, Some(&y));
    let first = print(&asked, 1);
    assert_eq!(
        (print(&asked, 2), print(&asked, 3)),
        (first.clone(), first.clone())
    );
    let of_table = table(&scratch, "t.csv", 30_000, |_| String::new());
    let lines = numbers(usize::MAX).into_iter().zip(targets(usize::MAX));
    let lines: String = lines.map(|(x, y)| format!("{x},{y}\n")).collect();
    fs::write(&of_table, format!("x,y\n{lines}")).unwrap();
    assert_eq!(print(&request(&of_table, None), 2), first);
    // Rows that the samples of earlier versions did not see.
    let other = array("y.npy", &[30_000], &targets(12_345));
    assert_ne!(print(&request(&x, Some(&other)), 2), first);
    array("y.npy", &[30_000], &targets(usize::MAX));
    let other = array("x.npy", &[30_000, 1], &numbers(12_345));
    assert_ne!(print(&request(&other, Some(&y)), 2), first);
}

#[test]
fn a_model_without_names_does_not_take_a_label_as_a_feature() {
    let scratch = Scratch::new();
    let path = put(&scratch, "t.csv", "a,y\n1,0\n4,1\n");
    let trained = |needs_labels| Trained {
        task: TaskSpec::numbered_classes(2),
        row_shape: vec![2],
        normalization: None,
        plan: FeaturePlan::default(),
        columns: None,
        label: None,
        needs_labels,
    };
    let error = |path: &Path, needs_labels| {
        let request = DataRequest {
            trained: Some(trained(needs_labels)),
            ..request(path, None)
        };
        prepare(&request, &Alone).map_err(|error| (error.exit_code(), error.to_string()))
    };
    let (code, text) = error(&path, false).unwrap_err();
    assert!(code == 65 && text.contains("t.csv#a,b"), "{code}: {text}");
    let named = PathBuf::from(format!("{}#a,y", path.display()));
    assert_eq!(error(&named, false).unwrap().train.row_shape(), [2]);
    let (code, text) = error(&path, true).unwrap_err();
    assert!(
        code == 65 && text.contains("expected 2 columns of features"),
        "{code}: {text}"
    );
}

#[test]
fn words_for_missing_values_are_no_class() {
    let scratch = Scratch::new();
    let label = |row: usize| match row {
        9 | 70 => "NA".to_string(),
        _ => ["ant", "bee"][row % 2].to_string(),
    };
    let path = table(&scratch, "t.csv", 300, label);
    let parts = ["2 of 300", "line 11, column \"y\": \"NA\"", "`task`"];
    assert_refused(learned(&path, None), &parts);
    let given = learned(&path, Some(TaskKind::Classification));
    assert_eq!(given.unwrap(), "classification into 3 classes");
}

#[test]
fn a_rare_number_far_from_the_others_is_no_class_wherever_it_stands() {
    let scratch = Scratch::new();
    const ROWS: usize = 20_000;
    for (first, kinds, odd) in [(0, 3, 99), (1, 3, 99), (0, 3, -1), (1, 3, -1), (5, 3, 50)] {
        for place in [5, ROWS - 5] {
            let label = |row: usize| match row {
                _ if row == place => odd,
                _ => first + (row % kinds) as i64,
            };
            let path = table(&scratch, "t.csv", ROWS, |row| label(row).to_string());
            let line = format!("line {}, column \"y\": {odd}", place + 2);
            let range = format!("from {first} to {}", first + kinds as i64 - 1);
            let parts = [range.as_str(), &line, "1 of 20000", "`task`"];
            assert_refused(learned(&path, None), &parts);
        }
    }
    let task = |label: &dyn Fn(usize) -> i64| {
        let path = table(&scratch, "t.csv", 400, |row| label(row).to_string());
        learned(&path, None).unwrap()
    };
    let three = "classification into 3 classes";
    // Near the others, or as frequent as they are.
    assert_eq!(task(&|row| [5, 6, 5, 9][row.min(3)]), three);
    assert_eq!(task(&|row| row as i64 % 3 - 1), three);
    assert_eq!(task(&|row| [1, 2, 99][row % 3]), three);
}

#[test]
fn numbers_that_are_all_the_same_as_f32_are_not_learned() {
    let scratch = Scratch::new();
    let parts = [
        "column \"y\": expected labels that differ, got 1700000000.0",
        "offset",
    ];
    let time = |row: usize| format!("{}.5", 1_700_000_000 + row % 60);
    assert_refused(learned(&table(&scratch, "t.csv", 200, time), None), &parts);
    let same = table(&scratch, "s.csv", 30, |_| "2.5".into());
    assert_refused(learned(&same, None), &["got 2.5 as f32 in all 30 rows"]);
}
