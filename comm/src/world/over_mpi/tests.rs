use super::*;

const ON_ONE_HOST: Launch = Launch {
    launcher: Launcher::OpenMpi,
    rank: 0,
    size: Some(2),
    local_size: Some(2),
};

#[test]
fn on_one_host_open_mpi_stays_local_unless_the_user_says_otherwise() {
    let lookup = |name: &str| match name {
        "PMIX_SERVER_TMPDIR" => Some("/tmp/session".to_string()),
        "OMPI_MCA_btl" => Some("self,tcp".to_string()),
        _ => None,
    };
    let set = settings_with(&ON_ONE_HOST, &lookup, &|_| true);
    let names: Vec<&str> = set.iter().map(|(name, _)| *name).collect();
    let folders = [
        "OMPI_MCA_btl_vader_backing_directory",
        "OMPI_MCA_btl_sm_backing_directory",
    ];
    assert_eq!(names, ["OMPI_MCA_pml", folders[0], folders[1]]);
    assert_eq!(settings_with(&ON_ONE_HOST, &|_| None, &|_| true).len(), 2);
    assert_eq!(settings_with(&ON_ONE_HOST, &lookup, &|_| false).len(), 1);
}

#[test]
fn between_hosts_and_for_other_launchers_the_network_settings_stay() {
    let lookup = |name: &str| (name == "PMIX_SERVER_TMPDIR").then(|| "/tmp/session".to_string());
    let two_hosts = settings_with(
        &Launch {
            size: Some(4),
            ..ON_ONE_HOST
        },
        &lookup,
        &|_| true,
    );
    assert!(
        two_hosts.len() == 2 && two_hosts.iter().all(|(_, value)| value == "/tmp/session"),
        "{two_hosts:?}"
    );
    let slurm = Launch {
        launcher: Launcher::Pmix,
        rank: 0,
        size: None,
        local_size: None,
    };
    assert!(settings_with(&slurm, &lookup, &|_| true).is_empty());
}

/// That a stranger without it is refused is a test of `between_hosts`.
#[test]
fn rank_0_makes_a_secret_for_all_and_one_that_its_user_has_set_does_not_travel() {
    let own = |text: &'static str| move |name: &str| (name == SECRET).then(|| text.to_string());
    let proof = |told: &Value, lookup: Lookup<'_>| {
        let secret = secret_by(told, lookup).unwrap();
        secret.proof(&["word"]).to_hex().to_string()
    };
    let none = |_: &str| None;
    let (told, other) = (introduction(&none).unwrap(), introduction(&none).unwrap());
    let made = proof(&told, &none);
    assert_eq!(proof(&told, &own("another of sixteen bytes")), made);
    assert_ne!(proof(&other, &none), made);
    let theirs = own("a secret of sixteen bytes");
    let told = introduction(&theirs).unwrap();
    assert!(!told.to_string().contains("sixteen"), "{told}");
    let set = proof(&told, &theirs);
    assert_ne!(proof(&told, &own("another of sixteen bytes")), set);
    // What rank 0 made is as hard to guess as what it is told to be: 256 bits.
    assert_eq!(other[1].as_str().map(str::len), Some(64));
}
