//! Kernels compiled at first use and kept on disk: only complete files are used, and errors say how
//! to fix them. Each case runs in a separate process, since a process compiles a kernel once.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use ddp_kernels::device::{CudaLibrary, discover};
use ddp_kernels::ops::{self, Activation};
use ddp_kernels::{DType, Device, Tensor};

use crate::{devices, skip};

/// Set for the processes that `child` starts; says which operation they try.
const CHILD: &str = "DDP_TEST_COMPILES";

/// What a child does. Its last line is `result: …`, or the error.
#[test]
#[ignore = "a part of tests below, as a process"]
fn in_a_process_of_its_own() {
    let what = std::env::var_os(CHILD).expect("`child` says what to try");
    let result = Tensor::ones(&[2, 2], DType::F32, Device::Cuda(0)).and_then(|x| {
        let result = if what == "relu" {
            ops::activate(&x, Activation::Relu)?
        } else {
            ops::addmm(&x, &x, &x, 1.0, 1.0)?
        };
        result.to_vec::<f32>()
    });
    match result {
        Ok(result) => println!("\nresult: {result:?}"),
        Err(error) => println!("\nerror: {error}"),
    }
}

/// A process that tries one operation on the first device.
fn child(what: &str, change: impl FnOnce(&mut Command) -> &mut Command) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "--include-ignored", "--nocapture"])
        .arg("compile::in_a_process_of_its_own")
        .env(CHILD, what);
    change(&mut command)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// What it came to: the line `result: …` or all from `error: …`.
#[track_caller]
fn outcome(child: Child) -> String {
    let Output {
        status,
        stdout,
        stderr,
    } = child.wait_with_output().unwrap();
    let (stdout, stderr) = (
        String::from_utf8_lossy(&stdout),
        String::from_utf8_lossy(&stderr),
    );
    assert!(status.success(), "{status}\n{stdout}\n{stderr}");
    let start = stdout
        .find("\nresult: ")
        .or(stdout.find("\nerror: "))
        .unwrap_or_else(|| panic!("{stdout}\n{stderr}"));
    stdout[start + 1..].to_string()
}

const RESULT: &str = "result: [1.0, 1.0, 1.0, 1.0]";

#[track_caller]
fn assert_result(child: Child) {
    let outcome = outcome(child);
    assert!(outcome.starts_with(RESULT), "{outcome}");
}

