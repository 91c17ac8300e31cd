//! `.npz`, what `numpy.savez` writes: a zip archive of `.npy` files. Members that are stored (the usual case) are read where they lie; packed ones
//! (`savez_compressed`), and those in Fortran order, are converted once, together.
//!
//! An archive is untrusted: before anything is unpacked, what each member claims to become is compared with its own header, with what deflate
//! can do at most, and with the space there is; and no two members may share bytes.

use std::fs;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use ddp_kernels::mapped::{Mapped, free_bytes};
use zip::{CompressionMethod, ZipArchive};

use super::array::Array;
use super::{Contents, Reading, cache, flat, kind, map, npy, refuse};
use crate::error::{Error, Result};

/// No deflate stream becomes more than 1032 times as long.
const RATIO_MAX: u64 = 1032;
/// Bytes that are unpacked at a time: whole numbers of any element.
const PIECE_BYTES: usize = 1 << 20;
/// Many programs write nothing else, few archives have so many arrays.
const MEMBERS_MAX: usize = 100_000;

type Archive<'a> = ZipArchive<Reading<'a>>;

/// One array of an archive, as its directory has it.
struct Member {
    /// Its place in the directory.
    index: usize,
    /// Its name without `.npy`.
    key: String,
    /// Where its bytes begin in the file.
    start: u64,
    /// How many there are.
    packed_bytes: u64,
    /// How many it becomes.
    bytes: u64,
    method: CompressionMethod,
}

pub(super) fn open(path: &Path, cache_dir: Option<&Path>) -> Result<Contents> {
    let mapped = map(path)?;
    let file = path.display().to_string();
    let mut archive = ZipArchive::new(Reading::of(&mapped)).map_err(|error| refuse(path, broken(&error)))?;
    check(&mut archive).map_err(|why| refuse(path, why))?;
    let (mut contents, mut converted, mut keys) = (Contents::default(), Vec::new(), Vec::new());
    for index in 0..archive.len() {
        let member = match member(&mut archive, index, mapped.len()).map_err(|why| refuse(path, why))? {
            Ok(member) => member,
            Err(other) => {
                contents.others.push(other);
                continue;
            }
        };
        keys.push(member.key.clone());
        match header(&mut archive, &mapped, &member) {
            Err(why) => contents.others.push((member.key, why)),
            Ok(header) if member.method == CompressionMethod::Stored && !npy::is_scattered(&header) => {
                contents.add(&mapped, &file, &npy::place(&header, &member.key, member.start));
            }
            Ok(header) => match Array::check_shape(header.shape.dims()).and_then(|()| npy::check_width(&header)) {
                Err(why) => contents.others.push((member.key, why)),
                Ok(()) => converted.push((member, header)),
            },
        }
    }
    if !converted.is_empty() {
        let made = cache::converted(path, cache_dir, "npz, unpacked, by rows", |made| {
            convert(path, &mapped, &mut archive, &converted, made)
        })?;
        contents.arrays.extend(flat::open_as(&made, &file)?.arrays);
        contents.arrays.sort_by_key(|array| keys.iter().position(|key| key == array.key()));
    }
    contents.checked(path)
}

/// What can be said of an archive as a whole.
fn check(archive: &mut Archive<'_>) -> Result<(), String> {
    if archive.len() > MEMBERS_MAX {
        return Err(format!("it has {} members: at most {MEMBERS_MAX} are read", archive.len()));
    }
    if archive.has_duplicate_names() {
        return Err("two of its members have the same name: it is damaged".into());
    }
    // The layout of what torch.save writes.
    if archive.file_names_raw().any(|name| name.ends_with(b"/data.pkl")) {
        return Err(kind::PICKLE.into());
    }
    match archive.has_overlapping_entries() {
        Ok(false) => Ok(()),
        Ok(true) => Err("its members share bytes: it is damaged or a zip bomb".into()),
        Err(error) => Err(broken(&error)),
    }
}

/// The member at a place of the directory, or the name of one that is no array and why. The outer error is one of the whole archive.
fn member(archive: &mut Archive<'_>, index: usize, length: u64) -> Result<Result<Member, (String, String)>, String> {
    let entry = archive.by_index_raw(index).map_err(|error| broken(&error))?;
    let name = String::from_utf8_lossy(entry.name_raw()).into_owned();
    let (bytes, packed_bytes, method) = (entry.size(), entry.compressed_size(), entry.compression());
    let Some(start) = entry.data_start() else { return Err(format!("{name} is nowhere in it")) };
    let Some(key) = name.strip_suffix(".npy") else { return Ok(Err((name, "it is no .npy file".into()))) };
    let key = key.to_string();
    if entry.encrypted() {
        return Ok(Err((key, "it is encrypted".into())));
    }
    if start.checked_add(packed_bytes).is_none_or(|end| end > length) {
        return Err(format!(
            "{name} claims {packed_bytes} bytes from byte {start} on, but the file has {length}: it is cut short"
        ));
    }
    match method {
        CompressionMethod::Stored if bytes == packed_bytes => {}
        CompressionMethod::Stored => {
            return Err(format!(
                "{name} claims {bytes} bytes and takes {packed_bytes}, though it is not packed: it is damaged"
            ));
        }
        CompressionMethod::Deflated if bytes / RATIO_MAX <= packed_bytes => {}
        CompressionMethod::Deflated => {
            return Err(format!(
                "{name} claims to unpack from {packed_bytes} bytes to {bytes}, more than can be: it is damaged or a zip bomb"
            ));
        }
        other => {
            let why =
                format!("it is packed by {other}; read are members that are stored or deflated, as numpy writes them");
            return Ok(Err((key, why)));
        }
    }
    Ok(Ok(Member { index, key, start, packed_bytes, bytes, method }))
}

