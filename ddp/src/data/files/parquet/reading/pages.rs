//! The sizes of pages, looked at before their reader allocates what their headers claim: up to 2 GiB each.
//!
//! Headers are Thrift structs in its compact protocol. The reader takes fields of the format to be of the type that they should be, and of two of
//! one number the last: so what is of another type or comes twice is refused here, that both see the same sizes.

use std::io::{self, BufReader, ErrorKind, Read};
use std::ops::Range;

use ddp_kernels::mapped::Mapped;

use super::super::super::Reading;

/// Pages that unpack to no more than this may pack as well as they like. Writers make them of about a megabyte.
const BYTES_MIN: u64 = 64 << 20;
/// Larger ones may unpack to so many times their size, as what gzip has packed.
const RATIO_MAX: u64 = 1032;

// Types of fields, as the protocol numbers them.
const STOP: u8 = 0;
const TRUE: u8 = 1;
const FALSE: u8 = 2;
const BYTE: u8 = 3;
const I32: u8 = 5;
const I64: u8 = 6;
const DOUBLE: u8 = 7;
const BINARY: u8 = 8;
const STRUCT: u8 = 12;

/// Statistics are no deeper than two.
const DEPTH_MAX: usize = 8;

/// What a page's header says, and how long it is itself.
struct Page {
    header_bytes: u64,
    packed_bytes: u64,
    bytes: u64,
}

/// Whether no page of a column, which lies in this part of the file, claims to become more than it can, or what is wrong.
pub(super) fn check(mapped: &Mapped, column: Range<u64>) -> Result<(), String> {
    let mut start = column.start;
    while start < column.end {
        let reader = BufReader::with_capacity(512, Reading::part(mapped, start..column.end));
        let page = Header { reader, bytes: 0 }
            .page()
            .map_err(|error| format!("the header of its page at byte {start} cannot be read: {error}"))?;
        if page.bytes > BYTES_MIN && page.bytes / RATIO_MAX > page.packed_bytes {
            return Err(format!(
                "its page at byte {start} claims to unpack from {} bytes to {}: it is damaged, or a bomb",
                page.packed_bytes, page.bytes
            ));
        }
        start += page.header_bytes + page.packed_bytes;
    }
    Ok(())
}

/// A header that is being read.
struct Header<R> {
    reader: R,
    /// So much of it has been.
    bytes: u64,
}

impl<R: Read> Header<R> {
    fn page(mut self) -> io::Result<Page> {
        let (mut sizes, mut last) = ([None; 2], 0);
        while let Some((id, kind)) = self.field(&mut last)? {
            match (id, kind) {
                (2 | 3, I32) => {
                    let size = self.whole()?;
                    let size = u64::try_from(size).ok().filter(|&size| size <= i32::MAX as u64);
                    let size = size.ok_or_else(|| wrong("a size that cannot be"))?;
                    if sizes[id as usize - 2].replace(size).is_some() {
                        return Err(wrong("a size that comes twice"));
                    }
                }
                (1 | 4, I32) => self.skip(I32, DEPTH_MAX)?,
                (5, STRUCT) => self.known(&[I32, I32, I32, I32, STRUCT])?,
                (6, STRUCT) => self.known(&[])?,
                (7, STRUCT) => self.known(&[I32, I32, TRUE])?,
                (8, STRUCT) => self.known(&[I32, I32, I32, I32, I32, I32, TRUE, STRUCT])?,
                (1..=8, _) => return Err(wrong("a field of another type")),
                _ => self.skip(kind, DEPTH_MAX)?,
            }
        }
        match sizes {
            [Some(bytes), Some(packed_bytes)] => Ok(Page { header_bytes: self.bytes, packed_bytes, bytes }),
            _ => Err(wrong("no size")),
        }
    }

    /// The number and the type of the next field, behind the one of the number `last`; nothing at the end.
    fn field(&mut self, last: &mut i64) -> io::Result<Option<(i64, u8)>> {
        let byte = self.byte()?;
        let (step, kind) = (byte >> 4, byte & 15);
        if kind == STOP {
            return Ok(None);
        }
        *last = if step == 0 { self.whole()? } else { *last + i64::from(step) };
        // Numbers have 16 bits: of longer ones the reader takes the last.
        if i16::try_from(*last).is_err() {
            return Err(wrong("a field of no number that there can be"));
        }
        Ok(Some((*last, kind)))
    }

