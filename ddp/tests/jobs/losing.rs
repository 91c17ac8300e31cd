//! A job that continues without ranks that it loses, and takes in those that come (`--min-ranks`):
//! with `--same-bits` its model is, to the bit, that of the run that was never disturbed.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::tcp;
use crate::support::job::{Ended, Folder, Running, all_at_once};
use crate::support::metrics_log::{MetricsLog, model_bytes};
use crate::support::random::mixed;

/// 40 steps of some milliseconds, with everything that lies between two steps.
pub(super) const RUN: &str = "--data glyphs,rows=1024,held-out=64 --hidden 32 --batch-size 64 --steps 40 \
                   --log-every 1 --eval-every 7 --checkpoint-every 9 --same-bits 4 --dropout 0.1 \
                   --grad-clip 1 --micro-batch 8 --threads 1 --out OUT";

/// What a run leaves that must not depend on its ranks: its model, and the steps, losses and
/// evaluations of its metrics log.
#[derive(PartialEq)]
struct Left {
    model: Vec<u8>,
    steps: Vec<f64>,
    evaluated: Vec<f64>,
    losses: Vec<f64>,
    digests: Vec<Value>,
}

fn left(folder: &Folder, steps: u64) -> Left {
    let log = folder.metrics_log();
    let evaluated = log.all("eval").into_iter();
    let logged = log.all("step").into_iter();
    Left {
        model: model_bytes(&folder.out(), steps),
        steps: log.of_steps("step"),
        evaluated: evaluated.map(|it| it["step"].as_f64().unwrap()).collect(),
        losses: log.losses(),
        digests: logged.map(|step| step["digests"].clone()).collect(),
    }
}

/// Of more ranks, and their optimizers: AdamW, SGD with momentum, and Muon.
const OPTIMIZERS: [&str; 3] = [
    "--same-bits 8",
    "--same-bits 8 --optimizer sgd --momentum 0.9",
    "--same-bits 8 --optimizer muon --hidden 32,32",
];

/// The run that nothing disturbs, without ZeRO-1.
fn undisturbed() -> &'static Left {
    undisturbed_with("")
}

