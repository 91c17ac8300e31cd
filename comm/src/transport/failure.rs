//! How a job fails: a rank records why, one rank prints it, and every process ends without waiting
//! for the others. In the same way a generation of an elastic job ends, without an exit.
//!
//! The first cause of a host goes on the board that its ranks share. The rank it belongs to prints
//! it once, and all ranks end with its exit code. A rank that was killed cannot: the first rank
//! that notices does (`watch.rs`). A cause travels as a message to the ranks of other hosts, which
//! neither print it nor pass it on.

pub(crate) mod alerts;

use std::io::Write;
use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use crate::error::{Cause, EXIT_PEER_LOST, Error, Remedy, RemoteError};
use crate::identity::RankIdentity;
use crate::membership::client::Client;
use crate::process::{Peer, Process};
use crate::say::print_line;
use crate::transport::shared::Board;

/// The exit code of a panic.
pub(crate) const EXIT_PANIC: u8 = 70;
/// How long a rank has to end by itself once the job has failed.
pub(crate) const GRACE: Duration = Duration::from_millis(300);
/// How long a rank may take to report its error: it closes its files first.
const REPORT_MAX: Duration = Duration::from_secs(11);
/// How long the other ranks leave rank 0 to report what they all find.
const FIRST_RANK_GRACE: Duration = Duration::from_millis(50);
/// How long the end of a process may wait for anything else.
const BOUND: Duration = Duration::from_millis(500);

/// Held while a cause is recorded and printed.
static SPEAKING: Mutex<()> = Mutex::new(());

/// What a program's users type to change a setting ([`crate::Options::remedy_text`]).
pub(crate) type RemedyText = fn(Remedy) -> &'static str;

/// The text of an error, with what the program's users type to avoid it.
pub(crate) fn text_with_remedy(error: &Error, remedy_text: RemedyText) -> String {
    match error.remedy().map(remedy_text) {
        None | Some("") => error.to_string(),
        Some(remedy) => format!("{error}; {remedy}"),
    }
}

/// What a rank needs when its job fails. One a rank, shared by its world, watches and panic hook.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) identity: RankIdentity,
    pub(crate) board: Board,
    pub(crate) remedy_text: RemedyText,
    /// The other ranks of this host that are other processes.
    pub(crate) peers: Vec<Peer>,
    /// The process that started this one, if a launcher did.
    pub(crate) launcher: Option<Process>,
    /// The launcher does not end stopped ranks: the rank that fails must.
    pub(crate) must_kill: bool,
    /// The connection to the ranks of other hosts.
    pub(crate) alerts: Option<alerts::Alerts>,
    /// In an elastic job.
    pub(crate) client: Option<Arc<Client>>,
    /// The connection to what started this rank, in any job that the program itself has started.
    pub(crate) link: Option<Arc<Client>>,
    /// The numbers with which its ranks were started, which people know.
    pub(crate) job_ranks: Vec<usize>,
}

impl Failure {
    /// For a rank of one process: no other process has to end with it.
    pub(crate) fn in_process(identity: RankIdentity, board: Board, remedy: RemedyText) -> Failure {
        Failure {
            identity,
            board,
            remedy_text: remedy,
            peers: Vec::new(),
            launcher: None,
            must_kill: false,
            alerts: None,
            client: None,
            link: None,
            job_ranks: Vec::new(),
        }
    }

    /// A rank's number in the job.
    pub(crate) fn job_rank(&self, rank: usize) -> usize {
        self.job_ranks.get(rank).copied().unwrap_or(rank)
    }

    /// Why the job ends, if it does.
    pub(crate) fn cause(&self) -> Option<Cause> {
        self.ended().filter(|cause| !cause.ends_generation())
    }

    /// Why the calls of this generation end: the job has failed, or it continues in another one.
    pub(crate) fn ended(&self) -> Option<Cause> {
        self.board
            .is_aborted()
            .then(|| self.board.cause())
            .flatten()
    }

    /// As `cause`, and waits for one up to `limit`.
    fn failed_within(&self, limit: Duration) -> Option<Cause> {
        let cause = self.board.wait_for_abort(limit);
        cause.filter(|cause| !cause.ends_generation())
    }

    /// Ends this generation. The job continues; ranks that wait in a call of it return.
    pub(crate) fn end_generation(&self, why: String) {
        self.board.fail(&Cause::of_generation(why));
    }

