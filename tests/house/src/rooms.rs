//! Which crate may use which, where `unsafe` and bindings to C libraries may appear, and that
//! libraries name no command-line flag.

use std::fs;
use std::path::Path;

use crate::lines::{is_test, lines, product_lines, sources};
use crate::packages::Package;

/// For each package under these rules: the packages of this workspace that it may depend on, tests
/// apart. The compiler forbids cycles; this forbids a new direction.
const MAY_USE: [(&str, &[&str]); 11] = [
    ("ddp-kernels", &[]),
    ("ddp-comm", &["ddp-kernels"]),
    ("ddp-nn", &["ddp-kernels"]),
    ("ddp-data", &["ddp-kernels"]),
    ("ddp-tables", &["ddp-kernels", "ddp-data"]),
    (
        "ddp-engine",
        &["ddp-kernels", "ddp-comm", "ddp-nn", "ddp-data"],
    ),
    (
        "ddp-tools",
        &[
            "ddp-kernels",
            "ddp-comm",
            "ddp-nn",
            "ddp-data",
            "ddp-tables",
            "ddp-engine",
        ],
    ),
    (
        "ddp",
        &[
            "ddp-kernels",
            "ddp-comm",
            "ddp-nn",
            "ddp-data",
            "ddp-tables",
            "ddp-engine",
            "ddp-tools",
        ],
    ),
    ("ddp-ptx", &[]),
    ("ddp-simcuda", &["ddp-ptx"]),
    ("ddp-testing", &[]),
];

/// The folders in `comm/src`, each of which uses only those before it. Files beside them use none.
const FOLDERS: [&str; 5] = ["membership", "collective", "transport", "launch", "world"];

/// A word in code, and the paths (their beginnings) where it may be.
const WORDS: [(&str, &[&str]); 3] = [
    (
        "cudarc",
        &[
            "kernels/",
            "comm/src/transport/nccl",
            "tests/simcuda/",
            "tests/planted",
            "tests/house/",
        ],
    ),
    (
        "use mpi",
        &["comm/src/transport/mpi", "comm/tests/", "tests/house/"],
    ),
    (
        "unsafe",
        &[
            "kernels/",
            "comm/",
            "tests/",
            // A test that truncates a mapped file.
            "ddp/tests/lying_files.rs",
        ],
    ),
];

/// The libraries, whose texts name no flags: those are the program's.
const LIBRARIES: [&str; 7] = [
    "kernels/",
    "comm/",
    "ddp/nn/",
    "ddp/data/",
    "ddp/tables/",
    "ddp/engine/",
    "ddp/tools/",
];

/// Flags of other programs that libraries may name, and a variable of the report's style.
const OTHERS_FLAGS: [&str; 16] = [
    "--bind-to",
    "--cpu-bind",
    "--cpus-per-task",
    "--features",
    "--fmad",
    "--gpu-architecture",
    "--gpus",
    "--ipc",
    "--local-dir",
    "--mpi",
    "--pid",
    "--release",
    "--shm-size",
    "--std",
    "--v",
    "--version",
];

/// What breaks a rule, one line each.
pub(crate) fn violations(packages: &[Package]) -> Result<Vec<String>, String> {
    let mut found = Vec::new();
    for package in packages {
        found.extend(wrong_dependencies(package));
        found.extend(missing_forbid(package)?);
        for path in sources(&package.folder, &["rs"]) {
            // A package inside another one's folder has its own turn.
            let inner = packages.iter().any(|other| {
                other.folder != package.folder
                    && other.folder.starts_with(&package.folder)
                    && path.starts_with(&other.folder)
            });
            if inner {
                continue;
            }
            let text = fs::read_to_string(&path)
                .map_err(|e| format!("cannot read {}: {e}", path.display()))?;
            let shown = path.display().to_string();
            if let Some(inside) = shown.strip_prefix("comm/src/") {
                let used = wrong_folders(inside, &text).into_iter();
                found.extend(used.map(|(line, folder)| {
                    format!("{shown}:{line}: {folder}/ is above this, and may not be used here")
                }));
            }
            found.extend(
                wrong_words(&shown, &text)
                    .into_iter()
                    .map(|(line, word)| format!("{shown}:{line}: `{word}` is not allowed here")),
            );
            let in_library = LIBRARIES.iter().any(|library| shown.starts_with(library));
            if in_library && shown.contains("/src/") && !is_test(&path) {
                let flags = flags(&text).into_iter();
                found.extend(flags.map(|(line, flag)| {
                    format!("{shown}:{line}: a library names no flag, and here is {flag}")
                }));
            }
        }
    }
    Ok(found)
}

/// The flags of our program in the strings of a file's product code, with their lines.
fn flags(text: &str) -> Vec<(usize, String)> {
    let is_part = |c: char| c.is_ascii_lowercase() || c == '-';
    let mut found = Vec::new();
    for (line, number) in product_lines(text) {
        for (at, _) in line.text.match_indices("--") {
            let flag: String = line.text[at..]
                .chars()
                .take_while(|&c| is_part(c))
                .collect();
            let is_flag = flag[2..].starts_with(|c| c != '-') && !line.text[..at].ends_with('-');
            if is_flag && !OTHERS_FLAGS.contains(&flag.as_str()) {
                found.push((number, flag));
            }
        }
    }
    found
}

