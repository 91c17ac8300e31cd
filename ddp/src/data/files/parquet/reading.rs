//! Reads Parquet by row groups: of each column so many values at a time that a piece of all columns fits in memory.
//!
//! Columns of whole numbers, of f16, f32, f64 and of bool are numbers; texts may be the label. Nulls, dates, decimals and nested columns are
//! errors. Where the file says that its columns lie is compared with its length before it is believed. A page is unpacked whole,
//! and is as large as its writer made it; `pages.rs` refuses those that claim more than can be.

mod pages;

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use ::parquet::basic::{ConvertedType, LogicalType, Type};
use ::parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use ::parquet::data_type::{ByteArray, DataType};
use ::parquet::errors::ParquetError;
use ::parquet::file::metadata::ColumnChunkMetaData;
use ::parquet::file::reader::{FileReader, RowGroupReader, SerializedFileReader};
use ::parquet::schema::types::ColumnDescriptor;
use ddp_kernels::mapped::Mapped;

use super::super::cache::reading;
use super::super::table::{Columns, Rows};
use super::super::{flat, map, refuse};
use crate::error::{Error, Result};

/// So many values of all columns together are in memory.
const VALUES: usize = 1 << 18;

/// What the columns of the table at `path` are called.
pub(in super::super) fn columns(path: &Path) -> Result<Vec<String>> {
    guarded(path, || Ok(names(&open(path)?)))
}

/// Writes the table's rows to `out`.
pub(in super::super) fn convert(columns: &mut Columns<'_>, out: &mut flat::Writer) -> Result<flat::About> {
    guarded(columns.path, || {
        let file = open(columns.path)?;
        columns.choose(names(&file))?;
        let wanted = Wanted::of(columns, &file)?;
        let mapped = map(columns.path)?;
        let count = file.metadata().file_metadata().num_rows().unsigned_abs();
        let mut rows = Rows::new(columns, out, count.saturating_mul(4 * columns.features.len() as u64))?;
        for group in 0..file.num_row_groups() {
            let group = file.get_row_group(group).map_err(|error| damaged(columns.path, error))?;
            wanted.check_pages(columns, &mapped, &*group)?;
            wanted.convert_group(columns, &*group, &mut rows)?;
        }
        rows.finish(columns)
    })
}

/// A damaged file may lead the reader to a panic, of which the user is to see what is wrong with which file.
fn guarded<T>(path: &Path, read: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(read))
        .unwrap_or_else(|_| Err(refuse(path, "it is damaged: its reader gave up. Write it again")))
}

fn open(path: &Path) -> Result<SerializedFileReader<File>> {
    let file = File::open(path).map_err(reading(path))?;
    let bytes = file.metadata().map_err(reading(path))?.len();
    let reader = SerializedFileReader::new(file).map_err(|error| damaged(path, error))?;
    let chunks = reader.metadata().row_groups().iter().flat_map(|group| group.columns());
    for chunk in chunks {
        check_place(chunk, bytes).map_err(|what| refuse(path, what))?;
    }
    Ok(reader)
}

fn check_place(chunk: &ColumnChunkMetaData, file_bytes: u64) -> Result<(), String> {
    let start = chunk.dictionary_page_offset().unwrap_or(chunk.data_page_offset());
    let end = u64::try_from(start).ok().zip(u64::try_from(chunk.compressed_size()).ok());
    match end.and_then(|(start, length)| start.checked_add(length)) {
        Some(end) if end <= file_bytes && chunk.num_values() >= 0 => Ok(()),
        _ => Err(format!(
            "its column \"{}\" is said to lie at {start}, {} bytes long, and the file has {file_bytes}",
            chunk.column_path().string(),
            chunk.compressed_size()
        )),
    }
}

fn damaged(path: &Path, error: ParquetError) -> Error {
    refuse(path, format!("{error}. The file is damaged, or of a kind that is not read"))
}

fn names(file: &SerializedFileReader<File>) -> Vec<String> {
    file.metadata().file_metadata().schema_descr().columns().iter().map(|column| column.path().string()).collect()
}

/// How values of a column become numbers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Number { unsigned: bool },
    Half,
    Text,
}

/// Where values of one column are read to.
enum Values {
    Numbers(Vec<f64>),
    Texts(Vec<ByteArray>),
}

/// The columns that are read: those of features, then the label's.
struct Wanted {
    columns: Vec<(usize, Kind)>,
    rows_at_once: usize,
}

