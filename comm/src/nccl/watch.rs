//! A thread a group that sees when its calls hang, go astray or fail, and ends the job with the reason: it reads what the device tells
//! (`ddp_kernels::progress`), tells it to the ranks of its host (`shared/gpu_page.rs`), and compares. It takes no lock that a call may hold
//! and asks nothing of CUDA, so no stuck thread, driver or device can keep it from ending the process.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ddp_kernels::progress::Board;
use ddp_kernels::stream::Event;

use super::communicator::Communicator;
use super::compare::{self, Apart};
use crate::error::{Error, Ranks, Result, Seconds};
use crate::failure::{Failure, GRACE};
use crate::shared::{CHANNELS, COLLECTIVES, GpuPages, LANES, Lane, PAIRS, Seen};
use crate::waited::Waited;
use crate::world::World;

/// How often the watch looks.
const PERIOD: Duration = Duration::from_millis(100);
/// How much longer a rank waits that misses nobody on its host, where there are other hosts: one of them may know whom to name.
pub(super) const ELSEWHERE: Duration = Duration::from_secs(2);
/// A rank that hung too long, or did something else.
const EXIT_LATE: u8 = 77;
const HINT: &str = "See whether they are stopped, swapping or stuck; --timeout-s sets how long to wait.";
const EXIT_APART: u8 = 78;

/// What a group's calls and its watch both need.
#[derive(Debug)]
pub(super) struct Common {
    pub(super) failure: Arc<Failure>,
    pub(super) pages: GpuPages,
    pub(super) channel: usize,
    pub(super) group: &'static str,
    pub(super) local_rank: usize,
    /// The ranks of this host, by local rank.
    ranks: Vec<usize>,
    size: usize,
    pub(super) timeout: Duration,
    /// Calls that may take another time.
    patience: Mutex<Vec<Patience>>,
    /// The call with which this rank's host is in NCCL, if it is.
    host: Mutex<HostCall>,
    of_processes: bool,
}

/// A call that may take another time than the group's calls do.
#[derive(Debug)]
struct Patience {
    key: u32,
    timeout: Duration,
    /// After the last such call on the device.
    end: Option<Event>,
    /// A graph holds such a call, and may be launched at any time.
    is_captured: bool,
}

/// Calls that this rank's host gives to NCCL.
#[derive(Clone, Copy, Debug, Default)]
struct HostCall {
    /// The number of the last one.
    number: u64,
    is_under_way: bool,
    key: u32,
    limit: Duration,
}

/// For how long the host has been in one call.
#[derive(Debug, Default)]
struct HostWait {
    number: u64,
    waited: Duration,
}

impl HostWait {
    /// How long that is, `passed` after the last look. Time in which the device is in a call is the device's.
    fn after(&mut self, now: HostCall, device_is_in_one: bool, passed: Duration) -> Duration {
        let goes_on = now.is_under_way && !device_is_in_one && now.number == self.number;
        self.waited = if goes_on { self.waited + passed } else { Duration::ZERO };
        self.number = now.number;
        self.waited
    }
}

/// How far a rank is with joining or leaving: it calls NCCL; it has joined; it leaves; it has left, and waits for nobody.
pub(super) const AT_IT: u64 = 1;
pub(super) const JOINED: u64 = 2;
const LEAVES: u64 = 3;
const GONE: u64 = 4;

impl Common {
    pub(super) fn new(world: &World, group: &'static str, channel: usize, of_processes: bool) -> Common {
        let failure = Arc::clone(world.failure());
        let pages = GpuPages::new(&failure.board, channel);
        let mut ranks: Vec<usize> = (0..failure.local_size).collect();
        // Ranks that are threads have no peers of other processes, and are those of the host in order.
        for peer in &failure.peers {
            ranks[peer.local_rank] = peer.rank;
        }
        ranks[failure.local_rank] = failure.rank;
        let (local_rank, size) = (failure.local_rank, failure.size);
        let (timeout, patience, host) = (world.timeout(), Mutex::default(), Mutex::default());
        Common { failure, pages, channel, group, local_rank, ranks, size, timeout, patience, host, of_processes }
    }

