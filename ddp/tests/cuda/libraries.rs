//! CUDA's libraries where the first files found cannot be used: copies of the simulator's, renamed
//! or changed. A program takes the next one, and `doctor` says why it skipped the others.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::support::job::{Folder, QUICK, Running};
use crate::{gpus_of_jobs, is_simulated, simulated_gpus_of_jobs};

/// `library` without one function.
fn without(library: &[u8], function: &str) -> Vec<u8> {
    let mut bytes = library.to_vec();
    let (name, mut from) = (format!("\0{function}\0"), 0);
    while let Some(at) = bytes[from..]
        .windows(name.len())
        .position(|it| it == name.as_bytes())
    {
        from += at + name.len() - 1;
        bytes[from - 1] = b'_';
    }
    assert!(from > 0, "{function} is there");
    bytes
}

#[test]
fn libraries_that_cannot_be_used_make_room_for_the_next_and_doctor_says_why() {
    let Some(_gpu) = simulated_gpus_of_jobs(1) else {
        return;
    };
    let discovery = ddp_kernels::device::discover();
    let found = discovery.cublaslt.found.clone();
    let simulator = std::fs::read(found.expect("a GPU has it")).unwrap();
    let folder = Folder::new("libraries");
    let mut path: Vec<PathBuf> = Vec::new();
    let mut cases: Vec<(PathBuf, &str)> = Vec::new();
    let mut add = |name: &str, bytes: &[u8], why: &'static str| {
        let place = folder.path().join(format!("place-{}", path.len()));
        std::fs::create_dir(&place).unwrap();
        std::fs::write(place.join(name), bytes).unwrap();
        cases.push((place.join(name), why));
        path.push(place);
    };
    let newer = "too new: the driver supports CUDA 13.0 at most";
    let (lt, nvrtc) = ("libcublasLt.so.13", "libnvrtc.so.13");
    add("libcublasLt.so.14", &simulator, newer);
    add("libnvrtc.so.14", &simulator, newer);
    add(
        "libcublasLt.so.11",
        &simulator,
        "too old: expected 12 or later",
    );
    add(
        "libnccl.so.2.9",
        &simulator,
        "too old: expected 2.18 or later",
    );
    add(lt, b"#!/bin/sh\n", "broken: ");
    for (name, what) in [
        (lt, "cuBLASLt cannot be loaded: "),
        (nvrtc, "NVRTC cannot be loaded: "),
    ] {
        add(name, &simulator[..512], what);
    }
    let function = "cublasLtMatmul";
    add(
        lt,
        &without(&simulator, function),
        "cuBLASLt lacks cublasLtMatmul; help: ",
    );
    add(
        nvrtc,
        &without(&simulator, "nvrtcVersion"),
        "NVRTC lacks nvrtcVersion; help: ",
    );
    // A second machine beside the driver's, where no context is current.
    add(lt, &simulator, "cublasLtCreate failed: ");

    let others = std::env::var_os("LD_LIBRARY_PATH").unwrap();
    path.extend(std::env::split_paths(&others));
    let path = std::env::join_paths(path).unwrap().into_string().unwrap();
    let words = QUICK.replace("--log-every 1", "--device cuda --log-every 8");
    let run = |words: &str| {
        folder
            .alone(words)
            .on_gpus()
            .env("LD_LIBRARY_PATH", &path)
            .run()
    };
    run(&words).assert_well();

    let doctor = run("doctor --quick --json");
    let lines: Vec<serde_json::Value> = doctor
        .stdout
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect();
    let said = |wanted: &str| {
        lines.iter().any(|line| {
            line["text"]
                .as_str()
                .is_some_and(|text| text.contains(wanted))
        })
    };
    let shown = |file: &Path| file.display().to_string();
    for (file, why) in cases {
        let text = lines.iter().filter_map(|line| line["text"].as_str());
        let mut of_file = text
            .flat_map(str::lines)
            .filter(|line| line.contains(&shown(&file)));
        let line = of_file
            .next()
            .unwrap_or_else(|| panic!("{}: {doctor}", shown(&file)));
        assert!(
            line.starts_with("skipped ") && line.contains(why),
            "{line}\n{why}"
        );
    }
    for (what, library) in [
        ("cuBLASLt", &discovery.cublaslt),
        ("NVRTC", &discovery.nvrtc),
    ] {
        let used = library.found.as_ref().expect("a GPU has it");
        assert!(said(&format!("{what}: {}", shown(used))), "{doctor}");
    }
}

#[test]
fn a_run_with_the_same_bits_warns_when_it_resumes_with_another_cublaslt() {
    let Some(_gpu) = simulated_gpus_of_jobs(1) else {
        return;
    };
    let folder = Folder::new("versions");
    let words = "--data glyphs,rows=256,held-out=0 --hidden 16 --batch-size 64 --threads 1 --out OUT \
                 --schedule constant --warmup-steps 0 --device cuda --same-bits 4 --resume auto --steps";
    let warning = "not those of the checkpoint: cublaslt 13.1.0 (was 13.0.0)";
    for (steps, version, warnings) in [(4, "130000", 0), (8, "130000", 0), (12, "130100", 1)] {
        let job = folder.alone(&format!("{words} {steps}")).on_gpus();
        let ended = job.env("SIMCUDA_CUBLASLT", version).run();
        ended.assert_well();
        assert_eq!(ended.stderr.matches(warning).count(), warnings, "{ended}");
        assert_eq!(
            ended.stderr.matches("not promised").count(),
            warnings,
            "{ended}"
        );
    }
}

