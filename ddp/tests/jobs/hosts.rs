//! Ranks that the program starts on other hosts (`--hosts`): bits, signals, exit codes, restarts,
//! and hosts that cannot start ranks. Here the hosts are names of this machine; `tests/hosts` has
//! real ones with ssh.

use crate::started::{ENDLESS, start_again_after_a_kill};
use crate::support::job::{Folder, QUICK, STEP_2};
use crate::support::metrics_log::model_bytes;

#[test]
fn ranks_on_other_hosts_train_the_bits_of_one_host() {
    let one = Folder::new("hosts-one");
    one.started(3, QUICK).run().assert_well();
    for hosts in ["far:2,off:1", "far:1,localhost:2"] {
        let folder = Folder::new("hosts-several");
        // What a login shell prints does no harm.
        let ended = folder
            .started_on(&format!("--hosts {hosts}"), "echo Welcome", QUICK)
            .run();
        ended.assert_well();
        let world = folder.metrics_log().start()["world"].clone();
        assert_eq!((&world["ranks"], &world["hosts"]), (&3.into(), &2.into()));
        assert_eq!(model_bytes(&folder.out(), 8), model_bytes(&one.out(), 8));
    }
}

#[test]
fn what_ranks_of_other_hosts_print_comes_out_here() {
    let folder = Folder::new("hosts-output");
    let words = format!("{QUICK} --dry-run");
    let ended = folder.started_on("--hosts far,off", "", &words).run();
    ended.assert_well();
    assert!(ended.stdout.contains("a rank sends at most "), "{ended}");
}

#[test]
fn hosts_of_a_file_get_the_variables_and_no_others() {
    let folder = Folder::new("hosts-file");
    let file = folder.path().join("hosts");
    std::fs::write(&file, "far slots=1 # one\noff:1\n").unwrap();
    let places = format!("--hostfile {}", file.display());
    let job = folder.started_on(&places, "unset NCCL_DEBUG OTHER", QUICK);
    let job = job.env("NCCL_DEBUG", "VERSION").env("OTHER", "1");
    let running = job.env("DDP_TEST_FAULT", "0:forward:5:hold").start();
    // Both ranks are there while one holds.
    running.wait_for_fault("0:forward:5");
    let ranks = running.ranks();
    assert_eq!(ranks.len(), 2, "{ranks:?}");
    for (_, pid) in ranks {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
        let environment = String::from_utf8_lossy(&environment).into_owned();
        assert!(environment.contains("NCCL_DEBUG=VERSION"), "{environment}");
        assert!(!environment.contains("\0OTHER="), "{environment}");
    }
    running.go_on(5);
    running.wait().assert_well();
}

#[test]
fn a_host_that_cannot_start_ranks_is_named_with_what_to_do() {
    let refused = "ssh: connect to host far port 22: Connection refused";
    for (script, exit_code, told) in [
        (
            format!("echo '{refused}' >&2; exit 255"),
            77,
            format!("ssh cannot reach it: {refused}; help: `ssh far` must work without a question"),
        ),
        (
            "exec \"$0.missing\"".into(),
            2,
            "not found; help: every host needs version".into(),
        ),
        (
            "echo 'unrecognized subcommand' >&2; exit 2".into(),
            2,
            "ended there with 2: unrecognized subcommand; help: every host needs version".into(),
        ),
        (
            r#"exec sed -u 's/"version":"[^"]*"/"version":"9"/' | sh -c "$*""#.into(),
            2,
            "expected version 9 there, got ".into(),
        ),
        (
            r#"exec sed -u 's/"directory":"[^"]*"/"directory":"\/none"/' | sh -c "$*""#.into(),
            2,
            "cannot enter /none: No such file or directory".into(),
        ),
    ] {
        let folder = Folder::new("hosts-refused");
        let script = format!("if [ $host = far ]; then\n{script}\nexit\nfi");
        let ended = folder
            .started_on("--hosts off:1,far:2", &script, QUICK)
            .run();
        let cause = ended.assert_fails(exit_code);
        assert!(
            cause.starts_with("ddp-train: cannot start ranks on far: "),
            "{ended}"
        );
        assert!(cause.contains(&told), "{ended}");
        assert!(!folder.out().exists(), "nothing was begun");
    }
}

