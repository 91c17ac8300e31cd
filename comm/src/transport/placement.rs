//! Which ranks are on which host.

use std::sync::Arc;

/// Which ranks are on which host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    /// The ranks of each host; those of one follow those of the one before.
    pub(crate) hosts: Vec<Vec<usize>>,
    /// This rank's host, and its index there.
    pub(crate) host: usize,
    pub(crate) local_rank: usize,
}

impl Placement {
    /// The placement seen from `rank`; ranks with equal keys share a host.
    pub(crate) fn new(keys: &[&str], rank: usize) -> Placement {
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        for (other, key) in keys.iter().enumerate() {
            match hosts.iter_mut().find(|ranks| keys[ranks[0]] == *key) {
                Some(ranks) => ranks.push(other),
                None => hosts.push(vec![other]),
            }
        }
        let (host, local_rank) = find(&hosts, rank);
        Placement {
            hosts,
            host,
            local_rank,
        }
    }

    /// The ranks of this host.
    pub(crate) fn here(&self) -> &[usize] {
        &self.hosts[self.host]
    }

    /// The host of each rank.
    pub(crate) fn of_ranks(&self) -> Arc<[usize]> {
        let hosts = self.hosts.iter().enumerate();
        let all = hosts.flat_map(|(host, ranks)| vec![host; ranks.len()]);
        all.collect()
    }

    /// The first ranks of the other hosts, on the first rank of a host; none on others.
    pub(crate) fn other_leaders(&self) -> Vec<usize> {
        let hosts = self.hosts.iter().enumerate();
        let others = hosts.filter(|(host, _)| *host != self.host && self.local_rank == 0);
        others.map(|(_, ranks)| ranks[0]).collect()
    }

    /// The ranks of all other hosts.
    pub(crate) fn elsewhere(&self) -> Vec<usize> {
        let all = self.hosts.iter().flatten().copied();
        all.filter(|rank| !self.here().contains(rank)).collect()
    }
}

/// The host of a rank, and its index there.
pub(crate) fn find(hosts: &[Vec<usize>], rank: usize) -> (usize, usize) {
    let mut all = hosts.iter().enumerate();
    all.find_map(|(host, ranks)| Some((host, ranks.binary_search(&rank).ok()?)))
        .expect("every rank is on a host")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_one_key_are_one_host() {
        let placement = Placement::new(&["b", "b", "a", "b"], 3);
        assert_eq!(
            placement,
            Placement {
                hosts: vec![vec![0, 1, 3], vec![2]],
                host: 0,
                local_rank: 2
            }
        );
        assert_eq!(
            (placement.here(), placement.elsewhere()),
            (&[0, 1, 3][..], vec![2])
        );
        assert_eq!(find(&placement.hosts, 2), (1, 0));
    }
}
