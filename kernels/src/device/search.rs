//! Where CUDA's files are: toolkits, distribution packages, pip wheels, conda.
//!
//! Files are found and never loaded. `libnccl.so.2` and `libnccl.so.2.27.3` are accepted like
//! `libnccl.so`. The first folder wins, unless its file cannot be used here. Within a folder, and
//! among several toolkits or Pythons, the newest version wins, compared as numbers. All inputs are
//! in a [`SearchEnvironment`], so that tests can build machines.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A file that may be the library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The file, or the link to it that programs load.
    pub path: PathBuf,
    /// Its version, as far as file names tell.
    pub version: Option<String>,
    /// Why it is not tried.
    pub skipped: Option<String>,
}

/// The environment variables and the file system's root to search.
pub(super) struct SearchEnvironment {
    /// The folders of `LD_LIBRARY_PATH`.
    library_path: Vec<PathBuf>,
    /// `CUDA_HOME` and `CUDA_PATH`.
    toolkits: Vec<PathBuf>,
    /// Prefixes of Python environments: the one that this program is installed in, `VIRTUAL_ENV`,
    /// `CONDA_PREFIX`, those of each `python3` on `PATH`, `~/.local`.
    python_prefixes: Vec<PathBuf>,
    /// The first `python3` on `PATH`.
    python: Option<PathBuf>,
    /// `CUDA_VISIBLE_DEVICES`, if set.
    pub(super) visible_devices: Option<OsString>,
    /// Replaces `/` in tests.
    pub(super) root: PathBuf,
    /// The names or paths to load the driver by, in order.
    pub(super) driver_names: Vec<OsString>,
}

impl SearchEnvironment {
    /// Reads the variables. Empty ones count as unset; relative folders are below the current one.
    pub(super) fn reading(
        variable: impl Fn(&str) -> Option<OsString>,
        root: &Path,
        driver_names: Vec<OsString>,
    ) -> SearchEnvironment {
        let folders = |name: &str| -> Vec<PathBuf> {
            let value = variable(name).unwrap_or_default();
            // An empty path is an error here, and so left out.
            std::env::split_paths(&value)
                .filter_map(|folder| std::path::absolute(folder).ok())
                .collect()
        };
        let folder = |name: &str| {
            variable(name).and_then(|value| std::path::absolute(PathBuf::from(value)).ok())
        };
        let mut python_prefixes: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"]
            .into_iter()
            .filter_map(folder)
            .collect();
        let mut pythons = Vec::new();
        for bin in folders("PATH") {
            // An image may set nothing but PATH: use the prefix of the link, then that of its
            // target.
            let python = bin.join("python3");
            if let Ok(real) = python.canonicalize() {
                pythons.push(python.clone());
                python_prefixes.extend(
                    [&python, &real]
                        .into_iter()
                        .filter_map(|p| Some(p.parent()?.parent()?.to_owned())),
                );
            }
        }
        python_prefixes.extend(folder("HOME").map(|home| home.join(".local")));
        SearchEnvironment {
            library_path: folders("LD_LIBRARY_PATH"),
            toolkits: ["CUDA_HOME", "CUDA_PATH"]
                .into_iter()
                .filter_map(folder)
                .collect(),
            python_prefixes,
            python: pythons.into_iter().next(),
            visible_devices: variable("CUDA_VISIBLE_DEVICES"),
            root: root.to_owned(),
            driver_names,
        }
    }

    /// Puts the environment that `program` is installed in first: it need not be active.
    pub(super) fn of_program(mut self, program: Option<&Path>) -> SearchEnvironment {
        let bin = program.and_then(Path::parent);
        let bin = bin.filter(|bin| bin.file_name() == Some(OsStr::new("bin")));
        if let Some(prefix) = bin.and_then(Path::parent) {
            self.python_prefixes.insert(0, prefix.to_owned());
        }
        self
    }

    /// Adds the prefix that the first `python3` on `PATH` reports, where it is not known yet:
    /// wrappers and chains of links hide it. Returns whether there is anything new to search.
    pub(super) fn ask_python(&mut self) -> bool {
        let python = self.python.take();
        let prefix = python.and_then(|python| prefix_of(&python, PYTHON_TIME_MAX));
        let new = prefix.filter(|prefix| !self.python_prefixes.contains(prefix));
        self.python_prefixes.extend(new.clone());
        new.is_some()
    }

