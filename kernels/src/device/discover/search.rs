//! Where CUDA's files lie on the machines people have: toolkits, distribution packages, pip wheels, conda.
//!
//! Files are found and never loaded. No link made by hand is needed: `libnccl.so.2` and `libnccl.so.2.27.3` do as
//! well as `libnccl.so`. The order of folders decides; within one folder, and among toolkits and Pythons side by
//! side, the newest comes first, compared as numbers. Everything is read from a [`SearchEnvironment`], so that tests
//! can build a machine of their own.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The environment variables and the file system's root that a search goes by.
pub(super) struct SearchEnvironment {
    /// The folders of `LD_LIBRARY_PATH`.
    library_path: Vec<PathBuf>,
    /// `CUDA_HOME` and `CUDA_PATH`.
    toolkits: Vec<PathBuf>,
    /// What Pythons install under: `VIRTUAL_ENV`, `CONDA_PREFIX`, the owners of each `python3` on `PATH`, `~/.local`.
    python_prefixes: Vec<PathBuf>,
    /// The folders of `DDP_CUDA_INCLUDE`.
    pub(super) include_override: Vec<PathBuf>,
    /// `CUDA_VISIBLE_DEVICES`, where it is set.
    pub(super) visible_devices: Option<OsString>,
    /// What stands for `/`.
    pub(super) root: PathBuf,
    /// The names or paths given to the loader for the driver, in order.
    pub(super) driver_names: Vec<OsString>,
}

impl SearchEnvironment {
    /// Reads the variables. Empty ones count as unset, and relative folders as below the current one.
    pub(super) fn reading(
        variable: impl Fn(&str) -> Option<OsString>,
        root: &Path,
        driver_names: Vec<OsString>,
    ) -> SearchEnvironment {
        let folders = |name: &str| -> Vec<PathBuf> {
            let value = variable(name).unwrap_or_default();
            // The absolute path of an empty one is an error: it drops out here.
            std::env::split_paths(&value).filter_map(|folder| std::path::absolute(folder).ok()).collect()
        };
        let folder = |name: &str| variable(name).and_then(|value| std::path::absolute(PathBuf::from(value)).ok());
        let mut python_prefixes: Vec<PathBuf> =
            ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(folder).collect();
        for bin in folders("PATH") {
            // An image may put its Python on PATH and set no other variable: the link's owner, then its target's.
            let python = bin.join("python3");
            if let Ok(real) = python.canonicalize() {
                python_prefixes
                    .extend([&python, &real].into_iter().filter_map(|p| Some(p.parent()?.parent()?.to_owned())));
            }
        }
        python_prefixes.extend(folder("HOME").map(|home| home.join(".local")));
        SearchEnvironment {
            library_path: folders("LD_LIBRARY_PATH"),
            toolkits: ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(folder).collect(),
            python_prefixes,
            include_override: folders("DDP_CUDA_INCLUDE"),
            visible_devices: variable("CUDA_VISIBLE_DEVICES"),
            root: root.to_owned(),
            driver_names,
        }
    }

    /// Every folder that may hold a library, in the order in which they are believed.
    pub(super) fn library_folders(&self) -> Vec<PathBuf> {
        let mut folders = self.library_path.clone();
        for toolkit in self.all_toolkits() {
            folders.extend(folders_of_prefix(&toolkit, &["lib64", "lib"], "lib"));
        }
        let system = ["lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "lib64", "lib", "local/lib", "local/lib64"];
        folders.extend(system.map(|folder| self.root.join("usr").join(folder)));
        folders.extend(self.python_folders("lib"));
        // The toolkit has stand-ins for linking in `stubs`: they load and then do nothing.
        folders.retain(|folder| folder.file_name() != Some(OsStr::new("stubs")));
        folders
    }

    /// Every folder that may hold headers: first those that belong to the NVRTC found, whose version they share.
    pub(super) fn include_folders(&self, nvrtc: Option<&Path>) -> Vec<PathBuf> {
        let beside = nvrtc.and_then(|library| Some(library.parent()?.parent()?.join("include")));
        let mut folders: Vec<PathBuf> = beside.into_iter().collect();
        for toolkit in self.all_toolkits() {
            folders.extend(folders_of_prefix(&toolkit, &["include"], "include"));
        }
        folders.extend(["usr/include", "usr/local/include"].map(|folder| self.root.join(folder)));
        folders.extend(self.python_folders("include"));
        folders
    }

    /// Toolkits: those asked for, the one the administrator chose, the others from the newest.
    fn all_toolkits(&self) -> Vec<PathBuf> {
        let mut toolkits = self.toolkits.clone();
        toolkits.push(self.root.join("usr/local/cuda"));
        toolkits.extend(versioned_folders(&self.root.join("usr/local"), "cuda-").into_iter().map(|(_, path)| path));
        toolkits.push(self.root.join("opt/cuda"));
        toolkits
    }

    /// What Python environments hold, as conda packages or as wheels. `inner` is `lib` or `include`.
    fn python_folders(&self, inner: &str) -> Vec<PathBuf> {
        let mut prefixes = self.python_prefixes.clone();
        prefixes.extend(["usr/local", "usr"].map(|folder| self.root.join(folder)));
        let mut folders = Vec::new();
        for prefix in prefixes {
            folders.extend(folders_of_prefix(&prefix, &[inner], inner));
            for lib in ["lib", "lib64"] {
                let pythons = versioned_folders(&prefix.join(lib), "python");
                for (_, python) in pythons.into_iter().filter(|(version, _)| version.starts_with(&[3])) {
                    for site in ["site-packages", "dist-packages"] {
                        folders.extend(wheels(&python.join(site)).into_iter().map(|wheel| wheel.join(inner)));
                    }
                }
            }
        }
        folders
    }
}

/// A toolkit's own folders, then those of its `targets`. A foreign target's libraries are told by their header.
fn folders_of_prefix(prefix: &Path, own: &[&str], inner: &str) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = own.iter().map(|name| prefix.join(name)).collect();
    let mut targets = children(&prefix.join("targets"));
    targets.sort_by(|a, b| b.cmp(a));
    folders.extend(targets.into_iter().map(|target| target.join(inner)));
    folders
}

