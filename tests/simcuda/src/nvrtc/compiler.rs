//! Runs NVIDIA's NVRTC, which SIMCUDA_NVRTC names, and keeps its PTX.
//!
//! It runs in a separate process, with the library path of a machine without simulated GPUs:
//! NVRTC loads parts of itself by name, and here these names are the simulator's. Processes share
//! the cache folder: files are written under a unique name and renamed.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use twox_hash::XxHash3_128;

use super::options::Options;
use super::program::Program;

/// Starts NVRTC, with python3.
const SCRIPT: &str = include_str!("compile.py");

/// What a line begins with that has a lowered name and its expression.
const LOWERED: &str = "//@ ";

/// The result of a compilation.
#[derive(Clone, Debug)]
pub(crate) struct Compiled {
    pub(crate) ptx: String,
    /// Lowered names of name expressions.
    pub(crate) lowered: BTreeMap<String, String>,
}

/// Why there is no PTX.
#[derive(Debug)]
pub(super) enum Failed {
    /// NVRTC refuses the program or an option: its code and its log.
    Program(i32, String),
    /// The machine is at fault.
    Machine(String),
}

fn failed(what: &str, path: &Path, error: &io::Error) -> Failed {
    Failed::Machine(format!(
        "simcuda: nvrtcCompileProgram: cannot {what} {}: {error}; set SIMCUDA_CACHE to a folder that can be written\n",
        path.display()
    ))
}

/// NVIDIA's library.
fn library() -> Result<PathBuf, Failed> {
    let named = std::env::var_os("SIMCUDA_NVRTC").filter(|path| !path.is_empty());
    #[cfg(test)]
    let named = named.or_else(super::tests::installed);
    named.map(PathBuf::from).ok_or_else(|| {
        let help =
            "launch/with-simulated-gpus sets it, to what launch/check-kernels --nvrtc prints";
        Failed::Machine(format!(
            "simcuda: NVRTC: SIMCUDA_NVRTC does not name NVIDIA's libnvrtc; {help}\n"
        ))
    })
}

/// What a library is known by: another file under its name is another one.
fn identity(library: &Path) -> Result<String, Failed> {
    let facts = fs::metadata(library).and_then(|facts| Ok((facts.len(), facts.modified()?)));
    let (bytes, modified) = facts.map_err(|error| {
        let path = library.display();
        Failed::Machine(format!("simcuda: SIMCUDA_NVRTC={path}: {error}\n"))
    })?;
    Ok(format!("{} {bytes} {modified:?}", library.display()))
}

/// Where PTX is kept.
fn cache_folder() -> Result<PathBuf, Failed> {
    let named = std::env::var_os("SIMCUDA_CACHE").filter(|folder| !folder.is_empty());
    let beside = || Some(own_path()?.parent()?.join("simulated-kernels"));
    let cache = named
        .map(PathBuf::from)
        .or_else(beside)
        .unwrap_or_else(|| std::env::temp_dir().join("simulated-kernels"));
    fs::create_dir_all(&cache).map_err(|error| failed("make the folder", &cache, &error))?;
    Ok(cache)
}

/// The file that this code was loaded from.
fn own_path() -> Option<PathBuf> {
    // SAFETY: Dl_info is plain data for which zeros are valid; dladdr fills it, and the name it
    // gives lives as long as the library.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(own_path as *const libc::c_void, &mut info) == 0 || info.dli_fname.is_null()
        {
            return None;
        }
        let name = CStr::from_ptr(info.dli_fname)
            .to_string_lossy()
            .into_owned();
        fs::canonicalize(name).ok()
    }
}

/// Held by who makes a file of the cache, for which others wait. Without it each makes its own.
struct Turn {
    path: PathBuf,
    /// Closing it lets the next go on.
    _locked: File,
}

impl Turn {
    fn take(made: &Path) -> Option<Self> {
        let path = made.with_extension("lock");
        let file = File::create(&path).ok()?;
        file.lock().ok()?;
        Some(Self {
            path,
            _locked: file,
        })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // Who waits has it open.
        let _ = fs::remove_file(&self.path);
    }
}

/// A scratch folder of this compilation, removed when it is done.
struct Scratch(PathBuf);

