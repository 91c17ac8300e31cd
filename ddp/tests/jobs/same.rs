//! What must not change a result: repeating the run, other folders, threads, and how many ranks
//! share the work.

use ddp::data::{self, DataSpec};

use crate::support::job::{Folder, QUICK, all_at_once};
use crate::support::metrics_log::{MetricsLog, model, model_bytes};

/// A run alone: its losses, and the bytes of its model after step `step`.
fn alone(words: &str, step: u64) -> (Vec<f64>, Vec<u8>) {
    let folder = Folder::new("alone");
    folder.alone(words).run().assert_well();
    (
        folder.metrics_log().losses(),
        model_bytes(&folder.out(), step),
    )
}

/// The same on ranks.
fn ranks(count: usize, words: &str, step: u64) -> (Vec<f64>, Vec<u8>) {
    let folder = Folder::new("ranks");
    folder.ranks(count, words).run().assert_well();
    (
        folder.metrics_log().losses(),
        model_bytes(&folder.out(), step),
    )
}

#[test]
fn no_steps_save_the_model_as_the_seed_draws_it() {
    let words = QUICK.replace("--epochs 1", "--steps 0");
    let first = alone(&words, 0);
    assert!(alone(&words, 0) == first);
    assert!(
        alone(
            &format!("{words} --threads 1 --optimizer sgd --micro-batch 7"),
            0
        ) == first
    );
    assert!(alone(&format!("{words} --seed 1"), 0).1 != first.1);
    assert!(ranks(2, &words, 0).1 == first.1);
}

#[test]
fn narrower_instructions_are_on_record_and_train_the_same_model() {
    let run = |words: &str, allowed: &str| {
        let folder = Folder::new("instructions");
        write_text(&folder);
        let job = folder.alone(words).env("DDP_SIMD", allowed);
        job.run().assert_well();
        let log = folder.metrics_log();
        let simd = log.start()["versions"]["simd"].as_str().unwrap();
        let result = (log.losses(), model_bytes(&folder.out(), 8));
        (simd.to_string(), result)
    };
    let widths = ["baseline", "avx2", "avx512"];
    for words in [QUICK, GPT] {
        let words = format!("{words} --dropout 0.1 --grad-clip 1");
        let (widest, result) = run(&words, "avx512");
        let widest = widths.iter().position(|&width| width == widest).unwrap();
        for (allowed, width) in [("avx2", 1), ("plain", 0)] {
            let (simd, narrower) = run(&words, allowed);
            assert_eq!(simd, widths[width.min(widest)], "{allowed}");
            assert!(narrower == result, "{allowed}: {words}");
        }
    }
}

/// A small transformer, whose embedding is also its head.
const GPT: &str = "--data tokens:text.txt --val-split 0.1 --batch-size 24 --steps 8 --log-every 1 \
                   --model gpt,context=16,layers=2,width=32,heads=2 --out OUT";

fn write_text(folder: &Folder) {
    let words = "the quick brown fox jumps over the lazy dog. pack my box with jugs. ";
    std::fs::write(folder.path().join("text.txt"), words.repeat(50)).unwrap();
}

/// Some numbers of ranks; the others are searched. Ranks are processes.
#[test]
fn with_same_bits_any_number_of_processes_trains_the_model_of_one() {
    let runs = [format!("{QUICK} --zero 1 --grad-clip 1"), GPT.to_string()];
    let sizes = [2, 3, 5, 6, 7, 8, 12];
    let all = (0..runs.len()).flat_map(|run| sizes.map(|size| (run, size)));
    let chosen = ddp_testing::cases_of("same-bits, processes", all, 3);
    let trained = |words: &str, ranks: usize| {
        let folder = Folder::new("processes");
        write_text(&folder);
        let words = format!("{words} --same-bits 12 --threads 1");
        folder.started(ranks, &words).run().assert_well();
        (folder.metrics_log().losses(), model_bytes(&folder.out(), 8))
    };
    let one = runs.each_ref().map(|words| trained(words, 1));
    for (run, ranks) in chosen {
        assert!(
            trained(&runs[run], ranks) == one[run],
            "{ranks}: {}",
            runs[run]
        );
    }
}

