//! `.npz`, as `numpy.savez` writes it: a zip archive of `.npy` files. Members that are stored (the
//! usual case) are read in place; compressed ones (`savez_compressed`) and those in Fortran order
//! are converted once, together.
//!
//! Archives are untrusted. Before anything is unpacked, the size that each member claims is
//! compared with its own header, with what deflate can do at most and with the free space; and no
//! two members may share bytes.

use std::fs;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use ddp_kernels::mapped::Mapped;
use zip::{CompressionMethod, ZipArchive};

use super::contents::Contents;
use super::gzip::RATIO_MAX;
use super::io::{MappedReader, map, refuse, writing};
use super::{cache, flat, kind, npy};
use crate::error::{Error, Result};

/// Bytes unpacked at a time: a whole number of any element.
const PIECE_BYTES: usize = 1 << 20;
/// No archive of arrays has more members.
const MEMBERS_MAX: usize = 100_000;

type Archive<'a> = ZipArchive<MappedReader<'a>>;

/// One array of an archive, as its directory describes it.
struct Member {
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

pub(super) fn open(path: &Path, cache_dir: Option<&Path>) -> Result<Contents> {
    let mapped = map(path)?;
    let file = path.display().to_string();
    let bad = |why: String| refuse(path, why);
    let archive = ZipArchive::new(MappedReader::new(&mapped));
    let mut archive = archive.map_err(|error| bad(broken(&error)))?;
    check(&mut archive).map_err(bad)?;
    check_stored(path, cache_dir, &mut archive)?;
    let (mut contents, mut converted, mut keys) = (Contents::default(), Vec::new(), Vec::new());
    for index in 0..archive.len() {
        let member = match member(&mut archive, index, mapped.len()).map_err(bad)? {
            Ok(member) => member,
            Err(other) => {
                contents.others.push(other);
                continue;
            }
        };
        keys.push(member.key.clone());
        match header(&mut archive, &mapped, &member) {
            Err(why) => contents.others.push((member.key, why)),
            Ok(header) if member.is_stored && !npy::is_scattered(&header) => {
                let place = npy::place(&header, &member.key, member.start);
                contents.add(&mapped, &file, &place);
            }
            Ok(header) => match npy::check_convertible(&header) {
                Err(why) => contents.others.push((member.key, why)),
                Ok(()) => converted.push((member, header)),
            },
        }
    }
    if !converted.is_empty() {
        let made = cache::converted(path, cache_dir, "npz, unpacked, by rows", |made| {
            convert(path, &mapped, &mut archive, &converted, made)
        })?;
        contents.arrays.extend(flat::open(&made, &file)?.arrays);
        let position = |key: &str| keys.iter().position(|known| known == key);
        contents.arrays.sort_by_key(|array| position(array.key()));
    }
    contents.checked(path)
}

/// Checks the archive as a whole.
fn check(archive: &mut Archive<'_>) -> Result<(), String> {
    if archive.len() > MEMBERS_MAX {
        let members = archive.len();
        return Err(format!(
            "expected at most {MEMBERS_MAX} members, got {members}"
        ));
    }
    if archive.has_duplicate_names() {
        return Err("two of its members have the same name: it is damaged".into());
    }
    if archive
        .file_names_raw()
        .any(|name| name.starts_with(b"xl/"))
    {
        return Err(kind::WORKBOOK.into());
    }
    // As torch.save writes it.
    if archive
        .file_names_raw()
        .any(|name| name.ends_with(b"/data.pkl"))
    {
        return Err(kind::PICKLE.into());
    }
    match archive.has_overlapping_entries() {
        Ok(false) => Ok(()),
        Ok(true) => Err("its members share bytes: it is damaged or a zip bomb".into()),
        Err(error) => Err(broken(&error)),
    }
}

/// Compares members that are read in place with their CRC-32.
fn check_stored(path: &Path, cache_dir: Option<&Path>, archive: &mut Archive<'_>) -> Result<()> {
    cache::checked(path, cache_dir, || {
        for index in 0..archive.len() {
            // What cannot be opened is reported later.
            let Ok(mut member) = archive.by_index(index) else {
                continue;
            };
            if member.compression() == CompressionMethod::Stored {
                let name = String::from_utf8_lossy(member.name_raw()).into_owned();
                io::copy(&mut member, &mut io::sink()).map_err(|error| {
                    let damaged = "it is damaged: write or download it again";
                    refuse(
                        path,
                        format!("{name}: its CRC-32 is wrong ({error}); help: {damaged}"),
                    )
                })?;
            }
        }
        Ok(())
    })
}

/// A member of the directory, or the name of one that is no array and why. The outer error concerns
/// the whole archive.
fn member(
    archive: &mut Archive<'_>,
    index: usize,
    file_bytes: u64,
) -> Result<Result<Member, (String, String)>, String> {
    let entry = archive
        .by_index_raw(index)
        .map_err(|error| broken(&error))?;
    let name = String::from_utf8_lossy(entry.name_raw()).into_owned();
    let (unpacked_bytes, packed_bytes) = (entry.size(), entry.compressed_size());
    let Some(start) = entry.data_start() else {
        return Err(format!("{name}: the archive does not say where it is"));
    };
    let Some(key) = name.strip_suffix(".npy").map(String::from) else {
        return Ok(Err((name, "it is no .npy file".into())));
    };
    if entry.encrypted() {
        return Ok(Err((key, "it is encrypted".into())));
    }
    if start
        .checked_add(packed_bytes)
        .is_none_or(|end| end > file_bytes)
    {
        return Err(format!(
            "{name} claims {packed_bytes} bytes from byte {start} on, but the file has {file_bytes}: it is cut short"
        ));
    }
    let is_stored = match entry.compression() {
        CompressionMethod::Stored => true,
        CompressionMethod::Deflated => false,
        other => {
            let why =
                format!("expected a stored or deflated member, as numpy writes it, got {other}");
            return Ok(Err((key, why)));
        }
    };
    if is_stored && unpacked_bytes != packed_bytes {
        return Err(format!(
            "{name} is stored, but claims {unpacked_bytes} bytes and takes {packed_bytes}: it is damaged"
        ));
    }
    if unpacked_bytes / RATIO_MAX > packed_bytes {
        return Err(format!(
            "{name} claims to unpack from {packed_bytes} bytes to {unpacked_bytes}, \
             more than deflate can: it is damaged or a zip bomb"
        ));
    }
    Ok(Ok(Member {
        index,
        key,
        start,
        packed_bytes,
        unpacked_bytes,
        is_stored,
    }))
}

/// The header of a member, if it claims exactly the member's bytes.
fn header(
    archive: &mut Archive<'_>,
    mapped: &Mapped,
    member: &Member,
) -> Result<npy::Header, String> {
    let header = if member.is_stored {
        let part = member.start..member.start + member.packed_bytes;
        npy::header(MappedReader::part(mapped, part))?
    } else {
        let member = archive.by_index(member.index);
        npy::header(member.map_err(|error| broken(&error))?)?
    };
    npy::check_bytes(&header, member.unpacked_bytes)?;
    Ok(header)
}

/// Writes these members to a flat file.
fn convert(
    path: &Path,
    mapped: &Mapped,
    archive: &mut Archive<'_>,
    members: &[(Member, npy::Header)],
    made: &Path,
) -> Result<()> {
    flat::write(made, |writer| {
        for (member, header) in members {
            if member.is_stored {
                npy::write_by_rows(mapped, member.start, header, &member.key, writer)?;
                continue;
            }
            let packed = archive.by_index(member.index);
            let packed = packed.map_err(|error| refuse(path, broken(&error)))?;
            let bad = |error: io::Error| refuse(path, format!("{}: {error}", member.key));
            if !npy::is_scattered(header) {
                writer.begin(&member.key, header.stored.element, &header.shape[1..])?;
                unpack(packed, header, bad, |piece| writer.write(piece))?;
                continue;
            }
            // First unpack the whole array to a separate file, because each row needs all of it.
            let aside = made.with_extension("unpacked");
            flat::write(&aside, |aside| {
                aside.begin("", header.stored.element, &[])?;
                unpack(packed, header, bad, |piece| aside.write(piece))?;
                Ok(flat::About::default())
            })?;
            let unpacked_header = npy::Header {
                data_start: flat::FIRST_ARRAY,
                stored: npy::Stored {
                    big_endian: false,
                    ..header.stored
                },
                ..*header
            };
            npy::write_by_rows(&*map(&aside)?, 0, &unpacked_header, &member.key, writer)?;
            fs::remove_file(&aside).map_err(writing(&aside))?;
        }
        Ok(flat::About::from_source(&path.display().to_string()))
    })
}

/// Gives the elements of a compressed member to `write`, little-endian, in their order.
fn unpack(
    mut packed: impl Read,
    header: &npy::Header,
    bad: impl Fn(io::Error) -> Error,
    mut write: impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let mut left = npy::bytes(header) - header.data_start;
    let mut skipped = packed.by_ref().take(header.data_start);
    io::copy(&mut skipped, &mut io::sink()).map_err(&bad)?;
    let mut piece = vec![0; PIECE_BYTES];
    while left > 0 {
        let piece = &mut piece[..left.min(PIECE_BYTES as u64) as usize];
        packed.read_exact(piece).map_err(&bad)?;
        if header.stored.big_endian {
            let size = header.stored.element.bytes();
            piece.chunks_exact_mut(size).for_each(<[u8]>::reverse);
        }
        write(piece)?;
        left -= piece.len() as u64;
    }
    // At its end the reader compares the checksum.
    match packed.read(&mut [0]).map_err(&bad)? {
        0 => Ok(()),
        _ => Err(bad(io::Error::new(
            ErrorKind::InvalidData,
            "it has more bytes than it claims",
        ))),
    }
}

fn broken(error: &zip::result::ZipError) -> String {
    format!("it is not a whole zip archive ({error}): it is cut short or damaged")
}

#[cfg(test)]
mod tests;
