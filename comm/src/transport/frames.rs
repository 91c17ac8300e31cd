//! Messages over a stream socket between two processes: a length of four bytes, a MAC once both
//! know each other (`seal.rs`), then that many bytes. Nothing blocks: callers wait with a deadline.

mod seal;

use std::fs::File;
use std::io::{self, Cursor, ErrorKind, IoSlice, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use self::seal::{ALWAYS_BYTES, LENGTH_BYTES, MAC_BYTES};
pub(crate) use self::seal::{Seal, SealedReader, SealedWriter, Seals};
use crate::waited::Waited;

/// How much is read at once.
pub(crate) const READ_BYTES: usize = 64 << 10;
/// Sent bytes are dropped when there are this many, or nothing else.
const KEPT_BYTES_MAX: usize = 8 << 20;
/// The most bytes that are kept of a message which goes to or comes from a caller's memory.
pub(crate) const HEAD_BYTES_MAX: usize = LENGTH_BYTES + MAC_BYTES + ALWAYS_BYTES;

/// One end of a socket.
#[derive(Debug)]
pub(crate) struct Frames {
    socket: File,
    /// Longer messages are refused.
    bytes_max: usize,
    /// What has come and was not taken is `received[taken..filled]`.
    received: Vec<u8>,
    taken: usize,
    filled: usize,
    /// The message that its receiver reads into its own memory (`fill`).
    arriving: Option<Passage>,
    /// The message that its sender writes from its own memory (`pass`), before what is queued.
    leaving: Option<Passage>,
    /// Queued bytes. The first `sent` of them are sent.
    outgoing: Vec<u8>,
    sent: usize,
    /// Sending has failed. What had come before the other end closed is still received.
    has_failed: bool,
    is_closed: bool,
    /// None until both ends know each other, and between processes that one launcher connects.
    seals: Option<Seals>,
}

/// A message under way: its first bytes are here, the rest in the caller's memory.
#[derive(Debug)]
struct Passage {
    /// Its length, its MAC if it has one, and its first bytes, `head_bytes` in all.
    head: [u8; HEAD_BYTES_MAX],
    head_bytes: usize,
    /// How many bytes have passed: of all that is sent, or of the caller's that are received.
    done: usize,
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
            received: vec![0; READ_BYTES],
            taken: 0,
            filled: 0,
            arriving: None,
            leaving: None,
            outgoing: Vec::new(),
            sent: 0,
            has_failed: false,
            is_closed: false,
            seals: None,
        })
    }

    /// Both directions of the socket as streams of bytes, which block and are made of frames.
    pub(crate) fn into_streams(self) -> io::Result<(impl Read + use<>, SealedWriter<File>)> {
        let received = self.staged().to_vec();
        let socket = UnixStream::from(OwnedFd::from(self.socket));
        socket.set_nonblocking(false)?;
        let input = File::from(OwnedFd::from(socket.try_clone()?));
        let seals = self.seals.filter(|_| self.outgoing.is_empty());
        let seals = seals.ok_or(ErrorKind::NotConnected)?;
        let output = SealedWriter(File::from(OwnedFd::from(socket)), seals.sent);
        let input = Cursor::new(received).chain(input);
        Ok((SealedReader::new(input, seals.received), output))
    }

    /// From now on messages of both ends have a MAC.
    pub(crate) fn seal(&mut self, seals: Seals) {
        self.seals = Some(seals);
    }

    /// Bytes of the length, and of the MAC if messages have one.
    fn header_bytes(&self) -> usize {
        LENGTH_BYTES + self.seals.as_ref().map_or(0, |_| MAC_BYTES)
    }

    /// The length and the MAC of the next message that is sent.
    fn header(&mut self, parts: &[&[u8]]) -> [u8; LENGTH_BYTES + MAC_BYTES] {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        assert!(length <= self.bytes_max);
        let mut header = [0; LENGTH_BYTES + MAC_BYTES];
        match &mut self.seals {
            Some(seals) => header = seals.sent.header(parts),
            None => header[..LENGTH_BYTES].copy_from_slice(&(length as u32).to_le_bytes()),
        }
        header
    }

    /// Adds a message to those that are sent by `advance`.
    pub(crate) fn queue(&mut self, message: &[u8]) {
        self.queue_parts(&[message]);
    }

    /// Adds one message in several parts.
    pub(crate) fn queue_parts(&mut self, parts: &[&[u8]]) {
        let (header, count) = (self.header(parts), self.header_bytes());
        self.outgoing.extend_from_slice(&header[..count]);
        let all = parts.iter();
        all.for_each(|part| self.outgoing.extend_from_slice(part));
    }

    /// Starts to send a message without a copy: the caller calls `pass` with `rest` until all has
    /// passed, or `give_up_sending`. While another passes, this one is queued, and false returned.
    pub(crate) fn start(&mut self, first: [u8; ALWAYS_BYTES], rest: &[u8]) -> bool {
        self.send();
        if self.leaving.is_some() || !self.is_sent() || self.is_closed {
            self.queue_parts(&[&first, rest]);
            return false;
        }
        let (header, count) = (self.header(&[&first, rest]), self.header_bytes());
        let mut head = [0; HEAD_BYTES_MAX];
        head[..count].copy_from_slice(&header[..count]);
        head[count..][..ALWAYS_BYTES].copy_from_slice(&first);
        self.leaving = Some(Passage {
            head,
            head_bytes: count + ALWAYS_BYTES,
            done: 0,
        });
        true
    }

    /// Sends what the socket takes now. True once the message is complete.
    pub(crate) fn pass(&mut self, rest: &[u8]) -> bool {
        while let Some(it) = &mut self.leaving
            && !self.has_failed
            && !self.is_closed
        {
            let head = &it.head[..it.head_bytes];
            let parts = match it.done.checked_sub(head.len()) {
                None => [&head[it.done..], rest],
                Some(done) => [&rest[done..], &[]],
            };
            match self.socket.write_vectored(&parts.map(IoSlice::new)) {
                Ok(count) => it.done += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.has_failed = true,
            }
            if it.done == it.head_bytes + rest.len() {
                self.leaving = None;
            }
        }
        self.leaving.is_none()
    }

    /// Queues what is left of the message that was started.
    pub(crate) fn give_up_sending(&mut self, rest: &[u8]) {
        if let Some(it) = self.leaving.take() {
            let left = [&it.head[..it.head_bytes], rest].concat();
            self.outgoing.splice(..0, left[it.done..].iter().copied());
        }
    }

    /// From now on messages may have this many bytes.
    pub(crate) fn set_limit(&mut self, bytes_max: usize) {
        self.bytes_max = bytes_max;
    }

    /// Sends and receives what it can at once.
    pub(crate) fn advance(&mut self) {
        let next = self.header_bytes() + self.length().unwrap_or(0).min(self.bytes_max);
        self.advance_to(next.max(READ_BYTES));
    }

    /// As `advance`, until this many bytes have come that were not taken.
    pub(crate) fn advance_to(&mut self, most: usize) {
        if self.is_closed {
            return;
        }
        self.send();
        let is_idle = !self.receive(most) && self.arriving.is_none();
        self.is_closed |= self.has_failed && is_idle;
    }

    fn send(&mut self) {
        while self.sent < self.outgoing.len() && self.leaving.is_none() && !self.has_failed {
            match self.socket.write(&self.outgoing[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.has_failed = true,
            }
        }
        if self.sent == self.outgoing.len() || self.sent >= KEPT_BYTES_MAX {
            self.outgoing.drain(..self.sent);
            self.sent = 0;
        }
    }

    fn staged(&self) -> &[u8] {
        &self.received[self.taken..self.filled]
    }

    /// The length that the next message says it has.
    fn length(&self) -> Option<usize> {
        let length = self.staged().first_chunk::<LENGTH_BYTES>()?;
        Some(u32::from_le_bytes(*length) as usize)
    }

    /// Whether anything has come.
    fn receive(&mut self, most: usize) -> bool {
        if self.taken + most > self.received.len() {
            self.received.copy_within(self.taken..self.filled, 0);
            (self.taken, self.filled) = (0, self.filled - self.taken);
            self.received.resize(most.max(self.received.len()), 0);
        }
        let (before, end) = (self.filled, self.taken + most);
        while self.arriving.is_none() && self.filled < end {
            match self.socket.read(&mut self.received[self.filled..end]) {
                Ok(count) if count > 0 => self.filled += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Ok(_) | Err(_) => {
                    self.is_closed = true;
                    break;
                }
            }
        }
        self.filled > before
    }

    /// The next message that has come as a whole. One that is too long, or whose MAC is wrong,
    /// closes this end.
    pub(crate) fn take(&mut self) -> Option<Vec<u8>> {
        self.next().map(<[u8]>::to_vec)
    }

    /// Like `take`, but borrowed from the receive buffer.
    pub(crate) fn next(&mut self) -> Option<&[u8]> {
        let (length, start) = (self.length()?, self.taken + self.header_bytes());
        let (end, is_allowed) = (start + length, length <= self.bytes_max);
        if is_allowed && end > self.filled {
            return None;
        }
        if !is_allowed
            || !accepts(
                &mut self.seals,
                &self.received[..start],
                &[&self.received[start..end]],
            )
        {
            self.is_closed = true;
            self.filled = self.taken;
            return None;
        }
        self.taken = end;
        Some(&self.received[start..end])
    }

    /// The length and the first bytes of the next message.
    pub(crate) fn head(&self) -> Option<(usize, [u8; ALWAYS_BYTES])> {
        let first = self.staged().get(self.header_bytes()..)?.first_chunk()?;
        Some((self.length()?, *first))
    }

    /// Starts to receive the next message, whose `head` has come, without a copy: the caller calls
    /// `fill` with memory for the rest of it until all has come, or `give_up_receiving`.
    pub(crate) fn begin(&mut self) {
        let (mut head, head_bytes) = ([0; HEAD_BYTES_MAX], self.header_bytes() + ALWAYS_BYTES);
        head[..head_bytes].copy_from_slice(&self.staged()[..head_bytes]);
        self.taken += head_bytes;
        self.arriving = Some(Passage {
            head,
            head_bytes,
            done: 0,
        });
    }

    /// Receives what it can at once of the message that has begun. Whether that is all. If its MAC
    /// is wrong, this end closes.
    pub(crate) fn fill(&mut self, rest: &mut [u8]) -> bool {
        let Some(it) = &mut self.arriving else {
            return false;
        };
        let staged = (self.filled - self.taken).min(rest.len() - it.done);
        rest[it.done..][..staged].copy_from_slice(&self.received[self.taken..][..staged]);
        (self.taken, it.done) = (self.taken + staged, it.done + staged);
        while it.done < rest.len() {
            match self.socket.read(&mut rest[it.done..]) {
                Ok(count) if count > 0 => it.done += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Ok(_) | Err(_) => {
                    self.is_closed = true;
                    return false;
                }
            }
        }
        let (header, first) = it.head[..it.head_bytes].split_at(it.head_bytes - ALWAYS_BYTES);
        let is_genuine = accepts(&mut self.seals, header, &[first, rest]);
        self.arriving = None;
        if !is_genuine {
            // What came after it is dropped, too.
            self.is_closed = true;
            self.filled = self.taken;
        }
        is_genuine
    }

    /// Keeps what has come of the message that has begun: it is taken with the others.
    pub(crate) fn give_up_receiving(&mut self, rest: &[u8]) {
        if let Some(it) = self.arriving.take() {
            let all = [&it.head[..it.head_bytes], &rest[..it.done], self.staged()].concat();
            (self.taken, self.filled, self.received) = (0, all.len(), all);
        }
    }

    /// Whether everything queued is sent.
    pub(crate) fn is_sent(&self) -> bool {
        self.outgoing.is_empty()
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

/// Whether a message, in these parts, is genuine: its header ends with its MAC if it has one.
fn accepts(seals: &mut Option<Seals>, header: &[u8], parts: &[&[u8]]) -> bool {
    let Some(seals) = seals else { return true };
    let mac = header.last_chunk();
    mac.is_some_and(|mac| seals.received.accepts(parts, mac))
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
