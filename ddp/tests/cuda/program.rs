//! `ddp-train` on a GPU: what it prints, records and saves, and the codes it ends with.

use std::sync::OnceLock;

use crate::support::job::{Folder, QUICK};
use crate::support::metrics_log::{model_bytes, number};
use crate::{gpus_of_jobs, simulated_gpus_of_jobs};

/// Epochs of 8 steps of 32 rows and one of 5.
const UNEVEN: &str = "--data glyphs,rows=261,held-out=64 --hidden 16 --batch-size 32 --epochs 3 --log-every 4 --out OUT --threads 1";

/// What the driver calls the first GPU.
fn name() -> &'static str {
    &ddp_kernels::device::discover().gpus[0].name
}

fn is_simulated() -> bool {
    name().contains("Simulated")
}

#[test]
fn one_process_trains_on_the_gpu_and_says_so() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    let folder = Folder::new("cuda");
    let ended = folder
        .alone(&format!("{UNEVEN} --device cuda --data-on-device off"))
        .on_gpus()
        .run();
    ended.assert_well();
    assert!(
        ended
            .stderr
            .contains(&format!("training on cuda:0 {}", name())),
        "{ended}"
    );
    assert!(!ended.stderr.contains("WARN"), "{ended}");
    let log = folder.metrics_log();
    let device = log.start()["devices"][0].as_str().unwrap();
    assert!(
        device.starts_with(&format!("cuda:0 {} on ", name())),
        "{device}"
    );
    let end = log.end().unwrap();
    assert!(
        number(end, "device_peak_mb") > 0.0 && number(end, "peak_mb") > 1.0,
        "{end}"
    );
    // Figures of simulated GPUs mean nothing.
    assert_eq!(end["samples_per_s"].is_null(), is_simulated(), "{end}");
    let losses = log.losses();
    assert!(losses.last() < losses.first(), "{losses:?}");
    // A batch's features and targets and a message of numbers in each of 27 steps, and nothing
    // else.
    let rows = end["transfers"]["rows"].as_array().unwrap();
    let in_steps = rows
        .iter()
        .filter(|row| row["phase"] == "step")
        .map(|row| number(row, "count"))
        .sum::<f64>();
    assert_eq!(in_steps, 3.0 * 27.0, "{end}");
    assert_eq!(
        end["transfers"]["hints"].as_array().map_or(0, Vec::len),
        0,
        "{end}"
    );
}

#[test]
fn data_kept_on_the_gpu_cross_once_and_leave_the_same_model() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    let run = |choice: &str| {
        let folder = Folder::new("kept");
        let ended = folder
            .alone(&format!("{UNEVEN} --device cuda --data-on-device {choice}"))
            .on_gpus()
            .run();
        ended.assert_well();
        assert_eq!(
            ended
                .stderr
                .contains("the training data, 0.8 MB, are kept on the GPU"),
            choice != "off",
            "{ended}"
        );
        let log = folder.metrics_log();
        let rows = log.end().unwrap()["transfers"]["rows"]
            .as_array()
            .unwrap()
            .clone();
        let bytes_in_steps: f64 = rows
            .iter()
            .filter(|row| row["phase"] == "step")
            .map(|row| number(row, "bytes"))
            .sum();
        (model_bytes(&folder.out(), 27), log.losses(), bytes_in_steps)
    };
    let (ferried, kept, auto) = (run("off"), run("on"), run("auto"));
    assert!(
        (&kept.0, &kept.1) == (&ferried.0, &ferried.1) && auto == kept,
        "another model"
    );
    // Row numbers of 8 bytes in place of rows of 784 numbers.
    assert!(
        kept.2 < ferried.2 / 100.0,
        "{} and {} bytes",
        kept.2,
        ferried.2
    );
}

#[test]
fn auto_takes_the_gpu_for_one_process() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    let folder = Folder::new("auto");
    folder.alone(QUICK).on_gpus().run().assert_well();
    assert!(
        folder.metrics_log().start()["devices"][0]
            .as_str()
            .unwrap()
            .starts_with("cuda:0 ")
    );
}

