//! Resuming: wherever a run was killed, and on however many ranks it resumes, its results are those
//! of an undisturbed run.

use std::path::Path;
use std::time::Duration;

use crate::made::{CLASSES, ROWS, csv, row};
#[cfg(feature = "mpi")]
use crate::same::{STEPS as CONVEX_STEPS, bound, convex};
#[cfg(feature = "mpi")]
use crate::support::job::all_at_once;
use crate::support::job::{Ended, Folder, Job};
use crate::support::random::mixed;
use crate::support::record::{model_bytes, number};

/// 20 steps, over epochs of 6 and a short batch; checkpoints after 3, 6, 9 …
const SHORT: &str = "--data glyphs,rows=210,held-out=64 --hidden 16 --batch-size 32 --steps 20 --log-every 1 --checkpoint-every 3 --eval-every 6 \
                     --threads 1 --out OUT";
const SHORT_STEPS: u64 = 20;

fn job(folder: &Folder, ranks: usize, words: &str) -> Job {
    match ranks {
        1 => folder.alone(words),
        #[cfg(feature = "mpi")]
        _ => folder.ranks(ranks, words),
        #[cfg(not(feature = "mpi"))]
        _ => unreachable!("without MPI there is one rank"),
    }
}

/// What must be the same of a run that was interrupted: every step and evaluation, and the model.
type Outcome = (Vec<Vec<f64>>, Vec<f64>, Vec<u8>);

#[track_caller]
fn outcome(folder: &Folder, steps: u64) -> Outcome {
    let record = folder.record();
    let of_steps = ["step", "epoch", "loss", "lr", "grad_norm"]
        .map(|field| record.of_steps(field))
        .to_vec();
    let evals = record
        .all("eval")
        .into_iter()
        .map(|eval| number(eval, "loss"))
        .collect();
    (of_steps, evals, model_bytes(&folder.out(), steps))
}

#[track_caller]
fn undisturbed(ranks: usize, words: &str, steps: u64) -> Outcome {
    let folder = Folder::new("undisturbed");
    job(&folder, ranks, words).run().assert_well();
    outcome(&folder, steps)
}

