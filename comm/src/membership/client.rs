//! What a rank hears from the launcher, and its connection to it: through it the rank tells what it
//! does, and hears on a thread. What it has heard, and what follows from that, is plain data
//! ([`Heard`]), which the simulation runs, too.
//!
//! Orders of memory: what several threads read is under locks. The atomics are single words that
//! guard nothing else; those that a handler uses are SeqCst, as in `launch/stop.rs`.

use std::ffi::c_int;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use ddp_kernels::panics;

use super::packets::{self, Packets};
use super::wire::{Generation, ToLauncher, ToRank};
use crate::error::{Cause, EXIT_PEER_LOST, Error, Result};

/// The signal that first asked this process to stop; 0 for none. `launch/stop.rs` catches it.
pub(crate) static REQUESTED: AtomicI32 = AtomicI32::new(0);
/// The socket over which a handler tells of it; -1 for none.
static LINK: AtomicI32 = AtomicI32::new(-1);

/// What a rank has been told.
#[derive(Clone, Debug, Default)]
pub struct Heard {
    /// Whether the launcher has said how the job is.
    pub is_welcomed: bool,
    /// Whether the job continues without lost ranks.
    pub is_elastic: bool,
    /// With fewer ranks the job saves and ends.
    pub min_ranks: usize,
    /// By rank: its host.
    pub hosts: Vec<usize>,
    /// The current generation when this process came; 0 before the first.
    pub first: u32,
    /// The last generation that this process belongs to.
    pub generation: Option<Generation>,
    /// The last generation that is over.
    pub over: u32,
    /// Whether processes wait to join.
    pub newcomers: bool,
    /// The exit code of a job that ends.
    pub ends: Option<u8>,
    /// How often its agent has said that the launcher works; 0 if the launcher started this rank.
    pub signs: u64,
    /// How long before the last time it had asked the launcher.
    pub asked_before: Duration,
    /// Whether the launcher or agent that started this rank has ended.
    pub is_alone: bool,
}

/// How a wait for the next generation ended.
#[derive(Debug)]
pub enum MeetingOutcome {
    /// This process takes part in it.
    Formed(Generation),
    /// The job ends with this exit code.
    JobEnds(u8),
}

/// Why what a rank does with others ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallsEnd {
    /// A rank was lost: those that are left meet again.
    Generation,
    /// The job has failed with this exit code.
    Job(u8),
}

impl Heard {
    /// Records what the launcher, or its agent, says. None: it is gone.
    pub fn hear(&mut self, message: Option<ToRank>) {
        match message {
            Some(ToRank::Welcome {
                is_elastic,
                min_ranks,
                hosts,
                generation,
            }) => {
                (self.is_elastic, self.min_ranks) = (is_elastic, min_ranks);
                self.is_welcomed = true;
                (self.hosts, self.first) = (hosts, generation);
            }
            Some(ToRank::Formed(generation)) => {
                self.hosts.clone_from(&generation.hosts);
                self.newcomers = false;
                self.generation = Some(generation);
            }
            Some(ToRank::Over(generation)) => self.over = generation,
            Some(ToRank::Newcomers(are_there)) => self.newcomers = are_there,
            Some(ToRank::Ends(code)) => _ = self.ends.get_or_insert(code),
            Some(ToRank::Alive(asked_before)) => {
                (self.signs, self.asked_before) = (self.signs + 1, asked_before);
            }
            Some(ToRank::Sockets(_)) => {}
            None => self.is_alone = true,
        }
    }

    /// Whether the generation of this process is over.
    pub fn is_over(&self) -> bool {
        let current = self.generation.as_ref();
        current.is_some_and(|it| it.number == self.over)
    }

    /// Whether the job is on several hosts.
    pub(crate) fn is_across(&self) -> bool {
        self.hosts.iter().any(|&host| host > 0)
    }

    /// Whether this process came to a job that had begun, and has not taken part yet.
    pub fn is_newcomer(&self) -> bool {
        self.first > 0 && self.generation.is_none()
    }

    /// The exit code of a job that ends for this process.
    pub fn job_ends(&self) -> Option<u8> {
        self.ends.or(self.is_alone.then_some(EXIT_PEER_LOST))
    }