    /// [`Error::PeerFailed`] if the job or this generation ends.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.ended()
            .map_or(Ok(()), |cause| Err(Error::of_peer(cause)))
    }

    /// The error of a rank whose peer failed with `remote`: leaves the peer time to report it.
    pub(crate) fn peer_failed(&self, remote: RemoteError) -> Error {
        let cause = self.failed_within(GRACE);
        Error::of_peer(cause.unwrap_or_else(|| Cause {
            rank: remote.rank,
            host: "this job".into(),
            exit_code: remote.exit_code,
            text: remote.text,
        }))
    }

    /// The ranks of this host, by local rank.
    pub(crate) fn local_ranks(&self) -> Vec<usize> {
        // Ranks that are threads have no peers, and are those of the host in order.
        let mut ranks: Vec<usize> = (0..self.identity.local_size).collect();
        for peer in &self.peers {
            ranks[peer.local_rank] = peer.rank;
        }
        ranks[self.identity.local_rank] = self.identity.rank;
        ranks
    }

    /// Fails the calls of ranks that are threads of this process, which continues.
    pub(crate) fn fail_others(&self, text: String, exit_code: u8) {
        self.board.fail(&self.own_cause(text, exit_code));
    }

    fn own_cause(&self, text: String, exit_code: u8) -> Cause {
        Cause {
            rank: self.identity.rank,
            host: self.identity.host.clone(),
            exit_code,
            text,
        }
    }

    /// Records `cause`, prints it and tells the other hosts, unless another cause came first.
    pub(crate) fn report(&self, cause: &Cause) {
        // Other threads see the cause before it is printed, and must not end the process yet.
        let _speaking = SPEAKING.lock();
        let is_first = self.board.fail(cause);
        // Where ranks are about to meet again, the board holds no cause: the first to end the job
        // speaks.
        let ends_job = (self.client.as_ref()).is_none_or(|client| client.end(cause.exit_code));
        if !is_first && (self.cause().is_some() || !ends_job) {
            return;
        }
        self.print(cause);
        // Where the job continues, the launcher tells other hosts, unless they go on without it.
        if let (Some(alerts), None) = (&self.alerts, &self.client) {
            alerts.send(cause, BOUND);
        }
    }

    fn print(&self, cause: &Cause) {
        let program = &self.identity.program;
        let cause = Cause {
            rank: self.job_rank(cause.rank),
            ..cause.clone()
        };
        print_line(&match self.identity.size {
            1 if self.job_ranks.is_empty() => format!("{program}: {}\n", cause.text),
            _ => format!("{program}: {cause}\n"),
        });
    }

    /// Ends the process without MPI, which does not return.
    #[cfg(feature = "mpi")]
    pub(crate) fn give_up(&self, text: String, exit_code: u8) -> ! {
        let cause = self.own_cause(text, exit_code);
        if self.board.fail(&cause) {
            self.print(&cause);
        }
        if self.must_kill {
            self.kill_peers_that_stay();
        }
        leave_at_once(exit_code)
    }

    /// In an elastic job: ends this process because of what happened on this rank. The others
    /// continue.
    pub(crate) fn leave(&self, text: &str, exit_code: u8) -> ! {
        let text = format!("{text}; this rank leaves, and the others continue if enough are left");
        self.print(&self.own_cause(text, exit_code));
        // It does not say that the job ends: it is lost.
        leave_at_once(exit_code)
    }

    /// Ends this generation because of `error`, and with it `ranks`; or the job, if it does not
    /// continue without lost ranks.
    pub(crate) fn lose(&self, error: &Error, ranks: &[usize]) {
        let Some(client) = &self.client else {
            self.fail_with(error);
        };
        // Before the launcher hears of it, which then ends the generation itself.
        let speaks = self.ended().is_none() && self.board.may_speak();
        let missing: Vec<usize> = ranks.iter().map(|&rank| self.job_rank(rank)).collect();
        client.leave_out(missing.clone(), true);
        let named = match error {
            Error::Timeout {
                call,
                waited,
                total,
                ..
            } => &Error::Timeout {
                call: call.clone(),
                missing,
                waited: *waited,
                total: *total,
            },
            other => other,
        };
        let text = text_with_remedy(named, self.remedy_text);
        self.end_generation(text.clone());
        if speaks {
            let text = format!("{text}; the ranks that are left continue");
            self.print(&self.own_cause(text, EXIT_PEER_LOST));
        }
    }

    /// Ends the process because of an error of this rank.
    pub(crate) fn fail_with(&self, error: &Error) -> ! {
        self.fail(text_with_remedy(error, self.remedy_text), error.exit_code())
    }

    /// Ends the process because of what happened on this rank.
    pub(crate) fn fail(&self, text: String, exit_code: u8) -> ! {
        // A failure never ends with success.
        let exit_code = if exit_code == 0 {
            EXIT_PANIC
        } else {
            exit_code
        };
        if let Some(alerts) = &self.alerts
            && !alerts.is_on_first_host()
        {
            // If all hosts find the same error at the same time, the first host reports it.
            _ = self.failed_within(GRACE);
        }
        if self.identity.rank > 0 {
            _ = self.failed_within(FIRST_RANK_GRACE);
        }
        self.report(&self.own_cause(text, exit_code));
        self.end(self.cause().map_or(exit_code, |cause| cause.exit_code))
    }

    /// As `fail`, for what no other rank need find: in an elastic job the
    /// others do.
    pub(crate) fn fail_alone(&self, text: String, exit_code: u8) -> ! {
        if self.client.is_some() && self.identity.size > 1 {
            self.leave(&text, exit_code);
        }
        self.fail(text, exit_code)
    }

    /// Ends the process because of an error of `rank`, which reports it itself. If it does not,
    /// this rank does.
    pub(crate) fn fail_for(&self, rank: usize, text: String, exit_code: u8) -> ! {
        if self.failed_within(REPORT_MAX).is_none() {
            let is_here = self.local_ranks().contains(&rank);
            let host = if is_here {
                &*self.identity.host
            } else {
                "another host"
            };
            self.report(&Cause {
                rank,
                host: host.into(),
                exit_code,
                text,
            });
        }
        self.end(self.cause().map_or(exit_code, |cause| cause.exit_code))
    }

    /// As `fail`, after leaving time for the news of another rank's failure, which then is the
    /// cause: `mpirun` sends SIGTERM to all other ranks when one has died.
    pub(crate) fn fail_unless_another_has(&self, text: String, exit_code: u8) -> ! {
        if let Some(cause) = self.failed_within(GRACE) {
            self.end(cause.exit_code);
        }
        self.fail(text, exit_code)
    }

    /// Ends the process with `exit_code`, whatever its other threads do. A cause is recorded.
    pub(crate) fn end(&self, exit_code: u8) -> ! {
        static ENDING: AtomicBool = AtomicBool::new(false);
        if ENDING.swap(true, Ordering::SeqCst) {
            // Another thread is ending the process.
            loop {
                std::thread::park();
            }
        }
        // Nothing starts a job again that was asked to stop.
        self.link.iter().for_each(|link| link.tell_if_asked());
        // The rank that reports the cause may not have said so yet: nothing starts this one again.
        (self.client.iter()).for_each(|client| _ = client.end(exit_code));
        within(BOUND, || drop(SPEAKING.lock()));
        // Another thread may hold the lock of standard output and never release it.
        within(BOUND, || _ = std::io::stdout().flush());
        self.board.leave(self.identity.local_rank);
        let died = |peer: &Peer| peer.process.has_ended() && !self.board.has_left(peer.local_rank);
        if !self.must_kill && self.peers.iter().any(died) {
            // The launcher's exit code is that of the first rank whose end it sees, which should
            // be the one that died.
            std::thread::sleep(GRACE);
        }
        if self.must_kill {
            self.kill_peers_that_stay();
        }
        if self.alerts.is_some() {
            // The end of this rank makes the launcher end all others: they should know why first.
            std::thread::sleep(GRACE);
        }
        #[cfg(feature = "mpi")]
        if self.alerts.is_some() {
            // Some launchers of MPI (srun) do not end the ranks of other hosts by themselves.
            within(BOUND, move || crate::transport::mpi::abort(exit_code));
        }
        // SAFETY: ends the process at once; nothing after it can see what it leaves undone. Not
        // `exit`, whose handlers would wait for other ranks and race with other threads.
        unsafe { libc::_exit(i32::from(exit_code)) }
    }

    /// A stopped process does not see that the job has failed, and is killed.
    fn kill_peers_that_stay(&self) {
        let stays =
            |peer: &&Peer| !self.board.has_left(peer.local_rank) && !peer.process.has_ended();
        let started = Instant::now();
        while started.elapsed() < GRACE + BOUND && self.peers.iter().any(|peer| stays(&peer)) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let staying = self.peers.iter().filter(stays);
        staying.for_each(|peer| peer.process.kill());
    }

    pub(crate) fn panicked(&self, panic: &PanicHookInfo<'_>) -> ! {
        let place = panic.location();
        let place = place.map(|at| format!(" at {}:{}", at.file(), at.line()));
        let message = panic.payload_as_str().unwrap_or_default();
        let mut text = format!("panicked{}: {message}", place.unwrap_or_default());
        let trace = std::backtrace::Backtrace::capture();
        if trace.status() == std::backtrace::BacktraceStatus::Captured {
            let trace = trace.to_string();
            let is_full = std::env::var_os("RUST_BACKTRACE").is_some_and(|it| it == "full");
            text += &format!("\n{}", if is_full { trace } else { own_frames(&trace) });
        }
        self.fail_alone(text, EXIT_PANIC)
    }
}

