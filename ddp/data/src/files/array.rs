//! Rows of one shape in a mapped file: copied, and converted to the requested type on the way.
//!
//! A format's reader says where an array should be. `Array::new` checks all sizes against the file,
//! so that reading needs no more checks.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use ddp_kernels::Shape;
use ddp_kernels::dtype::{bf16, f16};
use ddp_kernels::mapped::Mapped;
use ddp_kernels::setting::Choice;

use crate::error::{Error, Result, bail, ensure};
use crate::setting::MISSING;
use crate::words::shown_number;

/// Bytes converted at a time: a piece stays in the L1 cache.
const PIECE_BYTES: usize = 4096;

/// The most numbers in a row: as many as the widest layer has.
pub const WIDTH_MAX: usize = 1 << 24;

/// Reads the rows from `$first_row` on as type `$to`: one loop for each element type and byte
/// order.
macro_rules! convert {
    ($array:expr, $first_row:expr, $into:expr, $to:ident) => {
        convert!($array, $first_row, $into, $to;
            U8 u8 |x| x as $to, I8 i8 |x| x as $to, U16 u16 |x| x as $to, I16 i16 |x| x as $to,
            U32 u32 |x| x as $to, I32 i32 |x| x as $to, U64 u64 |x| x as $to, I64 i64 |x| x as $to,
            F16 f16 |x| x.to_f32() as $to, BF16 bf16 |x| x.to_f32() as $to,
            F32 f32 |x| x as $to, F64 f64 |x| x as $to)
    };
    ($array:expr, $first_row:expr, $into:expr, $to:ident; $($element:ident $number:ident |$x:ident| $value:expr),*) => {
        match ($array.element, $array.big_endian) {
            (NumberType::Bool, _) => {
                $array.each($first_row, $into, |[byte]| byte as $to)?;
                let bad = $into.iter().position(|&number| number > 1 as $to);
                $array.check_bools($first_row, bad.map(|index| (index, $into[index] as u64)))
            }
            $((NumberType::$element, false) => $array.each($first_row, $into, |bytes| {
                let $x = $number::from_le_bytes(bytes);
                $value
            }),
            (NumberType::$element, true) => $array.each($first_row, $into, |bytes| {
                let $x = $number::from_be_bytes(bytes);
                $value
            }),)*
        }
    };
}

/// Where a format's reader found an array.
#[derive(Clone, Copy, Debug)]
pub(super) struct ArrayPlace<'a> {
    /// Its name in the file; empty if the format has no names.
    pub(super) key: &'a str,
    /// Bytes from the beginning of the file.
    pub(super) offset: u64,
    pub(super) element: NumberType,
    pub(super) big_endian: bool,
    /// Row-major; the first dimension is the rows'.
    pub(super) shape: &'a [usize],
}

impl<'a> ArrayPlace<'a> {
    /// Of little-endian numbers.
    pub(super) fn new(
        key: &'a str,
        offset: u64,
        element: NumberType,
        shape: &'a [usize],
    ) -> ArrayPlace<'a> {
        let big_endian = false;
        ArrayPlace {
            key,
            offset,
            element,
            big_endian,
            shape,
        }
    }
}

/// Rows of one shape in a file.
#[derive(Clone)]
pub struct Array {
    /// The file that is read: the converted copy, if there is one.
    pub mapped: Arc<Mapped>,
    /// Its name in the file; empty if the format has no names.
    pub key: String,
    name: String,
    offset: u64,
    /// The type of the numbers in the file.
    pub element: NumberType,
    big_endian: bool,
    rows: u64,
    row_shape: Vec<usize>,
    /// Numbers in a row. The bytes of all rows fit `isize`.
    pub row_elements: usize,
}

