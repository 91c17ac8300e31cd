use std::process::{Child, Command, Stdio};
use std::time::Instant;

use super::*;

/// A roster whose seats have other processes, which only sleep.
struct Seats {
    roster: Roster,
    processes: Vec<Child>,
}

impl Seats {
    fn new(count: usize) -> Seats {
        let mut seats = Seats {
            roster: Roster::new(count, 1).unwrap(),
            processes: Vec::new(),
        };
        for seat in 0..count {
            let process = sleeper();
            seats.sit(seat, &process);
            seats.processes.push(process);
        }
        seats
    }

    fn sit(&self, seat: usize, process: &Child) {
        self.set(seat, WAITS, 0);
        self.set(seat, PID, identity(process.id()));
    }

    fn set(&self, seat: usize, of_seat: usize, value: u64) {
        self.roster
            .word(seat, of_seat)
            .store(value, Ordering::Relaxed);
    }

    /// The seat waits for a generation after the current one.
    fn wait(&self, seat: usize) {
        self.set(seat, WAITS, u64::from(self.roster.current()) + 1);
    }

    fn kill(&mut self, seat: usize) {
        self.processes[seat].kill().unwrap();
        let status = self.processes[seat].wait().unwrap();
        self.roster.has_ended(seat, status);
    }

    fn start_again(&mut self, seat: usize) {
        self.processes[seat] = sleeper();
        self.sit(seat, &self.processes[seat]);
    }

    /// The seats of the current generation, and who was lost and who came.
    fn seen(&self) -> (u32, Vec<usize>, Vec<usize>, Vec<usize>) {
        let it = self.roster.describe(self.roster.current());
        let members = it.members.iter().map(|member| member.0).collect();
        let lost = it.change.lost.iter().map(|lost| lost.rank).collect();
        (it.number, members, lost, it.change.joined)
    }
}

impl Drop for Seats {
    fn drop(&mut self) {
        for process in &mut self.processes {
            _ = process.kill();
            _ = process.wait();
        }
    }
}

fn sleeper() -> Child {
    let mut command = Command::new("sleep");
    command.arg("600").stdin(Stdio::null()).spawn().unwrap()
}

#[test]
fn ranks_that_are_left_and_ranks_that_come_form_the_next_generation() {
    let mut seats = Seats::new(3);
    seats.wait(0);
    seats.wait(2);
    assert_eq!(seats.roster.form().unwrap(), [1], "the first one needs all");
    seats.wait(1);
    assert!(seats.roster.form().unwrap().is_empty());
    assert_eq!(seats.seen(), (1, vec![0, 1, 2], vec![], vec![]));
    // Those that have not noticed yet wait for no other generation.
    assert_eq!(seats.roster.form().unwrap(), [0, 1, 2]);

    seats.kill(1);
    seats.wait(2);
    assert_eq!(seats.roster.form().unwrap(), [0]);
    seats.wait(0);
    assert!(seats.roster.form().unwrap().is_empty());
    assert_eq!(seats.seen(), (2, vec![0, 2], vec![1], vec![]));
    let lost = seats.roster.describe(2).change.lost;
    assert_eq!(lost[0].why, "killed by signal 9");

    // A new process of the seat gets ready, then waits, and the others train meanwhile.
    seats.start_again(1);
    assert!(!seats.roster.has_newcomers());
    seats.wait(1);
    assert!(seats.roster.has_newcomers());
    assert_eq!(seats.roster.form().unwrap(), [0, 2]);
    seats.wait(0);
    seats.wait(2);
    assert!(seats.roster.form().unwrap().is_empty());
    assert_eq!(seats.seen(), (3, vec![0, 1, 2], vec![], vec![1]));
    assert!(!seats.roster.has_newcomers());

    // Lost and replaced before the others look: they take a step without it.
    seats.kill(0);
    seats.start_again(0);
    (0..3).for_each(|seat| seats.wait(seat));
    assert!(seats.roster.form().unwrap().is_empty());
    assert_eq!(seats.seen(), (4, vec![1, 2], vec![0], vec![]));
    assert!(seats.roster.has_newcomers());
    [1, 2].iter().for_each(|&seat| seats.wait(seat));
    assert!(seats.roster.form().unwrap().is_empty());
    assert_eq!(seats.seen(), (5, vec![0, 1, 2], vec![], vec![0]));
    // Unless the others are too few, or none is left.
    (0..3).for_each(|seat| seats.kill(seat));
    (0..3).for_each(|seat| seats.start_again(seat));
    (0..3).for_each(|seat| seats.wait(seat));
    assert!(seats.roster.form().unwrap().is_empty());
    assert_eq!(
        seats.seen(),
        (6, vec![0, 1, 2], vec![0, 1, 2], vec![0, 1, 2])
    );

    // All but one, which was slow to come.
    seats.kill(0);
    seats.kill(2);
    assert_eq!(seats.roster.form().unwrap(), [1]);
    seats.wait(1);
    assert!(seats.roster.form().unwrap().is_empty());
    assert_eq!(seats.seen(), (7, vec![1], vec![0, 2], vec![]));
}

