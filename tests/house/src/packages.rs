//! The workspace's packages.

use std::fs;
use std::path::{Path, PathBuf};

/// A package of the workspace.
pub(crate) struct Package {
    pub(crate) name: String,
    /// Where its Cargo.toml is, from the workspace's root.
    pub(crate) folder: PathBuf,
    /// The files in which its crates begin: the library and the programs.
    pub(crate) roots: Vec<PathBuf>,
    pub(crate) manifest: toml::Table,
}

/// The packages called so, by name or by folder; all of them where `names` is empty.
pub(crate) fn find(names: &[String]) -> Result<Vec<Package>, String> {
    let all = read(Path::new(""))?;
    if names.is_empty() {
        return Ok(all);
    }
    for name in names {
        if !all.iter().any(|package| package.is_called(name)) {
            let known: Vec<&str> = all.iter().map(|package| package.name.as_str()).collect();
            return Err(format!("no package {name}; there are {}", known.join(", ")));
        }
    }
    let mut all = all;
    all.retain(|package| names.iter().any(|name| package.is_called(name)));
    Ok(all)
}

/// All packages of the workspace in the folder `root`.
pub(crate) fn read(root: &Path) -> Result<Vec<Package>, String> {
    let workspace = manifest(&root.join("Cargo.toml"))?;
    let members = workspace["workspace"]["members"]
        .as_array()
        .ok_or("Cargo.toml: workspace.members is not a list")?;
    let mut packages = Vec::new();
    for member in members {
        let folder = root.join(member.as_str().ok_or("a workspace member is not text")?);
        let manifest = manifest(&folder.join("Cargo.toml"))?;
        let name = manifest["package"]["name"].as_str().unwrap_or_default();
        packages.push(Package {
            name: name.to_owned(),
            roots: roots(&folder, &manifest),
            folder,
            manifest,
        });
    }
    Ok(packages)
}

fn manifest(path: &Path) -> Result<toml::Table, String> {
    let text =
        fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    text.parse().map_err(|e| format!("{}: {e}", path.display()))
}

fn roots(folder: &Path, manifest: &toml::Table) -> Vec<PathBuf> {
    let library = manifest.get("lib").and_then(|lib| lib.get("path"));
    let library = library.and_then(|path| path.as_str());
    let mut roots = vec![
        folder.join(library.unwrap_or("src/lib.rs")),
        folder.join("src/main.rs"),
    ];
    if let Ok(programs) = fs::read_dir(folder.join("src/bin")) {
        for entry in programs.flatten() {
            let path = entry.path();
            roots.push(if path.is_dir() {
                path.join("main.rs")
            } else {
                path
            });
        }
    }
    roots.retain(|root| root.is_file());
    roots.sort();
    roots
}

impl Package {
    /// Whether users get it: tests and examples are other packages.
    pub(crate) fn is_product(&self) -> bool {
        ["kernels", "comm", "ddp"]
            .iter()
            .any(|folder| self.folder.starts_with(folder))
    }

    fn is_called(&self, name: &str) -> bool {
        self.name == name
            || self.name.strip_prefix("ddp-") == Some(name)
            || self.folder == Path::new(name)
    }
}
