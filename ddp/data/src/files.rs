//! Arrays, tables and tokens in users' files: the list of formats, how a file's format is
//! recognised, and how it is opened. The first bytes of a file decide its format, or else the
//! ending of its name. Files without usable data, and those that cannot be read safely, are refused
//! with what to do instead.
//!
//! Files are untrusted. `open` reads only headers and compares their claims with the size of the
//! file before it allocates anything; errors name the file. Pickled objects are never read. Files
//! that cannot be mapped as they are (compressed ones, tables) are converted once into the cache.

pub mod array;
pub mod cache;
pub mod flat;
mod format;
mod idx;
pub mod io;
mod numpy;
pub mod safetensors;
mod tables;
pub mod tokens;

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use ddp_kernels::mapped::Mapped;

pub use self::array::{Array, NumberType};
pub(crate) use self::format::DataFile;
pub use self::format::{Coding, Contents, EXAMPLES_MAX, Format, OddCells, TableFormat, TokenFile};
use self::format::{FileEnds, Holds, PLAIN};
use self::io::{append, map, refuse, unreadable, writing};
use self::numpy::{PICKLE, WORKBOOK};
use crate::error::{Result, bail, ensure};

/// All formats. If several recognise a file, the first one is used.
static FORMATS: &[&Format] = &[
    &numpy::NPY,
    &numpy::NPZ,
    &tables::CSV,
    &tables::JSONL,
    &tables::PARQUET,
    &GZIP,
    &tokens::LLM_C,
    &flat::FLAT,
    &safetensors::SAFETENSORS,
    &idx::IDX,
    &tokens::TEXT,
    #[cfg(test)]
    &tests::fvecs::FVECS,
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

/// The format of a name without `.gz`, and the ending that shows it.
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
    let are_rows = |format: &&&Format| matches!(format.holds, Holds::Arrays(_) | Holds::Table(_));
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
    let ends = FileEnds { start, end, bytes };
    let found = FORMATS.iter().find(|format| (format.begins)(&ends));
    // torch.save writes a zip archive with a pickle in it.
    let may_be_pickle = found.is_none_or(|format| format.is(&numpy::NPZ));
    let is_pickle = found.is_none() && matches!(start, [0x80, 2..=5, ..]);
    let is_named_pickle = may_be_pickle && has_ending(&["pt", "pth", "pkl", "pickle"]);
    ensure!(!is_pickle && !is_named_pickle, "{PICKLE}");
    let named = named(path).map(|(format, _)| format);
    let is_packed = ending == "gz";
    match (found, named) {
        // They are read while they are unpacked.
        (Some(found), Some(named)) if found.is(&GZIP) && is_packed && named.is_text() => Ok(named),
        (Some(found), _) => Ok(found),
        _ if is_packed => {
            bail!("its name ends in .gz, but it is not compressed; help: rename it without .gz")
        }
        (None, Some(named)) => named.must_begin.map_or(Ok(named), |why| Err(why.into())),
        (None, None) if ending == "json" => bail!("{}", json_help(mapped)),
        (None, None) => bail!(
            "expected {}, .txt, or .gz of these, got a file that begins with \"{}\"; help: rename a table to .csv, a \
             text to learn from to .txt",
            endings().collect::<Vec<_>>().join(", "),
            start[..start.len().min(8)].escape_ascii()
        ),
    }
}

/// What to do about a `.json` file, by its first kilobytes: conversations have fields that tables
/// lack.
fn json_help(mapped: &Mapped) -> String {
    let mut start = vec![0; mapped.len().min(4096) as usize];
    let start = mapped
        .read(0, &mut start)
        .map(|()| String::from_utf8_lossy(&start));
    let start = start.unwrap_or_default();
    let is_list = start.trim_start().starts_with('[');
    let mut fields = ["messages", "conversations", "prompt", "text"].iter();
    let is_of_texts = fields.any(|name| start.contains(&format!("\"{name}\"")));
    let help = match (is_of_texts, is_list) {
        (true, is_list) => json_lines_help(is_list),
        (false, true) => "pandas.read_json(path).to_csv(other, index=False)",
        (false, false) => "pandas.read_json(path, lines=True).to_csv(other, index=False)",
    };
    format!("expected a table in .csv, or texts in .jsonl, got .json; help: {help}")
}

/// How texts in `.json`, one list or objects, become `.jsonl`.
pub(crate) fn json_lines_help(is_list: bool) -> &'static str {
    if is_list {
        "write each object on a line of a .jsonl file: jq -c '.[]' IN.json >OUT.jsonl"
    } else {
        "rename it to .jsonl, with each object on a line"
    }
}

/// The arrays of the file at `path`, of any format with arrays. Converted copies go to `cache_dir`,
/// if given.
pub fn open(path: &Path, cache_dir: Option<&Path>) -> Result<Contents> {
    let name = path.display().to_string();
    let file = &DataFile::new(path, &name, cache_dir);
    let format = format(path)?;
    let (expected, got) = match format.holds {
        Holds::Arrays(arrays) => return arrays(file),
        Holds::Packed => {
            let path = &unpacked(file)?;
            let inner = self::format(path)?;
            match inner.holds {
                Holds::Arrays(arrays) if !inner.is(&flat::FLAT) => {
                    return arrays(&DataFile { path, ..*file });
                }
                _ => (".npy, IDX or .csv in a .gz file", inner),
            }
        }
        Holds::Table(_) | Holds::Tokens(_) | Holds::Conversations => ("a file of arrays", format),
    };
    let help = match got.holds {
        Holds::Conversations => "; help: show-tokens shows what a tokenizer makes of it",
        _ if got.is(&tokens::TEXT) => "; help: rename a table of text to .csv",
        _ => "",
    };
    Err(file.bad(format!("expected {expected}, got {}{help}", got.name)))
}

