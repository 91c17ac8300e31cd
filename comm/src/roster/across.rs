//! The roster of a job on several hosts. The launcher's page is the one that counts: it copies into
//! it what the pages of other hosts say of their seats, and they copy what it says of generations.
//! Both sides say the whole state, so that nothing depends on what was said before.

use std::net::{IpAddr, Ipv6Addr};
use std::ops::Range;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};

use super::{
    ADDRESS, BROKEN_AT, ENDED, GENERATION_AT, GONE, HAS_ENDED, HOST, HOST_AT, MEMBER, MISSED,
    OVER_AT, PID, PORT, PULSE, Roster, WAITS, WAS_CUT_OFF, ended_pid,
};
use crate::error::{Cause, Result};
use crate::shared::futex;

/// What pages say of a seat, in the order in which it is written. It is read in the opposite one:
/// so a process that waits has its own port, and an empty seat the reason.
const SAID: [usize; 10] = [
    MEMBER,
    MEMBER + 8,
    ADDRESS,
    ADDRESS + 8,
    HOST,
    ENDED,
    PORT,
    WAITS,
    PID,
    PULSE,
];
/// What of it the launcher's page decides, adds for seats of other hosts, and takes from them.
const DECIDED: Range<usize> = 0..5;
const PASSED_ON: Range<usize> = 0..9;
const TAKEN: Range<usize> = 5..10;

/// What a page says to those of other hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct PageState {
    /// The generation, the last one that is over, and how the job ended.
    pub(crate) numbers: [u32; 3],
    /// The launcher's page says all, others say what they know of their own.
    seats: Vec<(usize, [u64; SAID.len()])>,
    /// Seats of other hosts that ranks of this one miss in this generation.
    pub(crate) missed: Vec<usize>,
}

impl Roster {
    /// The page of host `own`; `hosts` has that of each seat. 0 is the launcher's, and a job whose
    /// seats are all there needs nothing of this file.
    pub(crate) fn of_host(own: usize, hosts: &[usize], min_ranks: usize) -> Result<Roster> {
        let roster = Roster::new(hosts.len(), min_ranks)?;
        if hosts.iter().any(|&host| host > 0) {
            let number = roster.page.u64_at(HOST_AT);
            number.store(own as u64 + 1, Ordering::Release);
        }
        for (seat, &host) in hosts.iter().enumerate() {
            roster.write(seat, HOST, host as u64);
        }
        Ok(roster)
    }

    /// Whether the job is on several hosts.
    pub(crate) fn is_across(&self) -> bool {
        self.page.u64_at(HOST_AT).load(Ordering::Acquire) != 0
    }

    /// Whether an agent, and not the launcher, has started this host's ranks.
    pub(crate) fn is_of_agent(&self) -> bool {
        self.page.u64_at(HOST_AT).load(Ordering::Acquire) > 1
    }

    /// The number of a seat's host.
    pub(crate) fn host_of(&self, seat: usize) -> usize {
        self.read(seat, HOST) as usize
    }

    /// Whether a seat's process is on this host.
    pub(crate) fn is_here(&self, seat: usize) -> bool {
        let own = self.page.u64_at(HOST_AT).load(Ordering::Acquire) as usize;
        own == 0 || own == self.host_of(seat) + 1
    }

    /// While this process waits, it listens at this port.
    pub(crate) fn listen_at(&self, seat: usize, port: u16) {
        self.write(seat, PORT, u64::from(port));
    }

    /// The port of a rank of the current generation.
    pub(crate) fn port_of(&self, seat: usize) -> u16 {
        self.read(seat, PORT) as u16
    }

    /// For the launcher: a seat is on this host, at this address, and a process may come to it.
    pub(crate) fn seat_at(&self, seat: usize, host: usize, address: Option<IpAddr>) {
        let address = address.map_or(0, |address| match address {
            IpAddr::V4(address) => address.to_ipv6_mapped().to_bits(),
            IpAddr::V6(address) => address.to_bits(),
        });
        self.write(seat, ADDRESS, (address >> 64) as u64);
        self.write(seat, ADDRESS + 8, address as u64);
        self.write(seat, HOST, host as u64);
        self.write(seat, GONE, 0);
    }

    /// Where other hosts reach the host of a seat, if that has an address.
    pub(crate) fn address_of(&self, seat: usize) -> Option<IpAddr> {
        let [high, low] = [ADDRESS, ADDRESS + 8].map(|word| u128::from(self.read(seat, word)));
        let address = Ipv6Addr::from_bits(high << 64 | low);
        (!address.is_unspecified()).then(|| address.to_canonical())
    }

    /// Whether the current generation is over, as the launcher says.
    pub(crate) fn is_broken(&self) -> bool {
        let broken = self.page.u32_at(BROKEN_AT).load(Ordering::Acquire);
        broken > 0 && broken == self.current()
    }