    /// The other ranks of this host: local rank and rank.
    pub(super) fn others(&self) -> impl Iterator<Item = (usize, usize)> {
        let others = self.ranks.iter().copied().enumerate();
        others.filter(|(local_rank, _)| *local_rank != self.local_rank)
    }

    /// Whether all ranks of the job are on this host.
    pub(super) fn knows_all(&self) -> bool {
        self.ranks.len() == self.size
    }

    /// The call `key` may take so long. One of another call of that key which is not over yet is not cut short.
    pub(super) fn wait_for(&self, key: u32, timeout: Duration, is_captured: bool) {
        let mut all = self.patience.lock().unwrap_or_else(PoisonError::into_inner);
        match all.iter().position(|known| known.key == key) {
            Some(index) => {
                let known = &mut all[index];
                let is_over = !known.is_captured && known.end.as_ref().is_none_or(Event::is_done);
                known.timeout = if is_over { timeout } else { known.timeout.max(timeout) };
                known.is_captured |= is_captured;
                if known.timeout == self.timeout && !known.is_captured {
                    all.swap_remove(index);
                }
            }
            None if timeout == self.timeout => {}
            None => all.push(Patience { key, timeout, end: None, is_captured }),
        }
    }

    /// The call `key` of `wait_for` is over with the event of `record`, which is asked for only if it matters.
    pub(super) fn until(&self, key: u32, record: impl FnOnce() -> Result<Event>) -> Result<()> {
        let mut all = self.patience.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = all.iter_mut().find(|known| known.key == key) {
            known.end = Some(record()?);
        }
        Ok(())
    }

    fn patience_of(&self, key: u32) -> Duration {
        let patience = self.patience.lock().unwrap_or_else(PoisonError::into_inner);
        patience.iter().find(|known| known.key == key).map_or(self.timeout, |known| known.timeout)
    }

    /// This rank's host gives the call `key` to NCCL, until `host_left`.
    pub(super) fn host_enters(&self, key: u32, limit: Duration) {
        let mut host = self.host.lock().unwrap_or_else(PoisonError::into_inner);
        *host = HostCall { number: host.number + 1, is_under_way: true, key, limit };
    }

    pub(super) fn host_left(&self) {
        self.host.lock().unwrap_or_else(PoisonError::into_inner).is_under_way = false;
    }

    /// Says that this rank leaves. Whether all ranks do, and are all known here; waits so long for them to come to it.
    pub(super) fn all_leave(&self, wait_max: Duration) -> bool {
        self.pages.set_stage(self.local_rank, LEAVES);
        let started = Instant::now();
        while self.knows_all() && !self.failure.board.is_aborted() {
            let stages: Vec<u64> = self.others().map(|(other, _)| self.pages.stage(other)).collect();
            if stages.iter().all(|&stage| stage == LEAVES) {
                return true;
            }
            if stages.contains(&GONE) || started.elapsed() >= wait_max {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.pages.set_stage(self.local_rank, GONE);
        false
    }
}

/// The watch of one group. Ends when it is stopped, or when nobody has it any more.
#[derive(Debug)]
pub(super) struct Watch {
    running: Mutex<Option<(Sender<()>, JoinHandle<()>)>>,
}

/// The watches of a world. Some outlive their groups, whose calls graphs hold.
#[derive(Debug, Default)]
pub(crate) struct Watches(Mutex<Vec<Arc<Watch>>>);

impl Watches {
    pub(super) fn add(&self, watch: &Arc<Watch>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(watch));
    }

    /// Ends them all: they speak to other ranks by what the world has.
    pub(crate) fn stop(&self) {
        let all = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        all.iter().for_each(|watch| watch.stop());
    }
}

impl Watch {
    pub(super) fn start(common: Arc<Common>, communicator: Arc<Communicator>, board: Board) -> Result<Watch> {
        let group = common.group;
        let (stop, stopped) = mpsc::channel::<()>();
        let body = move || {
            let mut looks = Looks::new(common, communicator, board);
            let mut waited = Waited::new();
            let mut total = Duration::ZERO;
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(PERIOD) {
                let now = waited.after(PERIOD);
                looks.look(now - total);
                total = now;
            }
            looks.compare();
        };
        let thread = std::thread::Builder::new().name("nccl watch".into()).spawn(body);
        let thread = thread.map_err(|error| Error::Setup {
            action: format!("watch over group {group}"),
            reason: error.to_string(),
            way_out: "Raise the limit on threads (ulimit -u).".into(),
        })?;
        Ok(Watch { running: Mutex::new(Some((stop, thread))) })
    }

