//! `.npy` files, numpy's format: headers for readers that leave the elements in the file, and
//! `Tensor::load_npy` and `Tensor::save_npy` for whole tensors.
//!
//! Files are untrusted. The header, a Python dict literal with the keys `descr`, `fortran_order`
//! and `shape`, is parsed strictly, as the JSON that it nearly is. Its claims are compared with the
//! bytes present before anything is allocated. Pickled objects are never read. Elements go straight
//! into the tensor's memory. Saving writes numpy's bytes exactly and never leaves half a file.

use std::fs::{self, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::error::{Caller, Error, Result};
use crate::ops::create::host_data;
use crate::shape::RANK_MAX;
use crate::{DType, Device, Shape, Tensor, files, transfer};

/// The longest header that is read. numpy's have 118 bytes, except for long structured dtypes.
const HEADER_BYTES_MAX: usize = 64 << 10;

impl Tensor {
    /// The array in the `.npy` file at `path`, on `device`: f2, f4, f8, u1, i4, i8, little-endian
    /// and row-major, as `np.save` writes them. On another device than the CPU this is an upload.
    #[track_caller]
    pub fn load_npy(path: impl AsRef<Path>, device: Device) -> Result<Tensor> {
        let (path, by) = (path.as_ref(), Caller::new("load_npy"));
        device.check_usable(by)?;
        let failed = failed(path, "opening");
        // Opening a FIFO would wait for its other end.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(&failed)?;
        let metadata = file.metadata().map_err(&failed)?;
        check_regular(path, &metadata)?;
        load(file, metadata.len(), path, device, by)
    }

    /// Writes the tensor to `path` as an `.npy` file with the bytes that numpy would write,
    /// row-major. From a GPU this is a download.
    #[track_caller]
    pub fn save_npy(&self, path: impl AsRef<Path>) -> Result<()> {
        let (path, by) = (path.as_ref(), Caller::new("save_npy"));
        let Some(header) = header(self.dtype(), self.shape()) else {
            let expected = "a dtype that .npy files have: f32, f16, f64, u8, i32 or i64";
            let help = "save it as .to_dtype(DType::F32), which holds every bf16 exactly";
            return Err(by.operand(self.as_operand("x"), expected, help));
        };
        // Saving is a use: the tensor was not made only to be moved here.
        self.storage().mark_used();
        let here = transfer::on_host(self, by)?.contiguous_at(by)?;
        let borrow = here.borrow("x", false, by)?;
        replace(path, &[&header, borrow.elements::<u8>()])
    }
}

/// The start of an `.npy` file of this dtype and shape. The elements follow, row-major and
/// little-endian. None for a dtype that numpy does not have.
pub fn header(dtype: DType, shape: &[usize]) -> Option<Vec<u8>> {
    descr(dtype).map(|descr| written(descr, shape))
}

/// The array in the bytes of an `.npy` file, on `device`.
#[track_caller]
pub fn parse(bytes: &[u8], device: Device) -> Result<Tensor> {
    let (path, by) = (Path::new("<bytes in memory>"), Caller::new("npy::parse"));
    device.check_usable(by)?;
    load(bytes, bytes.len() as u64, path, device, by)
}

/// What the header of an `.npy` file says.
#[derive(Clone, Copy, Debug)]
pub struct Described<S> {
    /// The meaning of the dtype's text.
    pub stored: S,
    /// Whether the first index varies fastest.
    pub fortran_order: bool,
    /// The array's shape.
    pub shape: Shape,
    /// Where the elements begin: how many bytes were read.
    pub data_start: u64,
}

/// Reads only the header of an `.npy` file from `reader`; errors call it `path`. `stored_as` gives
/// the meaning of the dtype's text (`<f4`), or what is wrong with it.
pub fn describe<S>(
    mut reader: impl Read,
    path: &Path,
    stored_as: impl Fn(&[u8]) -> Result<S, String>,
) -> Result<Described<S>> {
    let (text, data_start) = header_text(&mut reader, path)?;
    let (stored, fortran_order, shape) =
        parse_header(&text, stored_as).map_err(|problem| bad(path, problem))?;
    Ok(Described {
        stored,
        fortran_order,
        shape,
        data_start,
    })
}

/// The array in a file of this length.
fn load(
    mut reader: impl Read,
    file_bytes: u64,
    path: &Path,
    device: Device,
    by: Caller,
) -> Result<Tensor> {
    let file = describe(&mut reader, path, dtype_of)?;
    let (dtype, shape) = (file.stored, file.shape);
    if file.fortran_order && shape.len() > 1 {
        let problem = "it is in Fortran order: save it with np.save(path, np.ascontiguousarray(a))";
        return Err(bad(path, problem.into()));
    }
    // A shape's bytes fit the address space for every dtype.
    let bytes = shape.count() * dtype.bytes();
    let claims = format!("the header claims {dtype}{shape} = {bytes} bytes");
    let left = file_bytes.saturating_sub(file.data_start);
    if left != bytes as u64 {
        return Err(bad(path, format!("{claims}, but {left} bytes follow it")));
    }
    host_data(shape, dtype, device, by, |mut memory| {
        let read = reader.read_exact(memory.elements_mut());
        read.map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => bad(path, format!("{claims}, but the file has shrunk")),
            _ => failed(path, "reading")(error),
        })
    })
}

