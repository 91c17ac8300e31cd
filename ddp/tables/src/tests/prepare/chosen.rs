//! What tables choose where no setting says what their columns are.

use ddp_data::{LeftOpen, MoreFeatures};

use super::*;

/// The request for a table of which nothing is said but its label.
fn open(path: &Path) -> DataRequest {
    let left_open = LeftOpen {
        categorical: true,
        missing: true,
        normalize: true,
        val_split: true,
        stratify: true,
        task: true,
    };
    DataRequest {
        left_open,
        labels: Some("y".into()),
        ..request(path, None)
    }
}

fn named(data: &Data) -> Vec<&str> {
    let columns = data.columns.as_ref().unwrap();
    columns.iter().map(String::as_str).collect()
}

#[test]
fn each_kind_of_column_becomes_what_suits_it() {
    let scratch = Scratch::new();
    let mut text = String::from(",kind,rare,many,note,who,day,when,gap,code,empty,y\n");
    for row in 0..400 {
        let rare = if row == 7 {
            "once"
        } else {
            ["a", "b"][row % 2]
        };
        // 45 values, the first five of them in one row each.
        let many = if row < 5 { row } else { 5 + row % 40 };
        let gap = if row % 10 == 3 {
            "NA".into()
        } else {
            (row % 7).to_string()
        };
        let code = if row % 2 == 0 { "10" } else { "10.0" };
        let code = if row % 3 == 0 { "x" } else { code };
        text += &format!(
            "{row},{},{rare},m{many:02},a note of many words that says number {row},P{},2024-02-{:02},\
             {}/1/2024,{gap},{code},,{}.5\n",
            ["u", "v", "w"][row % 3],
            row / 4,
            1 + row % 28,
            1 + row % 12,
            row % 50,
        );
    }
    let path = put(&scratch, "t.csv", &text);
    let data = prepare(&open(&path), &Alone).unwrap();
    let plan = data.plan.columns.as_ref().unwrap();
    let names: Vec<&str> = plan.iter().map(|column| &*column.name).collect();
    // Not the index, the note, who, ambiguous dates and what is empty.
    assert_eq!(names, ["kind", "rare", "many", "day", "gap", "code"]);
    let widths: Vec<usize> = plan.iter().map(|column| column.width()).collect();
    assert_eq!(widths, [3, 3, 41, 5, 2, 2]);
    assert_eq!(plan[1].values.as_deref().unwrap(), ["a", "b"]);
    let more: Vec<MoreFeatures> = plan.iter().map(|column| column.more).collect();
    let first = 19_754; // 2024-02-01
    assert_eq!(
        more,
        [
            MoreFeatures::None,
            MoreFeatures::Other,
            MoreFeatures::Other,
            MoreFeatures::Date { first },
            MoreFeatures::Missing,
            MoreFeatures::None
        ]
    );
    assert_eq!(named(&data)[54..], ["code=10", "code=x"]);
    // A text in one row of 400 would be 20 if it were divided by its deviation. All days are in one
    // month.
    let scale = &data.normalization.as_ref().unwrap().scale;
    let is_kept = |at: &usize| scale[*at] == 1.0;
    let expected: Vec<usize> = (0..47).chain([48, 49, 53, 54, 55]).collect();
    assert_eq!((0..56).filter(is_kept).collect::<Vec<_>>(), expected);
    // The request says what was chosen, so that another run can ask for it.
    let asked = data.of_table.as_deref().unwrap();
    assert_eq!(asked.table.categorical, ["common"]);
    assert_eq!(
        (asked.table.missing, asked.val_split),
        (Missing::Indicator, 0.0)
    );
    let again = DataRequest {
        left_open: LeftOpen::default(),
        ..asked.clone()
    };
    let again = prepare(&again, &Alone).unwrap();
    let print = |data: &Data| data.train.fingerprint().unwrap();
    assert_eq!(print(&again), print(&data));
    ranks(3, |ranks| {
        let data_of_rank = prepare(&open(&path), ranks).unwrap();
        assert_eq!(print(&data_of_rank), print(&data));
        assert_eq!(data_of_rank.normalization, data.normalization);
    });
}

