//! A rank's share of its host's cores: how many threads it gets, and which core comes first.
//!
//! The ranks of a host tell each other which cores they may run on. A rank divides its cores by the
//! number of ranks that may run on any of them, itself included. If a launcher has bound a rank to
//! fewer cores than its share, a warning says so, because that is slow and rarely intended: `mpirun
//! -n 1` and `-n 2` bind each rank to one core.

use std::io;

/// A set of cores by their numbers in the system, ascending.
pub(crate) type Cores = Vec<usize>;

/// A rank's share of its host's cores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CoreShare {
    /// How many threads the rank should use: at least one.
    pub(crate) threads: usize,
    /// The index of its first core in its own affinity mask.
    pub(crate) first_core: usize,
    /// If it has fewer cores than its share: how many it has, and its share.
    pub(crate) narrower: Option<(usize, usize)>,
}

impl CoreShare {
    /// The share of `local_rank` if ranks may run on `masks` and the launcher had `available`
    /// cores.
    pub(crate) fn new(masks: &[Cores], local_rank: usize, available: Option<usize>) -> CoreShare {
        let mine = &masks[local_rank];
        let overlaps = |other: &Cores| other.iter().any(|core| mine.binary_search(core).is_ok());
        let sharing = |&rank: &usize| rank == local_rank || overlaps(&masks[rank]);
        let sharing: Vec<usize> = (0..masks.len()).filter(sharing).collect();
        let threads = (mine.len() / sharing.len()).max(1);
        let index = sharing.iter().position(|&rank| rank == local_rank);
        let fair = available.map_or(0, |available| available / masks.len());
        CoreShare {
            threads,
            first_core: index.unwrap_or(0) * threads % mine.len().max(1),
            narrower: (threads < fair && mine.len() < fair).then_some((mine.len(), fair)),
        }
    }
}

/// Whether `ranks` ranks that may run on `masks` have a core each to wait actively on.
pub(crate) fn are_roomy(masks: &[Cores], ranks: usize) -> bool {
    let mut all = masks.concat();
    all.sort_unstable();
    all.dedup();
    all.len() >= ranks
}

/// The cores that process `pid` may run on (0: this one).
pub(crate) fn affinity(pid: i32) -> io::Result<Cores> {
    const WORD_BITS: usize = 64;
    // Room for 2^16 cores: the system refuses a set that is smaller than its number of cores.
    let mut words = [0u64; 1024];
    let bytes = size_of_val(&words);
    // SAFETY: the call writes at most the size it is told, that of `words`.
    let written =
        unsafe { libc::syscall(libc::SYS_sched_getaffinity, pid, bytes, words.as_mut_ptr()) };
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

#[cfg(test)]
mod tests;