#[test]
fn a_model_that_does_not_fit_the_gpu_ends_with_71_and_names_what_takes_the_room() {
    // Nothing makes a real one small.
    let Some(_gpu) = simulated_gpus_of_jobs(1) else {
        return;
    };
    let folder = Folder::new("memory");
    // 4096 · 794 values of 4 bytes are 13 MB, and so are their gradients.
    let words = QUICK.replace("--hidden 16", "--hidden 4096 --device cuda");
    let ended = folder
        .alone(&words)
        .on_gpus()
        .env("SIMCUDA_MEMORY_MB", "16")
        .run();
    let cause = ended.assert_fails(71);
    assert!(
        cause.contains("out of memory on cuda:0: ") && cause.contains("Largest: "),
        "{ended}"
    );
}

#[test]
fn a_gpu_that_is_not_there_is_refused_with_the_reason() {
    let folder = Folder::new("absent");
    // None is to be seen.
    let ended = folder.alone("--device cuda").run();
    let cause = ended.assert_fails(2);
    assert!(
        cause.contains("--device cuda: expected a device that can be used here, but "),
        "{ended}"
    );
    assert!(cause.contains("help: give --device cpu"), "{ended}");
    if let Some(_gpu) = gpus_of_jobs(1) {
        let ended = folder.alone("--device cuda:9").on_gpus().run();
        assert!(
            ended.assert_fails(2).contains("--device cuda:9: expected"),
            "{ended}"
        );
        assert!(
            ended.stderr.contains("and no cuda:9") || ended.stderr.contains("up to cuda:"),
            "{ended}"
        );
    }
    assert!(folder.tree().is_empty(), "nothing was begun");
}

#[test]
fn figures_are_those_of_real_gpus() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    let benches = [
        "mlp --layers 16,32,4 --batch 48 --dtype tf32 --graph on",
        "addmm --shapes 64x48x32 --dtype bf16",
        "allreduce --mb 0.1 --operation all_gather --captured",
    ];
    for bench in benches {
        let words = format!("bench {bench} --seconds 0.1 --threads 1 --device cuda");
        let folder = Folder::new("bench");
        let job = || folder.alone(&words).on_gpus();
        if is_simulated() {
            let ended = job().run();
            assert!(
                ended
                    .assert_fails(2)
                    .contains("figures of simulated GPUs mean nothing"),
                "{bench}: {ended}"
            );
            assert_eq!(ended.stdout, "", "{bench}: {ended}");
            // The work itself goes well, up to where it would be timed.
            let ended = job().env("DDP_TEST_BENCH", "simulated").run();
            assert!(
                ended.assert_fails(2).contains("all was done once"),
                "{bench}: {ended}"
            );
            assert_eq!(ended.stdout, "", "{bench}: {ended}");
        } else {
            let ended = job().run();
            ended.assert_well();
            let line: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
            assert_eq!(line["device"], format!("cuda:0 {}", name()), "{ended}");
        }
    }
}

/// The lines of `bench mlp --explain` for one rank: those of the nodes, and their sums.
fn explained(flags: &str) -> (Vec<serde_json::Value>, serde_json::Value) {
    let words = format!("bench mlp --explain --device cuda --threads 1 {flags}");
    let ended = Folder::new("explain").alone(&words).on_gpus().run();
    ended.assert_well();
    let line = |line: &str| serde_json::from_str(line).unwrap();
    let mut lines: Vec<serde_json::Value> = ended.stdout.lines().map(line).collect();
    let sums = lines.pop().expect("a line with the sums");
    (lines, sums)
}

/// Of a step that several tests look at.
fn explained_step() -> &'static (Vec<serde_json::Value>, serde_json::Value) {
    static STEP: OnceLock<(Vec<serde_json::Value>, serde_json::Value)> = OnceLock::new();
    STEP.get_or_init(|| explained("--layers 64,48,32,10 --batch 128"))
}

