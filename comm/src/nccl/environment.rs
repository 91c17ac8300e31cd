//! NCCL's settings, which it reads from the environment at its first call.

use std::sync::Once;

use crate::launcher::Lookup;

const REGISTER: &str = "NCCL_GRAPH_REGISTER";

/// The ranks of this process, or whose part it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    not(feature = "mpi"),
    allow(dead_code, reason = "only MPI connects processes")
)]
pub(crate) enum RankKind {
    /// One rank, as far as is known.
    Alone,
    /// Threads of this process.
    Threads,
    /// Processes.
    Processes {
        share_gpus: bool,
        are_on_one_host: bool,
    },
}

/// The settings to make. What the user has set stays.
pub(crate) fn settings(ranks: RankKind, lookup: Lookup<'_>) -> Vec<(&'static str, String)> {
    // Registered buffers of a graph change NCCL's channels: other bits than the same eager step.
    let mut all = vec![(REGISTER, "0".to_string())];
    let are_on_one_host = match ranks {
        RankKind::Alone => false,
        RankKind::Threads => true,
        RankKind::Processes {
            are_on_one_host, ..
        } => are_on_one_host,
    };
    if are_on_one_host {
        // Ranks connect over a socket at first, which would listen on the network.
        all.push(("NCCL_SOCKET_IFNAME", "lo".to_string()));
    }
    if ranks == RankKind::Threads {
        // Within a process NCCL reads the memory of other GPUs directly, but this program's memory
        // pools are not mapped there.
        all.push(("NCCL_P2P_DIRECT_DISABLE", "1".to_string()));
    }
    if let RankKind::Processes {
        share_gpus: true, ..
    } = ranks
    {
        // NCCL refuses two ranks of one host with one GPU. It identifies hosts by this.
        all.push(("NCCL_HOSTID", host_id()));
        // Ranks that seem to be on several hosts would look for NVLink between them, and for
        // networks besides loopback.
        all.push(("NCCL_MNNVL_ENABLE", "0".to_string()));
        all.push(("NCCL_NVLS_ENABLE", "0".to_string()));
        if are_on_one_host {
            all.push(("NCCL_NET", "Socket".to_string()));
        }
    }
    all.retain(|(name, _)| lookup(name).is_none());
    all
}

/// A name that no other process has: two containers of a machine may have equal process numbers.
fn host_id() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!(
        "ddp-{}-{}-{}",
        boot.trim(),
        namespace.display(),
        std::process::id()
    )
}

/// Makes settings if this process has one thread: another could read the environment meanwhile.
pub(crate) fn apply(settings: impl IntoIterator<Item = (&'static str, String)>) {
    if std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count) != 1 {
        tracing::debug!(
            "this process has several threads already: MPI and NCCL keep their default settings"
        );
        return;
    }
    for (name, value) in settings {
        // SAFETY: the environment must not change while another thread reads it. There is no other
        // thread, as was just counted, and this one starts none in between.
        unsafe { std::env::set_var(name, value) };
    }
}

/// Warns once if graphs may have other bits than the same eager calls.
pub(super) fn warn_of_registration() {
    static SAID: Once = Once::new();
    if std::env::var(REGISTER).as_deref() != Ok("0") {
        SAID.call_once(|| {
            tracing::warn!(
                "{REGISTER} is not 0: a captured step may have other bits than the same eager step. \
                 help: Set it to 0, or connect before starting other threads"
            );
        });
    }
}

#[cfg(test)]
mod tests;
