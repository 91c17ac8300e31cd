//! Who takes part in a job that continues without lost ranks.
//!
//! A job is a sequence of generations. All that ranks share belongs to one generation: its segment,
//! groups, communicators and graphs. When a rank is lost or a new one comes, the ranks that are
//! left meet here, and the next generation begins: the same way for the first one, after a loss and
//! for a new rank.
//!
//! The roster is one page of memory that the launcher makes and every rank inherits. A rank has a
//! seat: its number when the job was started. Whoever waits tries to form the next generation,
//! under a lock that the kernel releases when its holder dies. What is written under the lock is
//! not read before one store, that of the generation's number, publishes it. So a rank can be
//! killed at any moment, and no rank is special.
//!
//! In a job on several hosts each host has such a page for its ranks. There the launcher alone
//! forms generations, in the page of its host; agents bring it what their pages say, and bring
//! back what it says (`across.rs`).

pub(crate) mod across;

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::{EXIT_PEER_LOST, Error, Result};
use crate::process::{self, Process};
use crate::shared::{Mapping, futex, map, memfd};
use crate::waited::Waited;

/// The first word. Its last byte is the version of this layout.
const MAGIC: u64 = u64::from_be_bytes(*b"ddpseat\x03");
const SEATS_AT: usize = 8;
const MIN_RANKS_AT: usize = 16;
/// The number of the current generation; 0 before the first.
const GENERATION_AT: usize = 24;
/// 0, or 1 + the exit code of a job that ends.
const OVER_AT: usize = 28;
/// The segment of a generation: the process that made it, its descriptor there, the generation.
const SEGMENT_AT: usize = 32;
/// The last generation that is known to be over.
const BROKEN_AT: usize = 44;
/// In a job on several hosts: 1 + the number of this page's host. 0 on one host.
const HOST_AT: usize = 48;
/// The process that starts this page's ranks: the launcher, or its agent.
const LAUNCHER_AT: usize = 56;
/// The last process that had the lock.
const LOCKED_BY_AT: usize = 64;
/// A counter of this page's agent; 0 on the launcher's host.
const AGENT_AT: usize = 72;

/// A seat: its process, for which generation it waits, how its last process ended, whether it stays
/// empty, its process in the current and the last generation, and its signs of progress. On several
/// hosts also the port where its process listens while it waits, its host and where that is
/// reached, and the generation in which a rank of another host has missed it.
const FIRST_SEAT_AT: usize = 128;
const SEAT_BYTES: usize = 96;
const PID: usize = 0;
const WAITS: usize = 8;
const ENDED: usize = 16;
const GONE: usize = 24;
const MEMBER: usize = 32;
const PORT: usize = 48;
const HOST: usize = 56;
const MISSED: usize = 64;
const PULSE: usize = 72;
const ADDRESS: usize = 80;

/// How a seat's process ended: its status, its number, and what is known besides. Others killed it,
/// because it was silent or a rank of another host did not hear from it.
const STATUS: u64 = 0xffff;
const ENDED_PID_AT: u32 = 16;
const ENDED_PID: u64 = 0xff_ffff << ENDED_PID_AT;
const WAS_SILENT: u64 = 1 << 40;
const HAS_ENDED: u64 = 1 << 41;
const WAS_CUT_OFF: u64 = 1 << 42;
const WAS_MISSED: u64 = 1 << 43;

/// How long what starts ranks may take to say how one has ended.
const TOLD_WITHIN: Duration = Duration::from_secs(1);
/// For how long ranks that are not stopped may at least show no progress where none does: NCCL may
/// take a minute to connect.
pub(crate) const SLOW: Duration = Duration::from_secs(120);
/// How often a rank that waits looks.
const PERIOD: Duration = Duration::from_millis(5);

/// The page. A launcher and its ranks map the same one.
#[derive(Debug)]
pub(crate) struct Roster {
    page: Mapping,
    /// Opened by this process alone: the lock is that of an open file.
    lock: File,
    seats: usize,
}

/// A generation, as one of its ranks sees it.
#[derive(Debug)]
pub(crate) struct Generation {
    pub(crate) number: u32,
    /// Seat and process of each rank.
    pub(crate) members: Vec<(usize, u32)>,
    pub(crate) change: Change,
}

