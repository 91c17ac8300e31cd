//! NVIDIA's own NVRTC, where SIMCUDA_PTX names its library: what it makes of a program goes with
//! the image, behind the library of the host, and each launch is executed a second time from it
//! (`kernel::second`).
//!
//! It runs in a process of its own, with the library path of a machine without simulated GPUs:
//! NVRTC loads parts of itself by name, and here these names are the simulator's.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::options::Options;
use super::program::Program;

/// Starts NVRTC, with python3.
const SCRIPT: &str = include_str!("real.py");

/// What SIMCUDA_PTX names.
fn named() -> Option<PathBuf> {
    std::env::var_os("SIMCUDA_PTX")
        .filter(|path| !path.is_empty())
        .map(PathBuf::from)
}

/// Compiles in a folder that is empty. The error is a log.
fn compile(
    library: &Path,
    program: &Program,
    options: &Options,
    folder: &Path,
) -> io::Result<Result<String, String>> {
    fs::write(folder.join("source"), &program.source)?;
    for (number, (name, text)) in program.headers.iter().enumerate() {
        fs::write(folder.join(format!("{number}.name")), name)?;
        fs::write(folder.join(format!("{number}.text")), text)?;
    }
    let own = [
        format!(
            "--gpu-architecture=compute_{}{}",
            options.architecture, options.suffix
        ),
        format!("--std={}", options.standard),
        "--fmad=false".to_owned(),
        "-lineinfo".to_owned(),
    ];
    let paths = options.include_paths.iter();
    let before = options.pre_includes.iter();
    let output = Command::new("python3")
        .args(["-c", SCRIPT])
        .args([library, folder])
        .args([&program.name, &program.headers.len().to_string()])
        .args(own)
        .args(&options.macros)
        .args(paths.map(|path| format!("--include-path={path}")))
        .args(before.map(|path| format!("--pre-include={path}")))
        .env_remove("LD_LIBRARY_PATH")
        .output()?;
    if output.status.success() {
        return fs::read_to_string(folder.join("made")).map(Ok);
    }
    let log = [output.stdout, output.stderr].concat();
    Ok(Err(String::from_utf8_lossy(&log).into_owned()))
}

/// The PTX of a program, made in the empty `folder` and kept in `cache` under a name that `digest`
/// makes of what it depends on. None without SIMCUDA_PTX. The error is a log.
pub(super) fn ptx(
    program: &Program,
    options: &Options,
    cache: &Path,
    folder: &Path,
    digest: impl FnOnce(&[&str]) -> String,
) -> Option<Result<String, String>> {
    let library = named()?;
    let (version, options_text) = (library.display().to_string(), format!("{options:?}"));
    let mut parts = vec![
        version.as_str(),
        &options_text,
        &program.name,
        &program.source,
        SCRIPT,
    ];
    parts.extend(
        program
            .headers
            .iter()
            .flat_map(|(name, text)| [name.as_str(), text.as_str()]),
    );
    let path = cache.join(format!("{}.ptx", digest(&parts)));
    if let Ok(text) = fs::read_to_string(&path) {
        return Some(Ok(text));
    }
    let made = compile(&library, program, options, folder);
    let made = match made {
        Ok(Ok(made)) => made,
        Ok(Err(log)) => {
            return Some(Err(format!(
                "SIMCUDA_PTX={version}: NVRTC refuses {}:\n{log}",
                program.name
            )));
        }
        Err(error) => {
            return Some(Err(format!(
                "SIMCUDA_PTX={version}: cannot run NVRTC with python3: {error}\n"
            )));
        }
    };
    // Renamed, so that it is whole. A file that cannot be kept is made again.
    let _ = fs::rename(folder.join("made"), &path);
    Some(Ok(made))
}

/// Where an image says how long the PTX is that follows it: the flags of an ELF header, which have
/// no meaning for x86 and are zero there.
pub(crate) const FLAGS: std::ops::Range<usize> = 48..52;

/// The image of a library with the PTX behind it.
pub(crate) fn joined(mut image: Vec<u8>, ptx: &str) -> Vec<u8> {
    image[FLAGS].copy_from_slice(&(ptx.len() as u32).to_le_bytes());
    image.extend_from_slice(ptx.as_bytes());
    image
}