#[test]
fn a_seat_that_stays_empty_is_not_waited_for_at_the_start() {
    let mut seats = Seats::new(2);
    seats.kill(1);
    seats.wait(0);
    assert_eq!(seats.roster.form().unwrap(), [1]);
    seats.roster.stays_empty(1);
    assert!(seats.roster.form().unwrap().is_empty());
    assert_eq!(seats.seen().1, [0]);
}

/// Signs of progress come a hundred times as often.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Seat 1 works for twice that time, and then stops. How long seat 0 waits for it after that.
fn waited_for_a_rank_that_stops(seats: &Seats, after: u32) -> (Duration, Generation) {
    let began = Instant::now();
    std::thread::scope(|scope| {
        let works = scope.spawn(|| {
            let mut last = Instant::now();
            while began.elapsed() < 2 * TIMEOUT {
                last = Instant::now();
                let number = began.elapsed().as_millis() as u64;
                seats.roster.show_pulse(1, number);
                std::thread::sleep(Duration::from_millis(10));
            }
            last
        });
        match seats.roster.meet(0, after, TIMEOUT).unwrap() {
            Meeting::Formed(next) => (works.join().unwrap().elapsed(), next),
            Meeting::Over(_) => panic!("the job continues"),
        }
    })
}

#[test]
fn the_reason_of_a_loss_is_that_of_the_process_that_was_lost() {
    let mut seats = Seats::new(2);
    let meet = |seats: &Seats, waiting: &[usize]| {
        waiting.iter().for_each(|&seat| seats.wait(seat));
        assert!(seats.roster.form().unwrap().is_empty());
    };
    meet(&seats, &[0, 1]);
    seats.processes[1].kill().unwrap();
    let status = seats.processes[1].wait().unwrap();
    meet(&seats, &[0]);
    let why = |seats: &Seats| {
        let lost = seats.roster.describe(seats.roster.current()).change.lost;
        lost.into_iter().map(|it| it.why).collect::<Vec<_>>()
    };
    // The others may meet before what started it has seen its end, and it may have a successor.
    std::thread::scope(|scope| {
        let seen = scope.spawn(|| why(&seats));
        seats.roster.has_ended(1, status);
        assert_eq!(seen.join().unwrap(), ["killed by signal 9"]);
    });
    seats.start_again(1);
    assert_eq!(why(&seats), ["killed by signal 9"]);
    meet(&seats, &[0, 1]);
    seats.processes[1].kill().unwrap();
    seats.processes[1].wait().unwrap();
    meet(&seats, &[0]);
    assert_eq!(why(&seats), ["its process ended"]);
}

#[test]
fn a_rank_that_shows_no_progress_is_killed_and_one_that_does_is_waited_for() {
    let mut seats = Seats::new(2);
    seats.wait(1);
    seats.roster.take(0, std::process::id());
    let first = seats.roster.meet(0, 0, Duration::from_secs(60)).unwrap();
    assert!(matches!(first, Meeting::Formed(it) if it.number == 1));
    let (waited, next) = waited_for_a_rank_that_stops(&seats, 1);
    assert!(waited >= TIMEOUT, "{waited:?}");
    assert_eq!((next.number, next.members.len()), (2, 1));
    assert_eq!(
        next.change.lost[0].why,
        "killed because it showed no progress"
    );
    assert!(!seats.processes[1].wait().unwrap().success());
}

#[test]
fn a_newcomer_takes_the_place_of_ranks_that_all_have_stopped() {
    let mut seats = Seats::new(2);
    seats.kill(0);
    seats.wait(1);
    seats.roster.stays_empty(0);
    assert!(seats.roster.form().unwrap().is_empty());
    assert_eq!(seats.seen().1, [1]);
    seats.roster.take(0, std::process::id());
    // One that is not stopped is given two minutes.
    let stopped = seats.processes[1].id().to_string();
    let mut stop = std::process::Command::new("kill");
    assert!(stop.args(["-STOP", &stopped]).status().unwrap().success());
    let (waited, next) = waited_for_a_rank_that_stops(&seats, 0);
    assert!(waited >= 3 * TIMEOUT, "{waited:?}");
    assert_eq!((next.number, next.change.joined), (2, vec![0]));
    assert!(!seats.processes[1].wait().unwrap().success());
}

