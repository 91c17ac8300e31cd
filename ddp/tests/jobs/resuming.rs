//! Resuming: wherever a run was killed, and on however many ranks it resumes, its results are those
//! of an undisturbed run.

use std::time::Duration;

use ddp::data::{self, DataSpec};

use crate::support::job::{Folder, Job, all_at_once};
use crate::support::metrics_log::{model_bytes, number};
use crate::support::processes::{at_random, while_nothing_happens};
use crate::support::random::mixed;

/// 20 steps, over epochs of 6 and a short batch; checkpoints after 3, 6, 9 …
pub(super) const SHORT: &str = "--data glyphs,rows=210,held-out=64 --hidden 16 --batch-size 32 --steps 20 --log-every 1 --checkpoint-every 3 --eval-every 6 \
                     --threads 1 --out OUT";
pub(super) const SHORT_STEPS: u64 = 20;

pub(super) fn job(folder: &Folder, ranks: usize, words: &str) -> Job {
    match ranks {
        1 => folder.alone(words),
        _ => folder.ranks(ranks, words),
    }
}

/// What must be the same of a run that was interrupted: every step and evaluation, and the model.
pub(super) type Outcome = (Vec<Vec<f64>>, Vec<f64>, Vec<u8>);

#[track_caller]
pub(super) fn outcome(folder: &Folder, steps: u64) -> Outcome {
    let log = folder.metrics_log();
    let of_steps = ["step", "epoch", "loss", "lr", "grad_norm"]
        .map(|field| log.of_steps(field))
        .to_vec();
    let evals = log
        .all("eval")
        .into_iter()
        .map(|eval| number(eval, "loss"))
        .collect();
    (of_steps, evals, model_bytes(&folder.out(), steps))
}

#[track_caller]
pub(super) fn undisturbed(ranks: usize, words: &str, steps: u64) -> Outcome {
    let folder = Folder::new("undisturbed");
    job(&folder, ranks, words).run().assert_well();
    outcome(&folder, steps)
}

/// The steps that are saved under their names.
pub(super) fn saved(folder: &Folder) -> Vec<u64> {
    let names = folder.checkpoints();
    names
        .iter()
        .filter_map(|name| name.strip_prefix("step-")?.parse().ok())
        .collect()
}

/// With these flags, a run that is killed in step 8 and resumed has the bytes of an undisturbed
/// one.
#[track_caller]
fn assert_survives(ranks: usize, rank: usize, place: &str, flags: &str, expected: &Outcome) {
    let folder = Folder::new(&format!("{place}-{rank}"));
    let words = format!("{SHORT} {flags}");
    // What belongs to a checkpoint happens where there is one.
    let step = if matches!(place, "snapshot" | "save") {
        9
    } else {
        8
    };
    let ended = job(&folder, ranks, &words)
        .env("DDP_TEST_FAULT", &format!("{rank}:{place}:{step}:kill"))
        .run();
    assert!(
        ended.exit_code() == Some(137) || ended.signal() == Some(9),
        "{ended}"
    );
    // At least the checkpoint before the one being written exists; if another rank was writing,
    // that one too.
    let newest = *saved(&folder).last().unwrap_or(&0);
    let may_be_whole = step == 9 && rank == 1;
    assert!(
        [3, 6].contains(&newest) || (may_be_whole && newest == 9),
        "{place} on rank {rank}, {newest}: {ended}"
    );
    let ended = job(&folder, ranks, &format!("{words} --resume auto")).run();
    ended.assert_well();
    let resume = folder.metrics_log().all("resume")[0].clone();
    assert!(
        resume["step"] == newest
            && resume["ranks"] == ranks
            && resume["overridden"].as_array().unwrap().is_empty()
    );
    assert!(
        outcome(&folder, SHORT_STEPS) == *expected,
        "{ranks} ranks, rank {rank} in {place}, {flags}: {ended}"
    );
    let left: Vec<String> = folder
        .checkpoints()
        .into_iter()
        .filter(|name| !name.starts_with("step-"))
        .collect();
    assert_eq!(left, [""; 0], "{ended}");
}

