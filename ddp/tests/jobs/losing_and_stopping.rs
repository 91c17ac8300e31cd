//! A job that continues without ranks that it loses, and is asked to stop, or has an error, while
//! it does: it saves and ends as any other job.

use std::time::{Duration, Instant};

use crate::losing::{RUN, assert_undisturbed, lost, slow_steps};
use crate::support::job::{Ended, Folder, Running, all_at_once};

/// It saved, ended with 75, and can be resumed as if nothing had been.
#[track_caller]
fn assert_stopped(folder: &Folder, ended: &Ended) {
    assert_eq!(ended.exit_code(), Some(75), "{ended}");
    assert!(!folder.checkpoints().is_empty(), "{ended}");
    let resumed = folder.started(2, &format!("{RUN} --resume auto")).run();
    assert_undisturbed(folder, &resumed);
}

/// Waits until the job has this many processes of ranks, of which one is not among `known`.
fn wait_for_another(running: &Running, known: &[(usize, u32)]) {
    let started = Instant::now();
    while running.ranks().len() < known.len()
        || running.ranks().iter().all(|rank| known.contains(rank))
    {
        assert!(started.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_job_that_is_stopped_while_a_rank_comes_saves() {
    // While the others meet the new rank, and while it gets ready and they need it.
    let cases = [
        ("--min-ranks 1", "0:meeting:3:work"),
        ("--min-ranks 2", "1:joining:0:work"),
    ];
    all_at_once(cases, |(words, fault)| {
        let folder = Folder::new("losing-stopped-joining");
        let words = format!("{RUN} {words} --restarts 3 --grace-s 30");
        let job = folder.started(2, &words);
        let faults = format!("1:forward:5:kill,{fault}");
        let mut running = job.env("DDP_TEST_FAULT", &faults).start();
        running.wait_for(r#""event":"step","step":1,"#);
        let known = running.ranks();
        wait_for_another(&running, &known);
        std::thread::sleep(Duration::from_secs(2));
        running.signal("TERM");
        let ended = running.wait();
        assert!(!ended.stderr.contains("did not end within"), "{ended}");
        assert_stopped(&folder, &ended);
    });
}

#[test]
fn ranks_that_came_later_end_the_job_too() {
    let folder = Folder::new("losing-stopped-later");
    let job = folder.started(2, &format!("{RUN} --min-ranks 1 --restarts 7"));
    let mut running = job.env("DDP_TEST_FAULT", &slow_steps()).start();
    running.wait_for(r#""event":"step","step":1,"#);
    for rank in [1, 0] {
        running.signal_rank(rank, "KILL");
        running.wait_for(&format!(r#""joined":[{rank}]"#));
        // It gets its state in the step that follows: before that it cannot continue alone.
        let steps = folder.metrics_log().of_steps("step");
        let next = steps.last().unwrap() + 2.0;
        running.wait_for(&format!(r#""event":"step","step":{next},"#));
    }
    for rank in [0, 1] {
        running.signal_rank(rank, "TERM");
    }
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
