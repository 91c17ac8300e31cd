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

/// A rank that says this in a row, and ends.
fn saying(words: &[ToLauncher]) -> Command {
    let mut script = "exec {out}>&${DDP_JOB#*:};".to_string();
    for said in words {
        let said = serde_json::to_string(said).unwrap();
        script += &format!(" printf '%s' '{said}' >&$out;");
    }
    let mut command = Command::new("bash");
    command.args(["-c", &(script + " exit 9")]);
    command
}

#[test]
fn what_a_rank_has_said_comes_before_its_end_and_whom_it_misses_after_it() {
    let mut ranks = Children::new(false);
    let misses = ToLauncher::Misses {
        generation: 1,
        ranks: vec![2],
        have_met: true,
    };
    let words = [misses, ToLauncher::Ends(65)];
    ranks.start((0, 7, 1), saying(&words)).unwrap();
    let mut all = Vec::new();
    until(|| {
        all.extend(ranks.news());
        let has_ended = |it: &(usize, u32, RankNews)| matches!(it.2, RankNews::Ended(_));
        all.iter().any(has_ended).then_some(())
    });
    // What came before the end was seen may be in another turn.
    let place = |is_it: fn(&RankNews) -> bool| all.iter().position(|it| is_it(&it.2)).unwrap();
    let says_end = place(|it| matches!(it, RankNews::Said(ToLauncher::Ends(65))));
    let ended = place(|it| matches!(it, RankNews::Ended(status) if status.code() == Some(9)));
    assert!(says_end < ended, "{}", all.len());
    assert_eq!(all.len(), 3);
    assert!(all.iter().all(|it| (it.0, it.1) == (0, 7)));
}

/// A rank that has died may be missed before its end is seen.
#[test]
fn an_end_comes_before_what_another_rank_misses() {
    let mut ranks = Children::new(false);
    let misses = ToLauncher::Misses {
        generation: 1,
        ranks: vec![1],
        have_met: true,
    };
    ranks.start((0, 7, 2), saying(&[misses])).unwrap();
    ranks.start((1, 8, 2), sleeper()).unwrap();
    ranks.kill(1, 8);
    let pids: Vec<u32> = ranks.running.iter().map(|it| it.child.id()).collect();
    let has_ended = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.contains(") Z")
    };
    until(|| pids.iter().all(has_ended).then_some(()));
    let kinds = ranks.news().into_iter().map(|it| match it.2 {
        RankNews::Ended(_) => "ended",
        RankNews::Said(_) => "said",
    });
    assert_eq!(kinds.collect::<Vec<_>>(), ["ended", "ended", "said"]);
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
