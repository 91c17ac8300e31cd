//! Planted mistakes in GPU programs, each beside a corrected twin. In every order of execution the
//! simulator must find the mistake and name its cause, and must find nothing in the twin.
//!
//! ddp-comm itself detects ranks that call different collectives, on any GPU.
//!
//! Every program runs in a separate process: this test program, started again. Mistakes run only on
//! simulated GPUs (`launch/with-simulated-gpus 2 cargo test -p ddp-tests --test planted`). On real
//! GPUs each corrected twin runs once; `PLANTED=missing_event_wait/right` with `--ignored` runs one
//! by hand, for instance under compute-sanitizer.

#[path = "planted/blas.rs"]
mod blas;
#[path = "planted/bugs.rs"]
mod bugs;
#[path = "planted/cuda.rs"]
mod cuda;
#[path = "planted/libraries.rs"]
mod libraries;
#[path = "planted/nccl.rs"]
mod nccl;
#[path = "planted/ranks.rs"]
mod ranks;

use std::process::{Command, Output};
use std::sync::OnceLock;

/// The exit code after a finding of the simulator.
const FOUND: i32 = 86;
/// The exit code after ranks made different collectives.
const APART: i32 = 78;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    Wrong,
    Right,
}

/// The GPUs of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Machine {
    Without,
    /// This many real GPUs.
    Real(usize),
    Simulated,
}

/// What the child processes run.
#[test]
#[ignore = "a part of the tests below, as a process"]
fn a_planted_program_runs_where_it_is_asked_for() {
    let asked = std::env::var("PLANTED").expect("PLANTED=NAME/wrong or NAME/right");
    if asked == "nothing" {
        println!("devices: {:?}", cuda::device_names());
        return;
    }
    let version = match asked.rsplit_once('/') {
        Some((_, "wrong")) => Version::Wrong,
        Some((_, "right")) => Version::Right,
        _ => panic!("PLANTED={asked}: expected NAME/wrong or NAME/right"),
    };
    let name = &asked[..asked.len() - "/wrong".len()];
    let bug = all()
        .find(|bug| bug.name == name)
        .unwrap_or_else(|| panic!("PLANTED={asked}: no such program"));
    (bug.program)(version);
}

/// All programs.
fn all() -> impl Iterator<Item = &'static bugs::Bug> {
    bugs::ALL
        .iter()
        .chain(libraries::LIBRARIES)
        .chain(ranks::RACES)
        .chain(ranks::APART.iter().map(|apart| &apart.bug))
}

/// Runs a program with these settings of the simulator and no others.
fn run(asked: &str, settings: &[(&str, &str)]) -> Output {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command.args([
        "--exact",
        "a_planted_program_runs_where_it_is_asked_for",
        "--include-ignored",
        "--nocapture",
    ]);
    let inherited = [
        [
            "FAULTS",
            "IGNORE_WAIT",
            "COUNT_WAITS",
            "ON_FINDING",
            "SCHEDULE",
            "SEED",
        ],
        [
            "TRACE",
            "NO_PEER",
            "DRAIN",
            "LEAKS",
            "NCCL_CHECK",
            "TIMELINE",
        ],
    ];
    for name in inherited.as_flattened() {
        command.env_remove(format!("SIMCUDA_{name}"));
    }
    command
        .env("RUST_BACKTRACE", "0")
        .env("PLANTED", asked)
        .envs(settings.iter().copied())
        .output()
        .expect("this program can be started again")
}

