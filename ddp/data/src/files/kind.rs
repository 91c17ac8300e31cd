//! The format of a file: by its first bytes, and where these do not tell, by the ending of its
//! name. Files that hold no data for us, or that cannot be read safely, are refused with what to do
//! instead.

use std::path::Path;

use super::flat;
use super::io::{map, refuse};
use super::llm_c;
use crate::error::Result;

/// Formats of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum FileKind {
    Npy,
    Npz,
    Idx,
    Safetensors,
    /// Our own.
    Flat,
    /// Tokens, as llm.c writes them.
    LlmC,
    /// A text, whose bytes are tokens.
    Text,
    /// Something else than a table, compressed.
    Gzip,
    Csv,
    Parquet,
}

/// Endings of file names.
const ENDINGS: [(&str, FileKind); 15] = [
    (".npy", FileKind::Npy),
    (".npz", FileKind::Npz),
    (".idx", FileKind::Idx),
    ("-ubyte", FileKind::Idx),
    (".ubyte", FileKind::Idx),
    (".idx1", FileKind::Idx),
    (".idx3", FileKind::Idx),
    (".safetensors", FileKind::Safetensors),
    (".bin", FileKind::Flat),
    (".txt", FileKind::Text),
    (".gz", FileKind::Gzip),
    (".csv", FileKind::Csv),
    (".tsv", FileKind::Csv),
    (".parquet", FileKind::Parquet),
    (".pq", FileKind::Parquet),
];

/// The refusal of pickles, also for what `torch.save` writes.
pub(super) const PICKLE: &str = "it is a pickle (as torch.save writes), which can run programs when it is read; \
     help: save its arrays with numpy.savez(path, x=x.numpy(), y=y.numpy())";
pub(super) const WORKBOOK: &str = "Excel workbooks are not read; help: save the sheet as .csv";
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

impl FileKind {
    /// What it is called in messages.
    pub fn name(self) -> &'static str {
        match self {
            FileKind::Npy => "an .npy file",
            FileKind::Npz => "a zip archive, as .npz and .xlsx are",
            FileKind::Idx => "an IDX file",
            FileKind::Safetensors => "a .safetensors file",
            FileKind::Flat => "a flat .bin file",
            FileKind::LlmC => "tokens of llm.c",
            FileKind::Text => "a text",
            FileKind::Gzip => "a file compressed with gzip",
            FileKind::Csv => "a table of text (.csv, .tsv)",
            FileKind::Parquet => "a .parquet file",
        }
    }

    /// By the first bytes of a file of `bytes` bytes, and the last eight where a text could begin
    /// the same way.
    fn of_bytes(start: &[u8], end: &[u8; 8], bytes: u64) -> Option<FileKind> {
        match start {
            [0x93, b'N', b'U', b'M', b'P', b'Y', ..] => Some(FileKind::Npy),
            [b'P', b'K', 3, 4, ..] | [b'P', b'K', 5, 6, ..] => Some(FileKind::Npz),
            [0x1f, 0x8b, ..] => Some(FileKind::Gzip),
            // A column may have this name.
            [b'P', b'A', b'R', b'1', ..] if ends_as_parquet(end, bytes) => Some(FileKind::Parquet),
            _ if start.starts_with(flat::MAGIC) => Some(FileKind::Flat),
            _ if llm_c::Format::of(start).is_some() => Some(FileKind::LlmC),
            // The length of the header, then its first bracket.
            [a, b, c, d, e, f, g, h, b'{', ..]
                if u64::from_le_bytes([*a, *b, *c, *d, *e, *f, *g, *h]) <= bytes =>
            {
                Some(FileKind::Safetensors)
            }
            [0, 0, 0x08 | 0x09 | 0x0b..=0x0e, 1..=8, ..] => Some(FileKind::Idx),
            _ => None,
        }
    }

    fn of_name(path: &Path) -> Option<FileKind> {
        let name = path.file_name()?.to_string_lossy().to_ascii_lowercase();
        let mut endings = ENDINGS.iter();
        let found = endings.find(|(ending, _)| name.ends_with(ending))?;
        Some(found.1)
    }
}

/// Whether a file ends with the length of its metadata and `PAR1`.
fn ends_as_parquet(end: &[u8; 8], bytes: u64) -> bool {
    let [a, b, c, d, letters @ ..] = *end;
    letters == *b"PAR1" && u64::from(u32::from_le_bytes([a, b, c, d])) + 12 <= bytes
}

/// The format of the file at `path`.
pub fn kind(path: &Path) -> Result<FileKind> {
    let mapped = map(path)?;
    let ending = path.extension().unwrap_or_default().to_ascii_lowercase();
    let has_ending = |endings: &[&str]| endings.iter().any(|&known| ending == *known);
    if has_ending(&["xlsx", "xlsm", "xls", "ods"]) {
        return Err(refuse(path, WORKBOOK));
    }
    let (mut start, mut end, bytes) = ([0; 16], [0; 8], mapped.len());
    let start = &mut start[..bytes.min(16) as usize];
    mapped
        .read(0, start)
        .and_then(|()| match bytes {
            8.. => mapped.read(bytes - 8, &mut end),
            _ => Ok(()),
        })
        .map_err(|error| refuse(path, error))?;
    let start = &*start;
    if let Some((_, why)) = REFUSED.iter().find(|(magic, _)| start.starts_with(magic)) {
        return Err(refuse(path, why));
    }
    if bytes == 0 {
        return Err(refuse(path, "it is empty; help: save the data again"));
    }
    let is_named_pickle = has_ending(&["pt", "pth", "pkl", "pickle"]);
    match FileKind::of_bytes(start, &end, bytes) {
        // torch.save writes a zip archive with a pickle in it.
        Some(FileKind::Npz) | None if is_named_pickle => return Err(refuse(path, PICKLE)),
        Some(FileKind::Gzip) if is_table(path) => return Ok(FileKind::Csv),
        Some(kind) => return Ok(kind),
        None if matches!(start, [0x80, 2..=5, ..]) => return Err(refuse(path, PICKLE)),
        None => {}
    }
    let named = FileKind::of_name(path);
    let why_not = match named {
        Some(FileKind::Gzip) => {
            Some("its name ends in .gz, but it is not compressed; help: rename it without .gz")
        }
        Some(FileKind::Parquet) => Some(
            "it does not begin and end as Parquet files do: it is cut short, damaged or of another format; \
             help: write it again",
        ),
        _ => None,
    };
    if let Some(why) = why_not {
        return Err(refuse(path, why));
    }
    named.ok_or_else(|| {
        let got = start[..start.len().min(8)].escape_ascii();
        let known =
            ".npy, .npz, .csv, .tsv, .parquet, .safetensors, .bin, .txt, IDX (…-ubyte), or .gz of these";
        refuse(
            path,
            format!("expected {known}, got a file that begins with \"{got}\"; help: rename a \
                 table to .csv, a text to learn from to .txt"),
        )
    })
}

/// The format that a name shows, without `.gz`.
pub(super) fn of_name(path: &Path) -> Option<FileKind> {
    match FileKind::of_name(path) {
        Some(FileKind::Gzip) => FileKind::of_name(Path::new(path.file_stem()?)),
        known => known,
    }
}

/// Whether the name without `.gz` is that of a table.
fn is_table(path: &Path) -> bool {
    let stem = path.file_stem().map(Path::new);
    stem.and_then(FileKind::of_name) == Some(FileKind::Csv)
}
