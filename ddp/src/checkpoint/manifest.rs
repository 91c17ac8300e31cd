//! `manifest.json` of a checkpoint, which is written last: how long each of its files is, and the BLAKE3 of its bytes.
//!
//! A checkpoint is opened whole or not at all: every byte of every file is compared with what was written, the manifest with the only
//! way in which it is ever written, and there is no file too many or too few.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::model::unreadable;
use super::optimizer;
use super::{MODEL_FILE, STATE_FILE, State};
use crate::error::{Error, Result};
use crate::files::Contents;

/// The file that says what the others are.
pub const MANIFEST_FILE: &str = "manifest.json";

/// The version that is written.
const FORMAT: u32 = 1;
/// Longer ones are refused unread: an entry takes less than 200 bytes, and there is one a rank.
const BYTES_MAX: u64 = 16 << 20;

/// What a checkpoint consists of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    format: u32,
    step: u64,
    files: Vec<FileEntry>,
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its name in the checkpoint's folder.
    pub name: String,
    /// How long it is.
    pub bytes: u64,
    /// The BLAKE3 of its contents: 64 lower-case hexadecimal digits.
    pub blake3: String,
}

/// A checkpoint that is whole, to the byte.
#[derive(Clone, Debug)]
pub struct Opened {
    /// Where it lies.
    pub folder: PathBuf,
    /// What the run was when it was saved.
    pub state: State,
    /// Its files but the manifest.
    pub files: Vec<FileEntry>,
}

impl Opened {
    /// The file with the model.
    pub fn model_file(&self) -> PathBuf {
        self.folder.join(MODEL_FILE)
    }

    /// The files with the optimizer's moments, in the order of their parts.
    pub(super) fn optimizer_files(&self) -> Vec<PathBuf> {
        let parts = self.state.world.optimizer_parts;
        (0..parts).map(|part| self.folder.join(optimizer::file_name(part, parts))).collect()
    }
}

impl FileEntry {
    pub(super) fn new(name: &str, contents: Contents) -> FileEntry {
        FileEntry { name: name.into(), bytes: contents.bytes, blake3: contents.blake3 }
    }
}

impl Manifest {
    /// Of the checkpoint of step `step`, with these files.
    pub(crate) fn new(step: u64, files: Vec<FileEntry>) -> Manifest {
        Manifest { format: FORMAT, step, files }
    }

    pub(super) fn step(&self) -> u64 {
        self.step
    }

    /// Whether a checkpoint of the files `others` has the same model and moments.
    pub(super) fn has_tensors_of(&self, others: &[FileEntry]) -> bool {
        let of = |files: &[FileEntry]| -> BTreeSet<(String, String)> {
            let tensors = files.iter().filter(|entry| entry.name != STATE_FILE);
            tensors.map(|entry| (entry.name.clone(), entry.blake3.clone())).collect()
        };
        of(&self.files) == of(others)
    }

    /// The file, which has one form only.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self).expect("it has names and numbers alone");
        bytes.push(b'\n');
        bytes
    }

    /// From the file's bytes. An error says what is wrong with them.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Manifest, String> {
        let manifest: Manifest = serde_json::from_slice(bytes).map_err(|error| format!("cannot be read: {error}"))?;
        if manifest.format != FORMAT {
            return Err(super::other_format(manifest.format, FORMAT));
        }
        if manifest.to_bytes() != bytes {
            return Err("is not as it was written".into());
        }
        Ok(manifest)
    }
}

/// The checkpoint in `folder`, every byte of it checked.
pub fn open(folder: &Path) -> Result<Opened> {
    let bytes = read_small(folder, MANIFEST_FILE, BYTES_MAX)?;
    let manifest = Manifest::parse(&bytes).map_err(|why| damaged(folder, format!("{MANIFEST_FILE} {why}")))?;
    check_names(folder, &manifest)?;
    manifest.files.iter().try_for_each(|entry| check_file(folder, entry))?;
    let state = State::read(folder)?;
    let parts = state.world.optimizer_parts;
    let expected = (0..parts).map(|part| optimizer::file_name(part, parts));
    let expected: BTreeSet<String> = expected.chain([MODEL_FILE.to_string(), STATE_FILE.to_string()]).collect();
    if state.step != manifest.step || names(&manifest) != expected {
        return Err(damaged(folder, format!("{MANIFEST_FILE} and {STATE_FILE} are of different checkpoints")));
    }
    Ok(Opened { folder: folder.to_path_buf(), state, files: manifest.files })
}