/// Who was lost and who came since the generation before. Ranks have the numbers with which the
/// job was started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// Who was lost.
    pub lost: Vec<LostRank>,
    /// Who came.
    pub joined: Vec<usize>,
}

impl Change {
    /// Adds what changed after that.
    pub fn extend(&mut self, later: Change) {
        let is_lost = |rank: &usize| later.lost.iter().any(|lost| lost.rank == *rank);
        self.joined.retain(|rank| !is_lost(rank));
        self.lost.extend(later.lost);
        self.joined.extend(later.joined);
    }
}

/// A rank that was lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostRank {
    /// Its number when the job was started.
    pub rank: usize,
    /// Why, as far as it is known: "killed by signal 9".
    pub why: String,
}

/// Seats that are waited for, each with its process and the last sign of that, and since when there
/// has been no other.
#[derive(Default)]
pub(crate) struct Silent(Vec<(usize, [u64; 2], Duration)>);

/// How a wait for the next generation ended.
#[derive(Debug)]
pub(crate) enum Meeting {
    Formed(Generation),
    /// The job ends with this exit code.
    Over(u8),
}

impl Roster {
    /// The roster of a job that is about to be started.
    pub(crate) fn new(seats: usize, min_ranks: usize) -> Result<Roster> {
        if !Process::open(std::process::id()).can_be_killed() {
            let action = "start ranks of which some may be lost";
            let reason = "this system has no pidfd_open, so a silent rank cannot be killed safely";
            return Err(Error::setup(action, reason, "use Linux 5.3 or later"));
        }
        let bytes = FIRST_SEAT_AT + seats * SEAT_BYTES;
        let made = memfd(bytes).and_then(|file| Roster::of(file, bytes, seats));
        let failed = |error| Error::no_memory("make the roster of the ranks".into(), &error);
        let roster = made.map_err(failed)?;
        let own = std::process::id() as usize;
        let words = [
            (SEATS_AT, seats),
            (MIN_RANKS_AT, min_ranks),
            (LAUNCHER_AT, own),
        ];
        for (at, value) in words {
            roster
                .page
                .u64_at(at)
                .store(value as u64, Ordering::Relaxed);
        }
        roster.page.u64_at(0).store(MAGIC, Ordering::Release);
        Ok(roster)
    }

