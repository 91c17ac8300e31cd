//! Tables as people have them: columns of texts, missing cells, columns to leave out.

mod labels;

use ddp_data::{ColumnPlan, TableSettings};

use super::*;

const TRAIN: &str = "id,town,age,rooms,price\n\
    a,Rom,10,,100.5\nb,Ulm,?,2,110.5\nc,Rom,30,3,120.5\nd,Ulm,40,4,130.5\ne,Rom,50,NA,140.5\nf,Ulm,60,6,150.5\n";

fn settings(drop: &str, categorical: &str, missing: Missing) -> TableSettings {
    let names = |text: &str| text.split_terminator(',').map(String::from).collect();
    TableSettings {
        drop: names(drop),
        categorical: names(categorical),
        missing,
    }
}

fn asked(data: &Path, table: &TableSettings) -> DataRequest {
    DataRequest {
        table: table.clone(),
        ..request(data, None)
    }
}

fn alone(request: &DataRequest) -> Data {
    prepare(request, &Alone).unwrap()
}

fn error(request: &DataRequest) -> (u8, String) {
    let error = prepare(request, &Alone).unwrap_err();
    (error.exit_code(), error.to_string())
}

fn inputs(data: &dyn Dataset) -> Vec<Vec<f32>> {
    let rows = (0..data.rows()).map(|row| read_rows(data, &[row]).unwrap());
    rows.map(|[x, _]| x.to_vec().unwrap()).collect()
}

/// Rows for a model that was trained on these data, without labels.
fn later(data: &Data, path: &Path) -> DataRequest {
    let trained = Trained {
        task: data.train.task().clone(),
        row_shape: data.train.row_shape().to_vec(),
        normalization: data.normalization.clone(),
        plan: data.plan.clone(),
        columns: data.columns.clone(),
        label: data.label.clone(),
        needs_labels: false,
    };
    DataRequest {
        trained: Some(trained),
        ..request(path, None)
    }
}

#[test]
fn a_model_reads_a_raw_table_as_it_was_trained_on() {
    let scratch = Scratch::new();
    let train = put(&scratch, "train.csv", TRAIN);
    let mut request = asked(&train, &settings("id", "auto", Missing::Mean));
    request.normalize = Scaling::Standard;
    let data = alone(&request);
    assert_eq!(data.train.task().to_string(), "regression of 1 number");
    let names = ["town=Rom", "town=Ulm", "age", "rooms"];
    assert_eq!(data.columns.as_ref().unwrap(), &names);
    assert_eq!(data.plan.fill.as_ref().unwrap(), &[0.5, 0.5, 38.0, 3.75]);
    let rows = inputs(&*data.train);
    // Moments are those of the rows as they are trained on, with missing numbers filled in.
    let mean = |feature: usize| rows.iter().map(|row| row[feature]).sum::<f32>() / 6.0;
    assert!((0..4).all(|feature| mean(feature).abs() < 1e-6), "{rows:?}");

    // Columns elsewhere, more of them, none of the labels, an unknown town.
    let text = "rooms,note,age,town\n,x,10,Rom\n2,y,,Ulm\n3,z,30,Oslo\n";
    let used = alone(&later(&data, &put(&scratch, "new.csv", text)));
    let used = inputs(&*used.train);
    assert_eq!(used[..2], rows[..2]);
    assert_eq!(used[2][2..], rows[2][2..]);
    let zero = |feature: usize| {
        let normalization = data.normalization.as_ref().unwrap();
        -normalization.shift[feature] * normalization.scale[feature]
    };
    assert_eq!(used[2][..2], [zero(0), zero(1)]);
}

