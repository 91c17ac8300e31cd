//! Where a library has its static shared memory: read from its symbol table. (g++ drops section
//! attributes of variables in templates.)

use std::ops::Range;

/// The prefix of such variables' names; the group follows, then the source name.
pub(crate) const SHARED_PREFIX: &str = "simcuda_shared_";

/// `shared_margin_bytes` of `shim/runtime.h`: on both sides of a variable.
pub(super) const MARGIN_BYTES: u64 = 4096;

/// One variable.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Variable {
    /// The number of its function.
    pub(super) group: String,
    /// As in the source.
    pub(super) name: String,
    /// Behind the beginning of the library in memory; without margins.
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// Numbers of an ELF file, whose offsets are its own: all of them are checked.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn slice(&self, at: u64, length: u64) -> Option<&'a [u8]> {
        let range: Range<usize> =
            usize::try_from(at).ok()?..usize::try_from(at.checked_add(length)?).ok()?;
        self.0.get(range)
    }

    fn number(&self, at: u64, bytes: u64) -> Option<u64> {
        Some(
            self.slice(at, bytes)?
                .iter()
                .rev()
                .fold(0, |sum, byte| sum << 8 | u64::from(*byte)),
        )
    }

    /// The number at `field` of the structure at `base`.
    fn field(&self, base: u64, field: u64, bytes: u64) -> Option<u64> {
        self.number(base.checked_add(field)?, bytes)
    }

    fn text(&self, at: u64) -> Option<&'a str> {
        let rest = self.0.get(usize::try_from(at).ok()?..)?;
        std::str::from_utf8(rest.split(|byte| *byte == 0).next()?).ok()
    }
}

/// The group and the source name in a symbol such as `_ZZ3sumE21simcuda_shared_0_tile_1`, where the
/// number in front is the length of what the last number is not part of.
fn shared_name(symbol: &str) -> Option<(&str, &str)> {
    let (before, after) = symbol.split_once(SHARED_PREFIX)?;
    let digits = before.len() - before.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    let length = before[before.len() - digits..].parse().ok();
    let name = length
        .and_then(|length: usize| after.get(..length.checked_sub(SHARED_PREFIX.len())?))
        .unwrap_or(after);
    name.split_once('_')
}

/// The shared variables of a 64-bit little-endian ELF library; nothing if it is no such file.
pub(super) fn shared_variables(image: &[u8]) -> Option<Vec<Variable>> {
    const SYMBOL_TABLE: u64 = 2;
    const SECTION_HEADER_BYTES: u64 = 64;
    const SYMBOL_BYTES: u64 = 24;
    let file = Reader(image);
    if file.slice(0, 6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let (sections_at, section_count) = (file.number(40, 8)?, file.number(60, 2)?);
    let section = |index: u64| sections_at.checked_add(index * SECTION_HEADER_BYTES);
    let mut variables = Vec::new();
    for header in (0..section_count).filter_map(section) {
        if file.field(header, 4, 4)? != SYMBOL_TABLE {
            continue;
        }
        let (at, length, names) = (
            file.field(header, 24, 8)?,
            file.field(header, 32, 8)?,
            file.field(header, 40, 4)?,
        );
        let names_at = file.field(section(names)?, 24, 8)?;
        for symbol in
            (0..length / SYMBOL_BYTES).map_while(|index| at.checked_add(index * SYMBOL_BYTES))
        {
            let name = file.text(names_at.checked_add(file.number(symbol, 4)?)?)?;
            let Some((group, name)) = shared_name(name) else {
                continue;
            };
            let (offset, bytes) = (file.field(symbol, 8, 8)?, file.field(symbol, 16, 8)?);
            if bytes > 2 * MARGIN_BYTES {
                variables.push(Variable {
                    group: group.to_owned(),
                    name: name.to_owned(),
                    offset: offset + MARGIN_BYTES,
                    bytes: bytes - 2 * MARGIN_BYTES,
                });
            }
        }
    }
    variables.sort_by_key(|variable| variable.offset);
    Some(variables)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_end_where_the_symbol_says() {
        assert_eq!(
            shared_name("_ZZ3sumE21simcuda_shared_0_tile_1"),
            Some(("0", "tile"))
        );
        assert_eq!(
            shared_name("_ZN12_GLOBAL__N_1L23simcuda_shared_file_a_bE"),
            Some(("file", "a_b"))
        );
        assert_eq!(shared_name("simcuda_shared_file_x"), Some(("file", "x")));
        assert_eq!(shared_name("tile"), None);
    }

    #[test]
    fn invalid_elf_files_have_no_shared_variables() {
        assert_eq!(shared_variables(b""), None);
        assert_eq!(shared_variables(b"\x7fELF\x02\x01"), None);
        let mut header = [0_u8; 64];
        header[..6].copy_from_slice(b"\x7fELF\x02\x01");
        assert_eq!(shared_variables(&header), Some(Vec::new()));
        // A section table outside of the file.
        header[40..48].copy_from_slice(&u64::MAX.to_le_bytes());
        header[60] = 3;
        assert_eq!(shared_variables(&header), None);
    }
}