#[test]
fn a_step_is_explained_node_by_node_on_simulated_gpus_too() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    let (nodes, sums) = explained_step();
    assert_eq!(sums["nodes"], nodes.len(), "{sums}");
    // Three forward, three for weights, two for inputs.
    assert_eq!(sums["matmuls"], 8, "{nodes:#?}");
    assert_eq!(sums["besides_matmuls"], 8, "{nodes:#?}");
    assert_eq!(sums["device"], format!("cuda:0 {}", name()), "{sums}");
    if is_simulated() {
        // Each matmul is one kernel there, so that the driver counts what we note.
        let count = |kind: &str| sums["driver_counts"][kind].as_u64().unwrap() as usize;
        let counted = ["kernels", "copies", "fills", "others"].map(count);
        assert_eq!(counted.iter().sum::<usize>(), nodes.len(), "{sums}");
    }
}

#[test]
fn the_times_of_a_step_that_is_explained_are_a_model_and_called_one() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    let (nodes, sums) = explained_step();
    let model = sums["model"].as_str().unwrap();
    assert!(model.starts_with("operands once at "), "{model}");
    assert!(model.ends_with(" GB/s; not measured"), "{model}");
    let (_, rate) = model
        .trim_end_matches(" GB/s; not measured")
        .rsplit_once(' ')
        .unwrap();
    let rate: f64 = rate.parse().unwrap();
    let moved =
        |node: &serde_json::Value| number(node, "read_bytes") + number(node, "written_bytes");
    assert_eq!(
        number(sums, "moved_bytes"),
        nodes.iter().map(moved).sum::<f64>()
    );
    let bytes_of = |line: &serde_json::Value| {
        line.get("moved_bytes")
            .map_or_else(|| moved(line), |_| number(line, "moved_bytes"))
    };
    for line in nodes.iter().chain([sums]) {
        // The rate is printed in whole GB/s, a time in thousandths of a µs.
        let (expected_us, told_us) = (bytes_of(line) / rate / 1e3, number(line, "model_us"));
        assert!(
            (told_us - expected_us).abs() <= 0.001 + expected_us * 0.6 / rate,
            "{line} {model}"
        );
    }
}

#[test]
fn regression_sgd_and_bf16_have_no_more_nodes_and_many_rows_one_more() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    let bench = |flags: &str| {
        let (nodes, sums) = explained(&format!("--layers 64,48,32,10 {flags}"));
        let sums_rows = nodes.iter().any(|node| node["op"] == "row_block_sums");
        (sums["besides_matmuls"].as_u64().unwrap(), sums_rows)
    };
    for flags in [
        "--task classification",
        "--optimizer sgd --dtype bf16",
        "--task regression --optimizer sgd --dtype bf16",
    ] {
        let (besides, sums_rows) = bench(flags);
        // In bf16 the inputs are rounded, too.
        let expected = 8 + u64::from(flags.contains("bf16"));
        assert_eq!((besides, sums_rows), (expected, false), "{flags}");
        // The gradient of the last bias, from sums of blocks of rows.
        let of_many = bench(&format!("{flags} --batch 2048"));
        assert_eq!(of_many, (besides + 1, true), "{flags}");
    }
}

#[test]
fn an_update_moves_28_bytes_of_a_parameter_and_30_with_the_copy_in_bf16() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    // It reads four numbers of a parameter and writes three, each of 4 bytes, and the copy.
    for (dtype, expected) in [("f32", 28.0), ("bf16", 30.0)] {
        let (nodes, _) = explained(&format!("--layers 256,128,10 --batch 32 --dtype {dtype}"));
        // No other node reads all gradients, or writes the copies.
        let parameters = f64::from(256 * 128 + 128 + 128 * 10 + 10);
        let moved = |node: &serde_json::Value| {
            let bytes = |field: &str| node[field].as_f64().unwrap();
            bytes("read_bytes") + bytes("written_bytes")
        };
        let of_all = nodes
            .iter()
            .filter(|node| node["kind"] != "matmul" && moved(node) > 2.0 * parameters);
        let updates: Vec<_> = of_all.collect();
        assert_eq!(updates.len(), 1, "{dtype}: {nodes:#?}");
        let of_each = moved(updates[0]) / parameters;
        // Four parameters are padded, to 128 elements at most, and there are a few scalars.
        assert!(
            (expected..expected * 1.02).contains(&of_each),
            "{dtype}: {of_each}"
        );
    }
}