    /// Whether ranks meet: for the first generation, or because the current one is over.
    pub(crate) fn is_meeting(&self) -> bool {
        self.current() == 0 || self.is_broken()
    }

    /// Why the calls of the current generation end, as far as other hosts know.
    pub(crate) fn ended(&self) -> Option<Cause> {
        let failed = self.over().filter(|&code| code != 0);
        let cause = failed.map(|exit_code| Cause {
            rank: 0,
            host: "another host".into(),
            exit_code,
            text: "the job has ended".into(),
        });
        let is_broken = self.is_broken() && self.over().is_none();
        cause.or_else(|| is_broken.then(|| Cause::of_generation("a rank was lost".into())))
    }

    /// For the launcher: the current generation is over, and its ranks meet again.
    pub(crate) fn end_current(&self) {
        let broken = self.page.u32_at(BROKEN_AT);
        broken.store(self.current(), Ordering::Release);
    }

    /// For the launcher: a seat's host does not answer. No process comes to it any more.
    pub(crate) fn cut_off(&self, seat: usize) {
        let pid = self.read(seat, PID);
        if pid != 0 {
            self.write(seat, ENDED, HAS_ENDED | WAS_CUT_OFF | ended_pid(pid));
        }
        self.write(seat, PID, 0);
        self.stays_empty(seat);
    }

    /// What this page says.
    pub(crate) fn state(&self) -> PageState {
        let is_launchers = self.page.u64_at(HOST_AT).load(Ordering::Acquire) == 1;
        let numbers = [GENERATION_AT, BROKEN_AT, OVER_AT];
        let numbers = numbers.map(|at| self.page.u32_at(at).load(Ordering::Acquire));
        // Signs of progress are news only while ranks meet.
        let unsaid = usize::from(!self.is_meeting());
        let words = |seat| {
            let mut words = [0; SAID.len()];
            let backwards = words.iter_mut().zip(SAID).rev().skip(unsaid);
            backwards.for_each(|(value, word)| *value = self.read(seat, word));
            words
        };
        let is_missed = |&seat: &usize| {
            let missed = self.read(seat, MISSED);
            missed > 0 && missed == u64::from(numbers[0])
        };
        let seats = (0..self.seats).filter(|&seat| is_launchers || self.is_here(seat));
        PageState {
            numbers,
            seats: seats.map(|seat| (seat, words(seat))).collect(),
            missed: (0..self.seats).filter(is_missed).collect(),
        }
    }

    fn copy(&self, seat: usize, words: &[u64; SAID.len()], which: Range<usize>) {
        for index in which {
            self.write(seat, SAID[index], words[index]);
        }
    }

    /// For the launcher: what the page of a host says. Returns the seats that its ranks miss.
    pub(crate) fn hear_host(&self, host: usize, state: PageState) -> Vec<usize> {
        for (seat, words) in &state.seats {
            let is_its = *seat < self.seats && self.host_of(*seat) == host;
            if is_its && self.read(*seat, GONE) == 0 {
                self.copy(*seat, words, TAKEN);
            }
        }
        self.hear_end(state.numbers[2]);
        match state.numbers[0] == self.current() {
            true => state.missed,
            false => Vec::new(),
        }
    }

    /// What the launcher's page says.
    pub(crate) fn hear_job(&self, state: &PageState) {
        for (seat, words) in &state.seats {
            if *seat < self.seats {
                let is_here = self.is_here(*seat);
                self.copy(*seat, words, if is_here { DECIDED } else { PASSED_ON });
            }
        }
        let [generation, broken, over] = state.numbers;
        let at = self.page.u32_at(BROKEN_AT);
        at.store(broken, Ordering::Release);
        self.generation().store(generation, Ordering::Release);
        futex::wake(self.generation());
        self.hear_end(over);
    }

    fn hear_end(&self, over: u32) {
        if let Some(code) = over.checked_sub(1) {
            self.end(code as u8);
        }
    }

    /// Whether a seat's process is new in the current generation, and came while others trained.
    pub(crate) fn has_just_joined(&self, seat: usize) -> bool {
        let [before, now] = [1, 0].map(|back| {
            let generation = self.current().saturating_sub(back);
            self.member(seat, generation).load(Ordering::Relaxed)
        });
        self.current() > 1 && before != now
    }

    /// For the launcher: whether ranks of the current generation have ended, or wait for the next
    /// one. The others are `absent`.
    pub(crate) fn has_left(&self, absent: &[usize]) -> bool {
        let current = self.current();
        let has_left = |seat: usize| match self.member(seat, current).load(Ordering::Relaxed) {
            0 => false,
            pid => pid != self.read(seat, PID) || !absent.contains(&seat),
        };
        current > 0 && (0..self.seats).any(has_left)
    }
}

#[cfg(test)]
mod tests;
