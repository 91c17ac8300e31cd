//! The cores that this process may use, and pinning threads to them.

use std::sync::OnceLock;

/// The cores in this process's affinity mask at the first call, before anything was pinned.
pub fn cores() -> &'static [usize] {
    static CORES: OnceLock<Vec<usize>> = OnceLock::new();
    CORES.get_or_init(affinity_cores)
}

/// Pins the calling thread, and threads it starts (but not the pool's), to core number `index` of
/// `cores()`, modulo their number. If the system refuses, only speed changes.
pub fn pin_current(index: usize) {
    if let Some(&core) = cores().get(index % cores().len().max(1)) {
        keep_on(&[core]);
    }
}

/// The cores that this process's first thread may run on.
fn affinity_cores() -> Vec<usize> {
    // SAFETY: all zeros is a valid set, and the calls write no more than its size.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(libc::getpid(), size_of::<libc::cpu_set_t>(), &mut set) != 0 {
            return (0..std::thread::available_parallelism().map_or(1, usize::from)).collect();
        }
        set
    };
    // SAFETY: every index is below the number of bits in the set.
    (0..libc::CPU_SETSIZE as usize)
        .filter(|&core| unsafe { libc::CPU_ISSET(core, &set) })
        .collect()
}

/// Pins the calling thread to these cores. If the system refuses, only speed changes.
pub(super) fn keep_on(cores: &[usize]) {
    // SAFETY: as in `affinity_cores`; the cores came from there.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for &core in cores {
            libc::CPU_SET(core, &mut set);
        }
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
    }
}
