//! Claims about the audit: what is gathered, how it is summed up, how it reads.

use std::sync::Arc;
use std::time::Duration;

use ddp_kernels::transfer::{self, Phase, with_ledger};
use ddp_kernels::{DType, Tensor};
use serde_json::{Value, json};

use super::ledger::LedgerLine;
use super::*;

fn line(phase: &str, kind: &str, at: &str, count: u64, bytes: u64) -> LedgerLine {
    let (phase, kind, at) = (phase.into(), kind.into(), at.into());
    LedgerLine {
        phase,
        kind,
        at,
        implicit: false,
        announced: None,
        amount: Amount { count, bytes },
    }
}

/// A GPU's rank in a training of 100 steps of 32 rows a rank.
fn gpu(index: usize) -> RankLedger {
    let lines = vec![
        line(
            "step",
            "host to device",
            "ddp/src/loader.rs:9",
            200,
            100 * 32 * 3_144,
        ),
        line(
            "step",
            "between ranks",
            "ddp/src/lane.rs:3",
            500,
            100 * 50_936,
        ),
        line("setup", "host to device", "ddp/src/model.rs:5", 4, 50_920),
        line("log", "device to host", "ddp/src/step.rs:6", 40, 400),
    ];
    let workload = Workload {
        steps: 100,
        rows: 3_200,
        passes: 100,
    };
    RankLedger {
        devices: vec![format!("cuda:{index} NVIDIA H200")],
        workload,
        lines,
        ..RankLedger::default()
    }
}

fn hint(at: &str, device: &str, count: u64) -> RankedHint {
    let text = format!("scalar reads in the step: {device} at {at}, {count} times.");
    RankedHint {
        pattern: "scalar reads in the step".into(),
        lines: vec![at.into()],
        ranks: Vec::new(),
        count,
        text,
    }
}

fn json_of(audit: &Audit) -> Value {
    serde_json::to_value(audit).unwrap()
}

#[test]
fn ranks_that_move_the_same_are_one_line() {
    let audit = Audit::of(&[gpu(0), gpu(1), gpu(2), gpu(3)]);
    let expected = "\
placement, per rank and step, mean of 100 steps:
  rank    on                              host to device  between ranks
  0 to 3  cuda:0, cuda:1, cuda:2, cuda:3        98.2 KiB       49.7 KiB
  outside steps, over the run and all ranks: setup 198.9 KiB host to device; log 1.6 KiB device to host
  no differences between ranks in a step";
    assert_eq!(audit.to_string(), expected);
    let json = json_of(&audit);
    assert_eq!(
        (&json["steps"], &json["simulated"]),
        (&json!(100), &json!(false))
    );
    assert_eq!(
        json["ranks"][3]["per_step"]["between ranks"],
        json!({ "count": 5.0, "bytes": 50_936.0 })
    );
    assert_eq!(
        json["ranks"][3]["phases"]["log"]["device to host"],
        json!({ "count": 40, "bytes": 400 })
    );
    assert_eq!(
        (&json["differences"], &json["hints"]),
        (&json!([]), &json!([]))
    );
}

#[test]
fn one_rank_is_a_line_or_two() {
    let mut alone = gpu(0);
    alone.lines.retain(|line| line.kind != "between ranks");
    alone
        .lines
        .push(line("step", "scalar read", "ddp/src/model.rs:1", 150, 600));
    let expected = "\
placement, per step, mean of 100 steps: 98.2 KiB host to device and 1.5 scalar reads
  outside steps, over the run: setup 49.7 KiB host to device; log 400 B device to host";
    assert_eq!(Audit::of(&[alone]).to_string(), expected);
    let nothing = RankLedger {
        workload: Workload {
            steps: 785,
            ..Workload::default()
        },
        ..RankLedger::default()
    };
    let expected = "placement: nothing crossed between devices in 785 steps";
    assert_eq!(
        Audit::of(std::slice::from_ref(&nothing)).to_string(),
        expected
    );
    let simulated = RankLedger {
        simulated: true,
        workload: Workload::default(),
        ..nothing
    };
    let audit = Audit::of(&[simulated]);
    assert_eq!(
        audit.to_string(),
        "placement: nothing crossed between devices in 0 steps on simulated GPUs"
    );
    assert_eq!(json_of(&audit)["simulated"], true);
}