/// Whether what says what the checkpoint is has every byte as it was written, by a program whose files this one does not read.
pub(super) fn is_of_another_version(folder: &Path) -> bool {
    let Ok(bytes) = read_small(folder, MANIFEST_FILE, BYTES_MAX) else { return false };
    let format = serde_json::from_slice::<Value>(&bytes).ok().and_then(|value| value.get("format")?.as_u64());
    if format.is_some_and(|format| format > u64::from(FORMAT)) {
        return true;
    }
    let Ok(manifest) = Manifest::parse(&bytes) else { return false };
    let Some(entry) = manifest.files.iter().find(|entry| entry.name == STATE_FILE) else { return false };
    let Ok(state) = read_small(folder, STATE_FILE, entry.bytes) else { return false };
    blake3::hash(&state).to_hex().as_str() == entry.blake3 && State::parse(&state).is_err()
}

fn names(manifest: &Manifest) -> BTreeSet<String> {
    manifest.files.iter().map(|entry| entry.name.clone()).collect()
}

/// Whether the files are those in the folder.
fn check_names(folder: &Path, manifest: &Manifest) -> Result<()> {
    let told = names(manifest);
    if told.len() != manifest.files.len() {
        return Err(damaged(folder, format!("{MANIFEST_FILE} names a file twice")));
    }
    let mut there = BTreeSet::new();
    for entry in fs::read_dir(folder).map_err(unreadable(folder))? {
        let name = entry.map_err(unreadable(folder))?.file_name().to_string_lossy().into_owned();
        // What file managers and the like leave where people have looked.
        if !name.starts_with('.') {
            there.insert(name);
        }
    }
    there.remove(MANIFEST_FILE);
    if let Some(name) = told.difference(&there).next() {
        return Err(damaged(folder, format!("it lacks {name}")));
    }
    if let Some(name) = there.difference(&told).next() {
        return Err(damaged(folder, format!("it has {name}, which {MANIFEST_FILE} does not name")));
    }
    Ok(())
}

fn check_file(folder: &Path, entry: &FileEntry) -> Result<()> {
    let path = folder.join(&entry.name);
    let mut file = open_file(folder, &entry.name)?;
    let length = file.metadata().map_err(unreadable(&path))?.len();
    if length != entry.bytes {
        return Err(damaged(
            folder,
            format!("{} has {length} bytes, and was written with {}", entry.name, entry.bytes),
        ));
    }
    let mut hash = blake3::Hasher::new();
    hash.update_reader(&mut file).map_err(unreadable(&path))?;
    if hash.finalize().to_hex().as_str() != entry.blake3 {
        return Err(damaged(folder, format!("{} has other bytes than were written (its BLAKE3 differs)", entry.name)));
    }
    Ok(())
}

/// Opens a file of a checkpoint. Anything else under that name (a pipe would keep us waiting) is refused.
fn open_file(folder: &Path, name: &str) -> Result<File> {
    let path = folder.join(name);
    match fs::metadata(&path) {
        Ok(metadata) if metadata.is_file() => File::open(&path).map_err(unreadable(&path)),
        Ok(_) => Err(damaged(folder, format!("{name} is no file"))),
        Err(error) if error.kind() == ErrorKind::NotFound && folder.is_dir() => {
            Err(damaged(folder, format!("it lacks {name}")))
        }
        Err(error) => Err(unreadable(&path)(error)),
    }
}

/// The bytes of a file that is no longer than `bytes_max`.
pub(super) fn read_small(folder: &Path, name: &str, bytes_max: u64) -> Result<Vec<u8>> {
    let path = folder.join(name);
    let file = open_file(folder, name)?;
    let mut bytes = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(unreadable(&path))?;
    if bytes.len() as u64 > bytes_max {
        return Err(damaged(folder, format!("{name} is longer than {bytes_max} bytes")));
    }
    Ok(bytes)
}

/// A checkpoint that cannot be used.
pub(super) fn damaged(folder: &Path, why: impl Into<String>) -> Error {
    let why = why.into();
    Error::Data(format!(
        "cannot use the checkpoint {}: {why}. Use another one of the run (--resume PATH)",
        folder.display()
    ))
}
