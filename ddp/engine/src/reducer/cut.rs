//! How ZeRO-1's slices survive the loss of a rank.
//!
//! Each slice has an owner and a keeper, the rank `ReducerOptions::keeper` after it, on another
//! host if there are several. The owner gives the keeper the sums of the slice's gradients. Then
//! both make the same update, so both have its values and moments, with the same bits.
//!
//! An update is made by all ranks or by none. A rank first gets everything that its update reads
//! (sums, their norm, directions of whole matrices), and then waits until all ranks have (a
//! barrier). The update after that waits for nothing. So when ranks meet after a loss, either all
//! that are left have made the update or can make it now, without the others; or one cannot, then
//! none has passed the barrier, and they undo what they prepared.
//!
//! Slices are cut anew for the ranks of a new world, in the same way: each rank gets values and
//! moments of its new slices from ranks that have them, and keeps its old ones until all ranks have
//! theirs (a barrier again). If a rank is lost meanwhile, either all that are left can take their
//! new slices; or one cannot, then none has, and they cut anew from the old ones. Values are the
//! same in both cuts, so they are written in place.
//!
//! Only if owner and keeper of a slice are lost before it was cut anew are values or moments lost,
//! and the run continues from its last checkpoint.

use std::ops::Range;

use ddp_nn::params::Params;
use serde::{Deserialize, Serialize};

use super::options::{ReducerOptions, slices};

/// Which slices a rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Cut {
    /// The generation of the ranks for which slices were cut.
    pub(crate) number: u64,
    /// Among how many ranks.
    pub(crate) ranks: usize,
    /// The slice of which this rank is the owner.
    pub(crate) owns: usize,
    /// The slice of which it is the keeper.
    pub(crate) keeps: Option<usize>,
}

impl Cut {
    /// That of rank `rank` of `ranks`.
    pub(crate) fn of(number: u64, [rank, ranks]: [usize; 2], options: ReducerOptions) -> Cut {
        Cut {
            number,
            ranks,
            owns: rank,
            keeps: options.kept_by(rank, ranks),
        }
    }

    /// Whether ranks that have these slices have all of them.
    pub(crate) fn are_whole(cuts: &[Option<Cut>]) -> bool {
        let all = || cuts.iter().flatten();
        let has = |slice| all().any(|cut| cut.owns == slice || cut.keeps == Some(slice));
        all().next().is_none_or(|cut| (0..cut.ranks).all(has))
    }

    /// The elements of the gradients' arena that it owns, and those that it keeps.
    pub(crate) fn ranges(
        &self,
        params: &Params,
        options: ReducerOptions,
    ) -> [Vec<Range<usize>>; 2] {
        let of = |slice| slices(params, [slice, self.ranks], options);
        [of(self.owns), self.keeps.map_or_else(Vec::new, of)]
    }
}

/// Elements that one rank gives to another, or has itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) range: Range<usize>,
}

/// Who gives what, from the ranges that each rank has to those that each gets, in one order for all
/// ranks. Each move is part of one range of either rank. What no rank has is padding.
pub(crate) fn moves(held: &[Vec<Range<usize>>], wanted: &[Vec<Range<usize>>]) -> Vec<Move> {
    let all = || held.iter().chain(wanted).flatten();
    let mut edges: Vec<usize> = all().flat_map(|range| [range.start, range.end]).collect();
    edges.sort_unstable();
    edges.dedup();
    let has = |ranges: &[Range<usize>], at: usize| ranges.iter().any(|range| range.contains(&at));
    let mut moves = Vec::new();
    for edge in edges.windows(2) {
        let range = edge[0]..edge[1];
        let having = || (0..held.len()).filter(|&rank| has(&held[rank], range.start));
        for to in (0..wanted.len()).filter(|&rank| has(&wanted[rank], range.start)) {
            let from = having().find(|&rank| rank == to).or(having().next());
            let range = range.clone();
            moves.extend(from.map(|from| Move { from, to, range }));
        }
    }
    moves
}
