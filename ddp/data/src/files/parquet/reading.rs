//! Reads Parquet by row groups, a piece of all wanted columns at a time.
//!
//! Columns of integers, floats and bools are numbers, those of strings and bytes texts. Dates,
//! decimals and nested columns are errors. The places and sizes in the metadata are checked against
//! the size of the file before anything is read, and the counts in pages before the crate allocates
//! from them. The crate limits a page to 2 GiB.

use std::fs::File;
use std::path::Path;

use ::parquet::basic::{ConvertedType, Encoding, LogicalType, Type};
use ::parquet::column::page::{Page, PageMetadata, PageReader};
use ::parquet::column::reader::{ColumnReader, ColumnReaderImpl, get_column_reader};
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
use super::super::shown::shown_number;
use super::super::written::Written;
use crate::error::{Error, Result};

/// Values of all columns together that are in memory.
const VALUES: usize = 1 << 18;
/// Column chunks up to this size, unpacked, may have any compression ratio.
const CHUNK_BYTES_MIN: u64 = 64 << 20;

/// Whole numbers from here on do not fit i64.
const LONG: f64 = (1u64 << 63) as f64;

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
        Some(bytes) if bytes <= unpacked_bytes_max(chunk) => Ok(()),
        _ => Err(format!(
            "its metadata claim that {packed} bytes unpack to {unpacked}"
        )),
    }
}