/// The folders that NVIDIA's wheels unpack to: `nvidia/cu13` and later hold a whole toolkit, the older one part each.
fn wheels(site_packages: &Path) -> Vec<PathBuf> {
    let nvidia = site_packages.join("nvidia");
    let mut wheels: Vec<PathBuf> = versioned_folders(&nvidia, "cu").into_iter().map(|(_, path)| path).collect();
    let mut parts = children(&nvidia);
    parts.sort();
    parts.retain(|part| !wheels.contains(part));
    wheels.extend(parts);
    wheels
}

/// What a folder holds; nothing, where it cannot be read.
fn children(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

/// The children named `prefix` and a version, with it, the newest first.
fn versioned_folders(folder: &Path, prefix: &str) -> Vec<(Vec<u64>, PathBuf)> {
    let mut found: Vec<(Vec<u64>, PathBuf)> = children(folder)
        .into_iter()
        .filter_map(|path| Some((numbers(path.file_name()?.to_str()?.strip_prefix(prefix)?)?, path)))
        .collect();
    found.sort_by(|a, b| b.cmp(a));
    found
}

/// `12.10` as [12, 10]: 12.10 comes after 12.9.
fn numbers(version: &str) -> Option<Vec<u64>> {
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    version.split('.').map(|part| if is_number(part) { part.parse().ok() } else { None }).collect()
}

/// What a search for a library's file came to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// A library of this machine's kind.
    Sound { path: PathBuf, version: Option<String> },
    /// A file of that name that no process here can load, and nothing better elsewhere.
    Broken { path: PathBuf, why: String },
    /// No such file.
    Missing,
}

/// Looks for `stem` (`libnccl.so`), alone or with a version behind it. The first folder with a sound one decides.
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

/// The files of one folder that bear the name, with their versions, the best first: the newest, and of the links to
/// it the one that programs load, `libnccl.so.2`.
fn candidates(stem: &str, folder: &Path) -> Vec<(PathBuf, Option<String>)> {
    let mut found: Vec<(Vec<u64>, bool, PathBuf, Option<String>)> = children(folder)
        .into_iter()
        .filter_map(|path| {
            let own = version_in_name(stem, &path)?;
            let is_soname = numbers(&own).is_some_and(|own| own.len() == 1);
            // A dangling link, or a folder of that name, is no candidate.
            let real = path.canonicalize().ok().filter(|real| real.is_file())?;
            let version = version_in_name(stem, &real).filter(|version| !version.is_empty()).unwrap_or(own);
            let ranked = numbers(&version).unwrap_or_default();
            Some((ranked, is_soname, path, Some(version).filter(|version| !version.is_empty())))
        })
        .collect();
    found.sort_by(|a, b| b.cmp(a));
    found.into_iter().map(|(_, _, path, version)| (path, version)).collect()
}

/// The version behind `stem` in a file's name, empty where there is none: `libnccl.so.2.27.3` has `2.27.3`. None for
/// other names, `libnvrtc-builtins.so.13.0` for one.
pub(super) fn version_in_name(stem: &str, path: &Path) -> Option<String> {
    let rest = path.file_name()?.to_str()?.strip_prefix(stem)?;
    if rest.is_empty() {
        return Some(String::new());
    }
    let version = rest.strip_prefix('.')?;
    numbers(version).map(|_| version.to_string())
}

/// Why a file cannot be a library for this processor, as far as its first bytes tell.
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
    (MACHINE.is_some_and(|ours| ours != machine)).then(|| "it is a library for another processor".to_string())
}

/// The first folder that holds both headers the kernels include.
pub(super) fn find_headers(folders: &[PathBuf]) -> Option<PathBuf> {
    let holds_both = |folder: &&PathBuf| ["cuda_bf16.h", "cuda_fp16.h"].iter().all(|name| folder.join(name).is_file());
    folders.iter().find(holds_both).cloned()
}

/// The CUDA version that a folder of headers defines, `13.0`.
pub(super) fn headers_version(folder: &Path) -> Option<String> {
    // The definition stands near the top of files of about a megabyte.
    const ENOUGH_BYTES: u64 = 64 << 10;
    for (name, definition) in [("cuda_runtime_api.h", "#define CUDART_VERSION "), ("cuda.h", "#define CUDA_VERSION ")] {
        let mut text = Vec::new();
        let read = File::open(folder.join(name)).and_then(|file| file.take(ENOUGH_BYTES).read_to_end(&mut text));
        if read.is_err() {
            continue;
        }
        let text = String::from_utf8_lossy(&text);
        let number = text.lines().find_map(|line| line.strip_prefix(definition)?.trim().parse::<u32>().ok());
        if let Some(number) = number {
            return Some(format!("{}.{}", number / 1000, number % 1000 / 10));
        }
    }
    None
}
