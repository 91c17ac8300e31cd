//! Reads Parquet by row groups, a piece of all wanted columns at a time.
//!
//! Columns of integers, floats and bools are numbers, those of strings and bytes texts. Dates,
//! decimals and nested columns are errors. The places and sizes in the metadata are checked against
//! the size of the file before anything is read. The crate limits a page to 2 GiB.

use std::fs::File;
use std::path::Path;

use ::parquet::basic::{ConvertedType, LogicalType, Type};
use ::parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use ::parquet::data_type::{ByteArray, DataType};
use ::parquet::errors::ParquetError;
use ::parquet::file::metadata::ColumnChunkMetaData;
use ::parquet::file::reader::{FileReader, RowGroupReader, SerializedFileReader};
use ::parquet::schema::types::ColumnDescriptor;
use ddp_kernels::dtype::f16;
use ddp_kernels::panics;

use super::super::cell::{Cell, CellSink};
use super::super::conversion::Columns;
use super::super::gzip::RATIO_MAX;
use super::super::io::{reading, refuse};
use crate::error::{Error, Result};

/// Values of all columns together that are in memory.
const VALUES: usize = 1 << 18;
/// Column chunks up to this size, unpacked, may have any compression ratio.
const CHUNK_BYTES_MIN: u64 = 64 << 20;

/// The names of the columns of the table at `path`.
pub(in super::super) fn columns(path: &Path) -> Result<Vec<String>> {
    guarded(path, || Ok(names(&open(path)?)))
}

/// Gives all cells of the wanted columns to `sink`.
pub(in super::super) fn read(columns: &Columns<'_>, sink: &mut impl CellSink) -> Result<()> {
    guarded(columns.path, || {
        let file = open(columns.path)?;
        let wanted = wanted(columns, &file)?;
        let mut first_row = 0;
        for group in 0..file.num_row_groups() {
            let group = file.get_row_group(group);
            let group = group.map_err(|error| damaged(columns.path, &error))?;
            first_row = read_group(columns, &wanted, &*group, first_row, sink)?;
        }
        Ok(())
    })
}

/// A damaged file may make the crate panic.
fn guarded<T>(path: &Path, read: impl FnOnce() -> Result<T>) -> Result<T> {
    let why = "it is damaged: its reader gave up; help: write it again";
    panics::caught(read).unwrap_or_else(|| Err(refuse(path, why)))
}

fn open(path: &Path) -> Result<SerializedFileReader<File>> {
    let file = File::open(path).map_err(reading(path))?;
    let bytes = file.metadata().map_err(reading(path))?.len();
    let reader = SerializedFileReader::new(file).map_err(|error| damaged(path, &error))?;
    let groups = reader.metadata().row_groups().iter();
    for chunk in groups.flat_map(|group| group.columns()) {
        check_chunk(chunk, bytes).map_err(|what| {
            let name = chunk.column_path().string();
            refuse(path, format!("column \"{name}\": {what}: it is damaged"))
        })?;
    }
    Ok(reader)
}

/// Whether what the metadata claim of a column chunk can be.
fn check_chunk(chunk: &ColumnChunkMetaData, file_bytes: u64) -> Result<(), String> {
    let start = chunk.dictionary_page_offset();
    let start = start.unwrap_or(chunk.data_page_offset());
    let (packed, unpacked) = (chunk.compressed_size(), chunk.uncompressed_size());
    let as_u64 = |number: i64| u64::try_from(number).ok();
    let end = as_u64(start).zip(as_u64(packed));
    let end = end.and_then(|(start, bytes)| start.checked_add(bytes));
    if end.is_none_or(|end| end > file_bytes) || chunk.num_values() < 0 {
        return Err(format!(
            "its metadata claim {packed} bytes from byte {start} on, but the file has {file_bytes}"
        ));
    }
    match as_u64(unpacked) {
        Some(bytes) if bytes <= CHUNK_BYTES_MIN.max(packed as u64 * RATIO_MAX) => Ok(()),
        _ => Err(format!(
            "its metadata claim that {packed} bytes unpack to {unpacked}"
        )),
    }
}

fn damaged(path: &Path, error: &ParquetError) -> Error {
    let text = error.to_string();
    let why = match text.contains("Disabled feature") {
        true => "its compression is not read; help: write it again, with zstd or snappy",
        false => "it is damaged, or of a kind that is not read; help: write it again",
    };
    refuse(path, format!("{why} ({text})"))
}

fn names(file: &SerializedFileReader<File>) -> Vec<String> {
    let schema = file.metadata().file_metadata().schema_descr();
    let columns = schema.columns().iter();
    columns.map(|column| column.path().string()).collect()
}

/// How the values of a column become numbers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ColumnKind {
    Signed,
    Unsigned,
    Half,
    Text,
}