/// The innermost frames of a panic's backtrace that are not of Rust's library.
fn own_frames(trace: &str) -> String {
    const MOST: usize = 8;
    let lines: Vec<&str> = trace.lines().collect();
    let is_panic = |it: &&str| it.contains("begin_unwind") || it.contains("begin_panic");
    let after = lines.iter().position(is_panic).unwrap_or(0);
    let is_own = |pair: &&[&str]| {
        let of_rust = ["/rustc/", "/rustlib/"];
        pair[1].contains(" at ") && !of_rust.iter().any(|it| pair[1].contains(it))
    };
    let frames = lines[after..].windows(2).filter(is_own).take(MOST);
    let frames: Vec<String> = frames.map(|pair| pair.join("\n")).collect();
    if frames.is_empty() {
        // Without debug information no frame has a file.
        return trace.to_string();
    }
    format!("{}\n(RUST_BACKTRACE=full: all frames)", frames.join("\n"))
}

/// Runs `body` on a thread and waits for it, but no longer than `bound`.
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
pub(crate) fn leave_at_once(exit_code: u8) -> ! {
    within(BOUND, || _ = std::io::stdout().flush());
    // SAFETY: as in `Failure::end`.
    unsafe { libc::_exit(i32::from(exit_code)) }
}

#[cfg(test)]
mod tests;
