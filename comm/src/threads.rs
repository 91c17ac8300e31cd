//! Ranks that are threads of one process, over the same code as ranks that are processes: for tests, and for trying
//! things out.
//!
//! With a seed every rank dawdles at random, in every call and within it, so that ranks come to each place in every order.

use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;
use crate::group::Group;
use crate::shared::{Board, Delays, Segment, Shared};

/// One rank: what its thread is given.
#[derive(Clone, Debug)]
pub struct ThreadRank {
    segment: Segment,
    board: Board,
    rank: usize,
    seed: Option<u64>,
    timeout: Duration,
}

/// `size` ranks, one for each thread. Their groups wait `timeout` for each other; with a seed they dawdle.
pub fn ranks(size: usize, seed: Option<u64>, timeout: Duration) -> Result<Vec<ThreadRank>> {
    let segment = Segment::in_process(size)?;
    Ok(ranks_on(&segment, seed, timeout))
}

/// The ranks of a segment that is there.
pub(crate) fn ranks_on(segment: &Segment, seed: Option<u64>, timeout: Duration) -> Vec<ThreadRank> {
    let board = Board::new(segment);
    let rank = |rank| ThreadRank { segment: segment.clone(), board: board.clone(), rank, seed, timeout };
    (0..segment.local_size()).map(rank).collect()
}

impl ThreadRank {
    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks.
    pub fn size(&self) -> usize {
        self.segment.local_size()
    }

    /// The job's page.
    pub fn board(&self) -> &Board {
        &self.board
    }

    /// This rank's part of the implementation on `channel` (0 to 7), which it takes once.
    pub fn collective(&self, channel: usize) -> Result<Shared> {
        let delays = self.seed.map(|seed| Delays::new(seed, self.rank, channel));
        Shared::delayed(self.segment.clone(), channel, self.rank, (0..self.size()).collect(), delays)
    }

    /// The group of all ranks on `channel` (0 to 7), which this rank makes once.
    pub fn group(&self, channel: usize, name: &'static str) -> Result<Group> {
        Ok(Group::new(Arc::new(self.collective(channel)?), name, self.timeout))
    }
}
