//! Columns of texts as documents, and rows as records.

use super::*;

#[test]
fn the_rows_of_a_column_of_texts_are_documents() {
    let scratch = Scratch::new();
    let path = scratch.path().join("a.parquet");
    // Words that mark missing values in tables are texts here.
    let texts = ["first", "None", "", "12"];
    let columns = [Column::Whole32(&[0, 1, 2, 3]), Column::Texts(&texts)];
    let schema = "REQUIRED INT32 number; REQUIRED BYTE_ARRAY text (UTF8)";
    write(&path, schema, Compression::UNCOMPRESSED, &[&columns]);
    let read = |field| {
        let mut read = Vec::new();
        let options = ReadOptions {
            field,
            lossy: false,
            encoder: None,
            piece_bytes: 64,
            read_bytes: &Default::default(),
            columns: Some(crate::texts),
        };
        documents(&path, &options, &mut |piece| {
            read.push(piece.text);
            Ok(())
        })
        .map(|()| read)
    };
    assert_eq!(read("text").unwrap(), texts);
    for (field, part) in [
        (
            "content",
            "expected a column \"content\", got [number, text]",
        ),
        ("number", "got numbers"),
    ] {
        let error = read(field).unwrap_err();
        assert!(error.exit_code() == 65 && error.to_string().contains(part));
    }
}

/// Lists of messages, as Hugging Face's datasets write them: all have the same fields.
#[test]
fn rows_with_lists_become_records_without_nulls() {
    const SCHEMA: &str = "message table { optional group messages (LIST) { repeated group list { optional group element {
        optional binary role (UTF8); optional binary content (UTF8); optional binary name (UTF8); } } } }";
    let scratch = Scratch::new();
    let path = scratch.path().join("chats.parquet");
    let schema = Arc::new(parse_message_type(SCHEMA).unwrap());
    let file = File::create(&path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let roles = ["user", "assistant", "user"];
    for (texts, level) in [(&roles[..], 4), (&["Hi", "é", "Yo"], 4), (&[], 3)] {
        let mut column = group.next_column().unwrap().unwrap();
        let texts: Vec<_> = texts.iter().map(|text| ByteArray::from(*text)).collect();
        let typed = column.typed::<ByteArrayType>();
        typed
            .write_batch(&texts, Some(&[level; 3]), Some(&[0, 1, 0]))
            .unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
    let mut found = Vec::new();
    let mut add = |row, record: &str| {
        found.push((row, record.to_string()));
        Ok(())
    };
    READER.records(&path, &mut add).unwrap();
    let message = |role, content| format!("{{\"role\":\"{role}\",\"content\":\"{content}\"}}");
    let [hi, e, yo] =
        [("user", "Hi"), ("assistant", "é"), ("user", "Yo")].map(|(a, b)| message(a, b));
    let expected = [
        format!("{{\"messages\":[{hi},{e}]}}"),
        format!("{{\"messages\":[{yo}]}}"),
    ];
    assert_eq!(found, (0..).zip(expected).collect::<Vec<_>>());
    let mut bytes = fs::read(&path).unwrap();
    bytes
        .iter_mut()
        .take(60)
        .skip(4)
        .for_each(|byte| *byte = !*byte);
    fs::write(&path, bytes).unwrap();
    let error = READER.records(&path, &mut |_, _| Ok(())).unwrap_err();
    assert_eq!(error.exit_code(), 65, "{error}");
}
