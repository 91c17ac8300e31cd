//! A job that continues without lost ranks and takes in new ones (`--min-ranks`): with
//! `--same-bits` its model is bit-identical to that of an undisturbed run. Ranks hold where a test
//! disturbs them, so that nothing depends on how fast they are.

use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock};

use serde_json::Value;

use crate::support::job::{Ended, FAR, Folder, all_at_once};
use crate::support::metrics_log::{MetricsLog, model_bytes};

/// 40 steps of some milliseconds, with everything that lies between two steps.
pub(crate) const RUN: &str = "--data glyphs,rows=256,held-out=64 --hidden 32 --batch-size 64 --steps 40 \
                   --log-every 1 --eval-every 7 --checkpoint-every 9 --same-bits 4 --dropout 0.1 \
                   --grad-clip 1 --micro-batch 8 --threads 1 --out OUT";

/// What a run leaves that must not depend on its ranks: its model, and the steps, losses and
/// evaluations of its metrics log.
#[derive(PartialEq)]
pub(crate) struct Left {
    pub(crate) model: Vec<u8>,
    pub(crate) steps: Vec<f64>,
    pub(crate) evaluated: Vec<f64>,
    pub(crate) losses: Vec<f64>,
    digests: Vec<Value>,
}

pub(crate) fn left(folder: &Folder, steps: u64) -> Left {
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

/// The run that nothing disturbs, without ZeRO-1.
pub(crate) fn undisturbed() -> &'static Left {
    undisturbed_with("")
}

