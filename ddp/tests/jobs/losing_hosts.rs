//! A job on several hosts that continues without lost ranks, agents and hosts, and takes them in
//! again. The hosts are names of this machine.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::losing::{RUN, SHORT, assert_undisturbed, joined, lost, sorted, undisturbed};
use crate::support::job::{FAR, Folder, Running, all_at_once};
use crate::support::processes::{SIGTSTP, while_nothing_happens};
use crate::tcp;

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
    let cases = ddp_testing::cases_of("ranks lost on several hosts", cases, 3);
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

/// Ranks are numbered host by host: here 0, 2, 1. Each names the others as the job does.
#[test]
fn a_rank_between_those_of_one_host_is_the_one_that_is_named_and_lost() {
    undisturbed();
    let folder = Folder::new("losing-hosts-between");
    let words = format!("{RUN} --min-ranks 2 {SHORT}");
    let job = folder.started_on("--hosts far:1,off:1,ann@far:1", "", &words);
    let ended = job.env("DDP_TEST_FAULT", "1:forward:14:hang").run();
    assert_eq!(lost(&folder.metrics_log()), [1], "{ended}");
    assert!(ended.stderr.contains("waiting for rank 1"), "{ended}");
    assert!(ended.stderr.contains("rank 1 did not arrive"), "{ended}");
    assert!(!ended.stderr.contains("rank 2 did not"), "{ended}");
    assert_undisturbed(&folder, &ended);
}

