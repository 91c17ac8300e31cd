//! A socket between a rank and what started it. Each message arrives whole, and a process that
//! does not listen stops no other.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// More than any message has: a generation of the most ranks.
const BYTES_MAX: usize = 256 << 10;

/// One end of it.
#[derive(Debug)]
pub(crate) struct Packets(File);

impl Packets {
    pub(crate) fn new(socket: OwnedFd) -> Packets {
        Packets(File::from(socket))
    }

    /// Both ends. Programs that this process starts do not inherit them.
    pub(crate) fn pair() -> io::Result<(Packets, OwnedFd)> {
        let mut ends: [RawFd; 2] = [0; 2];
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
        // SAFETY: writes two descriptors to an array of two.
        if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: both are new, and nothing else owns them.
        let [own, other] = ends.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        Ok((Packets::new(own), other))
    }

    /// Sends a message. One that `waits` waits while the other end does not listen; another one is
    /// dropped then. Whether it was sent, or there is no other end any more.
    pub(crate) fn send(&self, message: &impl Serialize, waits: bool) -> bool {
        let text = serde_json::to_vec(message).expect("messages are JSON");
        let flags = libc::MSG_NOSIGNAL | if waits { 0 } else { libc::MSG_DONTWAIT };
        loop {
            // SAFETY: sends bytes of ours over a socket of ours.
            let sent =
                unsafe { libc::send(self.0.as_raw_fd(), text.as_ptr().cast(), text.len(), flags) };
            match io::Error::last_os_error().kind() {
                _ if sent >= 0 => return true,
                ErrorKind::Interrupted => {}
                kind => return kind != ErrorKind::WouldBlock,
            }
        }
    }

    /// Waits for a message. None if there is no other end any more.
    pub(crate) fn receive<T: DeserializeOwned>(&self) -> Option<T> {
        let mut buffer = vec![0; BYTES_MAX];
        loop {
            match (&self.0).read(&mut buffer) {
                Ok(0) => return None,
                Ok(length) => {
                    // What another version says, this one does not know.
                    if let Ok(message) = serde_json::from_slice(&buffer[..length]) {
                        return Some(message);
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        }
    }

    /// Ends `receive` once it has received what was sent.
    pub(crate) fn stop_listening(&self) {
        // SAFETY: changes a socket of ours.
        unsafe { libc::shutdown(self.0.as_raw_fd(), libc::SHUT_RD) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sent_arrives_whole_also_after_the_sender_has_ended() {
        let (own, other) = Packets::pair().unwrap();
        let other = Packets::new(other);
        assert!(other.send(&vec![7; 20_000], true) && other.send(&[8], false));
        own.stop_listening();
        assert_eq!(own.receive::<Vec<u8>>().unwrap(), [7; 20_000]);
        assert_eq!(own.receive::<Vec<u8>>().unwrap(), [8]);
        assert_eq!(own.receive::<Vec<u8>>(), None);
        drop(own);
        assert!(other.send(&[9], true), "nobody listens any more");
    }

    #[test]
    fn a_process_that_does_not_listen_stops_no_other() {
        let (own, _other) = Packets::pair().unwrap();
        assert!((0..1_000_000).any(|_| !own.send(&[7; 20], false)));
    }
}
