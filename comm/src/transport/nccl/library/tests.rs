use super::*;

#[test]
fn versions_are_shown_as_people_write_them_and_compare() {
    assert_eq!(
        [21_800, 22_307, 23_007].map(|v| NcclVersion(v).to_string()),
        ["2.18.0", "2.23.7", "2.30.7"]
    );
    assert!(NcclVersion(21_705) < OLDEST && NcclVersion(21_801) > OLDEST);
}

#[test]
fn nccls_message_takes_precedence_over_its_code() {
    let (system, cuda) = (
        ncclResult_t::ncclSystemError as c_int,
        ncclResult_t::ncclUnhandledCudaError as c_int,
    );
    for (code, words, part, exit_code) in [
        (
            system,
            "Error while creating shared memory segment /dev/shm/nccl-x (size 9)",
            "--shm-size=1g",
            70,
        ),
        (
            cuda,
            "unhandled cuda error; last error: Cuda failure 2 'out of memory'",
            "smaller batch",
            71,
        ),
        (cuda, "Cuda failure 700", "nvidia-smi", 70),
        (
            ncclResult_t::ncclInvalidUsage as c_int,
            "Duplicate GPU detected : rank 0 and rank 1",
            "MIG",
            70,
        ),
        (
            ncclResult_t::ncclRemoteError as c_int,
            "",
            "other ranks",
            77,
        ),
        (
            ncclResult_t::ncclInternalError as c_int,
            "",
            "NCCL_DEBUG=INFO",
            70,
        ),
    ] {
        let (help, _, code) = advice(code, words);
        assert!(
            help.contains(part) && code == exit_code,
            "{words}: {help} {code}"
        );
    }
}

#[test]
fn results_have_nccls_names_and_unknown_ones_a_number() {
    assert_eq!(
        name(ncclResult_t::ncclRemoteError as c_int),
        "ncclRemoteError"
    );
    assert_eq!(
        name(ncclResult_t::ncclInProgress as c_int),
        "ncclInProgress"
    );
    assert_eq!([name(99), name(-1)], ["result 99", "result -1"]);
}
