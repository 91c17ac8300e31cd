//! What makes a frame genuine: a keyed hash (MAC) of its number, its length and its bytes. Each
//! direction has its own key, so that no frame can be forged, repeated, reordered or sent back.

use std::io::{self, ErrorKind, Read, Write};

/// Bytes of the length, and of the MAC, before each message.
pub(super) const LENGTH_BYTES: usize = 4;
pub(super) const MAC_BYTES: usize = 16;
/// The most bytes of a message whose MAC covers all of it in any case.
pub(crate) const SMALL_BYTES_MAX: usize = 64 << 10;
/// The first bytes of a message, which its MAC always covers: the header of the mesh.
pub(crate) const ALWAYS_BYTES: usize = 8;
/// Bytes of the length and the MAC.
const HEADER_BYTES: usize = LENGTH_BYTES + MAC_BYTES;

/// One direction of a connection.
pub(crate) struct Seal {
    key: [u8; blake3::KEY_LEN],
    /// How many frames have passed.
    count: u64,
    /// Whether the MAC covers all bytes of messages of any length.
    covers_all: bool,
}

impl std::fmt::Debug for Seal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Seal")
    }
}

/// Both directions of a connection, seen from one end.
#[derive(Debug)]
pub(crate) struct Seals {
    pub(crate) sent: Seal,
    pub(crate) received: Seal,
}

impl Seal {
    pub(crate) fn new(key: [u8; blake3::KEY_LEN], covers_all: bool) -> Seal {
        Seal {
            key,
            count: 0,
            covers_all,
        }
    }

    /// The MAC of the next frame, whose message has these parts and `length` bytes.
    pub(in crate::transport) fn next(&mut self, length: usize, parts: &[&[u8]]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&self.count.to_le_bytes());
        hasher.update(&(length as u64).to_le_bytes());
        let mut left = match length {
            _ if self.covers_all || length <= SMALL_BYTES_MAX => length,
            _ => ALWAYS_BYTES,
        };
        for part in parts {
            let covered = left.min(part.len());
            hasher.update(&part[..covered]);
            left -= covered;
        }
        self.count += 1;
        hasher.finalize()
    }

    /// Whether the next frame has this MAC, in a time that does not depend on it.
    pub(super) fn accepts(&mut self, message: &[u8], mac: &[u8; MAC_BYTES]) -> bool {
        let expected = self.next(message.len(), &[message]);
        let differences = expected.as_bytes().iter().zip(mac);
        differences.fold(0, |all, (one, other)| all | (one ^ other)) == 0
    }
}

/// The first bytes of a MAC, as a frame has them.
pub(super) fn cut(mac: &blake3::Hash) -> &[u8] {
    &mac.as_bytes()[..MAC_BYTES]
}

/// Writes bytes as frames, for ends that block.
#[derive(Debug)]
pub(crate) struct SealedWriter<W>(pub(crate) W, pub(crate) Seal);

impl<W: Write> Write for SealedWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let message = &bytes[..bytes.len().min(SMALL_BYTES_MAX)];
        let length = (message.len() as u32).to_le_bytes();
        let mac = self.1.next(message.len(), &[message]);
        self.0.write_all(&[&length, cut(&mac), message].concat())?;
        Ok(message.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Reads the bytes that such a writer wrote. A frame that is not genuine is an error, and the end.
#[derive(Debug)]
pub(crate) struct SealedReader<R> {
    input: R,
    seal: Seal,
    message: Vec<u8>,
    /// How much of it was read.
    read: usize,
}

impl<R: Read> SealedReader<R> {
    pub(crate) fn new(input: R, seal: Seal) -> SealedReader<R> {
        SealedReader {
            input,
            seal,
            message: Vec::new(),
            read: 0,
        }
    }

    /// Reads the next frame. False at the end.
    fn next(&mut self) -> io::Result<bool> {
        let mut header = [0; HEADER_BYTES];
        if self.input.read(&mut header[..1])? == 0 {
            return Ok(false);
        }
        self.input.read_exact(&mut header[1..])?;
        let (length, mac) = header.split_at(LENGTH_BYTES);
        let length = length
            .iter()
            .rev()
            .fold(0, |all, &byte| all << 8 | usize::from(byte));
        let mac = mac.try_into().unwrap_or(&[0; MAC_BYTES]);
        let forged = || io::Error::new(ErrorKind::InvalidData, "a frame was not genuine");
        if length > SMALL_BYTES_MAX {
            return Err(forged());
        }
        self.message.resize(length, 0);
        self.input.read_exact(&mut self.message)?;
        if !self.seal.accepts(&self.message, mac) {
            self.message.clear();
            return Err(forged());
        }
        self.read = 0;
        Ok(true)
    }
}

impl<R: Read> Read for SealedReader<R> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        while self.read == self.message.len() {
            if !self.next()? {
                return Ok(0);
            }
        }
        let left = &self.message[self.read..];
        let count = left.len().min(target.len());
        target[..count].copy_from_slice(&left[..count]);
        self.read += count;
        Ok(count)
    }
}