    /// Every folder that may hold a library, in order of preference.
    pub(super) fn library_folders(&self) -> Vec<PathBuf> {
        let mut folders = self.library_path.clone();
        for toolkit in self.all_toolkits() {
            folders.extend(folders_of_prefix(&toolkit, &["lib64", "lib"], "lib"));
        }
        let system = [
            "lib/x86_64-linux-gnu",
            "lib/aarch64-linux-gnu",
            "lib64",
            "lib",
            "local/lib",
            "local/lib64",
        ];
        folders.extend(system.map(|folder| self.root.join("usr").join(folder)));
        folders.extend(self.python_folders("lib"));
        // The toolkit's `stubs` are for linking: they load and then do nothing.
        folders.retain(|folder| folder.file_name() != Some(OsStr::new("stubs")));
        folders
    }

    /// Toolkits: those that variables name, the administrator's default, then others, newest first.
    fn all_toolkits(&self) -> Vec<PathBuf> {
        let mut toolkits = self.toolkits.clone();
        toolkits.push(self.root.join("usr/local/cuda"));
        toolkits.extend(newest_first(&self.root.join("usr/local"), "cuda-", |_| {
            true
        }));
        toolkits.push(self.root.join("opt/cuda"));
        toolkits
    }

    /// Folders of Python environments, as conda packages or wheels. `inner` is `lib` or `include`.
    fn python_folders(&self, inner: &str) -> Vec<PathBuf> {
        let mut prefixes = self.python_prefixes.clone();
        prefixes.extend(["usr/local", "usr"].map(|folder| self.root.join(folder)));
        let mut folders = Vec::new();
        for prefix in prefixes {
            folders.extend(folders_of_prefix(&prefix, &[inner], inner));
            for lib in ["lib", "lib64"] {
                let is_three = |version: &[u64]| version.starts_with(&[3]);
                for python in newest_first(&prefix.join(lib), "python", is_three) {
                    for site in ["site-packages", "dist-packages"] {
                        let wheels = wheels(&python.join(site)).into_iter();
                        folders.extend(wheels.map(|wheel| wheel.join(inner)));
                    }
                }
            }
        }
        folders
    }
}

/// How long `python3` may take to start.
const PYTHON_TIME_MAX: Duration = Duration::from_secs(5);