#[test]
fn fills_for_missing_numbers_are_fitted_on_training_rows_only() {
    let scratch = Scratch::new();
    let rows: String = (0..1000)
        .map(|row| match row % 3 {
            0 => format!(",{row}.5\n"),
            _ => format!("{row},{row}.5\n"),
        })
        .collect();
    let path = put(&scratch, "t.csv", &format!("a,y\n{rows}"));
    let mut request = asked(&path, &settings("", "", Missing::Mean));
    request.val_split = 0.3;
    let data = alone(&request);
    let fill = data.plan.fill.as_ref().unwrap()[0];
    // A number that is there is the label without its half.
    let number = |row| {
        let [x, y] = read_rows(&*data.train, &[row]).unwrap();
        let (x, y) = (x.to_vec::<f32>().unwrap()[0], y.to_vec::<f32>().unwrap()[0]);
        (x == y - 0.5).then_some(f64::from(x))
    };
    let there: Vec<f64> = (0..data.train.rows()).filter_map(number).collect();
    let mean = there.iter().sum::<f64>() / there.len() as f64;
    assert!((f64::from(fill) - mean).abs() < 1e-4, "{fill} {mean}");
    assert!(inputs(&*data.held_out).contains(&vec![fill]));
    // The same bits on any number of ranks.
    for size in [2, 4] {
        let fills = ranks(size, |world| prepare(&request, world).unwrap().plan.fill);
        assert!(fills.iter().all(|other| *other == data.plan.fill));
    }
    request.table.missing = Missing::Zero;
    assert_eq!(alone(&request).plan.fill, Some(vec![0.0]));
}

#[test]
fn values_of_all_files_are_categories() {
    let scratch = Scratch::new();
    put(&scratch, "d/a.csv", "town,y\nRom,0\nUlm,1\n");
    put(&scratch, "d/b.csv", "town,y\nBonn,1\nRom,0\n");
    let folder = scratch.path().join("d");
    let request = asked(&folder, &settings("", "town", Missing::Error));
    let all_ranks = ranks(2, |world| {
        let data = prepare(&request, world).unwrap();
        (data.columns.clone().unwrap(), all(&*data.train))
    });
    assert!(all_ranks[0] == all_ranks[1]);
    let (columns, rows) = &all_ranks[0];
    assert_eq!(columns, &["town=Bonn", "town=Rom", "town=Ulm"]);
    assert_eq!(rows[2], (vec![1.0, 0.0, 0.0], 1));
    // Held-out rows are read in the same way; a new value has none of the features.
    let val = put(&scratch, "val.csv", "y,town\n1,Ulm\n0,Oslo\n");
    let data = alone(&DataRequest {
        val_data: Some(val.to_str().unwrap().parse().unwrap()),
        ..request
    });
    assert_eq!(
        all(&*data.held_out),
        [(vec![0.0, 0.0, 1.0], 1), (vec![0.0; 3], 0)]
    );
}

#[test]
fn numbers_are_categories_where_they_are_named() {
    let scratch = Scratch::new();
    let path = put(&scratch, "t.csv", "month,x,y\n12,1,0\n1,2,1\n12,3,0\n");
    let data = alone(&asked(&path, &settings("", "month", Missing::Error)));
    assert_eq!(
        data.columns.as_ref().unwrap(),
        &["month=1", "month=12", "x"]
    );
    assert_eq!(all(&*data.train)[0].0, [0.0, 1.0, 1.0]);
    let plain = alone(&asked(&path, &settings("", "auto", Missing::Error)));
    assert_eq!(plain.plan, FeaturePlan::default());
    assert_eq!(plain.plan.columns, None::<Vec<ColumnPlan>>);
}

