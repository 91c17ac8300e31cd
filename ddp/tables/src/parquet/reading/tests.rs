mod damage;
mod documents;

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use ::parquet::basic::Compression;
use ::parquet::data_type::{
    BoolType, ByteArrayType, DoubleType, FixedLenByteArray, FixedLenByteArrayType, FloatType,
    Int32Type, Int64Type,
};
use ::parquet::file::metadata::KeyValue;
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::parser::parse_message_type;
use ddp_kernels::files::testing::Scratch;

use ddp_data::files::{Contents, NumberType, OddCells};
use ddp_data::text::{ReadOptions, documents};
use ddp_data::{ColumnPlan, MoreFeatures};

use crate::columns::TableRequest;
use crate::parquet::reading::*;
use crate::source::Table as Opened;
use crate::tests::others;
use crate::{READER, flat};

/// The table at `path` as arrays, in the usual folder of converted copies.
fn open_table(path: &Path, request: &TableRequest) -> Result<Contents> {
    flat::open(Opened::open(path)?, request, None)
}

/// The values of one column, all rows of one group.
enum Column<'a> {
    Whole32(&'a [i32]),
    Whole64(&'a [i64]),
    F32(&'a [f32]),
    F64(&'a [f64]),
    /// Numbers, and where there are some.
    Sparse(&'a [f64], &'a [i16]),
    Bools(&'a [bool]),
    Texts(&'a [&'a str]),
    Halves(&'a [u16]),
}

/// As pandas writes it, for a column `waited` of durations.
const PANDAS: &str = r#"{"columns": [{"name": "waited", "field_name": "waited", "pandas_type": "timedelta",
    "numpy_type": "timedelta64[us]", "metadata": null}]}"#;

/// Writes a table of row groups of these columns.
fn write(path: &Path, schema: &str, compression: Compression, groups: &[&[Column<'_>]]) {
    let end = if schema.ends_with('}') { "" } else { ";" };
    let schema =
        Arc::new(parse_message_type(&format!("message table {{ {schema}{end} }}")).unwrap());
    let properties = Arc::new(
        WriterProperties::builder()
            .set_compression(compression)
            .set_key_value_metadata(Some(vec![KeyValue::new(
                "pandas".to_string(),
                PANDAS.to_string(),
            )]))
            .build(),
    );
    let mut writer =
        SerializedFileWriter::new(File::create(path).unwrap(), schema, properties).unwrap();
    for columns in groups {
        let mut group = writer.next_row_group().unwrap();
        for column in *columns {
            let mut out = group
                .next_column()
                .unwrap()
                .expect("as many columns as the schema has");
            match column {
                Column::Whole32(values) => out.typed::<Int32Type>().write_batch(values, None, None),
                Column::Whole64(values) => out.typed::<Int64Type>().write_batch(values, None, None),
                Column::F32(values) => out.typed::<FloatType>().write_batch(values, None, None),
                Column::F64(values) => out.typed::<DoubleType>().write_batch(values, None, None),
                Column::Sparse(values, there) => {
                    out.typed::<DoubleType>()
                        .write_batch(values, Some(there), None)
                }
                Column::Bools(values) => out.typed::<BoolType>().write_batch(values, None, None),
                Column::Texts(values) => {
                    let values: Vec<_> = values.iter().map(|text| ByteArray::from(*text)).collect();
                    out.typed::<ByteArrayType>()
                        .write_batch(&values, None, None)
                }
                Column::Halves(values) => {
                    let half = |bits: &u16| FixedLenByteArray::from(bits.to_le_bytes().to_vec());
                    let values: Vec<_> = values.iter().map(half).collect();
                    out.typed::<FixedLenByteArrayType>()
                        .write_batch(&values, None, None)
                }
            }
            .unwrap();
            out.close().unwrap();
        }
        group.close().unwrap();
    }
    writer.close().unwrap();
}

struct Table {
    _scratch: Scratch,
    path: PathBuf,
}

impl Table {
    fn new(schema: &str, groups: &[&[Column<'_>]]) -> Table {
        let scratch = Scratch::new();
        let path = scratch.path().join("table.parquet");
        write(&path, schema, Compression::SNAPPY, groups);
        Table {
            _scratch: scratch,
            path,
        }
    }

    fn open(&self, label: Option<&str>) -> Result<Contents> {
        open_table(
            &self.path,
            &TableRequest {
                label: label.map(String::from),
                features: others(&self.path, label)?,
                ..Default::default()
            },
        )
    }

    #[track_caller]
    fn assert_refused(&self, label: Option<&str>, parts: &[&str]) {
        let error = self.open(label).unwrap_err();
        let text = error.to_string();
        assert_eq!(error.exit_code(), 65, "{text}");
        assert!(text.contains(&self.path.display().to_string()), "{text}");
        parts
            .iter()
            .for_each(|part| assert!(text.contains(part), "{text} lacks {part}"));
    }
}

fn features(contents: &Contents) -> (Vec<usize>, Vec<f32>) {
    let array = contents.find("features").unwrap().unwrap();
    let mut values = vec![0.0; array.rows() as usize * array.row_shape()[0]];
    array.read_f32(0, &mut values).unwrap();
    (vec![array.rows() as usize, array.row_shape()[0]], values)
}

fn labels(contents: &Contents) -> Vec<i64> {
    let array = contents.find("labels").unwrap().unwrap();
    let mut labels = vec![0; array.rows() as usize];
    array.read_i64(0, &mut labels).unwrap();
    labels
}

#[test]
fn numbers_of_every_type_are_features_and_texts_are_classes() {
    let table = Table::new(
        "REQUIRED INT32 a; REQUIRED INT32 b (INTEGER(8,true)); REQUIRED INT32 c (INTEGER(32,false)); REQUIRED INT64 d; \
         REQUIRED INT64 e (INTEGER(64,false)); REQUIRED FLOAT f; OPTIONAL DOUBLE g; REQUIRED BOOLEAN h; \
         REQUIRED FIXED_LEN_BYTE_ARRAY(2) i (FLOAT16); REQUIRED BYTE_ARRAY y (UTF8)",
        &[&[
            Column::Whole32(&[1, -2]),
            Column::Whole32(&[-128, 127]),
            Column::Whole32(&[-1, 5]),
            Column::Whole64(&[-7, 1 << 40]),
            Column::Whole64(&[-1, 3]),
            Column::F32(&[0.1, -0.5]),
            Column::Sparse(&[0.25, 1e10], &[1, 1]),
            Column::Bools(&[true, false]),
            Column::Halves(&[0x3e00, 0x8001]),
            Column::Texts(&["dog", "cat"]),
        ]],
    );
    let contents = table.open(Some("y")).unwrap();
    let first = [
        1.0,
        -128.0,
        4294967295.0,
        -7.0,
        18446744073709551615.0,
        0.1,
        0.25,
        1.0,
        1.5,
    ];
    let second = [
        -2.0,
        127.0,
        5.0,
        (1u64 << 40) as f32,
        3.0,
        -0.5,
        1e10,
        0.0,
        -(2f32.powi(-24)),
    ];
    assert_eq!(features(&contents), (vec![2, 9], [first, second].concat()));
    assert_eq!(
        (labels(&contents), contents.about.classes.unwrap()),
        (vec![1, 0], vec!["cat".to_string(), "dog".into()])
    );
    assert_eq!(
        READER.columns(&table.path).unwrap(),
        ["a", "b", "c", "d", "e", "f", "g", "h", "i", "y"]
    );
}

#[test]
fn labels_are_classes_or_values() {
    let table = Table::new(
        "REQUIRED INT64 a; REQUIRED DOUBLE y",
        &[&[Column::Whole64(&[3, 0]), Column::F64(&[0.5, 1.0])]],
    );
    assert_eq!(labels(&table.open(Some("a")).unwrap()), [3, 0]);
    let values = table.open(Some("y")).unwrap();
    assert_eq!(
        values.find("labels").unwrap().unwrap().element,
        NumberType::F64
    );
}

#[test]
fn large_whole_numbers_are_names_by_all_their_digits() {
    let ids = [9007199254740993, 9007199254740992, -1];
    let table = Table::new(
        "REQUIRED INT64 a; REQUIRED INT64 b (INTEGER(64,false)); REQUIRED DOUBLE c",
        &[&[
            Column::Whole64(&ids),
            Column::Whole64(&ids),
            Column::F64(&[1e20, 2e20, 3e20]),
        ]],
    );
    assert_eq!(labels(&table.open(Some("a")).unwrap()), ids);
    table.assert_refused(
        Some("b"),
        &["expected a label that 64 bits hold, got 18446744073709551615"],
    );
    let long = (1i64 << 60) as f64;
    let floats = Table::new(
        "REQUIRED DOUBLE a; REQUIRED DOUBLE b",
        &[&[Column::F64(&[long, 0.0]), Column::F64(&[1.0, 2.0])]],
    );
    assert_eq!(labels(&floats.open(Some("a")).unwrap()), [1 << 60, 0]);
    // Above i64 a float is a number.
    let floats = table.open(Some("c")).unwrap();
    let element = floats.find("labels").unwrap().unwrap().element;
    assert_eq!((element, floats.about.classes), (NumberType::F64, None));
    let category = ColumnPlan {
        name: "a".into(),
        values: Some(ids[..2].iter().rev().map(i64::to_string).collect()),
        more: MoreFeatures::None,
    };
    let request = TableRequest {
        features: vec![category],
        ..TableRequest::default()
    };
    let (_, x) = features(&open_table(&table.path, &request).unwrap());
    assert_eq!(x, [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]);
}

#[test]
fn row_groups_follow_each_other_however_they_are_packed() {
    let rows = 20_000;
    let a: Vec<i64> = (0..rows).collect();
    let y: Vec<i32> = (0..rows as i32).map(|row| row % 3).collect();
    let part =
        |from: usize, to: usize| [Column::Whole64(&a[from..to]), Column::Whole32(&y[from..to])];
    let scratch = Scratch::new();
    for (name, compression) in [
        ("none", Compression::UNCOMPRESSED),
        ("snappy", Compression::SNAPPY),
        ("zstd", Compression::ZSTD(Default::default())),
        ("gzip", Compression::GZIP(Default::default())),
    ] {
        let path = scratch.path().join(format!("{name}.parquet"));
        let groups = [part(0, 1), part(1, 9000), part(9000, 20_000)];
        let groups: Vec<&[Column<'_>]> = groups.iter().map(|group| &group[..]).collect();
        write(
            &path,
            "REQUIRED INT64 a; REQUIRED INT32 y",
            compression,
            &groups,
        );
        let contents = open_table(
            &path,
            &TableRequest {
                label: Some("y".into()),
                features: others(&path, Some("y")).unwrap(),
                ..Default::default()
            },
        )
        .unwrap();
        let (shape, values) = features(&contents);
        assert_eq!(shape, [20_000, 1], "{name}");
        assert!(
            values
                .iter()
                .enumerate()
                .all(|(row, &value)| value == row as f32),
            "{name}"
        );
        assert!(
            labels(&contents)
                .iter()
                .enumerate()
                .all(|(row, &label)| label == row as i64 % 3),
            "{name}"
        );
    }
}

#[test]
fn what_is_wrong_is_named_with_row_and_column() {
    let number = || Column::F64(&[1.0, 2.0]);
    let sparse = "REQUIRED DOUBLE a; OPTIONAL DOUBLE b";
    let table = Table::new(
        sparse,
        &[
            &[number(), Column::Sparse(&[1.0, 1.0], &[1, 1])],
            &[number(), Column::Sparse(&[1.0], &[1, 0])],
        ],
    );
    table.assert_refused(
        None,
        &["missing cells in 1 column: \"b\" (1, the first in row 3)"],
    );
    let table = Table::new(
        "REQUIRED DOUBLE a",
        &[&[number()], &[Column::F64(&[1.0, f64::NAN])]],
    );
    table.assert_refused(
        None,
        &["missing cells in 1 column: \"a\" (1, the first in row 3)"],
    );
    Table::new("REQUIRED DOUBLE a", &[&[Column::F64(&[1e39])]])
        .assert_refused(None, &["row 0", "the largest f32"]);
    let texts = Table::new(
        "REQUIRED DOUBLE a; REQUIRED BYTE_ARRAY y (UTF8)",
        &[&[number(), Column::Texts(&["x", ""])]],
    );
    texts.assert_refused(
        None,
        &[
            "texts in 1 column: \"y\" (1 different, the first in row 0: \"x\")",
            "`labels`",
        ],
    );
    texts.assert_refused(
        Some("y"),
        &["row 1, column \"y\"", "as label, got an empty cell"],
    );
    texts.assert_refused(Some("z"), &["expected a column \"z\"", "\"a\", \"y\""]);
    for (schema, part) in [
        (
            "REQUIRED INT32 a (DATE)",
            "holds INT32 Date: expected integers",
        ),
        ("REQUIRED INT64 a (DECIMAL(9,2))", "holds INT64 Decimal"),
        (
            "REQUIRED FIXED_LEN_BYTE_ARRAY(5) a (DECIMAL(10,2))",
            "leave it out: `drop` a",
        ),
        ("OPTIONAL INT32 a (UNKNOWN)", "holds INT32 Unknown"),
        ("REPEATED INT32 a", "nested"),
        (
            "REQUIRED group a { REQUIRED INT32 b; REQUIRED INT32 c; }",
            "column \"a\" is nested",
        ),
        ("REQUIRED INT64 __index_level_0__", "index=False"),
        ("REQUIRED INT96 a", "INT96"),
        ("REQUIRED INT32 a", "a header and no rows"),
    ] {
        Table::new(schema, &[]).assert_refused(None, &[part]);
    }
}

#[test]
fn durations_of_pandas_are_refused_with_their_unit() {
    let whole = || Column::Whole64(&[5, 7]);
    let schema = "REQUIRED INT64 waited; REQUIRED INT64 x";
    let table = Table::new(schema, &[&[whole(), whole()]]);
    let says = "column \"waited\" holds durations (timedelta64[us])";
    table.assert_refused(None, &[says, "total_seconds", "`drop`"]);
    let features = [ColumnPlan::number("x")];
    let request = TableRequest {
        features: features.to_vec(),
        ..TableRequest::default()
    };
    assert!(open_table(&table.path, &request).is_ok());
}

#[test]
fn a_nested_column_is_one_that_can_be_left_out() {
    let schema = "REQUIRED group a { REQUIRED INT64 b; REQUIRED INT64 c; } REQUIRED INT64 x; REQUIRED INT64 y";
    let whole = || Column::Whole64(&[5, 7]);
    let table = Table::new(
        schema,
        &[&[whole(), whole(), Column::Whole64(&[1, 2]), whole()]],
    );
    assert_eq!(READER.columns(&table.path).unwrap(), ["a", "x", "y"]);
    let wanted = [ColumnPlan::number("x")];
    let request = TableRequest {
        label: Some("y".into()),
        features: wanted.to_vec(),
        ..TableRequest::default()
    };
    let contents = open_table(&table.path, &request).unwrap();
    assert_eq!(features(&contents), (vec![2, 1], vec![1.0, 2.0]));
    assert_eq!(labels(&contents), [5, 7]);
}

#[test]
fn texts_and_nulls_become_features_as_in_other_tables() {
    let table = Table::new(
        "REQUIRED BYTE_ARRAY town (UTF8); OPTIONAL DOUBLE a; REQUIRED INT64 month",
        &[
            &[
                Column::Texts(&["Rom", "NA"]),
                Column::Sparse(&[1.5], &[0, 1]),
                Column::Whole64(&[12, 1]),
            ],
            &[
                Column::Texts(&["Ulm"]),
                Column::Sparse(&[], &[0]),
                Column::Whole64(&[3]),
            ],
        ],
    );
    let plan = |name: &str, values: &[&str]| ColumnPlan {
        name: name.to_string(),
        values: (!values.is_empty()).then(|| values.iter().map(|text| text.to_string()).collect()),
        more: MoreFeatures::None,
    };
    let request = TableRequest {
        features: vec![
            plan("a", &[]),
            plan("town", &["Rom"]),
            plan("month", &["1", "12"]),
        ],
        allows_missing: true,
        ..TableRequest::default()
    };
    let contents = open_table(&table.path, &request).unwrap();
    let (shape, x) = features(&contents);
    assert_eq!(shape, [3, 4]);
    assert!(x[0].is_nan() && x[8].is_nan());
    assert_eq!(
        (&x[1..8], &x[9..]),
        (
            &[1.0, 0.0, 1.0, 1.5, 0.0, 1.0, 0.0][..],
            &[0.0, 0.0, 0.0][..]
        )
    );
    let odd = |odd: &OddCells| {
        (
            odd.column.clone(),
            odd.missing,
            odd.unseen,
            odd.examples.concat(),
        )
    };
    let odd: Vec<_> = contents.about.odd_cells.iter().map(odd).collect();
    let expected = [("a", 2, 0, ""), ("town", 1, 1, "Ulm"), ("month", 0, 1, "3")];
    assert_eq!(
        odd,
        expected.map(|(name, a, b, text)| (name.to_string(), a, b, text.to_string()))
    );
}