/// The steps that are saved under their names.
fn saved(folder: &Folder) -> Vec<u64> {
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
    let resume = folder.record().all("resume")[0].clone();
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
fn a_process_alone_that_is_killed_anywhere_goes_on_to_the_same_bytes() {
    let expected = undisturbed(1, SHORT, SHORT_STEPS);
    for place in PLACES {
        // Nothing is reduced where there is one rank.
        if place != "reduction" {
            assert_survives(1, 0, place, "", &expected);
        }
    }
}

#[cfg(feature = "mpi")]
#[test]
fn a_rank_that_is_killed_anywhere_costs_no_bit() {
    let expected = undisturbed(2, SHORT, SHORT_STEPS);
    let cases = PLACES.iter().flat_map(|place| [(0, *place), (1, *place)]);
    all_at_once(cases, |(rank, place)| {
        assert_survives(2, rank, place, "", &expected)
    });
}

#[test]
fn whatever_else_a_step_depends_on_is_gone_on_with() {
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

#[cfg(feature = "mpi")]
#[test]
fn ranks_that_share_the_optimizers_moments_go_on_with_them() {
    all_at_once(
        [
            (2, "--zero 1"),
            (3, "--zero 1 --overlap on --bucket-mb 0.01 --dropout 0.1"),
        ],
        |(ranks, flags)| {
            let expected = undisturbed(ranks, &format!("{SHORT} {flags}"), SHORT_STEPS);
            assert_survives(ranks, ranks - 1, "optimizer", flags, &expected);
        },
    );
}

#[test]
fn killed_at_random_moments_a_run_loses_an_interval_and_what_is_being_written_and_comes_to_the_same_bytes()
 {
    const EVERY: u64 = 3;
    let ranks = if cfg!(feature = "mpi") { 2 } else { 1 };
    let words = "--data glyphs,rows=2048,held-out=64 --hidden 32 --batch-size 256 --dropout 0.1 --steps 240 --log-every 1 --eval-every 50 \
                 --checkpoint-every 3 --threads 1 --out OUT";
    let expected = undisturbed(ranks, words, 240);
    // Each kill is drawn from its number.
    let kills = ddp_slice::of("kills at random moments", 200, 8);
    let mut folder = Folder::new("random");
    let mut killed = 0;
    while killed < kills.len() {
        let mut running = job(&folder, ranks, &format!("{words} --resume auto")).start();
        running.wait_for(r#"{"event":"st"#);
        // Alone a run takes two thirds of a second.
        let within_ms = if ranks == 1 { 700 } else { 1200 };
        let drawn = |stream: u64, below: u64| mixed(stream, kills[killed] as u64) % below;
        std::thread::sleep(Duration::from_millis(drawn(1, within_ms)));
        running.signal_rank(drawn(2, ranks as u64) as usize, "KILL");
        let ended = running.wait();
        if ended.exit_code() == Some(0) {
            assert!(
                outcome(&folder, 240) == expected,
                "after {killed} kills: {ended}"
            );
            folder = Folder::new("random");
            continue;
        }
        killed += 1;
        assert!(
            ended.exit_code() == Some(137) || ended.signal() == Some(9),
            "{ended}"
        );
        // Half a line may be the last.
        let text = std::fs::read_to_string(folder.out().join("metrics.jsonl")).unwrap();
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
            "what is on record is there, {told:?}, {newest}: {ended}"
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
    job(&folder, ranks, &format!("{words} --resume auto"))
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
    std::thread::sleep(Duration::from_secs(1));
    running.signal_rank(0, "KILL");
    let ended = running.wait();
    assert_eq!(
        (folder.record().of_steps("step").last(), saved(&folder)),
        (Some(&9.0), vec![3]),
        "{ended}"
    );
    // Where it is written, what came after it is all that is lost.
    let folder = Folder::new("written");
    let running = folder
        .together(SHORT)
        .env("DDP_TEST_FAULT", "0:forward:9:hang")
        .start();
    let began = std::time::Instant::now();
    while saved(&folder) != [3, 6] {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "{:?}",
            folder.checkpoints()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    running.signal_rank(0, "KILL");
    running.wait();
    let ended = folder.together(&format!("{SHORT} --resume auto")).run();
    ended.assert_well();
    assert!(ended.stderr.contains("resuming after step 6"), "{ended}");
}

/// The rows that all ranks took in each step, in the order of ranks, of the lines that a job wrote.
#[cfg(feature = "mpi")]
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

#[cfg(feature = "mpi")]
#[test]
fn on_other_numbers_of_ranks_every_row_still_comes_once_an_epoch() {
    let folder = Folder::new("rows");
    // Epochs of 11 steps, the last of 3 rows. Runs end in the middle of an epoch.
    let words = "--data synthetic:row-number,rows=103,held-out=0 --hidden none --batch-size 10 --lr 1e-9 --schedule constant --warmup-steps 0 --out OUT --resume auto";
    let mut seen = std::collections::BTreeMap::new();
    for (ranks, steps, flags) in [(4, 8, "--zero 1"), (2, 19, ""), (3, 33, "--zero 1")] {
        let name = format!("rows-{ranks}");
        let path = folder.path().join(&name).display().to_string();
        folder
            .ranks(ranks, &format!("{words} --steps {steps} {flags}"))
            .env("DDP_TEST_ROWS", &path)
            .run()
            .assert_well();
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
    let resumes = folder.record();
    let ranks: Vec<f64> = resumes
        .all("resume")
        .into_iter()
        .map(|event| number(event, "ranks"))
        .collect();
    assert_eq!(ranks, [2.0, 3.0]);
}

#[cfg(feature = "mpi")]
#[test]
fn on_other_numbers_of_ranks_losses_are_equal_within_rounding() {
    let one = Folder::new("one");
    one.alone(&convex("")).run().assert_well();
    let expected = one.record().of_steps("loss");
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
    let losses = folder.record().of_steps("loss");
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

/// A run of which 7 steps are taken, at a constant rate.
fn seven_steps(name: &str) -> Folder {
    let folder = Folder::new(name);
    folder.alone(&seven("--steps 7")).run().assert_well();
    assert_eq!(saved(&folder), [3, 6, 7]);
    folder
}

fn seven(flags: &str) -> String {
    format!(
        "{} {flags}",
        SHORT.replace("--steps 20", "--schedule constant --warmup-steps 0")
    )
}

#[test]
fn flags_that_alter_what_is_computed_are_refused_by_name_and_overridden_where_that_is_asked_for() {
    let folder = seven_steps("flags");
    let before = folder.tree();
    let words = seven("--steps 9 --lr 0.01 --seed 7 --resume auto");
    let ended = folder.alone(&words).run();
    let cause = ended.assert_fails(2);
    for part in [
        "step 7",
        "--lr 0.01 (was 0.001)",
        "--seed 7 (was 0)",
        "--override",
    ] {
        assert!(cause.contains(part), "{part}: {ended}");
    }
    let data = words
        .replace("--lr 0.01 --seed 7", "")
        .replace("rows=210", "rows=211");
    assert!(
        folder
            .alone(&data)
            .run()
            .assert_fails(2)
            .contains("--data with other rows")
    );
    let longer = words
        .replace("--lr 0.01 --seed 7", "")
        .replace("--schedule constant", "--schedule cosine");
    let ended = folder.alone(&longer).run();
    assert!(
        ended.assert_fails(2).contains(
            "--schedule cosine (was constant), --steps 9 (was 7; --schedule cosine depends on it)"
        ),
        "{ended}"
    );
    assert!(folder.tree() == before, "what is refused changes nothing");

    let ended = folder.alone(&format!("{words} --override")).run();
    ended.assert_well();
    let resume = folder.record().all("resume")[0].clone();
    assert_eq!(
        resume["overridden"],
        serde_json::json!(["--lr 0.01 (was 0.001)", "--seed 7 (was 0)"]),
        "{ended}"
    );
    let config = std::fs::read_to_string(folder.out().join("config.toml")).unwrap();
    assert!(
        config.contains("lr = 0.01") && config.contains(r#"resume = "never""#),
        "{config}"
    );
}

#[test]
fn a_run_that_is_taken_finished_or_not_there_says_so() {
    let folder = seven_steps("states");
    let before = folder.tree();
    let ended = folder.alone(&seven("--steps 9")).run();
    assert!(
        ended.assert_fails(2).contains("it holds a run already")
            && ended.stderr.contains("--resume auto"),
        "{ended}"
    );
    let ended = folder.alone(&seven("--steps 7 --resume auto")).run();
    ended.assert_well();
    assert!(
        ended
            .stderr
            .contains("has taken all its 7 steps: nothing is left to do"),
        "{ended}"
    );
    let ended = folder.alone(&seven("--steps 7 --lr 5 --resume auto")).run();
    assert!(
        ended.assert_fails(2).contains("--lr 5 (was 0.001)"),
        "{ended}"
    );
    let ended = folder.alone(&seven("--steps 7 --resume true")).run();
    assert!(
        ended
            .assert_fails(2)
            .contains("--resume true: expected never, auto, or the folder of a checkpoint in"),
        "{ended}"
    );
    let ended = folder.alone(&seven("--steps 5 --resume auto")).run();
    assert!(
        ended
            .assert_fails(2)
            .contains("has taken 7 steps: expected a run of as many or more"),
        "{ended}"
    );
    assert!(folder.tree() == before, "nothing is changed");
    let fresh = Folder::new("fresh");
    let ended = fresh.alone(&seven("--steps 2 --resume auto")).run();
    ended.assert_well();
    assert!(
        ended.stderr.contains("holds no run to resume") && fresh.record().all("resume").is_empty(),
        "{ended}"
    );
}

#[test]
fn an_older_checkpoint_can_be_gone_on_from_and_later_ones_are_put_aside() {
    let folder = seven_steps("older");
    let checkpoint = |step: u64| {
        folder
            .out()
            .join(format!("checkpoints/step-{step:08}"))
            .display()
            .to_string()
    };
    let expected = undisturbed(1, &seven("--steps 8"), 8);
    folder
        .alone(&seven(&format!("--steps 8 --resume {}", checkpoint(3))))
        .run()
        .assert_well();
    assert!(outcome(&folder, 8) == expected);
    assert_eq!(saved(&folder), [3, 6, 8]);
    assert!(
        folder
            .checkpoints()
            .contains(&"superseded-step-00000007".to_string()),
        "{:?}",
        folder.checkpoints()
    );
    // Of another run, and none at all.
    let other = Folder::new("other");
    let ended = other
        .alone(&seven(&format!("--steps 8 --resume {}", checkpoint(3))))
        .run();
    let cause = ended.assert_fails(2);
    assert!(
        cause.contains("or the folder of a checkpoint in") && cause.contains("as --out"),
        "{ended}"
    );
    let ended = folder
        .alone(&seven(&format!("--steps 8 --resume {}", checkpoint(5))))
        .run();
    assert!(ended.assert_fails(2).contains("step-00000005"), "{ended}");
}

#[test]
fn a_checkpoint_that_was_put_aside_is_resumed_from_under_its_own_name() {
    let folder = seven_steps("aside");
    let checkpoints = folder.out().join("checkpoints");
    let words = |name: &str| {
        seven(&format!(
            "--steps 9 --resume {}",
            checkpoints.join(name).display()
        ))
    };
    folder.alone(&words("step-00000003")).run().assert_well();
    let ended = folder.alone(&words("superseded-step-00000007")).run();
    let cause = ended.assert_fails(2);
    assert!(
        cause.contains("help: rename it to") && cause.contains("step-00000007"),
        "{ended}"
    );
    let (aside, named) = ("superseded-step-00000007", "step-00000007");
    std::fs::rename(checkpoints.join(aside), checkpoints.join(named)).unwrap();
    folder.alone(&words(named)).run().assert_well();
    assert_eq!(saved(&folder), [6, 7, 9]);
}

#[test]
fn a_finished_run_without_a_report_gets_one() {
    let folder = seven_steps("over");
    let report = folder.out().join("report.html");
    std::fs::remove_file(&report).unwrap();
    let ended = folder.together(&seven("--steps 7 --resume auto")).run();
    ended.assert_well();
    assert!(report.exists(), "{ended}");
}

#[test]
fn rows_to_evaluate_on_that_are_others_make_the_best_anew() {
    let folder = Folder::new("held-out");
    let table = |name: &str, rows: std::ops::Range<usize>| {
        let table = csv(rows, |index| CLASSES[row(index).1].into());
        std::fs::write(folder.path().join(name), table).unwrap();
    };
    table("train.csv", 0..ROWS);
    table("held-out.csv", 0..9);
    table("others.csv", 1..10);
    let run = |held_out: &str, steps: u64| {
        let words = "--data train.csv --hidden 8 --batch-size 20 --schedule constant --warmup-steps 0 --lr 1e-5 --resume auto --out OUT";
        let ended = folder
            .alone(&format!("{words} --val-data {held_out} --steps {steps}"))
            .run();
        ended.assert_well();
        let state = std::fs::read(
            folder
                .out()
                .join(format!("checkpoints/step-{steps:08}/state.json")),
        )
        .unwrap();
        let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
        (
            state["best"]["step"].as_u64().unwrap(),
            state["held_out"].as_str().unwrap().to_string(),
            ended,
        )
    };
    let (_, rows, _) = run("held-out.csv", 4);
    let (_, same, ended) = run("held-out.csv", 5);
    assert!(
        same == rows && !ended.stderr.contains("determined anew"),
        "{ended}"
    );
    let (best, others, ended) = run("others.csv", 6);
    assert!(best == 6 && others != rows, "{best}: {ended}");
    assert!(
        ended
            .stderr
            .contains("the held-out rows are not those of step"),
        "{ended}"
    );
}

#[test]
fn a_run_without_an_intact_checkpoint_is_left_alone() {
    let folder = seven_steps("unusable");
    for step in [3, 6, 7] {
        std::fs::write(
            folder
                .out()
                .join(format!("checkpoints/step-{step:08}/state.json")),
            "{}",
        )
        .unwrap();
    }
    let before = folder.tree();
    let ended = folder.alone(&seven("--steps 9 --resume auto")).run();
    let cause = ended.assert_fails(65);
    assert!(
        cause.contains("another --out") && cause.contains("state.json"),
        "{ended}"
    );
    assert!(folder.tree() == before, "{ended}");
}

#[test]
fn a_run_whose_checkpoints_are_gone_is_left_alone() {
    let folder = seven_steps("gone");
    std::fs::remove_dir_all(folder.out().join("checkpoints")).unwrap();
    let before = folder.tree();
    let ended = folder.alone(&seven("--steps 9 --resume auto")).run();
    let cause = ended.assert_fails(65);
    assert!(
        cause.contains("knows 3 of them, the last of step 7") && cause.contains("another --out"),
        "{ended}"
    );
    assert!(folder.tree() == before, "{ended}");
}

/// The flags of the run that README.md shows, and of the longer one that resumes it.
fn readme_example() -> [String; 2] {
    let text = include_str!("../../../README.md").replace("\\\n", "");
    let flags = |line: &str| {
        let (_, flags) = line.split_once("ddp-train ")?;
        flags
            .contains("--out long")
            .then(|| flags.replace("--out long", "--out OUT"))
    };
    let lines: Vec<String> = text.lines().filter_map(flags).collect();
    lines
        .try_into()
        .expect("README.md shows two commands with --out long")
}

#[test]
fn readmes_example_has_the_bytes_of_a_run_that_never_stopped() {
    let [first, longer] = readme_example();
    let folder = Folder::new("readme");
    folder.alone(&first).run().assert_well();
    folder.alone(&longer).run().assert_well();
    let whole = Folder::new("whole");
    whole.alone(&longer).run().assert_well();
    assert!(model_bytes(&folder.out(), 100) == model_bytes(&whole.out(), 100));
}

#[test]
fn a_warm_up_that_follows_from_the_steps_is_refused_by_name_when_they_change() {
    let words = |flags: &str| SHORT.replace("--steps 20", &format!("--schedule constant {flags}"));
    let folder = Folder::new("warm-up");
    folder.alone(&words("--steps 60")).run().assert_well();
    let before = folder.tree();
    let ended = folder.alone(&words("--steps 100 --resume auto")).run();
    let cause = ended.assert_fails(2);
    let named = "--warmup-steps 10, by default a tenth of all steps (was 6)";
    assert!(cause.contains(named), "{ended}");
    assert!(folder.tree() == before, "{ended}");
    let ended = folder
        .alone(&words("--steps 100 --warmup-steps 6 --resume auto"))
        .run();
    ended.assert_well();
}

#[test]
fn a_damaged_checkpoint_is_passed_over_with_a_warning_that_says_why() {
    let folder = seven_steps("damaged");
    let model = folder
        .out()
        .join("checkpoints/step-00000007/model.safetensors");
    let mut bytes = std::fs::read(&model).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    std::fs::write(&model, bytes).unwrap();
    let expected = undisturbed(1, &seven("--steps 8"), 8);
    let ended = folder.alone(&seven("--steps 8 --resume auto")).run();
    ended.assert_well();
    assert!(
        ended.stderr.contains("step-00000007: ") && ended.stderr.contains("model.safetensors"),
        "{ended}"
    );
    assert_eq!(folder.record().all("resume")[0]["step"], 6);
    assert!(outcome(&folder, 8) == expected, "{ended}");
    // If it is named, there is no other.
    std::fs::remove_file(folder.out().join("checkpoints/step-00000003/state.json")).unwrap();
    let path = folder.out().join("checkpoints/step-00000003");
    let ended = folder
        .alone(&seven(&format!("--steps 9 --resume {}", path.display())))
        .run();
    assert!(
        ended
            .exit_code()
            .is_some_and(|code| code == 65 || code == 74)
            && ended.stderr.contains("state.json"),
        "{ended}"
    );
}

#[test]
fn what_a_crash_leaves_at_the_end_of_the_record_is_cut() {
    let expected = undisturbed(1, &seven("--steps 8"), 8);
    for tail in ["{\"event\":\"step\",\"step\":8,\"lo", "\0\0\0\0\0\0"] {
        let folder = seven_steps("half");
        let record = folder.out().join("metrics.jsonl");
        let text = std::fs::read_to_string(&record).unwrap();
        std::fs::write(&record, format!("{text}{tail}")).unwrap();
        folder
            .alone(&seven("--steps 8 --resume auto"))
            .run()
            .assert_well();
        let (of_steps, evals, bytes) = outcome(&folder, 8);
        // The run of 7 steps was over, and evaluated once more.
        assert!(
            of_steps == expected.0 && bytes == expected.2 && evals.len() == expected.1.len() + 1,
            "{tail:?}"
        );
    }
    // A record that was lost begins anew.
    let folder = seven_steps("lost");
    std::fs::remove_file(folder.out().join("metrics.jsonl")).unwrap();
    folder
        .alone(&seven("--steps 8 --resume auto"))
        .run()
        .assert_well();
    assert_eq!(
        (
            folder.record().of_steps("step"),
            folder.record().all("resume").len()
        ),
        (vec![8.0], 1)
    );
}

#[test]
fn a_loss_that_is_no_number_leaves_the_checkpoints_before_it() {
    let folder = Folder::new("nonfinite");
    let words = SHORT
        .replace("--log-every 1", "--log-every 7")
        .replace("--checkpoint-every 3", "--checkpoint-every 1");
    let words = format!("{words} --lr 1e30 --optimizer sgd --warmup-steps 0");
    let ended = folder.together(&words).run();
    let cause = ended.assert_fails(76);
    assert!(
        cause.contains("step 2: the loss or its gradient is not finite"),
        "{ended}"
    );
    assert_eq!(folder.checkpoints(), ["step-00000001"], "{ended}");
    let ended = folder.together(&format!("{words} --resume auto")).run();
    assert!(
        ended.assert_fails(76).contains("step 2: ")
            && ended.stderr.contains("resuming after step 1"),
        "{ended}"
    );
    assert_eq!(folder.checkpoints(), ["step-00000001"], "{ended}");
}

#[test]
fn the_newest_are_kept_and_the_best() {
    let folder = Folder::new("keep");
    // It learns at first, and is driven away when the rate has risen.
    let words = "--data glyphs,rows=256,held-out=64 --hidden 16 --batch-size 32 --steps 24 --eval-every 3 --checkpoint-every 3 --keep 2 \
                 --optimizer sgd --momentum 0 --lr 30 --warmup-steps 24 --out OUT";
    folder.together(words).run().assert_well();
    let record = folder.record();
    let evals: Vec<(f64, u64)> = record
        .all("eval")
        .into_iter()
        .map(|eval| (number(eval, "loss"), number(eval, "step") as u64))
        .collect();
    let best = evals
        .iter()
        .copied()
        .min_by(|a, b| a.0.total_cmp(&b.0))
        .unwrap()
        .1;
    assert!(best < 21, "the last are not the best: {evals:?}");
    assert_eq!(saved(&folder), [best, 21, 24], "{evals:?}");
}

#[test]
fn a_model_that_is_better_than_ever_is_saved_wherever_checkpoints_fall() {
    let folder = Folder::new("best");
    let words = "--data glyphs,rows=256,held-out=64 --hidden 16 --batch-size 32 --steps 12 --eval-every 5 --checkpoint-every 100 --out OUT";
    folder.together(words).run().assert_well();
    assert_eq!(saved(&folder), [5, 10, 12]);
}

#[test]
fn a_run_begins_with_a_given_model_if_it_is_the_models() {
    let first = seven_steps("first");
    let model = first
        .out()
        .join("checkpoints/step-00000007/model.safetensors");
    let begin = |words: &str, path: &Path| -> (Folder, Ended) {
        let folder = Folder::new("init");
        let ended = folder
            .together(&format!("{words} --init-from {}", path.display()))
            .run();
        (folder, ended)
    };
    for path in [model.as_path(), model.parent().unwrap()] {
        let (folder, ended) = begin(&seven("--steps 0"), path);
        ended.assert_well();
        assert!(model_bytes(&folder.out(), 0) == std::fs::read(&model).unwrap());
    }
    let (_, ended) = begin(
        &seven("--steps 0").replace("--hidden 16", "--hidden 17"),
        &model,
    );
    assert!(
        ended
            .assert_fails(65)
            .contains("has the shape [16, 784], and [17, 784] in the model"),
        "{ended}"
    );
    let pickle = first.path().join("model.pt");
    std::fs::write(&pickle, b"PK\x03\x04 and so on").unwrap();
    let (_, ended) = begin(&seven("--steps 0"), &pickle);
    assert!(ended.assert_fails(65).contains("safetensors"), "{ended}");
    let (_, ended) = begin(&seven("--steps 0"), Path::new("nowhere.safetensors"));
    assert!(
        ended.assert_fails(74).contains("nowhere.safetensors"),
        "{ended}"
    );
}

/// `tests/golden/checkpoint-0.5` was written by ddp-train 0.5.0.
#[test]
fn a_checkpoint_of_version_0_5_is_resumed_and_used() {
    let folder = Folder::new("older-version");
    let checkpoint = folder.out().join("checkpoints/step-00000004");
    std::fs::create_dir_all(&checkpoint).unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/checkpoint-0.5");
    for entry in std::fs::read_dir(golden).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), checkpoint.join(entry.file_name())).unwrap();
    }
    let data = "--data glyphs,rows=64,held-out=16";
    let eval = folder.alone(&format!("eval --checkpoint OUT {data}")).run();
    eval.assert_well();
    let flags = "--hidden 1 --batch-size 16 --schedule constant --warmup-steps 0 --out OUT";
    let ended = folder
        .alone(&format!(
            "{data} {flags} --steps 6 --resume auto --device cpu"
        ))
        .run();
    ended.assert_well();
    assert_eq!(saved(&folder), [4, 6], "{ended}");
}