#[test]
fn a_rank_that_comes_back_to_an_empty_host_is_taken_in() {
    undisturbed();
    let folder = Folder::new("losing-hosts-back");
    let words = format!("{RUN} --min-ranks 1 --restarts 1");
    // The launcher's host has no ranks.
    let job = folder.started_on("--hosts far:2,off:1", "", &words);
    let faults = "0:forward:10:hold,0:newcomer:28:hold";
    let mut running = job.env("DDP_TEST_FAULT", faults).start();
    running.wait_for_fault("0:forward:10");
    let before = running.wait_for_process(2, None);
    running.signal_rank(2, "KILL");
    running.wait_for_process(2, Some(before));
    // Until the others have met without it.
    running.signal_rank(2, "STOP");
    running.go_on(10);
    running.wait_for(r#""lost":[{"rank":2"#);
    running.signal_rank(2, "CONT");
    let ended = running.wait();
    let log = folder.metrics_log();
    let last = *log.all("ranks").last().unwrap();
    assert_eq!(last["joined"][0], 2, "{ended}");
    assert_undisturbed(&folder, &ended);
}

#[test]
fn a_host_whose_agent_is_killed_is_lost_with_its_ranks() {
    undisturbed();
    let folder = Folder::new("losing-agent");
    let words = format!("{RUN} --min-ranks 2 {SHORT}");
    let job = folder.started_on("--hosts localhost:2,far:2", "", &words);
    let running = job.env("DDP_TEST_FAULT", "2:forward:20:hold").start();
    running.wait_for_fault("2:forward:20");
    assert_eq!(running.signal_agents("KILL"), 1);
    let ended = running.wait();
    assert_eq!(lost(&folder.metrics_log()), [2, 3], "{ended}");
    let told = "host far, with ranks 2 and 3: it was silent for ";
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

/// Rank 0 holds, and later waits until ranks that were lost by then come back, twice if they come
/// one by one.
const UNTIL_ALL_ARE_BACK: &str = "0:forward:20:hold,0:newcomer:28:hold,0:newcomer:35:hold";

#[test]
fn an_agent_speaks_for_its_own_ranks_only() {
    undisturbed();
    let folder = Folder::new("losing-lies");
    // What an agent has printed comes out when all that it said before was heard.
    let lies = r#"{\"Ended\":[99,9]} {\"Ended\":[0,9]} {\"Printed\":\"lied\"}"#;
    let wait = "until [ -e lie ]; do sleep 0.1; done";
    let lies = format!("({wait}; printf '%s\\n' {lies}) &");
    let words = format!("{RUN} --min-ranks 1");
    let job = folder.started_on("--hosts localhost:1,far:1", &lies, &words);
    let running = job.env("DDP_TEST_FAULT", "0:forward:20:hold").start();
    running.wait_for_fault("0:forward:20");
    std::fs::write(folder.path().join("lie"), "").unwrap();
    running.wait_for_printed("lied\n");
    running.go_on(20);
    let ended = running.wait();
    assert_undisturbed(&folder, &ended);
    assert!(!ended.stderr.contains("killed by"), "{ended}");
}

#[test]
fn ctrl_z_suspends_no_launcher_that_agents_would_count_as_lost() {
    undisturbed();
    let folder = Folder::new("losing-ctrl-z");
    let words = format!("{RUN} --min-ranks 1");
    let job = folder.started_on("--hosts localhost:1,far:1", "", &words);
    let running = job.env("DDP_TEST_FAULT", "0:forward:20:hold").start();
    running.wait_for_fault("0:forward:20");
    // In an orphaned group the signal stops no process.
    assert!(running.ignores(SIGTSTP));
    running.signal("TSTP");
    running.go_on(20);
    assert_undisturbed(&folder, &running.wait());
}

#[test]
fn ranks_of_a_lost_host_start_on_a_spare_one() {
    undisturbed();
    let folder = Folder::new("losing-spare");
    let words = format!("{RUN} --min-ranks 2 --restarts 2 --spares off:1,spare:2");
    let hosts = "--hosts localhost:2,far:2";
    let job = folder.started_on(hosts, "echo $$ >agent-$host", &words);
    let running = job.env("DDP_TEST_FAULT", UNTIL_ALL_ARE_BACK).start();
    running.wait_for_fault("0:forward:20");
    kill_all_of(&folder, "agent-far");
    running.go_on(20);
    let ended = running.wait();
    let log = folder.metrics_log();
    assert_eq!(lost(&log), [2, 3], "{ended}");
    for told in [
        "rank 2 was on far: starting it again on spare (1 of 2)",
        "rank 3 was on far: starting it again on spare (2 of 2)",
    ] {
        assert!(ended.stderr.contains(told), "{told}: {ended}");
    }
    assert_eq!(sorted(joined(&log)), [2, 3], "{ended}");
    assert_undisturbed(&folder, &ended);
}

#[test]
fn a_host_that_is_lost_and_comes_back_gets_its_ranks_again() {
    undisturbed();
    let folder = Folder::new("losing-return");
    let words = format!("{RUN} --min-ranks 2 --restarts 2");
    let hosts = "--hosts localhost:2,far:2";
    // The second login takes longer than the time between two calls.
    let slow_login = "[ -e agent-$host ] && sleep 7; echo $$ >agent-$host";
    let job = folder.started_on(hosts, slow_login, &words);
    let running = job.env("DDP_TEST_FAULT", UNTIL_ALL_ARE_BACK).start();
    running.wait_for_fault("0:forward:20");
    kill_all_of(&folder, "agent-far");
    running.go_on(20);
    let ended = running.wait();
    let log = folder.metrics_log();
    assert_eq!(lost(&log), [2, 3], "{ended}");
    assert_eq!(sorted(joined(&log)), [2, 3], "{ended}");
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
    let words = format!("{RUN} --min-ranks 1 --restarts 9");
    // A rank is killed, and later a process with its rank.
    let faults = "1:forward:7:kill,0:newcomer:14:hold,0:forward:20:hold,0:newcomer:28:hold";
    let job = tcp::ranks(&folder, 3, &words, &of_rank).env("DDP_TEST_FAULT", faults);
    let running = job.start();
    running.wait_for_fault("0:forward:20");
    kill_all_of(&folder, "process-2");
    running.go_on(20);
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
    let words = format!("{RUN} --min-ranks 1 {SHORT}");
    let job = folder.started_on("--hosts far:2,localhost:1", "", &words);
    let mut running = job.env("DDP_TEST_FAULT", "2:forward:20:hold").start();
    running.wait_for_fault("2:forward:20");
    assert_eq!(running.signal_agents("STOP"), 1);
    running.wait_for_said("host far, with ranks 0 and 1: it was silent for ");
    running.go_on(20);
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
        let words = format!("{RUN} --min-ranks 2 {SHORT}");
        let job = folder.started_on("--hosts localhost:2,far:2", "", &words);
        let ended = job.env("DDP_TEST_FAULT", faults).run();
        let lost = sorted(lost(&folder.metrics_log()));
        let all: Vec<u64> = vec![2, 3];
        assert_eq!(lost, all[2 - faults.split(',').count()..], "{ended}");
        assert_undisturbed(&folder, &ended);
    });
}

#[test]
fn a_rank_that_writes_a_checkpoint_while_another_is_lost_is_waited_for() {
    undisturbed();
    all_at_once(["far:1,off:2", "localhost:1,far:2"], |hosts| {
        let folder = Folder::new("losing-hosts-writing");
        let words = format!("{RUN} --min-ranks 2 {SHORT}");
        let job = folder.started_on(&format!("--hosts {hosts}"), "", &words);
        let faults = "0:save:18:hold,1:forward:20:kill";
        let running = job.env("DDP_TEST_FAULT", faults).start();
        running.wait_for_fault("0:save:18");
        running.wait_for_said("rank 1 ");
        // The launcher waits for a rank that shows no progress for twice the timeout.
        while_nothing_happens(Duration::from_secs(45));
        running.go_on(18);
        let ended = running.wait();
        assert_eq!(lost(&folder.metrics_log()), [1], "{ended}");
        assert_undisturbed(&folder, &ended);
    });
}

