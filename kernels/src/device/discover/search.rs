//! Where CUDA's files are: toolkits, distribution packages, pip wheels, conda.
//!
//! Files are found and never loaded. `libnccl.so.2` and `libnccl.so.2.27.3` are accepted like
//! `libnccl.so`. The first folder wins. Within a folder, and among several toolkits or Pythons, the
//! newest version wins, compared as numbers. All inputs are in a [`SearchEnvironment`], so that
//! tests can build machines.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The environment variables and the file system's root to search.
pub(super) struct SearchEnvironment {
    /// The folders of `LD_LIBRARY_PATH`.
    library_path: Vec<PathBuf>,
    /// `CUDA_HOME` and `CUDA_PATH`.
    toolkits: Vec<PathBuf>,
    /// Prefixes of Python environments: `VIRTUAL_ENV`, `CONDA_PREFIX`, those of each `python3` on
    /// `PATH`, `~/.local`.
    python_prefixes: Vec<PathBuf>,
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
        for bin in folders("PATH") {
            // An image may set nothing but PATH: use the prefix of the link, then that of its
            // target.
            let python = bin.join("python3");
            if let Ok(real) = python.canonicalize() {
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
            visible_devices: variable("CUDA_VISIBLE_DEVICES"),
            root: root.to_owned(),
            driver_names,
        }
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
        toolkits.extend(
            versioned_folders(&self.root.join("usr/local"), "cuda-")
                .into_iter()
                .map(|(_, path)| path),
        );
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
                let pythons = versioned_folders(&prefix.join(lib), "python");
                for (_, python) in pythons
                    .into_iter()
                    .filter(|(version, _)| version.starts_with(&[3]))
                {
                    for site in ["site-packages", "dist-packages"] {
                        folders.extend(
                            wheels(&python.join(site))
                                .into_iter()
                                .map(|wheel| wheel.join(inner)),
                        );
                    }
                }
            }
        }
        folders
    }
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
    let mut wheels: Vec<PathBuf> = versioned_folders(&nvidia, "cu")
        .into_iter()
        .map(|(_, path)| path)
        .collect();
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

/// The entries named `prefix` and a version, with the version, newest first.
fn versioned_folders(folder: &Path, prefix: &str) -> Vec<(Vec<u64>, PathBuf)> {
    let mut found: Vec<(Vec<u64>, PathBuf)> = children(folder)
        .into_iter()
        .filter_map(|path| {
            Some((
                numbers(path.file_name()?.to_str()?.strip_prefix(prefix)?)?,
                path,
            ))
        })
        .collect();
    found.sort_by(|a, b| b.cmp(a));
    found
}

/// `12.10` as [12, 10], so that 12.10 is newer than 12.9.
fn numbers(version: &str) -> Option<Vec<u64>> {
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    version
        .split('.')
        .map(|part| {
            if is_number(part) {
                part.parse().ok()
            } else {
                None
            }
        })
        .collect()
}

/// The result of a search for a library's file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// A library for this processor.
    Sound {
        path: PathBuf,
        version: Option<String>,
    },
    /// A file that cannot be loaded here; no folder has a better one.
    Broken { path: PathBuf, why: String },
    /// No such file.
    Missing,
}

/// Looks for `stem` (`libnccl.so`), with or without a version. The first folder with a usable one
/// wins.
pub(super) fn find_library(stem: &str, folders: &[PathBuf]) -> Found {
    let mut broken = None;
    for folder in folders {
        for (path, version) in candidates(stem, folder) {
            match why_not_a_library(&path) {
                None => return Found::Sound { path, version },
                Some(why) => {
                    broken.get_or_insert(Found::Broken { path, why });
                }
            }
        }
    }
    broken.unwrap_or(Found::Missing)
}

/// The files of one folder with this name, and their versions, best first: the newest, and of its
/// links the one that programs load, `libnccl.so.2`.
fn candidates(stem: &str, folder: &Path) -> Vec<(PathBuf, Option<String>)> {
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
