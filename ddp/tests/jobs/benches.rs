//! `ddp-train bench`: one line of JSON, with the promised fields.

use serde_json::Value;

use crate::support::job::{Ended, Folder, all_at_once};
use crate::support::metrics_log::{fields, number};

/// The lines on standard output.
#[track_caller]
fn lines(ended: &Ended) -> Vec<Value> {
    ended.assert_well();
    let line = |text: &str| {
        let line: Value =
            serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {ended}"));
        assert_eq!(
            (&line["system"], &line["version"]),
            (&"ddp-train".into(), &env!("CARGO_PKG_VERSION").into())
        );
        line
    };
    ended.stdout.lines().map(line).collect()
}

/// Alone, and on two ranks where there is MPI: the one line.
fn on_one_and_two(words: &str, check: impl Fn(&Value, usize) + Sync) {
    all_on_one_and_two(words, |lines, ranks| {
        assert_eq!(lines.len(), 1, "{lines:?}");
        check(&lines[0], ranks);
    });
}

/// As above, for all lines.
fn all_on_one_and_two(words: &str, check: impl Fn(&[Value], usize) + Sync) {
    all_at_once([1, 2], |ranks| {
        let folder = Folder::new("bench");
        let job = if ranks == 1 {
            folder.alone(words)
        } else {
            folder.together(words)
        };
        let lines = lines(&job.run());
        assert!(lines.iter().all(|line| line["ranks"] == ranks), "{lines:?}");
        check(&lines, ranks);
        assert!(folder.tree().is_empty(), "a bench writes nothing");
    });
}

#[test]
fn bench_mlp_prints_one_line_with_the_promised_fields() {
    let words = "bench mlp --layers 16,32,4 --batch 48 --threads 1 --seconds 0.1 --rounds 3 --dtype f32 --device cpu";
    on_one_and_two(words, |line, ranks| {
        let promised = "system version layers batch ranks threads dtype device step_ms samples_per_s optimizer_ms optimizer_share \
             gradient_mb zero first_step_s peak_mb device_peak_mb";
        let missing: Vec<_> = promised
            .split(' ')
            .filter(|field| !fields(line).contains(field))
            .collect();
        assert!(missing.is_empty(), "{missing:?}: {line}");
        assert_eq!(
            (&line["layers"], &line["batch"], &line["threads"]),
            (&"16,32,4".into(), &48.into(), &1.into())
        );
        assert_eq!(
            (&line["dtype"], &line["device"]),
            (&"f32".into(), &"cpu".into())
        );
        assert!(
            line["device_peak_mb"].is_null(),
            "the CPU's memory is the process's: {line}"
        );
        for field in [
            "step_ms",
            "samples_per_s",
            "first_step_s",
            "peak_mb",
            "steps",
            "optimizer_ms",
            "optimizer_share",
        ] {
            assert!(number(line, field) > 0.0, "{field}: {line}");
        }
        // Milliseconds are rounded to a ten-thousandth, rows of a second to one.
        let (step_ms, rate) = (number(line, "step_ms"), number(line, "samples_per_s"));
        let slack = 0.5 + rate * 0.5e-4 / step_ms;
        assert!((rate - 48e3 / step_ms).abs() <= slack * 1.01, "{line}");
        assert_eq!(line["hidden_share"].is_null(), ranks == 1, "{line}");
        // 16·32 + 32 + 32·4 + 4 parameters, each padded to a multiple of 64 elements: 512 + 64 +
        // 128 + 64.
        assert_eq!(number(line, "gradient_mb"), 768.0 * 4.0 / 1e6, "{line}");
    });
}

#[test]
fn the_optimizers_share_is_of_the_step_and_its_memory_of_the_rank() {
    // So many parameters for so few rows that the update is much of a step.
    let words = "bench mlp --layers 512,512,512 --batch 2 --threads 1 --seconds 0.3 --rounds 3 --device cpu";
    all_at_once([0, 1], |zero| {
        on_one_and_two(&format!("{words} --zero {zero}"), |line, ranks| {
            assert_eq!(line["zero"], zero, "{line}");
            // Two moments of 2·(512·512 + 512) parameters, already whole slices; with ZeRO-1 each
            // of two ranks has half.
            let of_all = 2.0 * 4.0 * 2.0 * 512.0 * 513.0 / 1e6;
            let owners = if zero == 1 { ranks as f64 } else { 1.0 };
            assert!(
                (number(line, "moments_mb") - of_all / owners).abs() < 0.02 * of_all,
                "{of_all} of all: {line}"
            );
            let share = number(line, "optimizer_ms") / number(line, "step_ms");
            // Both are rounded to a ten-thousandth of a ms, the share to a ten-thousandth.
            assert!(
                (share - number(line, "optimizer_share")).abs() < 2e-3,
                "{line}"
            );
            // No bound on the time itself: ranks that wait for a core make the step longer.
            assert!(number(line, "optimizer_ms") > 0.0, "{line}");
        });
    });
}

#[test]
fn the_share_that_is_hidden_is_that_of_an_overlap() {
    let words = "bench mlp --layers 64,64,64,4 --batch 48 --threads 1 --seconds 0.1 --overlap on --bucket-mb 0.02";
    on_one_and_two(words, |line, ranks| {
        assert_eq!(line["overlap"], ranks > 1, "{line}");
        assert!(
            ranks == 1 || (0.0..=1.0).contains(&number(line, "hidden_share")),
            "{line}"
        );
        assert!(number(line, "buckets") > 1.0, "{line}");
    });
}

