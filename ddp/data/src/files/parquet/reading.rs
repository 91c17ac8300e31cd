//! Reads Parquet by row groups, a piece of all wanted columns at a time.
//!
//! Columns of integers, floats and bools are numbers; texts may be the label. Nulls, dates,
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

use super::super::conversion::{Columns, RowWriter, TableRequest, text_help};
use super::super::flat;
use super::super::gzip::RATIO_MAX;
use super::super::io::{reading, refuse};
use super::super::shown::shown_number;
use crate::error::{Error, Result};

/// Values of all columns together that are in memory.
const VALUES: usize = 1 << 18;
/// Column chunks up to this size, unpacked, may have any compression ratio.
const CHUNK_BYTES_MIN: u64 = 64 << 20;

/// The names of the columns of the table at `path`.
pub(in super::super) fn columns(path: &Path) -> Result<Vec<String>> {
    guarded(path, || Ok(names(&open(path)?)))
}

/// Writes the table's rows to `out`.
pub(in super::super) fn convert(
    path: &Path,
    request: &TableRequest<'_>,
    to: &Path,
    out: &mut flat::Writer,
) -> Result<flat::About> {
    guarded(path, || {
        let file = open(path)?;
        let columns = Columns::choose(path, request, names(&file))?;
        let wanted = wanted(&columns, &file)?;
        let has_text_labels = wanted.iter().any(|(_, kind)| *kind == ColumnKind::Text);
        let mut rows = RowWriter::new(&columns, to, out, has_text_labels)?;
        let mut first_row = 0;
        for group in 0..file.num_row_groups() {
            let group = file.get_row_group(group);
            let group = group.map_err(|error| damaged(path, &error))?;
            first_row = convert_group(&columns, &wanted, &*group, first_row, &mut rows)?;
        }
        rows.finish(&columns)
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
    let why = "the file is damaged, or of a kind that is not read";
    refuse(path, format!("{error}: {why}"))
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
    let features = columns.features.iter().map(|&column| (column, false));
    let label = columns.label.iter().map(|&column| (column, true));
    let kind = |(column, is_label): (usize, bool)| {
        let kind = kind_of(&schema.column(column), is_label);
        let name = &columns.names[column];
        let kind = kind.map_err(|what| columns.bad(format!("column \"{name}\" {what}")))?;
        Ok((column, kind))
    };
    features.chain(label).map(kind).collect()
}

/// The kind of a column, or why it is not read.
fn kind_of(column: &ColumnDescriptor, is_label: bool) -> Result<ColumnKind, String> {
    use ConvertedType as C;
    if column.max_rep_level() > 0 || column.path().parts().len() > 1 {
        return Err(
            "is nested: expected one value a row; help: give each value its own column".into(),
        );
    }
    if column.name() == "__index_level_0__" {
        return Err("is an index that pandas wrote; help: to_parquet(path, index=False)".into());
    }
    let (logical, converted) = (column.logical_type_ref(), column.converted_type());
    let is_plain = logical.is_none() && converted == C::NONE;
    match (column.physical_type(), logical, converted) {
        (Type::BYTE_ARRAY, Some(LogicalType::String | LogicalType::Enum), _)
        | (Type::BYTE_ARRAY, _, C::UTF8 | C::ENUM)
            if is_label =>
        {
            Ok(ColumnKind::Text)
        }
        (Type::BYTE_ARRAY, _, _) if is_plain && is_label => Ok(ColumnKind::Text),
        (Type::BYTE_ARRAY, Some(LogicalType::String | LogicalType::Enum) | None, _) => {
            let help = text_help(column.name());
            Err(format!("holds texts: expected numbers; {help}"))
        }
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
        (Type::INT32 | Type::INT64, _, _) => {
            Err("holds dates, times or decimals; help: turn them into numbers".into())
        }
        (other, _, _) => Err(format!(
            "holds {other}: expected integers, floats, bools, or texts as the label"
        )),
    }
}

/// Converts a row group whose first row is number `first_row` of the file. Returns the number of
/// the row after it.
fn convert_group(
    columns: &Columns<'_>,
    wanted: &[(usize, ColumnKind)],
    group: &dyn RowGroupReader,
    first_row: u64,
    rows: &mut RowWriter<'_>,
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
            let place = |index: usize| {
                let name = &columns.names[column];
                format!("row {}, column \"{name}\"", row + index as u64)
            };
            values.push(read(reader, kind, count).map_err(|problem| match problem {
                ReadProblem::Null(index) => columns.bad(format!(
                    "{}: expected a value, got null; help: fill it in (pandas: fillna) or remove the row (dropna)",
                    place(index)
                )),
                ReadProblem::Short => columns.bad(format!("{} is missing: the file is damaged", place(0))),
                ReadProblem::Reader(error) => failed(error),
            })?);
        }
        for index in 0..count {
            write_row(columns, &values, index, row, rows)?;
            row += 1;
        }
    }
    Ok(end)
}

/// Values of one column.
enum Values {
    Numbers(Vec<f64>),
    Texts(Vec<ByteArray>),
}

fn write_row(
    columns: &Columns<'_>,
    values: &[Values],
    index: usize,
    row: u64,
    rows: &mut RowWriter<'_>,
) -> Result<()> {
    let (features, label) = values.split_at(columns.features.len());
    for (feature, (&column, values)) in columns.features.iter().zip(features).enumerate() {
        let Values::Numbers(numbers) = values else {
            return Err(Error::Internal(
                "texts as features of a Parquet table".into(),
            ));
        };
        let number = numbers[index];
        if !(number as f32).is_finite() {
            let (place, cell) = (format!("row {row}"), shown_number(number));
            return Err(columns.bad_feature(&place, column, cell.as_bytes(), Some(number)));
        }
        rows.feature(feature, number);
    }
    if let (Some(column), Some(values)) = (columns.label, label.first()) {
        let name = &columns.names[column];
        let bad = |what| columns.bad(format!("row {row}, column \"{name}\": {what}"));
        match values {
            Values::Numbers(numbers) => rows.label(numbers[index].to_string().as_bytes(), bad)?,
            Values::Texts(texts) => rows.label(texts[index].data(), bad)?,
        }
    }
    rows.end_row()
}

/// What can be wrong with values.
enum ReadProblem {
    /// The value at this index is missing.
    Null(usize),
    /// The column has fewer values than the others.
    Short,
    Reader(ParquetError),
}

/// The next `count` values of a column.
fn read(reader: &mut ColumnReader, kind: ColumnKind, count: usize) -> Result<Values, ReadProblem> {
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
    Ok(raw(reader, count)?.into_iter().map(number).collect())
}

/// The next `count` values; a null is an error.
fn raw<T: DataType>(
    reader: &mut ColumnReaderImpl<T>,
    count: usize,
) -> Result<Vec<T::T>, ReadProblem> {
    let (mut values, mut levels) = (Vec::new(), Vec::new());
    let mut rows = 0;
    while rows < count {
        let read = reader.read_records(count - rows, Some(&mut levels), None, &mut values);
        let (records, _, _) = read.map_err(ReadProblem::Reader)?;
        // Columns without nulls have no levels; in others level 0 is a null.
        if let Some(index) = levels.iter().position(|&level| level == 0) {
            return Err(ReadProblem::Null(index));
        }
        if records == 0 {
            return Err(ReadProblem::Short);
        }
        rows += records;
    }
    match values.len() == count {
        true => Ok(values),
        false => Err(ReadProblem::Short),
    }
}

#[cfg(test)]
mod tests;
