//! What fuzz targets and `ddp/tests/lying_files.rs` call: any bytes are read as the content of a
//! data file. The result is numbers, at most as many as the bytes can hold, or bad data (exit code
//! 65).

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use ddp::data::files::{self, Array, NumberType};
use ddp::data::{ColumnPlan, Error, Result, text};
use ddp::tables::{self, READER, TableRequest};

/// The most bytes that deflate unpacks one byte to.
const RATIO_MAX: usize = 1032;
/// Numbers read at a time, if a row has no more.
const READ_AT_ONCE: usize = 4096;

/// Reads all arrays of a file of this name (`a.npz`) in every way. Returns how many numbers that
/// were.
pub fn arrays(name: &str, bytes: &[u8]) -> Result<usize> {
    in_folder(name, bytes, |path, folder| {
        let read = files::open(path, Some(folder)).and_then(|contents| {
            contents.arrays.iter().try_fold(0, |count, array| {
                let elements = array.row_elements * array.rows() as usize;
                let most = bytes.len().saturating_mul(RATIO_MAX);
                assert!(
                    elements <= most,
                    "{array:?}: more numbers than {} bytes can be",
                    bytes.len()
                );
                read_in_every_way(array)?;
                Ok(count + elements)
            })
        });
        if let Err(error) = &read {
            assert!(
                error.to_string().contains(&*path.to_string_lossy()),
                "{error} does not name its file"
            );
        }
        read
    })
}

/// `arrays` of a flat `.bin`. The header's checksum is corrected first; few inputs would get past
/// it.
pub fn flat(bytes: &[u8]) -> Result<usize> {
    let mut bytes = bytes.to_vec();
    if bytes.len() >= 64 {
        bytes[..8].copy_from_slice(b"DDPFLAT1");
        let number =
            |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let (start, length) = (number(8) as usize, number(16) as usize);
        let mut crc = flate2::Crc::new();
        crc.update(
            start
                .checked_add(length)
                .and_then(|end| bytes.get(start..end))
                .unwrap_or_default(),
        );
        bytes[24..28].copy_from_slice(&crc.sum().to_le_bytes());
    }
    in_folder("a.bin", &bytes, |path, _| {
        // Most checksums of arrays are wrong, which is bad data.
        let verified = files::flat::verify(path);
        assert!(verified.is_ok() || verified.is_err_and(|error| error.exit_code() == 65));
        Ok(())
    })?;
    arrays("a.bin", &bytes)
}

/// Reads all rows as each type; types that hold a number exactly must agree.
fn read_in_every_way(array: &Array) -> Result<()> {
    let elements = array.row_elements;
    let (mut f32s, mut f64s, mut i64s) = (Vec::new(), Vec::new(), Vec::new());
    let mut first = 0;
    while first < array.rows() {
        let rows = ((READ_AT_ONCE / elements).max(1) as u64).min(array.rows() - first);
        let count = rows as usize * elements;
        f32s.resize(count, 0.0);
        f64s.resize(count, 0.0);
        i64s.resize(count, 0);
        array.read_f32(first, &mut f32s)?;
        array.read_f64(first, &mut f64s)?;
        // An f64 rounds the largest whole numbers.
        if !matches!(array.element, NumberType::I64 | NumberType::U64) {
            let same = |(narrow, wide): (&f32, &f64)| {
                *narrow == *wide as f32 || (narrow.is_nan() && wide.is_nan())
            };
            assert!(
                f32s.iter().zip(&f64s).all(same),
                "{array:?}: f32 and f64 differ"
            );
        }
        if !array.element.is_float() {
            array.read_i64(first, &mut i64s)?;
            assert!(
                i64s.iter()
                    .zip(&f64s)
                    .all(|(&whole, &wide)| whole as f64 == wide),
                "{array:?}: i64 and f64 differ"
            );
        }
        first += rows;
    }
    Ok(())
}

/// Reads a table of this name (`a.csv`), first without a label, then with its last column as the
/// label. Returns how many numbers that were; an error if both fail.
pub fn table(name: &str, bytes: &[u8]) -> Result<usize> {
    in_folder(name, bytes, |path, folder| {
        let names = READER.columns(path)?;
        let read = |label: Option<&String>| {
            let others = names.iter().filter(|name| Some(*name) != label);
            let request = TableRequest {
                label: label.cloned(),
                features: others.map(|name| ColumnPlan::number(name)).collect(),
                ..Default::default()
            };
            let contents = tables::open_table(path, &request, Some(folder))?;
            contents
                .arrays
                .iter()
                .map(finite_numbers)
                .sum::<Result<usize>>()
        };
        match (read(None), read(names.last())) {
            (Ok(alone), Ok(labelled)) => Ok(alone + labelled),
            // A text column cannot be a feature; a table of one column has no label.
            (Ok(count), Err(error)) | (Err(error), Ok(count)) if error.exit_code() == 65 => {
                Ok(count)
            }
            (Err(error), _) | (_, Err(error)) => Err(error),
        }
    })
}

