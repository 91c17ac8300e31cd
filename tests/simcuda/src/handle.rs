//! Numbers of streams, events and graphs, and the handles that the product sees: a number and its
//! kind, stored as a pointer. A handle cannot be dereferenced, and an event that is passed as a
//! stream is noticed.

/// Streams are numbered in order of creation over all devices. No number in this file is reused.
pub type StreamId = usize;

/// Events, in order of creation.
pub(crate) type EventId = usize;

/// Graphs, in order of creation; executable graphs are numbered separately.
pub(crate) type GraphId = usize;

/// Captures, from 1 in order of beginning, as cuStreamGetCaptureInfo reports.
pub(crate) type CaptureId = u64;

/// Queued operations and host calls, in order of the calls.
pub type OperationId = u64;

/// What a handle stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum HandleKind {
    Stream = 1,
    Event = 2,
    Graph = 3,
    Executable = 4,
    Node = 5,
    Communicator = 6,
}

// Not canonical on x86-64 and AArch64: dereferencing such a pointer faults.
const MARK: u64 = 0x5C << 56;
const INDEX_SHIFT: u32 = 4;
const INDEX_BITS: u32 = 40;

/// The handle of the `index`-th thing of its kind.
pub(crate) fn encode<T>(kind: HandleKind, index: usize) -> *mut T {
    let index = index as u64 + 1;
    assert!(
        index < 1 << INDEX_BITS,
        "more handles than a handle can number"
    );
    (MARK | (kind as u64) << 48 | index << INDEX_SHIFT) as *mut T
}

/// The index in a handle of this kind. Whether the object still exists is the owner's question.
pub(crate) fn decode<T>(kind: HandleKind, handle: *mut T) -> Option<usize> {
    let bits = handle as u64;
    let index = (bits >> INDEX_SHIFT) & ((1 << INDEX_BITS) - 1);
    (index > 0 && encode::<T>(kind, index as usize - 1) == handle).then(|| index as usize - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_of_one_kind_only() {
        let stream = encode::<u8>(HandleKind::Stream, 7);
        assert_eq!(decode(HandleKind::Stream, stream), Some(7));
        assert_eq!(decode(HandleKind::Event, stream), None);
        for forged in [0u64, 1, 2, 0x1000, stream as u64 + 1, u64::MAX] {
            assert_eq!(
                decode(HandleKind::Stream, forged as *mut u8),
                None,
                "{forged:#x}"
            );
        }
    }
}