fn wrong_dependencies(package: &Package) -> Vec<String> {
    let Some((_, allowed)) = MAY_USE.iter().find(|(name, _)| *name == package.name) else {
        return Vec::new();
    };
    let dependencies = package.manifest.get("dependencies");
    let names = dependencies.and_then(|table| table.as_table());
    names
        .into_iter()
        .flat_map(|table| table.keys())
        .filter(|name| name.starts_with("ddp"))
        .filter(|name| !allowed.contains(&name.as_str()))
        .map(|name| {
            let manifest = package.folder.join("Cargo.toml");
            format!(
                "{}: {} may not depend on {name}",
                manifest.display(),
                package.name
            )
        })
        .collect()
}

/// Packages under `ddp/` forbid unsafe code.
fn missing_forbid(package: &Package) -> Result<Vec<String>, String> {
    let mut found = Vec::new();
    if package.name == "ddp" || package.folder.starts_with("ddp") {
        for root in package.roots.iter().filter(|root| root.ends_with("lib.rs")) {
            let text = fs::read_to_string(root).map_err(|e| format!("{}: {e}", root.display()))?;
            if !text.contains("#![forbid(unsafe_code)]") {
                found.push(format!(
                    "{}: #![forbid(unsafe_code)] is missing",
                    root.display()
                ));
            }
        }
    }
    Ok(found)
}

/// The words in the code of the file at `path` that are not allowed there, with their lines.
fn wrong_words(path: &str, text: &str) -> Vec<(usize, &'static str)> {
    let mut found = Vec::new();
    let lines = lines(text);
    for (word, places) in WORDS {
        if places.iter().any(|place| path.starts_with(place)) {
            continue;
        }
        for (line, number) in lines.iter().zip(1..) {
            if has_word(&line.code, word) {
                found.push((number, word));
            }
        }
    }
    found
}

/// The later folders that the product code of a file in `comm/src` uses, with their lines.
fn wrong_folders(path: &str, text: &str) -> Vec<(usize, &'static str)> {
    let own = path.split(['/', '.']).next().unwrap_or_default();
    if own == "lib" || is_test(Path::new(path)) {
        return Vec::new();
    }
    // Files beside the folders are below them all.
    let own = FOLDERS.iter().position(|folder| *folder == own);
    let later = &FOLDERS[own.map_or(0, |own| own + 1)..];
    let mut found = Vec::new();
    for (line, number) in product_lines(text) {
        let uses = |folder: &&str| has_word(&line.code, &format!("crate::{folder}"));
        found.extend(
            later
                .iter()
                .copied()
                .filter(uses)
                .map(|folder| (number, folder)),
        );
    }
    found
}

fn has_word(code: &str, word: &str) -> bool {
    let in_word = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(word).any(|(at, _)| {
        !code[..at].ends_with(in_word) && !code[at + word.len()..].starts_with(in_word)
    })
}

#[cfg(test)]
mod tests {
    use super::{flags, wrong_folders, wrong_words};

    #[test]
    fn a_folder_uses_only_those_before_it() {
        let text =
            "use crate::launch::cores; // crate::world\nuse crate::collective::group::Group;";
        assert_eq!(
            wrong_folders("transport/tcp/join.rs", text),
            [(1, "launch")]
        );
        assert_eq!(
            wrong_folders("say.rs", text),
            [(1, "launch"), (2, "collective")]
        );
        assert_eq!(wrong_folders("world.rs", text), []);
    }

    #[test]
    fn a_flag_counts_in_the_strings_of_product_code_unless_another_program_has_it() {
        let text = "// --out\nlet help = \"give another --out, or \\\n    --data-on-device off\";\n\
                    let help = \"--gpus all, a --- b -- c\"; let x = --y;\n\
                    #[cfg(test)]\nmod tests {\n    let x = \"--out\";\n}\n";
        let found = [
            (2, "--out".to_string()),
            (3, "--data-on-device".to_string()),
        ];
        assert_eq!(flags(text), found);
    }

    #[test]
    fn a_word_counts_in_code_only_and_only_outside_its_places() {
        let text = "use cudarc::driver; // cudarc\nlet x = \"unsafe\";\n#![forbid(unsafe_code)]";
        assert_eq!(wrong_words("ddp/engine/src/step.rs", text), [(1, "cudarc")]);
        assert_eq!(wrong_words("kernels/src/cuda/gpu.rs", text), []);
        let text = "/* unsafe */ fn f() { unsafe { g() } }\nuse mpi::ffi; use mpiexec;";
        assert_eq!(
            wrong_words("ddp/engine/src/step.rs", text),
            [(2, "use mpi"), (1, "unsafe")]
        );
    }
}
