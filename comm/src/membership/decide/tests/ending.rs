//! How a job ends, and with which exit code.

use super::*;

#[test]
fn a_job_whose_hosts_are_lost_while_it_ends_has_the_code_that_a_rank_has_said() {
    for (said, code) in [(Some(74), 74), (Some(0), 0), (None, 77)] {
        let mut job = trains(&[1, 1]);
        said.iter()
            .for_each(|&code| job.says(0, ToLauncher::Ends(code)));
        let why = "it does not answer".into();
        job.handle(JobEvent::HostRefused { host: 1, why });
        assert_eq!(job.state.exit_code(), code, "{said:?}");
    }
}

/// It was 130, the code of the signal.
#[test]
fn a_job_that_is_asked_to_stop_and_killed_has_the_code_that_a_rank_has_said_before() {
    for (said, code) in [(Some(74), 74), (None, 130)] {
        let mut job = trains(&[0, 0]);
        job.handle(JobEvent::Signal(libc::SIGINT));
        said.iter()
            .for_each(|&code| job.says(0, ToLauncher::Ends(code)));
        job.at_s(1000);
        assert_eq!(job.signals().last(), Some(&libc::SIGKILL));
        assert_eq!(job.state.exit_code(), code, "{said:?}");
    }
}

#[test]
fn the_first_exit_code_that_ranks_say_is_that_of_the_job() {
    let mut job = trains(&[0, 0]);
    job.says(1, ToLauncher::Ends(65));
    job.says(0, ToLauncher::Ends(0));
    job.ends(1, End::Code(65));
    job.at_s(1);
    assert_eq!(job.starts(), [0, 1], "none is started again");
    job.ends(0, KILLED);
    assert!(!job.state.has_ranks());
    assert_eq!(job.state.exit_code(), 65);
    // How a rank ends after the job has done its work does not matter.
    let mut job = trains(&[0, 0]);
    job.says(1, ToLauncher::Ends(0));
    job.ends(0, KILLED);
    job.ends(1, End::Code(0));
    assert_eq!((job.state.has_ranks(), job.state.exit_code()), (false, 0));
}

/// Ranks wait for each other before they end.
#[test]
fn ranks_that_have_done_their_work_do_not_wait_for_one_that_is_lost() {
    let lost: [fn(&mut Job); 2] = [
        |job| job.ends(0, KILLED),
        |job| {
            let why = "it does not answer".into();
            job.handle(JobEvent::HostRefused { host: 1, why });
        },
    ];
    for lose in lost {
        let mut job = trains(&[1, 0, 0]);
        job.says(1, ToLauncher::Ends(0));
        job.ends(2, End::Code(0));
        let is_told = |job: &Job| {
            let mut all = job.actions.iter();
            let over = ToRank::Over(1);
            all.any(|it| matches!(it, JobAction::Tell { rank: 1, message, .. } if *message == over))
        };
        assert!(!is_told(&job));
        lose(&mut job);
        assert!(is_told(&job));
        assert!(job.state.is_done() && job.state.has_ranks());
    }
}

#[test]
fn a_job_of_which_no_rank_is_left_ends_with_77() {
    let mut job = trains(&[0, 0]);
    job.state.rules.restarts = 0;
    job.ends(0, KILLED);
    assert!(job.state.has_ranks());
    job.ends(1, KILLED);
    assert_eq!((job.state.has_ranks(), job.state.exit_code()), (false, 77));
}

#[test]
fn a_second_ctrl_c_ends_all_within_three_seconds() {
    for (second, seconds) in [(libc::SIGINT, 4), (libc::SIGTERM, 60)] {
        let mut job = trains(&[0, 0]);
        job.handle(JobEvent::Signal(libc::SIGINT));
        job.at_s(1);
        job.handle(JobEvent::Signal(second));
        assert_eq!(job.signals(), [libc::SIGINT, second]);
        job.at_s(seconds - 1);
        assert_eq!(job.signals(), [0; 0]);
        job.at_s(seconds);
        assert_eq!(job.signals(), [libc::SIGKILL]);
        [0, 1].iter().for_each(|&rank| job.ends(rank, KILLED));
        assert_eq!(job.state.exit_code(), of_signal(libc::SIGINT));
    }
}

