use proptest::prelude::*;

use ddp_data::Error;
use ddp_data::words::number;

use crate::csv::*;

/// Gives a few bytes at a time.
struct Dribble<'a>(&'a [u8], usize);

impl Read for Dribble<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.1.min(into.len()).min(self.0.len());
        into[..count].copy_from_slice(&self.0[..count]);
        self.0 = &self.0[count..];
        Ok(count)
    }
}

/// The cells of all records, each record with its line.
fn read_with(
    bytes: &[u8],
    tabs: bool,
    buffer_bytes: usize,
) -> Result<Vec<(u64, Vec<String>)>, String> {
    let name = if tabs { "t.tsv" } else { "t.csv" };
    let text = |error: Error| {
        error
            .to_string()
            .replace(&format!("cannot read {name}: "), "")
    };
    let input = Dribble(bytes, 3);
    let mut records =
        Records::new(Path::new(name), input, (buffer_bytes, 1 << 20)).map_err(text)?;
    let mut all = Vec::new();
    while records.advance().map_err(text)? {
        let record = &records;
        let cells =
            (0..record.len()).map(|cell| String::from_utf8_lossy(record.cell(cell)).into_owned());
        all.push((record.first_line(), cells.collect()));
    }
    Ok(all)
}

fn read(text: &str) -> Vec<(u64, Vec<String>)> {
    let read = read_with(text.as_bytes(), false, 1 << 12).unwrap();
    // However little of the file is in memory at first.
    assert_eq!(
        read_with(text.as_bytes(), false, 16).unwrap(),
        read,
        "{text:?}"
    );
    read
}

#[track_caller]
fn assert_reads(text: &str, records: &[(u64, &[&str])]) {
    let expected: Vec<_> = records
        .iter()
        .map(|(line, cells)| {
            (
                *line,
                cells
                    .iter()
                    .map(|cell| cell.to_string())
                    .collect::<Vec<_>>(),
            )
        })
        .collect();
    assert_eq!(read(text), expected, "{text:?}");
}

#[test]
fn lines_may_end_in_any_way_and_are_counted() {
    let records: &[(u64, &[&str])] = &[(1, &["a", "b"]), (2, &["1", "2"]), (4, &["3", ""])];
    assert_reads("a,b\n1,2\n\n3,\n", records);
    assert_reads("a,b\r\n1,2\r\n\r\n3,", records);
    assert_reads("a,b\r1,2\r\r3,\r", records);
    assert_reads("\u{feff}a,b\n1,2\n\n3,\n\n\n", records);
    assert_reads("", &[]);
    assert_reads("\n\r\n\r", &[]);
    assert_reads("\n\nx", &[(3, &["x"])]);
}

#[test]
fn quotes_hold_delimiters_quotes_and_ends_of_lines() {
    assert_reads(
        "\"a,b\",\"\"\n\"he said \"\"no\"\"\",2\n",
        &[(1, &["a,b", ""]), (2, &["he said \"no\"", "2"])],
    );
    assert_reads(
        "x,y\n\"1\n2\r\n3\",4\n5,6\n",
        &[(1, &["x", "y"]), (2, &["1\n2\r\n3", "4"]), (5, &["5", "6"])],
    );
    assert_reads("\"end\"", &[(1, &["end"])]);
    // What follows a quoted part belongs to the cell, as pandas has it.
    assert_reads("a,\"b\"c\n", &[(1, &["a", "bc"])]);
    // In the middle of a cell a quote is a letter like any other.
    assert_reads("5\" pipe,a\"b\"\n", &[(1, &["5\" pipe", "a\"b\""])]);
}

#[test]
fn a_cell_is_on_the_line_on_which_it_begins() {
    let text = b"x,y,z\n\"1\n\n2\",\"3\n\",4\n";
    let mut records = Records::new(
        Path::new("t.csv"),
        &text[..],
        (BUFFER_BYTES, RECORD_BYTES_MAX),
    )
    .unwrap();
    assert!(records.advance().unwrap() && records.advance().unwrap());
    assert_eq!([0, 1, 2].map(|cell| records.line_of(cell)), [2, 4, 5]);
}

