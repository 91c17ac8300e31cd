//! `manifest.json` of a checkpoint, written last: size and BLAKE3 of each file.
//!
//! A checkpoint is opened whole or not at all: every file must match its checksum, the manifest
//! must have exactly the form in which we write it, and no file may be missing or extra. All files
//! are opened before any is read, and the model's stays open, since a running job may remove the
//! folder.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::files::{
    ReadFrom, damaged, of_other_version, open_file, other_format, read_small, unreadable,
};
use super::folders::{MANIFEST_FILE, MODEL_FILE, STATE_FILE, optimizer_file};
use super::state::State;
use crate::error::{Error, Result};
use ddp_data::text::{CHAT_FILES, TOKENIZER_FILE, Vocabulary};
use ddp_kernels::files::{FileDigest, open_ordinary};

/// The version that is written.
const FORMAT: u32 = 1;
/// Longer ones are refused unread: an entry takes less than 200 bytes, and there is one a rank.
const BYTES_MAX: u64 = 16 << 20;
/// Files that are opened before any is read. ZeRO-1 has one for each rank, and a process may open a
/// limited number.
const OPEN_MAX: usize = 256;

/// The files of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    format: u32,
    /// The program that wrote it, with its version; before 0.8 only `state.json` had that.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    program: String,
    pub(super) step: u64,
    files: Vec<FileEntry>,
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its name in the checkpoint's folder.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// The BLAKE3 of its contents: 64 lower-case hexadecimal digits.
    pub blake3: String,
}

/// A checkpoint whose bytes have all been checked.
#[derive(Clone, Debug)]
pub struct Opened {
    /// Its folder.
    pub folder: PathBuf,
    /// The state of the run when it was saved.
    pub state: State,
    /// Its files, without the manifest.
    pub files: Vec<FileEntry>,
    /// The BLAKE3 of its manifest: folders with the same one hold the same bytes.
    pub manifest_blake3: String,
    /// The file that was checked. It stays open even if the folder is removed. None if the folder
    /// is of another program.
    pub(super) model: Option<Arc<File>>,
    /// The folder with its tokenizer, if it has one.
    pub tokenizer_in: Option<PathBuf>,
}

impl Opened {
    /// A folder of another program, in this state.
    pub(crate) fn foreign(folder: &Path, state: State, tokenizer_in: Option<PathBuf>) -> Opened {
        Opened {
            folder: folder.to_path_buf(),
            state,
            files: Vec::new(),
            manifest_blake3: String::new(),
            model: None,
            tokenizer_in,
        }
    }

    /// Whether it is a folder of another program.
    pub fn is_foreign(&self) -> bool {
        self.model.is_none()
    }

    /// The file with the model.
    pub fn model_file(&self) -> PathBuf {
        self.folder.join(MODEL_FILE)
    }

    /// The tokenizer of the model's tokens, if the checkpoint has it.
    pub fn tokenizer(&self) -> Result<Option<Vocabulary>> {
        let folder = self.tokenizer_in.as_ref();
        let read = |folder: &PathBuf| Vocabulary::read(&folder.join(TOKENIZER_FILE));
        Ok(folder.map(read).transpose()?)
    }

    /// The files with the optimizer's moments, in the order of their parts.
    pub(super) fn optimizer_files(&self) -> Vec<PathBuf> {
        let parts = self.state.world.optimizer_parts;
        (0..parts)
            .map(|part| self.folder.join(optimizer_file(part, parts)))
            .collect()
    }
}

impl FileEntry {
    pub(super) fn new(name: &str, contents: FileDigest) -> FileEntry {
        FileEntry {
            name: name.into(),
            bytes: contents.bytes,
            blake3: contents.blake3,
        }
    }

