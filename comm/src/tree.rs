//! The tree along which sums over the shards of a batch are made: pure functions of the number of
//! shards and of ranks.
//!
//! It is a binary tree over the shards, filled up to a power of two. A node whose right half has no
//! shards is its left half, passed on without an addition. Each rank has a contiguous range of
//! shards and adds the complete subtrees within it; the owner of a slice adds the rest. So every
//! addition has the same operands on any number of ranks.

use std::ops::Range;

/// A subtree: `2^level` shards from `index * 2^level` on, as far as there are shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    level: u32,
    index: usize,
}

/// One of the partial sums of which a sum is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// The rank that gives it.
    pub(crate) rank: usize,
    /// Its number among all that the rank gives.
    pub(crate) row: usize,
    /// Its number among those of the rank in this sum.
    pub(crate) place: usize,
    /// How many additions follow it: each adds the last two sums that are left.
    pub(crate) additions: usize,
}

/// The tree of so many shards over so many ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SumTree {
    shards: usize,
    /// By rank: the subtrees that it adds by itself.
    nodes: Vec<Vec<Node>>,
    /// What the sum of all is made of, in order.
    order: Vec<Part>,
}

/// Partial sums in order, as far as they can be added.
struct Folded {
    /// By partial sum: how many additions follow it.
    additions: Vec<usize>,
    /// The subtrees that are left, with the partial sums of which each is made.
    left: Vec<(Node, Range<usize>)>,
}

/// Adds adjoining subtrees as soon as both halves of a larger one are there.
fn fold(nodes: impl Iterator<Item = Node>, shards: usize) -> Folded {
    let (mut additions, mut left) = (Vec::new(), Vec::<(Node, Range<usize>)>::new());
    for (number, mut node) in nodes.enumerate() {
        let (mut first, mut count) = (number, 0);
        while (1 << node.level) < shards {
            let is_right = !node.index.is_multiple_of(2);
            let Node { level, index } = node;
            let half = (level, index.wrapping_sub(1));
            match left.last() {
                Some((last, parts)) if is_right && (last.level, last.index) == half => {
                    (first, count) = (parts.start, count + 1);
                    left.pop();
                }
                // The other half has no shards.
                _ if !is_right && (index + 1) << level >= shards => {}
                _ => break,
            }
            node = Node {
                level: level + 1,
                index: index / 2,
            };
        }
        additions.push(count);
        left.push((node, first..number + 1));
    }
    Folded { additions, left }
}

impl SumTree {
    /// The tree of `shards` shards over `ranks` ranks, at most as many.
    pub fn new(shards: usize, ranks: usize) -> SumTree {
        assert!(
            (1..=shards).contains(&ranks),
            "{shards} shards for {ranks} ranks"
        );
        let mut tree = SumTree {
            shards,
            nodes: vec![Vec::new(); ranks],
            order: Vec::new(),
        };
        for rank in 0..ranks {
            let own = tree.fold_shards(rank).left.into_iter();
            tree.nodes[rank] = own.map(|(node, _)| node).collect();
        }
        tree.order = tree.sums_of(0..ranks).remove(0);
        tree
    }

    fn fold_shards(&self, rank: usize) -> Folded {
        let shards = self.shards_of(rank);
        fold(shards.map(|index| Node { level: 0, index }), self.shards)
    }

    /// How many shards there are.
    pub fn shards(&self) -> usize {
        self.shards
    }

    /// How many ranks.
    pub fn ranks(&self) -> usize {
        self.nodes.len()
    }

    /// The shards of a rank. Those of two ranks differ by one at most in number.
    pub fn shards_of(&self, rank: usize) -> Range<usize> {
        let edge = |rank: usize| self.shards * rank / self.ranks();
        edge(rank)..edge(rank + 1)
    }

    /// For each shard of a rank, how many additions follow it.
    pub fn additions(&self, rank: usize) -> Vec<usize> {
        self.fold_shards(rank).additions
    }

    /// How many partial sums a rank gives.
    pub fn given_by(&self, rank: usize) -> usize {
        self.nodes[rank].len()
    }

    /// The most partial sums that a rank keeps while it works on its shards, besides the current
    /// one.
    pub fn kept_by(&self, rank: usize) -> usize {
        let additions = self.additions(rank);
        let mut kept = 0;
        let before_last = additions[..additions.len() - 1].iter();
        let each = before_last.map(|additions| {
            kept = kept + 1 - additions;
            kept
        });
        each.max().unwrap_or(0)
    }

    /// Of which partial sums the sum over all shards is made, in order.
    pub(crate) fn order(&self) -> &[Part] {
        &self.order
    }

    /// The partial sums of all ranks in order: the rank that gives each, its number among those of
    /// the rank, and how many additions follow it.
    pub fn steps(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let parts = self.order.iter();
        parts.map(|part| (part.rank, part.row, part.additions))
    }

    /// Of which sums of hosts the sum over all shards is made, in order. Hosts have neighbouring
    /// ranks; a part's `rank` is its host.
    pub(crate) fn order_of(&self, hosts: &[Vec<usize>]) -> Vec<Part> {
        let mut order = Vec::new();
        for (rank, ranks) in hosts.iter().enumerate() {
            let sums = self.sums_of(ranks[0]..ranks[0] + ranks.len());
            for (row, parts) in sums.iter().enumerate() {
                // Of all ranks together: the additions that no host makes by itself.
                let (last, rank_of_all) = (&parts[parts.len() - 1], ranks[0]);
                let is_last =
                    |part: &&Part| (part.rank, part.row) == (last.rank + rank_of_all, last.row);
                let of_all = self
                    .order
                    .iter()
                    .find(is_last)
                    .map_or(0, |part| part.additions);
                order.push(Part {
                    rank,
                    row,
                    place: row,
                    additions: of_all - last.additions,
                });
            }
        }
        order
    }

    /// The sums that some neighbouring ranks can make by themselves, and of which partial sums.
    /// Ranks count from the first of them.
    pub(crate) fn sums_of(&self, ranks: Range<usize>) -> Vec<Vec<Part>> {
        let given = ranks
            .clone()
            .flat_map(|rank| (0..self.given_by(rank)).map(move |row| (rank, row)));
        let given: Vec<(usize, usize)> = given.collect();
        let nodes = given.iter().map(|&(rank, row)| self.nodes[rank][row]);
        let Folded { additions, left } = fold(nodes, self.shards);
        let sum = |parts: Range<usize>| {
            let mut all: Vec<Part> = Vec::new();
            for number in parts {
                let (rank, row) = given[number];
                let rank = rank - ranks.start;
                let place = all.iter().filter(|part| part.rank == rank).count();
                all.push(Part {
                    rank,
                    row,
                    place,
                    additions: additions[number],
                });
            }
            all
        };
        left.into_iter().map(|(_, parts)| sum(parts)).collect()
    }
}

#[cfg(test)]
mod tests;