/// What `python3` on PATH may be: a script or a chain of links whose places say nothing of the
/// environment. Only the program's own answer does.
#[test]
fn an_environment_that_only_its_python_knows_is_searched() {
    let Some(_gpu) = simulated_gpus_of_jobs(1) else {
        return;
    };
    let discovery = ddp_kernels::device::discover();
    let folder = Folder::new("pythons");
    let at = |path: &str| folder.path().join(path);
    // NCCL is in the environment and not beside the other libraries.
    let nccl = discovery.nccl.found.as_ref().expect("the simulator has it");
    let inside = "venv/lib/python3.12/site-packages/nvidia/nccl/lib";
    for folder in [inside, "others", "bin", "links", "far/bin"] {
        std::fs::create_dir_all(at(folder)).unwrap();
    }
    symlink(nccl, at(inside).join("libnccl.so.2")).unwrap();
    for entry in std::fs::read_dir(nccl.parent().unwrap()).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if name.contains(".so") && !name.starts_with("libnccl") {
            symlink(entry.path(), at("others").join(name)).unwrap();
        }
    }
    let says = |path: &str, prefix: &str| {
        let script = format!("#!/bin/sh\necho '{prefix}'\n");
        ddp_testing::write_executable(&at(path), script.as_bytes());
    };
    let venv = at("venv").display().to_string();
    let others = at("others").display().to_string();
    let path = format!("{}:{}", at("bin").display(), std::env::var("PATH").unwrap());
    let is_found = || {
        let job = folder.alone("doctor --quick --json").on_gpus();
        let job = job.env("LD_LIBRARY_PATH", &others).env("PATH", &path);
        let ended = job.run();
        assert!(ended.stdout.contains("NCCL"), "{ended}");
        ended.stdout.contains(&format!("NCCL: {venv}/lib/"))
    };
    says("bin/python3", "");
    assert!(!is_found(), "it is found without Python's answer");
    says("bin/python3", &venv);
    assert!(is_found(), "a wrapper");
    std::fs::remove_file(at("bin/python3")).unwrap();
    says("far/bin/python3.12", &venv);
    symlink(at("far/bin/python3.12"), at("links/python")).unwrap();
    symlink(at("links/python"), at("bin/python3")).unwrap();
    assert!(is_found(), "a chain of links");
}

/// As ranks of a host, two jobs need the same files at the same time.
#[test]
fn processes_of_a_host_compile_each_file_once() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    let folder = Folder::new("once");
    let kernels = folder.path().join("kernels").display().to_string();
    let jobs = [1, 2].map(|out| {
        let words = format!(
            "--data glyphs,rows=64,held-out=8 --hidden 8 --steps 1 --device cuda --out {out} --log-level debug"
        );
        let job = folder.alone(&words).on_gpus();
        let job = job.env("DDP_KERNEL_CACHE", &kernels);
        // Simulated GPUs compile as slowly as real ones.
        job.env("SIMCUDA_CACHE", &format!("{kernels}-of-simulator-{out}")).start()
    });
    let mut files = Vec::new();
    for ended in jobs.map(Running::wait) {
        ended.assert_well();
        let lines = ended.stderr.lines();
        let of_line = |line: &str| {
            Some(
                line.split_once("compiling ")?
                    .1
                    .split_once(", which")?
                    .0
                    .to_string(),
            )
        };
        files.extend(lines.filter_map(of_line));
    }
    assert!(files.contains(&"adamw.cu".into()), "{files:?}");
    let all = files.len();
    files.sort();
    files.dedup();
    assert_eq!(files.len(), all, "{files:?}");
}

/// Without it, the first minute on a new machine passes in silence: where few cores compile what a
/// step needs, and where all compile ahead.
#[test]
fn compiling_names_each_file_and_ahead_of_a_step_how_many_are_left() {
    let Some(_gpu) = gpus_of_jobs(1) else {
        return;
    };
    let folder = Folder::new("ahead");
    let kernels = folder.path().join("kernels").display().to_string();
    let warm_up = || {
        let job = folder.alone("warm-up").on_gpus();
        let ended = job.env("DDP_KERNEL_CACHE", &kernels).run();
        ended.assert_well();
        let lines = ended.stderr.lines().filter_map(|line| {
            let (file, count) = line.split_once("compiled ")?.1.split_once(", ")?;
            Some((file.to_string(), count.to_string()))
        });
        lines.collect::<Vec<_>>()
    };
    let words = "--data glyphs,rows=64,held-out=8 --hidden 8 --steps 1 --device cuda --out OUT --log-level debug";
    let first = folder.alone(words).on_gpus();
    let first = first.env("DDP_KERNEL_CACHE", &kernels).run();
    first.assert_well();
    let of_step = first.stderr.lines().filter_map(|line| {
        let (_, file) = line.split_once("compiling ")?;
        file.split_once(", which is needed")
    });
    let of_step: Vec<_> = of_step.map(|(file, _)| file.to_string()).collect();
    let (files, counts): (Vec<_>, Vec<_>) = warm_up().into_iter().unzip();
    if is_simulated() {
        assert!(of_step.contains(&"adamw.cu".into()), "{first}");
        assert!(
            of_step.iter().all(|file| !files.contains(file)),
            "{files:?}"
        );
    }
    assert!(files.contains(&"attention_bf16.cu".into()), "{files:?}");
    for count in 1..=files.len() {
        let count = format!("{count} of {}", files.len());
        assert!(counts.contains(&count), "{count}: {counts:?}");
    }
    assert_eq!(warm_up(), [], "all are there");
}
