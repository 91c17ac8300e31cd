//! `.npz`, as `numpy.savez` writes it: a zip archive of `.npy` files. Members that are stored (the
//! usual case) are read in place; compressed ones (`savez_compressed`) are unpacked once.
//!
//! Archives are untrusted. Before anything is unpacked, the size that each member claims is
//! compared with its own header and with what deflate can do at most; and no two members may share
//! bytes.

use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;

use ddp_kernels::mapped::Mapped;
use zip::{CompressionMethod, ZipArchive};

use super::format::{Contents, DataFile, Format, Holds, PLAIN};
use super::gzip::RATIO_MAX;
use super::io::{MappedReader, append, map, writing};
use super::{cache, npy};
use crate::error::{Result, bail, ensure};

pub(super) static NPZ: Format = Format {
    name: "a zip archive, as .npz and .xlsx are",
    endings: &[".npz"],
    begins: |file| matches!(file.start, [b'P', b'K', 3, 4, ..] | [b'P', b'K', 5, 6, ..]),
    holds: Holds::Arrays(open),
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

fn open(file: &DataFile<'_>) -> Result<Contents> {
    let mapped = file.map()?;
    let bad = |why| file.bad(why);
    let archive = ZipArchive::new(MappedReader::new(&mapped));
    let mut archive = archive.map_err(|error| bad(broken(&error)))?;
    check(&mut archive).map_err(bad)?;
    check_stored(file, &mut archive)?;
    let (mut contents, mut members) = (Contents::default(), Vec::new());
    for index in 0..archive.len() {
        match member(&mut archive, index, mapped.len()).map_err(bad)? {
            Err(other) => contents.others.push(other),
            Ok(member) => match header(&mut archive, &mapped, &member) {
                Ok(header) => members.push((member, header)),
                Err(why) => contents.others.push((member.key, why)),
            },
        }
    }
    let packed = members.iter().map(|(member, _)| member);
    let packed: Vec<&Member> = packed.filter(|member| !member.is_stored).collect();
    let unpacked = match packed.is_empty() {
        true => mapped.clone(),
        false => unpacked(file, &mut archive, &packed)?,
    };
    let mut end = 0;
    for (member, header) in &members {
        let place = match member.is_stored {
            true => (&mapped, member.start),
            false => (&unpacked, end),
        };
        npy::add(&mut contents, file.name, place, header, &member.key);
        end += u64::from(!member.is_stored) * member.unpacked_bytes;
    }
    contents.checked(file.path)
}

/// The `.npy` files that these compressed members are, one after another in a file of the cache.
fn unpacked(
    file: &DataFile<'_>,
    archive: &mut Archive<'_>,
    members: &[&Member],
) -> Result<Arc<Mapped>> {
    let made = cache::converted(file.path, file.cache_dir, "npz 2, unpacked", |to| {
        let mut out = File::create_new(to).map_err(writing(to))?;
        for member in members {
            let (key, expected) = (&member.key, member.unpacked_bytes);
            let bad = |error: io::Error| file.bad(format!("{key}: {error}"));
            let packed = archive.by_index(member.index);
            let packed = packed.map_err(|error| file.bad(broken(&error)))?;
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
    let overlaps = archive
        .has_overlapping_entries()
        .map_err(|error| broken(&error))?;
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
) -> Result<Result<Member, (String, String)>, String> {
    let entry = archive
        .by_index_raw(index)
        .map_err(|error| broken(&error))?;
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

fn broken(error: &zip::result::ZipError) -> String {
    format!("it is not a whole zip archive ({error}): it is cut short or damaged")
}

#[cfg(test)]
mod tests;