/// The same with these words.
pub(crate) fn undisturbed_with(words: &'static str) -> &'static Left {
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
pub(crate) fn with(run: &str, words: &str) -> String {
    let all: Vec<&str> = run.split_whitespace().collect();
    let others = all.chunks(2).filter(|pair| !words.contains(pair[0]));
    let others: Vec<String> = others.map(|pair| pair.join(" ")).collect();
    format!("{} {words}", others.join(" "))
}

#[track_caller]
pub(crate) fn assert_undisturbed(folder: &Folder, ended: &Ended) {
    assert_as(undisturbed(), folder, ended);
}

#[track_caller]
pub(crate) fn assert_as(expected: &Left, folder: &Folder, ended: &Ended) {
    assert_eq!(ended.exit_code(), Some(0), "{ended}");
    let left = left(folder, 40);
    assert_eq!(left.steps, expected.steps, "{ended}");
    assert_eq!(left.evaluated, expected.evaluated, "{ended}");
    assert!(left.losses == expected.losses, "{ended}");
    assert!(left.digests == expected.digests, "{ended}");
    assert!(left.model == expected.model, "{ended}");
}

/// The ranks that the metrics log says were lost.
pub(crate) fn lost(log: &MetricsLog) -> Vec<u64> {
    lost_at_once(log).concat()
}

/// For each time that the ranks met, those that were lost before.
pub(crate) fn lost_at_once(log: &MetricsLog) -> Vec<Vec<u64>> {
    let rank = |it: &Value| it["rank"].as_u64().unwrap();
    let of_event = |event: &Value| event["lost"].as_array().unwrap().iter().map(rank).collect();
    log.all("ranks").into_iter().map(of_event).collect()
}

pub(crate) fn sorted(mut ranks: Vec<u64>) -> Vec<u64> {
    ranks.sort_unstable();
    ranks
}

/// Where each rank writes which steps it has taken.
pub(crate) fn rows(folder: &Folder) -> String {
    folder.path().join("rows").to_str().unwrap().into()
}

/// The steps that processes of a rank have completed, in order.
pub(crate) fn taken(folder: &Folder, rank: usize) -> Vec<u64> {
    let text = std::fs::read_to_string(format!("{}-{rank}", rows(folder))).unwrap_or_default();
    // The last line of a killed one may be cut.
    let steps = text.lines().filter_map(|line| line.split_once(": "));
    steps.map(|(step, _)| step.parse().unwrap()).collect()
}

/// The ranks that it says came.
pub(crate) fn joined(log: &MetricsLog) -> Vec<u64> {
    let events = log.all("ranks").into_iter();
    let joined = events.flat_map(|event| event["joined"].as_array().unwrap().clone());
    joined.map(|rank| rank.as_u64().unwrap()).collect()
}

/// Steps of 50 ms or more leave time in which to kill, but nothing may depend on that.
pub(crate) fn slow_steps() -> String {
    let slow = |step| [0, 1].map(|rank| format!("{rank}:optimizer:{step}:slow"));
    (1..=40).flat_map(slow).collect::<Vec<_>>().join(",")
}

/// For ranks that only a timeout can notice. Healthy ones show progress sooner on a busy machine.
pub(crate) const SHORT: &str = "--timeout-s 20";

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
    let faults = ddp_testing::cases_of("points of a step", faults.into_iter().flatten(), 4);
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
fn ranks_can_be_lost_while_others_meet() {
    undisturbed();
    let faults = [
        ("0:forward:14:kill,1:meeting:2:kill", vec![0, 1]),
        (
            "3:forward:14:kill,0:meeting:2:kill,2:meeting:3:kill",
            vec![0, 2, 3],
        ),
        ("2:forward:14:kill,0:meeting:2:stop", vec![0, 2]),
        // The metrics log tells it, and the rank that wrote that is lost.
        ("2:forward:14:kill,0:announced:2:kill", vec![0, 2]),
        (
            "3:forward:14:kill,0:announced:2:kill,1:announced:3:kill",
            vec![0, 1, 3],
        ),
    ];
    let faults = ddp_testing::cases_of("ranks lost while others meet", faults, 3);
    all_at_once(faults, |(faults, expected)| {
        let folder = Folder::new("losing-meeting");
        let timeout = if faults.contains("stop") { SHORT } else { "" };
        let job = folder.started(4, &format!("{RUN} --min-ranks 1 {timeout}"));
        let ended = job.env("DDP_TEST_FAULT", faults).run();
        let lost = sorted(lost(&folder.metrics_log()));
        assert_eq!(lost, expected, "{faults}: {ended}");
        assert_undisturbed(&folder, &ended);
    });
}

#[test]
fn a_process_can_be_lost_while_it_joins() {
    undisturbed();
    // Before the others know of it, and when they have met.
    let cases = [
        (1, "joining:0:kill", "all 1 restarts are used up", vec![1]),
        (0, "joining:0:stop", "at 0:joining:0", vec![0]),
        (
            0,
            "meeting:3:kill",
            "all 1 restarts are used up",
            vec![0, 0],
        ),
    ];
    all_at_once(cases, |(rank, fault, said, expected)| {
        let folder = Folder::new("losing-joining");
        let timeout = if fault.contains("stop") { SHORT } else { "" };
        let words = format!("{RUN} --min-ranks 1 --restarts 1 {timeout}");
        // In a meeting: of the third generation, if it does not come before the second.
        let (comes, awaited) = if fault.contains("meeting") {
            (format!("{rank}:joining:0:hold,"), "newcomer:14:hold")
        } else {
            (String::new(), "forward:14:hold")
        };
        let other = 1 - rank;
        let faults = format!("{comes}{rank}:forward:9:kill,{rank}:{fault},{other}:{awaited}");
        let job = folder.started(4, &words).env("DDP_TEST_FAULT", &faults);
        let mut running = job.start();
        if !comes.is_empty() {
            running.wait_for(&format!(r#""lost":[{{"rank":{rank}"#));
            running.go_on(0);
        }
        running.wait_for_said(said);
        running.go_on(14);
        let ended = running.wait();
        assert_eq!(lost(&folder.metrics_log()), expected, "{faults}: {ended}");
        assert_undisturbed(&folder, &ended);
    });
}

#[test]
fn what_goes_wrong_on_one_rank_alone_does_not_end_the_others() {
    undisturbed();
    // Data that one rank finds bad end the job: the others would find them, too.
    let kinds = [("panic", 70), ("memory", 71), ("error", 65)];
    let faults = [0, 2].map(|rank| kinds.map(|(kind, code)| (rank, kind, code)));
    let faults = faults.into_iter().flatten();
    let faults = ddp_testing::cases_of("what goes wrong on one rank alone", faults, 3);
    all_at_once(faults, |(rank, kind, code)| {
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
    assert_eq!(log.all("end").len(), 1, "{ended}");
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

#[test]
fn a_rank_that_stops_is_left_out_and_one_that_comes_takes_its_place() {
    undisturbed();
    let folder = Folder::new("losing-stopped");
    let words = format!("{RUN} --min-ranks 1 --restarts 1 {SHORT}");
    let job = folder.started(2, &words);
    let faults = "1:forward:7:stop,0:newcomer:14:hold";
    let ended = job.env("DDP_TEST_FAULT", faults).run();
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
    // Not SHORT: the job waits for three timeouts, and may well lose one more rank.
    let words = format!("{RUN} --min-ranks 1 --restarts 9 --timeout-s 5");
    let job = folder.started(3, &words);
    let running = job.env("DDP_TEST_FAULT", "0:forward:20:hold").start();
    running.wait_for_fault("0:forward:20");
    (0..3).for_each(|rank| running.signal_rank(rank, "STOP"));
    running.go_on(20);
    let ended = running.wait();
    let told = "stopped for 15 s or longer";
    assert!(ended.stderr.contains(told), "{ended}");
    let told = "rank 0 killed because it showed no progress: starting it again (";
    assert!(ended.stderr.contains(told), "{ended}");
    assert_undisturbed(&folder, &ended);
}

#[test]
fn with_too_few_ranks_the_job_saves_and_ends_and_can_be_resumed() {
    undisturbed();
    let folder = Folder::new("losing-too-many");
    let job = folder.started(3, &format!("{RUN} --min-ranks 2"));
    let faults = "0:forward:5:kill,2:forward:11:kill";
    let ended = job.env("DDP_TEST_FAULT", faults).run();
    assert_eq!(ended.exit_code(), Some(77), "{ended}");
    for told in [
        "ranks are left after step 10",
        "1 of at least 2 ranks left after step 10",
    ] {
        assert_eq!(ended.stderr.matches(told).count(), 1, "{ended}");
    }
    let continues = "continues after step 10";
    assert!(!ended.stderr.contains(continues), "{ended}");
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
    let folder = Folder::new("losing-needed");
    let words = format!("{RUN} --min-ranks 3 --restarts 2");
    let job = folder.started_on("--hosts far:2,off:1", "", &words);
    let faults = "2:forward:10:hold,2:forward:20:hold";
    let mut running = job.env("DDP_TEST_FAULT", faults).start();
    running.wait_for_fault("2:forward:10");
    running.signal_rank(1, "KILL");
    running.go_on(10);
    running.wait_for(r#""joined":[1]"#);
    running.wait_for_fault("2:forward:20");
    running.signal_rank(0, "KILL");
    running.go_on(20);
    let ended = running.wait();
    assert_eq!(lost(&folder.metrics_log()), [1, 0], "{ended}");
    assert_undisturbed(&folder, &ended);
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
        // The test gives up before this timeout expires.
        let words = format!("{RUN} --min-ranks 1 --restarts 1 {FAR}");
        let faults = "1:forward:7:kill,1:joining:0:hang,0:forward:20:hold";
        let job = folder.started(2, &words).env("DDP_TEST_FAULT", faults);
        let mut running = job.start();
        running.wait_for_fault("1:joining:0");
        running.wait_for_fault("0:forward:20");
        if first == "its launcher" {
            running.kill();
            // Waiting asserts that no process is left.
            let ended = running.wait();
            assert_eq!(ended.signal(), Some(9), "{ended}");
            return;
        }
        running.go_on(20);
        let ended = running.wait();
        assert_undisturbed(&folder, &ended);
    });
}

#[test]
fn a_rank_that_comes_back_with_other_settings_leaves_and_the_others_continue() {
    undisturbed();
    let folder = Folder::new("losing-other-settings");
    let file = folder.path().join("run.toml");
    std::fs::write(&file, "seed = 0\n").unwrap();
    let words = format!("--config run.toml {RUN} --min-ranks 1 --restarts 5");
    let job = folder.started(2, &words);
    let faults = "0:forward:20:hold,0:newcomer:28:hold";
    let running = job.env("DDP_TEST_FAULT", faults).start();
    running.wait_for_fault("0:forward:20");
    std::fs::write(&file, "seed = 1\n").unwrap();
    running.signal_rank(1, "KILL");
    running.go_on(20);
    // It may have come when rank 0 met it, or when rank 0 waits for it.
    let told = "this rank leaves, and the others continue";
    running.wait_for_said(told);
    running.go_on(28);
    let ended = running.wait();
    assert_undisturbed(&folder, &ended);
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
    let job = folder.started(2, &words);
    let running = job.env("DDP_TEST_FAULT", "1:forward:5:hold").start();
    // While it holds, it gives no state to a process that comes.
    running.wait_for_fault("1:forward:5");
    running.signal_rank(0, "KILL");
    running.signal_rank(1, "KILL");
    running.go_on(5);
    let ended = running.wait();
    assert!(ended.stderr.contains("it starts over"), "{ended}");
    let mut files = std::fs::read_dir(folder.out()).unwrap().flatten();
    let is_aside = files.any(|it| it.file_name().to_string_lossy().starts_with("superseded"));
    assert!(!is_aside, "{ended}");
    assert_undisturbed(&folder, &ended);
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
