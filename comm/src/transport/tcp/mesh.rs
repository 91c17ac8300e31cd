//! Messages between ranks of several hosts over TCP: a socket to each rank of another host.
//!
//! Whoever waits for a message moves the bytes of all: there is no thread. Bytes pass between the
//! socket and the caller's memory without a copy, unless they come before someone waits for them. A
//! socket that closes without a farewell is a rank that is lost.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ddp_kernels::panics;

use crate::error::{Error, Result};
use crate::transport::frames::{Frames, HEAD_BYTES_MAX, READ_BYTES, wait};

/// The most bytes of one message.
pub(crate) const MESSAGE_BYTES_MAX: usize = 1 << 20;
/// Before its bytes a message has its channel and its tag.
const HEADER_BYTES: usize = 8;
/// The most bytes that a socket carries at once.
pub(crate) const FRAME_BYTES_MAX: usize = HEADER_BYTES + MESSAGE_BYTES_MAX;
/// How many buffers for messages that come early are kept.
const SPARE_MAX: usize = 32;
/// The channel of a farewell.
const FAREWELL: u32 = u32::MAX;
/// When a call fails that waits for a rank whose connection is lost: the watch, which knows more,
/// ends the job before.
const LOST_MAX: Duration = Duration::from_secs(3);

/// All ranks of a job that is on several hosts, seen from one of them.
#[derive(Debug)]
pub(crate) struct Mesh {
    rank: usize,
    size: usize,
    next_channel: AtomicU32,
    traffic: Mutex<Traffic>,
}

#[derive(Debug, Default)]
struct Traffic {
    /// By rank; None for ranks of this host.
    peers: Vec<Option<MeshPeer>>,
    /// What has come before anyone waited for it.
    inbox: VecDeque<Message>,
    /// Memory for more of these.
    spare: Vec<Vec<u8>>,
    letters: u64,
}

/// The channel and the tag of a message, as they are sent.
type Key = [u8; HEADER_BYTES];

fn key(channel: u32, tag: u32) -> Key {
    (u64::from(tag) << 32 | u64::from(channel)).to_le_bytes()
}

#[derive(Debug)]
struct Message {
    from: usize,
    key: Key,
    bytes: Vec<u8>,
}

/// A rank of another host.
#[derive(Debug)]
struct MeshPeer {
    frames: Frames,
    host: String,
    /// Letters that wait for a message, in order.
    posted: VecDeque<Posted>,
    /// The letter that the arriving message fills. Until it is full, only that letter reads the
    /// socket.
    receiver: Option<u64>,
    has_left: bool,
    lost: Option<Instant>,
}

#[derive(Debug)]
struct Posted {
    letter: u64,
    key: Key,
    count: usize,
}

impl Mesh {
    /// `peers` has a socket to each rank of another host, with the host's name.
    pub(crate) fn new(rank: usize, peers: Vec<Option<(Frames, String)>>) -> Mesh {
        let peer = |(frames, host)| MeshPeer {
            frames,
            host,
            posted: VecDeque::new(),
            receiver: None,
            has_left: false,
            lost: None,
        };
        let peers: Vec<_> = peers.into_iter().map(|it| it.map(peer)).collect();
        Mesh {
            rank,
            size: peers.len(),
            next_channel: AtomicU32::new(0),
            traffic: Mutex::new(Traffic {
                peers,
                ..Traffic::default()
            }),
        }
    }

    /// What has been sent and received, after moving what can be moved at once.
    fn moved(&self) -> MutexGuard<'_, Traffic> {
        let mut traffic = panics::lock(&self.traffic);
        (0..self.size).for_each(|rank| traffic.advance(rank));
        traffic
    }

    /// Says farewell to all, and waits until all have done so, at most `limit`.
    pub(crate) fn leave(&self, limit: Duration) {
        let started = Instant::now();
        let mut traffic = self.moved();
        let peers = traffic.peers.iter_mut().flatten();
        peers.for_each(|peer| peer.frames.queue(&key(FAREWELL, 0)));
        let is_gone =
            |peer: &MeshPeer| (peer.has_left && peer.frames.is_sent()) || peer.frames.is_closed();
        while started.elapsed() < limit {
            (0..self.size).for_each(|rank| traffic.advance(rank));
            if traffic.peers.iter().flatten().all(is_gone) {
                return;
            }
            let waiting = traffic.peers.iter().flatten().filter(|peer| !is_gone(peer));
            wait(
                waiting.map(|peer| peer.frames.entry()),
                Duration::from_millis(50),
            );
        }
    }
}