impl Wanted {
    fn of(columns: &Columns<'_>, file: &SerializedFileReader<File>) -> Result<Wanted> {
        let schema = file.metadata().file_metadata().schema_descr();
        let mut wanted = Vec::new();
        for &column in columns.features.iter().chain(&columns.label) {
            let is_label = wanted.len() == columns.features.len();
            let kind = kind_of(&schema.column(column), is_label)
                .map_err(|what| columns.bad(format!("column \"{}\" {what}", columns.names[column])))?;
            wanted.push((column, kind));
        }
        let rows_at_once = (VALUES / wanted.len().max(1)).clamp(1, 8192);
        Ok(Wanted { columns: wanted, rows_at_once })
    }

    fn check_pages(&self, columns: &Columns<'_>, mapped: &Mapped, group: &dyn RowGroupReader) -> Result<()> {
        for &(column, _) in &self.columns {
            let (start, bytes) = group.metadata().column(column).byte_range();
            pages::check(mapped, start..start.saturating_add(bytes))
                .map_err(|what| columns.bad(format!("column \"{}\": {what}", columns.names[column])))?;
        }
        Ok(())
    }

    fn convert_group(&self, columns: &Columns<'_>, group: &dyn RowGroupReader, rows: &mut Rows<'_>) -> Result<()> {
        let failed = |error| damaged(columns.path, error);
        let mut left = u64::try_from(group.metadata().num_rows())
            .map_err(|_| columns.bad("it claims a negative number of rows".into()))?;
        let mut readers = Vec::new();
        for &(column, _) in &self.columns {
            readers.push(group.get_column_reader(column).map_err(failed)?);
        }
        while left > 0 {
            let count = left.min(self.rows_at_once as u64) as usize;
            let mut values = Vec::new();
            for (reader, &(column, kind)) in readers.iter_mut().zip(&self.columns) {
                let place =
                    |row: usize| format!("row {}, column \"{}\"", rows.count() + row as u64, columns.names[column]);
                values.push(read(reader, kind, count).map_err(|problem| match problem {
                    Problem::Null(row) => columns.bad(format!(
                        "{}: expected a value, got null. Fill it in (pandas: fillna) or remove the row (dropna)",
                        place(row)
                    )),
                    Problem::Short => columns.bad(format!("{} is missing: the file is damaged", place(0))),
                    Problem::Reader(error) => failed(error),
                })?);
            }
            for row in 0..count {
                write_row(columns, &values, row, rows)?;
            }
            left -= count as u64;
        }
        Ok(())
    }
}

fn write_row(columns: &Columns<'_>, values: &[Values], row: usize, rows: &mut Rows<'_>) -> Result<()> {
    let (features, label) = values.split_at(columns.features.len());
    for (index, (&column, values)) in columns.features.iter().zip(features).enumerate() {
        let Values::Numbers(numbers) = values else {
            return Err(Error::Internal("texts among the features of a Parquet table".into()));
        };
        if !(numbers[row] as f32).is_finite() {
            let place = format!("row {}", rows.count());
            return Err(columns.bad_feature(&place, column, &numbers[row].to_string(), Some(numbers[row])));
        }
        rows.feature(index, numbers[row]);
    }
    let count = rows.count();
    if let (Some(column), Some(values), Some(labels)) = (columns.label, label.first(), rows.labels()) {
        let (pushed, shown) = match values {
            Values::Numbers(numbers) => (labels.push_number(numbers[row]), numbers[row].to_string()),
            Values::Texts(texts) => {
                (labels.push_text(texts[row].data()), String::from_utf8_lossy(texts[row].data()).into_owned())
            }
        };
        pushed.map_err(|problem| {
            problem.in_cell(columns.path, &format!("row {count}, column \"{}\"", columns.names[column]), &shown)
        })?;
    }
    rows.end_row()
}

/// What a column is, or why it is not read.
fn kind_of(column: &ColumnDescriptor, is_label: bool) -> Result<Kind, String> {
    if column.max_rep_level() > 0 || column.path().parts().len() > 1 {
        return Err("is nested: expected one value a row. Give each value its own column".into());
    }
    if column.name() == "__index_level_0__" {
        return Err("is an index that pandas wrote. Save without: to_parquet(path, index=False)".into());
    }
    let (logical, converted) = (column.logical_type_ref(), column.converted_type());
    let is_text = matches!(logical, Some(LogicalType::String | LogicalType::Enum))
        || matches!(converted, ConvertedType::UTF8 | ConvertedType::ENUM)
        || (logical.is_none() && converted == ConvertedType::NONE);
    match column.physical_type() {
        Type::BYTE_ARRAY if is_text && is_label => Ok(Kind::Text),
        Type::BYTE_ARRAY if is_text => Err(format!(
            "holds texts: expected numbers. If it is the label, say --labels \"{}\"; else turn its texts into numbers (pandas: \
             get_dummies) or remove the column",
            column.name()
        )),
        Type::FIXED_LEN_BYTE_ARRAY if logical == Some(&LogicalType::Float16) => Ok(Kind::Half),
        Type::BOOLEAN | Type::FLOAT | Type::DOUBLE => Ok(Kind::Number { unsigned: false }),
        Type::INT32 | Type::INT64 => match whole(logical, converted) {
            Some(unsigned) => Ok(Kind::Number { unsigned }),
            None => Err("holds dates, times or decimals: expected numbers. Turn them into numbers".into()),
        },
        other => {
            Err(format!("holds {other}: expected whole numbers, floating-point numbers, bool, or texts as the label"))
        }
    }
}

