//! NCCL's settings, which it reads from the environment at its first call: what this program needs, unless the user has chosen.

use crate::launcher::Lookup;

/// The settings to make. `shared` says that several ranks may have one GPU, and `on_one_host` that all ranks are on this one.
pub(crate) fn settings(shared: bool, on_one_host: bool, lookup: Lookup<'_>) -> Vec<(&'static str, String)> {
    // A graph's buffers are registered by themselves, which changes channels: other bits than the same step done eagerly.
    let mut all = vec![("NCCL_GRAPH_REGISTER", "0".to_string())];
    if shared {
        // NCCL refuses two ranks with one GPU of one host. It tells hosts apart by this.
        all.push(("NCCL_HOSTID", format!("ddp-{}-{}", host_word(), std::process::id())));
        // Ranks that seem to be on several hosts would look for NVLink between them, and for networks with more than loopback.
        all.push(("NCCL_MNNVL_ENABLE", "0".to_string()));
        all.push(("NCCL_NVLS_ENABLE", "0".to_string()));
        if on_one_host {
            all.push(("NCCL_NET", "Socket".to_string()));
            all.push(("NCCL_SOCKET_IFNAME", "lo".to_string()));
        }
    }
    all.retain(|(name, _)| lookup(name).is_none());
    all
}

/// This host, for a name that differs between hosts.
fn host_word() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_user_has_set_stays() {
        let names = |shared: bool, on_one_host: bool, set: &str| {
            let lookup = |name: &str| (name == set).then(|| "of the user's".to_string());
            settings(shared, on_one_host, &lookup).into_iter().map(|(name, _)| name).collect::<Vec<_>>()
        };
        assert_eq!(names(false, true, ""), ["NCCL_GRAPH_REGISTER"]);
        assert!(names(false, true, "NCCL_GRAPH_REGISTER").is_empty());
        let all = [
            "NCCL_GRAPH_REGISTER",
            "NCCL_HOSTID",
            "NCCL_MNNVL_ENABLE",
            "NCCL_NVLS_ENABLE",
            "NCCL_NET",
            "NCCL_SOCKET_IFNAME",
        ];
        assert_eq!(names(true, true, ""), all);
        assert_eq!(names(true, false, "NCCL_HOSTID"), [all[0], all[2], all[3]]);
    }
}
