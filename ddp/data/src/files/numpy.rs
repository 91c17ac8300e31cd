//! `.npy` files, and `.npz` archives of them as `numpy.savez` writes them.
//!
//! `.npy` is read in place: numpy's bools, integers and floats in either byte order. An array in
//! Fortran order, such as `DataFrame.to_numpy` gives, is converted once to C order, in which rows
//! are contiguous. The header is parsed by the strict parser of the tensor library. In an archive,
//! stored members (the usual case) are also read in place; compressed ones (`savez_compressed`) are
//! unpacked once.
//!
//! Archives are untrusted. Before anything is unpacked, the size that each member claims is
//! compared with its own header and with what deflate can do at most; and no two members may share
//! bytes.

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;
use std::sync::Arc;

use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::mapped::Mapped;
use ddp_kernels::npy::{Described, describe};
use zip::result::ZipError;
use zip::{CompressionMethod, ZipArchive};

use crate::error::{Result, bail, ensure};
use crate::files::array::{Array, ArrayPlace, NumberType};
use crate::files::cache;
use crate::files::format::{Contents, DataFile, Format, Holds, PLAIN};
use crate::files::io::{MappedReader, RATIO_MAX, append, map, reading, writing};

pub(super) static NPY: Format = Format {
    name: "an .npy file",
    endings: &[".npy"],
    begins: |file| file.start.starts_with(b"\x93NUMPY"),
    holds: Holds::Arrays(open_npy),
    ..PLAIN
};

/// What a header says.
type NumpyHeader = Described<NumpyType>;

/// The elements of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NumpyType {
    element: NumberType,
    big_endian: bool,
}

/// The header at the beginning of a stream, or what is wrong with it.
fn header(reader: impl Read) -> Result<NumpyHeader, String> {
    describe(reader, Path::new(""), stored_as).map_err(|error| match error {
        ddp_kernels::Error::BadFile { problem, .. } => problem,
        ddp_kernels::Error::Io { source, .. } => source.to_string(),
        other => other.to_string(),
    })
}

/// An error if a file with this header does not have `actual` bytes.
fn check_bytes(header: &NumpyHeader, actual: u64) -> Result<(), String> {
    let (element, shape) = (header.stored.element, header.shape);
    // A shape's elements fit the address space at eight bytes each.
    let claimed = header.data_start + shape.count() as u64 * element.bytes() as u64;
    ensure!(
        claimed == actual,
        "its header claims {element}{shape} = {claimed} bytes with the header, but it has {actual}"
    );
    Ok(())
}

/// Adds the array `key` with this header, which begins at byte `start` of a mapped file.
fn add(
    contents: &mut Contents,
    file: &DataFile<'_>,
    (mapped, start): (&Arc<Mapped>, u64),
    header: &NumpyHeader,
    key: &str,
) -> Result<()> {
    let (offset, element) = (start + header.data_start, header.stored.element);
    let mut place = ArrayPlace::new(key, offset, element, header.shape.dims());
    place.big_endian = header.stored.big_endian;
    let long_dims = place.shape.iter().filter(|&&dim| dim > 1).count();
    let is_scattered = header.fortran_order && long_dims > 1;
    if !is_scattered || Array::new(mapped, file.name, &place).is_err() {
        contents.add(mapped, file.name, &place);
        return Ok(());
    }
    let made = cache::converted(file.path, file.cache_dir, &format!("C order {key}"), |to| {
        write_in_c_order(mapped, &place, to)
    })?;
    place.offset = 0;
    contents.add(&map(&made)?, file.name, &place);
    Ok(())
}

/// Writes the rows of an array in Fortran order, where the first index varies fastest, in C order.
fn write_in_c_order(mapped: &Mapped, place: &ArrayPlace<'_>, to: &Path) -> Result<()> {
    let (size, rows, row_shape) = (place.element.bytes(), place.shape[0], &place.shape[1..]);
    let width: usize = row_shape.iter().product();
    // The index of a row's number in Fortran order, from that in C order.
    let index = |index: usize| {
        let next = |(rest, step, at), dim: &usize| {
            (rest / dim, step / dim, at + rest % dim * (step / dim))
        };
        row_shape.iter().rev().fold((index, width, 0), next).2
    };
    let columns: Vec<usize> = (0..width).map(index).collect();
    let mut out = BufWriter::new(File::create_new(to).map_err(writing(to))?);
    for row in 0..rows {
        heartbeat::beat(Work::ConvertsData);
        for column in &columns {
            let mut number = [0; 8];
            let start = place.offset + ((column * rows + row) * size) as u64;
            let read = mapped.read(start, &mut number[..size]);
            read.map_err(reading(mapped.path()))?;
            out.write_all(&number[..size]).map_err(writing(to))?;
        }
    }
    let flushed = out.flush().and_then(|()| out.get_ref().sync_all());
    flushed.map_err(writing(to))
}