/// The text of the header, and how many bytes its end is from the start.
fn header_text(reader: &mut impl Read, path: &Path) -> Result<(Vec<u8>, u64)> {
    let mut start = [0; MAGIC.len() + 2];
    read_whole(reader, &mut start, path, "magic and version")?;
    if !start.starts_with(MAGIC) {
        let help = match start {
            [b'P', b'K', 3, 4, ..] => {
                " This is a zip archive, perhaps an .npz: save each array with np.save."
            }
            [0x80, ..] => {
                " This may be a pickle, which is never read here: save the array with np.save."
            }
            _ => "",
        };
        let got = start.escape_ascii();
        let problem = format!("it begins with \"{got}\"; expected \"\\x93NUMPY\".{help}");
        return Err(bad(path, problem));
    }
    let mut length = [0; 4];
    let length_size = match [start[MAGIC.len()], start[MAGIC.len() + 1]] {
        [1, 0] => 2,
        [2 | 3, 0] => 4,
        [major, minor] => {
            let version = format!("{major}.{minor}");
            let problem = format!("it has version {version}; supported are 1.0, 2.0 and 3.0");
            return Err(bad(path, problem));
        }
    };
    read_whole(reader, &mut length[..length_size], path, "header's length")?;
    let header_bytes = u32::from_le_bytes(length) as usize;
    if header_bytes > HEADER_BYTES_MAX {
        let problem =
            format!("its header claims {header_bytes} bytes; at most {HEADER_BYTES_MAX} are read");
        return Err(bad(path, problem));
    }
    let mut text = vec![0; header_bytes];
    read_whole(reader, &mut text, path, "header")?;
    Ok((text, (start.len() + length_size + header_bytes) as u64))
}

/// Fills `buffer`; the error calls it `what`.
fn read_whole(reader: &mut impl Read, buffer: &mut [u8], path: &Path, what: &str) -> Result<()> {
    reader
        .read_exact(buffer)
        .map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => bad(path, format!("it ends within its {what}")),
            _ => failed(path, "reading")(error),
        })
}

/// Puts a file with these parts in the place of `path`. Links are followed, permissions are kept.
fn replace(path: &Path, parts: &[&[u8]]) -> Result<()> {
    let old = fs::metadata(path).ok();
    if let Some(old) = &old {
        check_regular(path, old)?;
        if old.permissions().readonly() {
            let why = io::Error::new(ErrorKind::PermissionDenied, "it is read-only");
            return Err(failed(path, "writing")(why));
        }
    } else if fs::symlink_metadata(path).is_ok() {
        let problem = "it is a link to a file that does not exist";
        return Err(bad(path, problem.into()));
    }
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let written = files::replace_file(&target, |file| {
        let kept = old.map_or(Ok(()), |old| file.set_permissions(old.permissions()));
        kept.and_then(|()| parts.iter().try_for_each(|part| file.write_all(part)))
            .map_err(files::failed("write", &target))
    });
    written.map_err(|error| failed(path, "writing")(error.source))
}

/// Refuses what is not a regular file.
fn check_regular(path: &Path, metadata: &Metadata) -> Result<()> {
    crate::files::refusal(metadata).map_or(Ok(()), |refusal| Err(bad(path, refusal)))
}

fn bad(path: &Path, problem: String) -> Error {
    Error::BadFile {
        path: path.to_path_buf(),
        format: ".npy",
        problem,
    }
}

fn failed(path: &Path, doing: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| Error::Io {
        path: path.to_path_buf(),
        doing,
        source,
    }
}

/// The start of every file; two bytes of version follow.
const MAGIC: &[u8; 6] = b"\x93NUMPY";
/// numpy pads headers so that elements start at a multiple of this.
const ALIGNMENT: usize = 64;
/// numpy leaves room for the first dimension to grow to this many digits.
const GROWTH_DIGITS: usize = 21;
/// How much of an invalid header an error quotes.
const SHOWN_BYTES_MAX: usize = 40;

