//! NCCL's settings, which it reads from the environment at its first call.

use std::sync::Once;

use ddp_kernels::choices;

use super::log;
use crate::launcher::Lookup;

/// Settings without which equal calls may have different bits. Buffers registered by a graph change
/// NCCL's channels, so that a captured step adds in another order than the same eager one; NVLink
/// switches add in the order of arrival (NCCL issues 1497 and 2360).
const OF_BITS: [&str; 2] = ["NCCL_GRAPH_REGISTER", "NCCL_NVLS_ENABLE"];

choices! {
    /// How NCCL adds up gradients.
    #[derive(Default)]
    pub enum NcclChoice {
        /// The same bits in every run, captured or not
        #[default]
        Fixed = "fixed",
        /// Whatever NCCL finds fastest: bits may differ from run to run
        Fast = "fast",
    }
}

/// The ranks of this process, or whose part it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
pub(crate) fn settings(
    ranks: RankKind,
    choice: NcclChoice,
    lookup: Lookup<'_>,
) -> Vec<(&'static str, String)> {
    // Else NCCL connects an algorithm at its first call, in the middle of a step: the warm-up does
    // not reach all algorithms.
    let mut all = vec![("NCCL_RUNTIME_CONNECT", "0".to_string())];
    if choice == NcclChoice::Fixed {
        all.extend(OF_BITS.map(|name| (name, "0".to_string())));
    }
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
        if choice == NcclChoice::Fast {
            all.push(("NCCL_NVLS_ENABLE", "0".to_string()));
        }
        if are_on_one_host {
            all.push(("NCCL_NET", "Socket".to_string()));
        }
    }
    all.retain(|(name, _)| lookup(name).is_none());
    if ranks != RankKind::Alone {
        all.extend(
            log::settings(lookup, log::home(), "/etc/nccl.conf")
                .into_iter()
                .flatten(),
        );
    }
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

/// The settings of bits that are not 0 in this process: with them NCCL may add in any order, so
/// another run may have other bits.
pub fn settings_of_free_order() -> Vec<&'static str> {
    let is_free = |name: &&str| std::env::var(name).as_deref() != Ok("0");
    OF_BITS.into_iter().filter(is_free).collect()
}

/// Says once if equal calls may have different bits although equal ones were asked for.
pub(super) fn warn_of_bits() {
    static SAID: Once = Once::new();
    let free = settings_of_free_order();
    if !free.is_empty() {
        SAID.call_once(|| {
            tracing::warn!(
                "NCCL may add up gradients in another order in the next run, or when a step is \
                 captured, so that bits differ: expected 0 for {}; help: unset them, or set them to \
                 0 before the program starts",
                free.join(", ")
            );
        });
    }
}

#[cfg(test)]
mod tests;