#[test]
fn spaces_around_cells_do_not_count() {
    assert_reads(
        "a , b,c\n 1,\"2\"\t ,\" 3 \"\n",
        &[(1, &["a", "b", "c"]), (2, &["1", "2", "3"])],
    );
    // In quotes those of a text do: `cat` and `" cat"` are two texts, as in pandas.
    assert_reads(
        "a,b,c\n cat ,\" cat\",\"NA \"\n\"a\"\"b \", x\" ,\"  \"\n",
        &[
            (1, &["a", "b", "c"]),
            (2, &["cat", " cat", "NA"]),
            (3, &["a\"b ", "x\"", ""]),
        ],
    );
}

#[test]
fn the_header_tells_the_delimiter() {
    assert_reads("a;b\n1;2,5\n", &[(1, &["a", "b"]), (2, &["1", "2,5"])]);
    assert_reads("a\tb\n1\t2\n", &[(1, &["a", "b"]), (2, &["1", "2"])]);
    assert_reads("\"a,b\";c\n", &[(1, &["a,b", "c"])]);
    assert_eq!(
        read_with(b"a,b\tc\n", true, 64).unwrap(),
        [(1, vec!["a,b".to_string(), "c".into()])]
    );
    // Empty cells between tabs are cells.
    assert_eq!(
        read_with(b"\t \t\n", true, 64).unwrap(),
        [(1, vec![String::new(); 3])]
    );
}