impl MeshPeer {
    /// If a letter waits for the next message, makes it the receiver.
    fn find_receiver(&mut self) {
        let Some((length, key)) = self.frames.head().filter(|_| self.receiver.is_none()) else {
            return;
        };
        let next = self.posted.iter().position(|it| it.key == key);
        let posted = next.and_then(|index| self.posted.remove(index));
        // One of another length goes to the inbox, where the letter finds it and fails.
        if let Some(posted) = posted.filter(|it| HEADER_BYTES + it.count == length) {
            self.receiver = Some(posted.letter);
            self.frames.begin();
        }
    }

    /// How much to read before it is known to whom it goes: of a long message only its head.
    fn staged_max(&self) -> usize {
        match (self.frames.head(), self.posted.front()) {
            (Some((length, _)), _) => HEAD_BYTES_MAX + length.min(FRAME_BYTES_MAX),
            (None, Some(posted)) if posted.count > READ_BYTES / 2 => HEAD_BYTES_MAX,
            _ => READ_BYTES,
        }
    }
}

impl Traffic {
    /// Moves what can be moved at once from and to a rank.
    fn advance(&mut self, rank: usize) {
        let Some(peer) = &mut self.peers[rank] else {
            return;
        };
        peer.find_receiver();
        peer.frames.advance_to(peer.staged_max());
        loop {
            peer.find_receiver();
            if peer.receiver.is_some() {
                break;
            }
            let Some(message) = peer.frames.next() else {
                break;
            };
            let Some((key, content)) = message.split_first_chunk::<HEADER_BYTES>() else {
                continue;
            };
            if *key == self::key(FAREWELL, 0) {
                peer.has_left = true;
                continue;
            }
            let mut bytes = self.spare.pop().unwrap_or_default();
            bytes.clear();
            bytes.extend_from_slice(content);
            let (from, key) = (rank, *key);
            self.inbox.push_back(Message { from, key, bytes });
        }
        if peer.frames.is_closed() && !peer.has_left {
            peer.lost.get_or_insert_with(Instant::now);
        }
    }

    /// Copies the next message in the inbox from `from` with `key` to `into`, if there is one.
    fn take(&mut self, from: usize, key: Key, into: &mut [u8]) -> Result<bool> {
        let is_next = |it: &Message| (it.from, it.key) == (from, key);
        let Some(index) = self.inbox.iter().position(is_next) else {
            return Ok(false);
        };
        let (expected, got) = (into.len(), self.inbox[index].bytes.len());
        if got != expected {
            let reason = format!("expected {expected} bytes from rank {from}, got {got}");
            let help = "run the same build of this program on all ranks";
            return Err(Error::setup("move data between hosts", reason, help));
        }
        into.copy_from_slice(&self.inbox[index].bytes);
        let message = self.inbox.remove(index);
        let has_room = self.spare.len() < SPARE_MAX;
        self.spare
            .extend(message.map(|it| it.bytes).filter(|_| has_room));
        Ok(true)
    }

    /// An error if the connection to `rank` has been lost for a while.
    fn check(&self, rank: usize) -> Result<()> {
        let peer = self.peers.get(rank).and_then(Option::as_ref);
        match peer.filter(|peer| peer.lost.is_some_and(|since| since.elapsed() > LOST_MAX)) {
            None => Ok(()),
            Some(peer) => {
                let reason = format!("the connection to rank {rank} on {} was lost", peer.host);
                let help = "check whether its process was killed, and its host's network";
                Err(Error::setup("move data between hosts", reason, help))
            }
        }
    }

    fn peer(&mut self, rank: usize) -> &mut MeshPeer {
        let peer = self.peers[rank].as_mut();
        peer.expect("ranks of one host share memory")
    }
}

/// One of several independent ways between the same ranks.
#[derive(Clone, Debug)]
pub(crate) struct MeshChannel {
    mesh: Arc<Mesh>,
    number: u32,
}

impl MeshChannel {
    /// The next channel. All ranks call this in the same order.
    pub(crate) fn new(mesh: &Arc<Mesh>) -> MeshChannel {
        MeshChannel {
            mesh: Arc::clone(mesh),
            number: mesh.next_channel.fetch_add(1, Ordering::Relaxed),
        }
    }

    pub(crate) fn duplicate(&self) -> MeshChannel {
        MeshChannel::new(&self.mesh)
    }

    pub(crate) fn rank(&self) -> usize {
        self.mesh.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.mesh.size
    }

    /// Moves what can be moved at once.
    pub(crate) fn advance(&self) {
        drop(self.mesh.moved());
    }

