//! The list of formats, and which of them a file has: by its first bytes, and where these do not
//! tell, by the ending of its name. Files that hold no data for us, or that cannot be read safely,
//! are refused with what to do instead.

use std::path::Path;

use ddp_kernels::mapped::Mapped;

use super::format::{Ends, Format, Holds};
use super::io::{map, refuse};
use super::npz::{PICKLE, WORKBOOK};
use super::{csv, flat, gzip, idx, llm_c, nanogpt, npy, npz, parquet, safetensors, text};
use crate::error::{Result, bail, ensure};

/// Every format. Where several begin alike, the first counts.
static FORMATS: &[&Format] = &[
    &npy::NPY,
    &npz::NPZ,
    &csv::CSV,
    &csv::TSV,
    &parquet::PARQUET,
    &gzip::GZIP,
    &llm_c::LLM_C,
    &flat::FLAT,
    &safetensors::SAFETENSORS,
    &idx::IDX,
    &text::TEXT,
    #[cfg(test)]
    &super::tests::fvecs::FVECS,
];

const MATLAB: &str = "MATLAB files are not read; help: numpy.savez(path, **scipy.io.loadmat(…))";
const PICTURE: &str = "it is a single picture; \
     help: put all pictures into one array: numpy.savez(path, x=images, y=labels)";

/// First bytes of files that are refused, and why.
const REFUSED: [(&[u8], &str); 8] = [
    (
        b"\x89HDF\r\n",
        "HDF5 is not read; help: numpy.savez(path, x=file['x'][:], y=file['y'][:])",
    ),
    (
        b"ARROW1\0\0",
        "Arrow (Feather) files are not read; help: save it as .parquet or .csv",
    ),
    // Longer than the column names that a table may begin with.
    (b"MATLAB 5.0 MAT-", MATLAB),
    (b"MATLAB 7.3 MAT-", MATLAB),
    (b"\x89PNG", PICTURE),
    (b"\xff\xd8\xff", PICTURE),
    (b"\xd0\xcf\x11\xe0", WORKBOOK),
    (
        b"SQLite format 3",
        "it is a database; help: save the table as .csv or .parquet",
    ),
];

/// The format that a name shows, without `.gz`, and its ending.
pub(crate) fn named(path: &Path) -> Option<(&'static Format, &'static str)> {
    let name = path.file_name()?.to_string_lossy().to_ascii_lowercase();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    let find = |format: &&'static Format| {
        let mut endings = format.endings.iter();
        Some((*format, *endings.find(|ending| name.ends_with(**ending))?))
    };
    FORMATS.iter().find_map(find)
}

/// The endings of files that are found in folders: texts and packed files have to be named.
pub(crate) fn endings() -> impl Iterator<Item = &'static str> {
    let are_rows = |format: &&&Format| matches!(format.holds, Holds::Arrays(_));
    let formats = FORMATS.iter().filter(are_rows);
    formats.flat_map(|format| format.endings.iter().copied())
}

/// Whether a file is a table, by its name or by its first bytes.
pub fn is_table(path: &Path) -> bool {
    let is_named = named(path).is_some_and(|(format, _)| format.is_table());
    is_named || format(path).is_ok_and(Format::is_table)
}

/// The format of the file at `path`.
pub fn format(path: &Path) -> Result<&'static Format> {
    recognised(path, &*map(path)?).map_err(|why| refuse(path, why))
}

/// The format of the file at `path`, which holds tokens: a .bin file may have no header.
pub(super) fn format_of_tokens(path: &Path) -> Result<&'static Format> {
    let mapped = map(path)?;
    let format = recognised(path, &mapped).map_err(|why| refuse(path, why))?;
    match format.is(&flat::FLAT) && !flat::begins(&mapped) {
        true => Ok(&nanogpt::NANOGPT),
        false => Ok(format),
    }
}

fn recognised(path: &Path, mapped: &Mapped) -> Result<&'static Format, String> {
    let ending = path.extension().unwrap_or_default().to_ascii_lowercase();
    let has_ending = |endings: &[&str]| endings.iter().any(|&known| ending == *known);
    ensure!(!has_ending(&["xlsx", "xlsm", "xls", "ods"]), "{WORKBOOK}");
    let (mut start, mut end, bytes) = ([0; 16], [0; 8], mapped.len());
    let start = &mut start[..bytes.min(16) as usize];
    let read = mapped.read(0, start).and_then(|()| match bytes {
        8.. => mapped.read(bytes - 8, &mut end),
        _ => Ok(()),
    });
    read.map_err(|error| error.to_string())?;
    let start = &*start;
    if let Some((_, why)) = REFUSED.iter().find(|(magic, _)| start.starts_with(magic)) {
        bail!("{why}");
    }
    ensure!(bytes > 0, "it is empty; help: save the data again");
    let ends = Ends { start, end, bytes };
    let found = FORMATS.iter().find(|format| (format.begins)(&ends));
    // torch.save writes a zip archive with a pickle in it.
    let may_be_pickle = found.is_none_or(|format| format.is(&npz::NPZ));
    let is_pickle = found.is_none() && matches!(start, [0x80, 2..=5, ..]);
    let is_named_pickle = may_be_pickle && has_ending(&["pt", "pth", "pkl", "pickle"]);
    ensure!(!is_pickle && !is_named_pickle, "{PICKLE}");
    let named = named(path).map(|(format, _)| format);
    let is_packed = ending == "gz";
    match (found, named) {
        // Tables are read while they are unpacked.
        (Some(found), Some(named)) if found.is(&gzip::GZIP) && is_packed && named.is_table() => {
            Ok(named)
        }
        (Some(found), _) => Ok(found),
        _ if is_packed => {
            bail!("its name ends in .gz, but it is not compressed; help: rename it without .gz")
        }
        (None, Some(named)) => named.must_begin.map_or(Ok(named), |why| Err(why.into())),
        (None, None) => bail!(
            "expected {}, .txt, or .gz of these, got a file that begins with \"{}\"; help: rename a table to .csv, a \
             text to learn from to .txt",
            endings().collect::<Vec<_>>().join(", "),
            start[..start.len().min(8)].escape_ascii()
        ),
    }
}
