//! Algorithms of matmuls that are timed: one choice for all ranks, kept on disk and in checkpoints.
//! The simulated cuBLASLt has algorithms whose times SIMCUDA_ALGORITHMS sets, and the list of its
//! work names them.

use std::path::{Path, PathBuf};

use crate::gpu;
use crate::support::job::{Ended, Folder};

const WORDS: &str = "--data glyphs,rows=256,held-out=0 --hidden 48 --batch-size 64 --threads 1 --device cuda \
                     --schedule constant --warmup-steps 0 --out OUT";
/// The heuristic's first algorithm is the fastest, or the second.
const FIRST: &str = "DDP_TEST_PRODUCTS=simulated SIMCUDA_ALGORITHMS=50,100,200";
const SECOND: &str = "DDP_TEST_PRODUCTS=simulated SIMCUDA_ALGORITHMS=100,50,200";
/// As SECOND, and without leave to time simulated GPUs.
const UNTIMED: &str = "SIMCUDA_ALGORITHMS=100,50,200";
/// The file that a kind of matmul's algorithm is kept in begins like this.
const KEPT: &str = "algorithm-";

/// The algorithms of the matmuls that a rank made, in order.
type Used = Vec<usize>;

fn names_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

fn begins(path: &Path, with: &str) -> bool {
    path.file_name()
        .unwrap()
        .to_string_lossy()
        .starts_with(with)
}

/// An empty cache, but for the compiled kernels of this process's.
fn fresh_cache(folder: &Folder, name: &str) -> PathBuf {
    let cache = folder.path().join(name);
    std::fs::create_dir(&cache).unwrap();
    for file in names_in(Path::new(&std::env::var("DDP_KERNEL_CACHE").unwrap())) {
        if !begins(&file, KEPT) {
            std::fs::copy(&file, cache.join(file.file_name().unwrap())).unwrap();
        }
    }
    cache
}

/// Two ranks with these variables; what each used.
fn run(folder: &Folder, variables: [&str; 2], cache: &Path, words: &str) -> (Ended, [Used; 2]) {
    let lists = [0, 1].map(|rank| folder.path().join(format!("timeline-{rank}")));
    let program = |rank: usize| {
        let (variable, list) = (variables[rank], lists[rank].display());
        let before = format!("export {variable} SIMCUDA_TIMELINE={list}");
        folder.program_after(&format!("rank-{rank}"), &before)
    };
    let programs = [program(0), program(1)];
    let job = folder.programs(&[&programs[0], &programs[1]], &format!("{WORDS} {words}"));
    let cache = cache.to_str().expect("a temporary folder's name is UTF-8");
    let ended = job.on_gpus().env("DDP_KERNEL_CACHE", cache).run();
    ended.assert_well();
    let used = lists.map(|list| {
        let text = std::fs::read_to_string(list).unwrap();
        let matmuls = text.lines().filter(|line| line.contains("cublasLtMatmul"));
        let number = |line: &str| match line.split_once(", algorithm ") {
            None => 0,
            Some((_, number)) => number[..1].parse().unwrap(),
        };
        matmuls.map(number).collect()
    });
    (ended, used)
}

/// Whether the rank timed algorithms: it tried the third, which is never the fastest.
fn timed(used: &Used) -> bool {
    used.contains(&2)
}

#[test]
fn rank_0_times_matmuls_once_for_all_ranks_and_for_later_runs() {
    let Some(_gpu) = gpu() else { return };
    let gpus = &ddp_kernels::device::discover().gpus;
    if gpus.len() < 2 || !gpus[0].name.contains("Simulated") {
        return;
    }
    let last = |used: &Used| *used.last().unwrap();
    let folder = Folder::new("matmuls");
    let cache = fresh_cache(&folder, "cache");
    // Rank 1 would choose otherwise.
    let (_, used) = run(
        &folder,
        [SECOND, FIRST],
        &cache,
        "--products timed --steps 4",
    );
    assert_eq!(used.each_ref().map(timed), [true, false]);
    assert_eq!(used.each_ref().map(last), [1, 1]);
    assert_eq!(used[1][0], 0, "the first step is before the choice");
    assert!(names_in(&cache).iter().any(|file| begins(file, KEPT)));

    // Another run finds the choice on disk, whatever would be the fastest now.
    let other = Folder::new("matmuls");
    let (_, used) = run(&other, [FIRST, FIRST], &cache, "--products timed --steps 4");
    assert_eq!(used.each_ref().map(timed), [false, false]);
    assert_eq!(used.each_ref().map(last), [1, 1]);
    // So both runs made the same model.
    let model = |folder: &Folder| {
        let name = "checkpoints/step-00000004/model.safetensors";
        std::fs::read(folder.out().join(name)).unwrap()
    };
    assert!(model(&folder) == model(&other));

    // A resumed run takes it from the checkpoint, from its first step on.
    let cache = fresh_cache(&folder, "second-cache");
    let (_, used) = run(
        &folder,
        [FIRST, FIRST],
        &cache,
        "--products timed --steps 8 --resume auto",
    );
    assert!(used.iter().flatten().all(|&number| number == 1), "{used:?}");

    // Another library chooses anew, and says so once.
    let newer = format!("{FIRST} SIMCUDA_CUBLASLT=130100");
    let (ended, used) = run(
        &folder,
        [&newer, &newer],
        &cache,
        "--products timed --steps 12 --resume auto",
    );
    assert_eq!(used.each_ref().map(timed), [true, false]);
    assert_eq!(used.each_ref().map(last), [0, 0]);
    let said = "were timed on Simulated GPU 0 (no hardware), cuBLASLt 130000, driver 13.0; this is";
    assert_eq!(ended.stderr.matches(said).count(), 1, "{ended}");
}

