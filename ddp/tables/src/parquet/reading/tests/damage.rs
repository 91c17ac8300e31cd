//! Files that are damaged, or claim more than they hold.

use super::*;

#[test]
fn a_page_that_claims_too_much_is_refused() {
    let table = Table::new("REQUIRED DOUBLE a", &[&[Column::F64(&[1.0; 2000])]]);
    let whole = fs::read(&table.path).unwrap();
    // Behind the first letters: the page's type, then its size in three bytes at most.
    assert_eq!(
        (&whole[..4], whole[4], whole[6]),
        (&b"PAR1"[..], 0x15, 0x15)
    );
    let size = whole[7..].iter().position(|byte| byte & 128 == 0).unwrap() + 1;
    // 2^31 - 2.
    let claimed = [
        &whole[..7],
        &[0xfc, 0xff, 0xff, 0xff, 0x0f],
        &whole[7 + size..],
    ]
    .concat();
    fs::write(&table.path, claimed).unwrap();
    table.assert_refused(None, &["it is damaged"]);
}

#[test]
fn a_dictionary_that_claims_too_much_is_refused() {
    let table = Table::new(
        "REQUIRED DOUBLE a; REQUIRED BYTE_ARRAY y (UTF8)",
        &[&[Column::F64(&[1.0; 3]), Column::Texts(&["a", "b", "c"])]],
    );
    let whole = fs::read(&table.path).unwrap();
    // The header of the dictionary begins with the number of its values, twice 3 in one byte.
    let at = whole
        .windows(3)
        .position(|bytes| bytes == [0x4c, 0x15, 6])
        .unwrap()
        + 2;
    let claimed = [&whole[..at], &[0xfe, 0xff, 0xff, 0x0f], &whole[at + 1..]].concat();
    fs::write(&table.path, claimed).unwrap();
    let text = table.open(Some("y")).unwrap_err().to_string();
    let says = "it is damaged, or of a kind that is not read; help: write it again (Parquet error: a dictionary of";
    assert!(text.contains(says), "{text}");
}

#[test]
fn a_page_is_as_large_as_it_may_be() {
    let table = Table::new("REQUIRED DOUBLE a", &[&[Column::F64(&[1.0; 2000])]]);
    let file = open(&table.path).unwrap();
    // The dictionary has one number.
    for (bytes_max, fits) in [(8u64, true), (7, false)] {
        let group = file.get_row_group(0).unwrap();
        let pages = group.get_column_page_reader(0).unwrap();
        let mut checked = CheckedPages { pages, bytes_max };
        let all: Result<Vec<_>, _> = checked.by_ref().collect();
        assert_eq!(all.is_ok(), fits, "{all:?}");
    }
}

#[test]
fn an_encoding_with_counts_of_its_own_is_refused() {
    let page = |encoding| Page::DataPage {
        buf: vec![0; 8].into(),
        num_values: 1,
        encoding,
        def_level_encoding: Encoding::RLE,
        rep_level_encoding: Encoding::RLE,
        statistics: None,
    };
    let check = |encoding| check_page(&page(encoding), 8);
    check(Encoding::DELTA_BINARY_PACKED).unwrap();
    let error = check(Encoding::DELTA_BYTE_ARRAY).unwrap_err();
    let text = damaged(Path::new("a.parquet"), &error).to_string();
    let says = "texts in the encoding DELTA_BYTE_ARRAY: write them plain";
    assert!(text.contains(says), "{text}");
}

#[test]
fn damage_anywhere_is_an_error_or_another_number() {
    let table = Table::new(
        "REQUIRED INT64 a; OPTIONAL DOUBLE b; REQUIRED BYTE_ARRAY y (UTF8)",
        &[&[
            Column::Whole64(&[1, 2, 3]),
            Column::Sparse(&[1.0, 2.0, 3.0], &[1, 1, 1]),
            Column::Texts(&["a", "b", "a"]),
        ]],
    );
    let whole = fs::read(&table.path).unwrap();
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x11;
        for bytes in [&whole[..at], &damaged] {
            fs::write(&table.path, bytes).unwrap();
            if let Err(error) = table.open(Some("y")) {
                assert_eq!(error.exit_code(), 65, "byte {at}: {error}");
            }
        }
    }
}

#[test]
fn a_compression_that_is_not_read_is_named() {
    let error = ParquetError::General("Disabled feature at compile time: brotli".into());
    let text = damaged(Path::new("a.parquet"), &error).to_string();
    assert!(
        text.contains("its compression is not read") && text.contains("brotli"),
        "{text}"
    );
}