const PLACES: [&str; 6] = [
    "forward",
    "reduction",
    "optimizer",
    "log",
    "snapshot",
    "save",
];

#[test]
fn the_bar_of_a_resumed_run_begins_at_the_steps_before() {
    let folder = Folder::new("bar");
    let words = "--data glyphs,rows=210,held-out=64 --hidden 8 --batch-size 32 --schedule constant \
                 --threads 1 --progress always --out OUT";
    let run = |steps| folder.alone(&format!("{words} {steps}")).run();
    run("--steps 4").assert_well();
    let ended = run("--steps 9 --resume auto");
    ended.assert_well();
    assert!(
        ended.stderr.contains("4/9") && !ended.stderr.contains("0/9"),
        "{ended}"
    );
}

#[test]
fn a_resume_with_another_batch_says_what_it_means_for_rows() {
    let folder = Folder::new("batch");
    folder.alone(SHORT).run().assert_well();
    let other = SHORT.replace("--batch-size 32 --steps 20", "--batch-size 16 --steps 24");
    let ended = folder
        .alone(&format!("{other} --resume auto --override"))
        .run();
    ended.assert_well();
    let told = "epochs are counted as if all steps had had this batch";
    assert!(ended.stderr.contains(told), "{ended}");
}

#[test]
fn killing_a_rank_anywhere_changes_no_bit() {
    let expected = undisturbed(2, SHORT, SHORT_STEPS);
    let cases = PLACES.iter().flat_map(|place| [(0, *place), (1, *place)]);
    let cases = ddp_testing::cases_of("ranks killed at each place", cases, 4);
    all_at_once(cases, |(rank, place)| {
        assert_survives(2, rank, place, "", &expected)
    });
}

#[test]
fn a_resumed_step_restores_all_other_state() {
    for flags in [
        "--dropout 0.2 --micro-batch 5 --grad-clip 1",
        "--optimizer sgd --schedule wsd --warmup-steps 4",
        "--optimizer sgd --momentum 0 --weight-decay 0.1 --drop-last",
        "--freeze 0 --label-smoothing 0.1",
    ] {
        let expected = undisturbed(1, &format!("{SHORT} {flags}"), SHORT_STEPS);
        assert_survives(1, 0, "forward", flags, &expected);
    }
}

