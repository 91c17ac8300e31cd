use super::*;

fn names(ranks: RankKind, set: &str) -> Vec<&'static str> {
    let lookup = |name: &str| (name == set).then(|| "of the user's".to_string());
    settings(ranks, &lookup)
        .into_iter()
        .map(|(name, _)| name)
        .collect()
}

#[test]
fn ranks_of_one_host_avoid_the_network_and_user_settings_stay() {
    let processes = |share_gpus, are_on_one_host| RankKind::Processes {
        share_gpus,
        are_on_one_host,
    };
    assert_eq!(names(RankKind::Alone, ""), [REGISTER]);
    assert_eq!(
        names(processes(false, true), ""),
        [REGISTER, "NCCL_SOCKET_IFNAME"]
    );
    assert_eq!(
        names(processes(false, true), "NCCL_SOCKET_IFNAME"),
        [REGISTER]
    );
    assert_eq!(names(processes(false, false), ""), [REGISTER]);
    assert!(names(processes(false, false), REGISTER).is_empty());
    assert_eq!(
        names(RankKind::Threads, ""),
        [REGISTER, "NCCL_SOCKET_IFNAME", "NCCL_P2P_DIRECT_DISABLE"]
    );
    let all = [
        REGISTER,
        "NCCL_SOCKET_IFNAME",
        "NCCL_HOSTID",
        "NCCL_MNNVL_ENABLE",
        "NCCL_NVLS_ENABLE",
        "NCCL_NET",
    ];
    assert_eq!(names(processes(true, true), ""), all);
    assert_eq!(
        names(processes(true, false), "NCCL_HOSTID"),
        [all[0], all[3], all[4]]
    );
}

#[test]
fn host_ids_contain_the_process_and_its_namespace() {
    let id = host_id();
    assert!(
        id.ends_with(&format!("-{}", std::process::id())) && id.contains("pid:["),
        "{id}"
    );
}