#[test]
fn settings_of_tables_that_make_no_sense_are_refused() {
    let scratch = Scratch::new();
    let path = put(&scratch, "t.csv", TRAIN);
    let x = floats(&scratch, "x.npy", &[&[1.0]]);
    let ids: String = (0..300).map(|row| format!("no {row},{row}\n")).collect();
    let ids = put(&scratch, "ids.csv", &format!("id,y\n{ids}"));
    let few: String = (0..30)
        .map(|row| format!("{},{row}\n", if row == 7 { "12O.5" } else { "1" }))
        .collect();
    let few = put(&scratch, "few.csv", &format!("x,y\n{few}"));
    let empty = put(&scratch, "empty.csv", "a,b,y\n1,,0\n2,,1\n");
    let (error_, mean) = (Missing::Error, Missing::Mean);
    for (path, table, code, parts) in [
        (
            &path,
            settings("nope", "", error_),
            2,
            &["`drop` nope: no such column", "\"town\""][..],
        ),
        (
            &path,
            settings("", "nope", error_),
            2,
            &["`categorical` nope: no such feature", "\"town\""],
        ),
        (
            &path,
            settings("price", "", error_),
            65,
            &["texts in 2 columns"],
        ),
        (
            &path,
            settings("id", "town", error_),
            65,
            &["missing cells in 2 columns:\n    \"age\" (1, the first in line 3)\n    \"rooms\""],
        ),
        (
            &x,
            settings("a", "", error_),
            2,
            &["`drop` a: expected tables"],
        ),
        (
            &ids,
            settings("", "auto", error_),
            65,
            &["\"id\" (more than 256 different", "`drop` id"],
        ),
        (
            &few,
            settings("", "auto", error_),
            65,
            &["\"x\" (1 of 30 cells, the first in line 9: \"12O.5\")"],
        ),
        (
            &empty,
            settings("", "", mean),
            65,
            &["column \"b\": `missing` mean: expected a number"],
        ),
    ] {
        let (got, text) = error(&asked(path, &table));
        assert_eq!(got, code, "{text}");
        parts
            .iter()
            .for_each(|part| assert!(text.contains(part), "{text} lacks {part}"));
    }
    let labelled = DataRequest {
        labels: Some("town".into()),
        ..asked(&path, &settings("town", "", error_))
    };
    assert!(
        error(&labelled)
            .1
            .contains("`drop` town: expected columns of features, got the label")
    );
    // What the user named is checked before what columns hold.
    let wrong = DataRequest {
        labels: Some("nope".into()),
        ..asked(&few, &settings("", "auto", error_))
    };
    assert!(error(&wrong).1.contains("expected a column \"nope\""));
    let built_in = DataRequest {
        table: settings("", "", Missing::Zero),
        ..DataRequest::new("glyphs".parse().unwrap())
    };
    assert!(
        error(&built_in)
            .1
            .contains("`missing`: expected files as `data`")
    );
}

#[test]
fn columns_that_are_no_categories_are_refused_unless_they_are_named() {
    let scratch = Scratch::new();
    let error_ = Missing::Error;
    type Cell = fn(usize) -> String;
    let cases: [(Cell, &str, &str); 7] = [
        (
            |row| format!("\"{},5\"", row % 9),
            "\"c\" (formatted numbers or dates, 9 different, the first in line 2: \"0,5\")",
            "write plain numbers with a point",
        ),
        (
            |row| ["\"2,5\"", "7", "\"3,5\"", "n.a."][row % 4].into(),
            "\"c\" (formatted numbers or dates, 30 of 40 cells",
            "write plain numbers with a point",
        ),
        (
            |row| format!("${}.50", row % 9),
            "\"c\" (formatted numbers or dates, 9 different",
            "write plain numbers with a point",
        ),
        (
            |row| format!("{}%", row % 9),
            "\"c\" (formatted numbers or dates, 9 different",
            "write plain numbers with a point",
        ),
        (
            |row| format!("{} 000", row % 9),
            "\"c\" (formatted numbers or dates, 9 different",
            "write plain numbers with a point",
        ),
        (
            |row| format!("{}/11/2026", row % 9 + 1),
            "\"c\" (formatted numbers or dates, 9 different",
            "dates as numbers: days from the first one, or year, month and weekday",
        ),
        (
            |row| format!("F{row}"),
            "\"c\" (40 different in 40 cells, the first in line 2: \"F0\")",
            "correct these cells, or give `drop` c",
        ),
    ];
    for (cell, what, help) in cases {
        let rows = (0..40).map(|row| format!("{},{row},{}\n", cell(row), row % 2));
        let text = "c,x,y\n".to_string() + &rows.collect::<String>();
        let path = put(&scratch, "t.csv", &text);
        let (code, text) = error(&asked(&path, &settings("", "auto", error_)));
        let named = "to encode their texts as they are: `categorical` auto,c";
        let has_all = [what, help, named].iter().all(|part| text.contains(part));
        assert!(code == 65 && has_all, "{text}");
        let data = alone(&asked(&path, &settings("", "auto,c", error_)));
        assert!(data.plan.columns.unwrap()[0].is_categorical());
    }
}