/// `sys.prefix` of a Python, if it answers in time.
pub(super) fn prefix_of(python: &Path, time_max: Duration) -> Option<PathBuf> {
    let mut child = Command::new(python)
        .args(["-c", "import sys; print(sys.prefix)"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let stdout = child.stdout.take()?;
    let (send, receive) = std::sync::mpsc::channel();
    // A thread, because a pipe that something else holds open never ends.
    let reader = std::thread::Builder::new().spawn(move || {
        let mut line = Vec::new();
        let read = BufReader::new(stdout.take(4096)).read_until(b'\n', &mut line);
        let _ = send.send(read.map(|_| line));
    });
    drop(reader);
    let answer = receive.recv_timeout(time_max);
    // Fails if it has ended, as it should have.
    let _ = child.kill();
    let _ = child.wait();
    let answer = answer.ok()?.ok()?;
    let prefix = PathBuf::from(OsStr::from_bytes(answer.trim_ascii()));
    prefix.is_absolute().then_some(prefix)
}

/// A toolkit's own folders, then those of its `targets`. A library for another processor is
/// recognised by its header.
fn folders_of_prefix(prefix: &Path, own: &[&str], inner: &str) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = own.iter().map(|name| prefix.join(name)).collect();
    let mut targets = children(&prefix.join("targets"));
    targets.sort_by(|a, b| b.cmp(a));
    folders.extend(targets.into_iter().map(|target| target.join(inner)));
    folders
}

/// The folders that NVIDIA's wheels install: `nvidia/cu13` and later hold a whole toolkit, older
/// ones one part each.
fn wheels(site_packages: &Path) -> Vec<PathBuf> {
    let nvidia = site_packages.join("nvidia");
    let mut wheels = newest_first(&nvidia, "cu", |_| true);
    let mut parts = children(&nvidia);
    parts.sort();
    parts.retain(|part| !wheels.contains(part));
    wheels.extend(parts);
    wheels
}

/// The entries of a folder; none if it cannot be read.
fn children(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect()
}

/// The entries named `prefix` and a version that is `wanted`, newest first.
fn newest_first(folder: &Path, prefix: &str, wanted: impl Fn(&[u64]) -> bool) -> Vec<PathBuf> {
    let version = |path: &PathBuf| {
        let version = numbers(path.file_name()?.to_str()?.strip_prefix(prefix)?)?;
        wanted(&version).then_some(version)
    };
    let found = children(folder).into_iter();
    let mut found: Vec<_> = found
        .filter_map(|path| Some((version(&path)?, path)))
        .collect();
    found.sort_by(|a, b| b.cmp(a));
    found.into_iter().map(|(_, path)| path).collect()
}

/// `12.10` as [12, 10], so that 12.10 is newer than 12.9.
fn numbers(version: &str) -> Option<Vec<u64>> {
    let is_number = |part: &&str| part.bytes().all(|byte| byte.is_ascii_digit());
    let number = |part: &str| Some(part).filter(is_number)?.parse().ok();
    version.split('.').map(number).collect()
}

/// The files called `stem` (`libnccl.so`), with or without a version, each once. `refuse` says why
/// a version cannot be used.
pub(super) fn candidates(
    stem: &str,
    folders: &[PathBuf],
    refuse: impl Fn(&[u64]) -> Option<String>,
) -> Vec<Candidate> {
    let mut seen = HashSet::new();
    let mut all = Vec::new();
    for folder in folders {
        for (path, version) in files(stem, folder) {
            if !path.canonicalize().is_ok_and(|real| seen.insert(real)) {
                continue;
            }
            let skipped = why_not_a_library(&path)
                .map(|why| format!("broken: {why}"))
                .or_else(|| refuse(&numbers(version.as_deref()?)?));
            all.push(Candidate {
                path,
                version,
                skipped,
            });
        }
    }
    all
}

/// The files of one folder with this name, and their versions, best first: the newest, and of its
/// links the one that programs load, `libnccl.so.2`.
fn files(stem: &str, folder: &Path) -> Vec<(PathBuf, Option<String>)> {
    let mut found: Vec<(Vec<u64>, bool, PathBuf, Option<String>)> = children(folder)
        .into_iter()
        .filter_map(|path| {
            let own = version_in_name(stem, &path)?;
            let is_soname = numbers(&own).is_some_and(|own| own.len() == 1);
            // Dangling links and folders do not count.
            let real = path.canonicalize().ok().filter(|real| real.is_file())?;
            let version = version_in_name(stem, &real)
                .filter(|version| !version.is_empty())
                .unwrap_or(own);
            let ranked = numbers(&version).unwrap_or_default();
            Some((
                ranked,
                is_soname,
                path,
                Some(version).filter(|version| !version.is_empty()),
            ))
        })
        .collect();
    found.sort_by(|a, b| b.cmp(a));
    found
        .into_iter()
        .map(|(_, _, path, version)| (path, version))
        .collect()
}

/// The version after `stem` in a file's name, empty if there is none: `libnccl.so.2.27.3` has
/// `2.27.3`. None for other names, such as `libnvrtc-builtins.so.13.0`.
pub(super) fn version_in_name(stem: &str, path: &Path) -> Option<String> {
    let rest = path.file_name()?.to_str()?.strip_prefix(stem)?;
    if rest.is_empty() {
        return Some(String::new());
    }
    let version = rest.strip_prefix('.')?;
    numbers(version).map(|_| version.to_string())
}

/// Why a file cannot be a library for this processor, judged by its first bytes.
fn why_not_a_library(path: &Path) -> Option<String> {
    const MACHINE: Option<u16> = match () {
        () if cfg!(target_arch = "x86_64") => Some(62),
        () if cfg!(target_arch = "aarch64") => Some(183),
        () => None,
    };
    let mut header = [0; 20];
    if let Err(error) = File::open(path).and_then(|mut file| file.read_exact(&mut header)) {
        return Some(match error.kind() {
            io::ErrorKind::UnexpectedEof => "the file is too short to be a library".to_string(),
            _ => format!("it cannot be read ({error})"),
        });
    }
    if !header.starts_with(b"\x7fELF") {
        return Some("the file is not a library (no ELF header)".to_string());
    }
    let machine = u16::from_le_bytes([header[18], header[19]]);
    (MACHINE.is_some_and(|ours| ours != machine))
        .then(|| "it is a library for another processor".to_string())
}
