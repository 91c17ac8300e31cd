//! What was found in data, kept in the cache beside them: the next start need not read everything again.
//!
//! The file's name says for which files, as they were then, and what was asked of them. In it: a mark, counts of classes, what was found
//! in features, and a checksum of all that. One that is damaged counts as none.

use std::io::Write;
use std::path::Path;

use xxhash_rust::xxh3::xxh3_64;

use super::{Found, Moments};
use crate::error::Result;
use crate::files::{failed, replace_file};

/// The first bytes, with the version of the file.
const MARK: &[u8; 8] = b"ddpscan1";

/// What was found in data that can be trained on.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Kept {
    /// Rows of each class.
    pub(crate) counts: Vec<u64>,
    /// In features, where they were looked at.
    pub(crate) found: Option<Found>,
}

impl Kept {
    /// From the file, if it is there and whole.
    pub(crate) fn read(path: &Path) -> Option<Kept> {
        Kept::from_bytes(&std::fs::read(path).ok()?)
    }

    /// Into the file, in place of what is there.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let bytes = self.to_bytes();
        replace_file(path, |file| file.write_all(&bytes).map_err(failed("write", path)))
    }

    /// The same bytes for the same findings.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MARK.to_vec();
        bytes.extend((self.counts.len() as u64).to_le_bytes());
        self.counts.iter().for_each(|count| bytes.extend(count.to_le_bytes()));
        if let Some(found) = &self.found {
            bytes.extend(u64::from(found.is_complete).to_le_bytes());
            bytes.extend(found.moments.to_bytes());
        }
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Kept> {
        let (bytes, checksum) = bytes.split_last_chunk::<8>()?;
        if xxh3_64(bytes) != u64::from_le_bytes(*checksum) {
            return None;
        }
        let (counted, bytes) = bytes.strip_prefix(MARK)?.split_first_chunk()?;
        let counted = usize::try_from(u64::from_le_bytes(*counted)).ok()?.checked_mul(8)?;
        let (counts, rest) = bytes.split_at_checked(counted)?;
        let counts = counts.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        let found = match rest.split_first_chunk() {
            None => None,
            Some((is_complete, moments)) => Some(Found {
                moments: Moments::from_bytes(moments)?,
                bad: None,
                is_complete: u64::from_le_bytes(*is_complete) != 0,
            }),
        };
        Some(Kept { counts, found })
    }
}
