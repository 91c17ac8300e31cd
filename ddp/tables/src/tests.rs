mod cells;
mod columns;
mod limits;
mod prepare;

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use ddp_kernels::files::testing::Scratch;
use flate2::Compression;
use flate2::write::GzEncoder;

use ddp_data::ColumnPlan;
use ddp_data::files::{NumberType, OddCells};

use super::*;
use crate::flat::PIECE_COUNT;

/// The table at `path` as arrays, in the usual folder of converted copies.
fn open(path: &Path, request: &TableRequest) -> Result<Contents> {
    open_table(path, request, None)
}

/// All columns except the label, as numbers.
pub(crate) fn others(path: &Path, label: Option<&str>) -> Result<Vec<ColumnPlan>> {
    let names = READER.columns(path)?.into_iter();
    let others = names.filter(|name| Some(&**name) != label);
    Ok(others.map(|name| ColumnPlan::number(&name)).collect())
}

/// A folder with one table.
struct Table {
    scratch: Scratch,
    path: PathBuf,
}

impl Table {
    fn new(name: &str, content: impl AsRef<[u8]>) -> Table {
        let scratch = Scratch::new();
        let path = scratch.path().join(name);
        fs::write(&path, content).unwrap();
        Table { scratch, path }
    }

    fn csv(content: impl AsRef<[u8]>) -> Table {
        Table::new("table.csv", content)
    }

    fn with(&self, label: Option<&str>, features: Option<&[&str]>) -> Result<Contents> {
        let numbers = |names: &[&str]| names.iter().map(|name| ColumnPlan::number(name)).collect();
        open(
            &self.path,
            &TableRequest {
                label: label.map(String::from),
                features: features
                    .map_or_else(|| others(&self.path, label), |names| Ok(numbers(names)))?,
                ..Default::default()
            },
        )
    }

    fn labelled(&self, label: &str) -> Result<Contents> {
        self.with(Some(label), None)
    }

    /// What is said of it, with exit code 65, and with the name of the file.
    #[track_caller]
    fn refused(&self, label: Option<&str>) -> String {
        let error = self.with(label, None).unwrap_err();
        assert_eq!(error.exit_code(), 65, "{error}");
        let text = error.to_string();
        assert!(text.contains(&self.path.display().to_string()), "{text}");
        // Nothing half is left.
        let cache = self.scratch.path().join(".ddp-cache");
        assert_eq!(
            fs::read_dir(cache).map_or(0, |entries| entries.count()),
            0,
            "{text}"
        );
        text
    }
}

fn features(contents: &Contents) -> (Vec<usize>, Vec<f32>) {
    let array = contents.find("features").unwrap().unwrap();
    let mut values = vec![0.0; array.rows() as usize * array.row_shape()[0]];
    array.read_f32(0, &mut values).unwrap();
    (vec![array.rows() as usize, array.row_shape()[0]], values)
}

fn whole_labels(contents: &Contents) -> Vec<i64> {
    let array = contents.find("labels").unwrap().unwrap();
    assert_eq!(
        (array.element, array.row_shape()),
        (NumberType::I64, &[][..])
    );
    let mut labels = vec![0; array.rows() as usize];
    array.read_i64(0, &mut labels).unwrap();
    labels
}

