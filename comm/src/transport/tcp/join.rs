//! Connecting ranks: one listens and others connect. Both accept only ranks of their own job
//! (`hello.rs`); anyone else who connects is dropped without delaying the ranks.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use super::hello::{Answer, Exchange, HELLO_BYTES_MAX, JobKey, TAKEN, WELCOME};
use crate::error::{Cause, Error, RankList, Result, Seconds};
use crate::identity::program_name;
use crate::launcher::{rank_on_host, stopped_note};
use crate::membership::client;
use crate::rendezvous::Rendezvous;
use crate::say::{print_line, warn};
use crate::transport::frames::{Frames, wait, wait_for};
use crate::waited::Waited;

const ACTION: &str = "bring the ranks together";
/// How long another process may take for its part of the hello.
const HELLO_MAX: Duration = Duration::from_secs(5);
/// How long one connection may take to be made.
const CONNECT_MAX: Duration = Duration::from_secs(2);
/// How long one attempt may take, in which two messages are waited for.
const ATTEMPT_MAX: Duration = Duration::from_secs(12);
/// How long a rank that finds no other waits before it tries again.
const RETRY: Duration = Duration::from_millis(100);
/// How long a port may stay taken: by the end of the job before, or a connection that passes.
const PORT_MAX: Duration = Duration::from_secs(3);
/// More processes that have not said who they are get disconnected, the oldest first.
const CANDIDATES_MAX: usize = 256;
/// How many refused processes the user is told of.
const NOTES_MAX: usize = 4;
/// When rank 0 first tells the user whom it waits for.
const LOGGED_AFTER: Duration = Duration::from_secs(5);
const OTHER_SECRET: &str = "it has another secret";
const PERIOD: Duration = Duration::from_millis(50);

/// A socket to another rank.
#[derive(Debug)]
pub(crate) struct Joined {
    pub(crate) rank: usize,
    pub(crate) frames: Frames,
    /// This end's address.
    pub(crate) address: IpAddr,
}

/// Listens where the other ranks look for rank 0: on the address that is named if it is one of
/// this host, else on all.
pub(crate) fn listen(place: &Rendezvous) -> Result<TcpListener> {
    let started = Instant::now();
    loop {
        let mut last = None;
        for &port in &place.ports {
            match listen_on(place, port) {
                Ok(listener) => return Ok(listener),
                Err(error) => last = Some(error),
            }
        }
        if started.elapsed() >= PORT_MAX {
            let reason = last.map_or("no port was given".into(), |error| error.to_string());
            let action = format!("listen at {} for the other ranks", place.address());
            let help = "choose a free port (MASTER_PORT), the same on all ranks";
            return Err(Error::setup(action, reason, help));
        }
        std::thread::sleep(RETRY);
    }
}

fn listen_on(place: &Rendezvous, port: u16) -> io::Result<TcpListener> {
    // A host's own name often means a loopback address in its own file of hosts.
    let is_meant = |address: &SocketAddr| {
        let is_literal = place.host == "localhost" || place.host.parse::<IpAddr>().is_ok();
        is_literal || place.is_on_one_host() || !address.ip().is_loopback()
    };
    let named = (place.host.as_str(), port).to_socket_addrs();
    match named.ok().and_then(|mut all| all.find(is_meant)) {
        Some(address) => match TcpListener::bind(address) {
            // A name for a service, or an address that is translated.
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => listen_everywhere(port),
            listener => listener,
        },
        None => listen_everywhere(port),
    }
}

/// Listens on all addresses of this host.
fn listen_everywhere(port: u16) -> io::Result<TcpListener> {
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|_| TcpListener::bind(("0.0.0.0", port)))
}

/// Listens on any port of the only address in `own`, else of all addresses of this host; the port
/// is returned, too.
pub(crate) fn listen_for_ranks(own: &[IpAddr]) -> Result<(TcpListener, u16)> {
    let made = match own {
        [only] => TcpListener::bind((*only, 0)),
        _ => listen_everywhere(0),
    };
    let made = made.and_then(|made| {
        let port = made.local_addr()?.port();
        Ok((made, port))
    });
    let help = "raise the limit on open files (ulimit -n), or check this host's network";
    made.map_err(|error| Error::setup("listen for ranks", error, help))
}