    /// How a wait for a generation after `after` ends; None while it lasts.
    pub fn meeting(&self, after: u32) -> Option<MeetingOutcome> {
        if let Some(code) = self.job_ends() {
            return Some(MeetingOutcome::JobEnds(code));
        }
        let formed = self.generation.as_ref().filter(|it| it.number > after)?;
        Some(MeetingOutcome::Formed(formed.clone()))
    }

    /// Why what this rank does with those of its generation ends, as far as the launcher says so.
    /// None for a job that ends with 0 and has lost no rank: ranks then end by themselves.
    pub fn calls_end(&self) -> Option<CallsEnd> {
        match self.ends {
            Some(code) if code != 0 => Some(CallsEnd::Job(code)),
            _ => self.is_over().then_some(CallsEnd::Generation),
        }
    }
}

/// A rank's connection to what started it: the launcher, or its agent on this host.
pub(crate) struct Client {
    /// The number with which this rank was started.
    pub(crate) rank: usize,
    socket: Packets,
    heard: Mutex<Heard>,
    changed: Condvar,
    /// Those that connect the ranks of a generation, each with its number.
    sockets: Mutex<Vec<(u32, OwnedFd)>>,
    /// Whether a thread listens.
    has_thread: AtomicBool,
    /// The last sign of progress that was shown.
    shown: AtomicU64,
    /// The signal to stop of which it has told.
    told: AtomicI32,
    /// Ends the calls of the current generation, once.
    end_calls: Mutex<Option<EndCalls>>,
}

type EndCalls = Box<dyn FnOnce(&Cause) + Send>;

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Client of rank {}", self.rank)
    }
}

impl Client {
    /// That of rank `rank`, by a socket that this process has inherited. It has heard how the job
    /// is, and listens from `listen_on` on.
    pub(crate) fn new(rank: usize, socket: OwnedFd) -> Result<Arc<Client>> {
        let client = Arc::new(Client {
            rank,
            socket: Packets::new(socket),
            heard: Mutex::default(),
            changed: Condvar::new(),
            sockets: Mutex::default(),
            has_thread: AtomicBool::new(false),
            shown: AtomicU64::new(0),
            told: AtomicI32::new(0),
            end_calls: Mutex::default(),
        });
        // How the job is: what this process does first depends on it. An agent may have said before
        // that it works.
        while !client.heard().is_welcomed {
            if !client.listen() {
                let code = client.heard().job_ends().unwrap_or(EXIT_PEER_LOST);
                std::process::exit(code.into());
            }
        }
        Ok(client)
    }

    /// From now on a handler tells of a request to stop at once ([`tell_of`]).
    pub(crate) fn tell_at_once(&self) {
        LINK.store(self.socket.descriptor(), Ordering::SeqCst);
    }

    /// Listens on a thread.
    pub(crate) fn listen_on(self: &Arc<Client>) -> Result<()> {
        let client = Arc::clone(self);
        let listen = move || while client.listen() {};
        let thread = Builder::new().name("membership".into()).spawn(listen);
        thread.map_err(|error| Error::no_thread("membership", &error))?;
        self.has_thread.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Hears one thing. Whether there can be another.
    fn listen(&self) -> bool {
        let (message, sockets) = self.socket.receive_with().unzip();
        if let Some(ToRank::Sockets(of)) = &message {
            let sockets = sockets.into_iter().flatten();
            self.sockets().extend(sockets.map(|socket| (*of, socket)));
        }
        let goes_on = message.is_some();
        self.heard().hear(message);
        self.end_calls_if_told();
        self.changed.notify_all();
        goes_on
    }

    /// `end` ends the calls of the current generation: when the launcher says that it is over, or
    /// that the job ends. At once if it has said so.
    pub(crate) fn set_end_calls(&self, end: impl FnOnce(&Cause) + Send + 'static) {
        *panics::lock(&self.end_calls) = Some(Box::new(end));
        self.end_calls_if_told();
    }

    fn end_calls_if_told(&self) {
        if let Some(cause) = self.ended() {
            let end = panics::lock(&self.end_calls).take();
            end.into_iter().for_each(|end| end(&cause));
        }
    }

    /// What it has been told.
    pub(crate) fn heard(&self) -> MutexGuard<'_, Heard> {
        panics::lock(&self.heard)
    }