#[test]
fn a_kernel_says_how_many_blocks_it_has_and_how_often_it_waits_for_loads() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    let (nodes, sums) = explained_step();
    let kernels = nodes.iter().filter(|node| node["kind"] == "kernel");
    assert!(kernels.clone().count() > 0);
    for kernel in kernels {
        for field in ["blocks", "threads", "dependent_loads"] {
            assert!(number(kernel, field) >= 1.0, "{kernel}");
        }
        // So small that no block more is needed.
        assert!(kernel.get("few_blocks").is_none(), "{kernel}");
    }
    assert_eq!(sums["few_blocks"], 0, "{sums}");
    assert!(number(sums, "multiprocessors") >= 1.0, "{sums}");
    // Which is the case on simulated GPUs as well, as they are of version 13.
    assert!(
        sums["gelu"] == "cuBLASLt's epilogue" || !is_simulated(),
        "{sums}"
    );
}

#[test]
fn a_timed_step_goes_through_on_simulated_gpus_and_gives_no_figures() {
    let Some(_gpu) = simulated_gpus_of_jobs(1) else {
        return;
    };
    let words = "bench mlp --explain --timed --device cuda --layers 16,32,4 --batch 48 --threads 1";
    for (value, said) in [
        ("", "figures of simulated GPUs"),
        ("simulated", "all was done once"),
    ] {
        let folder = Folder::new("timed");
        let job = folder.alone(words).on_gpus();
        let ended = job.env("DDP_TEST_BENCH", value).run();
        assert!(ended.assert_fails(2).contains(said), "{ended}");
    }
    let folder = Folder::new("timed");
    let ended = folder.alone("bench mlp --timed --device cuda").run();
    ended.assert_fails(2);
    assert!(ended.stderr.contains("--explain"), "{ended}");
}

#[test]
fn only_a_captured_step_is_explained() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    for how in ["--device cpu", "--device cuda --graph off"] {
        let words = format!("bench mlp --explain --layers 16,4 --batch 8 --threads 1 {how}");
        let ended = Folder::new("explain").alone(&words).on_gpus().run();
        let why = "expected a step captured as a CUDA graph";
        assert!(ended.assert_fails(2).contains(why), "{how}: {ended}");
    }
}

/// GPU collectives with checked values, eager and captured, and a step that reduces. Two ranks
/// share one GPU, so that one suffices.
#[cfg(feature = "mpi")]
#[test]
fn benches_of_two_ranks_go_through_on_gpus() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    if !ddp_kernels::device::discover().nccl.is_sound() {
        ddp_testing::skip("no NCCL that can be used");
        return;
    }
    for bench in [
        "mlp --layers 16,32,4 --batch 48 --zero 1 --graph on",
        "allreduce --mb 0.01 --captured --dtype bf16",
        "allreduce --mb 0.01 --operation reduce_scatter",
    ] {
        let words = format!("bench {bench} --seconds 0.1 --threads 1 --device cuda --share-gpus");
        let folder = Folder::new("bench");
        let job = folder.ranks(2, &words).on_gpus();
        if is_simulated() {
            let ended = job.env("DDP_TEST_BENCH", "simulated").run();
            assert!(
                ended.assert_fails(2).contains("all was done once"),
                "{bench}: {ended}"
            );
        } else {
            job.run().assert_well();
        }
    }
}

#[test]
fn a_trace_on_a_gpu_has_the_phases_of_eager_steps_and_a_box_for_each_captured_one() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    let lanes = |graph: &str| {
        let folder = Folder::new("cuda-trace");
        let ended = folder
            .alone(&format!(
                "{QUICK} --device cuda --data-on-device off --graph {graph} --trace 5..8"
            ))
            .on_gpus()
            .run();
        ended.assert_well();
        let text = std::fs::read_to_string(folder.out().join("trace.json")).unwrap();
        let file: serde_json::Value = serde_json::from_str(&text).unwrap();
        let events = file["traceEvents"].as_array().unwrap();
        let of = |lane: &str| events.iter().filter(|event| event["cat"] == lane).count();
        ["captured steps", "forward", "backward", "optimizer"].map(of)
    };
    // A forward and its loss, a backward, the norm, the scale and the update, of steps 5 to 8.
    assert_eq!(lanes("off"), [0, 8, 4, 12]);
    assert_eq!(lanes("on"), [4, 0, 0, 0]);
}