#[test]
fn bench_addmm_prints_a_line_for_each_shape() {
    let words =
        "bench addmm --shapes 64x48x32,8x16x24 --seconds 0.1 --rounds 3 --threads 1 --device cpu";
    all_on_one_and_two(words, |lines, ranks| {
        let shapes: Vec<_> = lines
            .iter()
            .map(|line| line["shape"].as_str().unwrap())
            .collect();
        assert_eq!(shapes, ["64x48x32", "8x16x24"]);
        for line in lines {
            assert_eq!(
                (&line["bench"], &line["dtype"], &line["device"]),
                (&"addmm".into(), &"f32".into(), &"cpu".into())
            );
            let [m, n, k, ms] = ["m", "n", "k", "ms"].map(|field| number(line, field));
            assert!(number(line, "repetitions") > 0.0 && ms > 0.0, "{line}");
            // The slowest rank counts; milliseconds are rounded to 10⁻⁵, GFLOP/s to 10⁻².
            let of_ranks = line["ms_of_ranks"].as_array().unwrap();
            let slowest = of_ranks
                .iter()
                .map(|ms| ms.as_f64().unwrap())
                .fold(0.0, f64::max);
            assert_eq!((of_ranks.len(), slowest), (ranks, ms), "{line}");
            let (rate, expected) = (number(line, "gflop_per_s"), 2.0 * m * n * k / ms / 1e6);
            assert!(
                (rate - expected).abs() <= 0.006 + rate * 0.6e-5 / ms,
                "{expected}: {line}"
            );
        }
    });
}

#[test]
fn operands_of_matmuls_are_larger_than_caches_together() {
    on_one_and_two(
        "bench addmm --shapes 2048x256x256 --seconds 0.02 --rounds 1 --threads 1 --device cpu",
        |line, _| {
            assert!(number(line, "rotated_mb") >= 256.0, "{line}");
        },
    );
}

#[test]
fn the_cpu_refuses_what_is_for_gpus() {
    for (words, parts) in [
        (
            "mlp --graph on",
            [
                "--graph on: expected --device cuda",
                "help: leave --graph out",
            ],
        ),
        (
            "allreduce --captured",
            ["--captured: expected --device cuda", "help: leave it out"],
        ),
    ] {
        let folder = Folder::new("bench");
        let ended = folder.alone(&format!("bench {words} --device cpu")).run();
        let cause = ended.assert_fails(2);
        assert!(
            parts.iter().all(|part| cause.contains(part)),
            "{words}: {ended}"
        );
        assert_eq!(ended.stdout, "", "{words}: {ended}");
    }
}

#[test]
fn every_collective_is_measured_in_the_terms_of_nccls_tests() {
    // What of the tensor crosses a rank's link, for 1 and 2 ranks.
    let operations = [
        ("all_reduce", [0.0, 1.0]),
        ("reduce_scatter", [0.0, 0.5]),
        ("all_gather", [0.0, 0.5]),
        ("broadcast", [1.0, 1.0]),
    ];
    for (operation, factors) in operations {
        let words = format!(
            "bench allreduce --operation {operation} --mb 0.256 --seconds 0.05 --threads 1 --dtype bf16"
        );
        on_one_and_two(&words, |line, ranks| {
            assert_eq!(
                (&line["operation"], &line["dtype"]),
                (&operation.into(), &"bf16".into()),
                "{line}"
            );
            assert_eq!(
                (&line["bytes"], &line["in_place"]),
                (&256_000.into(), &true.into()),
                "{line}"
            );
            if ranks == 1 {
                // Nothing is done, so quickly that rounding is most of it.
                return;
            }
            let [us, alg, bus] =
                ["time_us", "alg_gb_per_s", "bus_gb_per_s"].map(|field| number(line, field));
            // Rounded to 0.01 µs and 0.001 GB/s.
            assert!(
                (alg - 0.256e3 / us).abs() <= 0.002 + alg * 0.01 / us,
                "{line}"
            );
            assert!((bus - alg * factors[ranks - 1]).abs() <= 0.002, "{line}");
        });
    }
}

#[test]
fn a_sweep_prints_a_line_for_each_size() {
    let words =
        "bench allreduce --sweep 0.001:0.004 --seconds 0.05 --rounds 2 --threads 1 --device cpu";
    all_on_one_and_two(words, |lines, _| {
        let bytes: Vec<_> = lines.iter().map(|line| number(line, "bytes")).collect();
        assert_eq!(bytes, [1000.0, 2000.0, 4000.0]);
    });
}

#[test]
fn bench_allreduce_prints_one_line_with_the_promised_fields() {
    on_one_and_two(
        "bench allreduce --mb 0.25 --seconds 0.1 --threads 1",
        |line, ranks| {
            assert_eq!(
                (&line["bytes"], &line["dtype"], &line["device"]),
                (&250_000.into(), &"f32".into(), &"cpu".into())
            );
            let transport = if ranks == 1 { "alone" } else { "shared memory" };
            assert_eq!(
                (&line["bench"], &line["transport"]),
                (&"allreduce".into(), &transport.into())
            );
            assert!(number(line, "repetitions") > 0.0, "{line}");
            assert!(number(line, "ms") >= number(line, "ms_best"), "{line}");
            assert!(
                ranks == 1 || number(line, "ms_best") > 0.0 && number(line, "bus_gb_per_s") > 0.0,
                "{line}"
            );
        },
    );
}