#[test]
fn a_process_that_takes_the_seat_of_a_silent_one_is_not_killed_for_it() {
    let mut seats = Seats::new(3);
    (0..3).for_each(|seat| seats.wait(seat));
    seats.roster.form().unwrap();
    seats.kill(0);
    seats.wait(1);
    seats.wait(2);
    seats.roster.form().unwrap();
    // Seats 1 and 2 are ranks 0 and 1 now.
    seats.roster.leave_out_ranks(&[1]);
    assert!(!seats.processes[2].wait().unwrap().success());
    seats.start_again(2);
    // Its rank, and others, miss the one before a second time.
    seats.roster.leave_out_ranks(&[1]);
    std::thread::sleep(Duration::from_millis(50));
    for seat in [1, 2] {
        assert!(seats.processes[seat].try_wait().unwrap().is_none());
    }
}

#[test]
fn a_job_that_ends_ends_every_wait_with_the_first_exit_code() {
    let seats = Seats::new(2);
    seats.roster.end(65);
    seats.roster.end(0);
    let met = seats.roster.meet(0, 0, Duration::from_secs(600));
    assert!(matches!(met, Ok(Meeting::Over(65))));
}

#[test]
fn a_process_with_the_number_of_the_one_before_is_another() {
    let seats = Seats::new(2);
    [0, 1].iter().for_each(|&seat| seats.wait(seat));
    seats.roster.form().unwrap();
    assert_eq!(seats.seen(), (1, vec![0, 1], vec![], vec![]));
    // A pod was started again.
    let again = identity(seats.processes[1].id()) ^ (1 << 32);
    seats.set(1, PID, again);
    seats.set(1, WAITS, 1);
    assert!(seats.roster.has_newcomers());
    seats.wait(0);
    seats.roster.form().unwrap();
    assert_eq!(seats.seen(), (2, vec![0], vec![1], vec![]));
    seats.wait(0);
    seats.roster.form().unwrap();
    assert_eq!(seats.seen(), (3, vec![0, 1], vec![], vec![1]));
}

#[test]
fn ranks_that_meet_end_when_the_launcher_has() {
    let mut seats = Seats::new(2);
    let launcher = u64::from(seats.processes[1].id());
    let page = &seats.roster.page;
    page.u64_at(LAUNCHER_AT).store(launcher, Ordering::Relaxed);
    std::thread::scope(|scope| {
        let roster = &seats.roster;
        let met = scope.spawn(|| roster.meet(0, 0, Duration::from_secs(600)));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!met.is_finished());
        seats.processes[1].kill().unwrap();
        assert!(matches!(met.join(), Ok(Ok(Meeting::Over(EXIT_PEER_LOST)))));
    });
}

#[test]
fn a_rank_that_stops_while_it_has_the_lock_is_killed() {
    let mut seats = Seats::new(2);
    seats.roster.take(0, std::process::id());
    seats.wait(1);
    seats.roster.stays_empty(1);
    let stopped = identity(seats.processes[1].id());
    let page = &seats.roster.page;
    page.u64_at(LOCKED_BY_AT).store(stopped, Ordering::Relaxed);
    let page = page.duplicate().unwrap();
    let lock = File::open(format!("/proc/self/fd/{}", page.as_raw_fd())).unwrap();
    lock.lock().unwrap();
    std::thread::scope(|scope| {
        let roster = &seats.roster;
        let met = scope.spawn(|| roster.meet(0, 0, TIMEOUT));
        assert!(!seats.processes[1].wait().unwrap().success());
        drop(lock);
        assert!(matches!(met.join(), Ok(Ok(Meeting::Formed(it))) if it.members.len() == 1));
    });
}

#[test]
fn a_rank_that_never_comes_is_killed_and_started_again_or_left_out() {
    let mut seats = Seats::new(2);
    seats.roster.take(0, std::process::id());
    std::thread::scope(|scope| {
        let roster = &seats.roster;
        let met = scope.spawn(|| roster.meet(0, 0, Duration::from_millis(50)));
        assert!(!seats.processes[1].wait().unwrap().success());
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(roster.current(), 0, "the launcher may start it again");
        roster.stays_empty(1);
        assert!(matches!(met.join(), Ok(Ok(Meeting::Formed(it))) if it.members.len() == 1));
    });
}

#[test]
fn memory_that_is_no_roster_is_refused() {
    for (bytes, why) in [(8, "8 bytes"), (4096, "memory of another kind")] {
        use std::os::fd::IntoRawFd;
        let error = Roster::inherited(memfd(bytes).unwrap().into_raw_fd()).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
}
