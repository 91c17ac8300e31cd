use std::ffi::OsString;
use std::net::Ipv4Addr;
use std::os::unix::ffi::OsStringExt;

use super::*;

fn spawner() -> Spawner {
    Spawner::new("test", Duration::from_secs(60), Duration::from_secs(5))
}

fn task(program: &str, arguments: &[&str]) -> RankCommand {
    RankCommand {
        losses: None,
        place: None,
        program: program.into(),
        arguments: arguments.iter().map(Into::into).collect(),
        agent: "",
    }
}

fn here(ranks: usize) -> [ListedHost; 1] {
    let name = "localhost".into();
    [ListedHost {
        name,
        ranks,
        is_spare: false,
    }]
}

/// The exit code of `size` ranks that run `script` in a shell, where `$rank` and `$socket` are.
fn code_of(size: usize, script: &str) -> u8 {
    let script = format!("rank=${{DDP_JOB%%/*}} socket=${{DDP_JOB#*:}}\n{script}");
    // Other shells know descriptors of one digit only.
    let task = task("bash", &["-c", &script]);
    spawner().run(&here(size), &task).unwrap()
}

/// The same where rank `first` does one thing, and the others another when its end has been seen.
fn code_after(first: usize, size: usize, does: &str, others: &str) -> u8 {
    let (process, thread) = (std::process::id(), std::thread::current().id());
    let file = std::env::temp_dir().join(format!("ddp-spawn-{process}-{thread:?}"));
    let code = code_of(
        size,
        &format!(
            "file='{}'
            if test $rank = {first}; then echo $$ >\"$file.new\"; mv \"$file.new\" \"$file\"; {does}; fi
            until test -e \"$file\"; do sleep 0.02; done
            read pid <\"$file\"
            while test -e /proc/$pid; do sleep 0.02; done
            {others}",
            file.display()
        ),
    );
    std::fs::remove_file(file).unwrap();
    code
}

/// Says that the rank waits, and reads that many messages.
fn waits_and_reads(messages: usize) -> String {
    format!(
        "printf '{{\"Waits\":{{\"after\":0,\"port\":0}}}}' >&$socket
        told=$(dd bs=65536 count={messages} <&$socket 2>/dev/null)"
    )
}

#[test]
fn ranks_that_all_wait_are_told_who_takes_part_and_get_sockets() {
    let meet = waits_and_reads(3);
    let script = format!(
        "{meet}
        [[ $DDP_JOB == $rank/3:* && $told == *Welcome*Sockets*Formed* ]] || exit 9"
    );
    assert_eq!(code_of(3, &script), 0);
    assert_eq!(code_of(1, "[[ $DDP_JOB == 0/1:* ]]"), 0);
    let sockets = job::sockets_between(4);
    assert_eq!(
        sockets.iter().map(Vec::len).collect::<Vec<_>>(),
        [3, 1, 1, 1]
    );
}

#[test]
fn ranks_that_wait_for_one_that_has_ended_end_too() {
    let meet = waits_and_reads(2);
    let script = format!(
        "test $rank = 1 && exit 65
        {meet}
        [[ $told == *Welcome*Ends*:65* ]] || kill -9 $$
        exit 65"
    );
    assert_eq!(code_of(3, &script), 65);
}

#[test]
fn the_first_failure_is_the_exit_code() {
    assert_eq!(code_after(1, 3, "exit 65", "exit 77"), 65);
    // A rank that was killed is why the others fail.
    assert_eq!(code_after(1, 2, "kill -9 $$", "exit 77"), 137);
}

/// One that is killed within three seconds after another has missed it is the cause: see
/// `membership/decide/tests.rs`, where time is simulated.
#[test]
fn a_rank_that_is_killed_after_another_has_failed_is_not_the_cause() {
    // The spawner kills the one that stays.
    assert_eq!(code_of(2, "test $rank = 0 && exit 77; kill -STOP $$"), 77);
    assert_eq!(code_after(0, 2, "exit 65", "kill -9 $$"), 65);
}

#[test]
fn a_rank_that_stays_after_the_others_have_ended_well_is_killed_and_lost() {
    assert_eq!(code_of(3, "test $rank = 1 && kill -STOP $$; exit 0"), 77);
}

/// A job of two ranks, of which one may be lost, that has started.
fn elastic(script: &str) -> Job {
    let losses = Losses {
        min_ranks: 1,
        restarts: 9,
    };
    let task = RankCommand {
        losses: Some(losses),
        ..task("bash", &["-c", script])
    };
    let [grace, timeout] = [Duration::from_secs(60); 2];
    let limits = JobLimits { grace, timeout };
    Signals::block();
    let mut job = Job::new("test", &here(2), |_| true, limits, &task, mpsc::channel());
    job.start().unwrap();
    job
}

#[test]
fn a_program_that_cannot_be_started_is_an_error() {
    let missing = task("/missing/program", &[]);
    let error = spawner().run(&here(2), &missing).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("cannot start rank 0 of 2: No such file"),
        "{error}"
    );
}

#[test]
fn a_signal_to_stop_waits_until_a_rank_can_handle_it() {
    // Without being blocked it would end this shell, which has no handler.
    assert_eq!(code_of(1, "kill -TERM $$; exit 9"), 9);
}

#[test]
fn a_rank_that_leaves_because_it_was_asked_to_stop_stops_the_job() {
    let mut job = elastic("test ${DDP_JOB%%/*} = 1 && exit 75; exec sleep 1000");
    while job.state.stop.is_none() {
        assert!(job.poll());
        // Sleep: what is waited for is looked at.
        std::thread::sleep(PERIOD);
    }
    assert_eq!(job.state.stop, Some(libc::SIGTERM));
}

#[test]
fn an_agent_that_cannot_be_let_in_leaves_its_number_to_others() {
    let far = ListedHost {
        name: "far".into(),
        ranks: 1,
        is_spare: false,
    };
    let hosts = [here(1).as_slice(), &[far]].concat();
    let mut task = task("true", &[]);
    // Not UTF-8: no other host can be told.
    task.arguments = vec![OsString::from_vec(vec![0xff])];
    let limits = spawner().limits;
    let mut job = Job::new(
        "test",
        &hosts,
        |host| host == 0,
        limits,
        &task,
        mpsc::channel(),
    );
    for connection in [1, 2] {
        let came = JobEvent::AgentCame {
            host: 1,
            connection,
            address: Ipv4Addr::LOCALHOST.into(),
        };
        let error = job.handle(came).unwrap_err().to_string();
        assert!(error.contains("expected UTF-8"), "{error}");
        let host = &job.state.hosts[1];
        assert_eq!((host.agent, host.waiting), (None, None));
    }
}