/// ZeRO divides masters, gradients and moments in another way on each number of ranks; a run goes
/// on from a checkpoint of any of them. The embedding is tied.
#[test]
fn every_stage_of_zero_on_any_ranks_continues_what_another_began() {
    let words = format!("{GPT} --schedule constant --warmup-steps 2 --dtype bf16 --grad-clip 1");
    let words = format!(
        "{words} --same-bits 4 --bucket-mb 0.02 --checkpoint-every 2 --eval-every 2 --threads 1"
    );
    let whole = {
        let folder = Folder::new("stages-one");
        write_text(&folder);
        folder.alone(&words).run().assert_well();
        (folder.metrics_log().losses(), model_bytes(&folder.out(), 8))
    };
    let ways = [
        [(3, 2), (2, 0), (3, 1), (2, 2)],
        [(2, 1), (3, 2), (1, 2), (4, 2)],
    ];
    all_at_once(ways, |way| {
        let folder = Folder::new("stages");
        write_text(&folder);
        for (index, (ranks, stage)) in way.into_iter().enumerate() {
            let steps = 2 * (index + 1);
            let words = words.replace("--steps 8", &format!("--steps {steps}"));
            let words = format!("{words} --zero {stage} --resume auto");
            folder.started(ranks, &words).run().assert_well();
        }
        assert!(folder.metrics_log().losses() == whole.0, "{way:?}");
        assert!(model_bytes(&folder.out(), 8) == whole.1, "{way:?}");
    });
}

#[test]
fn zero_2_refuses_what_needs_whole_gradients() {
    let cases = [
        (
            "--zero 2 --optimizer muon",
            "--zero 2: expected an optimizer of elements",
        ),
        (
            "--zero 2 --min-ranks 1",
            "--zero 2: expected 0 or 1 with --min-ranks",
        ),
        (
            "--zero 2 --same-bits 2 --micro-batch 3",
            "--zero 2 with --same-bits: expected shards of one",
        ),
        // The last of three shards has one, and so has the rank that owns it.
        (
            "--zero 2 --same-bits 3 --micro-batch 10",
            "--zero 2 with --same-bits: expected shards of one",
        ),
        ("--zero 3", "--zero 3: expected"),
    ];
    all_at_once(cases, |(flags, expected)| {
        let folder = Folder::new("stages-refused");
        let ended = folder.started(2, &format!("{QUICK} {flags}")).run();
        let cause = ended.assert_fails(2);
        assert!(cause.contains(expected), "{flags}: {ended}");
        let log = folder.out().join("metrics.jsonl");
        assert!(!log.exists(), "a run has begun: {flags}: {ended}");
    });
}

#[test]
fn the_model_has_pytorchs_names_and_shapes() {
    let folder = Folder::new("names");
    folder
        .alone(&format!("{QUICK} --dropout 0.1"))
        .run()
        .assert_well();
    let model = model(&folder.out(), 8);
    let shapes: Vec<(&str, &[usize])> = model
        .iter()
        .map(|(name, (shape, _))| (name.as_str(), &shape[..]))
        .collect();
    assert_eq!(
        shapes,
        [
            ("0.bias", &[16][..]),
            ("0.weight", &[16, 784]),
            ("2.bias", &[10]),
            ("2.weight", &[10, 16])
        ]
    );
}

#[test]
fn the_same_run_again_gives_the_same_bytes() {
    for flags in [
        "",
        "--dropout 0.2 --micro-batch 5 --grad-clip 1 --optimizer sgd",
    ] {
        let words = format!("{QUICK} {flags}");
        let first = alone(&words, 8);
        assert!(alone(&words, 8) == first, "{flags}");
        assert!(
            alone(&format!("{words} --seed 1"), 8).1 != first.1,
            "{flags}"
        );
    }
}

#[test]
fn the_same_job_again_gives_the_same_bytes() {
    all_at_once(
        [
            (2, ""),
            (3, "--overlap on --bucket-mb 0.01"),
            (2, "--reduce-dtype bf16 --dropout 0.2"),
        ],
        |(count, flags)| {
            let words = format!("{QUICK} {flags}");
            assert!(
                ranks(count, &words, 8) == ranks(count, &words, 8),
                "{count} ranks, {flags}"
            );
        },
    );
}

#[test]
fn when_buckets_are_reduced_changes_nothing_and_in_what_type_does() {
    let first = ranks(2, &format!("{QUICK} --overlap off"), 8);
    assert!(ranks(2, &format!("{QUICK} --overlap on"), 8) == first);
    let (losses, bytes) = ranks(2, &format!("{QUICK} --reduce-dtype bf16"), 8);
    // Losses travel as they are: the first is that of the same model.
    assert!(losses[0] == first.0[0] && bytes != first.1);
}

/// A convex problem, so that rounding can be followed: softmax regression by plain gradient
/// descent. 21 steps, in batches of 31 rows and 24 at an epoch's end, and evaluations of 31 rows.
const DATA: &str = "synthetic:classification,rows=210,held-out=31,features=8,classes=4";
pub(crate) const STEPS: usize = 21;
const RATE: f64 = 0.05;

pub(crate) fn convex(flags: &str) -> String {
    format!(
        "--data {DATA} --hidden none --batch-size 31 --epochs 3 --optimizer sgd --momentum 0 --weight-decay 0 \
         --schedule constant --warmup-steps 0 --lr {RATE} --log-every 1 --out OUT {flags}"
    )
}