/// One Ctrl-C came to all: the launcher took its own, after that of a rank, for the second.
#[test]
fn a_ctrl_c_of_which_a_rank_has_told_before_is_not_the_first_of_the_launcher() {
    let mut job = trains(&[0, 0]);
    for none in [0, 200, -1, libc::SIGKILL] {
        job.says(1, ToLauncher::Asked(none));
    }
    assert_eq!(job.signals(), [0; 0]);
    job.says(1, ToLauncher::Asked(libc::SIGINT));
    assert_eq!(job.signals(), [libc::SIGTERM]);
    job.says(0, ToLauncher::Asked(libc::SIGINT));
    job.handle(JobEvent::Signal(libc::SIGINT));
    assert_eq!(job.signals(), [libc::SIGINT]);
    job.at_s(50);
    assert_eq!(job.signals(), [0; 0]);
    job.handle(JobEvent::Signal(libc::SIGINT));
    job.at_s(53);
    assert_eq!(job.signals(), [libc::SIGINT, libc::SIGKILL]);
}

#[test]
fn a_job_stops_although_the_rank_that_was_asked_is_lost() {
    for is_elastic in [true, false] {
        let mut job = job_of(&[0, 0], is_elastic);
        [0, 1].iter().for_each(|&rank| job.waits(rank));
        job.says(1, ToLauncher::Asked(libc::SIGUSR1));
        job.ends(1, KILLED);
        assert_eq!(job.signals(), [libc::SIGUSR1]);
        assert_eq!(
            job.state.stop,
            Some(libc::SIGUSR1),
            "nothing starts it again"
        );
        job.at_s(1);
        assert_eq!(job.starts(), [0; 0]);
    }
}

#[test]
fn a_signal_to_one_rank_stops_the_job_and_none_is_started_again() {
    for end in [End::Code(EXIT_STOPPED), End::Signal(libc::SIGTERM)] {
        let mut job = trains(&[0, 0, 0]);
        job.ends(2, KILLED);
        job.starts();
        job.ends(1, end);
        assert_eq!(job.signals(), [libc::SIGTERM]);
        job.at_s(1);
        assert_eq!(job.starts(), [0; 0]);
        job.ends(0, End::Code(EXIT_STOPPED));
        assert_eq!(job.state.exit_code(), EXIT_STOPPED);
    }
}

/// It ended with 137 and no word.
#[test]
fn a_job_whose_ranks_are_all_killed_names_them_and_their_signals() {
    let printed = |it: &JobAction| match it {
        JobAction::Print(line) => Some(line.clone()),
        _ => None,
    };
    for (ends, told) in [
        ([KILLED, KILLED], Some("ranks 0 and 1 killed by signal 9: ")),
        (
            [KILLED, End::Signal(11)],
            Some("rank 0 killed by signal 9, rank 1 killed by signal 11: "),
        ),
        // This one has said why.
        ([KILLED, End::Code(77)], None),
        ([KILLED, End::Signal(libc::SIGTERM)], None),
    ] {
        let mut job = job_of(&[0, 0], false);
        [0, 1].iter().for_each(|&rank| job.waits(rank));
        job.ends(0, ends[0]);
        assert_eq!(job.done(printed), [""; 0]);
        job.ends(1, ends[1]);
        let said = job.done(printed);
        assert_eq!(said.len(), usize::from(told.is_some()), "{said:?}");
        assert!(
            said.iter().all(|it| it.starts_with(told.unwrap())),
            "{said:?}"
        );
    }
}

/// It ended without a word.
#[test]
fn a_job_that_is_asked_to_stop_when_no_rank_is_left_says_so() {
    let mut job = trains(&[0, 0]);
    [0, 1].iter().for_each(|&rank| job.ends(rank, KILLED));
    assert!(job.state.has_ranks());
    job.handle(JobEvent::Signal(libc::SIGTERM));
    assert_eq!((job.state.has_ranks(), job.state.exit_code()), (false, 77));
    let printed = |it: &JobAction| match it {
        JobAction::Print(line) => Some(line.clone()),
        _ => None,
    };
    let said = job.done(printed);
    let last = said.last().map_or("", String::as_str);
    assert!(last.starts_with("no rank is left; "), "{said:?}");
}
