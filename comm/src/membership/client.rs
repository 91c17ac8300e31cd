//! A rank's connection to the launcher: through it the rank tells what it does, and hears
//! (`heard.rs`) on a thread.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;

use ddp_kernels::panics;

use super::heard::{CallsEnd, Heard, MeetingOutcome};
use super::packets::Packets;
use super::wire::{ToLauncher, ToRank};
use crate::error::{Cause, EXIT_PEER_LOST, Error, Result};

/// A rank's connection to what started it: the launcher, or its agent on this host.
#[derive(Debug)]
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
        self.changed.notify_all();
        goes_on
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

    /// Tells of a number that changes with each sign of progress of this process.
    pub(crate) fn show_progress(&self, number: u64) {
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

    /// These ranks, by their numbers in the current generation, are not heard. `have_met`: all its
    /// ranks had connected.
    pub(crate) fn leave_out(&self, ranks: &[usize], have_met: bool) {
        let Some(formed) = self.heard().generation.clone() else {
            return;
        };
        let known = ranks.iter().filter_map(|&rank| formed.members.get(rank));
        let ranks: Vec<usize> = known.map(|it| it.rank).collect();
        let generation = formed.number;
        if !ranks.is_empty() {
            let misses = ToLauncher::Misses {
                generation,
                ranks,
                have_met,
            };
            self.socket.send(&misses, true);
        }
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

/// An error if the generation whose ranks meet is over.
pub(crate) fn check(client: &Option<Arc<Client>>) -> Result<()> {
    let ended = client.as_ref().and_then(|client| client.ended());
    ended.map_or(Ok(()), |cause| Err(Error::of_peer(cause)))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use super::super::wire::{Change, Generation, MemberAddress};
    use super::*;

    /// A rank of a job of `ranks`, which has been told this, and the launcher's end.
    pub(crate) fn client(rank: usize, ranks: usize, messages: &[ToRank]) -> (Arc<Client>, Packets) {
        let (launcher, socket) = Packets::pair().unwrap();
        let welcome = ToRank::Welcome {
            is_elastic: true,
            min_ranks: 1,
            hosts: vec![0; ranks],
            generation: 0,
        };
        launcher.send(&welcome, true);
        let client = Client::new(rank, socket).unwrap();
        client.listen_on().unwrap();
        for message in messages {
            launcher.send(message, true);
        }
        (client, launcher)
    }

    /// A generation of these ranks.
    pub(crate) fn generation(number: u32, ranks: &[usize]) -> Generation {
        let member = |&rank: &usize| MemberAddress {
            rank,
            address: None,
            port: 0,
        };
        Generation {
            number,
            members: ranks.iter().map(member).collect(),
            hosts: vec![0; 3],
            change: Change::default(),
        }
    }

    #[test]
    fn a_rank_waits_for_a_later_generation_and_says_so() {
        let first = ToRank::Formed(generation(1, &[0, 2]));
        let (client, launcher) = client(0, 3, &[first]);
        assert!(matches!(client.meet(0, 4711), MeetingOutcome::Formed(it) if it.number == 1));
        let (after, port) = (0, 4711);
        assert_eq!(launcher.receive(), Some(ToLauncher::Waits { after, port }));
        launcher.send(&ToRank::Newcomers(true), true);
        launcher.send(&ToRank::Over(1), true);
        launcher.send(&ToRank::Formed(generation(3, &[0, 1, 2])), true);
        assert!(matches!(client.meet(1, 7), MeetingOutcome::Formed(it) if it.number == 3));
        assert!(!client.heard().newcomers && client.ended().is_none());
        // Ranks of the generation have other numbers than those of the job.
        client.leave_out(&[1, 9], true);
        launcher.receive::<ToLauncher>();
        let (generation, ranks, have_met) = (3, vec![1], true);
        assert_eq!(
            launcher.receive(),
            Some(ToLauncher::Misses {
                generation,
                ranks,
                have_met
            })
        );
    }

    #[test]
    fn what_comes_before_the_welcome_does_not_hide_it() {
        let (launcher, socket) = Packets::pair().unwrap();
        launcher.send(&ToRank::Alive(Duration::ZERO), true);
        launcher.send(&ToRank::Newcomers(true), true);
        let welcome = ToRank::Welcome {
            is_elastic: true,
            min_ranks: 2,
            hosts: vec![0, 1, 1],
            generation: 4,
        };
        launcher.send(&welcome, true);
        let client = Client::new(1, socket).unwrap();
        assert!(client.heard().is_elastic && client.heard().is_newcomer());
        assert_eq!((client.ranks(), client.heard().min_ranks), (3, 2));
    }

    #[test]
    fn the_end_of_the_job_or_of_the_launcher_ends_a_wait() {
        let (left, launcher) = client(0, 1, &[ToRank::Ends(65), ToRank::Ends(0)]);
        assert!(matches!(left.meet(0, 7), MeetingOutcome::Over(65)));
        drop(launcher);
        assert!(!left.end(0), "it ends already");
        let (alone, launcher) = client(0, 1, &[]);
        drop(launcher);
        assert!(matches!(
            alone.meet(0, 7),
            MeetingOutcome::Over(EXIT_PEER_LOST)
        ));
        assert_eq!(alone.heard().job_ends(), Some(EXIT_PEER_LOST));
    }

    #[test]
    fn a_generation_that_is_over_ends_its_calls_and_no_later_ones() {
        let (rank, launcher) = client(0, 2, &[]);
        for (number, over, ends) in [(1, 1, true), (2, 1, false), (3, 3, true)] {
            launcher.send(&ToRank::Formed(generation(number, &[0, 1])), true);
            launcher.send(&ToRank::Over(over), true);
            launcher.send(&ToRank::Alive(Duration::ZERO), true);
            while rank.heard().signs < u64::from(number) {
                std::thread::yield_now();
            }
            let ended = rank.ended();
            assert_eq!(
                ended.is_some_and(|it| it.ends_generation()),
                ends,
                "{number}"
            );
        }
    }
}