/// Reads all numbers of an array; a non-finite one is a mistake of the conversion.
fn finite_numbers(array: &Array) -> Result<usize> {
    let mut row = vec![0.0; array.row_shape().iter().product()];
    for number in 0..array.rows() {
        array.read_f64(number, &mut row)?;
        if row.iter().any(|value| !value.is_finite()) {
            return Err(Error::Internal(format!(
                "row {number} of {} is {row:?}",
                array.name()
            )));
        }
    }
    Ok(row.len() * array.rows() as usize)
}

/// Reads the documents of a file of this name (`a.jsonl.zst`), cut wherever that is possible.
/// Returns how many bytes of text that were.
pub fn texts(name: &str, bytes: &[u8]) -> Result<usize> {
    in_folder(name, bytes, |path, _| {
        let read = |lossy: bool| {
            let mut count = 0;
            let options = text::ReadOptions {
                field: "text",
                lossy,
                encoder: Some(&text::Encoder::Bytes),
                piece_bytes: 64,
                read_bytes: &Default::default(),
                columns: Some(tables::texts),
            };
            text::documents(path, &options, &mut |piece| {
                count += piece.text.len();
                Ok(())
            })
            .map(|()| count)
        };
        match (read(false), read(true)) {
            (Ok(exact), Ok(lossy)) => {
                assert_eq!(exact, lossy, "nothing of UTF-8 is replaced");
                Ok(exact)
            }
            (Ok(_), Err(error)) => Err(Error::Internal(error.to_string())),
            (Err(error), _) => Err(error),
        }
    })
}

/// Reads bytes as a `tokenizer.json`. Returns how many tokens it has.
pub fn tokenizer(bytes: &[u8]) -> Result<usize> {
    let vocabulary = text::Vocabulary::of_bytes(bytes.to_vec()).map_err(Error::Data)?;
    if let Ok(end) = vocabulary.end_of_text(None) {
        assert!((end as usize) < vocabulary.size);
    }
    Ok(vocabulary.size)
}

/// Reads bytes as a file of prompts. Returns how many there are.
pub fn prompts(bytes: &[u8]) -> Result<usize> {
    in_folder("prompts.txt", bytes, |path, _| {
        let prompts = ddp::using::prompts(path).map_err(|error| match error {
            ddp::Error::Data(text) => Error::Data(text),
            other => Error::Internal(other.to_string()),
        })?;
        let text = String::from_utf8_lossy(bytes);
        let lines: Vec<&str> = text.split('\n').collect();
        for (line, prompt) in &prompts {
            assert!(lines[line - 1].contains(&prompt[..]), "line {line}");
        }
        Ok(prompts.len())
    })
}

/// Turns tokens into text one by one: two bytes are a token, of which `encoder` has `size`.
/// The parts are those of the whole text. Returns how many bytes that is.
pub fn decoded(encoder: &text::Encoder, size: usize, bytes: &[u8]) -> Result<usize> {
    let (pairs, _) = bytes.as_chunks::<2>();
    let token = |pair: &[u8; 2]| u32::from(u16::from_le_bytes(*pair)) % size as u32;
    let tokens: Vec<u32> = pairs.iter().map(token).collect();
    let mut stream = text::TextStream::after(encoder, &[]);
    let mut parts = String::new();
    for token in &tokens {
        let part = stream.push(*token).map_err(Error::Data)?;
        assert!(!part.ends_with('\u{fffd}'), "half a character: {part:?}");
        parts += &part;
    }
    parts += &stream.finish().map_err(Error::Data)?;
    let whole = encoder.decode(&tokens).map_err(Error::Data)?;
    assert_eq!(parts, whole, "{tokens:?}");
    Ok(whole.len())
}

/// Calls `read` with a file of these bytes and a folder for the cache, and removes both after it.
fn in_folder<T>(
    name: &str,
    bytes: &[u8],
    read: impl FnOnce(&Path, &Path) -> Result<T>,
) -> Result<T> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    // In memory: making a file durable costs nothing there.
    let folder = PathBuf::from(format!("/dev/shm/ddp-fuzz-{}-{number}", std::process::id()));
    let failed = |error: std::io::Error| Error::Internal(error.to_string());
    fs::create_dir(&folder).map_err(failed)?;
    let path = folder.join(name);
    let read = fs::write(&path, bytes)
        .map_err(failed)
        .and_then(|()| read(&path, &folder.join("cache")));
    fs::remove_dir_all(&folder).map_err(failed)?;
    read
}