/// Who connects to a rank that listens.
pub(crate) struct Acceptor {
    listener: TcpListener,
    key: JobKey,
    /// The most bytes of a message after the hello.
    bytes_max: usize,
    candidates: Vec<NewConnection>,
    pub(crate) joined: Vec<Joined>,
    /// Why processes were refused, the first ones.
    notes: Vec<String>,
    /// What helps those that have another secret.
    help: Option<String>,
}

/// A process that has connected and is not known to be a rank yet.
struct NewConnection {
    frames: Frames,
    local: IpAddr,
    remote: IpAddr,
    since: Instant,
    caller: Option<Exchange>,
}

impl Acceptor {
    pub(crate) fn new(listener: TcpListener, key: JobKey, bytes_max: usize) -> Result<Acceptor> {
        let set = listener.set_nonblocking(true);
        set.map_err(|error| Error::setup(ACTION, error, "start the job again"))?;
        Ok(Acceptor {
            listener,
            key,
            bytes_max,
            candidates: Vec::new(),
            joined: Vec::new(),
            notes: Vec::new(),
            help: None,
        })
    }

    /// Waits until the ranks `expected` have joined. If it fails, those that have are told by the
    /// caller. `place` is what they connect to.
    pub(crate) fn gather(
        &mut self,
        expected: &[usize],
        limit: Duration,
        place: &str,
    ) -> Result<()> {
        let (mut waited, mut total, mut is_logged) = (Waited::new(), Duration::ZERO, false);
        loop {
            self.accept();
            self.talk(expected)?;
            let missing = self.missing(expected);
            if missing.is_empty() {
                return Ok(());
            }
            self.check_joined()?;
            client::check(&self.key.client)?;
            if total >= limit {
                return Err(self.too_late(&missing, limit, place));
            }
            if total >= LOGGED_AFTER && !is_logged {
                is_logged = true;
                tracing::info!("waiting at {place} for {}", RankList(&missing));
            }
            let listener = libc::pollfd {
                fd: self.listener.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            let candidates = self.candidates.iter().map(|one| one.frames.entry());
            wait(candidates.chain([listener]), PERIOD);
            total = waited.after(PERIOD);
        }
    }

    /// Those of `expected` that have come since the last call. Does not wait.
    pub(crate) fn come(&mut self, expected: &[usize]) -> Result<Vec<Joined>> {
        self.accept();
        self.talk(expected)?;
        Ok(std::mem::take(&mut self.joined))
    }

    /// Those of `expected` that have not joined.
    pub(crate) fn missing(&self, expected: &[usize]) -> Vec<usize> {
        let has_joined = |rank: &usize| self.joined.iter().any(|joined| joined.rank == *rank);
        let expected = expected.iter().copied();
        expected.filter(|rank| !has_joined(rank)).collect()
    }

    pub(crate) fn too_late(&self, missing: &[usize], limit: Duration, place: &str) -> Error {
        let mut reason = format!(
            "{} did not come to {place} within {}{}",
            RankList(missing),
            Seconds(limit),
            stopped_note()
        );
        for note in &self.notes {
            reason += &format!("; {note}");
        }
        // An elastic job leaves out ranks that are late, whatever a stranger says.
        match self.help.as_ref().filter(|_| self.key.client.is_none()) {
            Some(help) => Error::setup(ACTION, reason, help),
            None => Error::too_late(ACTION, reason),
        }
    }

    /// An error if a rank that has joined is gone. Where the job continues the others meet again.
    fn check_joined(&mut self) -> Result<()> {
        for joined in &mut self.joined {
            joined.frames.advance();
            if joined.frames.is_closed() {
                let reason = format!("rank {} ended before all ranks had met", joined.rank);
                if self.key.client.is_some() {
                    return Err(Error::of_peer(Cause::of_generation(reason)));
                }
                let help = "look above for its error, or at its host";
                return Err(Error::setup(ACTION, reason, help));
            }
        }
        Ok(())
    }

    fn accept(&mut self) {
        for _ in 0..CANDIDATES_MAX {
            let (stream, remote) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => {
                    // Such as too many open files: without a pause this would use a core.
                    self.note(format!("a connection was not accepted: {error}"));
                    return std::thread::sleep(RETRY);
                }
            };
            let local = stream.local_addr().map(|address| address.ip());
            let (Ok(local), Ok(frames)) = (local, frames_of(stream)) else {
                continue;
            };
            if self.candidates.len() == CANDIDATES_MAX {
                self.candidates.remove(0);
            }
            self.candidates.push(NewConnection {
                frames,
                local,
                remote: remote.ip(),
                since: Instant::now(),
                caller: None,
            });
        }
    }