/// The norm of the longest row of both splits, with a 1 for the bias.
fn longest_row() -> f64 {
    let data = data::open(&DATA.parse::<DataSpec>().unwrap()).unwrap();
    let norms = [data.train, data.held_out].into_iter().flat_map(|split| {
        (0..split.rows()).map(move |row| {
            let [x, _] = data::read_rows(&*split, &[row]).unwrap();
            let x = x.to_vec::<f32>().unwrap();
            (1.0 + x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>()).sqrt()
        })
    });
    norms.fold(0.0, f64::max)
}

/// How far the losses of two runs may differ after each number of updates if only rounding differs.
///
/// X is the norm of the longest row, W bounds that of the weights, u is a rounding. n roundings in
/// a row change a sum by n·u times the sum of its terms' magnitudes (n·n·u² is covered by the
/// slack).
pub(crate) fn bound(updates: usize) -> f64 {
    let (x, u) = (longest_row(), f64::from(f32::EPSILON) / 2.0);
    // The gradient of a row's loss is (p − y)·xᵀ, and no longer than √2·X.
    let gradient = 2f64.sqrt() * x;
    // PyTorch's initialisation: 36 values, none beyond 1/√8.
    let w = (36.0f64 / 8.0).sqrt() + updates as f64 * RATE * gradient;
    // A step w − rate·∇ moves no two points further apart if rate ≤ 2/L, and L ≤ X²/2 for softmax
    // regression.
    assert!(RATE <= 4.0 / (x * x), "{x}");
    // Outputs are sums of 9 products. Probabilities move no more than outputs, and these round:
    // differences from the largest (each up to 2·W·X), exponentials, their sum and the division.
    let outputs = 10.0 * u * w * x;
    let errors = outputs + (2.0 * w * x + 10.0) * u;
    // A gradient: each row's error, and sums of up to 31 rows over ranks and micro-batches,
    // divided.
    let of_gradient = x * errors + 40.0 * u * gradient;
    // An update: product and difference.
    let of_update = RATE * of_gradient + 3.0 * u * (w + RATE * gradient);
    // A loss: the error of its outputs, its logarithm, and the mean of up to 31, each at most 2·W·X
    // + ln 4.
    let of_loss = 2.0 * outputs + 16.0 * u * (2.0 * w * x + 2.0) + 40.0 * u * (2.0 * w * x + 2.0);
    2.0 * (updates as f64 * of_update * gradient + of_loss)
}

#[test]
fn however_the_work_is_shared_the_losses_are_equal_within_rounding() {
    let log_of = |count: usize, flags: &str| -> MetricsLog {
        let folder = Folder::new("shared");
        folder.ranks(count, &convex(flags)).run().assert_well();
        folder.metrics_log()
    };
    let folder = Folder::new("reference");
    folder.alone(&convex("")).run().assert_well();
    let one = folder.metrics_log();
    let losses = one.of_steps("loss");
    assert_eq!((losses.len(), one.all("eval").len()), (STEPS, 3));
    // The bound says something: the loss falls by far more.
    let falls = losses[..7].iter().sum::<f64>() / 7.0 - losses[14..].iter().sum::<f64>() / 7.0;
    assert!(
        bound(STEPS) < falls / 10.0,
        "bound {}, and the loss falls by {falls}",
        bound(STEPS)
    );

    let ways = [
        (1, ""),
        (1, "--micro-batch 4"),
        (2, ""),
        (2, "--micro-batch 5 --overlap on"),
        (3, ""),
        (3, "--overlap on --bucket-mb 0.001"),
        (3, "--threads 2 --micro-batch 1"),
    ];
    all_at_once(ways, |(count, flags)| {
        let log = log_of(count, flags);
        for (step, (got, want)) in log.of_steps("loss").iter().zip(&losses).enumerate() {
            let bound = bound(step);
            assert!(
                (got - want).abs() <= bound,
                "{count} ranks, {flags}, step {}: {got}, {want}, {bound}",
                step + 1
            );
        }
        for (got, want) in log.all("eval").into_iter().zip(one.all("eval")) {
            let (updates, got, want) = (got["step"].as_u64().unwrap(), &got["loss"], &want["loss"]);
            let difference = got.as_f64().unwrap() - want.as_f64().unwrap();
            assert!(
                difference.abs() <= bound(updates as usize),
                "{count} ranks, {flags}, evaluation {updates}"
            );
        }
        assert_eq!(log.of_steps("step").len(), STEPS);
        let same_rows = |name: &str| log.end().unwrap()[name] == one.end().unwrap()[name];
        assert!(same_rows("steps") && same_rows("samples"));
    });
}
