//! A thread a group that sees when its calls hang, go astray or fail, and ends the job with the reason: it reads what the device tells
//! (`ddp_kernels::progress`), tells it to the ranks of its host (`shared/gpu_page.rs`), and compares. It takes no lock that a call may hold
//! and asks nothing of CUDA, so no stuck thread, driver or device can keep it from ending the process.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ddp_kernels::progress::Board;

use super::Communicator;
use super::compare::{self, Apart};
use crate::error::{Error, Ranks, Result, Seconds};
use crate::failure::{Failure, GRACE};
use crate::shared::{CHANNELS, COLLECTIVES, GpuPages, LANES, Lane, PAIRS, Seen};
use crate::waited::Waited;
use crate::world::World;

/// How often the watch looks.
const PERIOD: Duration = Duration::from_millis(100);
/// A rank that hung too long, or did something else.
const EXIT_LATE: u8 = 77;
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
    /// Calls that may take another time, by key.
    patience: Mutex<Vec<(u32, Duration)>>,
    of_processes: bool,
}

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
        let (timeout, patience) = (world.timeout(), Mutex::default());
        Common { failure, pages, channel, group, local_rank, ranks, size, timeout, patience, of_processes }
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

    /// The call `key` may take so long, from now on.
    pub(super) fn wait_for(&self, key: u32, timeout: Duration) {
        let mut patience = self.patience.lock().unwrap_or_else(PoisonError::into_inner);
        match patience.iter_mut().find(|(known, _)| *known == key) {
            Some(known) => known.1 = timeout,
            None if timeout == self.timeout => {}
            None => patience.push((key, timeout)),
        }
    }

    fn patience_of(&self, key: u32) -> Duration {
        let patience = self.patience.lock().unwrap_or_else(PoisonError::into_inner);
        patience.iter().find(|(known, _)| *known == key).map_or(self.timeout, |(_, timeout)| *timeout)
    }
}

/// The watch of one group. Ends when dropped.
pub(super) struct Watch {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub(super) fn start(common: Arc<Common>, communicator: Arc<Communicator>, board: Board) -> Result<Watch> {
        let group = common.group;
        let (stop, stopped) = mpsc::channel::<()>();
        let body = move || {
            let mut looks = Looks { common, communicator, board, waits: Default::default(), aborted: Duration::ZERO };
            let mut waited = Waited::new();
            let mut total = Duration::ZERO;
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(PERIOD) {
                let now = waited.after(PERIOD);
                looks.look(now - total);
                total = now;
            }
        };
        let thread = std::thread::Builder::new().name("nccl watch".into()).spawn(body);
        let thread = thread.map_err(|error| Error::Setup {
            action: format!("watch over group {group}"),
            reason: error.to_string(),
            way_out: "Raise the limit on threads (ulimit -u).".into(),
        })?;
        Ok(Watch { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
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
    /// For how long the job has been over.
    aborted: Duration,
}

impl Looks {
    /// Looks once, `passed` after the last time.
    fn look(&mut self, passed: Duration) {
        let common = Arc::clone(&self.common);
        let mine = self.own();
        common.pages.publish(common.local_rank, &mine);
        if let Some(cause) = common.failure.cause() {
            // The host's thread may be in a call that never ends, and nobody else may be watching.
            self.aborted += passed;
            if common.of_processes && self.aborted > GRACE + PERIOD {
                common.failure.end(cause.exit_code);
            }
            return;
        }
        let others: Vec<(usize, Seen)> = common.others().map(|(other, _)| (other, common.pages.read(other))).collect();
        if let Some(apart) = compare::apart(&mine, &others) {
            common.failure.fail(self.tell_apart(&apart), EXIT_APART);
        }
        for (lane, now) in mine.lanes.into_iter().enumerate() {
            let wait = &mut self.waits[lane];
            if now.begun == now.ended || now.begun != wait.0 {
                *wait = (now.begun, Duration::ZERO);
                continue;
            }
            wait.1 += passed;
            let limit = common.patience_of(now.call);
            if wait.1 >= limit {
                common.failure.fail(self.tell_late(lane, &mine, &others, limit), EXIT_LATE);
            }
        }
        if let Some(fault) = self.communicator.asynchronous_fault() {
            let what = self.under_way(&mine);
            let error = self.communicator.functions.error(what, fault);
            common.failure.fail(error.to_string(), error.exit_code());
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

    fn tell_late(&self, lane: usize, mine: &Seen, others: &[(usize, Seen)], limit: Duration) -> String {
        const HINT: &str = "See whether they are stopped, swapping or stuck; --timeout-s sets how long to wait.";
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
        let result = match (ranks.is_empty(), peer) {
            (false, _) if lane == COLLECTIVES || peer.is_some() => {
                format!("{} did not arrive within {within}", Ranks(&ranks))
            }
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
        format!("{what}: {result}.{places} {rest}")
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
