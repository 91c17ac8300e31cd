//! What to do with a model that is not read: one that is still on the hub, or GGUF.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// The help for such a path; None if it is something else.
pub fn help_for_unread(path: &Path) -> Option<String> {
    if let Some(file) = gguf(path) {
        let parts = (file.parent(), file.file_name());
        let (folder, name) = (parts.0?.display(), parts.1?.to_string_lossy());
        return Some(format!(
            "GGUF is not read: download the model's .safetensors, or convert it in Python, with import transformers: for kind \
             in transformers.AutoModelForCausalLM, transformers.AutoTokenizer: \
             kind.from_pretrained({:?}, gguf_file={name:?}).save_pretrained(\"converted\")",
            if file.parent()? == Path::new("") {
                ".".into()
            } else {
                folder.to_string()
            }
        ));
    }
    let name = path.to_str()?;
    let (owner, model) = name
        .rsplit_once("://")
        .map_or(name, |(_, rest)| rest)
        .split_once('/')?;
    let is_name = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.contains('/');
    let is_file = path
        .extension()
        .is_some_and(|ending| ending == "safetensors");
    (!path.exists() && is_name(owner) && is_name(model) && !is_file).then(|| {
        format!(
            "there is no such folder; a model of the hub is downloaded with hf download \
             {owner}/{model} --local-dir FOLDER"
        )
    })
}

/// A GGUF file at `path`, or in a folder that has no other model.
fn gguf(path: &Path) -> Option<PathBuf> {
    if !path.is_dir() {
        let mut magic = [0; 4];
        let is_it = path.is_file() && File::open(path).ok()?.read_exact(&mut magic).is_ok();
        return (is_it && &magic == b"GGUF").then(|| path.to_path_buf());
    }
    let files = fs::read_dir(path).ok()?.flatten().map(|entry| entry.path());
    let ends = |file: &PathBuf, ending: &str| file.extension().is_some_and(|it| it == ending);
    let files: Vec<PathBuf> = files.collect();
    let is_other = files.iter().any(|file| ends(file, "safetensors"));
    let all = files.into_iter().filter(|file| ends(file, "gguf"));
    all.min().filter(|_| !is_other)
}
