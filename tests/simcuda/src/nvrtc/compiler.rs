//! Runs g++ and keeps the result.
//!
//! A program goes through it three times: preprocessed as written, compiled after `rewrite` with
//! the sanitizer's hooks, and linked with the runtime. Processes share the cache folder: files are
//! written under a unique name and renamed.

use std::collections::BTreeMap;
use std::ffi::{CStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use twox_hash::XxHash3_128;

use super::options::Options;
use super::program::Program;
use super::real;
use super::rewrite::{self, HEADER_PRAGMA};

/// The result of a compilation.
#[derive(Clone, Debug)]
pub(crate) struct Compiled {
    /// A shared library.
    pub(crate) image: Vec<u8>,
    /// Lowered names of name expressions.
    pub(crate) lowered: BTreeMap<String, String>,
}

/// The shim's files, by the names they include each other.
const SHIM: &[(&str, &str)] = &[
    ("runtime.h", include_str!("../../shim/runtime.h")),
    ("runtime.cpp", include_str!("../../shim/runtime.cpp")),
    ("fiber.h", include_str!("../../shim/fiber.h")),
    ("access.h", include_str!("../../shim/access.h")),
    ("copies.h", include_str!("../../shim/copies.h")),
    ("language.h", include_str!("../../shim/language.h")),
    ("vectors.h", include_str!("../../shim/vectors.h")),
    ("numbers.h", include_str!("../../shim/numbers.h")),
    ("ptx.h", include_str!("../../shim/ptx.h")),
    ("threads.h", include_str!("../../shim/threads.h")),
    ("halves.h", include_str!("../../shim/halves.h")),
    ("cuda_fp16.h", include_str!("../../shim/cuda_fp16.h")),
    ("exports.map", include_str!("../../shim/exports.map")),
    ("cuda_bf16.h", include_str!("../../shim/cuda_bf16.h")),
];

/// CUDA headers that a program may include without an include path. Real NVRTC needs a path; only
/// hardware can test that.
const CUDA_HEADERS: &[&str] = &["cuda_fp16.h", "cuda_bf16.h"];

/// Options of every compilation. No contraction: --fmad=false. Aggregates stay whole, so that a
/// float4 is one access; loops do not become memset, which would escape the hooks; no strict
/// aliasing, as in nvcc.
const CODE_FLAGS: &[&str] = &[
    "-O1",
    "-fPIC",
    "-g1",
    // addr2line of binutils 2.40 mistakes the first file of DWARF 5 for the compiled one.
    "-gdwarf-4",
    "-w",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-strict-aliasing",
    "-fno-stack-protector",
    "-fno-tree-sra",
    "-fno-ipa-sra",
    "-fno-tree-loop-distribute-patterns",
    // A loop may leave its array: that is found when it runs.
    "-fno-aggressive-loop-optimizations",
    "-fvisibility=hidden",
    "-fno-diagnostics-show-caret",
    "-fdiagnostics-color=never",
];

/// The hooks of access.h, without those at function entry, and its check of indices.
const HOOK_FLAGS: &[&str] = &[
    "-fsanitize=thread",
    "--param",
    "tsan-instrument-func-entry-exit=0",
    "-fsanitize=bounds",
    "-fno-sanitize-recover=bounds",
];

/// Why there is no library.
#[derive(Debug)]
pub(super) enum Failed {
    /// The program is wrong: the contents of NVRTC's log.
    Program(String),
    /// The machine is at fault.
    Machine(String),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::Machine(format!("simcuda: nvrtcCompileProgram: {error}\n"))
    }
}

fn failed(what: &str, path: &Path, error: &io::Error) -> Failed {
    Failed::Machine(format!(
        "simcuda: nvrtcCompileProgram: cannot {what} {}: {error}; set SIMCUDA_CACHE to a folder that can be written\n",
        path.display()
    ))
}

fn compiler() -> OsString {
    std::env::var_os("CXX")
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| "g++".into())
}