fn packed(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn numbers_are_features_and_texts_are_classes() {
    let table = Table::csv("width,kind,height\n1,dog,2.5\n-3e0, cat ,0.1\n\n5,\"dog\",6\n");
    let contents = table.labelled("kind").unwrap();
    assert_eq!(
        features(&contents),
        (vec![3, 2], vec![1.0, 2.5, -3.0, 0.1, 5.0, 6.0])
    );
    assert_eq!(whole_labels(&contents), [1, 0, 1]);
    assert_eq!(
        contents.about.classes,
        Some(vec!["cat".to_string(), "dog".into()])
    );
    assert_eq!(
        contents.about.columns,
        Some(vec!["width".to_string(), "height".into()])
    );
    // Messages name what people know.
    assert_eq!(
        contents.arrays[0].name(),
        format!("{}#features", table.path.display())
    );
}

#[test]
fn whole_numbers_are_classes_and_others_are_values() {
    let contents = Table::csv("x,y\n1,0\n2,-1.0\n3,2e3\n")
        .labelled("y")
        .unwrap();
    assert_eq!(
        (whole_labels(&contents), &contents.about.classes),
        (vec![0, -1, 2000], &None)
    );
    let contents = Table::csv("x,y\n1,0\n2,0.5\n").labelled("y").unwrap();
    let array = contents.find("labels").unwrap().unwrap();
    let mut labels = [0.0; 2];
    array.read_f64(0, &mut labels).unwrap();
    assert_eq!((array.element, labels), (NumberType::F64, [0.0, 0.5]));
}

#[test]
fn whole_labels_are_read_by_their_digits() {
    let labelled = |labels: &[&str]| {
        let rows = labels.iter().map(|label| format!("1,{label}\n"));
        let table = Table::csv("x,y\n".to_string() + &rows.collect::<String>());
        table.labelled("y").unwrap()
    };
    // An f64 would round all of these to even numbers.
    let exact = [
        "9007199254740993",
        "9007199254740995.0",
        "9.007199254740997e15",
    ];
    let ends = [
        "-9223372036854775808",
        "+9223372036854775807",
        ".0",
        "-1.50e+01",
    ];
    let contents = labelled(&[&exact[..], &ends].concat());
    let expected = [9007199254740993, 9007199254740995, 9007199254740997];
    assert_eq!(
        whole_labels(&contents),
        [&expected[..], &[i64::MIN, i64::MAX, 0, -15]].concat()
    );
    for fraction in ["4503599627370496.3", "15e-1", "1.25e1", "1e19"] {
        let contents = labelled(&["1", fraction]);
        let array = contents.find("labels").unwrap().unwrap();
        assert_eq!(array.element, NumberType::F64, "{fraction}");
    }
    let long = Table::csv("x,y\n1,7\n1,18446744073709551615\n").refused(Some("y"));
    assert!(
        long.contains("line 3, column \"y\": expected a label that 64 bits hold"),
        "{long}"
    );
}

#[test]
fn one_text_makes_all_labels_texts() {
    let contents = Table::csv("x,y\n1,10\n2,9\n3,none\n4,10\n5,é\n")
        .labelled("y")
        .unwrap();
    assert_eq!(whole_labels(&contents), [0, 1, 2, 0, 3]);
    assert_eq!(contents.about.classes.unwrap(), ["10", "9", "none", "é"]);
}

#[test]
fn features_are_taken_in_the_order_asked_for() {
    let table = Table::csv("a,name,b,c\n1,x,2,3\n4,y,5,6\n");
    let contents = table.with(None, Some(&["c", "a"])).unwrap();
    assert_eq!(features(&contents), (vec![2, 2], vec![3.0, 1.0, 6.0, 4.0]));
    assert_eq!(
        (contents.arrays.len(), contents.about.columns.unwrap()),
        (1, vec!["c".to_string(), "a".into()])
    );
    let labels_alone = table.with(Some("name"), Some(&[])).unwrap();
    assert_eq!(
        (labels_alone.arrays.len(), whole_labels(&labels_alone)),
        (1, vec![0, 1])
    );
    assert_eq!(
        READER.columns(&table.path).unwrap(),
        ["a", "name", "b", "c"]
    );
}

#[test]
fn tabs_semicolons_and_gzip_are_the_same_table() {
    let content = "a,b\n1,2\n3,4\n";
    let expected = features(&Table::csv(content).with(None, None).unwrap());
    for (name, content) in [
        ("table.tsv", content.replace(',', "\t").into_bytes()),
        ("table.csv", content.replace(',', ";").into_bytes()),
        ("table.CSV", content.replace('\n', "\r\n").into_bytes()),
        ("table.csv.gz", packed(content.as_bytes())),
        (
            "table.tsv.gz",
            packed(content.replace(',', "\t").as_bytes()),
        ),
        // As several runs of gzip leave it.
        (
            "table.csv.gz",
            [packed(b"a,b\n1,"), packed(b"2\n3,4\n")].concat(),
        ),
    ] {
        let table = Table::new(name, content);
        assert_eq!(
            features(&table.with(None, None).unwrap()),
            expected,
            "{name}"
        );
        assert_eq!(READER.columns(&table.path).unwrap(), ["a", "b"], "{name}");
    }
}

#[test]
fn every_kind_of_bad_cell_is_named_with_line_and_column() {
    for (content, parts) in [
        (
            "x,y\n1,0\n,1\n",
            &[
                "missing cells in 1 column: \"x\" (1, the first in line 3)",
                "give `missing` mean",
            ][..],
        ),
        (
            "x,y\n1,0\n  ,1\n",
            &["missing cells in 1 column: \"x\" (1, the first in line 3)"],
        ),
        (
            "x,y\n1,0\nabc,1\n",
            &[
                "expected numbers, got texts in 1 column: \"x\" (1 of 2 cells, the first in line 3: \"abc\")",
                "`categorical` x",
                "name it in `labels`",
            ],
        ),
        (
            "x,y\n\"1\n\",0\n\n\"2\n3\",1\n",
            &["the first in line 5: \"2\\n3\""],
        ),
        ("x,y\r\n1,0\r\n1_0,1\r\n", &["the first in line 3: \"1_0\""]),
        (
            "x,y\n1,0\nNaN,1\n",
            &["missing cells in 1 column: \"x\" (1, the first in line 3)"],
        ),
        (
            "x,y\n-inf,0\n",
            &["line 2, column \"x\"", "expected a finite number, got -inf"],
        ),
        (
            "x,y\n1e39,0\n",
            &[
                "line 2, column \"x\"",
                "expected at most 3.4028235e38, the largest f32, got 1e39",
            ],
        ),
        ("x,y\n1e400,0\n", &["line 2, column \"x\"", "1e400"]),
        (
            "x,y\n1,0\n2,\n",
            &[
                "line 3, column \"y\"",
                "as label, got an empty cell; number of missing labels: 1 in 2 rows",
            ],
        ),
        (
            "x,y\n1,nan\n",
            &[
                "line 2, column \"y\"",
                "expected a number or a text as label, got nan",
            ],
        ),
        ("x,y\n1,a\n2,inf\n", &["line 3, column \"y\"", "got inf"]),
        ("x,y\n1,0\n2\n", &["line 3", "expected 2 cells", "got 1"]),
        (
            "x,y\n1,0\n2,3,4\n",
            &["line 3", "expected 2 cells", "got 3", "quote texts"],
        ),
        ("x,y\n1,\"0\n", &["line 2", "never closed"]),
        ("x,x\n1,0\n", &["columns 1 and 2 are both called \"x\""]),
        (
            "x,z\n1,0\n",
            &[
                "expected a column \"y\"",
                "\"x\", \"z\"",
                "name one of these",
            ],
        ),
        ("x,Y \n1,0\n", &["expected a column \"y\""]),
        (
            "x,Y\n1,0\n",
            &["expected a column \"y\"", "\"Y\" was probably meant"],
        ),
        (
            ",x,y\n0,1,0\n",
            &["column 1 of 3 has no name", "index=False"],
        ),
        (
            "1,2\n3,4\n",
            &[
                "line 1: expected the names of columns, got 2 numbers in 2 cells",
                "put a line with names above it",
            ],
        ),
        (
            "\n0,1,2,3\n4,5,6,7\n",
            &["line 2: expected the names of columns, got 4 numbers in 4 cells"],
        ),
        ("x,y\n", &["a header and no rows"]),
        (
            "x,y\n1,a\nx,y\n2,b\n",
            &["got texts in 1 column: \"x\" (1 of 3 cells, the first in line 3"],
        ),
        (
            "x,y\n1,a\n\u{feff}x,y\n2,b\n",
            &["got texts in 1 column: \"x\" (1 of 3 cells, the first in line 3"],
        ),
        ("\n\n", &["expected a line with names"]),
        ("", &["empty"]),
    ] {
        let text = Table::csv(content).refused(Some("y"));
        parts
            .iter()
            .for_each(|part| assert!(text.contains(part), "{content:?}: {text} lacks {part}"));
    }
}

#[test]
fn a_first_row_is_not_taken_for_names() {
    for content in [
        "5.1,3.5,1.4,Iris-a\n4.9,3.0,1.4,Iris-a\n",
        "1,cat\n2,dog\n",
        "cat,7,1\n",
        "0,1,cat\n",
        "3,2,1,a\n",
        "1,2,4,a\n",
    ] {
        let table = Table::csv(content);
        let text = READER.columns(&table.path).unwrap_err().to_string();
        assert!(
            text.contains("line 1: ") && text.contains("cells, as in a row"),
            "{text}"
        );
        assert!(
            text.contains("header=None") && text.contains("put a letter before each"),
            "{text}"
        );
        assert_eq!(table.refused(None), text);
    }
    // As pandas numbers columns, years, wavelengths; and few numbers among texts.
    for header in [
        "0,1,2,kind",
        "kind,2001,2002,2003",
        "400.5,401.0,401.50,402,kind",
        "kind,7,a,b",
        "a,kind",
    ] {
        let row = "1,".repeat(header.split(',').count());
        let table = Table::csv(format!("{header}\n{}\n", &row[..row.len() - 1]));
        assert_eq!(
            table.labelled("kind").unwrap().about.columns.unwrap().len(),
            header.split(',').count() - 1,
            "{header}"
        );
    }
    // A class may be called as its column where the others have names.
    Table::csv("x,spam\n1,spam\n2,ham\n")
        .labelled("spam")
        .unwrap();
}

#[test]
fn texts_too_long_for_classes_are_no_labels() {
    let long =
        |row: usize, bytes: usize| format!("{row:08}") + &"long text ".repeat(bytes)[..bytes - 8];
    // Each may be a class, but all of them take more than the header of a flat file holds.
    let rows: String = (0..5000)
        .map(|row| format!("1,{}\n", long(row, 4096)))
        .collect();
    let text = Table::csv(format!("x,y\n{rows}")).refused(Some("y"));
    // 16 MiB.
    let line = (16 << 20) / 4096 + 2;
    let parts = [
        &format!("line {line}, column \"y\""),
        "of 16777216 bytes together",
        "is this column the label?",
    ];
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    // As often as one likes where they are the same.
    let rows = format!("1,{}\n", long(0, 4096)).repeat(5000);
    Table::csv(format!("x,y\n{rows}")).labelled("y").unwrap();
}

#[test]
fn what_is_not_utf_8_is_named() {
    let text = Table::csv(b"x,y\n1,caf\xe9\n").refused(Some("y"));
    assert!(
        text.contains("line 2, column \"y\"") && text.contains("not UTF-8"),
        "{text}"
    );
    let text = Table::csv(b"x,\xe9\n1,2\n").refused(None);
    assert!(text.contains("the name of column 2 is not UTF-8"), "{text}");
    let text = Table::csv(b"\xff\xfex\0,\0y\0").refused(None);
    assert!(text.contains("UTF-16"), "{text}");
}

#[test]
fn a_column_that_is_not_asked_for_may_hold_anything() {
    let table = Table::csv("x,note,y\n1,\"a, b\",0\n2,,1\n");
    let contents = table.with(Some("y"), Some(&["x"])).unwrap();
    assert_eq!(
        (features(&contents).1, whole_labels(&contents)),
        (vec![1.0, 2.0], vec![0, 1])
    );
}

#[test]
fn too_many_different_texts_are_no_classes() {
    let mut content = String::from("x,y\n");
    (0..=1 << 16).for_each(|row| content += &format!("0,name {row}\n"));
    let text = Table::csv(&content).refused(Some("y"));
    assert!(
        text.contains("line 65538") && text.contains("at most 65536 different texts of"),
        "{text}"
    );
    // As numbers they are fine, until there is a text.
    let numbers = content.replace("name ", "0.5");
    Table::csv(&numbers).labelled("y").unwrap();
    let text = Table::csv(numbers + "0,name\n").refused(Some("y"));
    assert!(
        text.contains("line 65539") && text.contains("expected a number as label, got \"name\""),
        "{text}"
    );
}

#[test]
fn rows_beyond_one_piece_come_out_in_order() {
    let rows = PIECE_COUNT / 2 + 3;
    let mut content = String::from("a,y,b,c\n");
    (0..rows).for_each(|row| content += &format!("{row},{},{},0\n", row % 7, row * 2));
    let contents = Table::csv(content).labelled("y").unwrap();
    let (shape, values) = features(&contents);
    assert_eq!(shape, [rows, 3]);
    assert!(
        values
            .chunks(3)
            .enumerate()
            .all(|(row, cells)| cells == [row as f32, 2.0 * row as f32, 0.0])
    );
    assert!(
        whole_labels(&contents)
            .iter()
            .enumerate()
            .all(|(row, &label)| label == (row % 7) as i64)
    );
}

#[test]
fn a_converted_table_is_reused_unless_columns_differ() {
    let table = Table::csv("x,y\n1,0\n2,1\n");
    let path = |contents: &Contents| contents.arrays[0].mapped.path().to_path_buf();
    let first = path(&table.labelled("y").unwrap());
    assert_eq!(path(&table.labelled("y").unwrap()), first);
    assert_ne!(path(&table.labelled("x").unwrap()), first);
    assert_ne!(path(&table.with(None, Some(&["x"])).unwrap()), first);
    ddp_data::files::flat::verify(&first).unwrap();
}

#[test]
fn damaged_and_short_gzip_is_bad_data() {
    let whole = packed(
        "x,y\n1,0\n2,1\n"
            .repeat(50)
            .replacen("x,y\n", "a,b\n", 1)
            .replace("x,y\n", "")
            .as_bytes(),
    );
    Table::new("table.csv.gz", &whole).labelled("b").unwrap();
    for end in [3, 11, whole.len() / 2, whole.len() - 1] {
        let text = Table::new("table.csv.gz", &whole[..end]).refused(Some("b"));
        assert!(
            text.contains("gzip") || text.contains("expected .npy"),
            "{text}"
        );
    }
    let mut damaged = whole.clone();
    let crc = damaged.len() - 8;
    damaged[crc] ^= 1;
    let text = Table::new("table.csv.gz", damaged).refused(Some("b"));
    assert!(text.contains("gzip -t"), "{text}");
}

#[cfg(not(feature = "parquet"))]
#[test]
fn builds_without_parquet_say_how_to_enable_it() {
    let table = Table::new("table.parquet", b"PAR1....\x01\0\0\0PAR1");
    let text = table.refused(None);
    assert!(
        text.contains("--features parquet") && text.contains("to_csv"),
        "{text}"
    );
    assert!(
        READER
            .columns(&table.path)
            .unwrap_err()
            .to_string()
            .contains("--features parquet")
    );
}

#[test]
fn what_is_wrong_with_a_text_is_named() {
    for (name, content, why) in [
        (
            "t.csv",
            "a|b|y\n1|2|0\n",
            "got one name \"a|b|y\"; help: save the table with commas",
        ),
        (
            "t.csv",
            "# made by me\na,y\n1,0\n",
            "line 1: expected the names of columns, got \"# made by me\"",
        ),
        (
            "t.csv",
            "a,b,y\n1,2,0\n# half\n",
            "line 3: expected 3 cells, as in the header, got 1; help: remove this line",
        ),
        (
            "t.csv",
            "a;y\n1,5;0\n",
            "line 2: \"1,5\")\n  help: write plain numbers with a point",
        ),
        (
            "t.csv.gz",
            "a,y\n1,0\n",
            "its name ends in .gz, but it is not compressed",
        ),
    ] {
        let text = Table::new(name, content).refused(Some("y"));
        assert!(text.contains(why), "{text}");
    }
    let text = Table::new("t.csv", packed(b"a,y\n1,0\n")).refused(Some("y"));
    assert!(
        text.contains("compressed with gzip, but its name does not end in .gz"),
        "{text}"
    );
}
