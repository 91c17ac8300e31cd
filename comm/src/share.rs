//! Which part of a host's cores is this rank's: how many threads, and the first of them.
//!
//! Ranks of a host tell each other the cores they may run on. A rank divides its cores by the ranks that may run on some of
//! them too, itself included. A launcher that bound a rank to less than its share of what the launcher itself had is
//! reported, for that is rarely meant and always slow: `mpirun -n 1` and `-n 2` bind each rank to one core.

#![cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "only MPI brings processes together"))]

use std::io;

/// A set of cores by their numbers in the system, ascending.
pub(crate) type Cores = Vec<usize>;

/// A rank's part of its host's cores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// How many threads it should use: at least one.
    pub(crate) threads: usize,
    /// The place of its first core in its own affinity mask.
    pub(crate) first_core: usize,
    /// Its cores are fewer than its share: how many it has, and how many it might have.
    pub(crate) narrower: Option<(usize, usize)>,
}

/// The share of the rank at `local_rank` where ranks may run on `masks` and the launcher had `available` cores.
pub(crate) fn share(masks: &[Cores], local_rank: usize, available: Option<usize>) -> Share {
    let mine = &masks[local_rank];
    let overlaps = |other: &Cores| other.iter().any(|core| mine.binary_search(core).is_ok());
    let sharing: Vec<usize> = (0..masks.len()).filter(|&rank| rank == local_rank || overlaps(&masks[rank])).collect();
    let threads = (mine.len() / sharing.len()).max(1);
    let place = sharing.iter().position(|&rank| rank == local_rank).unwrap_or(0);
    let first_core = place * threads % mine.len().max(1);
    let fair = available.map_or(0, |available| available / masks.len());
    let narrower = (threads < fair && mine.len() < fair).then_some((mine.len(), fair));
    Share { threads, first_core, narrower }
}

/// The cores that process `pid` may run on (0: this one).
pub(crate) fn affinity(pid: i32) -> io::Result<Cores> {
    const WORD_BITS: usize = 64;
    // Room for 2^16 cores; the system refuses a set smaller than it has cores.
    let mut words = [0u64; 1024];
    // SAFETY: the call writes at most the size it is told, that of `words`, where every bit pattern is a value.
    let written = unsafe { libc::syscall(libc::SYS_sched_getaffinity, pid, size_of_val(&words), words.as_mut_ptr()) };
    if written < 0 {
        return Err(io::Error::last_os_error());
    }
    let is_set = |core: &usize| words[core / WORD_BITS] >> (core % WORD_BITS) & 1 == 1;
    Ok((0..words.len() * WORD_BITS).filter(is_set).collect())
}

/// The cores this process may run on, as `ddp_kernels::threads` sees them.
pub(crate) fn own_cores() -> Cores {
    ddp_kernels::threads::cores().to_vec()
}

/// How many cores the process that started this one has: what a launcher could have given.
pub(crate) fn launcher_cores() -> Option<usize> {
    // SAFETY: getppid takes nothing, touches nothing and cannot fail.
    let parent = unsafe { libc::getppid() };
    affinity(parent).ok().map(|cores| cores.len())
}

/// Cores as bytes, for the other ranks.
pub(crate) fn encode(cores: &[usize]) -> Vec<u8> {
    cores.iter().flat_map(|&core| (core as u32).to_le_bytes()).collect()
}

/// The cores that `encode` wrote.
pub(crate) fn decode(bytes: &[u8]) -> Cores {
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|&word| u32::from_le_bytes(word) as usize).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shares(masks: &[Cores], available: usize) -> Vec<Share> {
        (0..masks.len()).map(|rank| share(masks, rank, Some(available))).collect()
    }

    #[test]
    fn ranks_that_share_cores_divide_them_and_start_apart() {
        let all: Cores = (0..8).collect();
        let shares = shares(&[all.clone(), all.clone(), all], 8);
        let threads: Vec<usize> = shares.iter().map(|share| share.threads).collect();
        let first: Vec<usize> = shares.iter().map(|share| share.first_core).collect();
        assert_eq!((threads, first), (vec![2, 2, 2], vec![0, 2, 4]));
        assert!(shares.iter().all(|share| share.narrower.is_none()));
    }

    #[test]
    fn ranks_bound_apart_keep_all_their_cores() {
        let shares = shares(&[vec![0, 1], vec![2, 3]], 4);
        assert!(shares.iter().all(|share| *share == Share { threads: 2, first_core: 0, narrower: None }));
    }

    #[test]
    fn a_rank_bound_to_less_than_its_share_is_reported() {
        assert_eq!(share(&[vec![0]], 0, Some(16)).narrower, Some((1, 16)));
        assert_eq!(share(&[vec![0], vec![1]], 1, Some(16)).narrower, Some((1, 8)));
        // Two ranks, two cores, one each: nothing to complain of; nor where the launcher had no more itself.
        assert_eq!(share(&[vec![0], vec![1]], 1, Some(2)).narrower, None);
        assert_eq!(share(&[vec![0]], 0, None).narrower, None);
    }

    #[test]
    fn more_ranks_than_cores_get_a_thread_each() {
        let shares = shares(&[vec![0, 1], vec![0, 1], vec![0, 1]], 2);
        assert!(shares.iter().all(|share| share.threads == 1 && share.narrower.is_none()));
        assert_eq!(shares.iter().map(|share| share.first_core).collect::<Vec<_>>(), [0, 1, 0]);
    }

    #[test]
    fn no_mask_at_all_is_one_thread() {
        assert_eq!(share(&[vec![]], 0, None), Share { threads: 1, first_core: 0, narrower: None });
    }

    #[test]
    fn the_system_and_the_thread_pool_agree_on_the_cores() {
        assert_eq!(affinity(0).unwrap(), own_cores());
        assert!(affinity(i32::MAX).is_err());
    }

    proptest! {
        #[test]
        fn equal_masks_are_cut_without_overlap(cores in 1usize..64, ranks in 1usize..16) {
            let masks = vec![(0..cores).collect::<Cores>(); ranks];
            let mut used = vec![0; cores];
            for rank in 0..ranks {
                let share = share(&masks, rank, Some(cores));
                prop_assert!(share.narrower.is_none());
                (0..share.threads).for_each(|thread| used[(share.first_core + thread) % cores] += 1);
            }
            let most = ranks.div_ceil(cores);
            prop_assert!(used.iter().all(|&count| count <= most), "{used:?}");
        }

        #[test]
        fn cores_survive_their_way_to_the_others(cores in proptest::collection::vec(0usize..100_000, 0..50)) {
            prop_assert_eq!(decode(&encode(&cores)), cores);
        }
    }
}