/// A folder of a test's own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "ddp-compile-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    fn files(&self) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = fs::read_dir(&self.0)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        files.sort();
        files
    }

    /// The one file there that was compiled of activation.cu.
    #[track_caller]
    fn relu(&self) -> PathBuf {
        let files = self.files();
        assert!(
            files
                .iter()
                .all(|file| file.extension().is_some_and(|end| end == "kernels")),
            "{files:?}"
        );
        let mut relu = files.iter().filter(|file| {
            file.file_name()
                .unwrap()
                .to_string_lossy()
                .starts_with("activation-")
        });
        let only = relu.next().expect("activation.cu was compiled").clone();
        assert!(relu.next().is_none(), "{files:?}");
        only
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn relu_with_cache(folder: &Path) -> Child {
    child("relu", |command| command.env("DDP_KERNEL_CACHE", folder))
}

#[test]
fn compiled_kernels_are_cached_and_reused() {
    if devices().is_empty() {
        return;
    }
    let folder = Folder::new();
    assert_result(relu_with_cache(&folder.0));
    let file = folder.relu();
    let (before, modified) = (
        fs::read(&file).unwrap(),
        fs::metadata(&file).unwrap().modified().unwrap(),
    );
    assert_result(relu_with_cache(&folder.0));
    assert!(fs::read(folder.relu()).unwrap() == before);
    assert_eq!(
        fs::metadata(&file).unwrap().modified().unwrap(),
        modified,
        "it was not written again"
    );
}

#[test]
fn a_torn_changed_or_foreign_cache_file_is_recompiled() {
    if devices().is_empty() {
        return;
    }
    let folder = Folder::new();
    assert_result(relu_with_cache(&folder.0));
    let (file, whole) = (folder.relu(), fs::read(folder.relu()).unwrap());
    let mut changed = whole.clone();
    changed[whole.len() / 2] ^= 1;
    let contents = [
        whole[..whole.len() / 2].to_vec(),
        changed,
        Vec::new(),
        b"written by somebody else".to_vec(),
    ];
    for (number, damaged) in contents.into_iter().enumerate() {
        fs::write(&file, damaged).unwrap();
        assert_result(relu_with_cache(&folder.0));
        assert_eq!(
            fs::metadata(folder.relu()).unwrap().len(),
            whole.len() as u64,
            "number {number} was not replaced"
        );
    }
}

#[test]
fn processes_that_compile_at_once_all_succeed_and_leave_one_file_a_source() {
    if devices().is_empty() {
        return;
    }
    let folder = Folder::new();
    let children: Vec<Child> = (0..4).map(|_| relu_with_cache(&folder.0)).collect();
    children.into_iter().for_each(assert_result);
    folder.relu();
}

#[test]
fn the_cache_can_be_off_or_unwritable() {
    if devices().is_empty() {
        return;
    }
    let folder = Folder::new();
    assert_result(child("relu", |command| {
        command
            .env("DDP_KERNEL_CACHE", "off")
            .env("XDG_CACHE_HOME", &folder.0)
    }));
    assert_eq!(folder.files(), Vec::<PathBuf>::new());
    let file = folder.0.join("file");
    fs::write(&file, "").unwrap();
    assert_result(relu_with_cache(&file.join("below")));
}

/// A process that sees these libraries of CUDA and no others.
fn with_libraries_alone(what: &str, libraries: &[(&str, &CudaLibrary)], folder: &Folder) -> Child {
    for (name, library) in libraries {
        let path = library
            .found
            .clone()
            .expect("there is a device, so all that it needs was found");
        std::os::unix::fs::symlink(path.canonicalize().unwrap_or(path), folder.0.join(name))
            .unwrap();
    }
    child(what, |command| {
        for variable in ["CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"] {
            command.env_remove(variable);
        }
        // No Python but the system's; the simulator's compiler is there too.
        command
            .env("PATH", "/usr/bin:/bin")
            .env("LD_LIBRARY_PATH", &folder.0)
            .env("HOME", &folder.0)
            .env("DDP_KERNEL_CACHE", "off")
    })
}

#[test]
fn a_missing_library_is_named_with_help() {
    if devices().is_empty() {
        return;
    }
    let found = discover();
    let (driver, nvrtc) = (
        ("libcuda.so.1", &found.driver),
        ("libnvrtc.so.13", &found.nvrtc),
    );
    for (what, libraries, missing, wheel) in [
        ("relu", vec![driver], "NVRTC", "nvidia-cuda-nvrtc"),
        ("addmm", vec![driver, nvrtc], "cuBLASLt", "nvidia-cublas"),
    ] {
        let folder = Folder::new();
        let outcome = outcome(with_libraries_alone(what, &libraries, &folder));
        if outcome.starts_with("result") {
            skip(&format!("{missing} is installed for the whole system"));
            continue;
        }
        let said = outcome.contains(&format!("{missing} was not found; help: "))
            && outcome.contains(wheel);
        assert!(said && outcome.contains("LD_LIBRARY_PATH"), "{outcome}");
    }
}

/// Below sm_80 kernels round to bf16 in software, and attention in bf16 has no tensor cores.
#[test]
fn kernels_for_older_gpus_round_alike() {
    let is_simulated = |name: &str| name.contains("Simulated");
    if !discover().gpus.iter().all(|gpu| is_simulated(&gpu.name)) || devices().is_empty() {
        return skip("no simulated GPU");
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "--include-ignored",
            "attention::both_directions_are_within_rounding_of_the_textbook",
        ])
        .args(["elementwise::every_sum_that_is_rounded_to_bf16_goes_to_the_nearest"])
        .args(["compile::all_gpus_have_capability_7_5"])
        .env("SIMCUDA_CAPABILITY", "7.5")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("3 passed"),
        "{said}"
    );
}

#[test]
#[ignore = "a part of kernels_for_older_gpus_round_alike"]
fn all_gpus_have_capability_7_5() {
    let gpus = &discover().gpus;
    assert!(!gpus.is_empty());
    assert!(gpus.iter().all(|gpu| gpu.compute_capability == (7, 5)));
}
