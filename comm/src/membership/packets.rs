//! A socket between a rank and the process that started it. Each message arrives whole, and may
//! carry sockets. If the other end does not listen, a message is dropped, unless its sender asks to
//! wait.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// More than any message has: a generation of the most ranks.
const BYTES_MAX: usize = 256 << 10;
/// The most sockets with one message, of the 253 that the kernel allows.
pub(crate) const SOCKETS_MAX: usize = 250;

/// The sockets of a message, as the kernel reads and writes them.
#[repr(C)]
struct Attached {
    header: libc::cmsghdr,
    sockets: [RawFd; SOCKETS_MAX],
}

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
        self.send_with(message, &[], waits)
    }

    /// As `send`, with at most `SOCKETS_MAX` sockets, of which the other end gets copies.
    pub(crate) fn send_with(
        &self,
        message: &impl Serialize,
        sockets: &[OwnedFd],
        waits: bool,
    ) -> bool {
        let mut text = serde_json::to_vec(message).expect("messages are JSON");
        let flags = libc::MSG_NOSIGNAL | if waits { 0 } else { libc::MSG_DONTWAIT };
        let mut attached = Attached::new(sockets.len());
        for (number, socket) in attached.sockets.iter_mut().zip(sockets) {
            *number = socket.as_raw_fd();
        }
        let mut part = part_of(&mut text);
        let mut header = header_of(&mut part, &mut attached);
        header.msg_controllen *= usize::from(!sockets.is_empty());
        loop {
            // SAFETY: the header describes bytes of ours, over a socket of ours.
            let sent = unsafe { libc::sendmsg(self.0.as_raw_fd(), &header, flags) };
            match io::Error::last_os_error().kind() {
                _ if sent >= 0 => return true,
                ErrorKind::Interrupted => {}
                kind => return kind != ErrorKind::WouldBlock,
            }
        }
    }

    /// Waits for a message. None if there is no other end any more.
    pub(crate) fn receive<T: DeserializeOwned>(&self) -> Option<T> {
        self.receive_with().map(|(message, _)| message)
    }

    /// As `receive`, with the sockets that came with the message.
    pub(crate) fn receive_with<T: DeserializeOwned>(&self) -> Option<(T, Vec<OwnedFd>)> {
        let mut buffer = vec![0; BYTES_MAX];
        loop {
            let mut attached = Attached::new(SOCKETS_MAX);
            let mut part = part_of(&mut buffer);
            let mut header = header_of(&mut part, &mut attached);
            // There may be none.
            attached.header.cmsg_len = 0;
            let flags = libc::MSG_CMSG_CLOEXEC;
            // SAFETY: the header describes memory of ours.
            let length = unsafe { libc::recvmsg(self.0.as_raw_fd(), &mut header, flags) };
            match io::Error::last_os_error().kind() {
                _ if length > 0 => {}
                ErrorKind::Interrupted if length < 0 => continue,
                _ => return None,
            }
            let sockets = attached.take();
            // What another version says, this one does not know.
            if let Ok(message) = serde_json::from_slice(&buffer[..length as usize]) {
                return Some((message, sockets));
            }
        }
    }

    pub(crate) fn descriptor(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Ends `receive` once it has received what was sent.
    pub(crate) fn stop_listening(&self) {
        // SAFETY: changes a socket of ours.
        unsafe { libc::shutdown(self.0.as_raw_fd(), libc::SHUT_RD) };
    }
}

/// Sends a message, also in a handler of a signal; drops it if the other end does not listen.
pub(crate) fn send_at_once(socket: RawFd, text: &[u8]) {
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: reads our bytes. The call is safe in a handler, and fails where there is no socket.
    unsafe { libc::send(socket, text.as_ptr().cast(), text.len(), flags) };
}

fn part_of(bytes: &mut [u8]) -> libc::iovec {
    libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    }
}

fn header_of(part: &mut libc::iovec, attached: &mut Attached) -> libc::msghdr {
    // SAFETY: a plain struct, of which zeros are a value.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    (header.msg_iov, header.msg_iovlen) = (part, 1);
    header.msg_controllen = attached.header.cmsg_len;
    header.msg_control = std::ptr::from_mut(attached).cast();
    header
}

impl Attached {
    /// Room for `count` sockets.
    fn new(count: usize) -> Attached {
        // SAFETY: a plain struct, of which zeros are a value.
        let mut attached: Attached = unsafe { std::mem::zeroed() };
        attached.header.cmsg_level = libc::SOL_SOCKET;
        attached.header.cmsg_type = libc::SCM_RIGHTS;
        attached.header.cmsg_len = size_of::<libc::cmsghdr>() + count * size_of::<RawFd>();
        attached
    }

    /// What the kernel has written.
    fn take(self) -> Vec<OwnedFd> {
        let bytes = self
            .header
            .cmsg_len
            .saturating_sub(size_of::<libc::cmsghdr>());
        let numbers = self.sockets.into_iter().take(bytes / size_of::<RawFd>());
        // SAFETY: they are new, and nothing else owns them.
        numbers
            .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
            .collect()
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
    fn sockets_arrive_with_their_message_and_work() {
        use std::io::{Read, Write};
        use std::os::unix::net::UnixStream;
        let (own, other) = Packets::pair().unwrap();
        let other = Packets::new(other);
        let pairs = || UnixStream::pair().unwrap();
        let (mut near, far): (Vec<_>, Vec<_>) = (0..SOCKETS_MAX).map(|_| pairs()).unzip();
        let far: Vec<OwnedFd> = far.into_iter().map(OwnedFd::from).collect();
        assert!(other.send_with(&[1], &far, true) && other.send(&[2], true));
        drop(far);
        let (message, sockets) = own.receive_with::<Vec<u8>>().unwrap();
        assert_eq!((message, sockets.len()), (vec![1], SOCKETS_MAX));
        assert!(own.receive_with::<Vec<u8>>().unwrap().1.is_empty());
        for (index, (near, socket)) in near.iter_mut().zip(sockets).enumerate() {
            near.write_all(&[index as u8]).unwrap();
            let mut byte = [0];
            UnixStream::from(socket).read_exact(&mut byte).unwrap();
            assert_eq!(byte, [index as u8]);
        }
    }

    #[test]
    fn a_process_that_does_not_listen_stops_no_other() {
        let (own, _other) = Packets::pair().unwrap();
        assert!((0..1_000_000).any(|_| !own.send(&[7; 20], false)));
    }
}