/// The columns that are read: the features, then the label.
fn wanted(
    columns: &Columns<'_>,
    file: &SerializedFileReader<File>,
) -> Result<Vec<(usize, ColumnKind)>> {
    let schema = file.metadata().file_metadata().schema_descr();
    let features = columns.features.iter().map(|feature| feature.column);
    let kind = |column: usize| {
        let kind = kind_of(&schema.column(column));
        let name = &columns.names[column];
        let kind = kind.map_err(|what| columns.bad(format!("column \"{name}\" {what}")))?;
        Ok((column, kind))
    };
    features
        .chain(columns.labels.iter().copied())
        .map(kind)
        .collect()
}

/// The kind of a column, or why it is not read.
fn kind_of(column: &ColumnDescriptor) -> Result<ColumnKind, String> {
    use ConvertedType as C;
    if column.max_rep_level() > 0 || column.path().parts().len() > 1 {
        return Err(
            "is nested: expected one value a row; help: give each value its own column, or leave it out: `drop`".into(),
        );
    }
    if column.name() == "__index_level_0__" {
        return Err("is an index that pandas wrote; help: leave it out: `drop` __index_level_0__, or save without it: \
             to_parquet(path, index=False)".into());
    }
    let (logical, converted) = (column.logical_type_ref(), column.converted_type());
    let is_plain = logical.is_none() && converted == C::NONE;
    match (column.physical_type(), logical, converted) {
        (Type::BYTE_ARRAY, Some(LogicalType::String | LogicalType::Enum), _)
        | (Type::BYTE_ARRAY, _, C::UTF8 | C::ENUM) => Ok(ColumnKind::Text),
        (Type::BYTE_ARRAY, _, _) if is_plain => Ok(ColumnKind::Text),
        (Type::FIXED_LEN_BYTE_ARRAY, Some(LogicalType::Float16), _) => Ok(ColumnKind::Half),
        (Type::BOOLEAN | Type::FLOAT | Type::DOUBLE, _, _) => Ok(ColumnKind::Signed),
        (Type::INT32 | Type::INT64, Some(LogicalType::Integer(kind)), _) => match kind.is_signed {
            true => Ok(ColumnKind::Signed),
            false => Ok(ColumnKind::Unsigned),
        },
        (
            Type::INT32 | Type::INT64,
            None,
            C::NONE | C::INT_8 | C::INT_16 | C::INT_32 | C::INT_64,
        ) => Ok(ColumnKind::Signed),
        (Type::INT32 | Type::INT64, None, C::UINT_8 | C::UINT_16 | C::UINT_32 | C::UINT_64) => {
            Ok(ColumnKind::Unsigned)
        }
        (_, Some(LogicalType::Unknown), _) => {
            Err("holds no values at all; help: leave it out: `drop`".into())
        }
        (Type::INT32 | Type::INT64, _, _)
        | (_, Some(LogicalType::Decimal(_)), _)
        | (_, _, C::DECIMAL) => Err(
            "holds dates, times or decimals; help: turn them into numbers, or leave it out: `drop`"
                .into(),
        ),
        (other, _, _) => Err(format!(
            "holds {other}: expected integers, floats, bools or texts; help: leave it out: `drop`"
        )),
    }
}

/// Reads a row group whose first row is number `first_row` of the file. Returns the number of the
/// row after it.
fn read_group(
    columns: &Columns<'_>,
    wanted: &[(usize, ColumnKind)],
    group: &dyn RowGroupReader,
    first_row: u64,
    sink: &mut impl CellSink,
) -> Result<u64> {
    let failed = |error| damaged(columns.path, &error);
    let row_count = u64::try_from(group.metadata().num_rows());
    let row_count =
        row_count.map_err(|_| columns.bad("it claims a negative number of rows".into()))?;
    let readers = wanted
        .iter()
        .map(|&(column, _)| group.get_column_reader(column));
    let mut readers = readers.collect::<Result<Vec<_>, _>>().map_err(failed)?;
    let rows_at_once = (VALUES / wanted.len().max(1)).clamp(1, 8192) as u64;
    let (mut row, end) = (first_row, first_row + row_count);
    while row < end {
        let count = (end - row).min(rows_at_once) as usize;
        let mut values = Vec::new();
        for (reader, &(column, kind)) in readers.iter_mut().zip(wanted) {
            let name = &columns.names[column];
            values.push(
                read_values(reader, kind, count).map_err(|problem| match problem {
                    ReadProblem::Short => columns.bad(format!(
                        "row {row}, column \"{name}\" is missing: the file is damaged"
                    )),
                    ReadProblem::Reader(error) => failed(error),
                })?,
            );
        }
        for index in 0..count {
            read_row(columns, &values, index, row, sink)?;
            row += 1;
        }
    }
    Ok(end)
}

/// Values of one column. A null is NaN or `None`.
enum Values {
    Numbers(Vec<f64>),
    Texts(Vec<Option<ByteArray>>),
}

