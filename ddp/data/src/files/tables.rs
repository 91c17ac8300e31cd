//! How tables and files of conversations are recognised. Another crate reads tables (`Tables` in
//! `tables.rs`), `chat` reads conversations.

use crate::files::format::{Format, Holds, PLAIN, TableFormat};

pub(super) static CSV: Format = Format {
    name: "a table of text (.csv, .tsv)",
    endings: &[".csv", ".tsv"],
    holds: Holds::Table(TableFormat::Csv),
    ..PLAIN
};

pub(super) static JSONL: Format = Format {
    name: "a .jsonl file",
    endings: &[".jsonl", ".ndjson"],
    holds: Holds::Conversations,
    ..PLAIN
};

pub(super) static PARQUET: Format = Format {
    name: "a .parquet file",
    endings: &[".parquet", ".pq"],
    // A column may be called PAR1: the end is the length of the metadata and the same letters.
    begins: |file| {
        let [a, b, c, d, letters @ ..] = file.end;
        let metadata_bytes = u64::from(u32::from_le_bytes([a, b, c, d]));
        file.start.starts_with(b"PAR1") && letters == *b"PAR1" && metadata_bytes + 12 <= file.bytes
    },
    must_begin: Some(
        "it does not begin and end as Parquet files do: it is cut short, damaged or of another format; help: write it again",
    ),
    holds: Holds::Table(TableFormat::Parquet),
};
