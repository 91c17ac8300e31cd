//! The tree along which sums over the shards of a batch are made: pure functions of the number of
//! shards and of ranks.
//!
//! It is a binary tree over the shards, padded to a power of two. A node whose right half has no
//! shards equals its left half, passed on without an addition. Each rank has a contiguous range of
//! shards and adds the complete subtrees within it; the owner of a slice adds the rest. So every
//! addition has the same operands on any number of ranks.

use std::ops::Range;

pub use ddp_kernels::sums::Addend;

/// A subtree: `2^level` shards from `index * 2^level` on, as far as there are shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    level: u32,
    index: usize,
}

/// The tree of this many shards over this many ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SumTree {
    shards: usize,
    /// By rank: the subtrees that it adds by itself.
    nodes: Vec<Vec<Node>>,
    /// What the sum of all is made of, in order.
    order: Vec<Addend>,
}

/// The sums that can be made of what neighbouring ranks give, in order: adjoining subtrees are
/// added as soon as both halves of a larger one are there.
fn sums(given: &[Vec<Node>], shards: usize) -> Vec<(Node, Vec<Addend>)> {
    let mut left = Vec::<(Node, Vec<Addend>)>::new();
    for (rank, nodes) in given.iter().enumerate() {
        for (row, &(mut node)) in nodes.iter().enumerate() {
            let (mut parts, mut additions) = (Vec::new(), 0);
            while (1 << node.level) < shards {
                let Node { level, index } = node;
                let is_right = !index.is_multiple_of(2);
                match left.last() {
                    Some((last, _))
                        if is_right && (last.level, last.index + 1) == (level, index) =>
                    {
                        additions += 1;
                        parts = [left.pop().expect("there is a last").1, parts].concat();
                    }
                    // The other half has no shards.
                    _ if !is_right && (index + 1) << level >= shards => {}
                    _ => break,
                }
                let (level, index) = (level + 1, index / 2);
                node = Node { level, index };
            }
            parts.push(Addend {
                rank,
                row,
                additions,
            });
            left.push((node, parts));
        }
    }
    left
}

impl SumTree {
    /// The tree of `shards` shards over `ranks` ranks, at most as many.
    pub fn new(shards: usize, ranks: usize) -> SumTree {
        assert!(
            (1..=shards).contains(&ranks),
            "{shards} shards for {ranks} ranks"
        );
        let (nodes, order) = (vec![Vec::new(); ranks], Vec::new());
        let mut tree = SumTree {
            shards,
            nodes,
            order,
        };
        for rank in 0..ranks {
            let own = tree.own_sums(rank).into_iter();
            tree.nodes[rank] = own.map(|(node, _)| node).collect();
        }
        tree.order = tree.sums_of(0..ranks).remove(0);
        tree
    }

    /// The sums that a rank makes of its shards.
    fn own_sums(&self, rank: usize) -> Vec<(Node, Vec<Addend>)> {
        let shards = self.shards_of(rank).map(|index| Node { level: 0, index });
        sums(&[shards.collect()], self.shards)
    }

    /// How many ranks.
    pub fn ranks(&self) -> usize {
        self.nodes.len()
    }

    /// The shards of a rank. Any two ranks have equally many, or one more or less.
    pub fn shards_of(&self, rank: usize) -> Range<usize> {
        let edge = |rank: usize| self.shards * rank / self.ranks();
        edge(rank)..edge(rank + 1)
    }

    /// For each shard of a rank, how many additions follow it.
    pub fn additions(&self, rank: usize) -> Vec<usize> {
        let parts = self.own_sums(rank).into_iter().flat_map(|(_, parts)| parts);
        parts.map(|part| part.additions).collect()
    }

    /// How many partial sums a rank gives.
    pub fn given_by(&self, rank: usize) -> usize {
        self.nodes[rank].len()
    }

    /// The most partial sums that a rank keeps while it works on its shards, besides the current
    /// one.
    pub fn kept_by(&self, rank: usize) -> usize {
        let mut kept = 0;
        let each = self.additions(rank).into_iter().map(|additions| {
            kept = kept + 1 - additions;
            kept
        });
        // After the last shard nothing is kept.
        let each = each.collect::<Vec<_>>();
        each[..each.len() - 1].iter().copied().max().unwrap_or(0)
    }

    /// The partial sums that make up the sum over all shards, in order.
    pub fn order(&self) -> &[Addend] {
        &self.order
    }

    /// Of which sums of hosts the sum over all shards is made, in order. Hosts have neighbouring
    /// ranks; a part's `rank` is its host.
    pub(crate) fn order_of(&self, hosts: &[Vec<usize>]) -> Vec<Addend> {
        let of_host = |ranks: &Vec<usize>| {
            let given = &self.nodes[ranks[0]..ranks[0] + ranks.len()];
            let made = sums(given, self.shards).into_iter();
            made.map(|(node, _)| node).collect()
        };
        let given: Vec<Vec<Node>> = hosts.iter().map(of_host).collect();
        sums(&given, self.shards).remove(0).1
    }

    /// The sums that some neighbouring ranks can make by themselves, and of which partial sums.
    /// Ranks count from the first of them.
    pub(crate) fn sums_of(&self, ranks: Range<usize>) -> Vec<Vec<Addend>> {
        let made = sums(&self.nodes[ranks], self.shards).into_iter();
        made.map(|(_, parts)| parts).collect()
    }
}

#[cfg(test)]
mod tests;