    /// The roster that this process inherited as descriptor `fd`.
    pub(crate) fn inherited(fd: RawFd) -> Result<Roster> {
        // SAFETY: the launcher made this descriptor for this process, which takes it once.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        let refused = |got: String| {
            let expected = "the roster of the launcher's ranks";
            Error::launch(crate::launcher::OWN_JOB, expected, got)
        };
        let damaged = |error: io::Error| refused(error.to_string());
        // SAFETY: a descriptor of this process and a flag.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
        let bytes = file
            .try_clone()
            .and_then(|file| Ok(File::from(file).metadata()?.len()));
        let bytes = bytes.map_err(damaged)? as usize;
        if bytes < FIRST_SEAT_AT + SEAT_BYTES {
            return Err(refused(format!("{bytes} bytes")));
        }
        let seats = (bytes - FIRST_SEAT_AT) / SEAT_BYTES;
        let roster = Roster::of(file, bytes, seats).map_err(damaged)?;
        let found = [0, SEATS_AT].map(|at| roster.page.u64_at(at).load(Ordering::Acquire));
        if found != [MAGIC, seats as u64] {
            return Err(refused("memory of another kind".into()));
        }
        Ok(roster)
    }

    fn of(file: OwnedFd, bytes: usize, seats: usize) -> io::Result<Roster> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let lock = OpenOptions::new().read(true).write(true).open(path)?;
        let page = map(bytes, Some(file))?;
        Ok(Roster { page, lock, seats })
    }

    /// The descriptor that a rank inherits.
    pub(crate) fn duplicate(&self) -> io::Result<OwnedFd> {
        self.page.duplicate()
    }

    /// How many ranks the job was started with.
    pub(crate) fn seats(&self) -> usize {
        self.seats
    }

    /// With fewer ranks the job ends.
    pub(crate) fn min_ranks(&self) -> usize {
        self.page.u64_at(MIN_RANKS_AT).load(Ordering::Relaxed) as usize
    }

    /// The process that starts the ranks of this host.
    pub(crate) fn launcher(&self) -> Process {
        Process::open(self.page.u64_at(LAUNCHER_AT).load(Ordering::Relaxed) as u32)
    }

    /// For an agent: it works.
    pub(crate) fn show_agent(&self) {
        self.page.u64_at(AGENT_AT).fetch_add(1, Ordering::Relaxed);
    }

    /// A number that changes while the agent of this host works; 0 on the launcher's host.
    pub(crate) fn agent(&self) -> u64 {
        self.page.u64_at(AGENT_AT).load(Ordering::Relaxed)
    }

    fn word(&self, seat: usize, of_seat: usize) -> &AtomicU64 {
        assert!(seat < self.seats, "seat {seat} of {}", self.seats);
        self.page
            .u64_at(FIRST_SEAT_AT + seat * SEAT_BYTES + of_seat)
    }

    fn read(&self, seat: usize, of_seat: usize) -> u64 {
        self.word(seat, of_seat).load(Ordering::Acquire)
    }

    fn write(&self, seat: usize, of_seat: usize, value: u64) {
        self.word(seat, of_seat).store(value, Ordering::Release);
    }

    /// The process of a seat in a generation; 0 for none.
    fn member(&self, seat: usize, generation: u32) -> &AtomicU64 {
        self.word(seat, MEMBER + 8 * (generation as usize % 2))
    }

    fn generation(&self) -> &AtomicU32 {
        self.page.u32_at(GENERATION_AT)
    }

    /// The current generation, from 1; 0 before the first.
    pub(crate) fn current(&self) -> u32 {
        self.generation().load(Ordering::Acquire)
    }

    /// The exit code of a job that ends.
    pub(crate) fn over(&self) -> Option<u8> {
        let over = self.page.u32_at(OVER_AT).load(Ordering::Acquire);
        over.checked_sub(1).map(|code| code as u8)
    }

    /// The job ends, unless it does so already: whether this ends it.
    pub(crate) fn end(&self, exit_code: u8) -> bool {
        let (over, value) = (self.page.u32_at(OVER_AT), 1 + u32::from(exit_code));
        let ended = over.compare_exchange(0, value, Ordering::AcqRel, Ordering::Relaxed);
        futex::wake(self.generation());
        ended.is_ok()
    }

    /// For the launcher: the process of a seat has ended.
    pub(crate) fn has_ended(&self, seat: usize, status: ExitStatus) {
        // Of a seat elsewhere its agent says how.
        if self.is_here(seat) {
            let (pid, before) = (ended_pid(self.read(seat, PID)), self.read(seat, ENDED));
            // Of the end of another process nothing is kept.
            let silent = if before & ENDED_PID == pid {
                before & (WAS_SILENT | WAS_MISSED)
            } else {
                0
            };
            let status = u64::from(status.into_raw().cast_unsigned()) & STATUS;
            self.write(seat, ENDED, HAS_ENDED | silent | pid | status);
        }
        self.write(seat, PID, 0);
    }

    /// For the launcher: no process comes to this seat any more.
    pub(crate) fn stays_empty(&self, seat: usize) {
        self.write(seat, GONE, 1);
        futex::wake(self.generation());
    }

    /// The launcher calls this before it starts a process for a seat. What the last process waited
    /// for counts no more.
    pub(crate) fn clear(&self, seat: usize) {
        self.write(seat, WAITS, 0);
    }

    /// Makes `pid` the process of a seat. The launcher and the process itself both call this.
    pub(crate) fn take(&self, seat: usize, pid: u32) {
        self.write(seat, PID, identity(pid));
    }

    /// Shows the others a number that changes with each sign of progress of this process.
    pub(crate) fn show_pulse(&self, seat: usize, number: u64) {
        self.write(seat, PULSE, number);
    }

    /// Whether a process waits to be taken in.
    pub(crate) fn has_newcomers(&self) -> bool {
        let generation = self.current();
        (0..self.seats).any(|seat| {
            let pid = self.read(seat, PID);
            self.read(seat, WAITS) > 0
                && pid != self.member(seat, generation).load(Ordering::Relaxed)
        })
    }

    /// Waits for a generation after `after` of which this process is, and forms it when all are
    /// there: ranks that are left, and ranks that came. A rank that neither comes nor shows
    /// progress for `timeout` is killed.
    pub(crate) fn meet(&self, seat: usize, after: u32, timeout: Duration) -> Result<Meeting> {
        let own = own_identity();
        let waits = self.word(seat, WAITS);
        waits.store(u64::from(after) + 1, Ordering::Release);
        let (mut silent, mut waited) = (Silent::default(), Waited::new());
        let launcher = self.launcher();
        loop {
            if launcher.has_ended() {
                self.end(EXIT_PEER_LOST);
            }
            if let Some(code) = self.over() {
                return Ok(Meeting::Over(code));
            }
            let current = self.current();
            if current > after && self.member(seat, current).load(Ordering::Acquire) == own {
                waits.store(0, Ordering::Release);
                return Ok(Meeting::Formed(self.describe(current)));
            }
            let absent = match self.is_across() {
                true => self.survey(|seat| self.is_here(seat)).0,
                false => self.form()?,
            };
            // Ranks that wait for a silent one leave it out themselves: a newcomer does so only if
            // all are silent.
            let now = waited.after(PERIOD);
            let late = match current == 0 || self.is_member(seat) {
                true => self.silent(&absent, &mut silent, now, timeout),
                false => self.hung(&absent, &mut silent, now, 3 * timeout),
            };
            self.leave_out(&late, false);
            futex::wait(self.generation(), current, PERIOD);
        }
    }

    /// Of seats that are waited for, those whose processes have shown no progress for `limit`.
    pub(crate) fn silent(
        &self,
        absent: &[usize],
        Silent(before): &mut Silent,
        now: Duration,
        limit: Duration,
    ) -> Vec<(usize, u32)> {
        let seen = |seat| {
            let shown = [PID, PULSE].map(|of_seat| self.read(seat, of_seat));
            let mut last = before.iter().filter(|it| (it.0, it.1) == (seat, shown));
            (seat, shown, last.next().map_or(now, |it| it.2))
        };
        *before = absent.iter().map(|&seat| seen(seat)).collect();
        let silent = before.iter().filter(|(.., since)| now - *since > limit);
        silent
            .map(|&(seat, [pid, _], _)| (seat, pid as u32))
            .collect()
    }

    /// As `silent`, where no rank is left that waits for these: if they are not stopped, they may
    /// wait for NCCL.
    pub(crate) fn hung(
        &self,
        absent: &[usize],
        before: &mut Silent,
        now: Duration,
        limit: Duration,
    ) -> Vec<(usize, u32)> {
        let long = self.silent(absent, before, now, limit.max(SLOW));
        let mut hung = self.silent(absent, before, now, limit);
        hung.retain(|it| long.contains(it) || process::is_stopped(it.1));
        hung
    }

    /// Kills processes that show no progress, or that others miss, each with its seat. Another
    /// process may have taken the seat since: that one stays. Those of other hosts the launcher
    /// leaves out.
    pub(crate) fn leave_out(&self, processes: &[(usize, u32)], are_missed: bool) {
        let why = if are_missed { WAS_MISSED } else { WAS_SILENT };
        for &(seat, pid) in processes {
            if !self.is_here(seat) {
                self.write(seat, MISSED, u64::from(self.current()));
            } else if pid != 0 && self.read(seat, PID) as u32 == pid {
                self.write(seat, ENDED, why | ended_pid(pid.into()));
                // The launcher has not waited for it, so the number is not another process's.
                Process::open(pid).kill();
            }
        }
    }

    /// Kills all processes of this host.
    pub(crate) fn kill_all(&self) {
        let here = (0..self.seats).filter(|&seat| self.is_here(seat));
        let processes = here.map(|seat| (seat, self.read(seat, PID) as u32));
        self.leave_out(&processes.collect::<Vec<_>>(), false);
    }

    /// As `leave_out`, for ranks of the current generation.
    pub(crate) fn leave_out_ranks(&self, ranks: &[usize]) {
        let members = self.members();
        let chosen = ranks.iter().filter_map(|&rank| members.get(rank).copied());
        self.leave_out(&chosen.collect::<Vec<_>>(), false);
    }

    /// Seat and process of each rank of the current generation.
    pub(crate) fn members(&self) -> Vec<(usize, u32)> {
        let current = self.current();
        let pid = |seat| self.member(seat, current).load(Ordering::Relaxed) as u32;
        let members = (0..self.seats).map(|seat| (seat, pid(seat)));
        members.filter(|&(_, pid)| pid != 0).collect()
    }

    /// The seats of the current generation that still have the process they had in it.
    pub(crate) fn live_members(&self) -> Vec<usize> {
        let (current, all) = (self.current(), 0..self.seats);
        let was = |seat: usize| self.member(seat, current).load(Ordering::Relaxed);
        all.filter(|&seat| was(seat) != 0 && was(seat) == self.read(seat, PID))
            .collect()
    }

    /// Forms the next generation, if all of this one that live wait for it. Returns the seats that
    /// are waited for: also that of another process that has the lock, because it may be stopped.
    pub(crate) fn form(&self) -> Result<Vec<usize>> {
        let locked_by = self.page.u64_at(LOCKED_BY_AT);
        match self.lock.try_lock() {
            Ok(()) => locked_by.store(own_identity(), Ordering::Relaxed),
            Err(TryLockError::WouldBlock) => {
                let (mut absent, next) = self.survey(|_| true);
                let has_lock = |pid: &u64| *pid == locked_by.load(Ordering::Relaxed);
                absent.extend(next.iter().position(has_lock));
                return Ok(absent);
            }
            Err(TryLockError::Error(error)) => {
                return Err(Error::setup(
                    "lock the roster of the ranks",
                    error,
                    "see dmesg",
                ));
            }
        }
        let absent = self.form_locked();
        _ = self.lock.unlock();
        Ok(absent)
    }

    fn form_locked(&self) -> Vec<usize> {
        let current = self.current();
        let (mut absent, mut next) = self.survey(|_| true);
        let here = next.iter().filter(|&&pid| pid != 0).count();
        // A rank that was just lost comes back after a step: it may be that step that ends it.
        let was = |seat: usize| self.member(seat, current).load(Ordering::Relaxed);
        let is_back = |seat: usize| next[seat] != 0 && ![0, next[seat]].contains(&was(seat));
        let back: Vec<usize> = (0..self.seats).filter(|&seat| is_back(seat)).collect();
        if current > 0 && here - back.len() >= self.min_ranks() {
            back.iter().for_each(|&seat| next[seat] = 0);
        }
        if here + absent.len() < self.min_ranks() {
            // Lost ranks that are started again are needed.
            let comes = |&seat: &usize| next[seat] == 0 && self.read(seat, GONE) == 0;
            let comes = (0..self.seats).filter(comes);
            absent = comes.chain(absent.iter().copied()).collect();
            absent.sort_unstable();
            absent.dedup();
        }
        if absent.is_empty() && next.iter().any(|&pid| pid != 0) {
            for (seat, pid) in next.into_iter().enumerate() {
                self.member(seat, current + 1).store(pid, Ordering::Relaxed);
            }
            self.generation().store(current + 1, Ordering::Release);
            futex::wake(self.generation());
        }
        absent
    }

    /// The seats that are waited for among those that `counts`, and the processes of the next
    /// generation.
    fn survey(&self, counts: impl Fn(usize) -> bool) -> (Vec<usize>, Vec<u64>) {
        let current = self.current();
        let (mut absent, mut next) = (Vec::new(), vec![0; self.seats]);
        for seat in (0..self.seats).filter(|&seat| counts(seat)) {
            let [pid, waits, gone] = [PID, WAITS, GONE].map(|of_seat| self.read(seat, of_seat));
            let has_ended = pid == 0 || self.is_here(seat) && Process::open(pid as u32).has_ended();
            if has_ended {
                // All ranks that the launcher starts are in the first generation.
                absent.extend((current == 0 && gone == 0).then_some(seat));
                continue;
            }
            let is_member = pid == self.member(seat, current).load(Ordering::Relaxed);
            match waits > if is_member { u64::from(current) } else { 0 } {
                true => next[seat] = pid,
                false => absent.extend((is_member || current == 0).then_some(seat)),
            }
        }
        (absent, next)
    }

    /// The current generation. It cannot change before this process waits again.
    fn describe(&self, number: u32) -> Generation {
        let of = |seat, number| self.member(seat, number).load(Ordering::Relaxed);
        let (mut members, mut change) = (Vec::new(), Change::default());
        for seat in 0..self.seats {
            let [then, now] = [number - 1, number].map(|number| match number {
                0 => 0,
                _ => of(seat, number),
            });
            members.extend((now != 0).then_some((seat, now as u32)));
            if then != 0 && now != then {
                change.lost.push(LostRank {
                    rank: seat,
                    why: self.why(seat, then),
                });
            }
            if number > 1 && now != 0 && now != then {
                change.joined.push(seat);
            }
        }
        Generation {
            number,
            members,
            change,
        }
    }

    /// How this process of a seat ended. Ranks may see its end earlier than what started it.
    fn why(&self, seat: usize, process: u64) -> String {
        let (began, mut ended) = (Instant::now(), self.read(seat, ENDED));
        while ended & ENDED_PID != ended_pid(process) {
            if began.elapsed() > TOLD_WITHIN {
                return "its process ended".into();
            }
            std::thread::sleep(PERIOD);
            ended = self.read(seat, ENDED);
        }
        how(ended)
    }

    /// How the process of a seat ended that had this status.
    pub(crate) fn how_ended(&self, seat: usize, status: ExitStatus) -> String {
        let known = self.read(seat, ENDED) & !STATUS;
        how(known | u64::from(status.into_raw().cast_unsigned()) & STATUS)
    }

    /// Whether this process is of the current generation.
    pub(crate) fn is_member(&self, seat: usize) -> bool {
        let pid = self.member(seat, self.current()).load(Ordering::Relaxed);
        pid == own_identity()
    }

    /// Makes the segment of `generation` known, which this process has open as `fd`.
    pub(crate) fn publish_segment(&self, generation: u32, fd: RawFd) {
        let of = (u64::from(std::process::id()) << 32) | u64::from(fd.cast_unsigned());
        self.page.u64_at(SEGMENT_AT).store(of, Ordering::Relaxed);
        let published = self.page.u32_at(SEGMENT_AT + 8);
        published.store(generation, Ordering::Release);
        futex::wake(published);
    }

    /// The process that made the segment of `generation`, and its descriptor there; None until it
    /// is known.
    pub(crate) fn segment(&self, generation: u32) -> Option<(u32, RawFd)> {
        let published = self.page.u32_at(SEGMENT_AT + 8);
        let known = published.load(Ordering::Acquire);
        if known != generation {
            futex::wait(published, known, PERIOD);
            return None;
        }
        let of = self.page.u64_at(SEGMENT_AT).load(Ordering::Relaxed);
        Some(((of >> 32) as u32, (of as u32).cast_signed()))
    }
}

