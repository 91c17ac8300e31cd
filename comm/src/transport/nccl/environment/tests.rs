use super::*;

fn names(ranks: RankKind, set: &str) -> Vec<&'static str> {
    names_of(NcclChoice::Fixed, ranks, set)
}

fn names_of(choice: NcclChoice, ranks: RankKind, set: &str) -> Vec<&'static str> {
    let lookup = |name: &str| (name == set).then(|| "of the user's".to_string());
    settings(ranks, choice, &lookup)
        .into_iter()
        .map(|(name, _)| name)
        .filter(|name| !name.starts_with("NCCL_DEBUG"))
        .collect()
}

const CONNECT: &str = "NCCL_RUNTIME_CONNECT";
const REGISTER: &str = OF_BITS[0];
const NVLS: &str = OF_BITS[1];

#[test]
fn sums_have_fixed_bits_unless_the_user_or_the_choice_says_otherwise() {
    for ranks in [RankKind::Alone, RankKind::Threads] {
        assert_eq!(names(ranks, "")[..3], [CONNECT, REGISTER, NVLS]);
    }
    assert_eq!(names(RankKind::Alone, REGISTER), [CONNECT, NVLS]);
    assert_eq!(names(RankKind::Alone, NVLS), [CONNECT, REGISTER]);
    assert_eq!(names_of(NcclChoice::Fast, RankKind::Alone, ""), [CONNECT]);
    assert!(names_of(NcclChoice::Fast, RankKind::Alone, CONNECT).is_empty());
}

#[test]
fn ranks_of_one_host_avoid_the_network_and_user_settings_stay() {
    let processes = |share_gpus, are_on_one_host| RankKind::Processes {
        share_gpus,
        are_on_one_host,
    };
    let besides_bits = |ranks, set| names_of(NcclChoice::Fast, ranks, set)[1..].to_vec();
    assert_eq!(
        besides_bits(processes(false, true), ""),
        ["NCCL_SOCKET_IFNAME"]
    );
    assert!(besides_bits(processes(false, true), "NCCL_SOCKET_IFNAME").is_empty());
    assert!(besides_bits(processes(false, false), "").is_empty());
    assert_eq!(
        besides_bits(RankKind::Threads, ""),
        ["NCCL_SOCKET_IFNAME", "NCCL_P2P_DIRECT_DISABLE"]
    );
    assert_eq!(
        besides_bits(processes(true, true), ""),
        [
            "NCCL_SOCKET_IFNAME",
            "NCCL_HOSTID",
            "NCCL_MNNVL_ENABLE",
            NVLS,
            "NCCL_NET"
        ]
    );
    assert_eq!(
        besides_bits(processes(true, false), "NCCL_HOSTID"),
        ["NCCL_MNNVL_ENABLE", NVLS]
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