impl Scratch {
    fn new(cache: &Path) -> Result<Self, Failed> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = cache.join(format!("making-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder).map_err(|error| failed("make the folder", &folder, &error))?;
        Ok(Self(folder))
    }

    fn write(&self, name: &str, text: &str) -> Result<PathBuf, Failed> {
        let path = self.0.join(name);
        fs::write(&path, text).map_err(|error| failed("write", &path, &error))?;
        Ok(path)
    }

    fn read(&self, name: &str) -> Option<String> {
        let bytes = fs::read(self.0.join(name)).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A folder that cannot be removed does no harm.
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn digest(parts: &[&str]) -> String {
    let mut hash = XxHash3_128::new();
    for part in parts {
        // Lengths keep "ab", "c" distinct from "a", "bc".
        hash.write(&part.len().to_le_bytes());
        hash.write(part.as_bytes());
    }
    format!("{:032x}", hash.finish_128())
}

/// Runs the script.
fn python(arguments: impl FnOnce(&mut Command)) -> Result<Output, Failed> {
    let mut command = Command::new("python3");
    // Without its packages Python starts in a fifth of the time.
    command
        .args(["-I", "-S", "-c", SCRIPT])
        .env_remove("LD_LIBRARY_PATH");
    arguments(&mut command);
    let output = command.output().map_err(|error| {
        let what = "simcuda: NVRTC: cannot run python3, which runs NVIDIA's compiler";
        Failed::Machine(format!("{what}: {error}\n"))
    })?;
    if output.status.success() {
        return Ok(output);
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Failed::Machine(format!("simcuda: NVRTC: {said}")))
}

/// NVRTC's version.
pub(super) fn version() -> Result<(i32, i32), Failed> {
    static VERSION: OnceLock<(i32, i32)> = OnceLock::new();
    if let Some(version) = VERSION.get() {
        return Ok(*version);
    }
    let (library, cache) = (library()?, cache_folder()?);
    let path = cache.join(format!("{}.version", digest(&[&identity(&library)?])));
    let known = fs::read_to_string(&path).ok();
    let text = match &known {
        Some(text) => text.clone(),
        None => {
            let output = python(|command| {
                command.arg(&library);
            })?;
            String::from_utf8_lossy(&output.stdout).into_owned()
        }
    };
    let mut numbers = text.split_whitespace().map(|word| word.parse().ok());
    let (Some(Some(major)), Some(Some(minor))) = (numbers.next(), numbers.next()) else {
        return Err(Failed::Machine(format!(
            "simcuda: NVRTC: {} has version {text:?}\n",
            library.display()
        )));
    };
    if known.is_none() {
        let scratch = Scratch::new(&cache)?;
        // A file that cannot be kept is made again.
        let _ = fs::rename(scratch.write("version", &text)?, &path);
    }
    Ok(*VERSION.get_or_init(|| (major, minor)))
}

/// What a program's PTX depends on; None if files of include paths may be a part of it.
fn key(program: &Program, options: &Options, library: &str) -> Option<String> {
    if !options.is_closed() {
        return None;
    }
    let mut parts = vec![SCRIPT, library, &program.name, &program.source];
    let headers = program.headers.iter();
    parts.extend(headers.flat_map(|(name, text)| [name.as_str(), text.as_str()]));
    parts.push("options");
    parts.extend(options.real.iter().map(String::as_str));
    parts.push("expressions");
    parts.extend(program.expressions.iter().map(String::as_str));
    Some(digest(&parts))
}

fn compiled(text: String) -> Compiled {
    let lines = text.lines().map_while(|line| line.strip_prefix(LOWERED));
    let lowered = lines
        .filter_map(|line| line.split_once(' '))
        .map(|(name, expression)| (expression.to_owned(), name.to_owned()))
        .collect();
    Compiled { ptx: text, lowered }
}

/// Makes the PTX of a program, or finds it.
pub(super) fn compile(program: &Program, options: &Options) -> Result<Compiled, Failed> {
    let (library, cache) = (library()?, cache_folder()?);
    let key = key(program, options, &identity(&library)?);
    let path = key.map(|key| cache.join(format!("{key}.ptx")));
    let kept = || fs::read_to_string(path.as_ref()?).ok();
    if let Some(text) = kept() {
        return Ok(compiled(text));
    }
    let _turn = path.as_deref().and_then(Turn::take);
    if let Some(text) = kept() {
        return Ok(compiled(text));
    }
    let scratch = Scratch::new(&cache)?;
    scratch.write("source", &program.source)?;
    scratch.write("expressions", &program.expressions.join("\n"))?;
    for (number, (name, text)) in program.headers.iter().enumerate() {
        scratch.write(&format!("{number}.name"), name)?;
        scratch.write(&format!("{number}.text"), text)?;
    }
    let output = python(|command| {
        command.args([&library, &scratch.0]);
        command.args([&program.name, &program.headers.len().to_string()]);
        command.args(&options.real);
    })?;
    if let Some(text) = scratch.read("made") {
        if let Some(path) = &path {
            // A file that cannot be kept is made again.
            let _ = fs::rename(scratch.0.join("made"), path);
        }
        return Ok(compiled(text));
    }
    let code = scratch.read("code").and_then(|code| code.parse().ok());
    match (code, scratch.read("log")) {
        (Some(code), Some(log)) => Err(Failed::Program(code, log)),
        _ => Err(Failed::Machine(format!(
            "simcuda: NVRTC: no result, and it said: {}\n",
            String::from_utf8_lossy(&output.stdout)
        ))),
    }
}