#[test]
fn random_kills_lose_at_most_two_intervals_and_no_bits() {
    const EVERY: u64 = 3;
    let words = "--data glyphs,rows=2048,held-out=64 --hidden 32 --batch-size 256 --dropout 0.1 --steps 240 --log-every 1 --eval-every 50 \
                 --checkpoint-every 3 --threads 1 --out OUT";
    let expected = undisturbed(2, words, 240);
    // Each kill is drawn from its number.
    let kills = ddp_testing::cases("kills at random moments", 200, 1);
    let mut folder = Folder::new("random");
    let (mut killed, mut early) = (0, 0);
    while killed < kills.len() {
        let mut running = job(&folder, 2, &format!("{words} --resume auto")).start();
        running.wait_for(r#"{"event":"st"#);
        let number = kills[killed] as u64;
        // Another moment where the run was done before the last one.
        at_random(1 + early, number, Duration::from_millis(1200));
        running.signal_rank(mixed(2, number) as usize % 2, "KILL");
        let ended = running.wait();
        if ended.exit_code() == Some(0) {
            assert!(
                outcome(&folder, 240) == expected,
                "after {killed} kills: {ended}"
            );
            early += 1;
            folder = Folder::new("random");
            continue;
        }
        killed += 1;
        assert!(
            ended.exit_code() == Some(137) || ended.signal() == Some(9),
            "{ended}"
        );
        // Half a line may be the last. There is no log where the kill came after that of a run
        // without checkpoints was put aside and before another was begun.
        let text = match std::fs::read_to_string(folder.out().join("metrics.jsonl")) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            read => read.unwrap(),
        };
        let taken = text.matches(r#"{"event":"step""#).count() as u64;
        let newest = *saved(&folder).last().unwrap_or(&0);
        let lines = text
            .lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        let told = lines
            .filter(|line| line["event"] == "checkpoint")
            .filter_map(|line| line["step"].as_u64())
            .max();
        assert!(
            told.unwrap_or(0) <= newest,
            "what is logged is there, {told:?}, {newest}: {ended}"
        );
        // Only the last checkpoint that was due may be incomplete: before it, training waited for
        // the previous one.
        let due = taken / EVERY * EVERY;
        let begun = if taken > due {
            due
        } else {
            due.saturating_sub(EVERY)
        };
        assert!(
            newest + EVERY >= begun,
            "of {taken} steps {newest} are saved: {ended}"
        );
    }
    job(&folder, 2, &format!("{words} --resume auto"))
        .run()
        .assert_well();
    assert!(outcome(&folder, 240) == expected);
}

#[test]
fn a_checkpoint_that_is_due_waits_for_the_one_before() {
    let folder = Folder::new("due");
    let mut running = folder
        .together(SHORT)
        .env("DDP_TEST_FAULT", "0:save:6:hang")
        .start();
    running.wait_for(r#"{"event":"step","step":9,"#);
    while_nothing_happens(Duration::from_secs(1));
    running.signal_rank(0, "KILL");
    let ended = running.wait();
    assert_eq!(
        (folder.metrics_log().of_steps("step").last(), saved(&folder)),
        (Some(&9.0), vec![3]),
        "{ended}"
    );
    // Where it is written, what came after it is all that is lost.
    let folder = Folder::new("written");
    let running = folder
        .together(SHORT)
        .env("DDP_TEST_FAULT", "0:forward:9:hang")
        .start();
    running.wait_for_file("out/checkpoints/step-00000006");
    running.signal_rank(0, "KILL");
    running.wait();
    let ended = folder.together(&format!("{SHORT} --resume auto")).run();
    ended.assert_well();
    assert!(ended.stderr.contains("resuming after step 6"), "{ended}");
}

/// The rows that all ranks took in each step, in the order of ranks, of the lines that a job wrote.
fn rows_of(folder: &Folder, ranks: usize, name: &str) -> std::collections::BTreeMap<u64, Vec<u64>> {
    let mut rows = std::collections::BTreeMap::<u64, Vec<u64>>::new();
    for rank in 0..ranks {
        let text = std::fs::read_to_string(folder.path().join(format!("{name}-{rank}"))).unwrap();
        for line in text.lines() {
            let (step, of_step) = line
                .split_once(": ")
                .unwrap_or((line.trim_end_matches(':'), ""));
            let of_step = of_step
                .split_whitespace()
                .map(|row| row.parse::<u64>().unwrap());
            rows.entry(step.parse().unwrap())
                .or_default()
                .extend(of_step);
        }
    }
    rows
}

#[test]
fn on_other_numbers_of_ranks_every_row_still_comes_once_an_epoch() {
    let folder = Folder::new("rows");
    // Epochs of 11 steps, the last of 3 rows. Runs end in the middle of an epoch.
    let words = "--data synthetic:regression,rows=103,held-out=0,features=4 --hidden none --batch-size 10 --lr 1e-9 --schedule constant --warmup-steps 0 --out OUT --resume auto";
    let mut seen = std::collections::BTreeMap::new();
    for (before, ranks, steps, flags) in [
        (0, 4, 8, "--zero 1"),
        (4, 2, 19, ""),
        (2, 3, 33, "--zero 1"),
    ] {
        let name = format!("rows-{ranks}");
        let path = folder.path().join(&name).display().to_string();
        let job = folder.ranks(ranks, &format!("{words} --steps {steps} {flags}"));
        let ended = job.env("DDP_TEST_ROWS", &path).run();
        ended.assert_well();
        let changes = format!("the number of ranks changes from {before} to {ranks}: ");
        assert_eq!(ended.stderr.contains(&changes), before > 0, "{ended}");
        let rows = rows_of(&folder, ranks, &name);
        assert_eq!(
            rows.len() as u64,
            steps - seen.len() as u64,
            "{ranks} ranks"
        );
        seen.extend(rows);
    }
    assert_eq!(
        seen.keys().copied().collect::<Vec<_>>(),
        (1..=33).collect::<Vec<_>>()
    );
    for epoch in 0..3 {
        let mut rows: Vec<u64> = (1..=11)
            .flat_map(|step| seen[&(11 * epoch + step)].clone())
            .collect();
        rows.sort_unstable();
        assert!(rows.iter().copied().eq(0..103), "epoch {epoch}: {rows:?}");
    }
    let resumes = folder.metrics_log();
    let ranks: Vec<f64> = resumes
        .all("resume")
        .into_iter()
        .map(|event| number(event, "ranks"))
        .collect();
    assert_eq!(ranks, [2.0, 3.0]);
}

/// A convex problem, so that rounding can be followed: softmax regression by plain gradient
/// descent. 21 steps, in batches of 31 rows and 24 at an epoch's end, and evaluations of 31 rows.
const DATA: &str = "synthetic:classification,rows=210,held-out=31,features=8,classes=4";
const CONVEX_STEPS: usize = 21;
const RATE: f64 = 0.05;

fn convex(flags: &str) -> String {
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
fn bound(updates: usize) -> f64 {
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
fn on_other_numbers_of_ranks_losses_are_equal_within_rounding() {
    let one = Folder::new("one");
    one.alone(&convex("")).run().assert_well();
    let expected = one.metrics_log().of_steps("loss");
    // The bound says something: the loss falls by far more.
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / 7.0;
    let falls = mean(&expected[..7]) - mean(&expected[14..]);
    assert!(bound(CONVEX_STEPS) < falls / 10.0, "{falls}");
    let folder = Folder::new("resharded");
    for (ranks, steps, flags) in [
        (4, 8, "--zero 1"),
        (2, 15, "--micro-batch 31"),
        (3, CONVEX_STEPS, ""),
    ] {
        let words = convex(flags).replace(
            "--epochs 3",
            &format!("--steps {steps} --resume auto --override"),
        );
        folder.ranks(ranks, &words).run().assert_well();
    }
    let losses = folder.metrics_log().of_steps("loss");
    assert_eq!(losses.len(), CONVEX_STEPS);
    for (updates, (got, want)) in losses.iter().zip(&expected).enumerate() {
        assert!(
            (got - want).abs() <= bound(updates),
            "step {}: {got}, {want}, {}",
            updates + 1,
            bound(updates)
        );
    }
}

#[test]
fn of_two_jobs_that_start_in_one_folder_the_second_to_write_is_refused() {
    let folder = Folder::new("two");
    let words = format!("{SHORT} --resume auto");
    let slow = folder
        .alone(&words)
        .env("DDP_TEST_FAULT", "0:setup:0:hold")
        .start();
    // It has seen an empty folder, in which another job now trains.
    slow.wait_for_fault("0:setup:0");
    let there = words.replace("OUT", &folder.out().display().to_string());
    Folder::new("quick").alone(&there).run().assert_well();
    let in_out = || {
        let mut tree = folder.tree();
        tree.retain(|(path, ..)| path.starts_with(folder.out()));
        tree
    };
    let before = in_out();
    slow.go_on(0);
    let ended = slow.wait();
    let cause = ended.assert_fails(2);
    assert!(cause.contains("it holds a run already"), "{ended}");
    assert!(in_out() == before, "{ended}");
}