/// The header of a member, if it claims exactly the member's bytes.
fn header(archive: &mut Archive<'_>, mapped: &Mapped, member: &Member) -> Result<npy::Header, String> {
    let header = if member.method == CompressionMethod::Stored {
        npy::header(Reading::part(mapped, member.start..member.start + member.packed_bytes))?
    } else {
        npy::header(archive.by_index(member.index).map_err(|error| broken(&error))?)?
    };
    let claimed = npy::bytes(&header);
    if claimed != member.bytes {
        let (element, shape) = (header.stored.element, header.shape);
        return Err(format!(
            "its header claims {element}{shape} = {claimed} bytes with the header, but it has {}",
            member.bytes
        ));
    }
    Ok(header)
}

/// Writes these members to a flat file.
fn convert(
    path: &Path,
    mapped: &Arc<Mapped>,
    archive: &mut Archive<'_>,
    members: &[(Member, npy::Header)],
    made: &Path,
) -> Result<()> {
    check_space(path, members, made)?;
    flat::write(made, |writer| {
        for (member, header) in members {
            if member.method == CompressionMethod::Stored {
                npy::by_rows(mapped, member.start, header, &member.key, writer)?;
                continue;
            }
            let packed = archive.by_index(member.index).map_err(|error| refuse(path, broken(&error)))?;
            let bad = |error: io::Error| refuse(path, format!("{}: {error}", member.key));
            if !npy::is_scattered(header) {
                writer.begin(&member.key, header.stored.element, &header.shape[1..])?;
                unpack(packed, header, bad, |piece| writer.write(piece))?;
                continue;
            }
            // As it is first: rows can only be put together from all of it.
            let aside = made.with_extension("unpacked");
            flat::write(&aside, |aside| {
                aside.begin("", header.stored.element, &[])?;
                unpack(packed, header, bad, |piece| aside.write(piece))?;
                Ok(flat::About::default())
            })?;
            let unpacked = map(&aside)?;
            let stored = npy::Stored { big_endian: false, ..header.stored };
            let as_written = npy::Header { data_start: flat::FIRST_ARRAY, stored, ..*header };
            npy::by_rows(&unpacked, 0, &as_written, &member.key, writer)?;
            fs::remove_file(&aside).map_err(|source| Error::Io {
                action: "remove",
                path: aside,
                source,
                way_out: "Check the permissions of the cache's folder".into(),
            })?;
        }
        Ok(flat::About { source: Some(path.display().to_string()), ..flat::About::default() })
    })
}

/// Nothing is written where not all of it has room. What others write meanwhile is found out by writing.
fn check_space(path: &Path, members: &[(Member, npy::Header)], made: &Path) -> Result<()> {
    let total = members.iter().fold(0u64, |total, (member, _)| total.saturating_add(member.bytes));
    let aside = members.iter().filter(|(_, header)| npy::is_scattered(header)).map(|(member, _)| member.bytes).max();
    let needed = total.saturating_add(aside.unwrap_or(0));
    let folder = made.parent().unwrap_or(Path::new("."));
    match free_bytes(folder) {
        Ok(free) if free < needed => Err(Error::Io {
            action: "unpack",
            path: path.to_path_buf(),
            source: io::Error::new(
                ErrorKind::StorageFull,
                format!("it takes {needed} bytes, and {} has {free} left", folder.display()),
            ),
            way_out: "Make room, or give another --cache-dir, or save it unpacked with numpy.savez".into(),
        }),
        // Where the system does not say, writing will.
        _ => Ok(()),
    }
}

/// Gives the numbers of a packed member to `write`, little-endian, in the order in which they come.
fn unpack(
    mut packed: impl Read,
    header: &npy::Header,
    bad: impl Fn(io::Error) -> Error,
    mut write: impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let (mut left, size) = (npy::bytes(header) - header.data_start, header.stored.element.bytes());
    io::copy(&mut packed.by_ref().take(header.data_start), &mut io::sink()).map_err(&bad)?;
    let mut piece = vec![0; PIECE_BYTES];
    while left > 0 {
        let piece = &mut piece[..left.min(PIECE_BYTES as u64) as usize];
        packed.read_exact(piece).map_err(&bad)?;
        if header.stored.big_endian {
            piece.chunks_exact_mut(size).for_each(<[u8]>::reverse);
        }
        write(piece)?;
        left -= piece.len() as u64;
    }
    // At its end the reader compares the checksum.
    match packed.read(&mut [0]).map_err(&bad)? {
        0 => Ok(()),
        _ => Err(bad(io::Error::new(ErrorKind::InvalidData, "it goes on after the bytes that it claims"))),
    }
}

fn broken(error: &zip::result::ZipError) -> String {
    format!("it is no whole zip archive ({error}): it is cut short or damaged")
}

impl Seek for Reading<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let (base, by) = match to {
            SeekFrom::Start(position) => (position, 0),
            SeekFrom::End(by) => (self.end, by),
            SeekFrom::Current(by) => (self.position, by),
        };
        let position = base.checked_add_signed(by);
        self.position =
            position.ok_or_else(|| io::Error::new(ErrorKind::InvalidInput, "a place before the beginning"))?;
        Ok(self.position)
    }
}

#[cfg(test)]
mod tests;
