//! Names for calls on a group of GPUs: a 32-bit key, which the device marks
//! (`ddp_kernels::progress`), and a text that all ranks of the host can read. Pure functions.

use std::fmt::Write as _;

use twox_hash::XxHash3_64;

use crate::collective::{Call, Operation};
use crate::error::Line;
use crate::transport::shared::{COLLECTIVES, PAIRS, Signature};

/// The lane of calls that start together: of collectives if there is one among them.
pub(super) fn lane(calls: &[Call<'_>]) -> usize {
    let is_pair = |call: &Call<'_>| call.operation.peer().is_some();
    if calls.iter().all(is_pair) {
        PAIRS
    } else {
        COLLECTIVES
    }
}

/// The one other rank that these calls are with; None if they are with several, or all.
pub(super) fn peer(calls: &[Call<'_>]) -> Option<usize> {
    let first = calls.first()?.operation.peer()?;
    let mut peers = calls.iter().map(|call| call.operation.peer());
    peers.all(|peer| peer == Some(first)).then_some(first)
}

/// A hash of all that ranks must agree on in calls that start together. Sends and receives count
/// only if there are no collectives. The tensor's name counts where all ranks give and take alike:
/// two buckets of one length in different orders would be added up silently. Source lines do not
/// count: a broadcast's root and the others may call it at different lines.
pub(super) fn key(calls: &[Call<'_>]) -> u32 {
    let of_pairs = lane(calls) == PAIRS;
    let counted = calls
        .iter()
        .filter(|call| call.operation.peer().is_some() == of_pairs);
    let hash = counted.fold(0x6464_702d_6e63_636c, |hash, call| {
        let name = call.tensor.and_then(|tensor| tensor.name());
        let name = name.filter(|_| has_name(call.operation)).unwrap_or("");
        let Signature { operation, count } = Signature::of(call);
        let mut words = [0; 24];
        for (bytes, word) in
            words
                .chunks_exact_mut(8)
                .zip([operation, count, XxHash3_64::oneshot(name.as_bytes())])
        {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        XxHash3_64::oneshot_with_seed(hash, &words)
    });
    (hash ^ hash >> 32) as u32
}

/// A history of calls with one more: how many, and a hash of them all.
pub(super) fn chained((count, hash): (u64, u64), key: u32) -> (u64, u64) {
    (
        count + 1,
        XxHash3_64::oneshot_with_seed(hash, &key.to_le_bytes()),
    )
}

fn has_name(operation: Operation) -> bool {
    matches!(
        operation,
        Operation::AllReduce(_) | Operation::ReduceScatter(_) | Operation::AllGather
    )
}

/// `all_reduce sum of "bucket 2" f32[1000] on cuda:0 (group gradients, at step.rs:12)`.
pub(super) fn text(calls: &[Call<'_>]) -> String {
    let first = &calls[0];
    let mut text = String::new();
    for (index, call) in calls.iter().enumerate() {
        let separator = ["", ", together with ", ", "][index.min(2)];
        _ = write!(text, "{separator}{}", call.operation);
        if let Some(tensor) = call.tensor {
            _ = write!(text, " of {tensor}");
        }
    }
    // A text that is cut keeps its place.
    const CALLS_BYTES_MAX: usize = 150;
    let end = text.floor_char_boundary(CALLS_BYTES_MAX);
    if end < text.len() {
        text.truncate(end);
        text.push('…');
    }
    let line = Line(first.site).to_string();
    let line = &line[line.ceil_char_boundary(line.len().saturating_sub(50))..];
    _ = write!(text, " (group {}, at {line})", first.group);
    text
}

#[cfg(test)]
mod tests;
