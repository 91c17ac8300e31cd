//! Reads Parquet by row groups, a piece of all wanted columns at a time.
//!
//! Columns of integers, floats and bools are numbers, those of strings and bytes texts. Dates,
//! durations, decimals and nested columns are errors. The places and sizes in the metadata are
//! checked against the size of the file before anything is read, and the counts in pages
//! before the crate allocates from them. The crate limits a page to 2 GiB.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use ::parquet::basic::{ConvertedType, Encoding, LogicalType, Type};
use ::parquet::column::page::{Page, PageMetadata, PageReader};
use ::parquet::column::reader::{ColumnReader, ColumnReaderImpl, get_column_reader};
use ::parquet::data_type::{ByteArray, DataType};
use ::parquet::errors::ParquetError;
use ::parquet::file::metadata::ColumnChunkMetaData;
use ::parquet::file::reader::{FileReader, SerializedFileReader};
use ::parquet::schema::types::ColumnDescriptor;
use ddp_kernels::dtype::f16;
use ddp_kernels::panics;

use ddp_data::files::io::{RATIO_MAX, reading, refuse};
use ddp_data::setting::DROP;
use ddp_data::tables::RecordSink;
use ddp_data::words::pasted;
use ddp_data::{Error, Result, bail};

use crate::table::{TableReader, Value};

/// Values of all columns together that are in memory.
const VALUES: usize = 1 << 18;
/// Column chunks up to this size, unpacked, may have any compression ratio.
const CHUNK_BYTES_MIN: u64 = 64 << 20;

/// A table that is being read: a piece of a row group at a time.
pub(super) struct ParquetTable {
    path: PathBuf,
    file: SerializedFileReader<File>,
    names: Vec<String>,
    /// Of each column the first of the columns that are stored: a nested one may have several.
    first_leaves: Vec<usize>,
    /// The columns that are read, and whether their values are unsigned.
    selected: Vec<(usize, bool)>,
    /// The row group that is read next.
    next_group: usize,
    /// Of the current row group: a reader for each selected column, and the rows not read yet.
    readers: Vec<ColumnReader>,
    rows_left: u64,
    /// The first row of the piece in memory, how many rows it has, and which of them is
    /// current.
    first_row: u64,
    count: usize,
    current: usize,
    /// The values of this piece, by columns of the table; none of those that are not selected.
    values: Vec<Vec<Owned>>,
}

/// A value in memory.
enum Owned {
    Null,
    Whole(i128),
    Float(f64),
    Text(ByteArray),
}

impl ParquetTable {
    pub(super) fn open(path: &Path) -> Result<ParquetTable> {
        guarded(path, || {
            let file = open(path)?;
            let schema = file.metadata().file_metadata().schema_descr();
            let root = |leaf| schema.get_column_root_idx(leaf);
            let is_first = |leaf: &usize| *leaf == 0 || root(*leaf) != root(leaf - 1);
            let leaves = (0..schema.num_columns()).filter(is_first);
            let first_leaves: Vec<usize> = leaves.collect();
            let name = |&leaf: &usize| schema.column(leaf).path().parts()[0].clone();
            Ok(ParquetTable {
                path: path.into(),
                names: first_leaves.iter().map(name).collect(),
                first_leaves,
                file,
                selected: Vec::new(),
                next_group: 0,
                readers: Vec::new(),
                rows_left: 0,
                first_row: 0,
                count: 0,
                current: 0,
                values: Vec::new(),
            })
        })
    }

    /// The types of columns in what pandas wrote. To Parquet a duration is a whole number.
    fn pandas_types(&self) -> HashMap<String, String> {
        let pairs = self.file.metadata().file_metadata().key_value_metadata();
        let pandas = pairs.into_iter().flatten().find(|it| it.key == "pandas");
        let pandas = pandas.and_then(|it| serde_json::from_str(it.value.as_ref()?).ok());
        let pandas: serde_json::Value = pandas.unwrap_or_default();
        let columns = pandas["columns"].as_array().into_iter().flatten();
        let text = |value: &serde_json::Value| value.as_str().map(String::from);
        let types = columns.map(|it| text(&it["field_name"]).zip(text(&it["numpy_type"])));
        types.flatten().collect()
    }

    fn bad(&self, what: String) -> Error {
        refuse(&self.path, what)
    }