/// What a column chunk, or a page of it, unpacks to at most. Its own size is in the file.
fn unpacked_bytes_max(chunk: &ColumnChunkMetaData) -> u64 {
    CHUNK_BYTES_MIN.max(chunk.compressed_size() as u64 * RATIO_MAX)
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
        (_, Some(LogicalType::Decimal(_)), _) | (_, _, C::DECIMAL) => Err(
            "holds decimals; help: turn them into floats, or ids into texts (pandas: .astype(float), .astype(str)), or leave \
             it out: `drop`"
                .into(),
        ),
        (Type::INT32 | Type::INT64, _, _) => Err(format!(
            "holds dates or times; help: {}; or leave it out: `drop`",
            Written::Date.help()
        )),
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
    let readers = wanted.iter().map(|&(column, _)| {
        let pages = group.get_column_page_reader(column)?;
        let chunk = group.metadata().column(column);
        let bytes_max = unpacked_bytes_max(chunk);
        let pages = Box::new(CheckedPages { pages, bytes_max });
        Ok(get_column_reader(chunk.column_descr_ptr(), pages))
    });
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

/// The pages of a column chunk, each of at most so many bytes.
struct CheckedPages {
    pages: Box<dyn PageReader>,
    bytes_max: u64,
}

/// Refuses a page that the crate would allocate too much for.
fn check_page(page: &Page, bytes_max: u64) -> Result<(), ParquetError> {
    let bytes = page.buffer().len() as u64;
    let what = match (page, page.encoding()) {
        _ if bytes > bytes_max => format!("a page of {bytes} bytes: at most {bytes_max} are read"),
        (Page::DictionaryPage { num_values, .. }, _) if u64::from(*num_values) > bytes => {
            format!("a dictionary of {num_values} values in {bytes} bytes")
        }
        // The crate believes the counts in these.
        (_, encoding @ (Encoding::DELTA_LENGTH_BYTE_ARRAY | Encoding::DELTA_BYTE_ARRAY)) => {
            format!(
                "texts in the encoding {encoding}: write them plain or with dictionaries, as pandas does"
            )
        }
        _ => return Ok(()),
    };
    Err(ParquetError::General(what))
}

impl PageReader for CheckedPages {
    fn get_next_page(&mut self) -> Result<Option<Page>, ParquetError> {
        let page = self.pages.get_next_page()?;
        let check = |page| check_page(page, self.bytes_max);
        page.as_ref().map_or(Ok(()), check)?;
        Ok(page)
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>, ParquetError> {
        self.pages.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<(), ParquetError> {
        self.pages.skip_next_page()
    }
}

impl Iterator for CheckedPages {
    type Item = Result<Page, ParquetError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

/// Values of one column. Whole numbers stay whole: an f64 would round large ones. `None` is a null
/// or NaN.
enum Values {
    Wholes(Vec<Option<i128>>),
    Floats(Vec<Option<f64>>),
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
        let wants_text = sink.wants_text(feature);
        let (number, text) = match values {
            Values::Wholes(numbers) => (
                numbers[index].map(|number| number as f64),
                numbers[index]
                    .filter(|_| wants_text)
                    .map(|number| number.to_string()),
            ),
            Values::Floats(numbers) => (
                numbers[index],
                numbers[index]
                    .filter(|_| wants_text)
                    .map(|number| number.to_string()),
            ),
            Values::Texts(texts) => {
                let cell = texts[index].as_ref().map(|text| as_text(text.data()));
                sink.feature(feature, cell.unwrap_or(Cell::Missing), &place)?;
                continue;
            }
        };
        let text = text.unwrap_or_default();
        let cell = number.map_or(Cell::Missing, |value| Cell::Number(value, text.as_bytes()));
        sink.feature(feature, cell, &place)?;
    }
    for (label, values) in labels.iter().enumerate() {
        let text = match values {
            Values::Texts(texts) => {
                let text = texts[index].as_ref().map_or(&b""[..], ByteArray::data);
                sink.label(label, text, true, &place)?;
                continue;
            }
            Values::Wholes(numbers) => numbers[index].map(|number| number.to_string()),
            Values::Floats(numbers) => numbers[index].map(|number| match number.fract() == 0.0 {
                // All digits: with fewer, the name of a class would be another number's.
                true if number.abs() < LONG => format!("{number:.0}"),
                _ => shown_number(number),
            }),
        };
        sink.label(label, text.unwrap_or_default().as_bytes(), false, &place)?;
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
    use ColumnReader as R;
    use Values::{Floats, Texts, Wholes};
    let is_unsigned = kind == ColumnKind::Unsigned;
    let float = |number: f64| Some(number).filter(|number| !number.is_nan());
    let half = |bytes: &[u8]| float(f16::from_le_bytes(bytes.try_into().ok()?).to_f64());
    Ok(match reader {
        R::ByteArrayColumnReader(reader) => Texts(values(reader, count, Some)?),
        R::FixedLenByteArrayColumnReader(reader) => {
            Floats(values(reader, count, |value| half(value.data()))?)
        }
        R::FloatColumnReader(reader) => Floats(values(reader, count, |value| float(value.into()))?),
        R::DoubleColumnReader(reader) => Floats(values(reader, count, float)?),
        R::BoolColumnReader(reader) => Wholes(values(reader, count, |value| Some(value.into()))?),
        R::Int32ColumnReader(reader) if is_unsigned => Wholes(values(reader, count, |value| {
            Some(value.cast_unsigned().into())
        })?),
        R::Int32ColumnReader(reader) => Wholes(values(reader, count, |value| Some(value.into()))?),
        R::Int64ColumnReader(reader) if is_unsigned => Wholes(values(reader, count, |value| {
            Some(value.cast_unsigned().into())
        })?),
        R::Int64ColumnReader(reader) => Wholes(values(reader, count, |value| Some(value.into()))?),
        R::Int96ColumnReader(_) => return Err(ReadProblem::Short),
    })
}

/// The next `count` values, converted.
fn values<T: DataType, V>(
    reader: &mut ColumnReaderImpl<T>,
    count: usize,
    convert: impl Fn(T::T) -> Option<V>,
) -> Result<Vec<Option<V>>, ReadProblem> {
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
        _ => values.next().and_then(&convert),
    };
    Ok((0..count).map(value).collect())
}

#[cfg(test)]
mod tests;