#[test]
fn of_several_delimiters_in_the_header_the_one_counts_that_splits_all_lines_alike() {
    let rows: &[(u64, &[&str])] = &[(1, &["m2;kind", "x"]), (2, &["1", "2"]), (3, &["3", "4"])];
    assert_reads("m2;kind,x\n1,2\n3,4\n", rows);
    let rows: &[(u64, &[&str])] = &[(1, &["m2,kind", "x"]), (2, &["1", "2"]), (3, &["3", "4"])];
    assert_reads("m2,kind;x\n1;2\n3;4\n", rows);
    assert_reads("m2,kind\tx\n1\t2\n3\t4\n", rows);
    // Decimal commas in some rows.
    let read = |text: &str| read_with(text.as_bytes(), false, 1 << 12);
    let first = |text: &str| read(text).unwrap()[0].1.clone();
    assert_eq!(first("a,b;c\n1,5;2\n3;4\n"), ["a,b", "c"]);
    // Quotes around cells rule out the semicolon.
    for text in ["a,b;c\n\"x\",1\n", "a,b;c\n\"x;y\",1\n\"z\",2\n"] {
        assert_eq!(first(text), ["a", "b;c"], "{text}");
        let long = text.to_string() + &"\"x\",1\n".repeat(2000);
        assert_eq!(first(&long), ["a", "b;c"]);
    }
    // A row that is cut off where the first buffer ends does not count.
    let long = "a,b;c\n".to_string() + &"1;2\n".repeat(2000);
    assert_eq!(first(&long).len(), 2);
    for text in ["a;b,c\n", "a,b;c\n1,5;2\n"] {
        let error = read(text).unwrap_err();
        let parts = ["line 1: expected one delimiter", "help: put quotes"];
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
    assert_reads(
        "\"a,b\";c\n\"1,5\";2\n",
        &[(1, &["a,b", "c"]), (2, &["1,5", "2"])],
    );
}

#[test]
fn what_is_no_csv_is_named_with_its_line() {
    for (text, parts) in [
        (
            &b"a,b\n1,\"2\n3,4\n"[..],
            ["line 2", "the quote that opens cell 2 is never closed"],
        ),
        (b"\xff\xfea\0,\0", ["line 1", "UTF-16"]),
    ] {
        for buffer_bytes in [8, 1 << 12] {
            let error = read_with(text, false, buffer_bytes).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }
}

#[test]
fn a_row_that_does_not_end_is_not_read_into_memory() {
    let endless = b"a\n\""
        .iter()
        .copied()
        .chain(std::iter::repeat_n(b'x', 1 << 16))
        .collect::<Vec<_>>();
    let mut records = Records::new(Path::new("t.csv"), &endless[..], (64, 1 << 12)).unwrap();
    records.advance().unwrap();
    let what = records.advance().unwrap_err().to_string();
    assert!(
        what.contains("line 2: ") && what.contains("does not end within 4096 bytes"),
        "{what}"
    );
    assert!(records.text.len() <= 1 << 13);
}

#[test]
fn numbers_are_as_the_standard_library_reads_them() {
    for text in [
        "0",
        "-0",
        "1",
        "-12.5",
        "0.1",
        ".5",
        "5.",
        "123456789012345",
        "1234567890123456",
        "1e-3",
        "1E5",
        "+7",
        "0.000000000000001",
        "9007199254740993",
        "1e400",
        "NaN",
        "inf",
        "-Infinity",
    ] {
        let (ours, theirs) = (
            number(text.as_bytes()).unwrap(),
            text.parse::<f64>().unwrap(),
        );
        assert_eq!(ours.to_bits(), theirs.to_bits(), "{text}");
    }
    for text in [
        "", "-", ".", "-.", "1,5", "0x10", "1 2", "1e", "--1", "1.2.3", "١", "1_000",
    ] {
        assert_eq!(number(text.as_bytes()), None, "{text}");
    }
    assert_eq!(number(b"\xff"), None);
}

#[test]
fn a_record_has_as_many_cells_as_can_be_columns() {
    let read = |commas: usize| {
        let text = [&b"x,y\n"[..], &vec![b','; commas], b"\n"].concat();
        let mut records = Records::new(
            Path::new("t.csv"),
            &text[..],
            (BUFFER_BYTES, RECORD_BYTES_MAX),
        )
        .unwrap();
        records.advance().unwrap();
        records.advance().map(|more| {
            assert!(more);
            records.len()
        })
    };
    assert_eq!(read(CELLS_MAX - 1).unwrap(), CELLS_MAX);
    let what = read(CELLS_MAX).unwrap_err().to_string();
    assert!(
        what.contains("line 2: ") && what.contains("has more than 4194304 cells"),
        "{what}"
    );
}

proptest! {
    #[test]
    fn every_number_is_rounded_once(whole in any::<u64>(), digits in 0..19u32, decimals in 0..19usize, negative: bool) {
        let mut text = format!("{:020}", whole % 10u64.pow(digits + 1));
        text.insert(20 - decimals, '.');
        for text in [text.trim_start_matches('0'), &text] {
            let text = format!("{}{text}", if negative { "-" } else { "" });
            let theirs = text.parse::<f64>().ok();
            prop_assert_eq!(number(text.as_bytes()).map(f64::to_bits), theirs.map(f64::to_bits), "{}", text);
        }
    }

    #[test]
    fn what_another_program_writes_is_read(
        rows in prop::collection::vec(prop::collection::vec("[a,;\"\n\r é]{0,6}", 2..4), 1..6),
        crlf: bool,
        always: bool,
        buffer_bytes in 4..64usize,
    ) {
        let mut writer = ::csv::WriterBuilder::new()
            .flexible(true)
            .terminator(if crlf { ::csv::Terminator::CRLF } else { ::csv::Terminator::Any(b'\n') })
            .quote_style(if always { ::csv::QuoteStyle::Always } else { ::csv::QuoteStyle::Necessary })
            .from_writer(b"a,b\n".to_vec());
        for row in &rows {
            writer.write_record(row).unwrap();
        }
        let written = writer.into_inner().unwrap();
        let read = read_with(&written, false, buffer_bytes).unwrap();
        prop_assert_eq!(read.len(), rows.len() + 1);
        let mut line = 2;
        for ((at, cells), row) in read[1..].iter().zip(&rows) {
            prop_assert_eq!(*at, line);
            let is_quoted = |cell: &str| always || cell.contains([',', '"', '\n', '\r']);
            let expected = |cell: &String| match cell.trim_ascii() {
                text if is_quoted(cell) && !text.is_empty() => cell.clone(),
                text => text.to_string(),
            };
            prop_assert_eq!(cells, &row.iter().map(expected).collect::<Vec<_>>());
            line += 1 + row.iter().map(|cell| cell.matches('\n').count() as u64).sum::<u64>();
        }
    }

    #[test]
    fn any_bytes_are_records_or_an_error(bytes in prop::collection::vec(prop::sample::select(&b"a1,\"\n\r \t;"[..]), 0..40)) {
        let (small, large) = (read_with(&bytes, false, 4), read_with(&bytes, false, 1 << 12));
        // The delimiter is looked for in what has come at first.
        if !bytes.contains(&b';') && !bytes.contains(&b'\t') {
            prop_assert_eq!(small, large);
        }
    }
}
