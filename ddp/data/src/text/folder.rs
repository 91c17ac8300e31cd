//! The folder of shards while one process fills it: it has another name, and is renamed when it is
//! complete.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, bail};
use crate::files::io::{self, reading};
use crate::setting::OUT;
use ddp_kernels::files as disk;

/// The folder of held-out documents.
const VAL: &str = "val";
/// What a finished folder has.
const CONTENTS_FILE: &str = "shards.json";
/// Longer files are damaged.
const CONTENTS_BYTES_MAX: u64 = 1 << 12;

/// The shards written so far for training documents, or for held-out ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Side {
    /// Documents with text.
    pub documents: u64,
    /// Tokens, with those after documents.
    pub tokens: u64,
    /// Shards.
    pub shards: usize,
}

/// The folder being filled; no other process fills it meanwhile.
pub(super) struct Folder {
    out: PathBuf,
    /// Where it is written until it is complete and becomes `out`.
    work: PathBuf,
    is_whole: bool,
    /// Locked as long as this is open.
    _lock: File,
}

impl Folder {
    pub(super) fn open(out: &Path) -> Result<Folder> {
        let out = std::path::absolute(out).map_err(reading(out))?;
        let Some(name) = out.file_name() else {
            return Err(refuse(&out, "the name of a folder, got none"));
        };
        let name = format!(".{}.unfinished", name.to_string_lossy());
        let is_whole = match fs::metadata(&out) {
            Ok(about) if !about.is_dir() => return Err(refuse(&out, "a folder, got a file")),
            Ok(_) => names(&out)?.next().is_some(),
            Err(_) => false,
        };
        let work = if is_whole {
            out.clone()
        } else {
            out.with_file_name(name)
        };
        let Some(_lock) = disk::lock_folder(&work)? else {
            return Err(refuse(
                &out,
                "a folder that no other process writes, got one",
            ));
        };
        let folder = Folder {
            out,
            work,
            is_whole,
            _lock,
        };
        folder.remove_files(|_, name| name.starts_with(".unfinished-"))?;
        Ok(folder)
    }

    pub(super) fn shard(&self, side: usize, number: usize) -> PathBuf {
        self.side(side).join(shard_name(number))
    }

    pub(super) fn side(&self, side: usize) -> PathBuf {
        match side {
            0 => self.work.clone(),
            _ => self.work.join(VAL),
        }
    }

    /// Refuses to change a complete folder.
    pub(super) fn check_may_change(&self) -> Result<()> {
        let expected = "a new or empty folder, or one with the same tokens, got other files";
        if self.is_whole {
            Err(refuse(&self.out, expected))
        } else {
            Ok(())
        }
    }

    /// Makes the file `name` with these bytes.
    pub(super) fn put(&self, side: usize, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.side(side).join(name);
        if fs::read(&path).is_ok_and(|there| there == bytes) {
            return Ok(());
        }
        self.check_may_change()?;
        Ok(disk::replace_with(&path, bytes)?)
    }

    /// Lists in each side's folder the shards that it has, so that a missing one is noticed.
    pub(super) fn put_contents(&self, sides: &[Side; 2]) -> Result<()> {
        let mut sides = sides.iter().enumerate().filter(|(_, of)| of.shards > 0);
        sides.try_for_each(|(side, of)| {
            // A whole folder of version 0.7 has none.
            if self.is_whole && !self.side(side).join(CONTENTS_FILE).exists() {
                return Ok(());
            }
            let text = serde_json::to_string(of).expect("numbers fit JSON");
            self.put(side, CONTENTS_FILE, format!("{text}\n").as_bytes())
        })
    }

    /// Removes shards that other texts left in an unfinished folder; a whole one must have none.
    pub(super) fn check_shards(&self, counts: [usize; 2]) -> Result<()> {
        let shards: [BTreeSet<String>; 2] =
            counts.map(|count| (0..count).map(shard_name).collect());
        self.remove_files(|side, name| name.starts_with(SHARD) && !shards[side].contains(name))?;
        if counts[1] == 0 && self.side(1).is_dir() {
            Ok(disk::remove_folder(&self.side(1))?)
        } else {
            Ok(())
        }
    }

    /// Removes the files that `is_left` finds by side and name.
    fn remove_files(&self, is_left: impl Fn(usize, &str) -> bool) -> Result<()> {
        for side in 0..2 {
            let folder = self.side(side);
            if !folder.is_dir() {
                continue;
            }
            for name in names(&folder)?.filter(|name| is_left(side, name)) {
                self.check_may_change()?;
                let path = folder.join(name);
                fs::remove_file(&path).map_err(disk::failed("remove", &path))?;
            }
        }
        Ok(())
    }

    /// Gives the folder its name.
    pub(super) fn finish(self) -> Result<()> {
        if self.is_whole {
            Ok(())
        } else {
            Ok(disk::rename(&self.work, &self.out)?)
        }
    }

    /// Removes the unfinished folder if nothing is in it.
    pub(super) fn leave(&self) {
        if !self.is_whole {
            let _ = fs::remove_dir(self.side(1));
            let _ = fs::remove_dir(&self.work);
        }
    }
}

/// An error if `folder`, of files with this many tokens, lacks shards that it says it has.
pub(crate) fn check_whole(folder: &Path, tokens: u64) -> Result<()> {
    let path = folder.join(CONTENTS_FILE);
    if !path.is_file() {
        return Ok(());
    }
    let text = disk::read_up_to(&path, CONTENTS_BYTES_MAX).map_err(reading(&path))?;
    let said: Side = serde_json::from_slice(&text.unwrap_or_default())
        .map_err(|error| io::refuse(&path, format!("{error}; help: {AGAIN}")))?;
    let names = (0..said.shards).map(shard_name);
    let missing = names.into_iter().find(|name| !folder.join(name).is_file());
    let got = match missing {
        Some(name) => format!("no {name}"),
        None if tokens != said.tokens => format!("{tokens} tokens"),
        None => return Ok(()),
    };
    let (folder, Side { shards, tokens, .. }) = (folder.display(), said);
    bail!(
        "{folder}: expected {shards} shards with {tokens} tokens, as {CONTENTS_FILE} says, got {got}; help: {AGAIN}"
    )
}

const AGAIN: &str = "copy the whole folder again, or tokenize the texts again";

/// The beginning of a shard's name.
const SHARD: &str = "tokens-";

fn shard_name(number: usize) -> String {
    format!("{SHARD}{number:06}.bin")
}

fn names(folder: &Path) -> Result<impl Iterator<Item = String>> {
    let entries = fs::read_dir(folder).map_err(reading(folder))?;
    Ok(entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned())))
}

fn refuse(out: &Path, expected_got: &str) -> Error {
    Error::Usage(format!(
        "{OUT} {}: expected {expected_got}; help: give another",
        out.display()
    ))
}