    /// Ends it, after it has compared once more.
    pub(super) fn stop(&self) {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((stop, thread)) = running {
            drop(stop);
            _ = thread.join();
        }
    }
}

/// One watch at work.
struct Looks {
    common: Arc<Common>,
    communicator: Arc<Communicator>,
    board: Board,
    /// For how long each lane has been in which call.
    waits: [(u32, Duration); LANES],
    /// For how long the host has been in which call.
    host: HostWait,
    /// For how long the job has been over.
    aborted: Duration,
}

impl Looks {
    fn new(common: Arc<Common>, communicator: Arc<Communicator>, board: Board) -> Looks {
        let (waits, host, aborted) = (Default::default(), HostWait::default(), Duration::ZERO);
        Looks { common, communicator, board, waits, host, aborted }
    }

    /// Looks once, `passed` after the last time.
    fn look(&mut self, passed: Duration) {
        let common = Arc::clone(&self.common);
        if common.failure.board.has_left(common.local_rank) {
            return;
        }
        if let Some(cause) = common.failure.cause() {
            // The host's thread may be in a call that never ends, and nobody else may be watching.
            self.aborted += passed;
            if common.of_processes && self.aborted > GRACE + PERIOD {
                common.failure.end(cause.exit_code);
            }
            return;
        }
        let (mine, others) = self.compare();
        for (lane, now) in mine.lanes.into_iter().enumerate() {
            let wait = &mut self.waits[lane];
            if now.begun == now.ended || now.begun != wait.0 {
                *wait = (now.begun, Duration::ZERO);
                continue;
            }
            wait.1 += passed;
            let (waited, limit) = (wait.1, common.patience_of(now.call));
            if waited >= limit {
                let (text, names_ranks) = self.tell_late(lane, &mine, &others, limit);
                if names_ranks || common.knows_all() || waited >= limit.saturating_add(ELSEWHERE) {
                    common.failure.fail(text, EXIT_LATE);
                }
            }
        }
        self.look_at_host(&mine, &others, passed);
        if let Some(fault) = self.communicator.asynchronous_fault() {
            let what = self.under_way(&mine);
            let error = self.communicator.functions.error(what, fault);
            common.failure.fail(error.to_string(), error.exit_code());
        }
    }

    /// Tells the others how far this rank is, and ends the job if one of them did something else. What all told, unless all is over.
    fn compare(&self) -> (Seen, Vec<(usize, Seen)>) {
        let common = &self.common;
        let mine = self.own();
        common.pages.publish(common.local_rank, &mine);
        let others: Vec<(usize, Seen)> = common.others().map(|(other, _)| (other, common.pages.read(other))).collect();
        let is_over = common.failure.board.has_left(common.local_rank) || common.failure.board.is_aborted();
        if let Some(apart) = compare::apart(&mine, &others).filter(|_| !is_over) {
            common.failure.fail(self.tell_apart(&apart), EXIT_APART);
        }
        (mine, others)
    }

