//! A job that continues without lost ranks, and meanwhile is asked to stop or has an error: it
//! saves and ends like any other job.

use crate::losing::{RUN, assert_undisturbed, lost, slow_steps};
use crate::support::job::{Ended, Folder, all_at_once};

/// It saved, ended with 75, and can be resumed as if nothing had been.
#[track_caller]
fn assert_stopped(folder: &Folder, ended: &Ended) {
    assert_eq!(ended.exit_code(), Some(75), "{ended}");
    assert!(!folder.checkpoints().is_empty(), "{ended}");
    let resumed = folder.started(2, &format!("{RUN} --resume auto")).run();
    assert_undisturbed(folder, &resumed);
}

#[test]
fn a_job_that_is_stopped_while_a_rank_comes_saves() {
    // While the others meet the new rank, and while it gets ready and they need it.
    let cases = [
        ("--min-ranks 1", "0:meeting:3", 3),
        ("--min-ranks 2", "1:joining:0", 0),
    ];
    all_at_once(cases, |(words, fault, number)| {
        let folder = Folder::new("losing-stopped-joining");
        let words = format!("{RUN} {words} --restarts 3 --grace-s 600");
        let job = folder.started(2, &words);
        // The one that comes does so after the others have met, and not before.
        let comes = "1:joining:0:hold,0:newcomer:14:hold";
        let faults = format!("1:forward:5:kill,{fault}:hold,{comes},{}", slow_steps());
        let mut running = job.env("DDP_TEST_FAULT", &faults).start();
        if fault.contains("meeting") {
            running.wait_for(r#""lost":[{"rank":1"#);
            running.go_on(0);
        }
        running.wait_for_fault(fault);
        running.signal("TERM");
        running.go_on(number);
        let ended = running.wait();
        assert!(!ended.stderr.contains("did not end within"), "{ended}");
        assert_stopped(&folder, &ended);
    });
}

/// The request was lost with the rank.
#[test]
fn a_job_stops_although_the_rank_that_was_asked_is_killed_before_the_others_know() {
    let folder = Folder::new("losing-asked");
    let words = format!("{RUN} --min-ranks 1 --restarts 3 --grace-s 600 --log-level debug");
    let job = folder.started(2, &words);
    let running = job.env("DDP_TEST_FAULT", "0:forward:5:hold").start();
    running.wait_for_fault("0:forward:5");
    running.signal_rank(1, "TERM");
    running.wait_for_said("the job was asked to stop");
    running.signal_rank(1, "KILL");
    running.go_on(5);
    assert_stopped(&folder, &running.wait());
}

#[test]
fn ranks_that_came_later_end_the_job_too() {
    let folder = Folder::new("losing-stopped-later");
    let job = folder.started(2, &format!("{RUN} --min-ranks 1 --restarts 7"));
    // A rank gets its state in the step after it has come: before that it cannot continue alone.
    let holds = ["0:forward:7", "1:forward:20", "1:forward:33"].map(|at| format!("{at}:hold"));
    let comes = "0:newcomer:14:hold,1:newcomer:28:hold";
    let faults = format!("{},{comes}", holds.join(","));
    let running = job.env("DDP_TEST_FAULT", &faults).start();
    for (rank, at, step) in [(1, "0:forward:7", 7), (0, "1:forward:20", 20)] {
        running.wait_for_fault(at);
        running.signal_rank(rank, "KILL");
        running.go_on(step);
    }
    running.wait_for_fault("1:forward:33");
    for rank in [0, 1] {
        running.signal_rank(rank, "TERM");
    }
    running.go_on(33);
    let ended = running.wait();
    assert_eq!(lost(&folder.metrics_log()), [1, 0], "{ended}");
    assert_eq!(
        ended.stderr.matches("stopped at step").count(),
        1,
        "{ended}"
    );
    assert_stopped(&folder, &ended);
}

#[test]
fn a_loss_during_set_up_does_not_change_what_is_resumed() {
    let folder = Folder::new("losing-set-up");
    folder.started(2, RUN).run().assert_well();
    let kept = folder.checkpoints();
    let first = &kept[0];
    let words = format!("{RUN} --min-ranks 1 --resume out/checkpoints/{first}");
    let job = folder.started(2, &words);
    let ended = job.env("DDP_TEST_FAULT", "1:setup:0:kill").run();
    let step = first.trim_start_matches("step-").trim_start_matches('0');
    let said = format!("resuming after step {step},");
    assert!(ended.stderr.contains(&said), "{said}: {ended}");
    assert_undisturbed(&folder, &ended);

    let job = folder.started(2, &format!("{RUN} --min-ranks 1 --resume never"));
    let ended = job.env("DDP_TEST_FAULT", "1:setup:0:kill").run();
    assert_eq!(ended.exit_code(), Some(2), "{ended}");
}
