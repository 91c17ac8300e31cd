//! Opening a checkpoint on all ranks. Rank 0 finds it and reads all bytes; the other ranks check
//! that they see the same.
//!
//! Hosts may share the folder or have copies. So on several hosts the ranks of each host divide its
//! files among them and read those. All ranks compare the manifest, which has the checksums.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use ddp_comm::{Field, World};

use super::find::{LISTED_MAX, is_gone};
use super::manifest::{Opened, open_reading};
use crate::error::{Error, Result};

/// The help if hosts have different folders.
const SHARED: &str = "the folder must be shared by all hosts, or copied to every host";

/// The checkpoint that `find` finds on rank 0, on all ranks. If a running job removes it before all
/// ranks have opened it, `find` is called again.
pub fn open_together(
    world: &World,
    mut find: impl FnMut() -> Result<Option<Opened>>,
) -> Result<Option<Opened>> {
    if world.size() == 1 {
        return find();
    }
    for listed in 1.. {
        let found = if world.rank() == 0 { find()? } else { None };
        world.barrier()?;
        let mut folder = found.as_ref().map_or(Vec::new(), |opened| {
            opened.folder.as_os_str().as_bytes().to_vec()
        });
        world.broadcast_bytes(&mut folder, 0)?;
        if folder.is_empty() {
            return Ok(None);
        }
        let folder = PathBuf::from(OsString::from_vec(folder));
        let opened = found.map_or_else(|| open_here(world, &folder), Ok);
        world.barrier()?;
        if listed < LISTED_MAX && is_removed(world, &folder, opened.is_err())? {
            continue;
        }
        let opened = opened?;
        let manifest = &opened.manifest_blake3;
        let name = format!("the manifest of {}", folder.display());
        world.handshake(&[Field::must_match(name, manifest, SHARED)])?;
        return Ok(Some(opened));
    }
    unreachable!("the last attempt returns")
}

/// Whether a rank could not open the folder because it was removed, which rank 0 sees too.
fn is_removed(world: &World, folder: &Path, has_failed: bool) -> Result<bool> {
    let all = world.all_gather_bytes(&[u8::from(has_failed), u8::from(is_gone(folder))])?;
    Ok(all[0] == [0, 1] && all.iter().any(|rank| *rank == [1, 1]))
}

/// Opens it on a rank other than 0.
fn open_here(world: &World, folder: &Path) -> Result<Opened> {
    let (hosts, rank, ranks) = (world.hosts(), world.local_rank(), world.local_size());
    open_reading(folder, |place| hosts > 1 && place % ranks == rank).map_err(|error| match error {
        Error::Io {
            action,
            path,
            source,
            ..
        } if hosts > 1 => {
            let help = format!("rank 0 has read it on its host; {SHARED}");
            Error::Io {
                action,
                path,
                source,
                help,
            }
        }
        Error::Data(why) if hosts > 1 => Error::Data(format!("{why}; {SHARED}")),
        other => other,
    })
}