#[test]
fn a_model_reads_tables_with_cells_that_its_training_had_not() {
    let scratch = Scratch::new();
    let row = |row: usize| format!("{},{},{}.5\n", ["a", "b"][row % 2], row % 7, row % 5);
    let rows: String = (0..40).map(row).collect();
    let path = put(
        &scratch,
        "t.csv",
        &format!("kind,x,y\n{rows}once,,2.5\nonce,3,\n"),
    );
    let data = prepare(&open(&path), &Alone).unwrap();
    // Rows without a label are left out.
    assert_eq!(data.train.rows(), 41);
    let trained = Trained {
        task: data.train.task().clone(),
        row_shape: data.train.row_shape().to_vec(),
        normalization: None,
        plan: data.plan.clone(),
        columns: data.columns.clone(),
        label: data.label.clone(),
        needs_labels: false,
    };
    let other = put(&scratch, "other.csv", "x,kind\n,never\n2,b\n");
    let request = DataRequest {
        trained: Some(trained),
        ..request(&other, None)
    };
    let data = prepare(&request, &Alone).unwrap();
    let names = data.columns.unwrap();
    let [rows, _] = read_rows(&*data.train, &[0, 1]).unwrap();
    let rows = rows.to_vec::<f32>().unwrap();
    let at = |row: usize, name: &str| {
        let index = names.iter().position(|known| known == name).unwrap();
        rows[row * names.len() + index]
    };
    assert_eq!(
        [at(0, "kind=a"), at(0, "kind=b"), at(0, "kind=(other)")],
        [0.0, 0.0, 1.0]
    );
    assert_eq!([at(1, "kind=b"), at(1, "x")], [1.0, 2.0]);
    // Its mean, and a feature that says so.
    assert!((at(0, "x") - 2.9).abs() < 0.2 && at(0, "x (missing)") == 1.0);
}

#[test]
fn labels_of_few_common_numbers_are_classes_and_others_are_numbers() {
    let scratch = Scratch::new();
    let of = |name: &str, label: &dyn Fn(usize) -> usize, rows: usize| {
        let rows: String = (0..rows)
            .map(|row| format!("{},{}\n", row % 13, label(row)))
            .collect();
        let path = put(&scratch, name, &format!("x,y\n{rows}"));
        prepare(&open(&path), &Alone).unwrap()
    };
    let classes = of("classes.csv", &|row| 1 + row % 3, 60);
    assert_eq!(classes.train.task().kind(), Some(TaskKind::Classification));
    for (name, label) in [
        (
            "ages.csv",
            &(|row: usize| 20 + row % 40) as &dyn Fn(usize) -> usize,
        ),
        ("grades.csv", &|row: usize| 10 * (row % 3)),
        ("rare.csv", &|row| usize::from(row % 12 == 0)),
    ] {
        let data = of(name, label, 60);
        assert_eq!(
            data.train.task().kind(),
            Some(TaskKind::Regression),
            "{name}"
        );
    }
    // Of more rows a part is held out, the same part of each class.
    let many = of("many.csv", &|row| row % 3, 5250);
    assert_eq!((many.train.rows(), many.held_out.rows()), (4200, 1050));
    assert_eq!(many.held_out.rows_of_classes(), Some(vec![350; 3]));
}

/// Families 001 to 299 were refused as numbers with a few texts among them.
#[test]
fn numbers_of_which_some_have_leading_zeros_are_names() {
    let scratch = Scratch::new();
    let row = |row: usize| format!("{row:03},{},{}.5\n", row % 7, row % 13);
    let rows: String = (0..300).map(row).collect();
    let path = put(&scratch, "t.csv", &format!("family,x,y\n{rows}"));
    let data = prepare(&open(&path), &Alone).unwrap();
    assert_eq!(data.columns, Some(vec!["x".to_string()]));
}