impl Array {
    /// The array at `place` of a mapped file, called `file` in messages, or what is wrong with it.
    pub(super) fn new(
        mapped: &Arc<Mapped>,
        file: &str,
        place: &ArrayPlace<'_>,
    ) -> Result<Array, String> {
        let (offset, element, shape) = (place.offset, place.element, place.shape);
        let whole = Shape::new(shape)
            .map_err(|_| format!("its shape {shape:?} has too many dimensions or elements"))?;
        ensure!(
            !shape.is_empty(),
            "expected an array of rows, got a single number"
        );
        ensure!(whole.count() > 0, "it is empty: its shape is {shape:?}");
        let (rows, row_shape) = (shape[0], &shape[1..]);
        let bytes = shape.iter().product::<usize>() as u64 * element.bytes() as u64;
        let end = offset.saturating_add(bytes);
        let length = mapped.len();
        ensure!(
            end <= length,
            "its header claims {element}{shape:?} = {bytes} bytes from byte {offset} on, but the file has {length} bytes: it is cut \
             short or damaged"
        );
        let width = row_shape.iter().product();
        ensure!(
            width <= WIDTH_MAX,
            "expected at most {WIDTH_MAX} numbers a row, got {width} (shape {row_shape:?}); the first dimension counts rows"
        );
        let hash = if place.key.is_empty() { "" } else { "#" };
        Ok(Array {
            mapped: mapped.clone(),
            key: place.key.to_string(),
            name: format!("{file}{hash}{}", place.key),
            offset,
            element,
            big_endian: place.big_endian,
            rows: rows as u64,
            row_elements: width,
            row_shape: row_shape.to_vec(),
        })
    }

    /// For messages: `train.npz#x_train`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The number of rows: at least one.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The shape of one row; empty if a row is one number. No dimension is 0.
    pub fn row_shape(&self) -> &[usize] {
        &self.row_shape
    }

    /// Whether two arrays are the same bytes of the same file.
    pub fn is_same(&self, other: &Array) -> bool {
        self.mapped.identity() == other.mapped.identity() && self.offset == other.offset
    }

    /// Reads whole rows from `first_row` on into `into`. Wider numbers are rounded to the nearest
    /// f32.
    pub fn read_f32(&self, first_row: u64, into: &mut [f32]) -> Result<()> {
        if self.element == NumberType::F32 && self.big_endian == cfg!(target_endian = "big") {
            let start = self.offset_of(first_row, into.len());
            let read = self.mapped.read_elements(start, into);
            return read.map_err(|error| self.failed(&error));
        }
        convert!(self, first_row, into, f32)
    }

    /// Like `read_f32`; integers above 2^53 are rounded.
    pub fn read_f64(&self, first_row: u64, into: &mut [f64]) -> Result<()> {
        convert!(self, first_row, into, f64)
    }

    /// Like `read_f32` for integers; one that does not fit i64 is an error.
    pub fn read_i64(&self, first_row: u64, into: &mut [i64]) -> Result<()> {
        let (name, element, most) = (&self.name, self.element, i64::MAX);
        ensure!(
            !element.is_float(),
            "{name}: expected whole numbers, got {element}; help: save them as integers"
        );
        convert!(self, first_row, into, i64)?;
        // Numbers above i64::MAX have wrapped around to negative ones.
        match into.iter().position(|&value| value < 0) {
            Some(index) if element == NumberType::U64 => {
                let row = first_row + (index / self.row_elements) as u64;
                let value = into[index].cast_unsigned();
                bail!(
                    "{name}, row {row}: expected at most {most}, got {value}; help: save smaller numbers, as int64"
                )
            }
            _ => Ok(()),
        }
    }

    /// The byte where rows begin. Panics unless `elements` are whole rows that exist.
    fn offset_of(&self, first_row: u64, elements: usize) -> u64 {
        let rows = (elements / self.row_elements) as u64;
        assert!(
            elements.is_multiple_of(self.row_elements),
            "{elements} numbers are not whole rows of {}",
            self.name
        );
        assert!(
            rows <= self.rows && first_row <= self.rows - rows,
            "rows {first_row} … of {}",
            self.name
        );
        self.offset + first_row * (self.row_elements * self.element.bytes()) as u64
    }

    /// Reads `SIZE` bytes at a time and converts them.
    fn each<T, const SIZE: usize>(
        &self,
        first_row: u64,
        into: &mut [T],
        number: impl Fn([u8; SIZE]) -> T,
    ) -> Result<()> {
        let mut offset = self.offset_of(first_row, into.len());
        let mut piece = [0; PIECE_BYTES];
        for into in into.chunks_mut(PIECE_BYTES / SIZE) {
            let bytes = &mut piece[..into.len() * SIZE];
            let read = self.mapped.read(offset, bytes);
            read.map_err(|error| self.failed(&error))?;
            offset += bytes.len() as u64;
            for (into, bytes) in into.iter_mut().zip(bytes.as_chunks().0) {
                *into = number(*bytes);
            }
        }
        Ok(())
    }

