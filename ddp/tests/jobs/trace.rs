//! `--trace`: the file has the Trace Event format, the run's results do not change, and slow ranks
//! are named.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::job::{Folder, QUICK};
use crate::support::metrics_log::model_bytes;

/// The events of the trace of the run in `out`. The file is what viewers expect.
#[track_caller]
fn events(folder: &Folder) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.out().join("trace.json")).expect("there is a trace");
    let file: Value = serde_json::from_str(&text).expect("it is JSON");
    let events = file["traceEvents"].as_array().expect("it has events");
    assert!(file["otherData"]["clock_bound_us"].is_array(), "{text}");
    for event in events {
        let is_number = |name: &str| event[name].as_f64().is_some_and(|number| number >= 0.0);
        assert!(event["name"].is_string(), "{event}");
        assert!(
            ["ts", "pid", "tid"].iter().all(|name| is_number(name)),
            "{event}"
        );
        match event["ph"].as_str() {
            Some("M") => assert!(event["args"].is_object(), "{event}"),
            Some("X") => assert!(is_number("dur"), "{event}"),
            _ => panic!("an event is metadata or complete: {event}"),
        }
    }
    events.clone()
}

/// The begin and end of an event, in nanoseconds.
fn times(event: &Value) -> (i64, i64) {
    let ns = |name: &str| (event[name].as_f64().unwrap() * 1e3).round() as i64;
    (ns("ts"), ns("ts") + ns("dur"))
}

/// The names that metadata give, by process, or by process and thread.
fn names(events: &[Value], of: &str) -> BTreeMap<(u64, u64), String> {
    let named = events.iter().filter(|event| event["name"] == of);
    let id = |event: &Value, name: &str| event[name].as_u64().unwrap();
    let text = |event: &Value| event["args"]["name"].as_str().unwrap().to_string();
    named
        .map(|event| ((id(event, "pid"), id(event, "tid")), text(event)))
        .collect()
}

#[track_caller]
fn assert_boxes_nest(events: &[Value]) {
    let mut rows: BTreeMap<(u64, u64), Vec<(i64, i64)>> = BTreeMap::new();
    for event in events.iter().filter(|event| event["ph"] == "X") {
        let row = (
            event["pid"].as_u64().unwrap(),
            event["tid"].as_u64().unwrap(),
        );
        rows.entry(row).or_default().push(times(event));
    }
    for (row, boxes) in &rows {
        for (index, a) in boxes.iter().enumerate() {
            for b in &boxes[index + 1..] {
                let apart = a.1 <= b.0 || b.1 <= a.0;
                let nested = (a.0 <= b.0 && b.1 <= a.1) || (b.0 <= a.0 && a.1 <= b.1);
                assert!(apart || nested, "{row:?}: {a:?} {b:?}");
            }
        }
    }
}

#[test]
fn a_trace_has_a_process_for_each_rank_and_boxes_that_nest() {
    let folder = Folder::new("trace");
    let ended = folder
        .together(&format!(
            "{QUICK} --trace 3..5 --eval-every 4 --checkpoint-every 4"
        ))
        .run();
    ended.assert_well();
    let events = events(&folder);
    assert_boxes_nest(&events);
    let ranks = 2;
    let processes = names(&events, "process_name");
    let starts: Vec<String> = (0..ranks).map(|rank| format!("rank {rank} on ")).collect();
    let is_named = |(name, start): (&String, &String)| name.starts_with(start.as_str());
    assert_eq!(processes.len(), ranks);
    assert!(
        processes.values().zip(&starts).all(is_named),
        "{processes:?}"
    );

    let threads = names(&events, "thread_name");
    for rank in 0..ranks as u64 {
        let of_rank = threads.iter().filter(|(id, _)| id.0 == rank);
        let lanes: BTreeSet<&str> = of_rank.map(|(_, name)| name.as_str()).collect();
        let expected = [
            "steps",
            "data",
            "forward",
            "backward",
            "optimizer",
            "saving",
            "evaluation",
        ];
        assert!(
            expected.iter().all(|lane| lanes.contains(lane)),
            "{lanes:?}"
        );
        assert!(lanes.contains("reductions"), "{lanes:?}");
    }
    let boxes = events.iter().filter(|event| event["ph"] == "X");
    let steps: BTreeSet<u64> = boxes
        .filter_map(|event| event["args"]["step"].as_u64())
        .collect();
    assert_eq!(steps, BTreeSet::from([3, 4, 5]));
    assert!(ended.stderr.contains("the largest part is "), "{ended}");
}

#[test]
fn a_trace_changes_no_bit_of_the_model() {
    let [with, without] = [" --trace 1..", ""].map(|trace| {
        let folder = Folder::new("trace-bits");
        folder
            .together(&format!("{QUICK}{trace}"))
            .run()
            .assert_well();
        model_bytes(&folder.out(), 8)
    });
    assert!(with == without);
}

/// It is late in the last step that is traced, by more than all the time before: in no earlier
/// step, on however busy a machine, can it have been later.
#[test]
fn a_slow_rank_is_named_as_late_with_its_worst_step() {
    let folder = Folder::new("trace-late");
    let words = format!("{QUICK} --trace 2..7 --eval-every 0 --checkpoint-every 0");
    let (job, began) = (folder.together(&words), Instant::now());
    let running = job.env("DDP_TEST_FAULT", "1:forward:7:hold").start();
    running.wait_for_fault("1:forward:7");
    // Sleep: so late is the rank.
    std::thread::sleep(began.elapsed() + Duration::from_secs(1));
    running.go_on(7);
    let ended = running.wait();
    ended.assert_well();
    let mut lines = ended.stderr.lines();
    let line = lines.find(|line| line.starts_with("rank 1 is"));
    let line = line.unwrap_or_else(|| panic!("{ended}"));
    assert!(line.contains(" ms in step 7 "), "{ended}");
}

#[test]
fn a_run_that_is_stopped_writes_the_trace_up_to_then() {
    let folder = Folder::new("trace-stopped");
    let ended = folder
        .together(&format!(
            "{} --trace 2..",
            QUICK.replace("epochs 1", "epochs 99")
        ))
        .env("DDP_TEST_FAULT", "0:optimizer:3:term")
        .run();
    ended.assert_fails(75);
    assert_boxes_nest(&events(&folder));
}

#[test]
fn steps_that_cannot_be_traced_are_refused_or_warned_of() {
    let folder = Folder::new("trace-wrong");
    for steps in ["0", "5..4", "all"] {
        let ended = folder.alone(&format!("{QUICK} --trace {steps}")).run();
        ended.assert_fails(2);
        assert!(
            ended.stderr.contains("as in 100..110 (both included)"),
            "{ended}"
        );
    }
    assert!(!folder.out().exists());
    let ended = folder.alone(&format!("{QUICK} --trace 100..110")).run();
    ended.assert_well();
    let warning = "--trace 100..110: the run takes steps 1 to 8, so no step is traced";
    assert!(ended.stderr.contains(warning), "{ended}");
    assert!(!folder.out().join("trace.json").exists());
}
