//! How the bytes of one call travel through shared memory: small state machines that do what is
//! possible now and name the ranks they wait for.
//!
//! A collective: each rank announces its call, puts its part into its ring, and once all ranks
//! announced the same call takes the same range from all rings. A different call is a mismatch, and
//! no rank proceeds. A send and its receive work the same way between two ranks, but the sender
//! writes nothing before the receiver has arrived.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::element::{self, Reduction, Type};
use super::segment::{self, PAIR_BYTES, RING_BYTES, Segment, Words};
use crate::scheduler::Random;
use crate::work::{Address, Memory, Touched};

/// How much is taken from the rings at once.
const WINDOW_BYTES: u64 = 64 << 10;

/// What a call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallKind {
    AllReduce(Reduction),
    ReduceScatter(Reduction),
    Reduce(Reduction, usize),
    AllGather,
    Broadcast(usize),
    Send(usize),
    Receive(usize),
}

/// One call.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) name: &'static str,
    pub(super) kind: CallKind,
    pub(super) element: Type,
    /// As given: the smaller side of a reduce-scatter or all-gather.
    pub(super) count: u64,
    pub(super) from: Address,
    pub(super) to: Address,
}

/// Rank, size, and the shared memory.
#[derive(Clone, Copy)]
pub(super) struct Endpoint<'a> {
    pub(super) segment: &'a Segment,
    pub(super) rank: usize,
    /// As in [`super::comm::Comm`].
    pub(super) nvls: Option<u64>,
    /// The number of the group (or single call) among those with collectives, or among those with
    /// sends and receives between two ranks: ranks must group their calls alike.
    pub(super) group: u64,
}

/// What can be done now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Something: run it.
    Go,
    /// Nothing until these ranks have acted.
    Lacks(Vec<usize>),
    /// This rank called something else: it never continues.
    Mismatch(usize),
    /// It is over.
    Over,
}

