//! A job that continues without lost ranks, as its launcher sees it. On several hosts the launcher
//! says who takes part in each generation, by the roster of its host; agents pass on what is said.

use std::collections::BTreeMap;
use std::time::Duration;

use super::agent::Order;
use super::children::Children;
use super::remote::Remote;
use super::task::{Losses, Task};
use crate::error::{EXIT_PEER_LOST, Result};
use crate::launcher::{HOST_ADDRESSES, JOB_NUMBER};
use crate::roster::across::PageState;
use crate::roster::{Roster, SLOW, Silent};
use crate::tcp::{self, SECRET};

/// The exit code of a rank whose program, settings or data are not those of the others.
const EXIT_DISAGREES: i32 = 78;

/// How often a rank may be started in a row without taking part for a while, and by how much the
/// second start is put off; each later one by twice as much.
const TRIES_MAX: u32 = 10;
const PUT_OFF: Duration = Duration::from_millis(20);
/// That while: one that fails in every step is not started for ever.
const TOOK_PART: Duration = Duration::from_secs(5);

/// How long ranks may take at least to meet for the first time: as ranks of one host have.
const FIRST_MEETING: Duration = Duration::from_secs(60);

/// A job that continues without lost ranks.
pub(super) struct Elastic {
    pub(super) roster: Roster,
    task: Task,
    /// How many lost ranks may be started again, and how many were.
    restarts: u32,
    restarted: u32,
    /// By seat: how many processes were started since one took part for a while, the generation
    /// when the last one was, and since when that takes part.
    tries: Vec<(u32, u32, Option<Duration>)>,
    /// The ranks that are to be started again, and when.
    waiting: Vec<(usize, Duration)>,
    /// By this ranks of several hosts recognise each other.
    secret: String,
    /// A number that no other job has.
    job: String,
    /// For each host the addresses of all.
    addresses: Vec<String>,
    /// The host of each seat: 0 for this one, else 1 + the index of the other.
    hosts: Vec<usize>,
    /// The ranks that are waited for, once the current generation is known to be over.
    silent: Silent,
    /// The ranks of the current generation, while it lasts.
    all_silent: Silent,
    /// For hosts, the seats elsewhere that their ranks miss.
    missed: BTreeMap<usize, Vec<usize>>,
    /// Seats to which no process comes again, on no host: the last one did not agree with the
    /// others, or could not connect to another host.
    stay_out: Vec<usize>,
    /// When the current generation was formed.
    formed: Duration,
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
            tries: vec![(1, 0, None); hosts.len()],
            waiting: Vec::new(),
            secret: tcp::job_secret()?,
            job: tcp::nonce()?,
            addresses,
            hosts,
            silent: Silent::default(),
            all_silent: Silent::default(),
            missed: BTreeMap::new(),
            stay_out: Vec::new(),
            formed: Duration::ZERO,
            told: Default::default(),
        })
    }

    /// A seat is on this host from now on, and a process may come to it.
    pub(super) fn seat(&mut self, seat: usize, host: usize, address: &str) {
        self.hosts[seat] = host;
        self.roster.seat_at(seat, host, address.parse().ok());
        if self.stays_out(seat) {
            self.roster.stays_empty(seat);
        }
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
        let secret = (SECRET.into(), self.secret.clone());
        let variables = vec![addresses, secret, (JOB_NUMBER.into(), self.job.clone())];
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

    /// A lost rank is to be started again: how often that has happened, or why it is not. One that
    /// ends again and again before it takes part, or soon after, waits longer each time, and then
    /// stays out.
    pub(super) fn again(
        &mut self,
        rank: usize,
        ended: Option<i32>,
        now: Duration,
    ) -> Result<String, String> {
        self.note_members(now);
        let tries = self.tries[rank].0 + 1;
        // One that does not agree with the others will not agree later.
        (self.stay_out).extend((ended == Some(EXIT_DISAGREES)).then_some(rank));
        let refusal = match self.restarts {
            0 => Some(String::new()),
            _ if self.stays_out(rank) => Some(": it is not started again".into()),
            _ if tries > TRIES_MAX => Some(format!(
                ": it ended {TRIES_MAX} times before or soon after it took part, and is not started again"
            )),
            all if all == self.restarted => Some(format!(
                ": all {all} restarts are used up, and it is not started again"
            )),
            _ => None,
        };
        if let Some(why) = refusal {
            self.roster.stays_empty(rank);
            return Err(why);
        }
        self.restarted += 1;
        self.tries[rank] = (tries, self.roster.current(), None);
        let put_off = PUT_OFF * ((1 << (tries - 1)) - 1);
        self.waiting.push((rank, now + put_off));
        Ok(format!("({} of {})", self.restarted, self.restarts))
    }

    /// Notes who takes part: after a while the next process of such a rank is its first try.
    fn note_members(&mut self, now: Duration) {
        let current = self.roster.current();
        for (rank, _) in self.roster.members() {
            let (tries, began, since) = &mut self.tries[rank];
            if current > *began && now - *since.get_or_insert(now) >= TOOK_PART {
                *tries = 0;
            }
        }
    }

    /// Whether no process comes to a seat again, wherever it is.
    pub(super) fn stays_out(&self, seat: usize) -> bool {
        self.stay_out.contains(&seat)
    }

    /// On one host: kills all ranks if none has shown progress for that long, because no other is
    /// there to notice. Whether it does.
    pub(super) fn kill_silent(&mut self, now: Duration, limit: Duration) -> bool {
        // On several hosts `decide` looks at those that others wait for.
        if self.roster.is_across() {
            return false;
        }
        let members = self.roster.live_members();
        let hung = (self.roster).silent(&members, &mut self.silent, now, limit);
        let are_all = !hung.is_empty() && hung.len() == members.len();
        if are_all {
            self.roster.leave_out(&hung, false);
        }
        are_all
    }

    /// The host of a rank is lost.
    pub(super) fn cut_off(&mut self, rank: usize) {
        self.roster.cut_off(rank);
        self.waiting.retain(|waiting| waiting.0 != rank);
    }

    /// The ranks that are to be started now, or not at all because the job ends.
    pub(super) fn due(&mut self, now: Duration, is_ending: bool) -> Vec<usize> {
        self.note_members(now);
        let is_due = |waiting: &mut (usize, Duration)| is_ending || now >= waiting.1;
        let due = self.waiting.extract_if(.., is_due);
        due.map(|(rank, _)| rank).collect()
    }

    /// What the page of a host says.
    pub(super) fn hear(&mut self, host: usize, state: PageState) {
        let missed = self.roster.hear_host(host, state);
        self.missed.insert(host, missed);
    }

    /// Forms the next generation when its ranks are there. Returns the processes that it leaves
    /// out, and whether others miss them.
    fn decide(&mut self, now: Duration, timeout: Duration) -> (Vec<(usize, u32)>, bool) {
        let before = self.roster.current();
        let Ok(absent) = self.roster.form() else {
            self.roster.end(EXIT_PEER_LOST);
            return Default::default();
        };
        self.missed.insert(0, self.roster.state().missed);
        let mut all = std::mem::take(&mut self.missed).into_iter();
        // Hosts that do not hear each other miss each other: the first one is believed.
        let missed = all.find(|(_, missed)| missed.iter().any(|seat| absent.contains(seat)));
        let (mut left_out, mut are_missed) = (Vec::new(), false);
        if self.roster.current() != before {
            (self.silent, self.formed) = (Silent::default(), now);
        } else if self.roster.is_meeting() {
            // A host of which no rank is left to say that others show no progress.
            let limit = match before {
                0 => timeout.max(FIRST_MEETING),
                _ => timeout.saturating_mul(2),
            };
            left_out = (self.roster).silent(&absent, &mut self.silent, now, limit);
        } else if self.roster.has_left(&absent) || missed.is_some() {
            self.roster.end_current();
            let (host, mut missed) = missed.unwrap_or_default();
            missed.retain(|seat| absent.contains(seat));
            (left_out, are_missed) = (self.roster.members(), true);
            // Of two that could not connect, the one that has just come stays out.
            let is_soon = now.saturating_sub(self.formed) < timeout.saturating_mul(2);
            let is_new = |seat: &usize| is_soon && self.roster.has_just_joined(*seat);
            if !missed.is_empty() && !missed.iter().any(is_new) {
                let came = left_out.iter().map(|it| it.0);
                let came: Vec<_> = came
                    .filter(|it| self.hosts[*it] == host && is_new(it))
                    .collect();
                missed = if came.is_empty() { missed } else { came };
            }
            left_out.retain(|(seat, _)| missed.contains(seat));
            self.stay_out.extend(missed.into_iter().filter(is_new));
        } else {
            // All may be stopped. Ranks that wait for NCCL show no progress either.
            let (members, limit) = (self.roster.live_members(), timeout.saturating_mul(4));
            let all_silent = &mut self.all_silent;
            left_out = (self.roster).silent(&members, all_silent, now, limit.max(SLOW));
            if left_out.len() < members.len() {
                left_out.clear();
            }
        }
        (left_out, are_missed)
    }

    /// On several hosts: decides who takes part in the next generation, and tells the other hosts
    /// what is new.
    pub(super) fn arbitrate(&mut self, others: &mut [Remote], now: Duration, timeout: Duration) {
        if !self.roster.is_across() {
            return;
        }
        let (left_out, are_missed) = self.decide(now, timeout);
        for (seat, pid) in left_out {
            match self.hosts[seat].checked_sub(1) {
                None => self.roster.leave_out(&[(seat, pid)], are_missed),
                Some(index) => others[index].send(&Order::LeaveOut(seat, pid, are_missed)),
            }
        }
        let state = self.roster.state();
        let news = (state.numbers, self.roster.has_newcomers());
        if news != self.told {
            self.told = news;
            let order = Order::Job(state);
            others.iter_mut().for_each(|other| other.send(&order));
        }
    }
}

#[cfg(test)]
mod tests;