/// A process as seats have it: its number, and above that when it started (in ticks since the
/// boot), because a pod that is started again gives its processes the numbers they had.
fn identity(pid: u32) -> u64 {
    (process::started_ticks(pid).unwrap_or(0) << 32) | u64::from(pid)
}

/// That of this process.
fn own_identity() -> u64 {
    static OWN: OnceLock<u64> = OnceLock::new();
    *OWN.get_or_init(|| identity(std::process::id()))
}

/// What a seat says of the end of its process.
fn how(ended: u64) -> String {
    if ended & WAS_CUT_OFF != 0 {
        return "its host was cut off".into();
    }
    if ended & WAS_MISSED != 0 {
        return "killed because another host did not hear from it".into();
    }
    if ended & WAS_SILENT != 0 {
        return "killed because it showed no progress".into();
    }
    described(ExitStatus::from_raw((ended & STATUS) as i32))
}

/// A process's number, as `ENDED` has it.
fn ended_pid(process: u64) -> u64 {
    (process << ENDED_PID_AT) & ENDED_PID
}

/// An error if the generation whose ranks meet is over.
pub(crate) fn check(roster: &Option<Arc<Roster>>) -> Result<()> {
    let ended = roster.as_ref().and_then(|roster| roster.ended());
    ended.map_or(Ok(()), |cause| Err(Error::of_peer(cause)))
}

/// `killed by signal 9`, `ended with exit code 77`.
fn described(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("killed by signal {signal}"),
        (None, code) => format!("ended with exit code {}", code.unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests;