    /// Goes on with the hello of every candidate.
    fn talk(&mut self, expected: &[usize]) -> Result<()> {
        for mut candidate in std::mem::take(&mut self.candidates) {
            candidate.frames.advance();
            let Some(message) = candidate.frames.take() else {
                if !candidate.frames.is_closed() && candidate.since.elapsed() < HELLO_MAX {
                    self.candidates.push(candidate);
                }
                continue;
            };
            match candidate.caller.take() {
                None => self.answer(candidate, &message)?,
                Some(caller) => self.admit(candidate, &caller, &message, expected),
            }
        }
        Ok(())
    }

    fn answer(&mut self, mut candidate: NewConnection, call: &[u8]) -> Result<()> {
        let (answer, said) = self.key.answer(call)?;
        if let Answer::Stranger = answer {
            return Ok(());
        }
        candidate.frames.queue(&said);
        candidate.frames.advance();
        match answer {
            Answer::Known(caller) => {
                candidate.caller = Some(caller);
                self.candidates.push(candidate);
            }
            Answer::Elsewhere(reason) => self.refuse(&candidate, &reason),
            Answer::Stranger | Answer::Refused => {}
        }
        Ok(())
    }

    fn admit(
        &mut self,
        mut candidate: NewConnection,
        caller: &Exchange,
        proof: &[u8],
        expected: &[usize],
    ) {
        let rank = caller.rank;
        if let Answer::Refused = self.key.check(caller, proof) {
            candidate.frames.queue(&JobKey::refusal());
            candidate.frames.advance();
            // Never to copy from there: whoever calls may be a stranger.
            let [here, there] = [candidate.local, candidate.remote].map(|it| it.to_canonical());
            let help = format!("on {there}: {}", self.key.secret.help(here));
            self.help.get_or_insert(help);
            return self.refuse(
                &candidate,
                &format!("rank {rank}, as it says: {OTHER_SECRET}"),
            );
        }
        if !expected.contains(&rank) {
            return self.refuse(&candidate, &format!("it says that it is rank {rank}"));
        }
        let is_taken = self.joined.iter().any(|joined| joined.rank == rank);
        let verdict = if is_taken { TAKEN } else { WELCOME };
        candidate.frames.queue(&self.key.verdict(caller, verdict));
        candidate.frames.advance();
        if is_taken {
            return self.refuse(&candidate, &format!("rank {rank} had joined before"));
        }
        candidate.frames.seal(self.key.seals(caller));
        candidate.frames.set_limit(self.bytes_max);
        self.joined.push(Joined {
            rank,
            frames: candidate.frames,
            address: candidate.local,
        });
    }

    fn refuse(&mut self, candidate: &NewConnection, reason: &str) {
        let remote = candidate.remote.to_canonical();
        self.note(format!("a process at {remote} was refused: {reason}"));
    }

    /// Warns at once: the error, which also says it, may come much later.
    fn note(&mut self, note: String) {
        if self.notes.len() < NOTES_MAX && !self.notes.contains(&note) {
            warn(&program_name(), &note);
            self.notes.push(note);
        }
    }
}

