//! The call that a rank is in, written where any other rank can read it at any time.
//!
//! A record is words that one thread writes and others may read meanwhile: every word is an atomic, and a version that is
//! odd while it is written tells a reader to look again. Writing it costs some ten stores, no lock and no formatting.

use std::array;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use ddp_kernels::DType;

use super::board::cut;
use crate::collective::{Call, Operation, Reduce};

/// Bytes of a record in the segment.
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

/// What a rank is doing, or did last, on one channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Activity {
    /// Whether it is still at it.
    pub in_progress: bool,
    /// The call: `all_reduce sum of f32 × 100`.
    pub what: String,
    /// The number of the call on its group.
    pub sequence: u64,
    /// The group's name.
    pub group: String,
    /// The caller's source file (the end of its path, if that is long) and line.
    pub place: String,
}

impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (call {} of group {}, at {})", self.what, self.sequence, self.group, self.place)
    }
}

/// What ranks must agree on in a call: the operation, its root, its dtype in one word; and the count of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) operation: u64,
    pub(super) count: u64,
}

impl Asked {
    pub(super) fn of(call: &Call<'_>) -> Asked {
        let (kind, detail) = match call.operation {
            Operation::AllReduce(reduce) => (1, reduce_code(reduce)),
            Operation::ReduceScatter(reduce) => (2, reduce_code(reduce)),
            Operation::AllGather => (3, 0),
            Operation::Broadcast { root } => (4, root as u64),
            Operation::Send { to } => (5, to as u64),
            Operation::Receive { from } => (6, from as u64),
            Operation::Barrier => (7, 0),
        };
        // 0 for a call without a tensor.
        let dtype = call.tensor.map_or(0, |tensor| {
            1 + DType::ALL.iter().position(|&dtype| dtype == tensor.dtype()).expect("ALL has every dtype") as u64
        });
        let count = call.tensor.map_or(0, |tensor| tensor.count() as u64);
        Asked { operation: kind | dtype << 8 | detail << 16, count }
    }
}

/// The same for `nccl/`: two words.
pub(crate) fn asked(call: &Call<'_>) -> [u64; 2] {
    let Asked { operation, count } = Asked::of(call);
    [operation, count]
}

impl Asked {
    /// Whether this, which a sender said, is the message that `call`, a receive by the local rank `to`, waits for. The sender
    /// named it by that number too: where the ranks of a host are some of a job's, `hosts.rs` has translated both calls.
    pub(super) fn is_for(&self, to: usize, call: &Call<'_>) -> bool {
        let wanted = Asked::of(&Call { operation: Operation::Send { to }, ..*call });
        *self == wanted
    }
}

fn reduce_code(reduce: Reduce) -> u64 {
    match reduce {
        Reduce::Sum => 0,
        Reduce::Max => 1,
        Reduce::Min => 2,
    }
}

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let detail = self.operation >> 16;
        let reduce = [Reduce::Sum, Reduce::Max, Reduce::Min].into_iter().find(|&reduce| reduce_code(reduce) == detail);
        let operation = match (self.operation & 0xff, reduce) {
            (1, Some(reduce)) => Operation::AllReduce(reduce),
            (2, Some(reduce)) => Operation::ReduceScatter(reduce),
            (3, _) => Operation::AllGather,
            (4, _) => Operation::Broadcast { root: detail as usize },
            (5, _) => Operation::Send { to: detail as usize },
            (6, _) => Operation::Receive { from: detail as usize },
            (7, _) => Operation::Barrier,
            _ => return f.write_str("an unknown call"),
        };
        write!(f, "{operation}")?;
        let dtype = (self.operation >> 8 & 0xff).checked_sub(1).and_then(|code| DType::ALL.get(code as usize));
        dtype.map_or(Ok(()), |dtype| write!(f, " of {dtype} × {}", self.count))
    }
}

/// The words of one record.
pub(super) struct Record<'a> {
    words: [&'a AtomicU64; WORDS],
}