impl Call {
    pub(super) fn describe(&self) -> String {
        let Self {
            name,
            kind,
            element,
            count,
            ..
        } = self;
        let element = element.name();
        match kind {
            CallKind::AllReduce(how) | CallKind::ReduceScatter(how) => {
                format!("{name} of {count} {element}, {}", how.name())
            }
            CallKind::Reduce(how, root) => format!(
                "{name} of {count} {element}, {}, to rank {root}",
                how.name()
            ),
            CallKind::AllGather => format!("{name} of {count} {element}"),
            CallKind::Broadcast(root) => format!("{name} of {count} {element} from rank {root}"),
            CallKind::Send(peer) => format!("{name} of {count} {element} to rank {peer}"),
            CallKind::Receive(peer) => format!("{name} of {count} {element} from rank {peer}"),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.count * self.element.bytes()
    }

    pub(super) fn is_collective(&self) -> bool {
        !matches!(self.kind, CallKind::Send(_) | CallKind::Receive(_))
    }

    /// The other rank of a send or receive.
    pub(super) fn peer(&self) -> Option<usize> {
        match self.kind {
            CallKind::Send(peer) | CallKind::Receive(peer) => Some(peer),
            _ => None,
        }
    }

    fn whole(&self, ranks: usize) -> u64 {
        self.bytes() * ranks as u64
    }

    /// The bytes that this rank reads and writes.
    pub(super) fn touched(&self, rank: usize, ranks: usize) -> Touched {
        let (bytes, whole) = (self.bytes(), self.whole(ranks));
        let (read, written) = match self.kind {
            CallKind::AllReduce(_) => (bytes, bytes),
            CallKind::ReduceScatter(_) => (whole, bytes),
            CallKind::Reduce(_, root) => (bytes, if rank == root { bytes } else { 0 }),
            CallKind::AllGather => (bytes, whole),
            CallKind::Broadcast(root) if rank == root => {
                (bytes, if self.to == self.from { 0 } else { bytes })
            }
            CallKind::Broadcast(_) | CallKind::Receive(_) => (0, bytes),
            CallKind::Send(_) => (bytes, 0),
        };
        let range = |start: Address, bytes: u64| {
            (bytes > 0)
                .then(|| start..start + bytes)
                .into_iter()
                .collect()
        };
        Touched {
            reads: range(self.from, read),
            writes: range(self.to, written),
            ..Touched::default()
        }
    }

    /// What must be equal on all ranks.
    fn words(&self, group: u64) -> Words {
        let (kind, how, root) = match self.kind {
            CallKind::AllReduce(how) => (1, how as u64, 0),
            CallKind::ReduceScatter(how) => (2, how as u64, 0),
            CallKind::Reduce(how, root) => (3, how as u64, root as u64),
            CallKind::AllGather => (4, 0, 0),
            CallKind::Broadcast(root) => (5, 0, root as u64),
            CallKind::Send(_) | CallKind::Receive(_) => {
                unreachable!("only collectives are compared with all ranks")
            }
        };
        [kind, self.count, self.element as u64, how, root, group]
    }

    /// Whether a rank made the same call in another group.
    pub(super) fn differs_in_group(&self, group: u64, theirs: &Words) -> bool {
        let own = self.words(group);
        let last = own.len() - 1;
        own[..last] == theirs[..last] && own[last] != theirs[last]
    }

    /// How much a rank puts into its ring.
    fn part(&self, rank: usize, ranks: usize) -> u64 {
        match self.kind {
            CallKind::ReduceScatter(_) => self.whole(ranks),
            CallKind::Broadcast(root) if rank != root => 0,
            _ => self.bytes(),
        }
    }

    /// Its simulated duration: a start-up time, and a ring's bytes per link at 50 bytes per
    /// nanosecond. The rate is arbitrary.
    pub(super) fn duration_ns(&self, ranks: usize) -> u64 {
        let (bytes, hops) = (self.bytes(), ranks as u64 - 1);
        let sent = match self.kind {
            CallKind::AllReduce(_) => 2 * bytes * hops / ranks as u64,
            CallKind::ReduceScatter(_) | CallKind::AllGather => bytes * hops,
            CallKind::Reduce(..)
            | CallKind::Broadcast(_)
            | CallKind::Send(_)
            | CallKind::Receive(_) => bytes,
        };
        4_000 + sent / 50
    }
}

/// How far a rank is with a collective.
#[derive(Debug, Default)]
pub(super) struct Collective {
    /// Its number, once entered.
    number: Option<u64>,
    is_matched: bool,
    published: u64,
    /// Of each contributing rank's part; equal for all.
    consumed: u64,
}

impl Collective {
    /// The number of the call among the collectives of the communicator, once it has come to it.
    pub(super) fn number(&self) -> Option<u64> {
        self.number
    }

    /// What can be done now, without doing it.
    pub(super) fn next(&self, place: Endpoint<'_>, call: &Call) -> Next {
        let ranks = place.segment.ranks();
        let Some(number) = self.number else {
            return Next::Go;
        };
        let own_part = call.part(place.rank, ranks);
        if self.published < own_part && ring_room(place) > 0 {
            return Next::Go;
        }
        if !self.is_matched {
            return meeting(place, call, number);
        }
        let length = self.length(place, call);
        if self.consumed < length {
            let window = self.window(place, call);
            if window > 0 {
                return Next::Go;
            }
            let wanted = self.consumed + call.element.bytes();
            let lacks = (0..ranks).filter(|rank| {
                call.part(*rank, ranks) > 0 && self.available(place, *rank) < wanted.min(length)
            });
            let mut lacks: Vec<usize> = lacks.collect();
            // Its own part may wait for room that others must make.
            if lacks == [place.rank] {
                lacks = crowding(place);
            }
            return Next::Lacks(lacks);
        }
        if self.published < own_part {
            Next::Lacks(crowding(place))
        } else {
            Next::Over
        }
    }

    /// How much must be taken in total from each contributing rank.
    fn length(&self, place: Endpoint<'_>, call: &Call) -> u64 {
        let ranks = place.segment.ranks();
        (0..ranks)
            .map(|rank| call.part(rank, ranks))
            .max()
            .unwrap_or(0)
    }

    /// How much of a rank's part has arrived.
    fn available(&self, place: Endpoint<'_>, rank: usize) -> u64 {
        let taken = place.segment.member(place.rank).consumed[rank].load(Relaxed);
        place.segment.member(rank).published.load(Acquire) - taken + self.consumed
    }

