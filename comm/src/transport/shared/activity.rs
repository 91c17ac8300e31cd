//! The call that a rank is in, recorded where any other rank can read it at any time.
//!
//! A record consists of atomic words that one thread writes and others may read meanwhile. A
//! version that is odd while the record is written tells a reader to try again. Recording a call
//! costs some ten stores, no lock and no formatting.
//!
//! Orders of memory. The words are relaxed. The writer sets the odd version, then a release fence;
//! the reader has an acquire fence before it reads the version again. So a reader that saw any new
//! word sees the odd version or a later one, and tries again. The even version is a release, which
//! the reader's first look acquires: with it, it sees all words of that record. `exit` changes one
//! word, which a reader may see late. The next `enter` is of the same thread, or of one that took
//! the lock of the channel after it.

use std::array;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use ddp_kernels::DType;

use crate::collective::{Call, Operation, Reduce};

/// Bytes of a record in a segment.
pub(super) const RECORD_BYTES: usize = 8 * WORDS;
const WORDS: usize = 32;

const VERSION: usize = 0;
const IN_PROGRESS: usize = 1;
const OPERATION: usize = 2;
const COUNT: usize = 3;
const SEQUENCE: usize = 4;
const PLACE: usize = 5;
const GROUP: usize = 6;
const GROUP_WORDS: usize = 4;
const FILE: usize = GROUP + GROUP_WORDS;
const FILE_WORDS: usize = WORDS - FILE;

/// The call that a rank is in, or made last, on one channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Activity {
    /// Whether it is still in the call.
    pub(crate) in_progress: bool,
    /// `all_reduce sum of f32 × 100`.
    pub(crate) what: String,
    /// The number of the call on its group.
    pub(crate) sequence: u64,
    /// The group's name.
    pub(crate) group: String,
    /// The caller's source file (the end of its path, if that is long) and line.
    pub(crate) place: String,
}

impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} (call {} of group {}, at {})",
            self.what, self.sequence, self.group, self.place
        )
    }
}

/// What ranks must agree on in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Signature {
    /// The operation, its root or reduction, and the dtype.
    pub(crate) operation: u64,
    /// The number of elements.
    pub(crate) count: u64,
}

impl Signature {
    pub(crate) fn of(call: &Call<'_>) -> Signature {
        let (kind, detail) = match call.operation {
            Operation::AllReduce(reduce) => (1, reduce as u64),
            Operation::ReduceScatter(reduce) => (2, reduce as u64),
            Operation::AllGather => (3, 0),
            Operation::Broadcast { root } => (4, root as u64),
            Operation::Send { to } => (5, to as u64),
            Operation::Receive { from } => (6, from as u64),
            Operation::Barrier => (7, 0),
        };
        // 0 for a call without a tensor.
        let dtype = call.tensor.map_or(0, |tensor| 1 + tensor.dtype() as u64);
        let count = call.tensor.map_or(0, |tensor| tensor.count() as u64);
        Signature {
            operation: kind | dtype << 8 | detail << 16,
            count,
        }
    }
}

impl Signature {
    /// Whether this, from a sender, matches `call`, a receive by the local rank `to`. Both use
    /// local ranks: `hosts.rs` has translated the calls of jobs with several hosts.
    pub(super) fn is_for(&self, to: usize, call: &Call<'_>) -> bool {
        let wanted = Signature::of(&Call {
            operation: Operation::Send { to },
            ..*call
        });
        *self == wanted
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let detail = self.operation >> 16;
        let reduce = Reduce::ALL.get(detail as usize);
        let operation = match (self.operation & 0xff, reduce) {
            (1, Some(reduce)) => Operation::AllReduce(*reduce),
            (2, Some(reduce)) => Operation::ReduceScatter(*reduce),
            (3, _) => Operation::AllGather,
            (4, _) => Operation::Broadcast {
                root: detail as usize,
            },
            (5, _) => Operation::Send {
                to: detail as usize,
            },
            (6, _) => Operation::Receive {
                from: detail as usize,
            },
            (7, _) => Operation::Barrier,
            _ => return f.write_str("an unknown call"),
        };
        write!(f, "{operation}")?;
        let dtype = (self.operation >> 8 & 0xff)
            .checked_sub(1)
            .and_then(|code| DType::ALL.get(code as usize));
        dtype.map_or(Ok(()), |dtype| write!(f, " of {dtype} × {}", self.count))
    }
}