    /// An error if the number at index `bad` of the rows from `first_row` on is not a bool.
    fn check_bools(&self, first_row: u64, bad: Option<(usize, u64)>) -> Result<()> {
        if let Some((index, value)) = bad {
            let row = first_row + (index / self.row_elements) as u64;
            bail!(
                "{}, row {row}, number {}: expected a bool (0 or 1), got {value}; help: if these are not bools, \
                 save them as uint8",
                self.name,
                index % self.row_elements
            );
        }
        Ok(())
    }

    fn failed(&self, error: &std::io::Error) -> Error {
        Error::Data(format!(
            "{}: {error}; help: files must not change while they are in use: write new ones beside them, then rename",
            self.name
        ))
    }
}

impl fmt::Debug for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} rows of {}{:?}",
            self.name, self.rows, self.element, self.row_shape
        )
    }
}

ddp_kernels::choices! {
    /// The type of the numbers in a file, with its name in messages and in our own format.
    pub enum NumberType {
        /// Whole, 1 byte, from 0
        U8 = "u8",
        /// Whole, 1 byte
        I8 = "i8",
        /// Whole, 2 bytes, from 0
        U16 = "u16",
        /// Whole, 2 bytes
        I16 = "i16",
        /// Whole, 4 bytes, from 0
        U32 = "u32",
        /// Whole, 4 bytes
        I32 = "i32",
        /// Whole, 8 bytes, from 0
        U64 = "u64",
        /// Whole, 8 bytes
        I64 = "i64",
        /// A byte that is 0 or 1
        Bool = "bool",
        /// Floating-point, 2 bytes
        F16 = "f16",
        /// Floating-point, 2 bytes with the exponents of F32
        BF16 = "bf16",
        /// Floating-point, 4 bytes
        F32 = "f32",
        /// Floating-point, 8 bytes
        F64 = "f64",
    }
}

impl NumberType {
    /// The size of one number.
    pub fn bytes(self) -> usize {
        match self {
            NumberType::U8 | NumberType::I8 | NumberType::Bool => 1,
            NumberType::U16 | NumberType::I16 | NumberType::F16 | NumberType::BF16 => 2,
            NumberType::U32 | NumberType::I32 | NumberType::F32 => 4,
            NumberType::U64 | NumberType::I64 | NumberType::F64 => 8,
        }
    }

    /// Whether it is a floating-point type.
    pub fn is_float(self) -> bool {
        use NumberType::{BF16, F16, F32, F64};
        matches!(self, F16 | BF16 | F32 | F64)
    }
}

impl fmt::Display for NumberType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(Choice::name(*self))
    }
}

/// Arrays whose rows have the same shape, one after another.
#[derive(Debug)]
pub(crate) struct Rows {
    pub(crate) arrays: Vec<Array>,
    /// The first row of each array, then the number of all rows.
    starts: Vec<u64>,
    /// Numbers in a row.
    pub(crate) width: usize,
}

impl Rows {
    /// At least one array.
    pub(crate) fn new(arrays: Vec<Array>) -> Result<Rows> {
        let first = &arrays[0];
        let mut starts = vec![0];
        let mut rows = 0u64;
        for array in &arrays {
            let (expected, got) = (first.row_shape(), array.row_shape());
            let (name, as_in) = (array.name(), first.name());
            ensure!(
                got == expected,
                "{name}: expected rows of shape {expected:?}, as in {as_in}, got {got:?}; help: give files of one shape"
            );
            let sum = rows.checked_add(array.rows());
            let many = || Error::Data(format!("{name}: more than 2^64 rows in all files together"));
            rows = sum.ok_or_else(many)?;
            starts.push(rows);
        }
        Ok(Rows {
            width: first.row_elements,
            arrays,
            starts,
        })
    }

    /// The number of rows.
    pub(crate) fn rows(&self) -> u64 {
        self.starts[self.arrays.len()]
    }

