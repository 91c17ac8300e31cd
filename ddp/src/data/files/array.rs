//! Rows of one shape, where they lie in a file: read by copying, and turned into the numbers that are asked for on the way.
//!
//! Whatever the format, its reader says where an array would be, and `Array::new` alone decides whether it can be: all sizes are checked
//! against the file there, so that reading never meets a number that does not fit.

use std::fmt;
use std::sync::Arc;

use ddp_kernels::Shape;
use ddp_kernels::dtype::{bf16, f16};
use ddp_kernels::mapped::Mapped;

use crate::error::{Error, Result};

/// Bytes that are converted at a time: a piece stays in the first cache.
const PIECE_BYTES: usize = 4096;

/// What the numbers of a file are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    /// A byte that is 0 or 1.
    Bool,
    F16,
    BF16,
    F32,
    F64,
}

impl Element {
    /// Every one, by its name.
    pub(crate) const ALL: [(Element, &'static str); 13] = [
        (Element::U8, "u8"),
        (Element::I8, "i8"),
        (Element::U16, "u16"),
        (Element::I16, "i16"),
        (Element::U32, "u32"),
        (Element::I32, "i32"),
        (Element::U64, "u64"),
        (Element::I64, "i64"),
        (Element::Bool, "bool"),
        (Element::F16, "f16"),
        (Element::BF16, "bf16"),
        (Element::F32, "f32"),
        (Element::F64, "f64"),
    ];

    /// Bytes of one.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Element::U8 | Element::I8 | Element::Bool => 1,
            Element::U16 | Element::I16 | Element::F16 | Element::BF16 => 2,
            Element::U32 | Element::I32 | Element::F32 => 4,
            Element::U64 | Element::I64 | Element::F64 => 8,
        }
    }

    /// Whether it has a fractional part.
    pub(crate) fn is_float(self) -> bool {
        matches!(self, Element::F16 | Element::BF16 | Element::F32 | Element::F64)
    }

    /// As it is called in messages and in our own format.
    pub(crate) fn name(self) -> &'static str {
        Element::ALL.iter().find(|(element, _)| *element == self).map_or("", |(_, name)| name)
    }

    /// The one of this name.
    pub(crate) fn named(name: &str) -> Option<Element> {
        Element::ALL.iter().find(|(_, own)| *own == name).map(|(element, _)| *element)
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Where a format's reader found an array.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a> {
    /// Its name within the file; empty in files of one array without names.
    pub(super) key: &'a str,
    /// Bytes from the beginning of the file.
    pub(super) offset: u64,
    pub(super) element: Element,
    /// Whether the first byte of a number counts most.
    pub(super) big_endian: bool,
    /// Row-major; the first dimension is the rows'.
    pub(super) shape: &'a [usize],
}

/// Rows of one shape, in a file. The first dimension is the rows'.
#[derive(Clone)]
pub(crate) struct Array {
    mapped: Arc<Mapped>,
    key: String,
    name: String,
    offset: u64,
    element: Element,
    big_endian: bool,
    rows: u64,
    row_shape: Vec<usize>,
    /// Numbers in a row; their bytes in all rows fit `isize`.
    row_elements: usize,
}

impl Array {
    /// The array at `place` of a mapped file that people call `file`, or what is wrong with it, in words that follow its name.
    pub(super) fn new(mapped: &Arc<Mapped>, file: &str, place: &Place<'_>) -> Result<Array, String> {
        let Place { key, offset, element, big_endian, shape } = *place;
        Array::check_shape(shape)?;
        let (rows, row_shape) = (shape[0], &shape[1..]);
        let bytes = shape.iter().product::<usize>() as u64 * element.bytes() as u64;
        if offset.checked_add(bytes).is_none_or(|end| end > mapped.len()) {
            return Err(format!(
                "its header claims {element}{shape:?} = {bytes} bytes from byte {offset} on, but the file has {} bytes: it is cut \
                 short or damaged",
                mapped.len()
            ));
        }
        let name = if key.is_empty() { file.to_string() } else { format!("{file}#{key}") };
        let (row_shape, row_elements) = (row_shape.to_vec(), row_shape.iter().product());
        let (mapped, key, rows) = (mapped.clone(), key.to_string(), rows as u64);
        Ok(Array { mapped, key, name, offset, element, big_endian, rows, row_shape, row_elements })
    }

    /// Whether this can be the shape of rows: at least one of at least one number, and no more than the machine can address.
    pub(super) fn check_shape(shape: &[usize]) -> Result<(), String> {
        let whole = Shape::new(shape)
            .map_err(|_| format!("its shape {shape:?} has more dimensions or elements than can be read here"))?;
        match shape {
            [] => Err("it is a single number: an array of rows has at least one dimension".into()),
            _ if whole.count() == 0 => Err(format!("it is empty: its shape is {shape:?}")),
            _ => Ok(()),
        }
    }