/// The words of one record.
pub(super) struct ActivityRecord<'a> {
    words: [&'a AtomicU64; WORDS],
}

impl<'a> ActivityRecord<'a> {
    pub(super) fn new(word: impl Fn(usize) -> &'a AtomicU64) -> ActivityRecord<'a> {
        ActivityRecord {
            words: array::from_fn(word),
        }
    }

    fn set(&self, word: usize, value: u64) {
        self.words[word].store(value, Ordering::Relaxed);
    }

    fn get(&self, word: usize) -> u64 {
        self.words[word].load(Ordering::Relaxed)
    }

    /// Records the call. One thread at a time writes.
    pub(super) fn enter(&self, call: &Call<'_>) {
        let version = self.get(VERSION) | 1;
        self.set(VERSION, version);
        fence(Ordering::Release);
        let signature = Signature::of(call);
        let (group, file) = (cut(call.group, 8 * GROUP_WORDS), call.site.file());
        let file = &file[file.ceil_char_boundary(file.len().saturating_sub(8 * FILE_WORDS))..];
        self.set(IN_PROGRESS, 1);
        self.set(OPERATION, signature.operation);
        self.set(COUNT, signature.count);
        self.set(SEQUENCE, call.sequence);
        self.set(
            PLACE,
            u64::from(call.site.line()) | (group.len() as u64) << 32 | (file.len() as u64) << 48,
        );
        self.set_text(GROUP, group);
        self.set_text(FILE, file);
        self.words[VERSION].store(version.wrapping_add(1), Ordering::Release);
    }

    /// Records that the call is over.
    pub(super) fn exit(&self) {
        self.set(IN_PROGRESS, 0);
    }

    fn set_text(&self, first: usize, text: &str) {
        for (index, part) in text.as_bytes().chunks(8).enumerate() {
            let mut bytes = [0; 8];
            bytes[..part.len()].copy_from_slice(part);
            self.set(first + index, u64::from_le_bytes(bytes));
        }
    }

    /// The last record. None before the first record, or if it changes faster than it can be read.
    pub(super) fn read(&self) -> Option<Activity> {
        for _ in 0..1000 {
            let version = self.words[VERSION].load(Ordering::Acquire);
            if version == 0 {
                return None;
            }
            let words: [u64; WORDS] = array::from_fn(|word| self.get(word));
            fence(Ordering::Acquire);
            if version.is_multiple_of(2) && self.get(VERSION) == version {
                return Some(decode(&words));
            }
            std::hint::spin_loop();
        }
        None
    }
}

/// Another process wrote these words: any values become some text.
fn decode(words: &[u64; WORDS]) -> Activity {
    let text = |first: usize, word_count: usize, bytes: u64| {
        let all: Vec<u8> = words[first..first + word_count]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        String::from_utf8_lossy(&all[..all.len().min(bytes as usize)]).into_owned()
    };
    let place = words[PLACE];
    let file = text(FILE, FILE_WORDS, place >> 48);
    Activity {
        in_progress: words[IN_PROGRESS] != 0,
        what: Signature {
            operation: words[OPERATION],
            count: words[COUNT],
        }
        .to_string(),
        sequence: words[SEQUENCE],
        group: text(GROUP, GROUP_WORDS, place >> 32 & 0xffff),
        place: format!("{file}:{}", place & 0xffff_ffff),
    }
}

/// `text`, at most `bytes_max` bytes of it, cut between characters.
pub(super) fn cut(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}

#[cfg(test)]
mod tests;