#[test]
fn no_steps_are_no_numbers_by_step() {
    let mut ledger = gpu(0);
    ledger.workload.steps = 0;
    let audit = Audit::of(&[ledger.clone(), ledger]);
    assert!(
        audit.ranks.iter().all(|rank| rank.per_step.is_empty()),
        "{audit:?}"
    );
    assert!(
        audit
            .to_string()
            .starts_with("placement: no rank moved anything in 0 steps\n"),
        "{audit}"
    );
}

#[test]
fn a_difference_is_told_with_ranks_line_and_amounts() {
    let mut ledgers: Vec<RankLedger> = (0..4).map(gpu).collect();
    ledgers[1].lines.push(line(
        "step",
        "device to host",
        "ddp/src/debug.rs:7",
        100,
        409_600,
    ));
    ledgers[3].lines[1].amount.bytes += 800;
    ledgers[2].lines.push(LedgerLine {
        implicit: true,
        ..line("step", "scalar read", "ddp/src/debug.rs:8", 50, 0)
    });
    let audit = Audit::of(&ledgers);
    let text = audit.to_string();
    for expected in [
        "  moved unequally: device to host at ddp/src/debug.rs:7: rank 1 4.0 KiB a step, ranks 0, 2 and 3 none\n",
        "  moved unequally: between ranks at ddp/src/lane.rs:3: rank 3 49.8 KiB a step, ranks 0 to 2 49.7 KiB a step\n",
        "  moved unequally: scalar read at ddp/src/debug.rs:8, moved by policy: rank 2 0.5 times a step, ranks 0, 1 and 3 none",
    ] {
        assert!(text.contains(expected), "{expected}\nin\n{text}");
    }
    assert!(!text.contains("no differences"), "{text}");
    let first = &json_of(&audit)["differences"][0];
    assert_eq!(
        (&first["at"], &first["kind"]),
        (&json!("ddp/src/debug.rs:7"), &json!("device to host"))
    );
    let nothing = json!({ "count": 0, "bytes": 0 });
    assert_eq!(
        first["amounts"],
        json!([nothing, { "count": 100, "bytes": 409_600 }, nothing, nothing])
    );
}

#[test]
fn a_hint_of_several_ranks_is_printed_once_with_their_numbers() {
    let mut ledgers: Vec<RankLedger> = (0..3).map(gpu).collect();
    ledgers[0].hints = vec![hint("a.rs:1", "cuda:0", 10), hint("b.rs:1", "cuda:0", 8)];
    ledgers[2].hints = vec![hint("a.rs:1", "cuda:2", 30)];
    let audit = Audit::of(&ledgers);
    let seen: Vec<_> = audit
        .hints
        .iter()
        .map(|hint| (hint.ranks.clone(), hint.count))
        .collect();
    assert_eq!(seen, [(vec![0, 2], 40), (vec![0], 8)]);
    let text = audit.to_string();
    assert!(
        text.contains(
            "\n  hint, ranks 0 and 2: scalar reads in the step: cuda:2 at a.rs:1, 30 times.\n"
        ),
        "{text}"
    );
    let alone = Audit::of(&ledgers[..1]).to_string();
    assert!(
        alone.contains("\n  hint: scalar reads in the step: cuda:0 at a.rs:1, 10 times.\n"),
        "{alone}"
    );
}