/// The compiler's version: libraries of another one are not used.
fn compiler_version() -> Result<&'static str, Failed> {
    static VERSION: OnceLock<String> = OnceLock::new();
    if let Some(version) = VERSION.get() {
        return Ok(version);
    }
    let output = Command::new(compiler()).arg("--version").output().map_err(|error| {
        Failed::Machine(format!(
            "simcuda: nvrtcCompileProgram: cannot run {}: {error}; kernels are compiled by g++, and CXX can name another\n",
            compiler().display()
        ))
    })?;
    Ok(VERSION.get_or_init(|| String::from_utf8_lossy(&output.stdout).into_owned()))
}

/// Where made libraries are kept.
fn cache_folder() -> PathBuf {
    if let Some(folder) = std::env::var_os("SIMCUDA_CACHE").filter(|folder| !folder.is_empty()) {
        return folder.into();
    }
    let beside =
        own_path().and_then(|path| path.parent().map(|folder| folder.join("simulated-kernels")));
    beside.unwrap_or_else(|| std::env::temp_dir().join("simulated-kernels"))
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

fn has_fma() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        std::arch::is_x86_feature_detected!("fma")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
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
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)
                .map_err(|error| failed("make the folder", folder, &error))?;
        }
        fs::write(&path, text).map_err(|error| failed("write", &path, &error))?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A folder that cannot be removed does no harm.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs g++; returns its standard output or its errors.
fn run(arguments: impl IntoIterator<Item = OsString>) -> Result<String, Failed> {
    // Messages in English for every user: logs are compared.
    let output = Command::new(compiler())
        .args(arguments)
        .env("LC_ALL", "C")
        .output()?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(Failed::Program(
        String::from_utf8_lossy(&output.stderr).into_owned(),
    ))
}

fn words(words: &[&str]) -> impl Iterator<Item = OsString> + use<> {
    words
        .iter()
        .map(OsString::from)
        .collect::<Vec<_>>()
        .into_iter()
}

fn code_flags(options: &Options) -> Vec<OsString> {
    let mut flags: Vec<OsString> = words(CODE_FLAGS).collect();
    flags.push(format!("-std={}", options.standard).into());
    if has_fma() {
        flags.push("-mfma".into());
    }
    flags
}

/// Without these flags a library's bytes would depend on who made it, and where.
fn without_paths(folders: &[&Path]) -> Vec<OsString> {
    let here = std::env::current_dir().unwrap_or_default();
    let all = folders.iter().copied().chain([here.as_path()]);
    all.map(|folder| format!("-ffile-prefix-map={}=.", folder.display()).into())
        .collect()
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

/// What every library depends on besides its program.
fn machine_digest() -> Result<&'static str, Failed> {
    static DIGEST: OnceLock<String> = OnceLock::new();
    let version = compiler_version()?;
    Ok(DIGEST.get_or_init(|| {
        let mut parts: Vec<&str> = SHIM
            .iter()
            .flat_map(|(name, text)| [*name, *text])
            .collect();
        parts.extend(CODE_FLAGS);
        parts.extend([
            version,
            if has_fma() { "fma" } else { "" },
            include_str!("rewrite.rs"),
            include_str!("token.rs"),
        ]);
        digest(&parts)
    }))
}

/// The folder with the shim's files and the compiled runtime.
fn shim_folder(cache: &Path) -> Result<PathBuf, Failed> {
    let folder = cache.join(format!("shim-{}", machine_digest()?));
    if folder.join("runtime.o").exists() {
        return Ok(folder);
    }
    let scratch = Scratch::new(cache)?;
    for (name, text) in SHIM {
        scratch.write(name, text)?;
    }
    for name in CUDA_HEADERS {
        scratch.write(
            &format!("found/{name}"),
            &format!("#pragma once\n#{HEADER_PRAGMA}{name}\n"),
        )?;
    }
    let flags = words(CODE_FLAGS).chain(["-std=c++17".into(), "-c".into()]);
    let runtime = [
        scratch.0.join("runtime.cpp").into(),
        "-o".into(),
        scratch.0.join("runtime.o").into(),
    ];
    let flags = flags.chain(without_paths(&[&scratch.0]));
    run(flags.chain(runtime)).map_err(|error| match error {
        Failed::Program(log) => Failed::Machine(format!(
            "simcuda: the runtime of the shim does not compile:\n{log}"
        )),
        other => other,
    })?;
    // Another process may have been faster: its folder is equivalent.
    if let Err(error) = fs::rename(&scratch.0, &folder)
        && !folder.join("runtime.o").exists()
    {
        return Err(failed("make the folder", &folder, &error));
    }
    Ok(folder)
}

