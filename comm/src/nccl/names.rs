//! What a call on a group of GPUs is called: a key of 32 bits, which the device itself tells (`ddp_kernels::progress`), and a text, which is
//! written where all ranks of the host can read it. Pure.

use std::fmt::Write as _;

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::collective::{Call, Operation};
use crate::error::Line;
use crate::shared::{COLLECTIVES, PAIRS, asked};

/// The lane of calls that start together: of collectives if there is one among them.
pub(super) fn lane(calls: &[Call<'_>]) -> usize {
    if calls.iter().any(|call| peer_of(call.operation).is_none()) { COLLECTIVES } else { PAIRS }
}

fn peer_of(operation: Operation) -> Option<usize> {
    match operation {
        Operation::Send { to } => Some(to),
        Operation::Receive { from } => Some(from),
        _ => None,
    }
}

/// The one other rank that these calls are about; none if they are about several, or all.
pub(super) fn peer(calls: &[Call<'_>]) -> Option<usize> {
    let first = peer_of(calls.first()?.operation)?;
    calls.iter().all(|call| peer_of(call.operation) == Some(first)).then_some(first)
}

/// A hash of all that ranks must agree on in calls that start together. Sends and receives are the business of pairs, and count only
/// where they are alone. The tensor's name counts where all ranks give and take alike: two buckets of one length in another
/// order would be added up in silence. Source lines do not: a root and the others may well stand on different ones.
pub(super) fn key(calls: &[Call<'_>]) -> u32 {
    let of_pairs = lane(calls) == PAIRS;
    let mut hash = 0x6464_702d_6e63_636c;
    for call in calls {
        if peer_of(call.operation).is_some() != of_pairs {
            continue;
        }
        let name = call.tensor.filter(|_| has_name(call.operation)).and_then(|tensor| tensor.name()).unwrap_or("");
        let [operation, count] = asked(call);
        let mut words = [0; 24];
        for (bytes, word) in words.chunks_exact_mut(8).zip([operation, count, xxh3_64(name.as_bytes())]) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        hash = xxh3_64_with_seed(&words, hash);
    }
    (hash ^ hash >> 32) as u32
}

/// What was called with one more: how many, and a hash of all.
pub(super) fn chained((count, chain): (u64, u64), key: u32) -> (u64, u64) {
    (count + 1, xxh3_64_with_seed(&key.to_le_bytes(), chain))
}

fn has_name(operation: Operation) -> bool {
    matches!(operation, Operation::AllReduce(_) | Operation::ReduceScatter(_) | Operation::AllGather)
}

/// `all_reduce sum of "bucket 2" f32[1000] on cuda:0 (group gradients, at step.rs:12)`.
pub(super) fn text(calls: &[Call<'_>]) -> String {
    let mut text = String::new();
    let Some(first) = calls.first() else { return text };
    if calls.len() > 1 {
        _ = write!(text, "{} calls that start together: ", calls.len());
    }
    for (index, call) in calls.iter().enumerate() {
        _ = write!(text, "{}{}", if index > 0 { ", " } else { "" }, call.operation);
        if let Some(tensor) = call.tensor {
            _ = write!(text, " of {tensor}");
        }
    }
    // A text that is cut keeps what matters most: where.
    const ROOM_BYTES: usize = 150;
    let end = text.floor_char_boundary(ROOM_BYTES.min(text.len()));
    if end < text.len() {
        text.truncate(end);
        text.push('…');
    }
    let site = Line(first.site).to_string();
    let site = &site[site.ceil_char_boundary(site.len().saturating_sub(50))..];
    _ = write!(text, " (group {}, at {site})", first.group);
    text
}

#[cfg(test)]
mod tests {
    use std::panic::Location;
    use std::time::Duration;

    use ddp_kernels::stream::Stream;
    use ddp_kernels::{DType, Device, Tensor};

    use super::*;
    use crate::collective::Reduce;

    const SUM: Operation = Operation::AllReduce(Reduce::Sum);

    fn with<R>(operations: &[(Operation, &str, usize)], look: impl FnOnce(&[Call<'_>]) -> R) -> R {
        let stream = Stream::default_of(Device::Cpu).unwrap();
        let tensor = |(_, name, count): &(Operation, &str, usize)| {
            Tensor::zeros(&[*count], DType::F32, Device::Cpu).unwrap().named(name)
        };
        let tensors: Vec<Tensor> = operations.iter().map(tensor).collect();
        let call = |((operation, ..), tensor): (&(Operation, _, _), _)| Call {
            operation: *operation,
            tensor: Some(tensor),
            stream: &stream,
            sequence: 0,
            timeout: Duration::from_secs(1),
            group: "gradients",
            site: Location::caller(),
        };
        look(&operations.iter().zip(&tensors).map(call).collect::<Vec<_>>())
    }

    #[test]
    fn calls_that_must_agree_and_do_not_have_other_keys() {
        let all = [
            (SUM, "a", 10),
            (SUM, "b", 10),
            (SUM, "a", 11),
            (Operation::AllGather, "a", 10),
            (Operation::ReduceScatter(Reduce::Sum), "a", 10),
            (Operation::Broadcast { root: 0 }, "a", 10),
            (Operation::Broadcast { root: 1 }, "a", 10),
        ];
        let mut keys: Vec<u32> = all.iter().map(|one| with(&[*one], key)).collect();
        assert_eq!(keys, all.map(|one| with(&[one], key)));
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), all.len());
        let (one, other) = ((Operation::Broadcast { root: 0 }, "a", 10), (Operation::Broadcast { root: 0 }, "b", 10));
        assert_eq!(with(&[one], key), with(&[other], key), "who gives and who takes may call it differently");
        assert_ne!(with(&[all[0], all[1]], key), with(&[all[1], all[0]], key));
    }

    #[test]
    fn pairs_have_a_lane_of_their_own_and_do_not_disturb_collectives() {
        let (send, receive) = ((Operation::Send { to: 1 }, "x", 5), (Operation::Receive { from: 1 }, "y", 5));
        assert_eq!((with(&[send, receive], lane), with(&[send, receive], peer)), (PAIRS, Some(1)));
        let from_another = (Operation::Receive { from: 2 }, "y", 5);
        assert_eq!((with(&[send, from_another], lane), with(&[send, from_another], peer)), (PAIRS, None));
        let sum = (SUM, "a", 10);
        assert_eq!((with(&[sum, send], lane), with(&[sum, send], peer)), (COLLECTIVES, None));
        assert_eq!(with(&[sum, send], key), with(&[from_another, sum], key));
        assert_ne!(with(&[send], key), with(&[receive], key));
    }

    #[test]
    fn texts_say_what_and_where_and_keep_where_when_they_are_cut() {
        let text_of = |operations: &[(Operation, &str, usize)]| with(operations, text);
        let one = text_of(&[(SUM, "bucket 2", 10)]);
        assert!(one.starts_with("all_reduce sum of \"bucket 2\" f32[10] on cpu (group gradients, at "), "{one}");
        assert!(one.contains("names.rs:"), "{one}");
        let many = text_of(&[(Operation::Send { to: 1 }, "x", 5); 64]);
        assert!(many.starts_with("64 calls that start together: send to rank 1 of \"x\""), "{many}");
        assert!(many.contains('…') && many.contains("names.rs:") && many.len() <= 240, "{many}");
    }
}