#[test]
fn however_much_there_is_to_say_it_is_20_lines() {
    let strange = |rank: u64| {
        let mut ledger = gpu(rank as usize);
        ledger.lines.push(line(
            "step",
            "host to device",
            &format!("x.rs:{rank}"),
            100,
            100_000 * rank,
        ));
        ledger.hints = vec![hint(&format!("x.rs:{rank}"), "cuda:0", 10 + rank)];
        ledger
    };
    let audit = Audit::of(&(0..40).map(strange).collect::<Vec<_>>());
    let text = audit.to_string();
    assert_eq!(text.lines().count(), 20, "{text}");
    for expected in [
        "  and 34 ranks, in the metrics log",
        "  and 36 more differences, in the metrics log",
        "  and 36 more hints, in the metrics log",
    ] {
        assert!(
            text.lines().any(|line| line == expected),
            "{expected}\nin\n{text}"
        );
    }
    assert_eq!(
        (
            audit.ranks.len(),
            audit.differences.len(),
            audit.hints.len()
        ),
        (40, 40, 40)
    );
    // A line that differs on every rank: the two ends are printed.
    let mut ledgers: Vec<RankLedger> = (0..9).map(gpu).collect();
    (0..9).for_each(|rank| ledgers[rank].lines[0].amount.bytes += 102_400 * rank as u64);
    let text = Audit::of(&ledgers).to_string();
    let expected =
        "ddp/src/loader.rs:9: rank 8 106.2 KiB a step, 7 ranks between, rank 0 98.2 KiB a step";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn many_ranks_are_told_by_their_runs() {
    // Every second of 20 ranks moves twice as much.
    let ledger = |rank: usize| {
        let mut ledger = gpu(rank % 8);
        ledger.lines[0].amount.bytes *= 1 + rank as u64 % 2;
        ledger
    };
    let text = Audit::of(&(0..20).map(ledger).collect::<Vec<_>>()).to_string();
    assert!(
        text.contains("ranks 1, 3, 5, 7 and 6 more 196.5 KiB a step, ranks 0, 2, 4, 6 and 6 more"),
        "{text}"
    );
}

/// Ranks as threads, each with its own ledger, which `body` fills. Returns the audit of rank 0.
fn gathered(size: usize, body: impl Fn(&World) -> Workload + Send + Sync + 'static) -> Audit {
    let body = Arc::new(body);
    let worlds = World::threads(size, None, Duration::from_secs(60)).unwrap();
    let start = |world: World| {
        let body = body.clone();
        std::thread::spawn(move || {
            with_ledger(&Ledger::new(), || {
                let workload = body(&world);
                audit(&world, workload, &[Device::Cpu]).unwrap()
            })
        })
    };
    let ranks: Vec<_> = worlds.into_iter().map(start).collect();
    let mut audits: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    assert!(
        audits[1..].iter().all(Option::is_none),
        "the first rank alone is told"
    );
    audits.swap_remove(0).unwrap()
}

#[test]
fn every_ranks_ledger_comes_to_the_first() {
    let audit = gathered(3, |world| {
        let given = Tensor::zeros(&[100], DType::F32, Device::Cpu).unwrap();
        let place = std::panic::Location::caller();
        transfer::in_phase(Phase::Step, || {
            (0..5).for_each(|_| transfer::book_collective(&given, place));
            // One of them reads a number in each step, on a line that the others do not run.
            (0..5).filter(|_| world.rank() == 2).for_each(|_| {
                let _ = given.slice(0..1).unwrap().item().unwrap();
            });
        });
        Workload {
            steps: 5,
            rows: 10,
            passes: 5,
        }
    });
    assert_eq!(audit.ranks.len(), 3);
    for rank in &audit.ranks {
        assert_eq!(
            (&rank.devices[..], rank.rows),
            (&["cpu".to_string()][..], 10)
        );
        assert_eq!(
            rank.per_step["between ranks"],
            PerStep {
                count: 1.0,
                bytes: 400.0
            }
        );
    }
    let read = &audit.differences[0];
    assert_eq!(
        (audit.differences.len(), read.kind.as_str()),
        (1, "scalar read")
    );
    assert!(read.at.contains("audit/tests.rs:"), "{}", read.at);
    let counts: Vec<u64> = read.amounts.iter().map(|amount| amount.count).collect();
    assert_eq!(counts, [0, 0, 5]);
}