fn preprocess(
    program: &Program,
    options: &Options,
    scratch: &Scratch,
    shim: &Path,
) -> Result<String, Failed> {
    let name = program.name.replace('\\', "\\\\").replace('"', "\\\"");
    let source = scratch.write(
        "program/source.cu",
        &format!("# 1 \"{name}\"\n{}\n", program.source),
    )?;
    for (name, text) in &program.headers {
        let is_inside = Path::new(name)
            .components()
            .all(|part| matches!(part, std::path::Component::Normal(_)));
        if !is_inside {
            return Err(Failed::Program(format!(
                "nvrtc: error: header name \"{name}\" is not a path inside a folder\n"
            )));
        }
        scratch.write(&format!("headers/{name}"), text)?;
    }
    let mut arguments: Vec<OsString> = words(&[
        "-E",
        "-x",
        "c++",
        "-nostdinc",
        "-nostdinc++",
        "-w",
        "-fdiagnostics-color=never",
    ])
    .collect();
    arguments.extend(words(&[
        "-fno-diagnostics-show-caret",
        "-D__CUDACC__=1",
        "-D__CUDACC_RTC__=1",
        "-D__SIMCUDA__=1",
    ]));
    arguments.extend(words(&[
        "-D__CUDACC_VER_MAJOR__=13",
        "-D__CUDACC_VER_MINOR__=0",
    ]));
    arguments.push(format!("-D__CUDA_ARCH__={}0", options.architecture).into());
    if options.suffix == "a" {
        arguments.push(format!("-D__CUDA_ARCH_FEAT_SM{}_ALL", options.architecture).into());
    }
    arguments.push(format!("-std={}", options.standard).into());
    arguments.extend(options.macros.iter().map(OsString::from));
    for folder in [scratch.0.join("headers"), shim.join("found")] {
        arguments.extend(["-I".into(), folder.into()]);
    }
    arguments.extend(
        options
            .include_paths
            .iter()
            .flat_map(|path| ["-I".into(), OsString::from(path)]),
    );
    arguments.extend(
        options
            .pre_includes
            .iter()
            .flat_map(|path| ["-include".into(), OsString::from(path)]),
    );
    arguments.push(source.clone().into());
    // The reader of a log knows the header's name, not the scratch folder.
    let headers = format!("{}/", scratch.0.join("headers").display());
    let mine = source.display().to_string();
    let named = |text: String| text.replace(&headers, "").replace(&mine, &program.name);
    match run(arguments) {
        Ok(text) => Ok(named(text)),
        Err(Failed::Program(log)) => Err(Failed::Program(named(log))),
        Err(other) => Err(other),
    }
}

/// Makes the library of a program, or finds it; with SIMCUDA_PTX, NVIDIA's PTX follows it.
pub(super) fn compile(program: &Program, options: &Options) -> Result<Compiled, Failed> {
    let cache = cache_folder();
    fs::create_dir_all(&cache).map_err(|error| failed("make the folder", &cache, &error))?;
    let mut compiled = compile_for_host(program, options, &cache)?;
    let scratch = Scratch::new(&cache)?;
    if let Some(ptx) = real::ptx(program, options, &cache, &scratch.0, digest) {
        let ptx = ptx.map_err(Failed::Program)?;
        compiled.image = real::joined(compiled.image, &ptx);
    }
    Ok(compiled)
}

