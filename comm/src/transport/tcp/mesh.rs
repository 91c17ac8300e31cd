//! Messages between ranks of several hosts over TCP: a socket to each rank of another host.
//!
//! Whoever waits for a message moves the bytes of all: there is no thread. A socket that closes
//! without a farewell is a rank that is lost.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ddp_kernels::panics;

use crate::error::{Error, Result};
use crate::transport::frames::{Frames, wait};

/// The most bytes of one message.
pub(crate) const MESSAGE_BYTES_MAX: usize = 1 << 20;
/// Before its bytes a message has its channel and its tag.
const HEADER_BYTES: usize = 8;
/// The most bytes that a socket carries at once.
pub(crate) const FRAME_BYTES_MAX: usize = HEADER_BYTES + MESSAGE_BYTES_MAX;
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

/// Messages with their senders.
type Received = VecDeque<(usize, Vec<u8>)>;

#[derive(Debug)]
struct Traffic {
    /// By rank; None for ranks of this host.
    peers: Vec<Option<MeshPeer>>,
    /// What has come, by channel, tag and sender.
    inbox: HashMap<(u32, u32), Received>,
}

/// A rank of another host.
#[derive(Debug)]
struct MeshPeer {
    frames: Frames,
    host: String,
    has_left: bool,
    lost: Option<Instant>,
}

impl Mesh {
    /// `peers` has a socket to each rank of another host, with the host's name.
    pub(crate) fn new(rank: usize, peers: Vec<Option<(Frames, String)>>) -> Mesh {
        let peer = |(frames, host)| MeshPeer {
            frames,
            host,
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
                inbox: HashMap::new(),
            }),
        }
    }

    /// What has been sent and received, after moving what can be moved at once.
    fn moved(&self) -> MutexGuard<'_, Traffic> {
        let mut traffic = panics::lock(&self.traffic);
        traffic.advance();
        traffic
    }

    /// Says farewell to all, and waits until all have done so, at most `limit`.
    pub(crate) fn leave(&self, limit: Duration) {
        let started = Instant::now();
        let farewell = [FAREWELL.to_le_bytes(), 0u32.to_le_bytes()].concat();
        let mut traffic = self.moved();
        let peers = traffic.peers.iter_mut().flatten();
        peers.for_each(|peer| peer.frames.queue(&farewell));
        let is_gone =
            |peer: &MeshPeer| (peer.has_left && peer.frames.is_sent()) || peer.frames.is_closed();
        while started.elapsed() < limit {
            traffic.advance();
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

impl Traffic {
    fn advance(&mut self) {
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            peer.frames.advance();
            while let Some(message) = peer.frames.take() {
                let Some((header, bytes)) = message.split_first_chunk::<HEADER_BYTES>() else {
                    continue;
                };
                let [channel, tag] = [0, 4].map(|at| {
                    u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
                });
                match channel {
                    FAREWELL => peer.has_left = true,
                    _ => {
                        let inbox = self.inbox.entry((channel, tag)).or_default();
                        inbox.push_back((rank, bytes.to_vec()));
                    }
                }
                peer.frames.advance();
            }
            if peer.frames.is_closed() && !peer.has_left {
                peer.lost.get_or_insert_with(Instant::now);
            }
        }
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

    /// Starts to send `bytes` to rank `to`, which is on another host.
    pub(crate) fn send(&self, bytes: &[u8], to: usize, tag: u32) -> Letter {
        let mut traffic = self.mesh.moved();
        let peer = traffic.peers[to].as_mut();
        let frames = &mut peer.expect("ranks of one host share memory").frames;
        frames.queue_parts(&[&self.number.to_le_bytes(), &tag.to_le_bytes(), bytes]);
        frames.advance();
        let after = frames.queued();
        Letter {
            channel: self.clone(),
            peer: to,
            content: Content::Sent { after },
        }
    }

    /// Starts to receive `count` bytes from rank `from`, which is on another host.
    pub(crate) fn receive(&self, count: usize, from: usize, tag: u32) -> Letter {
        let content = Content::Awaited { tag, count };
        Letter {
            channel: self.clone(),
            peer: from,
            content,
        }
    }

    /// A message that has come with this tag from any rank: its sender, and its length in bytes.
    pub(crate) fn arrived(&self, tag: u32) -> Option<(usize, usize)> {
        let traffic = self.mesh.moved();
        let (from, bytes) = traffic.inbox.get(&(self.number, tag))?.front()?;
        Some((*from, bytes.len()))
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

/// A message under way.
#[derive(Debug)]
pub(crate) struct Letter {
    channel: MeshChannel,
    peer: usize,
    content: Content,
}

#[derive(Debug)]
enum Content {
    /// Sent when the socket has taken this many bytes.
    Sent {
        after: u64,
    },
    Awaited {
        tag: u32,
        count: usize,
    },
    Received(Vec<u8>),
}

impl Letter {
    /// Whether it is sent or received. Moves all messages that are under way.
    pub(crate) fn is_done(&mut self) -> Result<bool> {
        let (peer, mut traffic) = (self.peer, self.channel.mesh.moved());
        match self.content {
            Content::Received(_) => return Ok(true),
            Content::Sent { after } => {
                let frames = traffic.peers[peer].as_ref().map(|peer| peer.frames.sent());
                if frames.is_some_and(|sent| sent >= after) {
                    return Ok(true);
                }
            }
            Content::Awaited { tag, count } => {
                let inbox = traffic.inbox.entry((self.channel.number, tag)).or_default();
                let found = inbox.iter().position(|(from, _)| *from == peer);
                if let Some((_, bytes)) = found.and_then(|index| inbox.remove(index)) {
                    if bytes.len() != count {
                        let got = bytes.len();
                        let reason = format!("expected {count} bytes from rank {peer}, got {got}");
                        let help = "run the same build of this program on all ranks";
                        return Err(Error::setup("move data between hosts", reason, help));
                    }
                    self.content = Content::Received(bytes);
                    return Ok(true);
                }
            }
        }
        traffic.check(peer).map(|()| false)
    }

    /// The bytes received.
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        match self.content {
            Content::Received(bytes) => bytes,
            Content::Sent { .. } => Vec::new(),
            Content::Awaited { .. } => panic!("the message is still under way"),
        }
    }
}

#[cfg(test)]
mod tests;