/// Connects to rank `to`, which listens at one of `addresses`, sooner or later. `place` names them.
pub(crate) fn connect(
    to: usize,
    addresses: impl Fn() -> Vec<SocketAddr>,
    place: &str,
    key: &JobKey,
    bytes_max: usize,
    limit: Duration,
) -> Result<Joined> {
    let mut waited = Waited::new();
    // What the first process to answer said; until then, why there was none.
    let (mut answer, mut silent) = (None, "its name has no address".to_string());
    let mut refused = None;
    loop {
        client::check(&key.client)?;
        for address in addresses() {
            match attempt(address, to, key, bytes_max)? {
                Attempt::Joined(joined) => return Ok(*joined),
                Attempt::Answered(why) => _ = answer.get_or_insert(why),
                // Whoever holds the port may be a stranger: this rank goes on, and warns at once.
                Attempt::Refused if refused.is_none() => {
                    let help = key.secret.help(address.ip().to_canonical());
                    let (program, own) = (program_name(), rank_on_host());
                    let why = format!("rank {to} at {address}: {OTHER_SECRET}");
                    // Ranks other than the first show no log.
                    print_line(&format!("{program}: warning: {own}{why}; help: {help}\n"));
                    refused = Some((why, help));
                }
                Attempt::Refused => {}
                Attempt::Failed(why) => silent = why,
            }
            if waited.after(ATTEMPT_MAX) >= limit {
                break;
            }
        }
        std::thread::sleep(RETRY);
        if waited.after(ATTEMPT_MAX) >= limit {
            let within = Seconds(limit);
            let text = format!("rank {to} did not answer at {place} within {within}: ");
            return Err(match refused.filter(|_| key.client.is_none()) {
                Some((why, help)) => Error::setup(ACTION, text + &why, help),
                None => {
                    let why = answer.unwrap_or(silent);
                    Error::too_late(ACTION, text + &why + &stopped_note())
                }
            });
        }
    }
}

/// What came of calling an address.
enum Attempt {
    Joined(Box<Joined>),
    /// Another process than the rank answered: what it is.
    Answered(String),
    /// A process answered that has another secret.
    Refused,
    /// No process answered: why.
    Failed(String),
}

fn attempt(address: SocketAddr, to: usize, key: &JobKey, bytes_max: usize) -> Result<Attempt> {
    let stream = match TcpStream::connect_timeout(&address, CONNECT_MAX) {
        Ok(stream) => stream,
        Err(error) => return Ok(Attempt::Failed(error.to_string())),
    };
    let local = stream.local_addr().map(|address| address.ip());
    let (Ok(local), Ok(mut frames)) = (local, frames_of(stream)) else {
        return Ok(Attempt::Failed("the connection was lost".into()));
    };
    let stranger = || {
        Ok(Attempt::Answered(
            "what listens there does not answer as a rank".into(),
        ))
    };
    let (number, call) = key.call(to)?;
    let Some(answer) = ask(&mut frames, &call) else {
        return stranger();
    };
    let (exchange, proof) = match key.prove(to, &number, &answer) {
        Answer::Known(proof) => proof,
        Answer::Elsewhere(reason) => return Ok(Attempt::Answered(reason)),
        Answer::Stranger | Answer::Refused => return stranger(),
    };
    let Some(verdict) = ask(&mut frames, &proof) else {
        let reason = format!("rank {to} did not take this rank in");
        return Ok(Attempt::Answered(reason));
    };
    match key.hear(&exchange, &verdict) {
        Answer::Known(TAKEN) => {
            let reason = format!(
                "rank {to} at {address}: another process is rank {} already",
                key.rank
            );
            return Err(Error::setup(
                ACTION,
                reason,
                "give each rank a number of its own",
            ));
        }
        Answer::Known(_) => {}
        Answer::Refused => return Ok(Attempt::Refused),
        Answer::Stranger | Answer::Elsewhere(_) => return stranger(),
    }
    frames.seal(key.seals(&exchange));
    frames.set_limit(bytes_max);
    Ok(Attempt::Joined(Box::new(Joined {
        rank: to,
        frames,
        address: local,
    })))
}

/// Sends `message` and waits for the answer.
fn ask(frames: &mut Frames, message: &[u8]) -> Option<Vec<u8>> {
    frames.queue(message);
    wait_for(HELLO_MAX, std::slice::from_mut(frames), |frames| {
        let answer = frames[0].take();
        (answer.is_some() || frames[0].is_closed()).then_some(answer)
    })
    .flatten()
}

fn frames_of(stream: TcpStream) -> io::Result<Frames> {
    stream.set_nodelay(true)?;
    Frames::new(stream.into(), HELLO_BYTES_MAX)
}

#[cfg(test)]
mod tests;
