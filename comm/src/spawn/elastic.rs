//! A job that continues without lost ranks, as its launcher sees it. On several hosts the launcher
//! says who takes part in each generation, by the roster of its host; agents pass on what is said.

use std::time::Duration;

use super::agent::Order;
use super::children::Children;
use super::remote::Remote;
use super::task::{Losses, Task};
use crate::error::{EXIT_PEER_LOST, Result};
use crate::launcher::HOST_ADDRESSES;
use crate::roster::Roster;
use crate::roster::across::PageState;
use crate::tcp::{self, SECRET};

/// The exit code of a rank whose program, settings or data are not those of the others.
const EXIT_DISAGREES: i32 = 78;

/// A job that continues without lost ranks.
pub(super) struct Elastic {
    pub(super) roster: Roster,
    task: Task,
    /// How many lost ranks may be started again, and how many were.
    restarts: u32,
    restarted: u32,
    /// By this ranks of several hosts recognise each other.
    secret: String,
    /// For each host the addresses of all.
    addresses: Vec<String>,
    /// The host of each seat: 0 for this one, else 1 + the index of the other.
    hosts: Vec<usize>,
    /// Since when it is known that the current generation is not whole.
    left: Option<Duration>,
    /// Seats that ranks of other hosts miss.
    missed: Vec<usize>,
    /// What other hosts were told last, and whether a process waited to be taken in.
    told: ([u32; 3], bool),
}

impl Elastic {
    /// `hosts` has the host of each seat; `addresses` has, for each host, those of all hosts as it
    /// reaches them.
    pub(super) fn new(
        hosts: Vec<usize>,
        task: &Task,
        losses: Losses,
        addresses: Vec<String>,
    ) -> Result<Elastic> {
        Ok(Elastic {
            roster: Roster::of_host(0, &hosts, losses.min_ranks)?,
            task: task.clone(),
            restarts: losses.restarts,
            restarted: 0,
            secret: tcp::job_secret()?,
            addresses,
            hosts,
            left: None,
            missed: Vec::new(),
            told: Default::default(),
        })
    }

    /// A seat is on this host from now on, and a process may come to it.
    pub(super) fn seat(&mut self, seat: usize, host: usize, address: &str) {
        self.hosts[seat] = host;
        self.roster.seat_at(seat, host, address.parse().ok());
        // All hosts hear the whole state again.
        self.told = Default::default();
    }

    /// Starts a rank, for the first time or again.
    pub(super) fn start(
        &self,
        rank: usize,
        here: &mut Children,
        others: &mut [Remote],
    ) -> Result<()> {
        let (size, host) = (self.hosts.len(), self.hosts[rank]);
        let addresses = (HOST_ADDRESSES.into(), self.addresses[host].clone());
        let variables = vec![addresses, (SECRET.into(), self.secret.clone())];
        if let Some(index) = host.checked_sub(1) {
            // An agent that has just come knows of no generation yet.
            others[index].send(&Order::Job(self.roster.state()));
            others[index].send(&Order::Start(rank, variables));
            return Ok(());
        }
        let mut command = self.task.command();
        command.envs(variables);
        let started = here.start_at(&self.roster, [rank, size], command);
        started.map(|_| ())
    }

    /// Whether a lost rank may be started again.
    pub(super) fn restarts(&self) -> bool {
        self.restarted < self.restarts && self.roster.over().is_none()
    }

    /// A lost rank is to be started again: how often that has happened. None if it is not.
    pub(super) fn again(&mut self, rank: usize, ended: Option<i32>) -> Option<String> {
        // One that does not agree with the others will not agree later.
        if self.restarted == self.restarts || ended == Some(EXIT_DISAGREES) {
            self.roster.stays_empty(rank);
            return None;
        }
        self.restarted += 1;
        Some(format!("({} of {})", self.restarted, self.restarts))
    }

    /// Leaves out these seats of the current generation.
    fn leave_out(&self, seats: &[usize], others: &mut [Remote]) {
        let members = self.roster.members().into_iter();
        for (seat, pid) in members.filter(|(seat, _)| seats.contains(seat)) {
            match self.hosts[seat].checked_sub(1) {
                None => self.roster.leave_out(&[(seat, pid)]),
                Some(index) => others[index].send(&Order::LeaveOut(seat, pid)),
            }
        }
    }

    /// What the page of a host says.
    pub(super) fn hear(&mut self, host: usize, state: PageState) {
        self.missed.append(&mut self.roster.hear_host(host, state));
    }

    /// On several hosts: forms the next generation when its ranks are there, and tells the other
    /// hosts what is new.
    pub(super) fn arbitrate(&mut self, others: &mut [Remote], now: Duration, timeout: Duration) {
        if !self.roster.is_across() {
            return;
        }
        let before = self.roster.current();
        let Ok(absent) = self.roster.form() else {
            return self.roster.end(EXIT_PEER_LOST);
        };
        let mut missed = std::mem::take(&mut self.missed);
        missed.append(&mut self.roster.state().missed);
        missed.retain(|seat| absent.contains(seat) && !self.roster.is_broken());
        if self.roster.current() != before {
            self.left = None;
        } else if self.roster.has_left(&absent) || !missed.is_empty() {
            self.roster.end_current();
            let left = *self.left.get_or_insert(now);
            if now - left > timeout.saturating_mul(2) {
                // No rank of their hosts is left to say that they show no progress.
                missed = absent;
                self.left = None;
            }
        }
        self.leave_out(&missed, others);
        let state = self.roster.state();
        let news = (state.numbers, self.roster.has_newcomers());
        if news != self.told {
            self.told = news;
            let order = Order::Job(state);
            others.iter_mut().for_each(|other| other.send(&order));
        }
    }
}
