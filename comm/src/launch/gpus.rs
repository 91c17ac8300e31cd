//! Assigns GPUs to ranks, from what every rank of a job sees, so that no two ranks have the same
//! GPU.
//!
//! Ranks see GPUs in different ways. All ranks of a host may see all its GPUs; or, as Slurm and
//! pods arrange it, every rank sees one GPU and calls it `cuda:0`; or something in between. A UUID
//! identifies a GPU wherever it is seen, so one rule covers every case, including containers that
//! give one machine several host names: in rank order, each rank takes the first free GPUs that it
//! sees; if none is free, a rank that can use another GPU makes room. So an assignment is found
//! whenever there is one, and if all ranks see the same GPUs, the n-th rank has the n-th ones.
//!
//! If a driver reports no UUIDs, all ranks of a host are assumed to see the same GPUs in the same
//! order. What a process sees (CUDA_VISIBLE_DEVICES) is never narrowed: copies between GPUs need
//! both.

mod table;

use std::collections::{BTreeMap, BTreeSet};

pub use self::table::{GpuTable, RankGpus, Shortage, VisibleGpus};

/// Gives each rank `per_rank` of the GPUs that it sees. With `share`, several ranks may have the
/// same GPU if there are too few.
///
/// # Panics
/// If `per_rank` is 0.
pub fn assign(
    visible: Vec<VisibleGpus>,
    per_rank: usize,
    share: bool,
) -> Result<GpuTable, Shortage> {
    assert!(per_rank > 0, "a rank without GPUs needs no assignment");
    let mut matching = Matching::new(&visible);
    let ranks = 0..visible.len();
    let mut is_short = |rank: &usize| {
        let mut takes = (0..per_rank).map(|_| matching.take(*rank, &mut BTreeSet::new()));
        !takes.all(|took| took)
    };
    let short: Vec<usize> = ranks.clone().filter(|rank| is_short(rank)).collect();
    let mut gets: Vec<Vec<usize>> = ranks.map(|rank| matching.ordinals_of(rank)).collect();
    let table = |gets: Vec<Vec<usize>>, sharing| GpuTable {
        ranks: visible
            .iter()
            .zip(gets)
            .map(|(visible, gets)| RankGpus {
                visible: visible.clone(),
                gets,
            })
            .collect(),
        sharing,
    };
    let blind = visible.iter().position(|visible| visible.uuids.is_empty());
    match (&short[..], blind) {
        ([], _) => Ok(table(gets, Vec::new())),
        (_, None) if share => {
            let sharing = matching.share(&short, per_rank, &mut gets);
            Ok(table(gets, sharing))
        }
        ([first, ..], blind) => {
            let (lacking, seen) = matching.bottleneck(blind.filter(|_| share).unwrap_or(*first));
            Err(Shortage {
                table: table(gets, Vec::new()),
                per_rank,
                lacking,
                seen,
            })
        }
    }
}

/// Which rank sees which GPU and which rank holds it. GPUs have the same number wherever seen.
struct Matching {
    /// The GPUs that each rank sees, by its ordinals.
    sees: Vec<Vec<usize>>,
    /// The rank that holds each GPU.
    holders: Vec<Option<usize>>,
}

impl Matching {
    fn new(visible: &[VisibleGpus]) -> Matching {
        let mut numbers = BTreeMap::new();
        let mut number = |name: String| {
            let next = numbers.len();
            *numbers.entry(name).or_insert(next)
        };
        let sees = visible
            .iter()
            .map(|visible| visible.names().map(&mut number).collect());
        let sees = sees.collect();
        let holders = vec![None; numbers.len()];
        Matching { sees, holders }
    }

    /// Gives `rank` one more GPU, if necessary by moving ranks that can use another. `asked` are
    /// the GPUs that were already tried.
    fn take(&mut self, rank: usize, asked: &mut BTreeSet<usize>) -> bool {
        let seen = self.sees[rank].clone();
        if let Some(&free) = seen.iter().find(|&&gpu| self.holders[gpu].is_none()) {
            self.holders[free] = Some(rank);
            return true;
        }
        for gpu in seen {
            let Some(holder) = self.holders[gpu] else {
                continue;
            };
            if asked.insert(gpu) && self.take(holder, asked) {
                self.holders[gpu] = Some(rank);
                return true;
            }
        }
        false
    }

    /// The ordinals of the GPUs that `rank` holds.
    fn ordinals_of(&self, rank: usize) -> Vec<usize> {
        let sees = &self.sees[rank];
        let is_held = |ordinal: &usize| self.holders[sees[*ordinal]] == Some(rank);
        (0..sees.len()).filter(is_held).collect()
    }

    /// Gives the ranks that are `short` the GPUs with the fewest users among those they see.
    /// Returns the ranks that have a GPU in common with another.
    fn share(&self, short: &[usize], per_rank: usize, gets: &mut [Vec<usize>]) -> Vec<usize> {
        let mut users: Vec<Vec<usize>> = vec![Vec::new(); self.holders.len()];
        for (users, holder) in users.iter_mut().zip(&self.holders) {
            users.extend(holder);
        }
        for &rank in short {
            while gets[rank].len() < per_rank {
                let sees = &self.sees[rank];
                let least_used = (0..sees.len()).min_by_key(|&ordinal| users[sees[ordinal]].len());
                let ordinal = least_used.expect("every rank sees a GPU");
                gets[rank].push(ordinal);
                users[sees[ordinal]].push(rank);
            }
        }
        let has_several = |users: &&Vec<usize>| users.iter().any(|rank| *rank != users[0]);
        let sharing: BTreeSet<usize> = users
            .iter()
            .filter(has_several)
            .flatten()
            .copied()
            .collect();
        sharing.into_iter().collect()
    }

    /// Why `rank`, which is short of GPUs, cannot have more: ranks that see fewer GPUs between them
    /// than they need, and how many GPUs these are. Includes all ranks that see no other GPU.
    fn bottleneck(&self, rank: usize) -> (Vec<usize>, usize) {
        // All that it sees is held by ranks that see only GPUs held by such ranks in turn.
        let (mut ranks, mut seen) = (vec![rank], BTreeSet::new());
        let mut next = 0;
        while let Some(&rank) = ranks.get(next) {
            next += 1;
            for &gpu in &self.sees[rank] {
                seen.insert(gpu);
                ranks.extend(self.holders[gpu].filter(|holder| !ranks.contains(holder)));
            }
        }
        let sees_no_other = |rank: &usize| self.sees[*rank].iter().all(|gpu| seen.contains(gpu));
        let is_lacking = |rank: &usize| ranks.contains(rank) || sees_no_other(rank);
        let lacking = (0..self.sees.len()).filter(is_lacking);
        (lacking.collect(), seen.len())
    }
}

#[cfg(test)]
mod tests;
