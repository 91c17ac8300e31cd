//! A single process, and ranks whose launcher gives them fewer resources than they could have.

use crate::support::job::{Folder, QUICK};

#[test]
fn a_process_that_a_scheduler_left_alone_is_warned_and_trains() {
    let folder = Folder::new("slurm");
    let ended = folder.alone(QUICK).env("SLURM_NTASKS", "4").run();
    ended.assert_well();
    let warnings: Vec<&str> = ended
        .stderr
        .lines()
        .filter(|line| line.contains("WARN"))
        .collect();
    let [warning] = warnings[..] else {
        panic!("one warning: {ended}")
    };
    assert!(
        warning.contains("this process is alone, but Slurm reports 4 tasks (SLURM_NTASKS=4)"),
        "{ended}"
    );
    let way_out = if cfg!(feature = "mpi") {
        "srun --mpi=pmix"
    } else {
        "start it with srun -n 4"
    };
    assert!(warning.contains(way_out), "{ended}");
    assert_eq!(folder.metrics_log().start()["world"]["ranks"], 1);
    assert_eq!(folder.checkpoints(), ["step-00000008"]);
}

#[test]
fn ranks_of_an_mpi_that_this_program_does_not_have_are_refused_and_rank_0_says_so() {
    for rank in ["0", "1"] {
        let folder = Folder::new("other-mpi");
        let job = folder.alone(QUICK).env("OMPI_COMM_WORLD_RANK", rank);
        let ended = job.env("OMPI_COMM_WORLD_SIZE", "2").run();
        assert_eq!(ended.exit_code(), Some(2), "{ended}");
        let told = if cfg!(feature = "mpi") {
            "this program's MPI library do not match"
        } else {
            "this program was built without MPI"
        };
        let says_so = ended.causes().iter().any(|cause| cause.contains(told));
        assert_eq!(says_so, rank == "0", "{ended}");
        assert!(!folder.out().exists(), "{ended}");
    }
}

#[test]
fn one_task_is_no_reason_to_warn() {
    let ended = Folder::new("one-task")
        .alone(QUICK)
        .env("SLURM_NTASKS", "1")
        .run();
    ended.assert_well();
    assert!(!ended.stderr.contains("WARN"), "{ended}");
}

/// The first core that this process may run on; none where taskset is missing.
fn first_core() -> Option<String> {
    let output = std::process::Command::new("taskset")
        .args(["-cp", &std::process::id().to_string()])
        .output()
        .ok()?;
    let list = String::from_utf8(output.stdout).ok()?;
    let cores = list.rsplit_once(": ")?.1.trim();
    Some(cores.split([',', '-']).next()?.to_string())
}

#[test]
fn threads_are_as_many_as_the_mask_has_cores() {
    let Some(core) = first_core() else {
        ddp_testing::skip("no taskset");
        return;
    };
    let folder = Folder::new("mask");
    let ended = folder
        .in_shell(&format!("set -- taskset -c {core} \"$@\""), QUICK)
        .run();
    ended.assert_well();
    assert_eq!(folder.metrics_log().start()["world"]["threads"], 1);
}

#[cfg(feature = "mpi")]
#[test]
fn a_rank_that_is_bound_to_one_core_says_how_to_lift_it_and_trains() {
    if ddp_kernels::threads::cores().len() < 2 {
        ddp_testing::skip("this process may run on one core only");
        return;
    }
    let folder = Folder::new("bound");
    let ended = folder.bound_ranks(1, QUICK).run();
    ended.assert_well();
    assert_eq!(ended.stderr.matches("WARN").count(), 1, "{ended}");
    assert!(
        ended.stderr.contains("rank 0 may run on 1 core only"),
        "{ended}"
    );
    assert!(ended.stderr.contains("mpirun --bind-to none"), "{ended}");
    assert_eq!(folder.metrics_log().start()["world"]["threads"], 1);
}

#[test]
fn one_process_fails_in_its_own_words() {
    for (kind, exit_code, words) in [
        ("panic", 70, "panicked at "),
        ("error", 65, "a fault on purpose in Log of step 3"),
    ] {
        let folder = Folder::new("alone");
        let ended = folder
            .alone(QUICK)
            .env("DDP_TEST_FAULT", &format!("0:log:3:{kind}"))
            .run();
        assert!(
            ended
                .assert_fails(exit_code)
                .starts_with(&format!("ddp-train: {words}")),
            "{ended}"
        );
        assert_eq!(folder.metrics_log().of_steps("step"), [1.0, 2.0]);
        assert_eq!(folder.checkpoints(), [""; 0]);
    }
}

#[test]
fn a_killed_process_leaves_a_record_of_whole_lines() {
    let folder = Folder::new("killed");
    let ended = folder
        .alone(QUICK)
        .env("DDP_TEST_FAULT", "0:optimizer:3:kill")
        .run();
    assert_eq!(
        (ended.exit_code(), ended.signal()),
        (None, Some(9)),
        "{ended}"
    );
    let log = folder.metrics_log();
    assert_eq!(log.of_steps("step"), [1.0, 2.0]);
    assert!(log.end().is_none());
}

#[test]
fn an_allocation_that_fails_ends_the_process_with_71() {
    let folder = Folder::new("allocation");
    let job = folder.alone(QUICK);
    let ended = job
        .env("DDP_TEST_FAULT", "0:forward:3:memory")
        .env("RUST_BACKTRACE", "1")
        .run();
    let cause = ended.assert_fails(71);
    assert!(
        cause.starts_with("ddp-train: out of memory outside tensors; help: ")
            && cause.contains("(ulimit -v)"),
        "{ended}"
    );
}

#[test]
fn a_full_pipe_without_a_reader_does_not_hold_up_training() {
    let folder = Folder::new("pipe");
    let pipe = folder.path().join("pipe");
    let full = format!(
        "mkfifo {0}; exec 3<>{0}; head -c 65536 /dev/zero >&3; exec 2>&3",
        pipe.display()
    );
    let ended = folder.in_shell(&full, QUICK).run();
    ended.assert_well();
    assert_eq!(folder.metrics_log().end().unwrap()["exit_code"], 0);
}