    /// How many more bytes all contributing ranks have, in whole elements.
    fn window(&self, place: Endpoint<'_>, call: &Call) -> u64 {
        let ranks = place.segment.ranks();
        let contributing = (0..ranks).filter(|rank| call.part(*rank, ranks) > 0);
        let length = self.length(place, call);
        let available = contributing
            .map(|rank| self.available(place, rank).min(length))
            .min()
            .unwrap_or(0);
        let window = (available - self.consumed).min(WINDOW_BYTES);
        window - window % call.element.bytes()
    }

    /// Does what can be done now.
    pub(super) fn go(
        &mut self,
        place: Endpoint<'_>,
        call: &Call,
        memory: &dyn Memory,
        text: &dyn Fn() -> Option<String>,
    ) {
        let ranks = place.segment.ranks();
        let own = place.segment.member(place.rank);
        if self.number.is_none() {
            let number = own.arrived.load(Relaxed);
            let parity = (number % 2) as usize;
            for (word, value) in own.calls[parity].iter().zip(call.words(place.group)) {
                word.store(value, Relaxed);
            }
            if let Some(text) = text() {
                own.set_text(parity, &text);
            }
            self.publish(place, call, memory);
            own.arrived.store(number + 1, Release);
            self.number = Some(number);
            return;
        }
        if self.published < call.part(place.rank, ranks) {
            self.publish(place, call, memory);
        }
        if !self.is_matched {
            let number = self.number.expect("it has come to it");
            self.is_matched = meeting(place, call, number) == Next::Go;
        }
        if self.is_matched {
            self.consume(place, call, memory);
        }
    }

    fn publish(&mut self, place: Endpoint<'_>, call: &Call, memory: &dyn Memory) {
        let own = place.segment.member(place.rank);
        let missing = call.part(place.rank, place.segment.ranks()) - self.published;
        let bytes = ring_room(place).min(missing);
        let at = own.published.load(Relaxed);
        if bytes == 0 {
            return;
        }
        let from = memory.host_pointer(call.from + self.published);
        // SAFETY: the operands were checked when this was queued and again when it began; the room
        // of the ring is this rank's until it says that there are bytes in it.
        unsafe { segment::put(place.segment.ring(place.rank), RING_BYTES, at, from, bytes) };
        self.published += bytes;
        own.published.store(at + bytes, Release);
    }

    fn consume(&mut self, place: Endpoint<'_>, call: &Call, memory: &dyn Memory) {
        let ranks = place.segment.ranks();
        let own = place.segment.member(place.rank);
        loop {
            let window = self.window(place, call);
            if window == 0 {
                return;
            }
            let contributing: Vec<usize> = (0..ranks)
                .filter(|rank| call.part(*rank, ranks) > 0)
                .collect();
            let stretch = self.wanted(place, call, window);
            if !stretch.is_empty() {
                let skipped = stretch.start - self.consumed;
                let fetch = |rank: &usize| {
                    let at = own.consumed[*rank].load(Relaxed) + skipped;
                    let mut bytes = vec![0; (stretch.end - stretch.start) as usize];
                    // SAFETY: these bytes were published, and their rank keeps them until they are
                    // consumed, which is below.
                    unsafe {
                        let ring = place.segment.ring(*rank).cast_const();
                        segment::take(ring, RING_BYTES, at, bytes.as_mut_ptr(), bytes.len() as u64);
                    }
                    bytes
                };
                let parts: Vec<Vec<u8>> = contributing.iter().map(fetch).collect();
                let number = self.number.expect("it has come to it");
                let turn = place
                    .nvls
                    .map_or(0, |seed| Random::new(seed ^ number).below(ranks));
                store(place, call, memory, &parts, (stretch.start, turn));
            }
            for rank in contributing {
                own.consumed[rank].fetch_add(window, Release);
            }
            self.consumed += window;
        }
    }

