//! Messages over a stream socket between two processes: a length of four bytes, a MAC once both
//! know each other (`seal.rs`), then that many bytes. Nothing blocks: callers wait with a deadline.

mod seal;

use std::fs::File;
use std::io::{self, Cursor, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use self::seal::{LENGTH_BYTES, MAC_BYTES};
pub(crate) use self::seal::{Seal, SealedReader, SealedWriter, Seals};
use crate::waited::Waited;

/// How much is read at once.
const READ_BYTES: usize = 64 << 10;
/// Sent bytes are dropped when there are this many, or nothing else.
const KEPT_BYTES_MAX: usize = 8 << 20;

/// One end of a socket.
#[derive(Debug)]
pub(crate) struct Frames {
    socket: File,
    /// Longer messages are refused.
    bytes_max: usize,
    received: Vec<u8>,
    /// Where the socket is read to.
    piece: Box<[u8]>,
    /// Queued bytes. The first `sent` of them are sent.
    outgoing: Vec<u8>,
    sent: usize,
    /// How many bytes were sent and dropped from `outgoing`.
    sent_before: u64,
    is_closed: bool,
    /// None until both ends know each other, and between processes that one launcher connects.
    seals: Option<Seals>,
}

impl Frames {
    /// A connected stream socket of any kind.
    pub(crate) fn new(socket: OwnedFd, bytes_max: usize) -> io::Result<Frames> {
        // Any descriptor can be made non-blocking in this way.
        let socket = UnixStream::from(socket);
        socket.set_nonblocking(true)?;
        Ok(Frames {
            socket: File::from(OwnedFd::from(socket)),
            bytes_max,
            received: Vec::new(),
            piece: vec![0; READ_BYTES].into(),
            outgoing: Vec::new(),
            sent: 0,
            sent_before: 0,
            is_closed: false,
            seals: None,
        })
    }

    /// Both directions of the socket as streams of bytes, which block and are made of frames.
    pub(crate) fn into_streams(self) -> io::Result<(impl Read + use<>, SealedWriter<File>)> {
        let socket = UnixStream::from(OwnedFd::from(self.socket));
        socket.set_nonblocking(false)?;
        let input = File::from(OwnedFd::from(socket.try_clone()?));
        let seals = self.seals.filter(|_| self.outgoing.is_empty());
        let seals = seals.ok_or(ErrorKind::NotConnected)?;
        let output = SealedWriter(File::from(OwnedFd::from(socket)), seals.sent);
        let input = Cursor::new(self.received).chain(input);
        Ok((SealedReader::new(input, seals.received), output))
    }

    /// From now on messages of both ends have a MAC.
    pub(crate) fn seal(&mut self, seals: Seals) {
        self.seals = Some(seals);
    }

    fn mac_bytes(&self) -> usize {
        self.seals.as_ref().map_or(0, |_| MAC_BYTES)
    }

    /// Adds a message to those that are sent by `advance`.
    pub(crate) fn queue(&mut self, message: &[u8]) {
        self.queue_parts(&[message]);
    }

    /// Adds one message in several parts.
    pub(crate) fn queue_parts(&mut self, parts: &[&[u8]]) {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        assert!(length <= self.bytes_max);
        match &mut self.seals {
            Some(seals) => self.outgoing.extend(seals.sent.header(parts)),
            None => self.outgoing.extend((length as u32).to_le_bytes()),
        }
        parts
            .iter()
            .for_each(|part| self.outgoing.extend_from_slice(part));
    }

    /// From now on messages may have this many bytes.
    pub(crate) fn set_limit(&mut self, bytes_max: usize) {
        self.bytes_max = bytes_max;
    }

    /// Sends and receives what it can at once.
    pub(crate) fn advance(&mut self) {
        if self.is_closed {
            return;
        }
        // What had come before the other end closed is received even if sending fails.
        let (sent, received) = (self.send(), self.receive());
        self.is_closed = sent.and(received).is_err();
    }

    fn send(&mut self) -> io::Result<()> {
        while self.sent < self.outgoing.len() {
            match self.socket.write(&self.outgoing[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if self.sent == self.outgoing.len() || self.sent >= KEPT_BYTES_MAX {
            self.sent_before += self.sent as u64;
            self.outgoing.drain(..self.sent);
            self.sent = 0;
        }
        Ok(())
    }

    fn receive(&mut self) -> io::Result<()> {
        while self.received.len() < LENGTH_BYTES + self.mac_bytes() + self.bytes_max {
            match self.socket.read(&mut self.piece) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.received.extend_from_slice(&self.piece[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The next message that has come as a whole. One that is too long, or whose MAC is wrong,
    /// closes this end.
    pub(crate) fn take(&mut self) -> Option<Vec<u8>> {
        let (length, rest) = self.received.split_first_chunk::<LENGTH_BYTES>()?;
        let length = u32::from_le_bytes(*length) as usize;
        let (mut is_genuine, mut header_bytes) = (length <= self.bytes_max, LENGTH_BYTES);
        let mut message = rest;
        if let (Some(seals), true) = (&mut self.seals, is_genuine) {
            let mac;
            (mac, message) = rest.split_first_chunk::<MAC_BYTES>()?;
            is_genuine = seals.received.accepts(message.get(..length)?, mac);
            header_bytes += MAC_BYTES;
        }
        if !is_genuine {
            self.is_closed = true;
            self.received.clear();
            return None;
        }
        let message = message.get(..length)?.to_vec();
        self.received.drain(..header_bytes + length);
        Some(message)
    }

    /// Whether everything queued is sent.
    pub(crate) fn is_sent(&self) -> bool {
        self.outgoing.is_empty()
    }

    /// How many bytes were ever queued.
    pub(crate) fn queued(&self) -> u64 {
        self.sent_before + self.outgoing.len() as u64
    }

    /// How many of them the socket has taken.
    pub(crate) fn sent(&self) -> u64 {
        self.sent_before + self.sent as u64
    }

    /// Whether the other end is closed or has sent what is not a message. Whole messages that came
    /// before can still be taken.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// What `wait` waits for.
    pub(crate) fn entry(&self) -> libc::pollfd {
        let to_send = if self.outgoing.is_empty() {
            0
        } else {
            libc::POLLOUT
        };
        libc::pollfd {
            // poll ignores negative descriptors.
            fd: if self.is_closed {
                -1
            } else {
                self.socket.as_raw_fd()
            },
            events: libc::POLLIN | to_send,
            revents: 0,
        }
    }
}

/// Sleeps until one of the sockets can send or receive, at most `timeout`.
pub(crate) fn wait(entries: impl Iterator<Item = libc::pollfd>, timeout: Duration) {
    let mut entries: Vec<libc::pollfd> = entries.collect();
    let timeout_ms = libc::c_int::try_from(timeout.as_millis()).unwrap_or(libc::c_int::MAX);
    let count = entries.len() as libc::nfds_t;
    // SAFETY: the call reads and writes `count` entries, which live until it returns.
    unsafe { libc::poll(entries.as_mut_ptr(), count, timeout_ms) };
}

/// How often a waiting process looks at the clock.
const PERIOD: Duration = Duration::from_millis(50);

/// Moves bytes until `done` returns something, for at most `limit`.
pub(crate) fn wait_for<T>(
    limit: Duration,
    sockets: &mut [Frames],
    mut done: impl FnMut(&mut [Frames]) -> Option<T>,
) -> Option<T> {
    let (mut waited, mut slept) = (Waited::new(), Duration::ZERO);
    loop {
        sockets.iter_mut().for_each(Frames::advance);
        if let Some(result) = done(sockets) {
            return Some(result);
        }
        if waited.after(slept) >= limit {
            return None;
        }
        wait(sockets.iter().map(Frames::entry), PERIOD);
        slept = PERIOD;
    }
}

#[cfg(test)]
mod tests;