    /// Its name within the file; empty in files of one array without names.
    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    /// For messages: `train.npz#x_train`.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// How many rows there are: at least one.
    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// The shape of one row; empty where a row is a number. No dimension is 0.
    pub(crate) fn row_shape(&self) -> &[usize] {
        &self.row_shape
    }

    /// How many numbers a row has.
    pub(crate) fn row_elements(&self) -> usize {
        self.row_elements
    }

    /// What they are in the file.
    pub(crate) fn element(&self) -> Element {
        self.element
    }

    /// The file that is read: for one that had to be converted first, what it became.
    pub(crate) fn mapped(&self) -> &Arc<Mapped> {
        &self.mapped
    }

    /// Whole rows from `first_row` on, as many as `into` has room for. Wider numbers are rounded to the nearest.
    pub(crate) fn read_f32(&self, first_row: u64, into: &mut [f32]) -> Result<()> {
        if self.element == Element::F32 && self.big_endian == cfg!(target_endian = "big") {
            let offset = self.offset_of(first_row, into.len());
            return self.mapped.read_elements(offset, into).map_err(|error| self.failed(&error));
        }
        convert!(self, first_row, into, f32)
    }

    /// As `read_f32`; numbers beyond 2^53 are rounded.
    pub(crate) fn read_f64(&self, first_row: u64, into: &mut [f64]) -> Result<()> {
        convert!(self, first_row, into, f64)
    }

    /// As `read_f32`, of whole numbers alone; one that does not fit is an error.
    pub(crate) fn read_i64(&self, first_row: u64, into: &mut [i64]) -> Result<()> {
        if self.element.is_float() {
            return Err(Error::Data(format!("{}: expected whole numbers, got {}", self.name, self.element)));
        }
        convert!(self, first_row, into, i64)?;
        // What would be beyond i64 has come out negative.
        match into.iter().position(|&value| value < 0) {
            Some(index) if self.element == Element::U64 => {
                let row = first_row + (index / self.row_elements) as u64;
                let value = into[index].cast_unsigned();
                Err(Error::Data(format!("{}, row {row}: {value} is beyond {}", self.name, i64::MAX)))
            }
            _ => Ok(()),
        }
    }

    /// Where rows begin. Which rows there are is the caller's to know.
    fn offset_of(&self, first_row: u64, elements: usize) -> u64 {
        let rows = (elements / self.row_elements) as u64;
        assert!(elements.is_multiple_of(self.row_elements), "{elements} numbers are no whole rows of {}", self.name);
        assert!(rows <= self.rows && first_row <= self.rows - rows, "rows {first_row} … of {}", self.name);
        self.offset + first_row * (self.row_elements * self.element.bytes()) as u64
    }

    /// Copies piece after piece and turns `SIZE` bytes at a time into a number.
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
            self.mapped.read(offset, bytes).map_err(|error| self.failed(&error))?;
            offset += bytes.len() as u64;
            for (into, bytes) in into.iter_mut().zip(bytes.as_chunks().0) {
                *into = number(*bytes);
            }
        }
        Ok(())
    }

    /// As `each`, of bytes that are 0 or 1.
    fn each_bool<T>(&self, first_row: u64, into: &mut [T], number: impl Fn(u8) -> T) -> Result<()> {
        let largest = std::cell::Cell::new(0);
        self.each(first_row, into, |[byte]| {
            largest.set(largest.get().max(byte));
            number(byte)
        })?;
        if largest.get() <= 1 {
            return Ok(());
        }
        let mut bytes = vec![0; into.len()];
        self.each(first_row, &mut bytes, |[byte]| byte)?;
        let index = bytes.iter().position(|&byte| byte > 1).unwrap_or(0);
        let (row, number) = (first_row + (index / self.row_elements) as u64, index % self.row_elements);
        Err(Error::Data(format!(
            "{}, row {row}, number {number}: expected a bool, the byte 0 or 1, got {}. The file is damaged, or its elements are \
             no bools: save it as uint8",
            self.name, bytes[index]
        )))
    }

    fn failed(&self, error: &std::io::Error) -> Error {
        Error::Data(format!(
            "{}: {error}. Files must stay as they are while they are used: write new ones beside them, then rename",
            self.name
        ))
    }
}

impl fmt::Debug for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} rows of {}{:?}", self.name, self.rows, self.element, self.row_shape)
    }
}

/// The rows from `$first_row` on as numbers of type `$to`: one loop for each element and byte order.
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
            (Element::Bool, _) => $array.each_bool($first_row, $into, |byte| byte as $to),
            $((Element::$element, false) => $array.each($first_row, $into, |bytes| {
                let $x = $number::from_le_bytes(bytes);
                $value
            }),
            (Element::$element, true) => $array.each($first_row, $into, |bytes| {
                let $x = $number::from_be_bytes(bytes);
                $value
            }),)*
        }
    };
}
use convert;

#[cfg(test)]
mod tests;