fn open_npy(file: &DataFile<'_>) -> Result<Contents> {
    let mapped = file.map()?;
    let bad = |why| file.bad(why);
    let header = header(MappedReader::new(&mapped, 0..mapped.len())).map_err(bad)?;
    check_bytes(&header, mapped.len()).map_err(bad)?;
    let mut contents = Contents::default();
    add(&mut contents, file, (&mapped, 0), &header, "")?;
    contents.checked(Path::new(file.name))
}

/// The elements that a dtype means.
fn stored_as(descr: &[u8]) -> Result<NumpyType, String> {
    let (order, kind) = match descr {
        [order @ (b'<' | b'>' | b'=' | b'|'), kind @ ..] => (*order, kind),
        kind => (b'=', kind),
    };
    let element = match kind {
        b"b1" | b"?" => NumberType::Bool,
        [
            letter @ (b'u' | b'i' | b'f'),
            size @ (b'1' | b'2' | b'4' | b'8'),
        ] => {
            let name = format!("{}{}", char::from(*letter), 8 * (size - b'0'));
            name.parse()
                .map_err(|_| unsupported(descr, Some(*letter)))?
        }
        _ => return Err(unsupported(descr, kind.first().copied())),
    };
    let big_endian = match order {
        b'<' => false,
        b'>' => true,
        b'=' => cfg!(target_endian = "big"),
        _ if element.bytes() == 1 => false,
        _ => bail!(
            "the byte order of its dtype '{}': expected < or >, got |",
            descr.escape_ascii()
        ),
    };
    Ok(NumpyType {
        element,
        big_endian,
    })
}

fn unsupported(descr: &[u8], kind: Option<u8>) -> String {
    let shown = descr[..descr.len().min(40)].escape_ascii();
    let (what, help) = match kind {
        Some(b'O') => (
            ", Python objects: a pickle, which can run programs when it is read",
            "np.save(path, np.array(a.tolist(), dtype='float32'))",
        ),
        Some(b'U' | b'S' | b'a') => (
            ", texts",
            "save classes as numbers: np.unique(a, return_inverse=True)[1]",
        ),
        _ => (
            "",
            "np.save(path, a.astype('float32')), with both parts of complex numbers, and bfloat16 and times as numbers",
        ),
    };
    format!(
        "expected bool, integers of 1 to 8 bytes or floats of 2 to 8 bytes, got dtype '{shown}'{what}; help: {help}"
    )
}

pub(super) static NPZ: Format = Format {
    name: "a zip archive, as .npz and .xlsx are",
    endings: &[".npz"],
    begins: |file| matches!(file.start, [b'P', b'K', 3, 4, ..] | [b'P', b'K', 5, 6, ..]),
    holds: Holds::Arrays(open_npz),
    ..PLAIN
};

/// The refusal of pickles, also for what `torch.save` writes.
pub(super) const PICKLE: &str = "it is a pickle (as torch.save writes), which can run programs when it is read; \
     help: save its arrays with numpy.savez(path, x=x.numpy(), y=y.numpy())";
pub(super) const WORKBOOK: &str = "Excel workbooks are not read; help: save the sheet as .csv";

/// No archive of arrays has more members.
const MEMBERS_MAX: usize = 100_000;

type Archive<'a> = ZipArchive<MappedReader<'a>>;

/// One array of an archive, as its directory describes it.
struct ArchiveMember {
    /// Its place in the directory.
    index: usize,
    /// Its name without `.npy`.
    key: String,
    /// Where its bytes begin in the file.
    start: u64,
    packed_bytes: u64,
    unpacked_bytes: u64,
    is_stored: bool,
}

fn open_npz(file: &DataFile<'_>) -> Result<Contents> {
    let mapped = file.map()?;
    let bad = |why| file.bad(why);
    let archive = ZipArchive::new(MappedReader::new(&mapped, 0..mapped.len()));
    let mut archive = archive.map_err(|error| bad(broken(error)))?;
    check(&mut archive).map_err(bad)?;
    check_stored(file, &mut archive)?;
    let (mut contents, mut members) = (Contents::default(), Vec::new());
    for index in 0..archive.len() {
        match member(&mut archive, index, mapped.len()).map_err(bad)? {
            Err(other) => contents.others.push(other),
            Ok(member) => match header_of(&mut archive, &mapped, &member) {
                Ok(header) => members.push((member, header)),
                Err(why) => contents.others.push((member.key, why)),
            },
        }
    }
    let packed = members.iter().map(|(member, _)| member);
    let packed: Vec<&ArchiveMember> = packed.filter(|member| !member.is_stored).collect();
    let unpacked = if packed.is_empty() {
        mapped.clone()
    } else {
        unpacked(file, &mut archive, &packed)?
    };
    let mut end = 0;
    for (member, header) in &members {
        let place = if member.is_stored {
            (&mapped, member.start)
        } else {
            (&unpacked, end)
        };
        add(&mut contents, file, place, header, &member.key)?;
        end += u64::from(!member.is_stored) * member.unpacked_bytes;
    }
    contents.checked(file.path)
}

