//! Requests to stop at moments when it is hard to handle them: before a rank has a handler, while
//! it joins, while another is lost, and while nothing reads what the job prints.

use crate::losing::{RUN, assert_undisturbed};
use crate::support::job::{Folder, Running, all_at_once};

/// So many steps that a stop comes before the last one.
fn endless() -> String {
    RUN.replace("--steps 40", "--steps 1000000")
}

/// Waits until a process of rank 1 is there. It may not be in `main` yet.
fn wait_for_rank_1(running: &Running) {
    running.wait_until("a process of rank 1", || {
        running.ranks().iter().any(|it| it.0 == 1)
    });
}

#[test]
fn the_lines_of_a_step_are_written_before_a_stop_although_ranks_meet_in_between() {
    let folder = Folder::new("stops-lines");
    let job = folder.started(2, &format!("{RUN} --min-ranks 1"));
    // No rank has logged or evaluated step 7 when it leaves.
    let faults = "0:optimizer:7:term,0:log:7:leave,1:log:7:leave";
    let ended = job.env("DDP_TEST_FAULT", faults).run();
    assert_eq!(ended.exit_code(), Some(75), "{ended}");
    assert_eq!(folder.checkpoints(), ["step-00000007"], "{ended}");
    let log = folder.metrics_log();
    for kind in ["step", "eval"] {
        let last = log.all(kind).last().map(|event| event["step"].clone());
        assert_eq!(last, Some(7.into()), "{kind}: {ended}");
    }
    let resumed = folder.started(2, &format!("{RUN} --resume auto")).run();
    assert_undisturbed(&folder, &resumed);
}

#[test]
fn a_stop_while_ranks_start_ends_the_job_with_75() {
    let signals = ["TERM", "INT", "HUP", "USR1"];
    all_at_once(
        ddp_testing::cases_of("signals to starting ranks", signals, 2),
        |signal| {
            let folder = Folder::new(&format!("stops-start-{signal}"));
            let running = folder.started(2, &endless()).start();
            wait_for_rank_1(&running);
            running.signal(signal);
            let ended = running.wait();
            assert!(ended.assert_fails(75).contains("stopped "), "{ended}");
        },
    );
}

#[test]
fn a_stop_that_only_a_starting_rank_gets_ends_the_job_with_75() {
    let folder = Folder::new("stops-start-one");
    let words = format!("{} --min-ranks 1 --restarts 9", endless());
    let running = folder.started(2, &words).start();
    wait_for_rank_1(&running);
    running.signal_rank(1, "TERM");
    let ended = running.wait();
    assert!(ended.assert_fails(75).contains("stopped "), "{ended}");
}

#[test]
fn a_stop_and_a_kill_while_ranks_start_end_the_job_with_75() {
    let folder = Folder::new("stops-start-kill");
    let words = format!("{} --min-ranks 1 --restarts 9", endless());
    let running = folder.started(2, &words).start();
    wait_for_rank_1(&running);
    running.signal("TERM");
    running.signal_rank(1, "KILL");
    let ended = running.wait();
    assert_eq!(ended.exit_code(), Some(75), "{ended}");
    assert!(ended.stderr.contains("stopped "), "{ended}");
}

#[test]
fn a_stop_that_only_a_joining_rank_gets_ends_the_job_with_75() {
    let folder = Folder::new("stops-joining");
    let job = folder.started(2, &format!("{RUN} --min-ranks 2 --restarts 9"));
    let faults = "1:forward:5:kill,1:joining:0:hang";
    let running = job.env("DDP_TEST_FAULT", faults).start();
    // Its process has ended when this is said; the other rank waits for the next one.
    running.wait_for_said("starting it again");
    wait_for_rank_1(&running);
    running.signal_rank(1, "TERM");
    let ended = running.wait();
    assert_eq!(ended.exit_code(), Some(75), "{ended}");
    let resumed = folder.started(2, &format!("{RUN} --resume auto")).run();
    assert_undisturbed(&folder, &resumed);
}

#[test]
fn a_job_whose_full_standard_error_is_not_read_trains_and_stops_at_ctrl_c() {
    let folder = Folder::new("stops-full");
    let full = "mkfifo full; exec 3<>full 2>&3
        dd if=/dev/zero of=full oflag=nonblock bs=4096 count=9999 2>/dev/null
        set -- env --default-signal=INT \"$@\"";
    let words = format!("{} --ranks 2 --min-ranks 1 --progress always", endless());
    let mut running = folder.in_shell(full, &words).start();
    running.wait_for(r#""event":"step","step":2,"#);
    running.signal("INT");
    let ended = running.wait();
    assert_eq!(ended.exit_code(), Some(75), "{ended}");
    let log = folder.metrics_log();
    let lost = log.all("ranks");
    assert!(lost.is_empty(), "no rank was lost: {lost:?}");
    assert_eq!(log.end().unwrap()["exit_code"], 75);
}
