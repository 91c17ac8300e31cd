//! What hangs, what frees it, and what is left behind: ranks that are processes.

use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUstream;

use super::bench::*;
use crate::error::CUresult;
use crate::machine::testing::{made, ok};
use crate::nccl::calls::*;
use crate::nccl::comm::Comm;
use crate::nccl::comm_calls::*;
use crate::stream::calls::{cuLaunchHostFunc, cuStreamCreate, cuStreamQuery, cuStreamSynchronize};

const LAZY: (&str, &str) = ("SIMCUDA_SCHEDULE", "lazy");

fn new_stream() -> CUstream {
    made(|stream| cuStreamCreate(stream, NON_BLOCKING))
}

/// It is not over, and does not become so for a while.
#[track_caller]
pub(super) fn hangs(stream: CUstream) {
    let end = Instant::now() + Duration::from_millis(300);
    while Instant::now() < end {
        assert_eq!(cuStreamQuery(stream), CUresult::CUDA_ERROR_NOT_READY);
        // Sleep: nothing may happen meanwhile.
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Aborting frees what hangs, and leaves NaN where there should be a result.
#[track_caller]
pub(super) fn is_freed_by_abort(comm: *mut Comm, stream: CUstream, to: u64, count: usize) {
    done(ncclCommAbort(comm));
    assert_eq!(cuStreamSynchronize(stream), SUCCESS);
    assert!(
        download(to, count)
            .iter()
            .all(|value| value.to_bits() == u32::MAX)
    );
}

/// A file that processes tell each other something by, without CUDA.
fn sign(name: &str) -> PathBuf {
    let id = std::env::var("SIMCUDA_TEST_ID").expect("whoever starts a case sets it");
    std::env::temp_dir().join(format!("simcuda-{name}-{}", &id[16..48]))
}

/// Waits for a sign that is for this rank alone, and removes it.
fn take_sign(path: &Path) {
    let end = Instant::now() + Duration::from_secs(60);
    while !path.exists() {
        assert!(Instant::now() < end, "the other rank does not continue");
        // Sleep: what is waited for is looked at.
        std::thread::sleep(Duration::from_millis(1));
    }
    std::fs::remove_file(path).unwrap();
}

fn differing(rank: usize, to: u64, comm: *mut Comm, stream: CUstream, how: &str) {
    match (how, rank) {
        ("count", _) => done(all_reduce(to, to, 64 + rank, comm, stream)),
        ("kind", 0) | ("order", 0) => done(all_reduce(to, to, 64, comm, stream)),
        ("kind", _) => done(ncclBroadcast(to as _, to as _, 64, F32, 0, comm, stream)),
        ("order", _) => {
            done(ncclReduceScatter(
                to as _,
                (to + 128 * rank as u64) as _,
                32,
                F32,
                SUM,
                comm,
                stream,
            ));
            done(all_reduce(to, to, 64, comm, stream));
        }
        ("root", _) => done(ncclBroadcast(
            to as _,
            to as _,
            64,
            F32,
            rank as i32,
            comm,
            stream,
        )),
        ("type", 1) => done(ncclAllReduce(to as _, to as _, 64, 2, SUM, comm, stream)),
        ("reduction", 1) => done(ncclAllReduce(to as _, to as _, 64, F32, 2, comm, stream)),
        ("nothing", 1) => {}
        ("send", 0) => done(ncclSend(to as _, 64, F32, 1, comm, stream)),
        ("send", _) => done(ncclRecv(to as _, 65, F32, 0, comm, stream)),
        ("against", 0) => done(ncclSend(to as _, 64, F32, 1, comm, stream)),
        _ => done(all_reduce(to, to, 64, comm, stream)),
    }
}

#[test]
fn calls_that_do_not_match_hang_until_they_are_aborted() {
    for how in [
        "count",
        "kind",
        "order",
        "root",
        "type",
        "reduction",
        "nothing",
        "send",
        "against",
    ] {
        let test = name!(calls_that_do_not_match_hang_until_they_are_aborted);
        let variables = [LAZY, ("SIMCUDA_NCCL_CHECK", "0"), ("SIMCUDA_TEST_HOW", how)];
        let ended = played(test, 2, &variables, |own| {
            let comm = own.start();
            let (stream, to) = (new_stream(), upload(&[1.0; 80]));
            let how = std::env::var("SIMCUDA_TEST_HOW").unwrap();
            differing(own.rank, to, comm, stream, &how);
            if (how.as_str(), own.rank) == ("nothing", 1) {
                take_sign(&sign("nothing"));
                return done(ncclCommAbort(comm));
            }
            hangs(stream);
            if how == "nothing" {
                std::fs::write(sign("nothing"), "").unwrap();
            }
            done(ncclCommAbort(comm));
            assert_eq!(cuStreamSynchronize(stream), SUCCESS);
            // A sender receives nothing, and both believe to be the root, in place.
            let writes_nothing =
                how == "root" || own.rank == 0 && (how == "send" || how == "against");
            let first = download(
                to + if how == "order" {
                    128 * own.rank as u64
                } else {
                    0
                },
                8,
            );
            assert!(
                writes_nothing || first.iter().all(|value| value.to_bits() == u32::MAX),
                "{how}: {first:?}"
            );
        });
        let Some(ended) = ended else { return };
        ended.iter().for_each(|ended| ended.came_to_its_end());
    }
}

#[test]
fn calls_that_do_not_match_are_told_unless_that_is_switched_off() {
    for (how, parts) in [
        (
            "count",
            [
                "ncclAllReduce of 64 f32, sum",
                "ncclAllReduce of 65 f32, sum",
            ],
        ),
        (
            "kind",
            [
                "ncclAllReduce of 64 f32, sum",
                "ncclBroadcast of 64 f32 from rank 0",
            ],
        ),
        (
            "order",
            [
                "ncclAllReduce of 64 f32, sum",
                "ncclReduceScatter of 32 f32, sum",
            ],
        ),
        (
            "type",
            [
                "ncclAllReduce of 64 f32, sum",
                "ncclAllReduce of 64 i32, sum",
            ],
        ),
    ] {
        let test = name!(calls_that_do_not_match_are_told_unless_that_is_switched_off);
        let ended = played(test, 2, &[LAZY, ("SIMCUDA_TEST_HOW", how)], |own| {
            let comm = own.start();
            let (stream, to) = (new_stream(), upload(&[1.0; 80]));
            differing(
                own.rank,
                to,
                comm,
                stream,
                &std::env::var("SIMCUDA_TEST_HOW").unwrap(),
            );
            // The finding ends the process; without it nothing would.
            let end = Instant::now() + Duration::from_secs(60);
            while cuStreamQuery(stream) != SUCCESS && Instant::now() < end {
                // Sleep: what is waited for is looked at.
                std::thread::sleep(Duration::from_millis(5));
            }
            done(ncclCommAbort(comm));
        });
        let Some(ended) = ended else { return };
        for ended in ended {
            ended.is_found(&[
                "NCCL MISMATCH: two ranks call different things",
                "collective 1",
                parts[0],
                parts[1],
            ]);
        }
    }
}

#[test]
fn a_device_takes_part_while_its_host_waits_elsewhere() {
    for schedule in ["lazy", "random"] {
        let test = name!(a_device_takes_part_while_its_host_waits_elsewhere);
        let ended = played(test, 3, &[("SIMCUDA_SCHEDULE", schedule)], |own| {
            let comm = own.start();
            let stream = new_stream();
            // Several rounds of the ring: the others have to do their part more than once.
            let count = 3 << 20;
            let to = upload(&vec![1.0; count]);
            done(all_reduce(to, to, count, comm, stream));
            let sign = |rank: usize| sign(&format!("background-{rank}"));
            if own.rank == 0 {
                assert_eq!(cuStreamSynchronize(stream), SUCCESS);
                (1..3).for_each(|rank| std::fs::write(sign(rank), "").unwrap());
            } else {
                take_sign(&sign(own.rank));
            }
            assert_eq!(cuStreamSynchronize(stream), SUCCESS);
            assert!(download(to, count) == vec![3.0; count]);
            done(ncclCommDestroy(comm));
        });
        let Some(ended) = ended else { return };
        all_clean(&ended);
    }
}

#[test]
fn a_rank_that_asks_without_waiting_is_served_too() {
    let test = name!(a_rank_that_asks_without_waiting_is_served_too);
    let ended = played(test, 2, &[LAZY], |own| {
        let comm = own.start();
        let (stream, to) = (new_stream(), upload(&[1.0; 64]));
        done(all_reduce(to, to, 64, comm, stream));
        let path = sign("queries");
        if own.rank == 0 {
            let end = Instant::now() + Duration::from_secs(60);
            while cuStreamQuery(stream) != SUCCESS {
                assert!(Instant::now() < end, "the device does not continue");
                // Sleep: what is waited for is looked at.
                std::thread::sleep(Duration::from_millis(1));
            }
            std::fs::write(&path, "").unwrap();
        } else {
            take_sign(&path);
        }
        assert_eq!(cuStreamSynchronize(stream), SUCCESS);
        done(ncclCommDestroy(comm));
    });
    let Some(ended) = ended else { return };
    all_clean(&ended);
}

#[test]
fn a_host_that_hangs_does_not_keep_its_device_from_what_was_queued() {
    static IS_DONE: AtomicBool = AtomicBool::new(false);
    unsafe extern "C" fn done_now(_: *mut std::ffi::c_void) {
        IS_DONE.store(true, Ordering::SeqCst);
    }
    let test = name!(a_host_that_hangs_does_not_keep_its_device_from_what_was_queued);
    let ended = played(test, 2, &[LAZY], |own| {
        let comm = own.start();
        let (stream, to) = (new_stream(), upload(&[1.0; 64]));
        done(all_reduce(to, to, 64, comm, stream));
        ok(cuLaunchHostFunc(stream, Some(done_now), null_mut()));
        // Neither calls anything any more, so that neither waits for the other.
        let end = Instant::now() + Duration::from_secs(60);
        while !IS_DONE.load(Ordering::SeqCst) {
            assert!(Instant::now() < end, "the device does not continue");
            // Sleep: what is waited for is looked at.
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(cuStreamSynchronize(stream), SUCCESS);
        assert_eq!(download(to, 64), [2.0; 64]);
        done(ncclCommDestroy(comm));
    });
    let Some(ended) = ended else { return };
    all_clean(&ended);
}

/// The simulator's memory that has files, in the folders for these. Other tests have files there.
fn files() -> Vec<PathBuf> {
    let folders = [PathBuf::from("/dev/shm"), std::env::temp_dir()];
    let entries = folders
        .iter()
        .filter_map(|folder| std::fs::read_dir(folder).ok())
        .flatten()
        .flatten();
    let paths = entries.map(|entry| entry.path());
    paths
        .filter(|path| path.to_string_lossy().contains("simcuda-nccl"))
        .collect()
}

#[test]
fn a_rank_that_is_killed_leaves_nothing_behind_and_the_others_hang() {
    let before = files();
    let test = name!(a_rank_that_is_killed_leaves_nothing_behind_and_the_others_hang);
    let job = start(test, 2, &[LAZY], |own| {
        let comm = own.start();
        let (stream, to) = (new_stream(), upload(&[1.0; 64]));
        done(all_reduce(to, to, 64, comm, stream));
        assert_eq!(cuStreamSynchronize(stream), SUCCESS);
        if own.rank == 1 {
            // SAFETY: kill takes no pointer.
            unsafe { libc::kill(std::process::id() as i32, libc::SIGKILL) };
        }
        done(all_reduce(to, to, 64, comm, stream));
        hangs(stream);
        is_freed_by_abort(comm, stream, to, 64);
    });
    let Some(job) = job else { return };
    let ended = job.ended();
    ended[0].is_clean();
    assert_eq!(ended[1].code, None, "{}", ended[1].text);
    assert_eq!(files(), before);
}

#[test]
fn the_end_of_a_process_does_not_wait_for_long_for_ranks_that_are_gone() {
    let test = name!(the_end_of_a_process_does_not_wait_for_long_for_ranks_that_are_gone);
    let begin = Instant::now();
    let ended = played(test, 2, &[LAZY], |own| {
        let comm = own.start();
        let (stream, to) = (new_stream(), upload(&[1.0; 64]));
        if own.rank == 0 {
            done(all_reduce(to, to, 64, comm, stream));
        }
    });
    let Some(ended) = ended else { return };
    all_clean(&ended);
    assert!(
        begin.elapsed() < Duration::from_secs(60),
        "{:?}",
        begin.elapsed()
    );
}

#[test]
fn two_ranks_on_one_device_are_refused_unless_they_say_that_they_are_of_two_hosts() {
    for (hosts, is_refused) in [(false, true), (true, false)] {
        let test =
            name!(two_ranks_on_one_device_are_refused_unless_they_say_that_they_are_of_two_hosts);
        let hosts = if hosts { "1" } else { "" };
        let ended = played(test, 2, &[LAZY, ("SIMCUDA_TEST_HOW", hosts)], |own| {
            if !std::env::var("SIMCUDA_TEST_HOW").unwrap().is_empty() {
                // SAFETY: no other thread of this process reads or writes the environment
                // meanwhile.
                unsafe { std::env::set_var("NCCL_HOSTID", own.rank.to_string()) };
            }
            crate::machine::testing::device(0);
            let mut comm = std::mem::MaybeUninit::uninit();
            match ncclCommInitRank(Some(&mut comm), 2, own.id, own.rank as i32) {
                // SAFETY: the call has succeeded.
                0 => done(ncclCommDestroy(unsafe { comm.assume_init() })),
                code => println!("code {code}: {}", last_error()),
            }
        });
        let Some(ended) = ended else { return };
        for ended in &ended {
            ended.came_to_its_end();
            let told = "code 5: ncclCommInitRank: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 0";
            assert_eq!(ended.text.contains(told), is_refused, "{}", ended.text);
        }
    }
}

#[test]
fn a_rank_that_waits_for_others_can_still_be_ended() {
    let test = name!(a_rank_that_waits_for_others_can_still_be_ended);
    let ended = played(test, 2, &[LAZY], |own| {
        if own.rank == 1 {
            return;
        }
        let waiting = std::thread::spawn(move || own.start() as usize);
        // Sleep: it waits by then, and may not end.
        std::thread::sleep(Duration::from_millis(300));
        assert!(!waiting.is_finished());
        // The machine is free meanwhile.
        crate::machine::testing::device(0);
        assert_eq!(cuStreamSynchronize(null_mut()), SUCCESS);
    });
    let Some(ended) = ended else { return };
    all_clean(&ended);
}