fn compile_for_host(
    program: &Program,
    options: &Options,
    cache: &Path,
) -> Result<Compiled, Failed> {
    let shim = shim_folder(cache)?;
    // Without include paths the text determines the program.
    let is_closed = options.include_paths.is_empty()
        && options.pre_includes.is_empty()
        && program.expressions.is_empty();
    let early = if is_closed {
        Some(cache.join(format!("{}.so", key(program, options, None)?)))
    } else {
        None
    };
    if let Some(image) = early.as_ref().and_then(|path| fs::read(path).ok()) {
        return Ok(Compiled {
            image,
            lowered: Default::default(),
        });
    }
    let scratch = Scratch::new(cache)?;
    let text = preprocess(program, options, &scratch, &shim)?;
    let rewritten =
        rewrite::rewrite(&program.name, &text, &program.expressions).map_err(Failed::Program)?;
    let path = match early {
        Some(path) => path,
        None => cache.join(format!(
            "{}.so",
            key(program, options, Some(&rewritten.text))?
        )),
    };
    let image = match fs::read(&path) {
        Ok(image) => image,
        Err(_) => {
            let made = build(&rewritten.text, options, &scratch, &shim)?;
            let image = fs::read(&made).map_err(|error| failed("read", &made, &error))?;
            // The last rename replaces a library by an equal one.
            fs::rename(&made, &path).map_err(|error| failed("write", &path, &error))?;
            image
        }
    };
    Ok(Compiled {
        image,
        lowered: rewritten.lowered,
    })
}

fn key(program: &Program, options: &Options, rewritten: Option<&str>) -> Result<String, Failed> {
    let options = format!("{options:?}");
    let mut parts = vec![machine_digest()?, options.as_str(), program.name.as_str()];
    match rewritten {
        Some(text) => parts.push(text),
        None => {
            parts.push(&program.source);
            parts.extend(
                program
                    .headers
                    .iter()
                    .flat_map(|(name, text)| [name.as_str(), text.as_str()]),
            );
        }
    }
    Ok(digest(&parts))
}

fn build(text: &str, options: &Options, scratch: &Scratch, shim: &Path) -> Result<PathBuf, Failed> {
    let architecture = format!(
        "extern \"C\" __attribute__((visibility(\"default\"))) const unsigned simcuda_architecture;\n\
         extern \"C\" const unsigned simcuda_architecture = {};\n",
        options.architecture
    );
    let source = scratch.write("program.cpp", &format!("{text}{architecture}"))?;
    let (object, library) = (scratch.0.join("program.o"), scratch.0.join("program.so"));
    let mut arguments = code_flags(options);
    arguments.extend(words(HOOK_FLAGS));
    arguments.extend(words(&["-nostdinc", "-nostdinc++", "-c"]));
    if options
        .macros
        .iter()
        .any(|option| option == "-DNDEBUG" || option.starts_with("-DNDEBUG="))
    {
        arguments.push("-DNDEBUG".into());
    }
    arguments.extend(without_paths(&[&scratch.0, shim]));
    arguments.extend([
        "-I".into(),
        shim.into(),
        source.clone().into(),
        "-o".into(),
        object.clone().into(),
    ]);
    let (mine, shim_name) = (source.display().to_string(), format!("{}/", shim.display()));
    run(arguments).map_err(|error| match error {
        Failed::Program(log) => Failed::Program(
            log.replace(&mine, "kernel table")
                .replace(&shim_name, "shim/"),
        ),
        other => other,
    })?;
    let link: [OsString; 9] = [
        "-shared".into(),
        "-Wl,--as-needed".into(),
        "-Wl,-z,defs".into(),
        format!(
            "-Wl,--version-script={}",
            shim.join("exports.map").display()
        )
        .into(),
        object.into(),
        shim.join("runtime.o").into(),
        "-lm".into(),
        "-o".into(),
        library.clone().into(),
    ];
    run(link)?;
    Ok(library)
}