    fn sockets(&self) -> MutexGuard<'_, Vec<(u32, OwnedFd)>> {
        panics::lock(&self.sockets)
    }

    /// The sockets that connect this rank to others of a generation, once.
    pub(crate) fn take_sockets(&self, generation: u32) -> Vec<OwnedFd> {
        let mut all = self.sockets();
        let come = all.extract_if(.., |(of, _)| *of <= generation);
        let of_it = come.filter(|(of, _)| *of == generation);
        of_it.map(|(_, socket)| socket).collect()
    }

    /// How many ranks the job was started with.
    pub(crate) fn ranks(&self) -> usize {
        self.heard().hosts.len()
    }

    /// The number of a rank's host.
    pub(crate) fn host_of(&self, rank: usize) -> usize {
        self.heard().hosts[rank]
    }

    /// Whether an agent, and not the launcher, has started this rank.
    pub(crate) fn is_of_agent(&self) -> bool {
        self.host_of(self.rank) > 0
    }

    /// The job ends, unless it does so already: whether this ends it.
    pub(crate) fn end(&self, exit_code: u8) -> bool {
        let is_first = self.heard().ends.replace(exit_code).is_none();
        if is_first {
            self.socket.send(&ToLauncher::Ends(exit_code), true);
            self.changed.notify_all();
        }
        is_first
    }

    /// Tells that this process was asked to stop, once it was.
    pub(crate) fn tell_if_asked(&self) {
        let signal = REQUESTED.load(Ordering::SeqCst);
        if signal > 0
            && self.told.load(Ordering::Relaxed) != signal
            && self.socket.send(&ToLauncher::Asked(signal), false)
        {
            self.told.store(signal, Ordering::Relaxed);
        }
    }

    /// Tells of a number that changes with each sign of progress of this process.
    pub(crate) fn show_progress(&self, number: u64) {
        self.tell_if_asked();
        // A launcher that does not listen must not stop this rank.
        if self.shown.swap(number, Ordering::Relaxed) != number {
            self.socket.send(&ToLauncher::Progress(number), false);
        }
    }

    /// Waits for a generation after `after` of which this process is. It listens at `port`.
    pub(crate) fn meet(&self, after: u32, port: u16) -> MeetingOutcome {
        self.socket.send(&ToLauncher::Waits { after, port }, true);
        let mut heard = self.heard();
        loop {
            if let Some(outcome) = heard.meeting(after) {
                return outcome;
            }
            if self.has_thread.load(Ordering::Relaxed) {
                let waited = self.changed.wait(heard);
                heard = waited.unwrap_or_else(PoisonError::into_inner);
            } else {
                drop(heard);
                self.listen();
                heard = self.heard();
            }
        }
    }

    /// These ranks, by their numbers in the job, are not heard in the current generation.
    /// `have_met`: all its ranks had connected.
    pub(crate) fn leave_out(&self, ranks: Vec<usize>, have_met: bool) {
        let current = self.heard().generation.as_ref().map(|it| it.number);
        let Some(generation) = current.filter(|_| !ranks.is_empty()) else {
            return;
        };
        let misses = ToLauncher::Misses {
            generation,
            ranks,
            have_met,
        };
        self.socket.send(&misses, true);
    }

    /// Why the calls of the current generation end, as far as the launcher says so.
    pub(crate) fn ended(&self) -> Option<Cause> {
        match self.heard().calls_end()? {
            CallsEnd::Generation => Some(Cause::of_generation("a rank was lost".into())),
            CallsEnd::Job(exit_code) => Some(Cause {
                rank: 0,
                host: "another host".into(),
                exit_code,
                text: "the job has ended".into(),
            }),
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let own = self.socket.descriptor();
        _ = LINK.compare_exchange(own, -1, Ordering::SeqCst, Ordering::SeqCst);
    }
}

/// Tells the launcher that this process was asked to stop. `Client::tell_if_asked` tells it again,
/// but only if the process still lives. Safe in a handler.
pub(crate) fn tell_of(signal: c_int) {
    let mut text = *br#"{"Asked":  }"#;
    let digit = |number: c_int| b'0' + number as u8 % 10;
    text[9] = if signal < 10 {
        b' '
    } else {
        digit(signal / 10)
    };
    text[10] = digit(signal);
    packets::send_at_once(LINK.load(Ordering::SeqCst), &text);
}

/// An error if the generation whose ranks meet is over.
pub(crate) fn check(client: &Option<Arc<Client>>) -> Result<()> {
    let ended = client.as_ref().and_then(|client| client.ended());
    ended.map_or(Ok(()), |cause| Err(Error::of_peer(cause)))
}

#[cfg(test)]
pub(crate) mod tests;
