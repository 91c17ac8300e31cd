//! Whether ranks make the same collectives, and which ranks are missing, according to the marks of
//! their devices (`shared/gpu_page.rs`). Pure functions.

use ddp_kernels::progress::ReportedWork;

use crate::transport::shared::{COLLECTIVES, Marks};

/// Two ranks that made different collectives at the same place in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallDifference {
    /// The other rank, by its local rank.
    pub(super) peer: usize,
    pub(super) mine: ReportedWork,
    pub(super) theirs: ReportedWork,
}

impl CallDifference {
    /// The marked calls are the same: the ranks differed in a call before them.
    pub(super) fn is_older(&self) -> bool {
        self.mine.call == self.theirs.call
    }
}

/// Whether `number` comes before `other`, for numbers that wrap.
fn is_before(number: u32, other: u32) -> bool {
    (number.wrapping_sub(other) as i32) < 0
}

/// The first place at which this rank and another made different collectives.
pub(super) fn difference(mine: &Marks, others: &[(usize, Marks)]) -> Option<CallDifference> {
    let mut first: Option<CallDifference> = None;
    for (peer, marks) in others {
        for mine in &mine.ring {
            let theirs = marks
                .ring
                .iter()
                .find(|theirs| theirs.number == mine.number);
            let Some(theirs) = theirs.filter(|theirs| theirs.chain != mine.chain) else {
                continue;
            };
            if first.is_none_or(|first| is_before(mine.number, first.mine.number)) {
                first = Some(CallDifference {
                    peer: *peer,
                    mine: *mine,
                    theirs: *theirs,
                });
            }
        }
    }
    first
}

/// The ranks that have not come to the collective that this one is in.
pub(super) fn missing(mine: &Marks, others: &[(usize, Marks)]) -> Vec<usize> {
    let number = mine.lanes[COLLECTIVES].begun;
    let is_missing = |marks: &Marks| is_before(marks.lanes[COLLECTIVES].begun, number);
    let missing = others.iter().filter(|(_, marks)| is_missing(marks));
    missing.map(|(peer, _)| *peer).collect()
}

#[cfg(test)]
mod tests;