#[test]
fn matmuls_are_not_timed_unless_asked_for_nor_on_simulated_gpus() {
    let Some(_gpu) = gpu() else { return };
    let gpus = &ddp_kernels::device::discover().gpus;
    if gpus.len() < 2 || !gpus[0].name.contains("Simulated") {
        return;
    }
    let folder = Folder::new("matmuls");
    let cache = fresh_cache(&folder, "cache");
    let (ended, used) = run(&folder, [SECOND, SECOND], &cache, "--steps 4");
    assert!(used.iter().flatten().all(|&number| number == 0), "{used:?}");
    let said = "the speed of simulated GPUs means nothing";
    assert!(!ended.stderr.contains(said), "{ended}");
    let state = folder.out().join("checkpoints/step-00000004/state.json");
    assert!(
        !std::fs::read_to_string(state)
            .unwrap()
            .contains("measured_on")
    );

    let words = "--steps 4 --products timed";
    let (ended, used) = run(&Folder::new("matmuls"), [UNTIMED; 2], &cache, words);
    assert!(used.iter().flatten().all(|&number| number == 0), "{used:?}");
    assert_eq!(ended.stderr.matches(said).count(), 1, "{ended}");
}

/// Shards have the same matmuls on any number of ranks, and so the same algorithms.
#[test]
fn with_the_same_bits_another_number_of_ranks_keeps_the_algorithms() {
    let Some(_gpu) = gpu() else { return };
    let gpus = &ddp_kernels::device::discover().gpus;
    if gpus.len() < 2 || !gpus[0].name.contains("Simulated") {
        return;
    }
    let (folder, whole) = (Folder::new("products"), Folder::new("products"));
    let words = format!("{WORDS} --products timed --same-bits 4 --progress never");
    let run = |folder: &Folder, ranks: usize, algorithms: &str, cublaslt: &str, words: &str| {
        let cache = fresh_cache(folder, &format!("cache-{ranks}-{}", words.len()));
        let job = folder.started(ranks, words).on_gpus();
        let job = job.env("DDP_KERNEL_CACHE", cache.to_str().unwrap());
        let job = job.env("DDP_TEST_PRODUCTS", "simulated");
        let job = job.env("SIMCUDA_CUBLASLT", cublaslt);
        let ended = job.env("SIMCUDA_ALGORITHMS", algorithms).run();
        ended.assert_well();
        ended.stderr
    };
    let (first, second, cublaslt) = ("50,100,200", "100,50,200", "130000");
    let begun = format!("{words} --steps 4");
    run(&folder, 2, second, cublaslt, &begun);
    // Another algorithm would be chosen now.
    let resumed = format!("{words} --steps 8 --resume auto");
    // Other algorithms have other bits, so `--products` belongs to the run.
    let untimed = resumed.replace("--products timed ", "");
    let refused = folder.alone(&untimed).on_gpus().run();
    assert!(
        refused
            .assert_fails(2)
            .contains("--products first (was timed)"),
        "{refused}"
    );
    let said = run(&folder, 1, first, cublaslt, &resumed);
    assert!(!said.contains("bits are not promised"), "{said}");
    let at_once = format!("{words} --steps 8");
    run(&whole, 2, second, cublaslt, &at_once);
    let of = |folder: &Folder, step: u64, name: &str| {
        let path = format!("checkpoints/step-{step:08}/{name}");
        std::fs::read(folder.out().join(path)).unwrap()
    };
    let products = |step: u64| -> serde_json::Value {
        let state: serde_json::Value =
            serde_json::from_slice(&of(&folder, step, "state.json")).unwrap();
        state["products"].clone()
    };
    assert!(products(4).to_string().contains("measured_on"));
    assert_eq!(products(4), products(8));
    let [resumed, whole] = [&folder, &whole].map(|folder| of(folder, 8, "model.safetensors"));
    assert!(resumed == whole);

    let newer = format!("{words} --steps 12 --resume auto");
    let said = run(&folder, 2, first, "130100", &newer);
    let expected = "not those of the checkpoint: cublaslt 13.1.0 (was 13.0.0)";
    assert_eq!(said.matches(expected).count(), 1, "{said}");
}
