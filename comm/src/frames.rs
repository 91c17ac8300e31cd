//! Messages through a stream socket between two processes: a length of four bytes, then so many
//! bytes. Nothing blocks: callers wait with a deadline.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Bytes of the length before each message.
const LENGTH_BYTES: usize = 4;
/// How much is read at once.
const READ_BYTES: usize = 16 << 10;

/// One end of a socket.
#[derive(Debug)]
pub(crate) struct Frames {
    socket: File,
    /// Longer messages are refused.
    bytes_max: usize,
    received: Vec<u8>,
    unsent: Vec<u8>,
    is_closed: bool,
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
            unsent: Vec::new(),
            is_closed: false,
        })
    }

    /// Adds a message to those that are sent by `advance`.
    pub(crate) fn queue(&mut self, message: &[u8]) {
        assert!(message.len() <= self.bytes_max);
        let length = message.len() as u32;
        self.unsent.extend_from_slice(&length.to_le_bytes());
        self.unsent.extend_from_slice(message);
    }

    /// Sends and receives what it can at once.
    pub(crate) fn advance(&mut self) {
        if !self.is_closed && self.send().and_then(|()| self.receive()).is_err() {
            self.is_closed = true;
        }
    }

    fn send(&mut self) -> io::Result<()> {
        while !self.unsent.is_empty() {
            match self.socket.write(&self.unsent) {
                Ok(count) => drop(self.unsent.drain(..count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn receive(&mut self) -> io::Result<()> {
        while self.received.len() < LENGTH_BYTES + self.bytes_max {
            let start = self.received.len();
            self.received.resize(start + READ_BYTES, 0);
            let read = self.socket.read(&mut self.received[start..]);
            self.received.truncate(start + *read.as_ref().unwrap_or(&0));
            match read {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The next message that has come as a whole. One that is too long closes this end.
    pub(crate) fn take(&mut self) -> Option<Vec<u8>> {
        let (length, rest) = self.received.split_first_chunk::<LENGTH_BYTES>()?;
        let length = u32::from_le_bytes(*length) as usize;
        if length > self.bytes_max {
            self.is_closed = true;
            self.received.clear();
            return None;
        }
        let message = rest.get(..length)?.to_vec();
        self.received.drain(..LENGTH_BYTES + length);
        Some(message)
    }

    /// Whether everything queued is sent.
    pub(crate) fn is_sent(&self) -> bool {
        self.unsent.is_empty()
    }

    /// Whether the other end is closed or has sent what is no message. Whole messages that came
    /// before can still be taken.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// What `wait` waits for.
    pub(crate) fn entry(&self) -> libc::pollfd {
        let to_send = if self.unsent.is_empty() {
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

#[cfg(test)]
mod tests;