    /// Begins the next row group.
    fn open_group(&mut self) -> Result<()> {
        let failed = |error| damaged(&self.path, &error);
        let group = self.file.get_row_group(self.next_group).map_err(failed)?;
        let rows = u64::try_from(group.metadata().num_rows());
        let rows = rows.map_err(|_| self.bad("it claims a negative number of rows".into()))?;
        let readers = self.selected.iter().map(|&(column, _)| {
            let leaf = self.first_leaves[column];
            let pages = group.get_column_page_reader(leaf)?;
            let chunk = group.metadata().column(leaf);
            let bytes_max = unpacked_bytes_max(chunk);
            let pages = Box::new(CheckedPages { pages, bytes_max });
            Ok(get_column_reader(chunk.column_descr_ptr(), pages))
        });
        let readers = readers.collect::<Result<Vec<_>, _>>().map_err(failed)?;
        drop(group);
        (self.readers, self.rows_left) = (readers, rows);
        self.next_group += 1;
        Ok(())
    }

    /// Reads the next piece; false after the last.
    fn read_piece(&mut self) -> Result<bool> {
        self.first_row += self.count as u64;
        (self.count, self.current) = (0, 0);
        while self.rows_left == 0 {
            if self.next_group == self.file.num_row_groups() {
                return Ok(false);
            }
            self.open_group()?;
        }
        let rows_max = (VALUES / self.selected.len().max(1)).clamp(1, 8192) as u64;
        let (row, count) = (self.first_row, self.rows_left.min(rows_max) as usize);
        self.values = self.names.iter().map(|_| Vec::new()).collect();
        for (reader, &(column, is_unsigned)) in self.readers.iter_mut().zip(&self.selected) {
            let values = read_values(reader, is_unsigned, count);
            let name = &self.names[column];
            let values = values.map_err(|error| damaged(&self.path, &error))?;
            let what = || format!("row {row}, column \"{name}\" is missing: the file is damaged");
            self.values[column] = values.ok_or_else(|| refuse(&self.path, what()))?;
        }
        self.rows_left -= count as u64;
        self.count = count;
        Ok(true)
    }
}

impl TableReader for ParquetTable {
    fn names(&self) -> &[String] {
        &self.names
    }

    fn select(&mut self, columns: &[usize]) -> Result<()> {
        let schema = self.file.metadata().file_metadata().schema_descr();
        let types = self.pandas_types();
        let read = |&column: &usize| {
            let bad = |what: String| self.bad(format!("column \"{}\" {what}", self.names[column]));
            let leaf = schema.column(self.first_leaves[column]);
            let kind = types.get(&self.names[column]);
            let drop = format!("{DROP} {}", pasted([&*self.names[column]]));
            if let Some(kind) = kind.filter(|kind| kind.starts_with("timedelta64")) {
                return Err(bad(format!(
                    "holds durations ({kind}): expected numbers; help: save them in a unit: d.dt.total_seconds(), \
                     or leave it out: {drop}"
                )));
            }
            Ok((column, is_unsigned(&leaf, &drop).map_err(bad)?))
        };
        self.selected = columns.iter().map(read).collect::<Result<_>>()?;
        Ok(())
    }

    fn advance(&mut self) -> Result<bool> {
        self.current += 1;
        if self.current < self.count {
            return Ok(true);
        }
        let path = self.path.clone();
        guarded(&path, || self.read_piece())
    }

    fn value(&self, column: usize) -> Value<'_> {
        match &self.values[column][self.current] {
            Owned::Null => Value::Null,
            Owned::Whole(number) => Value::Whole(*number),
            Owned::Float(number) => Value::Float(*number),
            Owned::Text(text) => Value::Text(text.data()),
        }
    }

    fn place(&self, _: usize) -> String {
        format!("row {}", self.first_row + self.current as u64)
    }
}

/// Gives each row to `each`, as an object of JSON without nulls.
pub(super) fn records(path: &Path, each: RecordSink<'_>) -> Result<()> {
    let file = open(path)?;
    let failed = |error| damaged(path, &error);
    let mut rows = guarded(path, || file.get_row_iter(None).map_err(failed))?;
    for number in 0.. {
        let row = guarded(path, || rows.next().transpose().map_err(failed))?;
        let Some(row) = row else {
            break;
        };
        let mut row = row.to_json_value();
        remove_nulls(&mut row);
        each(number, &row.to_string())?;
    }
    Ok(())
}

/// All structs of a column have the same fields, of which many are null.
fn remove_nulls(value: &mut serde_json::Value) {
    match value {
        serde_json::Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            fields.values_mut().for_each(remove_nulls);
        }
        serde_json::Value::Array(values) => values.iter_mut().for_each(remove_nulls),
        _ => {}
    }
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
    let why = if text.contains("Disabled feature") {
        "its compression is not read; help: write it again, with zstd or snappy"
    } else {
        "it is damaged, or of a kind that is not read; help: write it again"
    };
    refuse(path, format!("{why} ({text})"))
}