    /// The part of the next `window` bytes that this rank uses.
    fn wanted(&self, place: Endpoint<'_>, call: &Call, window: u64) -> std::ops::Range<u64> {
        let all = self.consumed..self.consumed + window;
        match call.kind {
            CallKind::ReduceScatter(_) => {
                let slice =
                    call.bytes() * place.rank as u64..call.bytes() * (place.rank as u64 + 1);
                let start = all.start.max(slice.start);
                start..all.end.min(slice.end).max(start)
            }
            CallKind::Reduce(_, root) if root != place.rank => all.start..all.start,
            CallKind::Broadcast(root) if root == place.rank && call.from == call.to => {
                all.start..all.start
            }
            _ => all,
        }
    }
}

/// Whether all ranks have come to collective `number`, with the same call.
fn meeting(place: Endpoint<'_>, call: &Call, number: u64) -> Next {
    let ranks = 0..place.segment.ranks();
    let late = |rank: &usize| place.segment.member(*rank).arrived.load(Acquire) <= number;
    let lacks: Vec<usize> = ranks.clone().filter(late).collect();
    if !lacks.is_empty() {
        return Next::Lacks(lacks);
    }
    let words = call.words(place.group);
    ranks
        .into_iter()
        .find(|rank| called(place, *rank, number) != words)
        .map_or(Next::Go, Next::Mismatch)
}

/// Stores what came from the ranks: `parts` are bytes from `at` on of each part. Sums begin `turn`
/// ranks later than in a ring.
fn store(
    place: Endpoint<'_>,
    call: &Call,
    memory: &dyn Memory,
    parts: &[Vec<u8>],
    (at, turn): (u64, usize),
) {
    let bytes = parts[0].len();
    let sources: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
    let (to, how, index_bytes, first) = match call.kind {
        CallKind::AllReduce(how) | CallKind::Reduce(how, _) => (call.to + at, how, at, 0),
        CallKind::ReduceScatter(how) => {
            let within = at - call.bytes() * place.rank as u64;
            (call.to + within, how, within, place.rank + 1)
        }
        CallKind::AllGather => {
            for (rank, part) in parts.iter().enumerate() {
                write(memory, call.to + call.bytes() * rank as u64 + at, part);
            }
            return;
        }
        CallKind::Broadcast(_) => return write(memory, call.to + at, &parts[0]),
        CallKind::Send(_) | CallKind::Receive(_) => unreachable!("these go over pairs"),
    };
    let mut folded = vec![0; bytes];
    element::fold(
        call.element,
        how,
        &sources,
        &mut folded,
        (index_bytes / call.element.bytes()) as usize,
        first + turn,
    );
    write(memory, to, &folded);
}

fn write(memory: &dyn Memory, to: Address, bytes: &[u8]) {
    // SAFETY: the destination was checked when the call was queued and again when it began, and
    // nothing else runs at the same time.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.host_pointer(to), bytes.len()) };
}

/// What another rank called as its collective `number`, to which it has come.
pub(super) fn called(place: Endpoint<'_>, rank: usize, number: u64) -> Words {
    let calls = &place.segment.member(rank).calls[(number % 2) as usize];
    std::array::from_fn(|word| calls[word].load(Relaxed))
}

/// Readable text.
pub(super) fn describe_words(words: &Words) -> String {
    let kind = match words[0] {
        1 => "ncclAllReduce",
        2 => "ncclReduceScatter",
        3 => "ncclReduce",
        4 => "ncclAllGather",
        5 => "ncclBroadcast",
        _ => "an unknown call",
    };
    let element = Type::from_raw(words[2] as i32).map_or("?", Type::name);
    let how = Reduction::from_raw(words[3] as i32).map_or("?", Reduction::name);
    match words[0] {
        1 | 2 => format!("{kind} of {} {element}, {how}", words[1]),
        3 => format!(
            "{kind} of {} {element}, {how}, to rank {}",
            words[1], words[4]
        ),
        5 => format!("{kind} of {} {element} from rank {}", words[1], words[4]),
        _ => format!("{kind} of {} {element}", words[1]),
    }
}

fn ring_room(place: Endpoint<'_>) -> u64 {
    RING_BYTES - (place.segment.member(place.rank).published.load(Relaxed) - slowest(place))
}

fn slowest(place: Endpoint<'_>) -> u64 {
    let consumed = |rank| place.segment.member(rank).consumed[place.rank].load(Acquire);
    (0..place.segment.ranks()).map(consumed).min().unwrap_or(0)
}

/// The rank that keeps this rank's ring full.
fn crowding(place: Endpoint<'_>) -> Vec<usize> {
    let slowest = slowest(place);
    let is_slowest =
        |rank: &usize| place.segment.member(*rank).consumed[place.rank].load(Acquire) == slowest;
    (0..place.segment.ranks()).filter(is_slowest).collect()
}

/// How far a rank is with a send or a receive.
#[derive(Debug, Default)]
pub(super) struct Exchange {
    number: Option<u64>,
    moved: u64,
}

impl Exchange {
    fn ends(place: Endpoint<'_>, call: &Call) -> (usize, usize, usize) {
        match call.kind {
            CallKind::Send(peer) => (place.rank, peer, peer),
            CallKind::Receive(peer) => (peer, place.rank, peer),
            _ => unreachable!("collectives go over the rings of the ranks"),
        }
    }