/// The same with these words.
fn undisturbed_with(words: &'static str) -> &'static Left {
    static LEFT: Mutex<BTreeMap<&str, &OnceLock<Left>>> = Mutex::new(BTreeMap::new());
    let left_by = *(LEFT.lock().unwrap())
        .entry(words)
        .or_insert_with(|| Box::leak(Box::default()));
    left_by.get_or_init(|| {
        let folder = Folder::new("losing-none");
        folder.started(2, &with(RUN, words)).run().assert_well();
        let left = left(&folder, 40);
        assert_eq!(left.steps, (1..=40).map(f64::from).collect::<Vec<_>>());
        left
    })
}

/// The words of a run with others, which replace those of the same names.
fn with(run: &str, words: &str) -> String {
    let all: Vec<&str> = run.split_whitespace().collect();
    let others = all.chunks(2).filter(|pair| !words.contains(pair[0]));
    let others: Vec<String> = others.map(|pair| pair.join(" ")).collect();
    format!("{} {words}", others.join(" "))
}

#[track_caller]
pub(super) fn assert_undisturbed(folder: &Folder, ended: &Ended) {
    assert_as(undisturbed(), folder, ended);
}

#[track_caller]
fn assert_as(expected: &Left, folder: &Folder, ended: &Ended) {
    assert_eq!(ended.exit_code(), Some(0), "{ended}");
    let left = left(folder, 40);
    assert_eq!(left.steps, expected.steps, "{ended}");
    assert_eq!(left.evaluated, expected.evaluated, "{ended}");
    assert!(left.losses == expected.losses, "{ended}");
    assert!(left.digests == expected.digests, "{ended}");
    assert!(left.model == expected.model, "{ended}");
}

/// The ranks that the metrics log says were lost.
pub(super) fn lost(log: &MetricsLog) -> Vec<u64> {
    let events = log.all("ranks").into_iter();
    let lost = events.flat_map(|event| event["lost"].as_array().unwrap().clone());
    lost.map(|it| it["rank"].as_u64().unwrap()).collect()
}

/// Where each rank writes which steps it has taken.
fn rows(folder: &Folder) -> String {
    folder.path().join("rows").to_str().unwrap().into()
}

/// The steps that processes of a rank have completed, in order.
fn taken(folder: &Folder, rank: usize) -> Vec<u64> {
    let text = std::fs::read_to_string(format!("{}-{rank}", rows(folder))).unwrap_or_default();
    // The last line of a killed one may be cut.
    let steps = text.lines().filter_map(|line| line.split_once(": "));
    steps.map(|(step, _)| step.parse().unwrap()).collect()
}

/// The ranks that it says came.
fn joined(log: &MetricsLog) -> Vec<u64> {
    let events = log.all("ranks").into_iter();
    let joined = events.flat_map(|event| event["joined"].as_array().unwrap().clone());
    joined.map(|rank| rank.as_u64().unwrap()).collect()
}

#[test]
fn any_rank_can_be_lost_at_any_point_of_a_step() {
    let points = [
        "forward:14",
        "reduction:14",
        "optimizer:14",
        "log:14",
        "evaluation:14",
        "snapshot:18",
        "save:18",
    ];
    let faults = points.map(|point| [0, 2].map(|rank| format!("{rank}:{point}:kill")));
    undisturbed();
    let faults = ddp_slice::from("points of a step", faults.into_iter().flatten(), 4);
    all_at_once(faults, |fault| {
        let folder = Folder::new("losing-one");
        let job = folder.started(3, &format!("{RUN} --min-ranks 2"));
        let job = job.env("DDP_TEST_ROWS", &rows(&folder));
        let ended = job.env("DDP_TEST_FAULT", &fault).run();
        let expected: Vec<u64> = fault[..1].parse().into_iter().collect();
        assert_eq!(lost(&folder.metrics_log()), expected, "{fault}: {ended}");
        assert_undisturbed(&folder, &ended);
        for rank in 0..3 {
            // Only the step in progress, which no rank had completed, is taken again.
            let steps = taken(&folder, rank);
            let last = if expected == [rank as u64] {
                steps.len() as u64
            } else {
                40
            };
            assert_eq!(
                steps,
                (1..=last).collect::<Vec<_>>(),
                "rank {rank}, {fault}: {ended}"
            );
        }
    });
}

#[test]
fn ranks_can_be_lost_while_others_meet_or_join() {
    undisturbed();
    let faults = [
        ("0:forward:14:kill,1:meeting:2:kill", vec![0, 1]),
        (
            "3:forward:14:kill,0:meeting:2:kill,2:meeting:3:kill",
            vec![0, 2, 3],
        ),
        ("2:forward:14:kill,0:meeting:2:stop", vec![0, 2]),
        // The metrics log tells it, and the rank that wrote that is lost.
        ("2:forward:14:kill,0:told:2:kill", vec![0, 2]),
        (
            "3:forward:14:kill,0:told:2:kill,1:told:3:kill",
            vec![0, 1, 3],
        ),
        // Each process that comes, before the others know of it and when they have met.
        ("1:forward:14:kill,1:joining:0:kill", vec![1]),
        ("0:forward:14:kill,0:joining:0:stop", vec![0]),
        ("0:forward:14:kill,0:meeting:3:kill", vec![0, 0]),
    ];
    all_at_once(faults, |(faults, expected)| {
        let folder = Folder::new("losing-meeting");
        let comes = faults.contains("joining") || expected == [0, 0];
        let restarts = if comes { " --restarts 1" } else { "" };
        let words = format!("{RUN} --min-ranks 1 --timeout-s 2{restarts}");
        let slow = if comes { slow_steps() } else { String::new() };
        let job = folder.started(4, &words);
        let ended = job.env("DDP_TEST_FAULT", &format!("{faults},{slow}")).run();
        let mut lost = lost(&folder.metrics_log());
        lost.sort_unstable();
        assert_eq!(lost, expected, "{faults}: {ended}");
        assert_undisturbed(&folder, &ended);
    });
}

#[test]
fn what_goes_wrong_on_one_rank_alone_does_not_end_the_others() {
    undisturbed();
    // Data that one rank finds bad end the job: the others would find them, too.
    let kinds = [("panic", 70), ("memory", 71), ("error", 65)];
    let faults = [0, 2].map(|rank| kinds.map(|(kind, code)| (rank, kind, code)));
    all_at_once(faults.into_iter().flatten(), |(rank, kind, code)| {
        let folder = Folder::new("losing-wrong");
        let job = folder.started(3, &format!("{RUN} --min-ranks 2"));
        let fault = format!("{rank}:forward:14:{kind}");
        let ended = job.env("DDP_TEST_FAULT", &fault).run();
        if kind == "error" {
            return assert_eq!(ended.exit_code(), Some(code), "{ended}");
        }
        let text = std::fs::read_to_string(folder.out().join("metrics.jsonl")).unwrap();
        let told = format!(r#""lost":[{{"rank":{rank},"why":"ended with exit code {code}"}}]"#);
        assert!(text.contains(&told), "{ended}");
        assert_undisturbed(&folder, &ended);
    });
}

#[test]
fn a_rank_0_that_is_lost_at_the_end_is_replaced_by_the_next_one() {
    undisturbed();
    let folder = Folder::new("losing-end");
    let job = folder.started(3, &format!("{RUN} --min-ranks 3"));
    let ended = job.env("DDP_TEST_FAULT", "0:end:40:kill").run();
    assert_undisturbed(&folder, &ended);
    let log = folder.metrics_log();
    assert_eq!((lost(&log), log.all("end").len()), (vec![0], 1), "{ended}");
    assert!(folder.out().join("report.html").exists(), "{ended}");
    // Any other one does not matter.
    let folder = Folder::new("losing-end-of-another");
    let job = folder.started(3, &format!("{RUN} --min-ranks 3"));
    let ended = job.env("DDP_TEST_FAULT", "1:end:40:kill").run();
    assert_undisturbed(&folder, &ended);
    let log = folder.metrics_log();
    assert_eq!((lost(&log).len(), log.all("end").len()), (0, 1), "{ended}");
}

#[test]
fn a_run_whose_ranks_are_all_lost_at_the_end_is_finished_later() {
    undisturbed();
    let folder = Folder::new("losing-end-of-all");
    let job = folder.started(2, &format!("{RUN} --min-ranks 1"));
    let ended = job
        .env("DDP_TEST_FAULT", "0:end:40:kill,1:end:40:kill")
        .run();
    assert_eq!(ended.exit_code(), Some(77), "{ended}");
    assert!(folder.metrics_log().end().is_none(), "{ended}");
    let ended = folder.started(2, &format!("{RUN} --resume auto")).run();
    assert_undisturbed(&folder, &ended);
    assert!(folder.metrics_log().end().is_some(), "{ended}");
    assert!(folder.out().join("report.html").exists(), "{ended}");
}

#[test]
fn several_ranks_can_be_lost_at_once_and_all_but_one() {
    undisturbed();
    let faults = [
        "0:forward:3:kill,1:forward:3:kill",
        "1:reduction:9:kill,2:reduction:9:kill,3:reduction:9:kill",
        "0:forward:2:kill,1:forward:3:kill,2:forward:4:kill",
    ];
    all_at_once(faults, |faults| {
        let folder = Folder::new("losing-many");
        let job = folder.started(4, &format!("{RUN} --min-ranks 1"));
        let ended = job.env("DDP_TEST_FAULT", faults).run();
        assert_eq!(
            lost(&folder.metrics_log()).len(),
            faults.split(',').count(),
            "{ended}"
        );
        assert_undisturbed(&folder, &ended);
    });
}

/// Steps of 50 ms or more leave time to kill.
pub(super) fn slow_steps() -> String {
    let slow = |step| [0, 1].map(|rank| format!("{rank}:optimizer:{step}:slow"));
    (1..=40).flat_map(slow).collect::<Vec<_>>().join(",")
}

/// What trains while ranks are lost and come, each with all that lies between two steps.
const STORMS: [&str; 6] = [
    "--data glyphs,rows=1024,held-out=64 --hidden 32 --batch-size 64 --micro-batch 8 --dropout 0.1",
    "--data glyphs,rows=1024,held-out=64 --hidden 32,24 --batch-size 64 --optimizer muon",
    "--data book.txt --val-split 0.1 --model gpt,layers=1,heads=2,width=16,context=16 \
     --batch-size 8 --dropout 0.1 --sample to",
    "--data book.txt --val-split 0.1 --model gpt,layers=1,heads=2,width=16,context=16 \
     --batch-size 8 --micro-batch 2 --optimizer sgd --momentum 0.9 --lr 0.05",
    "--data glyphs,rows=1024,held-out=64 --hidden 32 --batch-size 64 --zero 1",
    "--data book.txt --val-split 0.1 --model gpt,layers=1,heads=2,width=16,context=16 \
     --batch-size 8 --optimizer muon --zero 1",
];

fn storm(which: usize) -> String {
    let storm = STORMS[which];
    format!(
        "{storm} --steps 40 --log-every 1 --eval-every 7 --checkpoint-every 9 --grad-clip 1 \
         --threads 1 --out OUT"
    )
}

fn with_book(name: &str) -> Folder {
    let folder = Folder::new(name);
    let text = "To be is to do, to do is to be, do be do be do. ".repeat(40);
    std::fs::write(folder.path().join("book.txt"), text).unwrap();
    folder
}

/// What the storm's run leaves if nothing disturbs it.
fn calm(which: usize) -> &'static Left {
    static LEFT: [OnceLock<Left>; STORMS.len()] = [const { OnceLock::new() }; STORMS.len()];
    LEFT[which].get_or_init(|| {
        let folder = with_book("losing-calm");
        let words = format!("{} --same-bits 8", storm(which));
        folder.started(2, &words).run().assert_well();
        left(&folder, 40)
    })
}

/// Kills and stops random ranks at random times, also while they start, meet and join. How often.
fn disturb(running: &mut Running, seed: u64) -> u64 {
    let mut times = 0;
    while running.goes_on() && times < 8 {
        let drawn = mixed(seed, times);
        std::thread::sleep(Duration::from_millis(drawn % 300));
        let ranks = running.ranks();
        let at_once = [1, 1, 1, 2, ranks.len().saturating_sub(1)][drawn as usize / 300 % 5];
        // One that stops while all start is waited for by all, for a minute.
        let stops = !seed.is_multiple_of(3) && (drawn / 1500).is_multiple_of(4);
        let signal = if stops { "STOP" } else { "KILL" };
        for at in 0..at_once.min(ranks.len()) {
            // The same one again and again, or any.
            let which = match seed % 5 {
                0 => at,
                _ => (drawn / 6000) as usize + at,
            };
            running.signal_rank(ranks[which % ranks.len()].0, signal);
        }
        times += 1;
    }
    times
}

#[test]
fn ranks_that_are_lost_at_any_moment_come_back_and_change_no_bit() {
    let seeds = ddp_slice::of("ranks that are lost at any moment", 126, 2);
    let all_times = AtomicU64::new(0);
    for pair in seeds.chunks(2) {
        all_at_once(pair, |&seed| {
            let (which, ranks) = (seed % STORMS.len(), 2 + seed / STORMS.len() % 7);
            let is_exact = seed % 9 != 8;
            let folder = with_book("losing-storm");
            let bits = if is_exact { " --same-bits 8" } else { "" };
            let words = format!("--min-ranks 1 --restarts 1000 --timeout-s 3{bits}");
            let job = folder.started(ranks, &format!("{} {words}", storm(which)));
            let job = job.env("DDP_TEST_ROWS", &rows(&folder));
            let mut running = job.env("DDP_TEST_FAULT", &slow_steps()).start();
            if seed % 3 > 0 {
                running.wait_for(r#""event":"step","step":1,"#);
            }
            let times = disturb(&mut running, seed as u64);
            let ended = running.wait();
            println!("seed {seed}: {ranks} ranks were disturbed {times} times");
            all_times.fetch_add(times, Relaxed);
            assert_eq!(ended.exit_code(), Some(0), "seed {seed}: {ended}");
            let (left, expected) = (left(&folder, 40), calm(which));
            assert_eq!(left.steps, expected.steps, "seed {seed}: {ended}");
            assert_eq!(left.evaluated, expected.evaluated, "seed {seed}: {ended}");
            if is_exact {
                assert!(left.losses == expected.losses, "seed {seed}: {ended}");
                assert!(left.model == expected.model, "seed {seed}: {ended}");
            }
            // Without --same-bits sums have another order.
            let pairs = left.losses.iter().zip(&expected.losses);
            let apart = pairs.map(|(loss, calm)| (loss / calm - 1.0).abs());
            assert!(apart.fold(0.0, f64::max) < 1e-3, "seed {seed}: {ended}");
            // Unless all ranks were lost at once, none goes back further than to its last step.
            let text = ended.to_string();
            let again = [FROM_CHECKPOINT, "resuming after step", "it starts over"];
            let goes_back = again.iter().any(|it| text.contains(it));
            let lost = lost(&folder.metrics_log());
            for (rank, steps) in (0..ranks).map(|rank| (rank, taken(&folder, rank))) {
                // A process that only itself had completed a step may be lost with it.
                let again = steps.windows(2).filter(|it| it[0] == it[1]).count();
                let losses = lost.iter().filter(|it| **it == rank as u64).count();
                let is_well = goes_back || steps.is_sorted() && again <= losses;
                assert!(is_well, "seed {seed}: {steps:?}: {ended}");
            }
        });
    }
    let (count, times) = (seeds.len(), all_times.into_inner());
    assert!(count < 126 || times >= 500, "{times} in {count} runs");
}

#[test]
fn a_rank_that_stops_is_left_out_and_one_that_comes_takes_its_place() {
    undisturbed();
    let folder = Folder::new("losing-stopped");
    let words = format!("{RUN} --min-ranks 1 --restarts 1 --timeout-s 1");
    let mut running = folder
        .started(2, &words)
        .env("DDP_TEST_FAULT", "1:forward:7:stop,0:log:9:work")
        .start();
    running.wait_for(r#""joined":[1]"#);
    let ended = running.wait();
    let text = std::fs::read_to_string(folder.out().join("metrics.jsonl")).unwrap();
    let told = r#""lost":[{"rank":1,"why":"killed because it showed no progress"}]"#;
    assert!(
        text.contains(told) && text.contains(r#""joined":[1]"#),
        "{ended}"
    );
    assert_undisturbed(&folder, &ended);
}

#[test]
fn ranks_that_are_all_stopped_are_killed_and_start_again_from_the_checkpoint() {
    undisturbed();
    let folder = Folder::new("losing-all-stopped");
    let words = format!("{RUN} --min-ranks 1 --restarts 3 --timeout-s 1");
    let job = folder.started(3, &words);
    let mut running = job.env("DDP_TEST_FAULT", &slow_steps()).start();
    running.wait_for(r#""event":"step","step":10,"#);
    (0..3).for_each(|rank| running.signal_rank(rank, "STOP"));
    let ended = running.wait();
    let told = "stopped for 3 s or longer";
    assert!(ended.stderr.contains(told), "{ended}");
    let told = "rank 0 killed because it showed no progress: starting it again (";
    assert!(ended.stderr.contains(told), "{ended}");
    assert_undisturbed(&folder, &ended);
}

#[test]
fn a_job_whose_last_rank_is_killed_ends_as_one_that_has_lost_too_many() {
    let folder = Folder::new("losing-last");
    let job = folder.started(2, &format!("{RUN} --min-ranks 1"));
    let faults = "0:forward:9:kill,1:forward:9:kill";
    let ended = job.env("DDP_TEST_FAULT", faults).run();
    assert_eq!(ended.exit_code(), Some(77), "{ended}");
    assert!(
        ended
            .stderr
            .contains("no rank is left; help: resume the run"),
        "{ended}"
    );
}

#[test]
fn with_too_few_ranks_the_job_saves_and_ends_and_can_be_resumed() {
    undisturbed();
    let folder = Folder::new("losing-too-many");
    let job = folder.started(3, &format!("{RUN} --min-ranks 2"));
    let faults = "0:forward:5:kill,2:forward:11:kill";
    let ended = job.env("DDP_TEST_FAULT", faults).run();
    assert_eq!(ended.exit_code(), Some(77), "{ended}");
    let told = "ranks are left after step 10";
    assert_eq!(ended.stderr.matches(told).count(), 1, "{ended}");
    assert_eq!(
        folder.checkpoints().last().unwrap(),
        "step-00000010",
        "{ended}"
    );
    let resumed = folder.started(2, &format!("{RUN} --resume auto")).run();
    assert_undisturbed(&folder, &resumed);
}

#[test]
fn ranks_that_are_needed_are_waited_for_when_they_are_started_again() {
    undisturbed();
    all_at_once(["", "--hosts far:2,off:1"], |hosts| {
        let folder = Folder::new("losing-needed");
        let words = format!("{RUN} --min-ranks 3 --restarts 2");
        let job = match hosts {
            "" => folder.started(3, &words),
            hosts => folder.started_on(hosts, "", &words),
        };
        let mut running = job.env("DDP_TEST_FAULT", &slow_steps()).start();
        running.wait_for(r#""event":"step","step":1,"#);
        running.signal_rank(1, "KILL");
        running.wait_for(r#""joined":[1]"#);
        running.signal_rank(0, "KILL");
        let ended = running.wait();
        assert_eq!(lost(&folder.metrics_log()), [1, 0], "{ended}");
        assert_undisturbed(&folder, &ended);
    });
}

#[test]
fn a_rank_that_is_needed_and_does_not_come_back_ends_the_job() {
    let folder = Folder::new("losing-gone");
    let words = format!("{RUN} --min-ranks 3 --restarts 2 --timeout-s 3");
    let job = folder.started(3, &words);
    let faults = "2:forward:5:kill,2:joining:0:kill";
    let ended = job.env("DDP_TEST_FAULT", faults).run();
    assert_eq!(ended.exit_code(), Some(77), "{ended}");
    let saved = folder.checkpoints();
    assert_eq!(saved.last().unwrap(), "step-00000004", "{ended}");
}

/// What is said when a slice was lost.
const FROM_CHECKPOINT: &str = "the run continues from its last checkpoint";

/// Runs with `--zero 1` and these faults, each with 5 ranks and every optimizer: a third of them.
fn lose_with_zero(faults: &[&str], restarts: bool, check: impl Fn(&str, &Folder, &Ended) + Sync) {
    OPTIMIZERS
        .iter()
        .for_each(|words| _ = undisturbed_with(words));
    let jobs = faults
        .iter()
        .flat_map(|faults| OPTIMIZERS.map(|words| (*faults, words)));
    let jobs = ddp_slice::from(faults[0], jobs, faults.len());
    all_at_once(jobs, |(faults, words)| {
        let folder = Folder::new("losing-zero");
        let restarts = if restarts { " --restarts 9" } else { "" };
        let run = format!("{RUN} --zero 1 --min-ranks 1{restarts}");
        let job = folder.started(5, &with(&run, words));
        let ended = job.env("DDP_TEST_FAULT", faults).run();
        check(faults, &folder, &ended);
        assert_as(undisturbed_with(words), &folder, &ended);
    });
}

#[test]
fn slices_of_lost_ranks_are_kept_by_their_neighbours() {
    let faults = [
        "0:forward:14:kill",
        "2:reduction:14:kill",
        // The keeper has no sums, and the others have theirs.
        "2:copy:14:kill",
        "0:copy:1:kill",
        "4:optimizer:14:kill",
        "3:agreed:14:kill",
        "0:agreed:14:kill",
        "0:log:14:kill",
        "1:snapshot:18:kill",
        "0:save:18:kill",
        // Two that are not neighbours, at once.
        "0:forward:9:kill,2:forward:9:kill",
        "1:agreed:9:kill,4:optimizer:9:kill",
        // One after the other: the keeper of the first, too.
        "1:forward:9:kill,2:forward:10:kill,3:reduction:11:kill,4:agreed:12:kill",
        // Another one while slices are cut anew.
        "2:forward:9:kill,0:slices:2:kill",
        "2:agreed:9:kill,4:slices:2:kill,1:forward:9:kill",
        "2:copy:9:kill,0:slices:2:kill",
    ];
    lose_with_zero(&faults, false, |faults, folder, ended| {
        let expected = faults.split(',').count();
        // Rank 1 may learn that rank 4 is lost before it gets there.
        let least = expected - usize::from(faults.starts_with("1:agreed"));
        let lost = lost(&folder.metrics_log()).len();
        assert!((least..=expected).contains(&lost), "{faults}: {ended}");
        assert!(
            !ended.to_string().contains(FROM_CHECKPOINT),
            "{faults}: {ended}"
        );
    });
}

#[test]
fn ranks_that_leave_an_update_complete_it_or_the_others_undo_it() {
    // Owner and keeper of a slice: before and after the point from which the others continue.
    let faults = [
        "2:optimizer:14:leave,3:optimizer:14:leave",
        "2:agreed:14:leave,3:agreed:14:leave",
        "0:agreed:1:leave,1:agreed:1:leave",
        "0:optimizer:14:leave,1:agreed:14:leave,4:agreed:15:leave",
        "0:slices:2:leave,1:slices:2:leave,4:agreed:14:leave",
        "4:agreed:9:kill,2:agreed:9:leave",
    ];
    lose_with_zero(&faults, false, |faults, folder, ended| {
        let met = folder.metrics_log().all("ranks").len();
        let text = ended.to_string();
        assert!(
            met > 0 && !text.contains(FROM_CHECKPOINT),
            "{faults}: {ended}"
        );
    });
}

#[test]
fn slices_that_were_lost_with_owner_and_keeper_come_from_the_last_checkpoint() {
    let faults = [
        "2:forward:14:kill,3:forward:14:kill",
        "4:optimizer:14:kill,0:optimizer:14:kill",
        "1:forward:14:kill,2:slices:2:kill",
        // Before the first checkpoint.
        "0:agreed:4:kill,1:agreed:4:kill",
    ];
    lose_with_zero(&faults, false, |faults, _, ended| {
        // If all others had their new slices, nothing is lost.
        let may_be_whole = faults.contains("slices");
        assert!(
            may_be_whole || ended.to_string().contains(FROM_CHECKPOINT),
            "{faults}: {ended}"
        );
    });
}

#[test]
fn any_rank_can_be_lost_on_any_of_several_hosts() {
    undisturbed();
    // Rank 0 on the launcher's host and on another, the first of a host and a later one, all of a
    // host, and the same again while it comes back.
    let cases = [
        ("localhost:1,far:2", "0:forward:14:kill", ""),
        ("far:1,localhost:2", "0:reduction:14:kill", ""),
        ("far:2,off:1", "0:optimizer:14:kill", "--restarts 3"),
        ("localhost:1,far:2", "1:reduction:14:kill", "--restarts 1"),
        ("far:1,off:2", "2:save:18:kill", ""),
        ("localhost:1,far:2", "1:log:9:kill,2:log:9:kill", ""),
        (
            "far:2,off:1",
            "0:forward:9:kill,1:forward:9:kill",
            "--restarts 2",
        ),
        (
            "far:1,off:2",
            "0:forward:9:kill,1:forward:12:kill",
            "--restarts 4",
        ),
    ];
    let cases = ddp_slice::from("ranks lost on several hosts", cases, 3);
    all_at_once(cases, |(hosts, faults, words)| {
        let folder = Folder::new("losing-hosts");
        let words = format!("{RUN} --min-ranks 1 {words}");
        let job = folder.started_on(&format!("--hosts {hosts}"), "", &words);
        let ended = job.env("DDP_TEST_FAULT", faults).run();
        let lost = lost(&folder.metrics_log());
        assert!(
            lost.len() >= faults.split(',').count(),
            "{hosts} {faults}: {ended}"
        );
        assert_undisturbed(&folder, &ended);
    });
}

#[test]
fn a_rank_that_comes_back_to_an_empty_host_is_taken_in() {
    undisturbed();
    let folder = Folder::new("losing-hosts-back");
    let words = format!("{RUN} --min-ranks 1 --restarts 1");
    // The launcher's host has no ranks.
    let job = folder.started_on("--hosts far:2,off:1", "", &words);
    let mut running = job.env("DDP_TEST_FAULT", &slow_steps()).start();
    running.wait_for_step_2();
    let process = |running: &Running| running.ranks().into_iter().find(|it| it.0 == 2);
    let before = process(&running);
    running.signal_rank(2, "KILL");
    while process(&running).is_none_or(|it| Some(it) == before) {
        std::thread::sleep(Duration::from_millis(5));
    }
    // Until the others have met without it.
    running.signal_rank(2, "STOP");
    running.wait_for(r#""lost":[{"rank":2"#);
    running.signal_rank(2, "CONT");
    let ended = running.wait();
    let log = folder.metrics_log();
    let last = *log.all("ranks").last().unwrap();
    assert_eq!(last["joined"][0], 2, "{ended}");
    assert_undisturbed(&folder, &ended);
}

#[test]
fn ranks_of_several_hosts_that_are_killed_again_and_again_change_no_bit() {
    undisturbed();
    all_at_once(
        [(0, "far:2,off:1"), (1, "localhost:2,far:2")],
        |(seed, hosts)| {
            let folder = Folder::new("losing-hosts-again");
            let words = format!("{RUN} --min-ranks 1 --restarts 1000 --timeout-s 3");
            let job = folder.started_on(&format!("--hosts {hosts}"), "", &words);
            let mut running = job.env("DDP_TEST_FAULT", &slow_steps()).start();
            running.wait_for(r#""event":"step","step":1,"#);
            let times = disturb(&mut running, seed);
            let ended = running.wait();
            assert!(times > 1, "{ended}");
            assert_undisturbed(&folder, &ended);
        },
    );
}

/// The ports where ranks listen.
fn ports_of_ranks(running: &Running) -> Vec<u16> {
    let mut inodes = Vec::new();
    for (_, pid) in running.ranks() {
        let sockets = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter();
        let sockets = sockets
            .flatten()
            .filter_map(|it| it.ok()?.path().read_link().ok());
        inodes.extend(sockets.filter_map(|it| {
            let socket = it.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
            Some(socket.to_string())
        }));
    }
    let tables = ["tcp", "tcp6"].map(|it| std::fs::read_to_string(format!("/proc/net/{it}")));
    let tables = tables.map(Result::unwrap_or_default);
    let lines = tables.iter().flat_map(|table| table.lines());
    let port = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let is_its = words.get(3) == Some(&"0A") && inodes.iter().any(|it| *it == words[9]);
        u16::from_str_radix(words.get(1)?.rsplit(':').next()?, 16)
            .ok()
            .filter(|_| is_its)
    };
    lines.filter_map(port).collect()
}

/// A message as ranks send it.
fn framed(message: &[u8]) -> Vec<u8> {
    [&(message.len() as u32).to_le_bytes(), message].concat()
}

/// The answer to such a message, if there is one in time.
fn answer(socket: &mut TcpStream) -> Option<Value> {
    let mut length = [0; 4];
    socket.read_exact(&mut length).ok()?;
    let mut answer = vec![0; u32::from_le_bytes(length) as usize];
    socket.read_exact(&mut answer).ok()?;
    Some(serde_json::from_slice(&answer).expect("it is JSON"))
}

/// Calls ports as processes that are no ranks: with garbage, and as rank 1 of these generations.
fn call_as_strangers(ports: Vec<u16>, generations: u64) -> Vec<TcpStream> {
    let web = b"GET / HTTP/1.1\r\n\r\n";
    let garbage = [vec![0xff; 64], web.to_vec(), framed(web), framed(b"[1]")];
    let calls = (1..=generations).map(|generation| {
        let job = blake3::hash(format!("generation {generation}").as_bytes());
        let job = job.to_hex().to_string();
        let call = serde_json::json!(["ddp-train ranks 1", job, 1, 0, "7", true, 3]);
        framed(call.to_string().as_bytes())
    });
    let words: Vec<Vec<u8>> = garbage.into_iter().chain(calls).collect();
    let all = ports
        .iter()
        .flat_map(|port| words.iter().map(move |word| (*port, word)));
    let sockets = all.filter_map(|(port, word)| {
        let mut socket = TcpStream::connect(("127.0.0.1", port)).ok()?;
        (socket.set_read_timeout(Some(Duration::from_millis(500)))).expect("it is not zero");
        socket.write_all(word).ok().map(|()| socket)
    });
    sockets.collect()
}

#[test]
fn strangers_that_call_ranks_while_they_meet_disturb_nothing() {
    undisturbed();
    let folder = Folder::new("losing-hosts-strangers");
    let words = format!("{RUN} --min-ranks 1 --restarts 1000");
    let job = folder.started_on("--hosts far:2,off:1", "", &words);
    let mut running = job.env("DDP_TEST_FAULT", &slow_steps()).start();
    // Those of an old generation that rank 0 sent away, and those that it asked for a proof.
    let (mut old, mut asked) = (0, 0);
    for times in 1..=3 {
        running.wait_for(&format!(r#""event":"step","step":{},"#, 5 * times));
        // Rank 0 waits for a rank that has stopped.
        running.signal_rank(2, "STOP");
        running.signal_rank(1, "KILL");
        std::thread::sleep(Duration::from_millis(300));
        let mut sockets = call_as_strangers(ports_of_ranks(&running), 2 * times + 1);
        running.signal_rank(2, "CONT");
        for socket in &mut sockets {
            let Some(said) = answer(socket) else { continue };
            let is_old = said[1].is_null();
            (old, asked) = (old + i32::from(is_old), asked + i32::from(!is_old));
            // With another secret.
            _ = socket.write_all(&framed(br#"["00"]"#));
            let said = if is_old { None } else { answer(socket) };
            assert!(said.is_none(), "{said:?}");
        }
    }
    let ended = running.wait();
    assert!(old > 0 && asked > 0, "{old} and {asked}: {ended}");
    assert_undisturbed(&folder, &ended);
}

#[test]
fn a_host_whose_agent_is_killed_is_lost_with_its_ranks() {
    undisturbed();
    let folder = Folder::new("losing-agent");
    let words = format!("{RUN} --min-ranks 2 --timeout-s 3");
    let job = folder.started_on("--hosts localhost:2,far:2", "", &words);
    let running = job.env("DDP_TEST_FAULT", &slow_steps()).start();
    running.wait_for_step_2();
    assert_eq!(running.signal_agents("KILL"), 1);
    let ended = running.wait();
    assert_eq!(lost(&folder.metrics_log()), [2, 3], "{ended}");
    let told = "host far, with ranks 2 and 3: it was silent for 4 s";
    assert!(ended.stderr.contains(told), "{ended}");
    assert_undisturbed(&folder, &ended);
}

/// Kills the process whose number is in this file, and its children.
fn kill_all_of(folder: &Folder, file: &str) {
    let script = format!("pid=$(cat {file}); kill -KILL $pid $(pgrep -P $pid)");
    let mut command = Command::new("sh");
    let killed = command.args(["-c", &script]).current_dir(folder.path());
    assert!(killed.status().expect("there is a shell").success());
}

#[test]
fn ranks_that_lost_one_trace_the_steps_that_are_left() {
    undisturbed();
    let folder = Folder::new("losing-trace");
    let job = folder.started(3, &format!("{RUN} --min-ranks 2 --trace 5..20"));
    let ended = job.env("DDP_TEST_FAULT", "2:forward:14:kill").run();
    assert_undisturbed(&folder, &ended);
    let text = std::fs::read_to_string(folder.out().join("trace.json")).expect("it is written");
    let trace: Value = serde_json::from_str(&text).expect("it is JSON");
    let spans = trace["traceEvents"].as_array().unwrap().iter();
    let steps =
        spans.filter_map(|span| Some((span["pid"].as_u64()?, span["args"]["step"].as_u64()?)));
    let mut traced: Vec<(u64, u64)> = steps.collect();
    traced.sort_unstable();
    traced.dedup();
    let expected: Vec<(u64, u64)> = (0..2)
        .flat_map(|rank| (14..=20).map(move |step| (rank, step)))
        .collect();
    assert_eq!(traced, expected, "{ended}");
}

#[test]
fn a_process_that_comes_ends_with_the_job_and_with_its_launcher() {
    undisturbed();
    all_at_once(["the job", "its launcher"], |first| {
        let folder = Folder::new("losing-newcomer");
        let words = format!("{RUN} --min-ranks 1 --restarts 1 --timeout-s 30");
        let faults = format!("1:forward:7:kill,1:joining:0:hang,{}", slow_steps());
        let job = folder.started(2, &words).env("DDP_TEST_FAULT", &faults);
        let mut running = job.start();
        running.wait_for(r#""event":"ranks","time"#);
        if first == "its launcher" {
            running.kill();
            running.wait();
            return;
        }
        let began = Instant::now();
        let ended = running.wait();
        assert!(began.elapsed() < Duration::from_secs(25), "{ended}");
        assert_undisturbed(&folder, &ended);
    });
}

#[test]
fn an_agent_speaks_for_its_own_ranks_only() {
    undisturbed();
    let folder = Folder::new("losing-lies");
    let ended = r#"{\"Ended\":[99,9]} {\"Ended\":[0,9]}"#;
    let lies = format!("(sleep 1; printf '%s\\n' {ended}) &");
    let words = format!("{RUN} --min-ranks 1");
    let job = folder.started_on("--hosts localhost:1,far:1", &lies, &words);
    let ended = job.env("DDP_TEST_FAULT", &slow_steps()).run();
    assert_undisturbed(&folder, &ended);
    assert!(!ended.stderr.contains("killed by"), "{ended}");
}

#[test]
fn ctrl_z_suspends_no_launcher_that_agents_would_count_as_lost() {
    undisturbed();
    let folder = Folder::new("losing-ctrl-z");
    let words = format!("{RUN} --min-ranks 1 --timeout-s 3");
    let job = folder.started_on("--hosts localhost:1,far:1", "", &words);
    let running = job.env("DDP_TEST_FAULT", &slow_steps()).start();
    running.wait_for_step_2();
    running.signal("TSTP");
    // A process that has stopped would stay so, unless its group is orphaned.
    assert_undisturbed(&folder, &running.wait());
}

#[test]
fn ranks_of_a_lost_host_start_on_a_spare_one() {
    undisturbed();
    let folder = Folder::new("losing-spare");
    let words = format!("{RUN} --min-ranks 2 --timeout-s 3 --restarts 2 --spares off:1,spare:2");
    let hosts = "--hosts localhost:2,far:2";
    let job = folder.started_on(hosts, "echo $$ >agent-$host", &words);
    let running = job.env("DDP_TEST_FAULT", &slow_steps()).start();
    running.wait_for_step_2();
    kill_all_of(&folder, "agent-far");
    let ended = running.wait();
    let log = folder.metrics_log();
    assert_eq!(lost(&log), [2, 3], "{ended}");
    for told in [
        "rank 2 was on far: starting it again on spare (1 of 2)",
        "rank 3 was on far: starting it again on spare (2 of 2)",
    ] {
        assert!(ended.stderr.contains(told), "{told}: {ended}");
    }
    let mut joined = joined(&log);
    joined.sort_unstable();
    assert_eq!(joined, [2, 3], "{ended}");
    assert_undisturbed(&folder, &ended);
}

#[test]
fn a_host_that_is_lost_and_comes_back_gets_its_ranks_again() {
    undisturbed();
    let folder = Folder::new("losing-return");
    let words = format!("{RUN} --min-ranks 2 --timeout-s 3 --restarts 2");
    let hosts = "--hosts localhost:2,far:2";
    // The second login takes longer than the time between two calls.
    let slow_login = "[ -e agent-$host ] && sleep 7; echo $$ >agent-$host";
    let job = folder.started_on(hosts, slow_login, &words);
    // So that steps are left when it comes back.
    let points = ["forward", "reduction", "optimizer"];
    let slow = (3..=40).flat_map(|step| points.map(|point| format!("0:{point}:{step}:slow")));
    let slow = slow.chain(["0:log:9:work".into()]);
    let faults: Vec<String> = slow.collect();
    let running = job.env("DDP_TEST_FAULT", &faults.join(",")).start();
    running.wait_for_step_2();
    kill_all_of(&folder, "agent-far");
    let ended = running.wait();
    let log = folder.metrics_log();
    assert_eq!(lost(&log), [2, 3], "{ended}");
    assert_eq!(joined(&log), [2, 3], "{ended}");
    assert_undisturbed(&folder, &ended);
}

#[test]
fn processes_that_variables_start_come_back_with_the_number_they_had() {
    undisturbed();
    let folder = Folder::new("losing-variables");
    // What restarts a process that fails, as pods and scripts under srun do.
    let restarting = "until sh -c 'echo $$ >process-$RANK; exec \"$@\"' sh \"$@\"; do :; done";
    let pod = folder.script("pod", restarting);
    let of_rank = |rank: usize| match rank {
        0 => String::new(),
        _ => pod.display().to_string(),
    };
    let words = format!("{RUN} --min-ranks 1 --restarts 9 --timeout-s 3");
    // A rank is killed, and later a process with its rank.
    let faults = format!("1:forward:7:kill,{}", slow_steps());
    let job = tcp::ranks(&folder, 3, &words, &of_rank).env("DDP_TEST_FAULT", &faults);
    let mut running = job.start();
    running.wait_for(r#""joined":[1]"#);
    kill_all_of(&folder, "process-2");
    let ended = running.wait();
    let log = folder.metrics_log();
    assert_eq!(lost(&log), [1, 2], "{ended}");
    assert_eq!(joined(&log), [1, 2], "{ended}");
    assert_undisturbed(&folder, &ended);
}

#[test]
fn a_host_whose_agent_is_stopped_is_lost_with_its_ranks() {
    undisturbed();
    let folder = Folder::new("losing-agent-stopped");
    let words = format!("{RUN} --min-ranks 1 --timeout-s 3");
    let slow: Vec<_> = (1..=40)
        .map(|step| format!("2:optimizer:{step}:slow"))
        .collect();
    // It is silent for longer than all that is left to do takes.
    let slow = format!("2:optimizer:9:work,{},{}", slow_steps(), slow.join(","));
    let job = folder.started_on("--hosts far:2,localhost:1", "", &words);
    let mut running = job.env("DDP_TEST_FAULT", &slow).start();
    running.wait_for_step_2();
    assert_eq!(running.signal_agents("STOP"), 1);
    running.wait_for(r#""lost":[{"rank":0"#);
    let ranks: Vec<_> = running.ranks().into_iter().map(|it| it.0).collect();
    assert_eq!(ranks, [2], "the others have ended before the run continues");
    running.signal_agents("CONT");
    let ended = running.wait();
    assert_eq!(lost(&folder.metrics_log()), [0, 1], "{ended}");
    assert_undisturbed(&folder, &ended);
}

#[test]
fn stopped_ranks_of_another_host_are_left_out() {
    undisturbed();
    // One of them, which its host's other rank misses; all, which only the launcher can leave out.
    let faults = ["3:forward:7:stop", "2:forward:7:stop,3:forward:7:stop"];
    all_at_once(faults, |faults| {
        let folder = Folder::new("losing-hosts-stopped");
        let words = format!("{RUN} --min-ranks 2 --timeout-s 2");
        let job = folder.started_on("--hosts localhost:2,far:2", "", &words);
        let ended = job.env("DDP_TEST_FAULT", faults).run();
        let mut lost = lost(&folder.metrics_log());
        lost.sort_unstable();
        let all: Vec<u64> = vec![2, 3];
        assert_eq!(lost, all[2 - faults.split(',').count()..], "{ended}");
        assert_undisturbed(&folder, &ended);
    });
}

#[test]
fn a_rank_that_writes_a_checkpoint_while_another_is_lost_is_waited_for() {
    undisturbed();
    // It takes 8 s, twice as long as the launcher waits for a rank that shows no progress.
    all_at_once(["far:1,off:2", "localhost:1,far:2"], |hosts| {
        let folder = Folder::new("losing-hosts-writing");
        let words = format!("{RUN} --min-ranks 2 --timeout-s 2");
        let job = folder.started_on(&format!("--hosts {hosts}"), "", &words);
        let faults = "0:save:18:work,1:forward:20:kill";
        let ended = job.env("DDP_TEST_FAULT", faults).run();
        assert_eq!(lost(&folder.metrics_log()), [1], "{ended}");
        assert_undisturbed(&folder, &ended);
    });
}

#[test]
fn a_job_that_is_suspended_and_resumed_loses_nothing() {
    undisturbed();
    let folder = Folder::new("losing-suspended");
    let words = format!("{RUN} --min-ranks 1 --timeout-s 3");
    let job = folder.started_on("--hosts localhost:1,far:2", "", &words);
    let running = job.env("DDP_TEST_FAULT", &slow_steps()).start();
    running.wait_for_step_2();
    running.signal_all("STOP");
    std::thread::sleep(Duration::from_secs(6));
    running.signal_all("CONT");
    let ended = running.wait();
    assert_eq!(lost(&folder.metrics_log()), [0; 0], "{ended}");
    assert_undisturbed(&folder, &ended);
}

#[test]
fn an_error_on_one_host_ends_all_and_too_few_ranks_save() {
    undisturbed();
    let folder = Folder::new("losing-hosts-too-many");
    let words = format!("{RUN} --min-ranks 2");
    let job = folder.started_on("--hosts localhost:1,far:2", "", &words);
    let faults = "0:forward:5:kill,2:forward:11:kill";
    let ended = job.env("DDP_TEST_FAULT", faults).run();
    assert_eq!(ended.exit_code(), Some(77), "{ended}");
    let saved = folder.checkpoints();
    assert_eq!(saved.last().unwrap(), "step-00000010", "{ended}");
    let resumed = folder.started(2, &format!("{RUN} --resume auto")).run();
    assert_undisturbed(&folder, &resumed);
}

#[test]
fn a_rank_that_comes_back_with_other_settings_leaves_and_the_others_continue() {
    undisturbed();
    let folder = Folder::new("losing-other-settings");
    let file = folder.path().join("run.toml");
    std::fs::write(&file, "seed = 0\n").unwrap();
    let words = format!("--config run.toml {RUN} --min-ranks 1 --restarts 5");
    let job = folder.started(2, &words);
    let mut running = job.env("DDP_TEST_FAULT", &slow_steps()).start();
    running.wait_for(r#""event":"step","step":1,"#);
    std::fs::write(&file, "seed = 1\n").unwrap();
    running.signal_rank(1, "KILL");
    let ended = running.wait();
    assert_undisturbed(&folder, &ended);
    let told = "this rank leaves, and the others continue";
    assert_eq!(ended.stderr.matches(told).count(), 1, "{ended}");
    assert_eq!(
        ended.stderr.matches("starting it again").count(),
        1,
        "{ended}"
    );
}

#[test]
fn a_run_whose_ranks_are_all_lost_before_a_checkpoint_starts_over_in_its_own_metrics_log() {
    undisturbed();
    let folder = Folder::new("losing-all");
    let words = with(RUN, "--checkpoint-every 0 --min-ranks 1 --restarts 9");
    let mut running = (folder.started(2, &words))
        .env("DDP_TEST_FAULT", &slow_steps())
        .start();
    running.wait_for(r#""event":"step","step":3,"#);
    running.signal_rank(0, "KILL");
    running.signal_rank(1, "KILL");
    let ended = running.wait();
    assert!(ended.stderr.contains("it starts over"), "{ended}");
    let mut files = std::fs::read_dir(folder.out()).unwrap().flatten();
    let is_aside = files.any(|it| it.file_name().to_string_lossy().starts_with("superseded"));
    assert!(!is_aside, "{ended}");
    assert_undisturbed(&folder, &ended);
}

#[test]
fn without_the_flag_a_lost_rank_ends_the_job() {
    let folder = Folder::new("losing-off");
    let ended = folder
        .started(2, RUN)
        .env("DDP_TEST_FAULT", "1:forward:7:kill")
        .run();
    assert_eq!(ended.exit_code(), Some(137), "{ended}");
}

#[test]
fn what_all_ranks_find_while_they_connect_ends_the_job_at_once() {
    let words = format!("{RUN} --ranks 2 --min-ranks 1 --restarts 9");
    let folder = Folder::new("losing-limit");
    let ended = folder.in_shell("ulimit -f 1000", &words).run();
    assert_eq!(ended.exit_code(), Some(71), "{ended}");
    assert!(ended.stderr.contains("(ulimit -f)"), "{ended}");
    assert!(!ended.stderr.contains("starting it again"), "{ended}");
}

#[test]
fn what_cannot_go_on_is_refused_by_name() {
    let refused = [
        ("--min-ranks 3", "from 1 to the number of ranks, which is 2"),
        ("--min-ranks 0", "from 1 to the number of ranks, which is 2"),
        (
            "--min-ranks 1 --restarts 1 --spares c:2",
            "--spares: expected --hosts",
        ),
        (
            "--min-ranks 1 --hosts a:1,b:1 --spares c:2",
            "and --restarts with how many",
        ),
    ];
    all_at_once(refused, |(words, told)| {
        let folder = Folder::new("losing-refused");
        let ended = folder.started(2, &format!("{RUN} {words}")).run();
        assert!(ended.assert_fails(2).contains(told), "{words}: {ended}");
    });
    let ended_by = [
        ("", "expected --ranks, --hosts"),
        (
            "TORCHELASTIC_RUN_ID=a RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1",
            "torchrun ends",
        ),
        (
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2",
            "Open MPI's mpirun ends",
        ),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1",
            "start one process on each host",
        ),
    ];
    all_at_once(ended_by, |(variables, told)| {
        let folder = Folder::new("losing-launcher");
        let before = format!("export A=1 {variables}");
        let ended = folder
            .in_shell(&before, &format!("{RUN} --min-ranks 1"))
            .run();
        assert!(ended.assert_fails(2).contains(told), "{variables}: {ended}");
    });
}