/// Parses the header's text, the part after its length: the dtype, whether the first index varies
/// fastest, and the shape. `stored_as` gives the meaning of the dtype's text.
fn parse_header<S>(
    text: &[u8],
    stored_as: impl Fn(&[u8]) -> Result<S, String>,
) -> Result<(S, bool, Shape), String> {
    #[derive(Deserialize)]
    #[serde(rename = "Header", deny_unknown_fields)]
    struct HeaderLiteral {
        descr: Value,
        fortran_order: bool,
        shape: Vec<usize>,
    }
    let json = as_json(&String::from_utf8_lossy(text));
    let header = serde_json::from_str::<HeaderLiteral>(&json).map_err(|error| {
        let got = shown(text);
        format!("its header is not as numpy writes it: {error}; it begins with \"{got}\"")
    })?;
    let Value::String(descr) = header.descr else {
        return Err(format!(
            "its dtype is structured: {}. Save each field as a separate array: np.save(path, a['name'])",
            shown(header.descr.to_string().as_bytes())
        ));
    };
    let dims = &header.shape[..];
    if dims.len() > RANK_MAX {
        let most = format!("more than {RANK_MAX} dimensions, the most that are supported");
        return Err(format!("its shape has {most}"));
    }
    let shape = Shape::new(dims).map_err(|_| {
        format!("its shape {dims:?} has more elements than this machine can address")
    })?;
    Ok((stored_as(descr.as_bytes())?, header.fortran_order, shape))
}

/// Python's literal as JSON: with its brackets, quotes and words, and without a comma before a
/// bracket that closes, or the suffix of Python 2's long integers.
fn as_json(text: &str) -> String {
    let mut json = String::with_capacity(text.len());
    for character in text.chars() {
        if matches!(character, ')' | ']' | '}') {
            json.truncate(json.trim_end().trim_end_matches(',').len());
        }
        match character {
            '(' => json.push('['),
            ')' => json.push(']'),
            '\'' => json.push('"'),
            'L' if json.ends_with(|last: char| last.is_ascii_digit()) => {}
            other => json.push(other),
        }
    }
    json.replace("True", "true").replace("False", "false")
}

/// How numpy spells a dtype, or `None` for bfloat16, which it does not have.
fn descr(dtype: DType) -> Option<&'static str> {
    Some(match dtype {
        DType::F32 => "<f4",
        DType::F16 => "<f2",
        DType::F64 => "<f8",
        DType::I32 => "<i4",
        DType::I64 => "<i8",
        DType::U8 => "|u1",
        DType::BF16 => return None,
    })
}

/// The dtype that numpy spells like this.
fn dtype_of(text: &[u8]) -> Result<DType, String> {
    let spelled = |dtype: &DType| descr(*dtype).is_some_and(|own| own.as_bytes() == text);
    DType::ALL.into_iter().find(spelled).ok_or_else(|| {
        format!(
            "its dtype is '{}'; supported are <f2, <f4, <f8, |u1, <i4 and <i8. Save it as one of \
             those: np.save(path, a.astype('<f4'))",
            shown(text)
        )
    })
}

/// Everything before the elements of a row-major array, exactly as numpy writes it.
fn written(descr: &str, shape: &[usize]) -> Vec<u8> {
    let dims: Vec<String> = shape.iter().map(ToString::to_string).collect();
    let dims = match &dims[..] {
        [one] => format!("{one},"),
        _ => dims.join(", "),
    };
    let mut text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({dims}), }}");
    let growing = shape.first();
    let room = growing.map_or(0, |dim| GROWTH_DIGITS - dim.to_string().len());
    let prelude_bytes = MAGIC.len() + 2 + 2;
    let end = prelude_bytes + text.len() + room + 1;
    text.push_str(&" ".repeat(room + ALIGNMENT - end % ALIGNMENT));
    text.push('\n');
    // Eight dimensions of at most 19 digits stay far below the 64 KiB of a version 1 header.
    let length = (text.len() as u16).to_le_bytes();
    [MAGIC.as_slice(), &[1, 0], &length, text.as_bytes()].concat()
}

/// The start of `bytes`, printable.
fn shown(bytes: &[u8]) -> String {
    let mut shown = String::new();
    for &byte in bytes.iter().take(SHOWN_BYTES_MAX) {
        match byte {
            b' '..=b'~' => shown.push(char::from(byte)),
            _ => shown.extend(std::ascii::escape_default(byte).map(char::from)),
        }
    }
    if bytes.len() > SHOWN_BYTES_MAX {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests;