/// Whether whole numbers are unsigned, if they are nothing but numbers.
fn whole(logical: Option<&LogicalType>, converted: ConvertedType) -> Option<bool> {
    use ConvertedType as C;
    match logical {
        Some(LogicalType::Integer(kind)) => Some(!kind.is_signed),
        Some(_) => None,
        None => match converted {
            C::NONE | C::INT_8 | C::INT_16 | C::INT_32 | C::INT_64 => Some(false),
            C::UINT_8 | C::UINT_16 | C::UINT_32 | C::UINT_64 => Some(true),
            _ => None,
        },
    }
}

/// What can be wrong with values.
enum Problem {
    /// The row of the piece that has none.
    Null(usize),
    /// The column has fewer than the others.
    Short,
    Reader(ParquetError),
}

/// The next `count` values of a column.
fn read(reader: &mut ColumnReader, kind: Kind, count: usize) -> Result<Values, Problem> {
    let Kind::Number { unsigned } = kind else {
        return match (reader, kind) {
            (ColumnReader::ByteArrayColumnReader(reader), Kind::Text) => Ok(Values::Texts(raw(reader, count)?)),
            (ColumnReader::FixedLenByteArrayColumnReader(reader), Kind::Half) => {
                let half =
                    |bytes: &[u8]| bytes.try_into().map_or(f64::NAN, |bytes| half_number(u16::from_le_bytes(bytes)));
                Ok(Values::Numbers(raw(reader, count)?.iter().map(|value| half(value.data())).collect()))
            }
            _ => Err(Problem::Short),
        };
    };
    let numbers = match reader {
        ColumnReader::BoolColumnReader(reader) => numbers(reader, count, |value| f64::from(u8::from(value))),
        ColumnReader::Int32ColumnReader(reader) if unsigned => numbers(reader, count, |value| f64::from(value as u32)),
        ColumnReader::Int32ColumnReader(reader) => numbers(reader, count, f64::from),
        ColumnReader::Int64ColumnReader(reader) if unsigned => numbers(reader, count, |value| value as u64 as f64),
        ColumnReader::Int64ColumnReader(reader) => numbers(reader, count, |value| value as f64),
        ColumnReader::FloatColumnReader(reader) => numbers(reader, count, f64::from),
        ColumnReader::DoubleColumnReader(reader) => numbers(reader, count, |value| value),
        _ => Err(Problem::Short),
    };
    Ok(Values::Numbers(numbers?))
}

fn numbers<T: DataType>(
    reader: &mut ColumnReaderImpl<T>,
    count: usize,
    number: impl Fn(T::T) -> f64,
) -> Result<Vec<f64>, Problem> {
    Ok(raw(reader, count)?.into_iter().map(number).collect())
}

/// The next `count` values, none of them null.
fn raw<T: DataType>(reader: &mut ColumnReaderImpl<T>, count: usize) -> Result<Vec<T::T>, Problem> {
    let (mut values, mut levels) = (Vec::new(), Vec::new());
    let mut rows = 0;
    while rows < count {
        let (records, _, _) =
            reader.read_records(count - rows, Some(&mut levels), None, &mut values).map_err(Problem::Reader)?;
        // Columns that cannot have nulls have no levels; in the others 1 is a value.
        if let Some(row) = levels.iter().position(|&level| level == 0) {
            return Err(Problem::Null(row));
        }
        if records == 0 {
            return Err(Problem::Short);
        }
        rows += records;
    }
    if values.len() == count { Ok(values) } else { Err(Problem::Short) }
}

/// The number that an IEEE half is.
fn half_number(bits: u16) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    let size = match exponent {
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        0 => fraction * 2f64.powi(-24),
        _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
    };
    if bits >> 15 == 1 { -size } else { size }
}

#[cfg(test)]
mod tests;