#[test]
fn a_job_that_is_suspended_and_resumed_loses_nothing() {
    undisturbed();
    let folder = Folder::new("losing-suspended");
    let words = format!("{RUN} --min-ranks 1 {SHORT}");
    let job = folder.started_on("--hosts localhost:1,far:2", "", &words);
    let running = job.env("DDP_TEST_FAULT", "0:forward:20:hold").start();
    running.wait_for_fault("0:forward:20");
    running.signal_all("STOP");
    // Longer than launcher and agents wait for each other.
    while_nothing_happens(Duration::from_secs(25));
    running.signal_all("CONT");
    running.go_on(20);
    let ended = running.wait();
    assert_eq!(lost(&folder.metrics_log()), [0; 0], "{ended}");
    assert_undisturbed(&folder, &ended);
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

/// The answer to such a message; None if the connection is closed instead.
fn answer(socket: &mut TcpStream) -> Option<Value> {
    let mut length = [0; 4];
    socket.read_exact(&mut length).ok()?;
    let mut answer = vec![0; u32::from_le_bytes(length) as usize];
    socket.read_exact(&mut answer).ok()?;
    Some(serde_json::from_slice(&answer).expect("it is JSON"))
}

/// The number of the job, which its ranks have in their environment.
fn number_of(running: &Running) -> String {
    let (_, pid) = running.ranks()[0];
    let variables = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
    let variables = String::from_utf8_lossy(&variables).into_owned();
    let number = variables
        .split('\0')
        .find_map(|it| it.strip_prefix("DDP_JOB_NUMBER="));
    number.expect("it is an elastic job").into()
}

/// Calls ports as processes that are no ranks: with garbage, and as rank 1 of these generations of
/// a job.
fn call_as_strangers(ports: Vec<u16>, number: &str, generations: u64) -> Vec<TcpStream> {
    let web = b"GET / HTTP/1.1\r\n\r\n";
    let garbage = [vec![0xff; 64], web.to_vec(), framed(web), framed(b"[1]")];
    let calls = (1..=generations).map(|generation| {
        let job = blake3::hash(format!("job {number} generation {generation}").as_bytes());
        let job = job.to_hex().to_string();
        let call = ["ddp-train ranks 2", &job];
        let call = serde_json::json!([call[0], call[1], 1, 0, "7", 3, false]);
        framed(call.to_string().as_bytes())
    });
    let words: Vec<Vec<u8>> = garbage.into_iter().chain(calls).collect();
    let all = ports
        .iter()
        .flat_map(|port| words.iter().map(move |word| (*port, word)));
    let sockets = all.filter_map(|(port, word)| {
        let mut socket = TcpStream::connect(("127.0.0.1", port)).ok()?;
        (socket.set_read_timeout(Some(Duration::from_secs(60)))).expect("it is not zero");
        socket.write_all(word).ok().map(|()| socket)
    });
    sockets.collect()
}

#[test]
fn strangers_that_call_ranks_while_they_meet_disturb_nothing() {
    undisturbed();
    let folder = Folder::new("losing-hosts-strangers");
    let words = format!("{RUN} {FAR} --min-ranks 1 --restarts 1");
    let job = folder.started_on("--hosts far:2,off:1", "", &words);
    // The process that is started again listens after rank 0 has answered all strangers.
    let faults = "1:forward:8:hold,1:joining:0:hold";
    let running = job.env("DDP_TEST_FAULT", faults).start();
    running.wait_for_fault("1:forward:8");
    // Ranks 0 and 2 meet again, and rank 0 listens for rank 2, which has stopped.
    running.signal_rank(2, "STOP");
    running.signal_rank(1, "KILL");
    running.wait_until("a rank that listens", || {
        !ports_of_ranks(&running).is_empty()
    });
    let number = number_of(&running);
    let sockets = call_as_strangers(ports_of_ranks(&running), &number, 3);
    running.signal_rank(2, "CONT");
    // Those of other generations that rank 0 sent away, and those that it asked for a proof.
    let (mut others, mut asked) = (0, 0);
    for mut socket in sockets {
        let Some(said) = answer(&mut socket) else {
            continue;
        };
        if said[1].is_null() {
            others += 1;
            continue;
        }
        asked += 1;
        // With another secret. Rank 0 may have closed: it has met rank 2.
        _ = socket.write_all(&framed(br#"["00"]"#));
        let said = answer(&mut socket);
        let refused = serde_json::json!(["refused"]);
        assert!(said.as_ref().is_none_or(|it| *it == refused), "{said:?}");
    }
    running.go_on(0);
    running.go_on(8);
    let ended = running.wait();
    assert_eq!((others, asked), (2, 1), "{ended}");
    assert_undisturbed(&folder, &ended);
}