fn read_row(
    columns: &Columns<'_>,
    values: &[Values],
    index: usize,
    row: u64,
    sink: &mut impl CellSink,
) -> Result<()> {
    let place = || format!("row {row}");
    let (features, labels) = values.split_at(columns.features.len());
    for (feature, values) in features.iter().enumerate() {
        let text;
        let cell = match values {
            Values::Numbers(numbers) if numbers[index].is_nan() => Cell::Missing,
            Values::Numbers(numbers) => {
                text = match sink.wants_text(feature) {
                    true => numbers[index].to_string(),
                    false => String::new(),
                };
                Cell::Number(numbers[index], text.as_bytes())
            }
            Values::Texts(texts) => match &texts[index] {
                Some(text) => as_text(text.data()),
                None => Cell::Missing,
            },
        };
        sink.feature(feature, cell, &place)?;
    }
    for (label, values) in labels.iter().enumerate() {
        match values {
            Values::Numbers(numbers) if numbers[index].is_nan() => {
                sink.label(label, b"", false, &place)?;
            }
            Values::Numbers(numbers) => {
                sink.label(label, numbers[index].to_string().as_bytes(), false, &place)?;
            }
            Values::Texts(texts) => {
                let text = texts[index].as_ref().map_or(&b""[..], ByteArray::data);
                sink.label(label, text, true, &place)?;
            }
        }
    }
    sink.end_row()
}

/// A text as a cell: it stays one if it looks like a number.
fn as_text(text: &[u8]) -> Cell<'_> {
    match Cell::of(text) {
        Cell::Number(_, text) => Cell::Text(text),
        cell => cell,
    }
}

/// What can be wrong with values.
enum ReadProblem {
    /// The column has fewer values than the others.
    Short,
    Reader(ParquetError),
}

/// The next `count` values of a column.
fn read_values(
    reader: &mut ColumnReader,
    kind: ColumnKind,
    count: usize,
) -> Result<Values, ReadProblem> {
    let is_unsigned = kind == ColumnKind::Unsigned;
    let half = |bytes: &[u8]| {
        bytes
            .try_into()
            .map_or(f64::NAN, |bytes| f16::from_le_bytes(bytes).to_f64())
    };
    let numbers = match reader {
        ColumnReader::ByteArrayColumnReader(reader) => {
            return Ok(Values::Texts(raw(reader, count)?));
        }
        ColumnReader::FixedLenByteArrayColumnReader(reader) => {
            numbers(reader, count, |value| half(value.data()))
        }
        ColumnReader::BoolColumnReader(reader) => {
            numbers(reader, count, |value| f64::from(u8::from(value)))
        }
        ColumnReader::Int32ColumnReader(reader) if is_unsigned => {
            numbers(reader, count, |value| f64::from(value.cast_unsigned()))
        }
        ColumnReader::Int32ColumnReader(reader) => numbers(reader, count, f64::from),
        ColumnReader::Int64ColumnReader(reader) if is_unsigned => {
            numbers(reader, count, |value| value.cast_unsigned() as f64)
        }
        ColumnReader::Int64ColumnReader(reader) => numbers(reader, count, |value| value as f64),
        ColumnReader::FloatColumnReader(reader) => numbers(reader, count, f64::from),
        ColumnReader::DoubleColumnReader(reader) => numbers(reader, count, |value| value),
        ColumnReader::Int96ColumnReader(_) => Err(ReadProblem::Short),
    };
    Ok(Values::Numbers(numbers?))
}

fn numbers<T: DataType>(
    reader: &mut ColumnReaderImpl<T>,
    count: usize,
    number: impl Fn(T::T) -> f64,
) -> Result<Vec<f64>, ReadProblem> {
    let number = |value: Option<T::T>| value.map_or(f64::NAN, &number);
    Ok(raw(reader, count)?.into_iter().map(number).collect())
}

/// The next `count` values.
fn raw<T: DataType>(
    reader: &mut ColumnReaderImpl<T>,
    count: usize,
) -> Result<Vec<Option<T::T>>, ReadProblem> {
    let (mut values, mut levels) = (Vec::new(), Vec::new());
    let mut rows = 0;
    while rows < count {
        let read = reader.read_records(count - rows, Some(&mut levels), None, &mut values);
        let (records, _, _) = read.map_err(ReadProblem::Reader)?;
        if records == 0 {
            return Err(ReadProblem::Short);
        }
        rows += records;
    }
    // Columns without nulls have no levels; in others level 0 is a null.
    let nulls = levels.iter().filter(|&&level| level == 0).count();
    if values.len() + nulls != count || !(levels.is_empty() || levels.len() == count) {
        return Err(ReadProblem::Short);
    }
    let mut values = values.into_iter();
    let value = |row: usize| match levels.get(row) {
        Some(0) => None,
        _ => values.next(),
    };
    Ok((0..count).map(value).collect())
}

#[cfg(test)]
mod tests;