fn machine() -> Machine {
    static MACHINE: OnceLock<Machine> = OnceLock::new();
    *MACHINE.get_or_init(|| {
        let output = run("nothing", &[]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let names = text
            .lines()
            .find(|line| line.starts_with("devices: "))
            .unwrap_or_else(|| panic!("{output:?}"));
        match names.matches('"').count() / 2 {
            0 => Machine::Without,
            _ if names.contains("Simulated") => Machine::Simulated,
            count => Machine::Real(count),
        }
    })
}

/// The seeds that a corrected twin is run with, of 1000.
fn seeds(name: &str) -> Vec<usize> {
    ddp_testing::cases(name, 1000, 5)
}

/// Shows that a planted mistake is found and its correction is clean.
fn is_caught(name: &str) {
    let bug = all()
        .find(|bug| bug.name == name)
        .expect("a program of this name");
    let apart = ranks::APART.iter().find(|apart| apart.bug.name == name);
    let (wrong, right) = (format!("{name}/wrong"), format!("{name}/right"));
    match machine() {
        Machine::Without => ddp_testing::skip("no CUDA device"),
        Machine::Real(count) if count < bug.devices => {
            let needed = bug.devices;
            ddp_testing::skip(&format!("{needed} CUDA devices are needed, {count} found"));
        }
        Machine::Real(_) => {
            is_clean(&right, &[]);
            if apart.is_some() {
                is_found(&wrong, &[], &[(APART, bug.told)]);
            }
        }
        Machine::Simulated => {
            let devices = bug.devices.to_string();
            let leaks = if name == bugs::MEMORY_NEVER_FREED {
                "1"
            } else {
                "0"
            };
            // Whether two accesses are ordered does not depend on when they happen: every
            // schedule must find the mistake.
            let random = ddp_testing::cases(name, 100, 2);
            let random = random.into_iter().map(|seed| ("random", seed));
            for (schedule, seed) in random.chain([("lazy", 0), ("eager", 0)]) {
                let settings = [
                    ("SIMCUDA_DEVICES", &*devices),
                    ("SIMCUDA_SCHEDULE", schedule),
                    ("SIMCUDA_SEED", &seed.to_string()),
                    ("SIMCUDA_INTRA", "1"),
                    ("SIMCUDA_LEAKS", leaks),
                ];
                let finder = (if apart.is_some() { APART } else { FOUND }, bug.told);
                if let Some(told) = apart.and_then(|apart| apart.checked) {
                    // Both the simulator and ddp-comm check, and the first to find it ends the
                    // process.
                    is_found(&wrong, &settings, &[finder, (FOUND, told)]);
                    let settings = [&settings[..], &[("SIMCUDA_NCCL_CHECK", "0")]].concat();
                    is_found(&wrong, &settings, &[finder]);
                    continue;
                }
                is_found(&wrong, &settings, &[finder]);
            }
            for seed in seeds(name) {
                is_clean(
                    &right,
                    &[
                        ("SIMCUDA_DEVICES", &devices),
                        ("SIMCUDA_SEED", &seed.to_string()),
                        ("SIMCUDA_INTRA", "1"),
                        ("SIMCUDA_LEAKS", leaks),
                    ],
                );
            }
        }
    }
}

/// Asserts that one of `finders` found the mistake: its exit code, and all its words on stderr.
fn is_found(asked: &str, settings: &[(&str, &str)], finders: &[(i32, &[&str])]) {
    let output = run(asked, settings);
    let told = String::from_utf8_lossy(&output.stderr);
    let finder = finders
        .iter()
        .find(|(exit_code, _)| output.status.code() == Some(*exit_code));
    let Some((_, words)) = finder else {
        panic!("{asked} with {settings:?} ended otherwise:\n{told}")
    };
    for word in *words {
        assert!(
            told.contains(word),
            "{asked} with {settings:?} does not say {word:?}:\n{told}"
        );
    }
}

fn is_clean(asked: &str, settings: &[(&str, &str)]) {
    let output = run(asked, settings);
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{asked} with {settings:?} is not clean:\n{told}"
    );
    assert!(
        !told.contains("simcuda:"),
        "{asked} with {settings:?} is not silent:\n{told}"
    );
}

/// One test per program, with the program's name.
macro_rules! caught {
    ($($name:ident)*) => {
        mod caught {
            $(#[test]
            fn $name() {
                super::is_caught(stringify!($name));
            })*

            #[test]
            fn every_program_is_tested() {
                let mut tested = vec![$(stringify!($name)),*];
                let mut all: Vec<&str> = super::all().map(|bug| bug.name).collect();
                tested.sort_unstable();
                all.sort_unstable();
                assert_eq!(tested, all);
            }
        }
    };
}

caught! {
    missing_event_wait
    event_recorded_on_the_wrong_stream
    pinned_buffer_reused_too_early
    pinned_buffer_read_too_early
    use_after_free
    double_free
    out_of_bounds_in_a_kernel
    wrong_device_pointer
    peer_copy_without_access
    call_that_capture_forbids
    graph_replayed_after_its_buffer_was_freed
    workspace_shared_by_two_streams
    host_read_without_synchronisation
    memory_used_before_it_is_made
    synchronous_upload_still_on_its_way
    batch_slot_reused_too_early
    race_that_nobody_waits_for
    wait_of_another_thread
    matmul_over_its_operand
    matmul_partly_over_c
    mask_over_the_matmul
    algorithm_of_another_shape
    launch_in_another_context
    matmul_in_another_context
    counts_that_differ_between_ranks
    types_that_differ_between_ranks
    algorithms_that_differ_between_ranks
    operations_that_differ_between_ranks
    result_read_after_a_later_call
    communicators_in_opposite_orders
    first_collective_in_a_capture
    kernel_loaded_in_a_capture
    bucket_started_one_event_too_early
    gathered_values_read_too_early
    counts_that_differ_by_one_element
    collectives_in_another_order
    memory_that_nothing_has_written
    race_after_a_million_accesses
    restricted_operand_written_in_place
    cached_read_of_what_is_written
    index_into_another_allocation
    host_function_reads_too_early
    memory_never_freed
    first_collectives_in_opposite_orders
    opposite_orders_within_a_group
    collectives_grouped_by_one_rank_alone
    exchange_grouped_by_one_rank_alone
    communicator_used_by_two_threads
}