    /// The type of the numbers, which all arrays have in common.
    pub(crate) fn element(&self) -> Result<NumberType> {
        let (first, expected) = (&self.arrays[0], self.arrays[0].element);
        for array in &self.arrays {
            let (name, got) = (array.name(), array.element);
            ensure!(
                got == expected,
                "{name}: expected elements of type {expected}, as in {}, got {got}; help: save all files with the same type",
                first.name()
            );
        }
        Ok(expected)
    }

    /// Whether this array is one of them.
    pub(crate) fn has(&self, array: &Array) -> bool {
        self.arrays.iter().any(|own| own.is_same(array))
    }

    /// The array that has this row, and the row in it.
    #[inline]
    pub(crate) fn find(&self, row: u64) -> (usize, u64) {
        let index = match self.arrays.len() {
            1 => 0,
            _ => self.starts.partition_point(|&start| start <= row) - 1,
        };
        (index, row - self.starts[index])
    }

    /// The file and its row, for messages.
    pub(crate) fn place(&self, row: u64) -> String {
        let (index, row) = self.find(row);
        format!("{}, row {row}", self.arrays[index].name())
    }

    /// Splits `count` rows from `first` on by arrays: the array, its first row, and which of the
    /// `count` rows these are.
    pub(crate) fn pieces(
        &self,
        first: u64,
        count: usize,
    ) -> impl Iterator<Item = (usize, u64, Range<usize>)> {
        let end = first + count as u64;
        let mut next = first;
        std::iter::from_fn(move || {
            if next == end {
                return None;
            }
            let (index, row) = self.find(next);
            let stop = self.starts[index + 1].min(end);
            let range = (next - first) as usize..(stop - first) as usize;
            next = stop;
            Some((index, row, range))
        })
    }

    /// Reads whole rows from `first` on, rounded to f32.
    #[inline]
    pub(crate) fn read_f32(&self, first: u64, into: &mut [f32]) -> Result<()> {
        if into.len() == self.width {
            let (index, row) = self.find(first);
            return self.arrays[index].read_f32(row, into);
        }
        for (index, row, range) in self.pieces(first, into.len() / self.width) {
            self.arrays[index].read_f32(
                row,
                &mut into[range.start * self.width..range.end * self.width],
            )?;
        }
        Ok(())
    }

    /// One number, as f64, for messages.
    pub(crate) fn number(&self, row: u64, column: usize) -> Result<f64> {
        let mut numbers = vec![0f64; self.width];
        self.read_f64(row, &mut numbers)?;
        Ok(numbers[column])
    }

    /// The error of a non-finite number; `columns` are the names of features. Without a model NaN
    /// may be filled in.
    pub(crate) fn nonfinite(
        &self,
        (row, column): (u64, usize),
        columns: Option<&[String]>,
        has_model: bool,
    ) -> Error {
        let place = self.place(row);
        let number = match self.number(row, column) {
            Ok(number) if !(number as f32).is_finite() => number,
            Ok(_) => {
                return format!("{place}: it changed while it was read; help: start again").into();
            }
            Err(error) => return error,
        };
        let name = columns.and_then(|columns| columns.get(column));
        let name = name.map_or(String::new(), |name| format!(" ({name})"));
        let may_fill = number.is_nan() && !has_model;
        let fill = if may_fill {
            format!("give {MISSING} mean, ")
        } else {
            String::new()
        };
        format!(
            "{place}, feature {column}{name}: expected a finite f32, got {} (rows and features are counted from 0); help: \
             {fill}leave out such rows, or replace the number",
            shown_number(number)
        )
        .into()
    }

    /// Reads one row as f64.
    pub(crate) fn read_f64(&self, row: u64, into: &mut [f64]) -> Result<()> {
        let (index, row) = self.find(row);
        self.arrays[index].read_f64(row, into)
    }
}

/// Puts the numbers of `fill` (F) where rows of F features have NaN.
pub(crate) fn fill_in(fill: &[f32], x: &mut [f32]) {
    for row in x.chunks_exact_mut(fill.len()) {
        for (x, &fill) in row.iter_mut().zip(fill) {
            *x = if x.is_nan() { fill } else { *x };
        }
    }
}

#[cfg(test)]
mod tests;
