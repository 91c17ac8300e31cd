//! Machines built of empty files under the temporary folder.

use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicUsize, Ordering};

use std::time::{Duration, Instant};

use super::*;

/// A file system root of a test's own, removed at the end.
struct Machine {
    root: PathBuf,
}

impl Machine {
    fn new() -> Machine {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let root =
            std::env::temp_dir().join(format!("ddp-discover-{}-{count}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        Machine { root }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    fn file(&self, path: &str, contents: &[u8]) -> PathBuf {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, contents).unwrap();
        path
    }

    /// As much of a library as a search reads.
    fn library(&self, path: &str) -> PathBuf {
        self.file(
            path,
            &elf(if cfg!(target_arch = "aarch64") {
                183
            } else {
                62
            }),
        )
    }

    fn look(&self, variables: &[(&str, &Path)]) -> Discovery {
        self.look_with_driver(variables, self.path("absent/libcuda.so.1").into())
    }

    fn look_with_driver(&self, variables: &[(&str, &Path)], driver: OsString) -> Discovery {
        let variable = |name: &str| {
            variables
                .iter()
                .find(|(known, _)| *known == name)
                .map(|(_, path)| path.into())
        };
        Discovery::look(SearchEnvironment::reading(
            variable,
            &self.root,
            vec![driver],
        ))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // What cannot be removed stays: a test must not fail on its way out.
        let _ = fs::remove_dir_all(&self.root);
    }
}

fn elf(machine: u16) -> Vec<u8> {
    let mut header = vec![0; 64];
    header[..4].copy_from_slice(b"\x7fELF");
    header[18..20].copy_from_slice(&machine.to_le_bytes());
    header
}

fn parts(discovery: &Discovery) -> [&CudaLibrary; 4] {
    [
        &discovery.driver,
        &discovery.cublaslt,
        &discovery.nvrtc,
        &discovery.nccl,
    ]
}

#[test]
fn a_versioned_nccl_is_found_without_a_link() {
    let machine = Machine::new();
    let path = machine.library("usr/lib/x86_64-linux-gnu/libnccl.so.2.27.3");
    let nccl = machine.look(&[]).nccl;
    assert_eq!(
        (&nccl.found, nccl.version.as_deref()),
        (&Some(path.clone()), Some("2.27.3"))
    );
    assert!(nccl.is_sound());
    // With the links that packages make, the soname is the one to load, and the version is the real
    // file's.
    let folder = path.parent().unwrap();
    symlink("libnccl.so.2.27.3", folder.join("libnccl.so.2")).unwrap();
    symlink("libnccl.so.2", folder.join("libnccl.so")).unwrap();
    symlink("libnccl.so.3.0.0", folder.join("libnccl.so.3")).unwrap(); // dangles
    let nccl = machine.look(&[]).nccl;
    assert_eq!(
        (nccl.found, nccl.version.as_deref()),
        (Some(folder.join("libnccl.so.2")), Some("2.27.3"))
    );
}

#[test]
fn a_bare_soname_of_a_wheel_is_found_with_the_version_it_has() {
    let machine = Machine::new();
    let venv = machine.path("venv");
    let path = machine.library("venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2");
    let nccl = machine.look(&[("VIRTUAL_ENV", &venv)]).nccl;
    assert_eq!(
        (nccl.found, nccl.version.as_deref()),
        (Some(path), Some("2"))
    );
    assert!(
        !machine.look(&[]).nccl.is_sound(),
        "found in a Python environment that nothing names"
    );
}

#[test]
fn the_python_on_the_path_is_searched_without_variables() {
    let machine = Machine::new();
    machine.file("opt/conda/bin/python3", b"");
    let path =
        machine.library("opt/conda/lib/python3.11/site-packages/nvidia/cu13/lib/libcublasLt.so.13");
    let discovery = machine.look(&[("PATH", &machine.path("opt/conda/bin"))]);
    assert_eq!(discovery.cublaslt.found, Some(path));
}

#[test]
fn the_newest_toolkit_wins_by_numbers_not_letters() {
    let machine = Machine::new();
    for toolkit in ["cuda-12.9", "cuda-12.10", "cuda-9.2"] {
        machine.library(&format!("usr/local/{toolkit}/lib64/libnvrtc.so.12"));
    }
    assert_eq!(
        machine.look(&[]).nvrtc.found,
        Some(machine.path("usr/local/cuda-12.10/lib64/libnvrtc.so.12"))
    );
    let newest =
        machine.library("usr/local/cuda-13.0/targets/x86_64-linux/lib/libnvrtc.so.13.0.88");
    machine.library("usr/local/cuda-13.0/targets/x86_64-linux/lib/libnvrtc-builtins.so.13.9");
    let nvrtc = machine.look(&[]).nvrtc;
    assert_eq!(
        (nvrtc.found, nvrtc.version.as_deref()),
        (Some(newest), Some("13.0.88"))
    );
    // What the user names goes before what is newest, and LD_LIBRARY_PATH before CUDA_HOME.
    let older = machine.path("usr/local/cuda-12.9");
    let found = machine.look(&[("CUDA_HOME", &older)]).nvrtc.found;
    assert_eq!(found, Some(older.join("lib64/libnvrtc.so.12")));
    let oldest = machine.path("usr/local/cuda-9.2/lib64");
    let found = machine
        .look(&[("CUDA_HOME", &older), ("LD_LIBRARY_PATH", &oldest)])
        .nvrtc
        .found;
    assert_eq!(found, Some(oldest.join("libnvrtc.so.12")));
}

#[test]
fn folders_of_either_processor_are_searched_and_libraries_of_the_other_one_skipped() {
    let (ours, others) = if cfg!(target_arch = "aarch64") {
        (183, 62)
    } else {
        (62, 183)
    };
    // As distributions, toolkits and conda name them for x86-64 and for servers with ARM.
    for (folders, here) in [
        (
            ["usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu"],
            "",
        ),
        (
            [
                "cuda/targets/x86_64-linux/lib",
                "cuda/targets/sbsa-linux/lib",
            ],
            "cuda",
        ),
        (
            ["env/targets/x86_64-linux/lib", "env/targets/sbsa-linux/lib"],
            "env",
        ),
    ] {
        for first in [0, 1] {
            let machine = Machine::new();
            let of = |folder: usize| format!("{}/libnvrtc.so.13", folders[folder]);
            let found = machine.file(&of(first), &elf(ours));
            machine.file(&of(1 - first), &elf(others));
            let (toolkit, prefix) = (machine.path("cuda"), machine.path("env"));
            let nvrtc = match here {
                "cuda" => machine.look(&[("CUDA_HOME", &toolkit)]).nvrtc,
                "env" => machine.look(&[("CONDA_PREFIX", &prefix)]).nvrtc,
                _ => machine.look(&[]).nvrtc,
            };
            assert!(nvrtc.is_sound() && nvrtc.found == Some(found), "{nvrtc}");
        }
    }
}

#[test]
fn stub_libraries_for_linking_are_skipped() {
    let machine = Machine::new();
    machine.library("cuda/lib64/stubs/libcublasLt.so");
    let discovery = machine.look(&[("LD_LIBRARY_PATH", &machine.path("cuda/lib64/stubs"))]);
    assert_eq!(discovery.cublaslt.found, None);
}

#[test]
fn an_empty_machine_gets_every_advice() {
    let discovery = Machine::new().look(&[]);
    for (part, word) in parts(&discovery).into_iter().zip([
        "libcuda.so.1",
        "nvidia-cublas",
        "nvidia-cuda-nvrtc",
        "nvidia-nccl-cu13",
    ]) {
        let advice = part.advice.as_deref().unwrap();
        assert!(
            part.found.is_none() && advice.contains("needed for") && advice.contains(word),
            "{part}"
        );
    }
    assert!(discovery.gpus.is_empty() && discovery.driver_version.is_none());
    let table = discovery.to_string();
    assert_eq!(table.matches("not found: ").count(), 4, "{table}");
    let last = table.lines().last().unwrap();
    assert!(
        last.starts_with("no CUDA device: ") && last.contains("--gpus all"),
        "{table}"
    );
}

#[test]
fn a_text_file_named_like_the_driver_is_reported_with_the_loaders_message() {
    let machine = Machine::new();
    let text = machine.file("bad/libcuda.so.1", &b"this is no library\n".repeat(100));
    let discovery = machine.look_with_driver(&[], text.clone().into());
    let advice = discovery.driver.advice.unwrap();
    assert!(advice.starts_with("broken: the loader says"), "{advice}");
    if cfg!(target_env = "gnu") {
        assert!(advice.contains("invalid ELF header"), "{advice}");
        assert_eq!(discovery.driver.found, Some(text));
    }
    let why = discovery.why_no_gpu.unwrap();
    assert!(
        why.starts_with("the CUDA driver's library is broken: the loader says"),
        "{why}"
    );
}

#[test]
#[cfg(target_env = "gnu")]
fn a_library_other_than_the_driver_is_reported_by_missing_symbols() {
    let discovery = Machine::new().look_with_driver(&[], "libc.so.6".into());
    let (advice, why) = (
        discovery.driver.advice.unwrap(),
        discovery.why_no_gpu.unwrap(),
    );
    assert!(
        advice.contains("lacks cuInit") && why.contains("lacks cuInit"),
        "{advice}\n{why}"
    );
    assert!(discovery.gpus.is_empty() && discovery.driver_version.is_none());
}

#[test]
fn broken_libraries_are_skipped_if_another_works_else_named() {
    let machine = Machine::new();
    let text = machine.file(
        "bad/libnccl.so.2",
        b"INPUT(libnccl.so.2.27.3) and more text",
    );
    let foreign = machine.file("foreign/libcublasLt.so.13", &elf(8));
    machine.file("foreign/libnvrtc.so.13", b"");
    let path = std::env::join_paths([machine.path("bad"), machine.path("foreign")]).unwrap();
    let discovery = machine.look(&[("LD_LIBRARY_PATH", Path::new(&path))]);
    for (part, file, word) in [
        (&discovery.nccl, text, "no ELF header"),
        (&discovery.cublaslt, foreign, "another processor"),
        (
            &discovery.nvrtc,
            machine.path("foreign/libnvrtc.so.13"),
            "too short",
        ),
    ] {
        let advice = part.advice.as_deref().unwrap();
        assert!(
            part.found == Some(file) && advice.starts_with("broken: ") && advice.contains(word),
            "{part}"
        );
        assert!(!part.is_sound());
    }
    let sound = machine.library("usr/lib64/libnccl.so.2");
    assert_eq!(
        machine
            .look(&[("LD_LIBRARY_PATH", Path::new(&path))])
            .nccl
            .found,
        Some(sound)
    );
}

#[test]
fn versions_that_do_not_fit_the_driver_make_room_for_the_next_folder() {
    let machine = Machine::new();
    let files = [
        "a/libcublasLt.so.13.1.0",
        "b/libcublasLt.so.11",
        "c/libcublasLt.so.12.8.4",
        "d/libcublasLt.so.12",
    ]
    .map(|path| machine.library(path));
    let folders: Vec<PathBuf> = ["a", "b", "c", "d"].map(|it| machine.path(it)).to_vec();
    let found = library(CUBLASLT, &folders, Some((12, 4)));
    assert!(found.is_sound() && found.found.as_ref() == Some(&files[2]));
    let skipped: Vec<Option<&str>> = found
        .candidates
        .iter()
        .map(|file| file.skipped.as_deref())
        .collect();
    assert_eq!(
        skipped,
        [
            Some("too new: the driver supports CUDA 12.4 at most"),
            Some("too old: expected 12 or later"),
            None,
            None
        ]
    );
    assert_eq!(
        library(CUBLASLT, &folders, Some((13, 0))).found.as_ref(),
        Some(&files[0])
    );
    // Where none fits, the first is named with the reason.
    let advice = library(CUBLASLT, &folders[..1], Some((12, 4)))
        .advice
        .unwrap();
    assert!(
        advice.starts_with("too new: the driver supports CUDA 12.4 at most. "),
        "{advice}"
    );
    // NCCL's versions are its own: the major version alone may be new enough.
    for (file, fits) in [("libnccl.so.2.17.1", false), ("libnccl.so.2", true)] {
        let folder = machine.library(&format!("{file}-in/{file}"));
        let folder = folder.parent().unwrap().to_owned();
        assert_eq!(
            library(NCCL, &[folder], Some((12, 4))).is_sound(),
            fits,
            "{file}"
        );
    }
}

/// Writes `script` as an executable called python3 into `folder`.
fn python(machine: &Machine, folder: &str, script: &str) -> PathBuf {
    let path = machine.file(&format!("{folder}/python3"), b"");
    ddp_testing::write_executable(&path, script.as_bytes());
    path
}

#[test]
fn a_python_behind_a_wrapper_is_asked_for_its_prefix() {
    let machine = Machine::new();
    let venv = machine.path("venv");
    let file = machine.library("venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2");
    python(
        &machine,
        "shims",
        &format!("#!/bin/sh\necho {}\n", venv.display()),
    );
    let path = machine.path("shims");
    let variable = |name: &str| (name == "PATH").then(|| path.clone().into());
    let mut environment = SearchEnvironment::reading(variable, &machine.root, Vec::new());
    let find =
        |environment: &SearchEnvironment| library(NCCL, &environment.library_folders(), None).found;
    assert_eq!(find(&environment), None);
    assert!(environment.ask_python());
    assert_eq!(find(&environment), Some(file));
    assert!(!environment.ask_python(), "it is asked once");
}

#[test]
fn the_environment_that_the_program_is_installed_in_comes_first() {
    let machine = Machine::new();
    let library_of = |venv: &str| {
        let path = "lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2";
        machine.library(&format!("{venv}/{path}"))
    };
    let (own, active) = (library_of("own"), library_of("active"));
    let found_by = |program: &str| {
        let variable = |name: &str| (name == "VIRTUAL_ENV").then(|| machine.path("active").into());
        let environment = SearchEnvironment::reading(variable, &machine.root, Vec::new());
        let environment = environment.of_program(Some(&machine.path(program)));
        library(NCCL, &environment.library_folders(), None).found
    };
    assert_eq!(found_by("own/bin/ddp-train"), Some(own));
    assert_eq!(found_by("own/target/ddp-train"), Some(active));
}

#[test]
fn a_python_that_hangs_or_says_nothing_is_given_up() {
    let machine = Machine::new();
    let limit = Duration::from_millis(100);
    let hung = python(&machine, "hung", "#!/bin/sh\nexec sleep 3600\n");
    let began = Instant::now();
    assert_eq!(search::prefix_of(&hung, limit), None);
    assert!(began.elapsed() < Duration::from_secs(60));
    let silent = python(&machine, "silent", "#!/bin/sh\nexit 1\n");
    assert_eq!(search::prefix_of(&silent, Duration::from_secs(30)), None);
}

#[test]
fn variables_that_are_no_utf8_and_names_with_zeroes_do_no_harm() {
    let machine = Machine::new();
    let odd = PathBuf::from(OsString::from_vec(b"\xff\xfe:/\x80".to_vec()));
    let names = [
        "LD_LIBRARY_PATH",
        "CUDA_HOME",
        "VIRTUAL_ENV",
        "HOME",
        "PATH",
        "CUDA_VISIBLE_DEVICES",
    ];
    let variables: Vec<(&str, &Path)> = names.iter().map(|name| (*name, odd.as_path())).collect();
    for driver in [b"\xff\xfe".to_vec(), b"lib\0cuda".to_vec(), Vec::new()] {
        let discovery = machine.look_with_driver(&variables, OsString::from_vec(driver));
        assert!(
            discovery.gpus.is_empty() && discovery.why_no_gpu.is_some(),
            "{discovery}"
        );
    }
    let odd_folder = machine
        .path("odd")
        .join(OsString::from_vec(b"\xff".to_vec()));
    fs::create_dir_all(&odd_folder).unwrap();
    fs::write(
        odd_folder.join("libnccl.so.2"),
        elf(if cfg!(target_arch = "aarch64") {
            183
        } else {
            62
        }),
    )
    .unwrap();
    fs::write(
        odd_folder.join(OsString::from_vec(b"libnccl.so.\xff".to_vec())),
        b"",
    )
    .unwrap();
    let nccl = machine.look(&[("LD_LIBRARY_PATH", &odd_folder)]).nccl;
    assert_eq!(nccl.found, Some(odd_folder.join("libnccl.so.2")));
}

#[test]
fn this_machine_is_described_without_a_panic_and_once() {
    let discovery = discover();
    assert!(std::ptr::eq(discovery, discover()));
    assert_eq!(discovery.gpus.is_empty(), discovery.why_no_gpu.is_some());
    if discovery.gpus.is_empty() {
        ddp_testing::skip("no CUDA device, whose fields are to be seen");
    }
    for (index, gpu) in discovery.gpus.iter().enumerate() {
        assert_eq!(gpu.index, index);
        assert!(
            gpu.memory_bytes > 0 && gpu.compute_capability.0 > 0 && gpu.uuid.len() == 40,
            "{gpu:?}"
        );
    }
}

#[test]
fn the_table_shows_what_a_person_needs() {
    let library = |what, path: &str| CudaLibrary {
        what,
        found: Some(path.into()),
        version: None,
        advice: None,
        candidates: Vec::new(),
    };
    let gpu = FoundGpu {
        index: 0,
        name: "NVIDIA H200".to_string(),
        memory_bytes: 150_110_011_392,
        compute_capability: (9, 0),
        uuid: "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f".to_string(),
    };
    let discovery = Discovery {
        driver: CudaLibrary {
            version: Some("580.65.06".to_string()),
            ..library("CUDA driver", "/lib/libcuda.so.1")
        },
        cublaslt: library("cuBLASLt", "/lib/libcublasLt.so.13"),
        nvrtc: library("NVRTC", "/lib/libnvrtc.so.13"),
        nccl: CudaLibrary {
            found: None,
            advice: Some("get it".to_string()),
            ..library("NCCL", "")
        },
        driver_version: Some((13, 0)),
        gpus: vec![gpu.clone(), FoundGpu { index: 1, ..gpu }],
        why_no_gpu: None,
    };
    let expected = "\
CUDA driver    /lib/libcuda.so.1 (580.65.06)
cuBLASLt       /lib/libcublasLt.so.13
NVRTC          /lib/libnvrtc.so.13
NCCL           not found: get it
driver's CUDA  13.0 at most
cuda:0 NVIDIA H200, 139.8 GiB, sm_90, GPU-00010203-0405-0607-0809-0a0b0c0d0e0f
cuda:1 NVIDIA H200, 139.8 GiB, sm_90, GPU-00010203-0405-0607-0809-0a0b0c0d0e0f";
    assert_eq!(discovery.to_string(), expected);
}