    /// The host may be kept in NCCL before the device has heard of the call: NCCL makes connections when they are first used, also while a
    /// graph is captured. Where the device is in a call, that one's time counts: the host may wait for room behind it.
    fn look_at_host(&mut self, mine: &Seen, others: &[(usize, Seen)], passed: Duration) {
        let common = Arc::clone(&self.common);
        let now = *common.host.lock().unwrap_or_else(PoisonError::into_inner);
        let is_in_call = mine.lanes.iter().any(|lane| lane.begun != lane.ended);
        let waited = self.host.after(now, is_in_call, passed);
        if now.is_under_way
            && waited >= now.limit.saturating_add(if common.knows_all() { Duration::ZERO } else { ELSEWHERE })
        {
            let what = self.name(common.local_rank, now.key).0;
            let places: Vec<String> =
                common.others().map(|(other, _)| self.whereabouts(other, COLLECTIVES, others)).collect();
            let (places, within) = (places.join("; "), Seconds(now.limit));
            let text = format!("{what}: NCCL did not return from it within {within}. {places}. {HINT}");
            common.failure.fail(text, EXIT_LATE);
        }
    }

    /// What the own device tells.
    fn own(&self) -> Seen {
        let lane = |lane: usize| {
            // In this order: what has ended has begun.
            let ended = self.board.ended(lane);
            let (begun, call) = self.board.begun(lane);
            Lane { begun, call, ended }
        };
        Seen { lanes: std::array::from_fn(lane), ring: self.board.ring(COLLECTIVES).collect() }
    }

    /// What a rank calls a call of its own, or another's.
    fn name(&self, local_rank: usize, key: u32) -> (String, Option<usize>) {
        let pages = &self.common.pages;
        pages.called(local_rank, key).unwrap_or_else(|| (format!("a call of group {}", self.common.group), None))
    }

    /// What the device is in: for an error of which NCCL does not say where it came from.
    fn under_way(&self, mine: &Seen) -> String {
        let in_it = mine.lanes.iter().find(|lane| lane.begun != lane.ended);
        match in_it {
            Some(lane) => self.name(self.common.local_rank, lane.call).0,
            None => format!("group {}, between calls", self.common.group),
        }
    }

    fn tell_apart(&self, apart: &Apart) -> String {
        let Common { ranks, local_rank, group, .. } = &*self.common;
        let (ours, theirs) = (self.name(*local_rank, apart.mine.call).0, self.name(apart.peer, apart.theirs.call).0);
        let (peer, number) = (ranks[apart.peer], apart.mine.number);
        let place = place(apart.mine.place);
        let rest = "All ranks must make the same calls in the same order, with tensors of the same name and length: look for a condition \
                    that differs between ranks.";
        if apart.was_before() {
            return format!(
                "group {group}: rank {peer} made other collectives than this rank, before {ours} (number {number}). {rest}"
            );
        }
        format!("{ours}, collective number {number} of group {group}{place}: rank {peer} is at {theirs}. {rest}")
    }

