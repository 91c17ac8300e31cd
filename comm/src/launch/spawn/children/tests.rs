use std::os::unix::process::ExitStatusExt;
use std::time::Instant;

use super::*;

/// The end of patience with the system.
const PATIENCE: Duration = Duration::from_secs(60);

fn sleeper() -> Command {
    let mut command = Command::new("sleep");
    command.arg("600");
    command
}

fn until<T>(mut found: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(began.elapsed() < PATIENCE);
        // Sleep: what is waited for is looked at.
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Stops a rank, or lets it continue.
fn send(ranks: &Children, rank: usize, signal: c_int) {
    let pid = ranks
        .running
        .iter()
        .find(|it| it.rank == rank)
        .unwrap()
        .child
        .id();
    // SAFETY: sends a signal to a child that has not been waited for.
    unsafe { libc::kill(pid as libc::pid_t, signal) };
    until(|| (is_stopped(pid) == (signal == libc::SIGSTOP)).then_some(()));
}

fn ended(ranks: &mut Children) -> (usize, u32, ExitStatus) {
    until(|| ranks.collect().pop())
}

#[test]
fn ranks_that_are_stopped_and_go_on_are_seen_once() {
    let mut ranks = Children::new(false);
    for rank in 0..3 {
        ranks.start((rank, 7, 3), sleeper()).unwrap();
    }
    send(&ranks, 1, libc::SIGSTOP);
    let mut seconds = 0;
    let mut seen = |ranks: &mut Children| {
        seconds += 1;
        ranks.stopped(Duration::from_secs(seconds))
    };
    assert_eq!(seen(&mut ranks), [(1, 7, true)]);
    assert_eq!(seen(&mut ranks), []);
    send(&ranks, 1, libc::SIGCONT);
    send(&ranks, 2, libc::SIGSTOP);
    assert_eq!(seen(&mut ranks), [(1, 7, false), (2, 7, true)]);
    // Another process of the rank than the one that runs stays alone.
    ranks.kill(2, 6);
    ranks.kill(2, 7);
    let (rank, process, status) = ended(&mut ranks);
    assert_eq!(
        (rank, process, status.signal()),
        (2, 7, Some(libc::SIGKILL))
    );
    assert_eq!(ranks.running.len(), 2);
}

#[test]
fn what_a_rank_has_said_is_there_when_its_end_is_seen() {
    let mut ranks = Children::new(false);
    let mut command = Command::new("bash");
    let script = r#"exec {out}>&${DDP_JOB#*:}; printf '{"Ends":65}' >&$out; exit 9"#;
    command.args(["-c", script]);
    ranks.start((0, 7, 1), command).unwrap();
    let mut all = Vec::new();
    until(|| {
        all.extend(ranks.news());
        matches!(all.last(), Some((.., RankNews::Ended(_)))).then_some(())
    });
    let said = RankNews::Said(ToLauncher::Ends(65));
    let ended = RankNews::Ended(ExitStatus::from_raw(9 << 8));
    assert_eq!(all, [(0, 7, said), (0, 7, ended)]);
}

#[test]
fn ends_come_before_what_others_say_and_words_of_a_rank_stay_in_order() {
    let misses = || ToLauncher::Misses {
        generation: 1,
        ranks: vec![1],
        have_met: true,
    };
    let waits = ToLauncher::Waits { after: 1, port: 0 };
    let words = vec![
        (0, 7, misses()),
        (2, 9, misses()),
        (0, 7, waits.clone()),
        (1, 8, ToLauncher::Progress(3)),
        (2, 9, ToLauncher::Ends(77)),
    ];
    let killed = ExitStatus::from_raw(9);
    let all = in_order(words, vec![(2, 9, killed), (1, 8, killed)]);
    let said = RankNews::Said;
    let ended = || RankNews::Ended(killed);
    let expected = [
        (1, 8, said(ToLauncher::Progress(3))),
        (2, 9, said(ToLauncher::Ends(77))),
        (1, 8, ended()),
        (2, 9, said(misses())),
        (2, 9, ended()),
        (0, 7, said(misses())),
        (0, 7, said(waits)),
    ];
    assert_eq!(all, expected);
}

#[test]
fn a_rank_ends_with_the_thread_that_started_it_if_that_is_wanted() {
    let pid = std::thread::spawn(|| {
        let mut ranks = Children::new(true);
        ranks.start((0, 1, 1), sleeper()).unwrap();
        let pid = ranks.running[0].child.id();
        std::mem::forget(ranks);
        pid
    });
    let pid = pid.join().unwrap();
    let is_left = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    until(|| is_left().contains(") Z").then_some(()));
}

/// The limits on processes and open files were named, whatever the reason.
#[test]
fn the_limit_is_named_that_keeps_a_rank_from_starting() {
    for (code, limits) in [
        (libc::ENOMEM, &["-v"][..]),
        (libc::EMFILE, &["-n"]),
        (libc::EAGAIN, &["-u", "-v"]),
        (libc::ENOENT, &[]),
    ] {
        let text = cannot_start(0, 2, &io::Error::from_raw_os_error(code)).to_string();
        let mut named: Vec<&str> = text.split("(ulimit ").skip(1).collect();
        named.iter_mut().for_each(|it| *it = &it[..2]);
        assert_eq!(named, limits, "{text}");
    }
}