    /// How `file`, which has this name in `folder`, differs from what was written: in length, or
    /// with `is_read` in its bytes.
    fn difference(&self, folder: &Path, file: &File, is_read: bool) -> Result<Option<String>> {
        let (name, bytes) = (&self.name, self.bytes);
        let path = folder.join(name);
        let length = file.metadata().map_err(unreadable(&path))?.len();
        if length != bytes {
            return Ok(Some(format!(
                "{name} has {length} bytes, but {bytes} were written"
            )));
        }
        if !is_read {
            return Ok(None);
        }
        let mut hash = blake3::Hasher::new();
        hash.update_reader(ReadFrom::place(file, 0))
            .map_err(unreadable(&path))?;
        let differs = hash.finalize().to_hex().as_str() != self.blake3;
        Ok(differs.then(|| {
            format!("{name} was changed or damaged: its checksum (BLAKE3) does not match")
        }))
    }
}

impl Manifest {
    /// The manifest of a checkpoint of step `step` with these files, which `program` writes.
    pub(crate) fn new(program: &str, step: u64, files: Vec<FileEntry>) -> Manifest {
        Manifest {
            format: FORMAT,
            program: program.into(),
            step,
            files,
        }
    }

    /// Whether a checkpoint with the files `others` has the same model and moments.
    pub(super) fn has_tensors_of(&self, others: &[FileEntry]) -> bool {
        let of = |files: &[FileEntry]| -> BTreeSet<(String, String)> {
            let tensors = files.iter().filter(|entry| entry.name != STATE_FILE);
            tensors
                .map(|entry| (entry.name.clone(), entry.blake3.clone()))
                .collect()
        };
        of(&self.files) == of(others)
    }

    /// The bytes of the file. There is only one way to write it.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self).expect("it holds only names and numbers");
        bytes.push(b'\n');
        bytes
    }

    /// Reads the file's bytes. An error says what is wrong with them.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Manifest, String> {
        let manifest: Manifest =
            serde_json::from_slice(bytes).map_err(|error| format!("cannot be read: {error}"))?;
        if manifest.format != FORMAT {
            return Err(other_format(manifest.format, FORMAT));
        }
        if manifest.to_bytes() != bytes {
            return Err("is not as it was written".into());
        }
        Ok(manifest)
    }
}

/// The checkpoint in `folder`, every byte of it checked.
pub fn open(folder: &Path) -> Result<Opened> {
    open_reading(folder, |_| true)
}

/// The BLAKE3 of the manifest of the checkpoint in `folder`, if it can be read.
pub(crate) fn manifest_blake3(folder: &Path) -> Option<String> {
    let bytes = read_small(folder, MANIFEST_FILE, BYTES_MAX).ok()?;
    Some(blake3::hash(&bytes).to_hex().to_string())
}

/// As `open`, but reads only the files whose place in the manifest `is_read` accepts; other ranks
/// read the rest. Names and lengths of all are compared.
pub(super) fn open_reading(folder: &Path, is_read: impl Fn(usize) -> bool) -> Result<Opened> {
    let bytes = read_small(folder, MANIFEST_FILE, BYTES_MAX)?;
    let manifest = Manifest::parse(&bytes).map_err(|why| {
        let value: Option<Value> = serde_json::from_slice(&bytes).ok();
        let format = value.and_then(|value| value.get("format")?.as_u64());
        if format > Some(u64::from(FORMAT)) {
            return of_other_version(folder, MANIFEST_FILE, &why, &bytes);
        }
        damaged(folder, format!("{MANIFEST_FILE} {why}"))
    })?;
    check_names(folder, &manifest)?;
    let mut files = open_first(folder, &manifest)?;
    for (place, entry) in manifest.files.iter().enumerate() {
        let file = match files.get(&*entry.name) {
            Some(file) => file,
            None => &open_file(folder, &entry.name)?,
        };
        let difference = entry.difference(folder, file, is_read(place))?;
        difference.map_or(Ok(()), |why| Err(damaged(folder, why)))?;
    }
    let state = State::of_file(folder, &files[STATE_FILE])?;
    let parts = state.world.optimizer_parts;
    let expected = (0..parts).map(|part| optimizer_file(part, parts));
    let expected: BTreeSet<String> = expected
        .chain([MODEL_FILE.to_string(), STATE_FILE.to_string()])
        .collect();
    let mut found = names(&manifest);
    found.retain(|name| name != TOKENIZER_FILE && !CHAT_FILES.contains(&&**name));
    let is_of_it = [&*state.program, ""].contains(&&*manifest.program);
    if state.step != manifest.step || found != expected || !is_of_it {
        return Err(damaged(
            folder,
            format!("{MANIFEST_FILE} and {STATE_FILE} are of different checkpoints"),
        ));
    }
    let model = Arc::new(files.remove(MODEL_FILE).expect("it is one of the first"));
    let manifest_blake3 = blake3::hash(&bytes).to_hex().to_string();
    let has_tokenizer = manifest.files.iter().any(|it| it.name == TOKENIZER_FILE);
    Ok(Opened {
        tokenizer_in: has_tokenizer.then(|| folder.to_path_buf()),
        folder: folder.to_path_buf(),
        state,
        files: manifest.files,
        manifest_blake3,
        model: Some(model),
    })
}