#[test]
fn a_stratified_split_keeps_the_shares_of_the_classes() {
    let scratch = Scratch::new();
    let class = |row: usize| ["a", "a", "b", "a", "a", "a", "b", "c"][row % 8];
    let rows: String = (0..80)
        .map(|row| format!("{row}.5,{}\n", class(row)))
        .collect();
    let path = put(&scratch, "t.csv", &format!("x,y\n{rows}"));
    let asked = |seed| DataRequest {
        val_split: 0.2,
        stratify: true,
        seed,
        ..request(&path, None)
    };
    for seed in 0..20 {
        let data = alone(&asked(seed));
        let counts = [&data.held_out, &data.train].map(|side| side.rows_of_classes().unwrap());
        assert_eq!(counts, [vec![10, 4, 2], vec![40, 16, 8]]);
        let mut rows = [all(&*data.held_out), all(&*data.train)].concat();
        rows.sort_by(|a, b| a.0[0].total_cmp(&b.0[0]));
        assert!((0..80).all(|row| rows[row].0 == [row as f32 + 0.5]));
    }
    let held_out = |seed| all(&*alone(&asked(seed)).held_out);
    assert_eq!(held_out(1), held_out(1));
    assert_ne!(held_out(1), held_out(2));
    // All ranks choose the same rows, however many they are.
    let (one, others) = (
        alone(&asked(3)),
        ranks(3, |world| prepare(&asked(3), world)),
    );
    for other in others {
        let other = other.unwrap();
        assert_eq!(all(&*other.held_out), all(&*one.held_out));
        assert_eq!(
            other.train.fingerprint().unwrap(),
            one.train.fingerprint().unwrap()
        );
    }
    let prices = request(&put(&scratch, "p.csv", "x,y\n1,0.5\n2,1.5\n"), None);
    for (request, code, says) in [
        (
            DataRequest {
                val_split: 0.0,
                ..asked(0)
            },
            2,
            "`stratify`: expected `val-split`",
        ),
        (
            DataRequest {
                data: prices.data.clone(),
                ..asked(0)
            },
            2,
            "`stratify`: expected classes as labels, got numbers",
        ),
    ] {
        let (got, text) = error(&request);
        assert!(got == code && text.contains(says), "{text}");
    }
}

#[test]
fn a_shard_without_texts_has_values_of_the_column_as_well() {
    let scratch = Scratch::new();
    let all: String = (0..6)
        .map(|row| format!("t{},{}\n", row % 2, row % 2))
        .collect();
    put(&scratch, "d/a.csv", &format!("town,y\n{all}"));
    let folder = scratch.path().join("d");
    let request = asked(&folder, &settings("", "auto", Missing::Zero));
    for (cells, names) in [
        ([",0\n", "NA,1\n"], &["town=t0", "town=t1"][..]),
        (
            ["7,0\n", "8,1\n"],
            &["town=7", "town=8", "town=t0", "town=t1"],
        ),
    ] {
        put(&scratch, "d/b.csv", &format!("town,y\n{}", cells.concat()));
        assert_eq!(alone(&request).columns.unwrap(), names);
    }
}

#[test]
fn a_comma_in_the_name_of_a_column_is_said_to_separate_names() {
    let scratch = Scratch::new();
    let path = put(&scratch, "t.csv", "\"a,b\",c,y\n1,2,0\n3,4,1\n");
    let (code, text) = error(&asked(&path, &settings("a,b", "", Missing::Error)));
    let says = "give one of these, without commas in their names";
    assert!(code == 2 && text.contains(says), "{text}");
}

#[test]
fn an_infinite_number_is_named_although_missing_ones_come_before() {
    let scratch = Scratch::new();
    let mut numbers: Vec<f32> = (0..100).map(|row| row as f32).collect();
    (numbers[5], numbers[60]) = (f32::NAN, f32::INFINITY);
    let bytes = bytes(&numbers, f32::to_le_bytes);
    let x = npy(&scratch, "x.npy", "<f4", &[100, 1], &bytes);
    let y = whole(&scratch, "y.npy", &[0, 1].repeat(50));
    let mut request = request(&x, Some(&y));
    request.table = settings("", "", Missing::Mean);
    let (code, text) = error(&request);
    let says = "x.npy, row 60, feature 0: expected a finite f32, got inf";
    assert!(code == 65 && text.contains(says), "{text}");
}
