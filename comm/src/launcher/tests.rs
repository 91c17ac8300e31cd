use super::*;

fn variables(pairs: &'static [(&'static str, &'static str)]) -> impl Fn(&str) -> Option<String> {
    move |name| {
        pairs
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, value)| value.to_string())
    }
}

fn detect(pairs: &'static [(&'static str, &'static str)]) -> Option<Launch> {
    Launch::detect(&variables(pairs)).unwrap()
}

fn warning(
    pairs: &'static [(&'static str, &'static str)],
    with_mpi: bool,
    mpi_started: bool,
) -> Option<String> {
    check_alone(&variables(pairs), with_mpi, mpi_started).unwrap()
}

#[test]
fn each_launcher_is_known_by_its_variables() {
    let open_mpi = detect(&[
        ("OMPI_COMM_WORLD_RANK", "3"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("PMIX_RANK", "3"),
    ]);
    let expected = Launch {
        launcher: Launcher::OpenMpi,
        rank: 3,
        size: Some(4),
        local_size: Some(2),
    };
    assert_eq!(open_mpi, Some(expected));
    assert!(!expected.is_on_one_host());

    let hydra = detect(&[
        ("PMI_RANK", "0"),
        ("PMI_SIZE", "2"),
        ("MPI_LOCALNRANKS", "2"),
    ])
    .unwrap();
    assert_eq!(
        hydra,
        Launch {
            launcher: Launcher::Pmi,
            rank: 0,
            size: Some(2),
            local_size: Some(2)
        }
    );
    assert!(hydra.is_on_one_host());

    let slurm = detect(&[("PMIX_RANK", "1"), ("SLURM_NTASKS", "2")]).unwrap();
    assert_eq!(
        slurm,
        Launch {
            launcher: Launcher::Pmix,
            rank: 1,
            size: None,
            local_size: None
        }
    );
    assert!(!slurm.is_on_one_host() && !slurm.is_of_one());
}

#[test]
fn a_rank_of_our_own_launcher_is_known_wherever_that_runs() {
    let own = detect(&[
        ("DDP_JOB", "2/4:8"),
        ("PMIX_RANK", "0"),
        ("SLURM_NTASKS", "4"),
    ]);
    let expected = Launch {
        launcher: Launcher::Own,
        rank: 2,
        size: Some(4),
        // The socket tells.
        local_size: None,
    };
    assert_eq!(own, Some(expected));
    let read = |text: &str| OwnJob::parse(text).map(|job| (job.rank, job.size, job.socket));
    assert_eq!(read("2/4:8"), Some((2, 4, 8)));
    assert_eq!(read("0/1:3"), Some((0, 1, 3)));
    for wrong in [
        "",
        "1",
        "4/4:8",
        "0/0:8",
        "0/1",
        "0/3:",
        "1/3:7,8",
        "1/3:2",
        "1/3:x",
        "1/3@7",
        "-1/3:7",
        "0/18446744073709551616:7",
        "1/513:7",
        "1/18446744073709551615:7",
    ] {
        assert_eq!(read(wrong), None, "{wrong}");
        let error = OwnJob::read(&|_| Some(wrong.to_string())).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let text = error.to_string();
        assert!(
            text.contains("DDP_JOB: expected RANK/SIZE:SOCKET"),
            "{text}"
        );
    }
}

#[test]
fn a_scheduler_without_pmi_and_nonsense_start_no_mpi() {
    assert_eq!(detect(&[]), None);
    assert_eq!(
        detect(&[("SLURM_NTASKS", "8"), ("SLURM_PROCID", "3")]),
        None
    );
    assert_eq!(detect(&[("WORLD_SIZE", "8")]), None);
    assert_eq!(detect(&[("OMPI_COMM_WORLD_RANK", "first")]), None);
}

#[test]
fn mpirun_with_one_rank_is_a_world_of_one() {
    assert!(
        detect(&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")])
            .unwrap()
            .is_of_one()
    );
}

#[test]
fn several_tasks_and_a_world_of_one_say_what_to_type() {
    let slurm = warning(&[("SLURM_NTASKS", "4")], true, false).unwrap();
    assert!(
        slurm.contains("Slurm reports 4 tasks (SLURM_NTASKS=4)"),
        "{slurm}"
    );
    assert!(
        slurm.contains("srun --mpi=pmix") && slurm.contains("mpirun -n 4"),
        "{slurm}"
    );

    let strangers = warning(&[("PMIX_RANK", "0"), ("SLURM_NTASKS", "4")], true, true).unwrap();
    assert!(
        strangers.contains("Slurm's PMI and this program's MPI library"),
        "{strangers}"
    );

    let torchrun = warning(&[("WORLD_SIZE", "2")], true, false).unwrap();
    assert!(torchrun.contains("set RANK, MASTER_ADDR"), "{torchrun}");

    assert!(
        warning(&[("PBS_NP", "16")], true, false)
            .unwrap()
            .contains("if 16 ranks are meant")
    );
}

#[test]
fn a_build_without_mpi_says_what_to_start_it_with() {
    let slurm = warning(&[("SLURM_NTASKS", "2")], false, false).unwrap();
    assert!(slurm.contains("start it with srun -n 2"), "{slurm}");
}

#[test]
fn ranks_that_an_mpi_launcher_started_in_vain_are_refused() {
    let without = "built without MPI: build it with the feature `mpi`, or start it with torchrun";
    for (pairs, with_mpi, help) in [
        (&[("OMPI_COMM_WORLD_SIZE", "2")], false, without),
        (&[("PMI_SIZE", "2")], false, without),
        (&[("OMPI_COMM_WORLD_SIZE", "2")], true, "do not match"),
    ] {
        let error = check_alone(&variables(pairs), with_mpi, with_mpi).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{error}");
        assert!(error.to_string().contains(help), "{error}");
    }
}

#[test]
fn ranks_without_mpi_are_known_by_torchruns_and_slurms_variables() {
    let torch = detect(&[
        ("RANK", "1"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "node1"),
        ("MASTER_PORT", "29500"),
        ("SLURM_PROCID", "0"),
        ("SLURM_STEP_NUM_TASKS", "2"),
    ]);
    let expected = Launch {
        launcher: Launcher::Variables,
        rank: 1,
        size: Some(4),
        local_size: Some(2),
    };
    assert_eq!(torch, Some(expected));
    let slurm = detect(&[
        ("SLURM_PROCID", "3"),
        ("SLURM_STEP_NUM_TASKS", "4"),
        ("SLURM_STEP_NODELIST", "node[1-2]"),
    ]);
    assert_eq!(
        slurm.map(|it| (it.launcher, it.rank)),
        Some((Launcher::Slurm, 3))
    );
}

#[test]
fn one_task_is_no_reason_to_warn() {
    assert_eq!(warning(&[], true, false), None);
    assert_eq!(
        warning(&[("SLURM_NTASKS", "1"), ("WORLD_SIZE", "1")], true, false),
        None
    );
    // mpirun of one inside an allocation of four, with or without MPI. torchrun is a launcher
    // itself.
    let mpirun_of_one = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")];
    for (allocation, is_warned) in [
        ("SLURM_NTASKS", false),
        ("PBS_NP", false),
        ("WORLD_SIZE", true),
    ] {
        let mut lookup = std::collections::HashMap::from(mpirun_of_one);
        lookup.insert(allocation, "4");
        let lookup = |name: &str| lookup.get(name).map(ToString::to_string);
        for with_mpi in [true, false] {
            assert_eq!(
                check_alone(&lookup, with_mpi, false).unwrap().is_some(),
                is_warned,
                "{allocation}"
            );
        }
    }
    // One step of one task inside an allocation of four.
    assert_eq!(
        warning(
            &[("SLURM_NTASKS", "4"), ("SLURM_STEP_NUM_TASKS", "1")],
            true,
            false
        ),
        None
    );
}

#[test]
fn the_way_to_unbind_is_that_of_the_launcher() {
    assert!(
        Launcher::OpenMpi
            .unbind(&variables(&[]))
            .contains("--bind-to none")
    );
    assert!(
        Launcher::Pmi
            .unbind(&variables(&[]))
            .contains("-bind-to none")
    );
    assert!(
        Launcher::Pmix
            .unbind(&variables(&[("SLURM_STEP_ID", "0")]))
            .contains("srun --cpu-bind=none")
    );
}

#[cfg(feature = "mpi")]
#[test]
fn one_rank_of_a_host_is_the_first() {
    let folder = std::env::temp_dir().join(format!("ddp-first-test-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let asked: Vec<bool> = (0..3).map(|_| is_first_of_host(Some(&folder))).collect();
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(asked, [true, false, false]);
    // Without the folder an error is reported twice rather than never.
    assert!(is_first_of_host(Some(&folder)) && is_first_of_host(None));
}
