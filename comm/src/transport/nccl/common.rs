//! What both a group's calls and its watch need.
//!
//! Orders of memory. A rank counts `in_nccl` and then looks whether the generation has ended; its
//! watch sees that it has ended and then reads `in_nccl`. One of the two must see the other, which
//! acquire and release do not give: a load may pass an earlier store. So there is a fence of SeqCst
//! between the two steps on both sides. The second count is a release, and the watch acquires it:
//! what the call has done is done before the communicator is aborted. Where the watch only measures
//! time, it may see a count late (relaxed). `has_joined` guards no other memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::time::Duration;

use crate::collective::Call;
use crate::transport::failure::Failure;
use crate::transport::shared::GpuPages;

/// Grace period if no rank of this host is missing: another host may be able to name the culprit.
pub(super) const OTHER_HOSTS_GRACE: Duration = Duration::from_secs(2);

/// What a group's calls and its watch both need.
#[derive(Debug)]
pub(super) struct Common {
    pub(super) failure: Arc<Failure>,
    pub(super) pages: GpuPages,
    pub(super) group: &'static str,
    pub(super) timeout: Duration,
    /// How long calls may take before the group `has_joined`.
    join_timeout: Duration,
    has_joined: AtomicBool,
    /// Whether ranks are processes, which have to end together.
    pub(super) of_processes: bool,
    /// Counts when this rank's host enters and leaves NCCL: odd while it is in a call.
    pub(super) in_nccl: AtomicU64,
}

impl Common {
    pub(super) fn new(
        failure: &Arc<Failure>,
        (group, channel): (&'static str, usize),
        (timeout, join_timeout): (Duration, Duration),
        of_processes: bool,
    ) -> Common {
        Common {
            pages: GpuPages::new(&failure.board, channel),
            failure: Arc::clone(failure),
            group,
            timeout,
            join_timeout,
            has_joined: AtomicBool::new(false),
            of_processes,
            in_nccl: AtomicU64::new(0),
        }
    }

    /// How long a call may take: NCCL connects ranks at their first calls.
    pub(super) fn timeout(&self) -> Duration {
        if self.has_joined.load(Ordering::Acquire) {
            return self.timeout;
        }
        self.join_timeout
    }

    /// Every call has been made once.
    pub(super) fn set_joined(&self) {
        self.has_joined.store(true, Ordering::Release);
    }

    pub(super) fn local_rank(&self) -> usize {
        self.failure.identity.local_rank
    }

    /// The other ranks of this host: local rank and rank.
    pub(super) fn others(&self) -> impl Iterator<Item = (usize, usize)> {
        let own = self.local_rank();
        let all = self.failure.local_ranks().into_iter().enumerate();
        all.filter(move |(local_rank, _)| *local_rank != own)
    }

    /// Whether all ranks of the job are on this host.
    pub(super) fn knows_all(&self) -> bool {
        self.failure.identity.local_size == self.failure.identity.size
    }

    /// Records that this rank's host gives `call` to NCCL, until `exit`. Look only after this
    /// whether the generation has ended.
    pub(super) fn enter(&self, call: &Call<'_>) {
        let (board, channel) = (&self.failure.board, self.pages.channel());
        board.enter(self.local_rank(), channel, call);
        self.in_nccl.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Whether this rank's host is in no call. Ask after the generation was seen to end: a call
    /// that this does not see finds that out by itself.
    pub(super) fn is_idle(&self) -> bool {
        fence(Ordering::SeqCst);
        self.in_nccl.load(Ordering::Acquire).is_multiple_of(2)
    }

    pub(super) fn exit(&self) {
        self.in_nccl.fetch_add(1, Ordering::Release);
        let (board, channel) = (&self.failure.board, self.pages.channel());
        board.exit(self.local_rank(), channel);
    }
}