#[test]
fn what_cannot_be_a_feature_is_one_error() {
    let scratch = Scratch::new();
    let row = |row: usize| {
        let price = format!("\"{},{:03}\"", 1 + row % 5, row);
        let mixed = if row == 9 {
            "n.a.".into()
        } else {
            row.to_string()
        };
        format!("{price},{mixed},{row}.5\n")
    };
    let rows: String = (0..100).map(row).collect();
    let path = put(&scratch, "t.csv", &format!("price,mixed,y\n{rows}"));
    let error = prepare(&open(&path), &Alone).unwrap_err();
    assert_eq!(error.exit_code(), 65);
    let text = error.to_string();
    for part in [
        "got 2 columns:",
        "\"price\" (formatted",
        "\"mixed\" (1 of 100 cells",
    ] {
        assert!(text.contains(part), "{text} lacks {part}");
    }
}

/// The columns of a table whose rows begin with these cells, and of the same rows turned round.
fn of_cells(name: &str, cells: &[String]) -> [Result<Vec<String>>; 2] {
    let rows = |turned: bool| -> String {
        let rows = cells.iter().enumerate();
        let mut rows: Vec<String> = rows
            .map(|(row, cell)| format!("{cell},{},{}.5\n", row % 7, row % 11))
            .collect();
        if turned {
            rows.reverse();
        }
        rows.concat()
    };
    let scratch = Scratch::new();
    [false, true].map(|turned| {
        let path = put(&scratch, "t.csv", &format!("{name},x,y\n{}", rows(turned)));
        let data = prepare(&open(&path), &Alone)?;
        let features = named(&data).into_iter().filter(|name| *name != "x");
        Ok(features.map(String::from).collect())
    })
}

/// Of 300 numbers before the texts, the column was left out; after them it became features.
#[test]
fn what_becomes_of_a_column_does_not_depend_on_the_order_of_rows() {
    let number = |row: usize| format!("{}.25", row);
    let texts = |row: usize| ["s", "m", "l", "xl", "xs"][row % 5].to_string();
    let cells: Vec<String> = (0..300).map(number).chain((0..400).map(texts)).collect();
    for names in of_cells("size", &cells) {
        let expected = [
            "size=l",
            "size=m",
            "size=s",
            "size=xl",
            "size=xs",
            "size=(other)",
        ];
        assert_eq!(names.unwrap(), expected);
    }
}

/// A single `x` among 30 whole numbers made 31 categories of them.
#[test]
fn a_few_texts_among_numbers_are_refused_unless_the_numbers_are_few() {
    let column = |numbers: usize, text: &str| -> Vec<String> {
        let cell = |row: usize| match row {
            17 | 18 => text.to_string(),
            row => (row % numbers).to_string(),
        };
        (0..400).map(cell).collect()
    };
    for names in of_cells("age", &column(30, "x")) {
        let error = names.unwrap_err().to_string();
        let parts = ["expected plain numbers", "\"age\" (2 of 400 cells", "\"x\""];
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
    for names in of_cells("cylinders", &column(3, "rotary")) {
        let expected = [
            "cylinders=0",
            "cylinders=1",
            "cylinders=2",
            "cylinders=rotary",
        ];
        assert_eq!(names.unwrap(), expected);
    }
}

/// A column called as a word of the setting is was taken for one that the user names.
#[test]
fn a_column_may_be_called_as_the_setting_is() {
    let cells: Vec<String> = (0..50).map(|row| format!("{row}.5")).collect();
    for names in ["common", "auto"].map(|name| of_cells(name, &cells)) {
        let [names, turned] = names.map(Result::unwrap);
        assert_eq!((names.len(), &names), (1, &turned));
    }
}

#[test]
fn dates_with_other_cells_among_them_are_left_out_for_that() {
    let mut cells: Vec<String> = (0..50)
        .map(|row| format!("2024-02-{:02}", 1 + row % 28))
        .collect();
    cells[7] = "unknown".into();
    let scratch = Scratch::new();
    let rows = |cells: &[String]| -> String {
        let rows = cells.iter().enumerate();
        rows.map(|(row, cell)| format!("{cell},{},{}.5\n", row % 7, row % 11))
            .collect()
    };
    for other in ["unknown", "2024-02-30"] {
        cells[7] = other.into();
        let path = put(&scratch, "t.csv", &format!("day,x,y\n{}", rows(&cells)));
        let data = prepare(&open(&path), &Alone).unwrap();
        assert_eq!(named(&data), ["x"], "{other}");
    }
}
