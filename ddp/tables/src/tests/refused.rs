//! Tables that are refused: what is wrong, with line and column.

use super::*;

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
