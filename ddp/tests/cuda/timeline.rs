//! What overlaps, by the simulated GPUs' clock, which orders work and does not measure time:
//! buckets are reduced during the backward of lower layers, and batches are copied during the
//! previous step. And for how many multiprocessors matmuls plan.

use crate::simulated_gpus_of_jobs;
use crate::support::job::{Ended, Folder, Job, QUICK};

/// A piece of work.
#[derive(Debug, serde::Deserialize)]
struct Piece {
    part: String,
    priority: i32,
    start_ns: u64,
    end_ns: u64,
    bytes: u64,
    what: String,
}

impl Piece {
    fn overlaps(&self, other: &Piece) -> bool {
        self.start_ns < other.end_ns && other.start_ns < self.end_ns
    }

    fn is_matmul(&self) -> bool {
        self.what.starts_with("cublasLtMatmul")
    }

    /// A matmul of a backward: of a gradient with activations, or with weights.
    fn is_of_backward(&self) -> bool {
        self.is_matmul() && !self.what.contains(" TN ")
    }
}

/// Four layers in buckets of about one each, 12 steps; the host looks at the first and the last.
/// Batches are large enough that their copy outlasts the few numbers at a step's start.
const STEPS: usize = 12;
/// What a group calls before the first step, each marked by itself.
const WARM_UP: usize = 7;
const WORDS: &str = "--data glyphs,rows=512,held-out=0 --hidden 64,64,64 --bucket-mb 0.02 --batch-size 128 --epochs 3 \
                     --log-every 100 --threads 1 --device cuda --data-on-device off --out OUT";
/// A batch's features: 64 rows of 784 numbers for each of two ranks.
const BATCH_BYTES: u64 = 64 * 784 * 4;
/// What a bucket has at least.
const BUCKET_BYTES: u64 = 4096;

/// What each rank's GPU did when.
fn timelines(flags: &str) -> Vec<Vec<Piece>> {
    let folder = Folder::new("timeline");
    let job = folder.ranks(2, &format!("{WORDS} {flags}"));
    run(&folder, job).1
}

/// Runs a job, which has to end well: what it says, and what each process's GPU did when.
fn run(folder: &Folder, job: Job) -> (Ended, Vec<Vec<Piece>>) {
    let pattern = folder.path().join("timeline-%p");
    let pattern = pattern.to_str();
    let pattern = pattern.expect("a temporary folder's name is UTF-8");
    let ended = job.on_gpus().env("SIMCUDA_TIMELINE", pattern).run();
    ended.assert_well();
    let files = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let timelines = files.filter(|path| {
        path.file_name()
            .unwrap()
            .to_string_lossy()
            .starts_with("timeline-")
    });
    let read = |path| {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    };
    (ended, timelines.map(read).collect())
}

/// How many bucket reductions overlapped backward matmuls, and how many batch copies overlapped a
/// step.
fn overlaps(timeline: &[Piece]) -> [usize; 2] {
    let beside = |piece: &Piece, other: &dyn Fn(&Piece) -> bool| {
        timeline.iter().any(|o| other(o) && o.overlaps(piece))
    };
    let count = |is: &dyn Fn(&Piece) -> bool, other: &dyn Fn(&Piece) -> bool| {
        timeline
            .iter()
            .filter(|piece| is(piece) && beside(piece, other))
            .count()
    };
    let is_reduction = |piece: &Piece| piece.part == "nccl" && piece.bytes >= BUCKET_BYTES;
    let is_batch = |piece: &Piece| {
        piece.part == "copy" && piece.bytes == BATCH_BYTES && piece.what.contains("HtoD")
    };
    [
        count(&is_reduction, &Piece::is_of_backward),
        count(&is_batch, &Piece::is_matmul),
    ]
}

#[test]
fn reductions_overlap_backward_and_copies_overlap_the_previous_step() {
    let Some(_gpu) = simulated_gpus_of_jobs(2) else {
        return;
    };
    for graph in ["off", "on"] {
        let timelines = timelines(&format!("--graph {graph}"));
        assert_eq!(timelines.len(), 2, "one a rank");
        for timeline in &timelines {
            let [reductions, copies] = overlaps(timeline);
            // At least the first bucket of each step: by this clock a reduction outlasts the
            // backward of so small a layer.
            assert!(
                reductions >= STEPS,
                "--graph {graph}: {reductions} reductions beside the backward"
            );
            // In a graph, too, buckets have the priority of their stream.
            let is_bucket = |piece: &&Piece| piece.part == "nccl" && piece.bytes >= BUCKET_BYTES;
            let mut buckets = timeline.iter().filter(is_bucket);
            assert!(buckets.all(|piece| piece.priority < 0), "--graph {graph}");
            // One mark a bucket, and one for the end of the last; the losses go with a bucket.
            let count = |what: &str| timeline.iter().filter(|p| p.what.contains(what)).count();
            let calls = timeline.iter().filter(|piece| piece.part == "nccl").count();
            assert_eq!(count("progress_begin"), calls, "--graph {graph}");
            assert_eq!(count("progress_end"), STEPS + WARM_UP, "--graph {graph}");
            let are_losses = |p: &Piece| p.what.starts_with("ncclAllReduce of 4 f32");
            assert!(!timeline.iter().any(are_losses), "--graph {graph}");
            // The first has no step before it, and the host waits for the first step's log.
            assert!(
                copies >= STEPS - 4,
                "--graph {graph}: {copies} batches beside a step"
            );
        }
    }
    for timeline in timelines("--graph off --overlap off") {
        assert_eq!(
            overlaps(&timeline)[0],
            0,
            "reductions are a part of the compute stream's work"
        );
    }
}

#[test]
fn graphs_run_without_node_priorities() {
    let Some(_gpu) = simulated_gpus_of_jobs(1) else {
        return;
    };
    let folder = Folder::new("priorities");
    let job = folder.ranks(1, &format!("{WORDS} --graph on")).on_gpus();
    job.env(
        "SIMCUDA_FAULTS",
        "cuGraphInstantiateWithFlags@1=invalid_value",
    )
    .run()
    .assert_well();
}

#[test]
fn matmuls_plan_for_the_multiprocessors_that_the_environment_names() {
    const NAME: &str = "DDP_MATMUL_MULTIPROCESSORS";
    let Some(_gpu) = simulated_gpus_of_jobs(1) else {
        return;
    };
    let ignored = |value| format!("{NAME}={value:?} is ignored: expected a whole number from 1");
    for (value, expected, said) in [
        (
            "116",
            Some("116"),
            format!("matmuls plan for 116 multiprocessors ({NAME})"),
        ),
        ("most", None, ignored("most")),
        ("0", None, ignored("0")),
    ] {
        let folder = Folder::new("multiprocessors");
        let job = folder.alone(&format!("{QUICK} --device cuda"));
        let (ended, timelines) = run(&folder, job.env(NAME, value));
        let lines = ended.stderr.lines().filter(|line| line.contains(NAME));
        let lines: Vec<_> = lines.collect();
        assert!(
            lines.len() == 1 && lines[0].contains(&said),
            "{value}: {ended}"
        );
        // What cuBLASLt was told of each matmul.
        let target = expected.map(|count| format!(", for {count} multiprocessors"));
        let matmuls = timelines[0].iter().filter(|piece| piece.is_matmul());
        let matmuls: Vec<_> = matmuls.map(|piece| &piece.what).collect();
        assert!(!matmuls.is_empty(), "{value}");
        for what in matmuls {
            let told = what.find(", for ").map(|at| &what[at..]);
            assert_eq!(told, target.as_deref(), "{value}: {what}");
        }
    }
}