    fn letter<'a>(&self, peer: usize, content: Content<'a>) -> Letter<'a> {
        Letter {
            channel: self.clone(),
            peer,
            content,
        }
    }

    /// Starts to send `bytes` to rank `to`, which is on another host.
    pub(crate) fn send<'a>(&self, bytes: &'a [u8], to: usize, tag: u32) -> Letter<'a> {
        let mut traffic = panics::lock(&self.mesh.traffic);
        let frames = &mut traffic.peer(to).frames;
        let content = if !frames.start(key(self.number, tag), bytes) {
            Content::Queued
        } else if !frames.pass(bytes) {
            Content::Leaving(bytes)
        } else {
            Content::Done
        };
        self.letter(to, content)
    }

    /// As `send`, with a copy of `bytes`.
    pub(crate) fn tell(&self, bytes: &[u8], to: usize, tag: u32) -> Letter<'static> {
        let mut traffic = panics::lock(&self.mesh.traffic);
        let message: [&[u8]; 2] = [&key(self.number, tag), bytes];
        traffic.peer(to).frames.queue_parts(&message);
        traffic.advance(to);
        self.letter(to, Content::Queued)
    }

    /// Starts to receive from rank `from`, which is on another host, as many bytes as `into` has.
    pub(crate) fn receive<'a>(&self, into: &'a mut [u8], from: usize, tag: u32) -> Letter<'a> {
        let mut traffic = panics::lock(&self.mesh.traffic);
        traffic.letters += 1;
        let (letter, key) = (traffic.letters, key(self.number, tag));
        if let Ok(true) = traffic.take(from, key, into) {
            return self.letter(from, Content::Done);
        }
        let count = into.len();
        let posted = Posted { letter, key, count };
        traffic.peer(from).posted.push_back(posted);
        self.letter(from, Content::Awaited { letter, key, into })
    }

    /// A message that has come with this tag from any rank.
    pub(crate) fn take_any(&self, tag: u32) -> Option<Vec<u8>> {
        let (mut traffic, key) = (self.mesh.moved(), key(self.number, tag));
        let index = traffic.inbox.iter().position(|it| it.key == key)?;
        traffic.inbox.remove(index).map(|it| it.bytes)
    }

    /// A rank whose connection has been lost for so long, and its host.
    pub(crate) fn lost(&self, after: Duration) -> Option<(usize, String)> {
        let traffic = self.mesh.moved();
        let mut peers = traffic.peers.iter().enumerate();
        peers.find_map(|(rank, peer)| {
            let peer = peer.as_ref()?;
            peer.lost.filter(|since| since.elapsed() >= after)?;
            Some((rank, peer.host.clone()))
        })
    }
}

/// A message under way. Dropped before it is done, one that leaves is sent nevertheless, and one
/// that arrives is kept in the inbox.
#[derive(Debug)]
pub(crate) struct Letter<'a> {
    channel: MeshChannel,
    peer: usize,
    content: Content<'a>,
}

#[derive(Debug)]
enum Content<'a> {
    Leaving(&'a [u8]),
    /// Sent when everything queued is.
    Queued,
    Awaited {
        letter: u64,
        key: Key,
        into: &'a mut [u8],
    },
    Done,
}

impl Letter<'_> {
    /// The rank at the other end, until it is done.
    pub(crate) fn waits_for(&self) -> Option<usize> {
        match self.content {
            Content::Done => None,
            Content::Leaving(_) | Content::Queued | Content::Awaited { .. } => Some(self.peer),
        }
    }

    /// Whether it is sent or received. Moves the messages from and to the same rank.
    pub(crate) fn is_done(&mut self) -> Result<bool> {
        if let Content::Done = self.content {
            return Ok(true);
        }
        let mut traffic = panics::lock(&self.channel.mesh.traffic);
        traffic.advance(self.peer);
        let peer = traffic.peer(self.peer);
        let is_done = match &mut self.content {
            Content::Leaving(bytes) => peer.frames.pass(bytes),
            Content::Queued => peer.frames.is_sent(),
            Content::Awaited { letter, key, into } => {
                if peer.receiver == Some(*letter) {
                    let is_done = peer.frames.fill(into);
                    peer.receiver = peer.receiver.filter(|_| !is_done);
                    is_done
                } else {
                    // One of another length is an error.
                    traffic.take(self.peer, *key, into)?
                }
            }
            Content::Done => true,
        };
        if is_done {
            self.content = Content::Done;
            return Ok(true);
        }
        traffic.check(self.peer).map(|()| false)
    }
}

impl Drop for Letter<'_> {
    fn drop(&mut self) {
        if let Content::Done | Content::Queued = self.content {
            return;
        }
        let mut traffic = panics::lock(&self.channel.mesh.traffic);
        let peer = traffic.peer(self.peer);
        match &self.content {
            Content::Leaving(bytes) => peer.frames.give_up_sending(bytes),
            Content::Awaited { letter, into, .. } => {
                peer.posted.retain(|posted| posted.letter != *letter);
                if peer.receiver == Some(*letter) {
                    peer.receiver = None;
                    peer.frames.give_up_receiving(into);
                }
            }
            Content::Queued | Content::Done => {}
        }
    }
}

#[cfg(test)]
mod tests;
