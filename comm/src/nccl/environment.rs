//! NCCL's settings, which it reads from the environment at its first call: what this program needs, unless the user has chosen.

use std::sync::Once;

use crate::launcher::Lookup;

const REGISTER: &str = "NCCL_GRAPH_REGISTER";

/// The ranks that this process has, or is one of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "only MPI brings processes together"))]
pub(crate) enum Ranks {
    /// One, as far as this program knows.
    Alone,
    /// They are threads.
    Threads,
    /// They are processes, of which several may have one GPU.
    Processes { share_gpus: bool, are_on_one_host: bool },
}

/// The settings to make.
pub(crate) fn settings(ranks: Ranks, lookup: Lookup<'_>) -> Vec<(&'static str, String)> {
    // A graph's buffers are registered by themselves, which changes channels: other bits than the same step done eagerly.
    let mut all = vec![(REGISTER, "0".to_string())];
    let are_on_one_host = match ranks {
        Ranks::Alone => false,
        Ranks::Threads => true,
        Ranks::Processes { are_on_one_host, .. } => are_on_one_host,
    };
    if are_on_one_host {
        // Ranks are introduced to each other over a socket, which would listen on the network.
        all.push(("NCCL_SOCKET_IFNAME", "lo".to_string()));
    }
    if ranks == Ranks::Threads {
        // Within a process NCCL reads the memory of other GPUs where it lies: that of this program's pools is not open to them.
        all.push(("NCCL_P2P_DIRECT_DISABLE", "1".to_string()));
    }
    if let Ranks::Processes { share_gpus: true, .. } = ranks {
        // NCCL refuses two ranks with one GPU of one host. It tells hosts apart by this.
        all.push(("NCCL_HOSTID", host_id()));
        // Ranks that seem to be on several hosts would look for NVLink between them, and for networks with more than loopback.
        all.push(("NCCL_MNNVL_ENABLE", "0".to_string()));
        all.push(("NCCL_NVLS_ENABLE", "0".to_string()));
        if are_on_one_host {
            all.push(("NCCL_NET", "Socket".to_string()));
        }
    }
    all.retain(|(name, _)| lookup(name).is_none());
    all
}

/// A name that no other process has: numbers of processes may be the same in two containers of a machine.
fn host_id() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("ddp-{}-{}-{}", boot.trim(), namespace.display(), std::process::id())
}

/// Makes settings, if this process has one thread: another could read the environment while it changes.
pub(crate) fn apply(settings: impl IntoIterator<Item = (&'static str, String)>) {
    if std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count) != 1 {
        tracing::debug!("MPI and NCCL start with their own settings, since this process has several threads already");
        return;
    }
    for (name, value) in settings {
        // SAFETY: the environment must not change while another thread reads it, and there is no other thread, as was
        // just counted; this one starts none between the count and here.
        unsafe { std::env::set_var(name, value) };
    }
}

/// Says once if graphs may have other bits than the same calls made eagerly.
pub(super) fn warn_of_registration() {
    static SAID: Once = Once::new();
    if std::env::var(REGISTER).as_deref() != Ok("0") {
        SAID.call_once(|| {
            tracing::warn!(
                "{REGISTER} is not 0: collectives in a captured step may have other bits than those of the same step run operation by \
                 operation. Set it to 0, or connect before there are other threads"
            );
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(ranks: Ranks, set: &str) -> Vec<&'static str> {
        let lookup = |name: &str| (name == set).then(|| "of the user's".to_string());
        settings(ranks, &lookup).into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn ranks_of_one_host_keep_off_the_network_and_what_the_user_has_set_stays() {
        let processes = |share_gpus, are_on_one_host| Ranks::Processes { share_gpus, are_on_one_host };
        assert_eq!(names(Ranks::Alone, ""), [REGISTER]);
        assert_eq!(names(processes(false, true), ""), [REGISTER, "NCCL_SOCKET_IFNAME"]);
        assert_eq!(names(processes(false, true), "NCCL_SOCKET_IFNAME"), [REGISTER]);
        assert_eq!(names(processes(false, false), ""), [REGISTER]);
        assert!(names(processes(false, false), REGISTER).is_empty());
        assert_eq!(names(Ranks::Threads, ""), [REGISTER, "NCCL_SOCKET_IFNAME", "NCCL_P2P_DIRECT_DISABLE"]);
        let all = [REGISTER, "NCCL_SOCKET_IFNAME", "NCCL_HOSTID", "NCCL_MNNVL_ENABLE", "NCCL_NVLS_ENABLE", "NCCL_NET"];
        assert_eq!(names(processes(true, true), ""), all);
        assert_eq!(names(processes(true, false), "NCCL_HOSTID"), [all[0], all[3], all[4]]);
    }

    #[test]
    fn processes_that_share_a_gpu_have_names_of_their_own() {
        let id = host_id();
        assert!(id.ends_with(&format!("-{}", std::process::id())) && id.contains("pid:["), "{id}");
    }
}
