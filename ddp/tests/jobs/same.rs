//! What must not change a result: repeating the run, other folders, threads, and how many ranks
//! share the work.

use crate::support::job::{Folder, QUICK, all_at_once};
use crate::support::metrics_log::model_bytes;

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
