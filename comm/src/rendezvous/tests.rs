use super::*;

type Variables<'a> = &'a [(&'a str, &'a str)];

fn lookup<'a>(pairs: Variables<'a>) -> impl Fn(&str) -> Option<String> + 'a {
    let value = |name: &str| Some(pairs.iter().find(|(known, _)| *known == name)?.1);
    move |name| value(name).map(ToString::to_string)
}

fn torch(pairs: Variables<'_>) -> Result<Option<Rendezvous>> {
    Rendezvous::of_torch(&lookup(pairs))
}

fn slurm(pairs: Variables<'_>) -> Result<Option<Rendezvous>> {
    Rendezvous::of_slurm(&lookup(pairs))
}

const PLAIN: [(&str, &str); 4] = [
    ("RANK", "1"),
    ("WORLD_SIZE", "3"),
    ("MASTER_ADDR", "node1"),
    ("MASTER_PORT", "29500"),
];

#[test]
fn the_port_is_the_masters_unless_torchruns_store_has_it() {
    let plain = torch(&PLAIN).unwrap().unwrap();
    assert_eq!((plain.rank, plain.size, plain.local_size), (1, 3, None));
    assert_eq!(plain.address(), "node1:29500");
    assert!(!plain.is_of_torchrun);
    let mut variables = PLAIN.to_vec();
    variables.extend([
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("TORCHELASTIC_RUN_ID", "none"),
        ("TORCHELASTIC_RESTART_COUNT", "0"),
        ("LOCAL_WORLD_SIZE", "3"),
    ]);
    let torchrun = torch(&variables).unwrap().unwrap();
    assert_eq!(torchrun.address(), "node1:29501 to 29508");
    assert!(torchrun.is_on_one_host() && torchrun.is_of_torchrun);
    variables[3].1 = "65530";
    let ports = torch(&variables).unwrap().unwrap().ports;
    assert!(!ports.contains(&65530) && ports.len() == 8, "{ports:?}");
    variables[6].1 = "1";
    let restarted = torch(&variables).unwrap().unwrap();
    assert_ne!(restarted.job, torchrun.job);
}

#[test]
fn variables_that_make_no_sense_are_named() {
    assert_eq!(torch(&PLAIN[1..]).unwrap(), None);
    assert_eq!(torch(&PLAIN[..1]).unwrap(), None);
    let alone = [("RANK", "0"), ("WORLD_SIZE", "1")];
    assert_eq!(torch(&alone).unwrap().unwrap().size, 1);
    for (index, value, named) in [
        (
            0,
            "3",
            "RANK: expected a number below that of the ranks (WORLD_SIZE=3), got 3",
        ),
        (0, "-1", "RANK: expected a number, got \"-1\""),
        (1, "x", "WORLD_SIZE: expected a number"),
        (
            1,
            "513",
            "WORLD_SIZE: expected a whole number from 1 to 512, got 513",
        ),
        (
            1,
            "18446744073709551615",
            "WORLD_SIZE: expected a whole number from 1",
        ),
        (
            2,
            "",
            "MASTER_ADDR: expected the name or address of rank 0's host, got none",
        ),
        (3, "70000", "MASTER_PORT: expected a free port"),
        (3, "0", "MASTER_PORT: expected a free port"),
    ] {
        let mut variables = PLAIN;
        variables[index].1 = value;
        let error = torch(&variables).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(named), "{error}");
    }
}

const STEP: [(&str, &str); 6] = [
    ("SLURM_PROCID", "2"),
    ("SLURM_STEP_NUM_TASKS", "4"),
    ("SLURM_STEP_NODELIST", "gpu[007-008]"),
    ("SLURM_STEP_NUM_NODES", "2"),
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_STEP_ID", "0"),
];

#[test]
fn a_step_of_slurm_meets_on_its_first_host() {
    let step = slurm(&STEP).unwrap().unwrap();
    assert_eq!((step.rank, step.size, &*step.host), (2, 4, "gpu007"));
    assert!(!step.is_on_one_host() && step.ports.len() == 8);
    assert!(
        step.ports
            .iter()
            .all(|port| (20_000..32_000).contains(port))
    );
    let mut next = STEP;
    next[5].1 = "1";
    let next = slurm(&next).unwrap().unwrap();
    assert!(next.job != step.job && next.ports[0] != step.ports[0]);
    let mut single = STEP;
    single[1].1 = "1";
    assert_eq!(slurm(&single).unwrap(), None);
    let mut nowhere = STEP;
    nowhere[2].1 = "";
    assert!(
        slurm(&nowhere)
            .unwrap_err()
            .to_string()
            .contains("SLURM_STEP_NODELIST")
    );
}

#[test]
fn the_first_host_of_every_form_of_list_is_found() {
    for (list, host) in [
        ("node1", "node1"),
        ("a,b", "a"),
        ("node[003-010,12],other", "node003"),
        ("node[5,7-9]", "node5"),
        ("rack[1-2]node[3-4].site", "rack1node3.site"),
        ("gpu-01-[11-14]", "gpu-01-11"),
    ] {
        assert_eq!(first_host(list).as_deref(), Some(host), "{list}");
    }
    for wrong in ["", "node[1-2", "a]b", "a b"] {
        assert_eq!(first_host(wrong), None, "{wrong}");
    }
}