/// Opens model and state, and as many of the other files as may be open.
fn open_first<'a>(folder: &Path, manifest: &'a Manifest) -> Result<BTreeMap<&'a str, File>> {
    let first = [MODEL_FILE, STATE_FILE];
    let names = manifest.files.iter().map(|entry| &*entry.name);
    let others = names.filter(|name| !first.contains(name));
    let names = first.into_iter().chain(others).take(OPEN_MAX);
    names
        .map(|name| Ok((name, open_file(folder, name)?)))
        .collect()
}

/// Opens the model file at `path`. In the folder of a checkpoint it must match the manifest.
pub(super) fn open_model(path: &Path) -> Result<File> {
    // A link to a file of a checkpoint counts as that file.
    let real = path.canonicalize().map_err(unreadable(path))?;
    let has = |folder: &Path, name| folder.join(name).exists();
    let is_checkpoint = |folder: &Path| has(folder, MANIFEST_FILE) || has(folder, STATE_FILE);
    let parent = real.parent().filter(|folder| is_checkpoint(folder));
    let (Some(folder), Some(name)) = (parent, real.file_name()) else {
        return open_ordinary(path).map_err(unreadable(path));
    };
    let name = name.to_string_lossy();
    let refuse = |why: String| {
        Error::Data(format!(
            "cannot load the model from {}: {why}; help: give another, or move it out of the \
             checkpoint's folder if it does not belong there",
            path.display()
        ))
    };
    let why = |error: Error| refuse(format!("it is in the folder of a checkpoint: {error}"));
    let bytes = read_small(folder, MANIFEST_FILE, BYTES_MAX).map_err(why)?;
    let manifest = Manifest::parse(&bytes)
        .map_err(|why| refuse(format!("{MANIFEST_FILE} next to it {why}")))?;
    let entry = manifest.files.iter().find(|entry| entry.name == name);
    let entry =
        entry.ok_or_else(|| refuse(format!("{MANIFEST_FILE} next to it does not list {name}")))?;
    let file = open_file(folder, &name)?;
    entry
        .difference(folder, &file, true)?
        .map_or(Ok(file), |why| Err(refuse(why)))
}

fn names(manifest: &Manifest) -> BTreeSet<String> {
    let files = manifest.files.iter();
    files.map(|entry| entry.name.clone()).collect()
}

/// Refuses a folder whose files are not those of the manifest.
fn check_names(folder: &Path, manifest: &Manifest) -> Result<()> {
    let listed = names(manifest);
    if listed.len() != manifest.files.len() {
        return Err(damaged(
            folder,
            format!("{MANIFEST_FILE} lists a file twice"),
        ));
    }
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(folder).map_err(unreadable(folder))? {
        let name = entry.map_err(unreadable(folder))?.file_name();
        let name = name.to_string_lossy();
        // File managers leave hidden files.
        if !name.starts_with('.') {
            found.insert(name.into_owned());
        }
    }
    found.remove(MANIFEST_FILE);
    if let Some(name) = listed.difference(&found).next() {
        return Err(damaged(folder, format!("it lacks {name}")));
    }
    if let Some(name) = found.difference(&listed).next() {
        return Err(damaged(
            folder,
            format!("it has {name}, which {MANIFEST_FILE} does not list"),
        ));
    }
    Ok(())
}