#[test]
fn signals_reach_all_hosts_and_a_second_ctrl_c_ends_at_once() {
    let folder = Folder::new("hosts-stopped");
    let mut running = folder
        .started_on("--hosts far:1,off:1", "", ENDLESS)
        .start();
    running.wait_for(STEP_2);
    running.signal("TERM");
    let ended = running.wait();
    assert_eq!(ended.exit_code(), Some(75), "{ended}");
    assert_eq!(folder.checkpoints().len(), 1, "{ended}");
    let folder = Folder::new("hosts-twice");
    let job = folder.started_on("--hosts far:1,off:1", "", ENDLESS);
    let mut running = job.env("DDP_TEST_FAULT", "1:forward:3:hang").start();
    running.wait_for_fault("1:forward:3");
    running.signal("INT");
    running.wait_for_said("Ctrl-C: finishing this step");
    assert!(running.goes_on(), "the first only asks");
    running.signal("INT");
    let ended = running.wait();
    assert_eq!(ended.exit_code(), Some(130), "{ended}");
}

#[test]
fn a_stop_while_hosts_connect_ends_with_the_signal_s_code() {
    let folder = Folder::new("hosts-early");
    let running = folder
        .started_on("--hosts far:1", "touch connects; exec sleep 600", QUICK)
        .start();
    running.wait_for_file("connects");
    running.signal("TERM");
    let ended = running.wait();
    assert_eq!(ended.exit_code(), Some(143), "{ended}");
    assert!(!folder.out().exists());
}

#[test]
fn a_rank_that_is_killed_on_another_host_is_named_and_the_job_starts_again() {
    let ended = start_again_after_a_kill("hosts", |folder, words| {
        folder.started_on("--hosts far:1,off:1", "", words)
    });
    let mut causes = ended.causes().into_iter();
    assert!(
        causes.any(|cause| cause.contains("rank 1 on off: ")),
        "{ended}"
    );
}

#[test]
fn a_host_that_is_lost_ends_the_job_with_77_and_is_named() {
    let folder = Folder::new("hosts-lost");
    let job = folder.started_on("--hosts far:1,off:1", "echo $$ >$0.$host", ENDLESS);
    let mut running = job.start();
    running.wait_for(STEP_2);
    // The agent, which took the place of ssh.
    let agent = std::fs::read_to_string(folder.path().join("ssh.sh.off")).unwrap();
    let kill = format!("pkill -KILL -P {0}; kill -KILL {0}", agent.trim());
    std::process::Command::new("sh")
        .args(["-c", &kill])
        .status()
        .unwrap();
    let ended = running.wait();
    assert_eq!(ended.exit_code(), Some(77), "{ended}");
    let told = "ddp-train: host off, with rank 1: the connection to it was lost";
    assert!(
        ended.causes().iter().any(|cause| cause.starts_with(told)),
        "{ended}"
    );
}

#[test]
fn no_rank_outlives_a_launcher_that_is_killed() {
    for (elastic, saved) in [("", 1), ("--min-ranks 1", 0)] {
        let folder = Folder::new("hosts-orphans");
        let words = format!("{ENDLESS} {elastic}");
        let mut running = folder.started_on("--hosts far:1,off:1", "", &words).start();
        running.wait_for(STEP_2);
        running.kill();
        // Waiting asserts that no process is left. They were asked to save, elastic ones killed.
        let ended = running.wait();
        assert_eq!(ended.signal(), Some(9), "{ended}");
        assert_eq!(folder.checkpoints().len(), saved, "{ended}");
    }
}
