//! One dies, all end: how a rank writes down why, who prints it, and how a process leaves without waiting for the others.
//!
//! The first cause of a host goes on the board that its ranks share; the rank it belongs to prints it, once, and all ranks
//! end with its exit code. A rank that was killed cannot speak: the first that notices does it in its place (`watch.rs`).
//! Between hosts a cause travels through MPI to every rank of the other hosts, which neither print it nor pass it on.

#[cfg(feature = "mpi")]
pub(crate) mod lifeline;

use std::fmt::Display;
use std::io::Write;
use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::error::Cause;
use crate::shared::Board;
use crate::watch::Process;
use crate::world::World;

/// The exit code of a panic.
const EXIT_PANIC: u8 = 70;
/// How long a rank has to leave by itself once the job has failed.
pub(crate) const GRACE: Duration = Duration::from_millis(300);
/// How long the end of a process may wait for anything but itself.
const BOUND: Duration = Duration::from_millis(500);

/// Held while a cause is written down and told.
static SPEAKING: Mutex<()> = Mutex::new(());

/// Another rank of this host, in a process of its own.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) rank: usize,
    pub(crate) local_rank: usize,
    pub(crate) process: Process,
}

/// What a rank needs when its job fails. One a rank, shared by the world, its watch and its panic hook.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The program's name, which begins its last line.
    pub(crate) program: String,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) local_rank: usize,
    pub(crate) local_size: usize,
    pub(crate) host: String,
    pub(crate) board: Board,
    pub(crate) peers: Vec<Peer>,
    /// The process that started this one, if a launcher did.
    pub(crate) launcher: Option<Process>,
    /// Nobody else ends a stopped rank of this host: the one that fails must.
    pub(crate) must_kill: bool,
    /// The way to the ranks of other hosts; none if there are none.
    #[cfg(feature = "mpi")]
    pub(crate) lifeline: Option<lifeline::Lifeline>,
}

impl Failure {
    /// Why the job ends, if it does.
    pub(crate) fn cause(&self) -> Option<Cause> {
        self.board.is_aborted().then(|| self.board.cause()).flatten()
    }

    /// Writes `cause` down, prints it and tells the other hosts, unless another came first.
    pub(crate) fn report(&self, cause: &Cause) {
        // The other threads see the cause before it is printed, and must not end the process in between.
        let _speaking = SPEAKING.lock();
        if !self.board.fail(cause) {
            return;
        }
        self.tell(cause);
        #[cfg(feature = "mpi")]
        if let Some(lifeline) = &self.lifeline {
            lifeline.tell(cause, BOUND);
        }
    }

    fn tell(&self, cause: &Cause) {
        let program = &self.program;
        say(&match self.size {
            1 => format!("{program}: {}\n", cause.text),
            _ => format!("{program}: {cause}\n"),
        });
    }

    /// Ends the process without MPI, which does not return.
    #[cfg(feature = "mpi")]
    pub(crate) fn give_up(&self, text: String, exit_code: u8) -> ! {
        let cause = Cause { rank: self.rank, host: self.host.clone(), exit_code, text };
        if self.board.fail(&cause) {
            self.tell(&cause);
        }
        if self.must_kill {
            self.kill_peers_that_stay();
        }
        leave_at_once(exit_code)
    }

    /// Ends the process because of what happened on this rank.
    pub(crate) fn fail(&self, text: String, exit_code: u8) -> ! {
        // Nobody fails with success.
        let exit_code = if exit_code == 0 { EXIT_PANIC } else { exit_code };
        #[cfg(feature = "mpi")]
        if self.lifeline.as_ref().is_some_and(|lifeline| !lifeline.is_on_first_host) {
            // What all hosts find at the same time, one of them says.
            _ = self.board.wait_for_abort(GRACE);
        }
        self.report(&Cause { rank: self.rank, host: self.host.clone(), exit_code, text });
        self.end(self.cause().map_or(exit_code, |cause| cause.exit_code))
    }

    /// Ends the process with `exit_code`, whatever its other threads do. Only after a cause was written down.
    pub(crate) fn end(&self, exit_code: u8) -> ! {
        static ENDING: AtomicBool = AtomicBool::new(false);
        if ENDING.swap(true, Ordering::SeqCst) {
            // Another thread is at it.
            loop {
                std::thread::park();
            }
        }
        within(BOUND, || drop(SPEAKING.lock()));
        // Another thread may hold the lock of standard output for ever.
        within(BOUND, || _ = std::io::stdout().flush());
        self.board.leave(self.local_rank);
        let died = |peer: &Peer| peer.process.has_ended() && !self.board.has_left(peer.local_rank);
        if !self.must_kill && self.peers.iter().any(died) {
            // The launcher's exit code is that of the rank whose end it sees first: let that be the one that died.
            std::thread::sleep(GRACE);
        }
        if self.must_kill {
            self.kill_peers_that_stay();
        }
        #[cfg(feature = "mpi")]
        if self.lifeline.is_some() {
            // The end of this rank makes the launcher end all others: they should know why before.
            std::thread::sleep(GRACE);
            // The launcher may not end the ranks of other hosts by itself, as srun does not.
            within(BOUND, move || crate::mpi::abort(exit_code));
        }
        // SAFETY: ends the process at once; nothing after it can see what it leaves undone. Not `exit`, whose handlers
        // would wait for other ranks and race with other threads.
        unsafe { libc::_exit(i32::from(exit_code)) }
    }