/// The `.npy` files that these compressed members are, one after another in a file of the cache.
fn unpacked(
    file: &DataFile<'_>,
    archive: &mut Archive<'_>,
    members: &[&ArchiveMember],
) -> Result<Arc<Mapped>> {
    let made = cache::converted(file.path, file.cache_dir, "npz 2, unpacked", |to| {
        let mut out = File::create_new(to).map_err(writing(to))?;
        for member in members {
            let (key, expected) = (&member.key, member.unpacked_bytes);
            let bad = |error: io::Error| file.bad(format!("{key}: {error}"));
            let packed = archive.by_index(member.index);
            let packed = packed.map_err(|error| file.bad(broken(error)))?;
            // At its end the reader compares the checksum.
            let got = append((to, &mut out), packed.take(expected + 1), bad)?;
            if got != expected {
                return Err(file.bad(format!(
                    "{key}: it claims to unpack to {expected} bytes, and has {got} or more"
                )));
            }
        }
        out.sync_all().map_err(writing(to))
    })?;
    map(&made)
}

/// Checks the archive as a whole.
fn check(archive: &mut Archive<'_>) -> Result<(), String> {
    let members = archive.len();
    ensure!(
        members <= MEMBERS_MAX,
        "expected at most {MEMBERS_MAX} members, got {members}"
    );
    ensure!(
        !archive.has_duplicate_names(),
        "two of its members have the same name: it is damaged"
    );
    for name in archive.file_names_raw() {
        ensure!(!name.starts_with(b"xl/"), "{WORKBOOK}");
        // As torch.save writes it.
        ensure!(!name.ends_with(b"/data.pkl"), "{PICKLE}");
    }
    let overlaps = archive.has_overlapping_entries().map_err(broken)?;
    ensure!(
        !overlaps,
        "its members share bytes: it is damaged or a zip bomb"
    );
    Ok(())
}

/// Compares members that are read in place with their CRC-32.
fn check_stored(file: &DataFile<'_>, archive: &mut Archive<'_>) -> Result<()> {
    cache::checked(file.path, file.cache_dir, || {
        for index in 0..archive.len() {
            // What cannot be opened is reported later.
            let Ok(mut member) = archive.by_index(index) else {
                continue;
            };
            if member.compression() == CompressionMethod::Stored {
                let name = String::from_utf8_lossy(member.name_raw()).into_owned();
                io::copy(&mut member, &mut io::sink()).map_err(|error| {
                    file.bad(format!(
                        "{name}: its CRC-32 is wrong ({error}); help: it is damaged: write or download it again"
                    ))
                })?;
            }
        }
        Ok(())
    })
}

/// A member of the directory, or the name of one that is not an array and why. The outer error
/// concerns the whole archive.
fn member(
    archive: &mut Archive<'_>,
    index: usize,
    file_bytes: u64,
) -> Result<Result<ArchiveMember, (String, String)>, String> {
    let entry = archive.by_index_raw(index).map_err(broken)?;
    let name = String::from_utf8_lossy(entry.name_raw()).into_owned();
    let (unpacked_bytes, packed_bytes) = (entry.size(), entry.compressed_size());
    let Some(start) = entry.data_start() else {
        bail!("{name}: the archive does not say where it is");
    };
    let Some(key) = name.strip_suffix(".npy").map(String::from) else {
        return Ok(Err((name, "it is not an .npy file".into())));
    };
    ensure!(
        start.saturating_add(packed_bytes) <= file_bytes,
        "{name} claims {packed_bytes} bytes from byte {start} on, but the file has {file_bytes}: it is cut short"
    );
    let is_stored = match entry.compression() {
        _ if entry.encrypted() => return Ok(Err((key, "it is encrypted".into()))),
        CompressionMethod::Stored => true,
        CompressionMethod::Deflated => false,
        other => {
            let why =
                format!("expected a stored or deflated member, as numpy writes it, got {other}");
            return Ok(Err((key, why)));
        }
    };
    ensure!(
        !is_stored || unpacked_bytes == packed_bytes,
        "{name} is stored, but claims {unpacked_bytes} bytes and takes {packed_bytes}: it is damaged"
    );
    ensure!(
        unpacked_bytes / RATIO_MAX <= packed_bytes,
        "{name} claims to unpack from {packed_bytes} bytes to {unpacked_bytes}, more than deflate can: it is damaged or a \
         zip bomb"
    );
    Ok(Ok(ArchiveMember {
        index,
        key,
        start,
        packed_bytes,
        unpacked_bytes,
        is_stored,
    }))
}

/// The header of a member, if it claims exactly the member's bytes.
fn header_of(
    archive: &mut Archive<'_>,
    mapped: &Mapped,
    member: &ArchiveMember,
) -> Result<NumpyHeader, String> {
    let header = if member.is_stored {
        let part = member.start..member.start + member.packed_bytes;
        header(MappedReader::new(mapped, part))?
    } else {
        let member = archive.by_index(member.index);
        header(member.map_err(broken)?)?
    };
    check_bytes(&header, member.unpacked_bytes)?;
    Ok(header)
}

fn broken(error: ZipError) -> String {
    format!("it is not a whole zip archive ({error}): it is cut short or damaged")
}

#[cfg(test)]
mod tests;
