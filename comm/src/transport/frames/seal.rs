//! What makes a frame genuine: a keyed hash (MAC) of its number, its length and its bytes. Each
//! direction has its own key, so that no frame can be forged, repeated, reordered or sent back.

use std::io::{self, ErrorKind, Read, Write};

/// Bytes of the length, and of the MAC, before each message.
pub(super) const LENGTH_BYTES: usize = 4;
pub(super) const MAC_BYTES: usize = 16;
/// The most bytes of a message whose MAC covers all of it in any case.
pub(crate) const SMALL_BYTES_MAX: usize = ALWAYS_BYTES + (64 << 10);
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

    /// The length and the MAC of the next frame, whose message has these parts.
    pub(super) fn header(&mut self, parts: &[&[u8]]) -> [u8; HEADER_BYTES] {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        let mut header = [0; HEADER_BYTES];
        let (start, mac) = header.split_at_mut(LENGTH_BYTES);
        start.copy_from_slice(&(length as u32).to_le_bytes());
        mac.copy_from_slice(&self.next(length, parts).as_bytes()[..MAC_BYTES]);
        header
    }

    /// The MAC of the next frame, before it is cut.
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
    pub(super) fn accepts(&mut self, parts: &[&[u8]], mac: &[u8; MAC_BYTES]) -> bool {
        let expected = self.next(parts.iter().map(|part| part.len()).sum(), parts);
        let differences = expected.as_bytes().iter().zip(mac);
        differences.fold(0, |all, (one, other)| all | (one ^ other)) == 0
    }
}

/// Writes bytes as frames, for ends that block.
#[derive(Debug)]
pub(crate) struct SealedWriter<W>(pub(crate) W, pub(crate) Seal);

impl<W: Write> Write for SealedWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let message = &bytes[..bytes.len().min(SMALL_BYTES_MAX)];
        let header = self.1.header(&[message]);
        self.0.write_all(&[&header, message].concat())?;
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
    /// None after an error.
    seal: Option<Seal>,
    message: Vec<u8>,
    /// How much of it was read.
    read: usize,
}

impl<R: Read> SealedReader<R> {
    pub(crate) fn new(input: R, seal: Seal) -> SealedReader<R> {
        SealedReader {
            input,
            seal: Some(seal),
            message: Vec::new(),
            read: 0,
        }
    }

    /// Reads the next frame. False at the end.
    fn next(&mut self) -> io::Result<bool> {
        let (mut length, mut mac) = ([0; LENGTH_BYTES], [0; MAC_BYTES]);
        if self.input.read(&mut length[..1])? == 0 {
            return Ok(false);
        }
        let forged = || io::Error::new(ErrorKind::InvalidData, "a frame was not genuine");
        let mut seal = self.seal.take().ok_or_else(forged)?;
        self.input.read_exact(&mut length[1..])?;
        self.input.read_exact(&mut mac)?;
        let length = u32::from_le_bytes(length) as usize;
        let mut message = vec![0; length.min(SMALL_BYTES_MAX)];
        self.input.read_exact(&mut message)?;
        if length > SMALL_BYTES_MAX || !seal.accepts(&[&message], &mac) {
            return Err(forged());
        }
        (self.message, self.read, self.seal) = (message, 0, Some(seal));
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