    /// Passes over a struct of which the first fields are of these types.
    fn known(&mut self, kinds: &[u8]) -> io::Result<()> {
        let mut last = 0;
        while let Some((id, kind)) = self.field(&mut last)? {
            let expected = id.checked_sub(1).and_then(|index| kinds.get(usize::try_from(index).ok()?));
            // What is true and what is false are types of their own.
            let is_right = expected.is_none_or(|&right| right == kind || (right, kind) == (TRUE, FALSE));
            if !is_right {
                return Err(wrong("a field of another type"));
            }
            self.skip(kind, DEPTH_MAX)?;
        }
        Ok(())
    }

    fn skip(&mut self, kind: u8, depth: usize) -> io::Result<()> {
        match kind {
            TRUE | FALSE => Ok(()),
            BYTE => self.pass(1),
            // Whole numbers of 16, 32 and 64 bits look alike.
            4 | I32 | I64 => self.whole().map(drop),
            DOUBLE => self.pass(8),
            BINARY => {
                let bytes = self.unsigned()?;
                self.pass(bytes)
            }
            STRUCT if depth > 0 => {
                let mut last = 0;
                while let Some((_, kind)) = self.field(&mut last)? {
                    self.skip(kind, depth - 1)?;
                }
                Ok(())
            }
            _ => Err(wrong("a field of a type that pages do not have")),
        }
    }

    fn pass(&mut self, bytes: u64) -> io::Result<()> {
        let passed = io::copy(&mut self.reader.by_ref().take(bytes), &mut io::sink())?;
        self.bytes += passed;
        if passed == bytes { Ok(()) } else { Err(ErrorKind::UnexpectedEof.into()) }
    }

    fn byte(&mut self) -> io::Result<u8> {
        let mut byte = [0];
        self.reader.read_exact(&mut byte)?;
        self.bytes += 1;
        Ok(byte[0])
    }

    /// A whole number, whose last bit is the sign.
    fn whole(&mut self) -> io::Result<i64> {
        let number = self.unsigned()?;
        Ok((number >> 1).cast_signed() ^ -(number & 1).cast_signed())
    }

    fn unsigned(&mut self) -> io::Result<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 127) << shift;
            if byte < 128 {
                return Ok(number);
            }
        }
        Err(wrong("a number without an end"))
    }
}

fn wrong(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("it has {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(bytes: &[u8]) -> Result<(u64, u64, u64), String> {
        let page = Header { reader: bytes, bytes: 0 }.page().map_err(|error| error.to_string())?;
        Ok((page.header_bytes, page.packed_bytes, page.bytes))
    }

    #[test]
    fn sizes_are_found_whatever_else_a_header_says() {
        // A data page of 300 bytes, packed into 20, with four numbers, statistics with a text, and a field of a later version.
        let data =
            [0x2c, 0x15, 2, 0x15, 0, 0x15, 0, 0x15, 0, 0x1c, 0x18, 3, b'a', b'b', b'c', 0x11, 0, 0, 0x68, 1, 9, 0];
        let header = [&[0x15, 0, 0x15, 0xd8, 4, 0x15, 40][..], &data].concat();
        assert_eq!(page(&header), Ok((header.len() as u64, 20, 300)));
        for length in 0..header.len() {
            page(&header[..length]).unwrap_err();
        }
    }

    #[test]
    fn what_the_reader_may_take_for_something_else_is_refused() {
        for (header, part) in [
            (&[0x15, 0, 0x15, 2, 0x15, 2, 0x05, 4, 0xd8, 4, 0][..], "comes twice"),
            (&[0x15, 0, 0x15, 1, 0x15, 2, 0], "a size that cannot be"),
            (&[0x15, 0, 0x15, 0xfe, 0xff, 0xff, 0xff, 0x1f, 0x15, 2, 0], "a size that cannot be"),
            (&[0x15, 0, 0x16, 2, 0x15, 2, 0], "another type"),
            (&[0x15, 0, 0x15, 2, 0x15, 2, 0x2c, 0x11, 0, 0], "another type"),
            (&[0x15, 0, 0x15, 2, 0], "no size"),
            (&[0x15, 0, 0x15, 2, 0x15, 2, 0x69, 0x15, 1, 0], "pages do not have"),
            (&[0x15; 40], "a size that cannot be"),
            (&[0x15, 0, 0x15, 2, 0x15, 2, 0x05, 0x84, 0x80, 8, 2, 0], "a field of no number"),
            (&[0xff; 40], "pages do not have"),
        ] {
            let error = page(header).unwrap_err();
            assert!(error.contains(part), "{header:x?}: {error}");
        }
    }
}