impl<'a> Record<'a> {
    pub(super) fn new(word: impl Fn(usize) -> &'a AtomicU64) -> Record<'a> {
        Record { words: array::from_fn(word) }
    }

    fn set(&self, word: usize, value: u64) {
        self.words[word].store(value, Ordering::Relaxed);
    }

    fn get(&self, word: usize) -> u64 {
        self.words[word].load(Ordering::Relaxed)
    }

    /// Writes the call down. One thread at a time writes.
    pub(super) fn enter(&self, call: &Call<'_>) {
        let version = self.get(VERSION) | 1;
        self.set(VERSION, version);
        fence(Ordering::Release);
        let asked = Asked::of(call);
        let (group, file) = (cut(call.group, 8 * GROUP_WORDS), call.site.file());
        let file = &file[file.ceil_char_boundary(file.len().saturating_sub(8 * FILE_WORDS))..];
        self.set(IN_PROGRESS, 1);
        self.set(OPERATION, asked.operation);
        self.set(COUNT, asked.count);
        self.set(SEQUENCE, call.sequence);
        self.set(PLACE, u64::from(call.site.line()) | (group.len() as u64) << 32 | (file.len() as u64) << 48);
        self.set_text(GROUP, group);
        self.set_text(FILE, file);
        self.words[VERSION].store(version.wrapping_add(1), Ordering::Release);
    }

    /// Says that the call is over.
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

    /// What was written last; none if nothing was, or if it changes faster than it can be read.
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

/// Another process wrote these words: whatever they say, this gives text.
fn decode(words: &[u64; WORDS]) -> Activity {
    let text = |first: usize, word_count: usize, bytes: u64| {
        let all: Vec<u8> = words[first..first + word_count].iter().flat_map(|word| word.to_le_bytes()).collect();
        String::from_utf8_lossy(&all[..all.len().min(bytes as usize)]).into_owned()
    };
    let place = words[PLACE];
    let file = text(FILE, FILE_WORDS, place >> 48);
    Activity {
        in_progress: words[IN_PROGRESS] != 0,
        what: Asked { operation: words[OPERATION], count: words[COUNT] }.to_string(),
        sequence: words[SEQUENCE],
        group: text(GROUP, GROUP_WORDS, place >> 32 & 0xffff),
        place: format!("{file}:{}", place & 0xffff_ffff),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ddp_kernels::stream::Stream;
    use ddp_kernels::{Device, Tensor};
    use std::panic::Location;
    use std::time::Duration;

    fn call<'a>(operation: Operation, tensor: Option<&'a Tensor>, stream: &'a Stream, sequence: u64) -> Call<'a> {
        let (timeout, group, site) = (Duration::from_secs(1), "gradients", Location::caller());
        Call { operation, tensor, stream, sequence, timeout, group, site }
    }

    #[test]
    fn every_call_reads_as_it_was_written() {
        let words: [AtomicU64; WORDS] = Default::default();
        let record = Record::new(|index| &words[index]);
        assert_eq!(record.read(), None);
        let stream = Stream::default_of(Device::Cpu).unwrap();
        let tensor = Tensor::zeros(&[2, 3], DType::BF16, Device::Cpu).unwrap();
        for (sequence, (operation, has_tensor, expected)) in [
            (Operation::AllReduce(Reduce::Sum), true, "all_reduce sum of bf16 × 6"),
            (Operation::ReduceScatter(Reduce::Min), true, "reduce_scatter min of bf16 × 6"),
            (Operation::AllGather, true, "all_gather of bf16 × 6"),
            (Operation::Broadcast { root: 200 }, true, "broadcast from rank 200 of bf16 × 6"),
            (Operation::Send { to: 3 }, true, "send to rank 3 of bf16 × 6"),
            (Operation::Receive { from: 1 }, true, "receive from rank 1 of bf16 × 6"),
            (Operation::Barrier, false, "barrier"),
        ]
        .into_iter()
        .enumerate()
        {
            let call = call(operation, has_tensor.then_some(&tensor), &stream, sequence as u64);
            record.enter(&call);
            let seen = record.read().unwrap();
            let place = format!("{}:{}", call.site.file(), call.site.line());
            assert_eq!(seen.to_string(), format!("{expected} (call {sequence} of group gradients, at {place})"));
            assert!(seen.in_progress);
            record.exit();
            assert!(!record.read().unwrap().in_progress);
        }
    }

    #[test]
    fn what_is_read_is_never_half_of_one_and_half_of_another() {
        let words: [AtomicU64; WORDS] = Default::default();
        let stream = Stream::default_of(Device::Cpu).unwrap();
        let tensors = [1, 2].map(|count| Tensor::zeros(&[count], DType::F32, Device::Cpu).unwrap());
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let record = Record::new(|index| &words[index]);
                for sequence in 0..20_000 {
                    let tensor = &tensors[sequence % 2];
                    record.enter(&call(Operation::AllGather, Some(tensor), &stream, tensor.count() as u64));
                }
                done.store(true, Ordering::Release);
            });
            let record = Record::new(|index| &words[index]);
            while !done.load(Ordering::Acquire) {
                if let Some(seen) = record.read() {
                    assert!(seen.what.ends_with(&format!("× {}", seen.sequence)), "{seen}");
                }
            }
        });
    }

    #[test]
    fn nonsense_is_text_too() {
        let seen = decode(&[u64::MAX; WORDS]);
        assert!(seen.to_string().starts_with("an unknown call"), "{seen}");
        assert_eq!(
            decode(&array::from_fn(|word| if word == OPERATION { 1 | 99 << 8 } else { 0 })).what,
            "all_reduce sum"
        );
    }
}
