//! Columns of texts and missing cells: refused all at once, or made into features.

use super::*;

fn categorical(name: &str, values: &[&str]) -> ColumnPlan {
    ColumnPlan {
        values: Some(values.iter().map(|value| value.to_string()).collect()),
        ..ColumnPlan::number(name)
    }
}

#[test]
fn labels_could_be_columns_that_vary_and_do_not_name_rows() {
    let rows = (0..40).map(|row| format!("{row},F{row},{}.5,7,{},,{}\n", row, row % 2, row % 3));
    let rows: String = rows.collect();
    let table = Table::csv(format!(",name,price,same,kind,empty,it's\n{rows}"));
    let found = possible_labels(&table.path).unwrap();
    assert_eq!(found, ["price", "kind", "it's"]);
}

#[test]
fn all_columns_that_cannot_be_features_are_named_at_once() {
    let mut content = String::from("id,town,age,size,price,y\n");
    for row in 0..300 {
        let (town, age) = (["Rom", "Ulm"][row % 2], ["", "7", "9"][row % 3]);
        let price = if row == 20 { "$12" } else { "12" };
        content += &format!("no {row},{town},{age},M,{price},{row}\n");
    }
    let text = Table::csv(content).refused(Some("y"));
    for part in [
        "got texts in 4 columns:\n    \"id\" (more than 256 different, the first in line 2: \"no 0\")\n    \"town\" (2 \
         different, the first in line 2: \"Rom\")\n    \"size\" (1 different",
        "\n    \"price\" (formatted numbers or dates, 1 of 300 cells, the first in line 22: \"$12\")",
        "\n  missing cells in 1 column: \"age\" (100, the first in line 2)\n  help: ",
        "d.dt.weekday); correct these cells, or give `categorical` town,size `drop` id,price `missing` mean; if",
    ] {
        assert!(text.contains(part), "{text} lacks {part}");
    }
    // A name that a shell would split is quoted.
    let text = Table::csv("my town,y\nRom,1\n").refused(Some("y"));
    assert!(
        text.contains("or give `categorical` 'my town'; if"),
        "{text}"
    );
}

#[test]
fn what_is_said_of_a_column_is_what_is_wrong_with_it() {
    let column = |cell: fn(u32) -> String| -> String {
        let rows = (0..40).map(|row| format!("\"{}\",{row}\n", cell(row)));
        "x,y\n".to_string() + &rows.collect::<String>()
    };
    let thousands = column(|row| format!("{},037", row + 1));
    let nearly_unique = column(|row| format!("no {row}"));
    let long = column(|row| "x".repeat(5000 * (row as usize % 2) + 1));
    for (content, part) in [
        (thousands, "help: write plain numbers with a point"),
        (
            column(|row| format!("{row},5")),
            "help: write plain numbers with a point",
        ),
        (
            column(|row| format!("2026-11-{:02} 9:00", row % 30 + 1)),
            "\"x\" (formatted numbers or dates, 30 different, the first in line 2: \"2026-11-01 9:00\")\n  help: write plain numbers with a point, as 1234.5, and dates as numbers",
        ),
        (
            column(|row| format!("{row} %")),
            "d.dt.weekday); correct these cells, or give `drop` x; if one",
        ),
        (
            column(|row| format!("{row} 000")),
            "\"x\" (formatted numbers or dates, 40 different in 40 cells",
        ),
        (
            nearly_unique,
            "help: correct these cells, or give `drop` x; if",
        ),
        // One in ten German post codes begins with 0.
        (
            column(|row| format!("{:05}", row % 20 * 5000 + 1067)),
            "\"x\" (whole numbers with leading zeros, 4 of 40 cells, the first in line 2: \"01067\")\n  help: correct \
             these cells, or give `categorical` x; if",
        ),
        (long, "\"x\" (more than 4096 bytes in line 3"),
    ] {
        let text = Table::csv(&content).refused(Some("y"));
        assert!(text.contains(part), "{text} lacks {part}");
    }
}

#[test]
fn a_file_in_latin1_is_refused_as_such() {
    let table = Table::csv("town,y\nRom,1\n?,2\n");
    let bytes = b"town,y\nRom,1\nZ\xfcrich,2\n";
    std::fs::write(&table.path, bytes).unwrap();
    let text = table.refused(Some("y"));
    let parts = [": \"Z\\xfcrich\" in line 3", "iconv -f latin1 -t utf8"];
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
}

#[test]
fn a_model_says_what_it_was_trained_on_and_names_no_settings_of_training() {
    let table = Table::csv("a,b\n1,x\n2,\n");
    let plans = [ColumnPlan::number("a"), ColumnPlan::number("b")];
    let request = TableRequest {
        features: plans.to_vec(),
        is_for_model: true,
        ..TableRequest::default()
    };
    let text = open(&table.path, &request).unwrap_err().to_string();
    assert!(
        text.contains("\"b\" (1 different")
            && text.contains("was trained on rows without such cells"),
        "{text}"
    );
    assert!(
        !text.contains("`categorical`") && !text.contains("`drop`"),
        "{text}"
    );
}

#[test]
fn each_value_of_a_categorical_column_is_a_feature() {
    let content = "size,town,a\nM,Rom,1\nS,NA,\n M ,Köln,3\nXL,Oslo,4\n";
    let plans = [
        categorical("town", &["Köln", "Rom"]),
        ColumnPlan::number("a"),
        categorical("size", &["M", "S"]),
    ];
    let request = TableRequest {
        features: plans.to_vec(),
        allows_missing: true,
        ..TableRequest::default()
    };
    for name in ["t.csv", "t.tsv", "t.csv.gz", "t.tsv.gz"] {
        let content = if name.contains("tsv") {
            content.replace(',', "\t")
        } else {
            content.to_string()
        };
        let content = if name.ends_with("gz") {
            packed(content.as_bytes())
        } else {
            content.into_bytes()
        };
        let table = Table::new(name, content);
        // The second time it comes from the cache, with what is odd about it.
        for _ in 0..2 {
            let contents = open(&table.path, &request).unwrap();
            let (shape, x) = features(&contents);
            assert_eq!(shape, [4, 5]);
            assert_eq!(x[..5], [0.0, 1.0, 1.0, 1.0, 0.0]);
            assert!(x[7].is_nan() && [x[5], x[6], x[8], x[9]] == [0.0, 0.0, 0.0, 1.0]);
            assert_eq!(x[10..], [1.0, 0.0, 3.0, 1.0, 0.0, 0.0, 0.0, 4.0, 0.0, 0.0]);
            let names = ["town=Köln", "town=Rom", "a", "size=M", "size=S"];
            assert_eq!(contents.about.columns.unwrap(), names);
            let odd = |column: &str, missing, unseen, examples: &[&str]| OddCells {
                column: column.to_string(),
                missing,
                unseen,
                examples: examples.iter().map(|text| text.to_string()).collect(),
            };
            let expected = [
                odd("town", 1, 1, &["Oslo"]),
                odd("a", 1, 0, &[]),
                odd("size", 0, 1, &["XL"]),
            ];
            assert_eq!(contents.about.odd_cells, expected);
        }
    }
}

#[test]
fn all_rows_without_a_label_are_counted() {
    let text = Table::csv("x,y\n1,a\n2,\n3,b\n4,\n").refused(Some("y"));
    assert!(
        text.contains("line 3, column \"y\"")
            && text.contains("number of missing labels: 2 in 4 rows"),
        "{text}"
    );
}