    /// What to say of a call that takes too long, and whether that names the ranks to blame.
    fn tell_late(&self, lane: usize, mine: &Seen, others: &[(usize, Seen)], limit: Duration) -> (String, bool) {
        let common = &*self.common;
        let now = mine.lanes[lane];
        let (what, peer) = self.name(common.local_rank, now.call);
        let told = mine.ring.iter().find(|told| lane == COLLECTIVES && told.number == now.begun);
        let kind = if lane == PAIRS { "send or receive" } else { "collective" };
        let place = told.map(|told| place(told.place)).unwrap_or_default();
        let what = format!("{what}, {kind} number {} on the device{place}", now.begun);
        let within = Seconds(limit);
        // Whether a rank that is in a send or receive is in the right one, nobody can tell from here.
        let (asked, missing): (Vec<usize>, Vec<usize>) = if lane == PAIRS {
            let asked = others.iter().filter(|(other, _)| peer.is_none_or(|peer| common.ranks[*other] == peer));
            let is_in_one = |seen: &Seen| seen.lanes[PAIRS].begun != seen.lanes[PAIRS].ended;
            let missing = asked.clone().filter(|(_, seen)| !is_in_one(seen)).map(|(other, _)| *other);
            (asked.clone().map(|(other, _)| *other).collect(), missing.collect())
        } else {
            let missing = compare::missing(mine, others);
            (missing.clone(), missing)
        };
        let ranks: Vec<usize> = missing.iter().map(|&other| common.ranks[other]).collect();
        let names_ranks = !ranks.is_empty() && (lane == COLLECTIVES || peer.is_some());
        let result = match (ranks.is_empty(), peer) {
            _ if names_ranks => format!("{} did not arrive within {within}", Ranks(&ranks)),
            (true, Some(peer)) if asked.is_empty() => format!("rank {peer} did not arrive within {within}"),
            _ => format!("not done within {within}"),
        };
        let places: Vec<String> = asked.iter().map(|&other| self.whereabouts(other, lane, others)).collect();
        let places = if places.is_empty() { String::new() } else { format!(" {}.", places.join("; ")) };
        let is_in_all = lane == COLLECTIVES && missing.is_empty();
        let rest = match (is_in_all, common.knows_all()) {
            (true, true) => "All ranks have come to it: NCCL or a GPU does not get on. NCCL_DEBUG=INFO shows what NCCL does, nvidia-smi -q the GPUs; \
                 --timeout-s sets how long to wait."
                .to_string(),
            (true, false) => format!("All ranks of this host have come to it; of ranks of other hosts nothing is known here. {HINT}"),
            (false, true) => HINT.to_string(),
            (false, false) => format!("Of ranks of other hosts nothing is known here. {HINT}"),
        };
        (format!("{what}: {result}.{places} {rest}"), names_ranks)
    }

    /// Where another rank is, on its device and on its host, for a call of `lane` in which it is missed.
    fn whereabouts(&self, other: usize, lane: usize, others: &[(usize, Seen)]) -> String {
        let common = &*self.common;
        let lanes = others.iter().find(|(local_rank, _)| *local_rank == other).map(|(_, seen)| seen.lanes);
        let lanes = lanes.unwrap_or_default();
        let state = |index: usize, kind: &str| {
            let Lane { begun, call, ended } = lanes[index];
            let name = || self.name(other, call).0;
            match begun {
                0 => None,
                _ if begun != ended => Some(format!("in {}, {kind} number {begun}", name())),
                _ if index == lane => Some(format!("past {}, {kind} number {begun}", name())),
                _ => None,
            }
        };
        let states: Vec<String> =
            [state(COLLECTIVES, "collective"), state(PAIRS, "send or receive")].into_iter().flatten().collect();
        let device = if states.is_empty() { "at the start".to_string() } else { states.join(" and ") };
        let calls = (0..CHANNELS).filter_map(|channel| common.failure.board.activity(other, channel));
        let now: Vec<String> = calls.filter(|call| call.in_progress).map(|call| call.to_string()).collect();
        let host = if now.is_empty() { "no call".to_string() } else { now.join(" and ") };
        format!("Rank {}: its device is {device}; its host is in {host}", common.ranks[other])
    }
}

/// Where in a graph, if in one.
fn place(place: u32) -> String {
    if place == 0 { String::new() } else { format!(" (number {place} of its graph)") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_time_in_one_call_of_the_host_counts_and_none_in_which_the_device_is_in_one() {
        let period = Duration::from_millis(100);
        let call = |number: u64, is_under_way: bool| HostCall { number, is_under_way, ..HostCall::default() };
        let mut host = HostWait::default();
        assert_eq!(host.after(call(0, false), false, period), Duration::ZERO);
        // When it began since the last look nobody knows.
        assert_eq!(host.after(call(1, true), false, period), Duration::ZERO);
        assert_eq!(host.after(call(1, true), false, period), period);
        assert_eq!(host.after(call(1, true), false, 3 * period), 4 * period);
        assert_eq!(host.after(call(2, true), false, period), Duration::ZERO);
        assert_eq!(host.after(call(2, true), false, period), period);
        assert_eq!(host.after(call(2, true), true, period), Duration::ZERO);
        assert_eq!(host.after(call(2, true), false, period), period);
        assert_eq!(host.after(call(2, false), false, period), Duration::ZERO);
    }
}
