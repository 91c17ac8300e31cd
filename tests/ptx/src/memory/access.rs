//! How an instruction accesses memory, and a mistake with that.

use crate::finding::{Detail, Fault, Kind};

/// How an instruction accesses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    Read,
    /// Through the read-only path.
    ReadOnly,
    Write,
    /// Read and changed at once.
    Atomic,
}

impl How {
    pub(super) fn does(self) -> &'static str {
        match self {
            How::Read | How::ReadOnly => "read",
            How::Write => "wrote",
            How::Atomic => "updated (atomic)",
        }
    }
}

fn plural(bytes: u32) -> &'static str {
    if bytes == 1 { "" } else { "s" }
}

/// A mistake with an access to global memory.
#[cold]
pub(crate) fn wrong(
    kind: Kind,
    lane: u32,
    how: How,
    address: u64,
    bytes: u32,
    why: String,
) -> Fault {
    let does = how.does();
    let mut fault = Fault::new(
        kind,
        lane,
        format!("{does} {bytes} byte{} at {address:#x}{why}", plural(bytes)),
    );
    fault.detail = Some(Box::new(Detail {
        bytes: Some(address..address.saturating_add(u64::from(bytes))),
        does,
        other: None,
    }));
    fault
}
