mod cells;
mod columns;
mod limits;
mod prepare;
mod refused;

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
fn a_column_that_is_not_asked_for_may_hold_anything() {
    let table = Table::csv("x,note,y\n1,\"a, b\",0\n2,,1\n");
    let contents = table.with(Some("y"), Some(&["x"])).unwrap();
    assert_eq!(
        (features(&contents).1, whole_labels(&contents)),
        (vec![1.0, 2.0], vec![0, 1])
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
