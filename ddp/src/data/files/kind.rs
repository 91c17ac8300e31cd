//! What a file is: by its first bytes, and where these do not tell, by the ending of its name. What is no data, or cannot be read
//! safely, is refused with what to do instead.

use std::path::Path;

use super::{map, refuse};
use crate::error::Result;

/// Formats that data can be in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Npy,
    Npz,
    Idx,
    Safetensors,
    /// Our own.
    Flat,
    /// Something else, compressed.
    Gzip,
    Csv,
    Parquet,
}

/// Endings and what they mean.
const ENDINGS: [(&str, Kind); 14] = [
    (".npy", Kind::Npy),
    (".npz", Kind::Npz),
    (".idx", Kind::Idx),
    ("-ubyte", Kind::Idx),
    (".ubyte", Kind::Idx),
    (".idx1", Kind::Idx),
    (".idx3", Kind::Idx),
    (".safetensors", Kind::Safetensors),
    (".bin", Kind::Flat),
    (".gz", Kind::Gzip),
    (".csv", Kind::Csv),
    (".tsv", Kind::Csv),
    (".parquet", Kind::Parquet),
    (".pq", Kind::Parquet),
];

/// Also for what `torch.save` writes.
pub(super) const PICKLE: &str = "it is a pickle (as of torch.save), which can run programs when it is read, and is not read here. Save its arrays: \
                      numpy.savez(path, x=x.numpy(), y=y.numpy())";

const MATLAB: &str =
    "it is a MATLAB file, which is not read here. Save its arrays with numpy.savez(path, **scipy.io.loadmat(…))";

/// Beginnings of files that are no data for us, and what to say of them.
const REFUSED: [(&[u8], &str); 7] = [
    (
        b"\x89HDF\r\n",
        "it is HDF5, which is not read here. Save its arrays: numpy.savez(path, x=file['x'][:], y=file['y'][:])",
    ),
    (b"ARROW1\0\0", "it is an Arrow (Feather) file, which is not read here. Save it as .parquet or .csv"),
    // Longer than the names of columns that a table may begin with.
    (b"MATLAB 5.0 MAT-", MATLAB),
    (b"MATLAB 7.3 MAT-", MATLAB),
    (b"\x89PNG", "it is one picture. Put all of them into one array: numpy.savez(path, x=images, y=labels)"),
    (b"\xff\xd8\xff", "it is one picture. Put all of them into one array: numpy.savez(path, x=images, y=labels)"),
    (b"SQLite format 3", "it is a database. Save the table as .csv or .parquet"),
];

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Npy => "an .npy file",
            Kind::Npz => "an .npz file",
            Kind::Idx => "an IDX file",
            Kind::Safetensors => "a .safetensors file",
            Kind::Flat => "a flat .bin file",
            Kind::Gzip => "a file compressed with gzip",
            Kind::Csv => "a table of text (.csv, .tsv)",
            Kind::Parquet => "a .parquet file",
        }
    }

    /// By its first bytes, and where a text could begin so, by the last eight as well.
    fn of_bytes(start: &[u8], end: &[u8; 8], bytes: u64) -> Option<Kind> {
        match start {
            [0x93, b'N', b'U', b'M', b'P', b'Y', ..] => Some(Kind::Npy),
            [b'P', b'K', 3, 4, ..] | [b'P', b'K', 5, 6, ..] => Some(Kind::Npz),
            [0x1f, 0x8b, ..] => Some(Kind::Gzip),
            // A column may be called so.
            [b'P', b'A', b'R', b'1', ..] if footer_fits(end, bytes) => Some(Kind::Parquet),
            _ if start.starts_with(super::flat::MAGIC) => Some(Kind::Flat),
            // The length of the header, which has to be in the file, and its first bracket.
            [length @ .., b'{'] if length.len() == 8 && header_fits(length, bytes) => Some(Kind::Safetensors),
            [0, 0, 0x08 | 0x09 | 0x0b..=0x0e, 1..=8, ..] => Some(Kind::Idx),
            _ => None,
        }
    }

    fn of_name(path: &Path) -> Option<Kind> {
        let name = path.file_name()?.to_string_lossy().to_ascii_lowercase();
        ENDINGS.iter().find(|(ending, _)| name.ends_with(ending)).map(|(_, kind)| *kind)
    }
}

fn header_fits(length: &[u8], bytes: u64) -> bool {
    let length = length.iter().rev().fold(0u64, |length, &byte| length << 8 | u64::from(byte));
    length <= bytes
}

/// Whether a file ends as Parquet does: with the length of what describes it, and the letters that it began with.
fn footer_fits(end: &[u8; 8], bytes: u64) -> bool {
    let [a, b, c, d, letters @ ..] = *end;
    letters == *b"PAR1" && u64::from(u32::from_le_bytes([a, b, c, d])) + 12 <= bytes
}

/// What the file at `path` is.
pub(crate) fn kind(path: &Path) -> Result<Kind> {
    let mapped = map(path)?;
    let (mut start, bytes) = ([0; 16], mapped.len());
    let start = &mut start[..bytes.min(16) as usize];
    mapped.read(0, start).map_err(|error| refuse(path, error))?;
    let (start, mut end) = (&*start, [0; 8]);
    if bytes >= 8 {
        mapped.read(bytes - 8, &mut end).map_err(|error| refuse(path, error))?;
    }
    if let Some((_, why)) = REFUSED.iter().find(|(magic, _)| start.starts_with(magic)) {
        return Err(refuse(path, why));
    }
    if bytes == 0 {
        return Err(refuse(path, "it is empty"));
    }
    let ending = path.extension().map(|ending| ending.to_string_lossy().to_ascii_lowercase()).unwrap_or_default();
    let named_pickle = matches!(ending.as_str(), "pt" | "pth" | "pkl" | "pickle");
    match Kind::of_bytes(&start[..start.len().min(9)], &end, bytes) {
        // What torch.save writes is a zip archive with a pickle in it.
        Some(Kind::Npz) | None if named_pickle => return Err(refuse(path, PICKLE)),
        Some(Kind::Gzip) => return Ok(if is_table(path) { Kind::Csv } else { Kind::Gzip }),
        Some(kind) => return Ok(kind),
        None if matches!(start[..], [0x80, 2..=5, ..]) => return Err(refuse(path, PICKLE)),
        None => {}
    }
    Kind::of_name(path).ok_or_else(|| {
        let known = ".npy, .npz, .csv, .tsv, .parquet, .safetensors, .bin, IDX (…-ubyte), and .gz of these";
        refuse(path, format!("it is none of the files that are known: {known}. It begins with \"{}\"", shown(start)))
    })
}

/// Whether the name without `.gz` is that of a table.
fn is_table(path: &Path) -> bool {
    path.file_stem().and_then(|stem| Kind::of_name(Path::new(stem))) == Some(Kind::Csv)
}

fn shown(start: &[u8]) -> String {
    start[..start.len().min(8)].escape_ascii().to_string()
}