    /// A stopped process does not even see that the job has failed.
    fn kill_peers_that_stay(&self) {
        let stays = |peer: &&Peer| !self.board.has_left(peer.local_rank) && !peer.process.has_ended();
        let started = Instant::now();
        while started.elapsed() < GRACE + BOUND && self.peers.iter().any(|peer| stays(&peer)) {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.peers.iter().filter(stays).for_each(|peer| peer.process.kill());
    }

    fn panicked(&self, panic: &PanicHookInfo<'_>) -> ! {
        let payload = panic.payload();
        let message = payload.downcast_ref::<&str>().copied().map(str::to_string);
        let message = message.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
        let place = panic.location().map(|at| format!(" at {}:{}", at.file(), at.line())).unwrap_or_default();
        let mut text = format!("panicked{place}: {message}");
        let trace = std::backtrace::Backtrace::capture();
        if trace.status() == std::backtrace::BacktraceStatus::Captured {
            text += &format!("\n{trace}");
        }
        self.fail(text, EXIT_PANIC)
    }
}

impl World {
    /// Ends this process because of an error, and with it the job: the first cause of a job is printed once, by the rank
    /// it belongs to, as `ddp-train: rank 2 on node7: …` ([`Options::program`](crate::Options) is the name before it), and every rank ends with its exit code. An error that only says
    /// that another rank failed prints nothing.
    ///
    /// This is how `main` ends when something went wrong. A world that is dropped waits for the other ranks instead.
    pub fn fail(&self, error: &dyn Display, exit_code: u8) -> ! {
        self.failure().fail(error.to_string(), exit_code)
    }

    /// From now on a panic on any thread ends this process at once with exit code 70, and with it the job; its message and
    /// source line are the cause. Also one that `catch_unwind` would have caught.
    pub fn install_panic_hook(&self) {
        let failure = Arc::clone(self.failure());
        std::panic::set_hook(Box::new(move |panic| failure.panicked(panic)));
    }
}

/// Runs `body` on a thread of its own and waits for it, but no longer than `bound`.
fn within(bound: Duration, body: impl FnOnce() + Send + 'static) {
    let (done, is_done) = mpsc::channel();
    let started = std::thread::Builder::new().spawn(move || {
        body();
        _ = done.send(());
    });
    if started.is_ok() {
        _ = is_done.recv_timeout(bound);
    }
}

/// Ends the process, whatever its other threads do.
#[cfg(feature = "mpi")]
pub(crate) fn leave_at_once(exit_code: u8) -> ! {
    within(BOUND, || _ = std::io::stdout().flush());
    // SAFETY: as in `Failure::end`.
    unsafe { libc::_exit(i32::from(exit_code)) }
}

/// Writes `line` to standard error in one call, so that ranks do not write into each other's lines, and without its lock,
/// which a thread that is stuck may hold.
pub(crate) fn say(line: &str) {
    let mut left = line.as_bytes();
    while !left.is_empty() {
        // SAFETY: the call reads at most the length of the slice it is given.
        let written = unsafe { libc::write(libc::STDERR_FILENO, left.as_ptr().cast(), left.len()) };
        match usize::try_from(written) {
            Ok(0) => return,
            Ok(written) => left = &left[written..],
            Err(_) if std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted => {}
            // Nobody listens any more.
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;
    use crate::shared::Segment;

    #[test]
    fn a_peer_that_is_stopped_is_killed_and_one_that_leaves_is_not() {
        let mut children: Vec<_> = (0..2).map(|_| Command::new("sleep").arg("60").spawn().unwrap()).collect();
        // SAFETY: stops a child of this test that it has not waited for.
        unsafe { libc::kill(children[0].id() as libc::pid_t, libc::SIGSTOP) };
        let peer = |rank: usize| Peer { rank, local_rank: rank, process: Process::open(children[rank].id()) };
        let failure = Failure {
            program: "test".into(),
            rank: 2,
            size: 3,
            local_rank: 2,
            local_size: 3,
            host: "here".into(),
            board: Board::new(&Segment::in_process(3).unwrap()),
            peers: vec![peer(0), peer(1)],
            launcher: None,
            must_kill: true,
            #[cfg(feature = "mpi")]
            lifeline: None,
        };
        failure.board.leave(1);
        failure.kill_peers_that_stay();
        assert_eq!(children[0].wait().unwrap().signal(), Some(libc::SIGKILL));
        assert_eq!(children[1].try_wait().unwrap(), None);
        children[1].kill().unwrap();
        children[1].wait().unwrap();
    }

    #[test]
    fn what_takes_too_long_is_left_behind() {
        let started = Instant::now();
        within(Duration::from_millis(20), || std::thread::sleep(Duration::from_secs(5)));
        assert!(started.elapsed() < Duration::from_secs(4));
    }
}