static GZIP: Format = Format {
    name: "a file compressed with gzip",
    begins: |file| file.start.starts_with(b"\x1f\x8b"),
    holds: Holds::Packed,
    ..PLAIN
};

/// The unpacked array of a file, in the cache.
fn unpacked(file: &DataFile<'_>) -> Result<PathBuf> {
    let path = file.path;
    cache::converted(path, file.cache_dir, "unpacked", |to| {
        let bad = |error| unreadable(path, error);
        let (mut packed, mut start) = (io::reader(path)?, [0; 8]);
        packed.read_exact(&mut start).map_err(bad)?;
        // Before all of something else is unpacked.
        if !start.starts_with(b"\x93NUMPY") && !start.starts_with(&[0, 0]) {
            let got = start.escape_ascii();
            let what = format!(
                "expected .npy, IDX or .csv in a .gz file, got \"{got}\"…; help: unpack it"
            );
            return Err(refuse(path, what));
        }
        let mut out = File::create_new(to).map_err(writing(to))?;
        append((to, &mut out), (&start[..]).chain(packed), bad)?;
        out.sync_all().map_err(writing(to))
    })
}

/// The format of the table at `path`.
pub fn table_format(path: &Path) -> Result<TableFormat> {
    let format = format(path)?;
    match format.holds {
        Holds::Table(format) => Ok(format),
        Holds::Packed => Err(refuse(
            path,
            "it is compressed with gzip, but its name does not end in .gz; help: rename it, as in table.csv.gz",
        )),
        _ => Err(refuse(
            path,
            format!(
                "expected a table, got {}; help: give a .csv, .tsv or .parquet file",
                format.name
            ),
        )),
    }
}

/// What a file's rows are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowKind {
    Features,
    Tokens,
    /// Texts, which a tokenizer turns into tokens.
    Conversations,
}

/// What the file at `path` itself says that it holds. Where there is a tokenizer, a table is of
/// texts.
pub(crate) fn row_kind(path: &Path, has_tokenizer: bool) -> Result<RowKind> {
    let format = format(path)?;
    let is_shard = || flat::open(path, "").is_ok_and(|file| file.about.vocabulary.is_some());
    Ok(match format.holds {
        Holds::Conversations => RowKind::Conversations,
        Holds::Table(TableFormat::Parquet) if has_tokenizer => RowKind::Conversations,
        Holds::Tokens(_) => RowKind::Tokens,
        Holds::Arrays(_) if format.is(&flat::FLAT) && is_shard() => RowKind::Tokens,
        Holds::Arrays(_) | Holds::Table(_) | Holds::Packed => RowKind::Features,
    })
}

/// The tokens of the file at `path`. `stated` is their type where the file has no header; without
/// it they are u16, and refused if they look like something else.
pub fn open_tokens(
    path: &Path,
    stated: Option<NumberType>,
    cache_dir: Option<&Path>,
) -> Result<TokenFile> {
    let (mut format, name) = (format(path)?, path.display().to_string());
    // A .bin file of tokens may have no header.
    if format.is(&flat::FLAT) && !flat::begins(&*map(path)?) {
        format = &tokens::NANOGPT;
    }
    let mut file = DataFile::new(path, &name, cache_dir);
    file.stated = stated;
    let tokens = match format.holds {
        Holds::Tokens(read) => read(&file)?,
        Holds::Table(_) => {
            let why = "expected tokens, got a table; help: give .bin, .txt, or a one-dimensional array of integers";
            return Err(refuse(path, why));
        }
        _ => {
            let contents = open(path, cache_dir)?;
            of_array(&contents).map_err(|why| refuse(path, why))?
        }
    };
    let got = tokens.tokens.element;
    if stated.is_some_and(|stated| stated != got) {
        let why = "expected tokens without a header, whose type type= states, got";
        return Err(refuse(path, format!("{why} {got}; help: leave out type=")));
    }
    Ok(tokens)
}

/// The array `tokens` of a file, or its only one.
fn of_array(contents: &Contents) -> Result<TokenFile, String> {
    let array = match (contents.find("tokens")?, &contents.arrays[..]) {
        (Some(array), _) | (None, [array]) => array,
        (None, arrays) => {
            let names: Vec<_> = arrays.iter().map(|array| &*array.key).collect();
            bail!(
                "expected one array, or one called tokens, got {}",
                names.join(", ")
            );
        }
    };
    let (element, about) = (array.element, &contents.about);
    let shape = [&[array.rows() as usize], array.row_shape()].concat();
    ensure!(
        shape.len() == 1 && !element.is_float() && element != NumberType::Bool,
        "expected tokens, a one-dimensional array of integers, got {element}{shape:?}"
    );
    let mut file = TokenFile::new(array.clone(), "an array", about.vocabulary);
    file.coding.end_of_text = about.end_of_text;
    file.coding.tokenizer = about.tokenizer.clone();
    Ok(file)
}

#[cfg(test)]
mod tests;
