//! Ranks that are threads of one process, running the same code as ranks that are processes: for
//! tests, and for trying things out.
//!
//! With a seed, every rank has random delays between and within calls, so that ranks arrive in
//! every order.

use crate::error::Result;
use crate::launch::cores;
use crate::transport::shared::{Board, Delays, Segment, Shared};

/// One rank, for its thread.
#[derive(Clone, Debug)]
pub(crate) struct ThreadRank {
    pub(crate) rank: usize,
    pub(crate) segment: Segment,
    seed: Option<u64>,
}

/// The ranks of a segment.
pub(crate) fn ranks(segment: &Segment, seed: Option<u64>) -> Vec<ThreadRank> {
    let rank = |rank| ThreadRank {
        rank,
        segment: segment.clone(),
        seed,
    };
    (0..segment.local_size()).map(rank).collect()
}

impl ThreadRank {
    pub(crate) fn board(&self) -> Board {
        Board::new(&self.segment)
    }

    /// This rank's part of the collectives on `channel`, which it takes once.
    pub(crate) fn collective(&self, channel: usize) -> Result<Shared> {
        let delays = self.seed.map(|seed| Delays::new(seed, self.rank, channel));
        let (segment, ranks) = (self.segment.clone(), 0..self.segment.local_size());
        let is_roomy = cores::are_roomy(&[cores::own_cores()], ranks.len());
        Shared::new(
            segment,
            channel,
            self.rank,
            ranks.collect(),
            is_roomy,
            delays,
        )
    }
}