/// Whether the values of a column are unsigned, or why it is not read; `drop` leaves it out.
fn is_unsigned(column: &ColumnDescriptor, drop: &str) -> Result<bool, String> {
    use ConvertedType as C;
    if column.max_rep_level() > 0 || column.path().parts().len() > 1 {
        bail!(
            "is nested: expected one value a row; help: give each value its own column, or leave it out: {drop}"
        );
    }
    if column.name() == "__index_level_0__" {
        bail!(
            "is an index that pandas wrote; help: leave it out: {drop}, or save without it: \
             to_parquet(path, index=False)"
        );
    }
    let (logical, converted) = (column.logical_type_ref(), column.converted_type());
    match (column.physical_type(), logical, converted) {
        (Type::BYTE_ARRAY, Some(LogicalType::String | LogicalType::Enum), _)
        | (Type::BYTE_ARRAY, _, C::UTF8 | C::ENUM)
        | (Type::BYTE_ARRAY, None, C::NONE)
        | (Type::FIXED_LEN_BYTE_ARRAY, Some(LogicalType::Float16), _)
        | (Type::BOOLEAN | Type::FLOAT | Type::DOUBLE, _, _) => Ok(false),
        (Type::INT32 | Type::INT64, Some(LogicalType::Integer(kind)), _) => Ok(!kind.is_signed),
        (Type::INT32 | Type::INT64, None, C::UINT_8 | C::UINT_16 | C::UINT_32 | C::UINT_64) => {
            Ok(true)
        }
        (
            Type::INT32 | Type::INT64,
            None,
            C::NONE | C::INT_8 | C::INT_16 | C::INT_32 | C::INT_64,
        ) => Ok(false),
        (other, _, _) => bail!(
            "holds {other} {}: expected integers, floats, bools or texts; help: cast it before it is saved (pandas: \
             .astype(float), .astype(str), dates to days by (d - d.min()).dt.days), or leave it out: {drop}",
            logical.map_or(String::new(), |kind| format!("{kind:?}"))
        ),
    }
}

/// The pages of a column chunk, each of at most this many bytes.
struct CheckedPages {
    pages: Box<dyn PageReader>,
    bytes_max: u64,
}

/// Refuses a page that the crate would allocate too much for.
fn check_page(page: &Page, bytes_max: u64) -> Result<(), ParquetError> {
    let bytes = page.buffer().len() as u64;
    let what = match (page, page.encoding()) {
        _ if bytes > bytes_max => {
            format!("a page of {bytes} bytes: at most {bytes_max} are read")
        }
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

/// The next `count` values of a column; `None` if it has fewer.
fn read_values(reader: &mut ColumnReader, is_unsigned: bool, count: usize) -> ReadValues {
    use ColumnReader as R;
    let float = |number: f64| Owned::Float(number);
    let whole = |number: i64| Owned::Whole(number.into());
    let half = |bytes: &[u8]| Some(float(f16::from_le_bytes(bytes.try_into().ok()?).to_f64()));
    match reader {
        R::ByteArrayColumnReader(reader) => values(reader, count, Owned::Text),
        R::FixedLenByteArrayColumnReader(reader) => values(reader, count, |value| {
            half(value.data()).unwrap_or(Owned::Null)
        }),
        R::FloatColumnReader(reader) => values(reader, count, |value| float(value.into())),
        R::DoubleColumnReader(reader) => values(reader, count, float),
        R::BoolColumnReader(reader) => values(reader, count, |value| whole(value.into())),
        R::Int32ColumnReader(reader) => values(reader, count, |value| {
            if is_unsigned {
                whole(value.cast_unsigned().into())
            } else {
                whole(value.into())
            }
        }),
        R::Int64ColumnReader(reader) => values(reader, count, |value| {
            if is_unsigned {
                Owned::Whole(value.cast_unsigned().into())
            } else {
                whole(value)
            }
        }),
        R::Int96ColumnReader(_) => Ok(None),
    }
}

type ReadValues = Result<Option<Vec<Owned>>, ParquetError>;

/// The next `count` values, converted.
fn values<T: DataType>(
    reader: &mut ColumnReaderImpl<T>,
    count: usize,
    convert: impl Fn(T::T) -> Owned,
) -> ReadValues {
    let (mut values, mut levels, mut rows) = (Vec::new(), Vec::new(), 0);
    while rows < count {
        let most = count - rows;
        let (records, _, _) = reader.read_records(most, Some(&mut levels), None, &mut values)?;
        if records == 0 {
            return Ok(None);
        }
        rows += records;
    }
    // Columns without nulls have no levels; in others level 0 is a null.
    let nulls = levels.iter().filter(|&&level| level == 0).count();
    if values.len() + nulls != count || !(levels.is_empty() || levels.len() == count) {
        return Ok(None);
    }
    let mut values = values.into_iter();
    let mut value = || values.next().map_or(Owned::Null, &convert);
    let row = |row: usize| match levels.get(row) {
        Some(0) => Owned::Null,
        _ => value(),
    };
    Ok(Some((0..count).map(row).collect()))
}

#[cfg(test)]
mod tests;