    /// The number of the call among those of its pair and direction, once it has come to it.
    pub(super) fn number(&self) -> Option<u64> {
        self.number
    }

    /// What can be done now, without doing it.
    pub(super) fn next(&self, place: Endpoint<'_>, call: &Call) -> Next {
        let Some(number) = self.number else {
            return Next::Go;
        };
        let (from, to, peer) = Self::ends(place, call);
        let pair = place.segment.pair(from, to);
        let is_send = matches!(call.kind, CallKind::Send(_));
        let come = if is_send { &pair.received } else { &pair.sent };
        if come.load(Acquire) <= number {
            return Next::Lacks(vec![peer]);
        }
        let theirs = if is_send { &pair.receives } else { &pair.sends };
        let theirs = &theirs[(number % 2) as usize];
        let expected = [call.count, call.element as u64, place.group];
        if theirs.each_ref().map(|word| word.load(Relaxed)) != expected {
            return Next::Mismatch(peer);
        }
        let is_over = pair.over.load(Acquire) > number;
        let can_move = if is_send {
            room(place, from, to)
        } else {
            stock(place, from, to)
        };
        let is_moved = self.moved >= call.bytes();
        if is_moved && is_over {
            Next::Over
        } else if is_moved && !is_send || !is_moved && can_move > 0 {
            Next::Go
        } else {
            Next::Lacks(vec![peer])
        }
    }

    /// Does what can be done now.
    pub(super) fn go(&mut self, place: Endpoint<'_>, call: &Call, memory: &dyn Memory) {
        let (from, to, _) = Self::ends(place, call);
        let pair = place.segment.pair(from, to);
        let is_send = matches!(call.kind, CallKind::Send(_));
        let (own, words) = if is_send {
            (&pair.sent, &pair.sends)
        } else {
            (&pair.received, &pair.receives)
        };
        let Some(number) = self.number else {
            let number = own.load(Relaxed);
            let words = &words[(number % 2) as usize];
            let values = [call.count, call.element as u64, place.group];
            for (word, value) in words.iter().zip(values) {
                word.store(value, Relaxed);
            }
            own.store(number + 1, Release);
            self.number = Some(number);
            return;
        };
        if self.next(place, call) != Next::Go {
            return;
        }
        let missing = call.bytes() - self.moved;
        let ring = place.segment.pair_ring(from, to);
        if is_send {
            let bytes = room(place, from, to).min(missing);
            let at = pair.published.load(Relaxed);
            let source = memory.host_pointer(call.from + self.moved);
            // SAFETY: as in `Collective::publish`; the room is the sender's.
            unsafe { segment::put(ring, PAIR_BYTES, at, source, bytes) };
            pair.published.store(at + bytes, Release);
            self.moved += bytes;
            return;
        }
        let bytes = stock(place, from, to).min(missing);
        let at = pair.consumed.load(Relaxed);
        // SAFETY: the destination was checked as in `write`; the stock is the receiver's until it
        // says that it has taken it.
        unsafe {
            segment::take(
                ring,
                PAIR_BYTES,
                at,
                memory.host_pointer(call.to + self.moved),
                bytes,
            )
        };
        pair.consumed.store(at + bytes, Release);
        self.moved += bytes;
        if self.moved == call.bytes() {
            pair.over.store(number + 1, Release);
        }
    }
}

fn room(place: Endpoint<'_>, from: usize, to: usize) -> u64 {
    let pair = place.segment.pair(from, to);
    PAIR_BYTES - (pair.published.load(Acquire) - pair.consumed.load(Acquire))
}

fn stock(place: Endpoint<'_>, from: usize, to: usize) -> u64 {
    PAIR_BYTES - room(place, from, to)
}
