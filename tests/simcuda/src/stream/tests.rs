//! Streams, events and host waits, through the entry points.

mod bench;
mod errors;

use std::mem::MaybeUninit;
use std::sync::Mutex;

use cudarc::driver::sys::{CUevent, CUstream};

use crate::error::CUresult;

pub(crate) use self::bench::*;
use super::calls::*;
use super::*;
use crate::config::{Config, Schedule};
use crate::copy::cuMemsetD32Async;
use crate::event::calls::*;
use crate::faults::Plan;
use crate::machine::{LockedMachine, is_held_by_this_thread};
use crate::memory::calls::cuMemAlloc_v2;
use crate::report::FindingKind;

const SCHEDULES: [Schedule; 3] = [Schedule::Random, Schedule::Lazy, Schedule::Eager];

#[test]
fn a_lazy_stream_runs_in_order_once_something_waits() {
    for schedule in SCHEDULES {
        let bench = bench(Config {
            schedule,
            ..config(1)
        });
        let stream = bench.stream();
        bench.run_all(stream, &["a", "b", "c"]);
        assert_eq!(bench.ran(), Vec::<String>::new(), "{schedule:?}");
        assert_eq!(cuStreamSynchronize(stream), SUCCESS);
        assert_eq!(bench.ran(), ["a", "b", "c"], "{schedule:?}");
    }
}

#[test]
fn a_wait_orders_two_streams_in_time_and_in_the_clocks_with_every_schedule() {
    for (seed, schedule) in (0..20).zip(SCHEDULES.into_iter().cycle()) {
        let bench = bench(Config {
            schedule,
            ..config(seed)
        });
        let (first, second) = (bench.stream(), bench.stream());
        bench.write(first, "a");
        bench.order(first, second);
        bench.write(second, "b");
        assert_eq!(cuStreamSynchronize(second), SUCCESS);
        assert_eq!(bench.ran(), ["a", "b"]);
        assert_eq!(bench.finding_kinds(), [], "seed {seed}");
    }
}

#[test]
fn without_a_wait_both_orders_occur_and_each_seed_finds_the_race() {
    let mut orders = std::collections::BTreeSet::new();
    for seed in 0..20 {
        let bench = bench(config(seed));
        let (first, second) = (bench.stream(), bench.stream());
        bench.write(first, "a");
        bench.write(second, "b");
        assert_eq!(cuCtxSynchronize(), SUCCESS);
        orders.insert(bench.ran());
        assert_eq!(bench.finding_kinds(), [FindingKind::Race], "seed {seed}");
        let message = bench.findings()[0].message.clone();
        assert!(
            ["a, on stream 0", "b, on stream 1", "without_a_wait"]
                .iter()
                .all(|part| message.contains(part)),
            "{message}"
        );
    }
    assert_eq!(orders.len(), 2);
}

#[test]
fn an_event_recorded_on_the_wrong_stream_orders_nothing() {
    let bench = bench(config(3));
    let (first, second, wrong) = (bench.stream(), bench.stream(), bench.stream());
    bench.write(first, "a");
    bench.order(wrong, second);
    bench.write(second, "b");
    assert_eq!(cuCtxSynchronize(), SUCCESS);
    assert_eq!(bench.finding_kinds(), [FindingKind::Race]);
}

#[test]
fn an_event_recorded_before_the_work_orders_nothing_of_it() {
    let bench = bench(config(3));
    let (first, second) = (bench.stream(), bench.stream());
    bench.order(first, second);
    bench.write(first, "a");
    bench.write(second, "b");
    assert_eq!(cuCtxSynchronize(), SUCCESS);
    assert_eq!(bench.finding_kinds(), [FindingKind::Race]);
}

#[test]
fn recording_again_does_not_move_the_waits_that_stand() {
    for seed in 0..20 {
        let bench = bench(config(seed));
        let (first, second) = (bench.stream(), bench.stream());
        let event = bench.event();
        bench.run(first, "a");
        assert_eq!(cuEventRecord(event, first), SUCCESS);
        assert_eq!(cuStreamWaitEvent(second, event, 0), SUCCESS);
        bench.run(second, "b");
        // After work that waits for the second stream: if the wait had moved, this would never end.
        bench.order(second, first);
        assert_eq!(cuEventRecord(event, first), SUCCESS);
        assert_eq!(cuEventSynchronize(event), SUCCESS);
        assert_eq!(bench.ran(), ["a", "b"]);
    }
}

#[test]
fn each_way_of_the_host_to_wait_orders_what_comes_after() {
    type Wait = fn(CUstream, CUevent) -> CUresult;
    fn poll(mut query: impl FnMut() -> CUresult) -> CUresult {
        loop {
            match query() {
                CUresult::CUDA_ERROR_NOT_READY => {}
                code => return code,
            }
        }
    }
    let waits: [(&str, Wait); 5] = [
        ("stream", |stream, _| cuStreamSynchronize(stream)),
        ("event", |_, event| cuEventSynchronize(event)),
        ("context", |_, _| cuCtxSynchronize()),
        ("polled stream", |stream, _| poll(|| cuStreamQuery(stream))),
        ("polled event", |_, event| poll(|| cuEventQuery(event))),
    ];
    for schedule in SCHEDULES {
        for (name, wait) in waits {
            let bench = bench(Config {
                schedule,
                ..config(7)
            });
            let (first, second, event) = (bench.stream(), bench.stream(), bench.event());
            bench.write(first, "a");
            assert_eq!(cuEventRecord(event, first), SUCCESS);
            assert_eq!(wait(first, event), SUCCESS);
            bench.write(second, "b");
            assert_eq!(cuCtxSynchronize(), SUCCESS);
            assert_eq!(bench.finding_kinds(), [], "{name} {schedule:?}");
        }
    }
}

#[test]
fn waiting_for_an_event_does_not_order_later_work() {
    let bench = bench(config(2));
    let (first, second, event) = (bench.stream(), bench.stream(), bench.event());
    assert_eq!(cuEventRecord(event, first), SUCCESS);
    bench.write(first, "a");
    assert_eq!(cuEventSynchronize(event), SUCCESS);
    bench.write(second, "b");
    assert_eq!(cuCtxSynchronize(), SUCCESS);
    assert_eq!(bench.finding_kinds(), [FindingKind::Race]);
}

#[test]
fn each_wait_can_be_ignored_and_is_then_missed() {
    for (ignored, races) in [(None, 0), (Some(1), 1), (Some(2), 1), (Some(3), 0)] {
        let bench = bench(Config {
            ignore_wait: ignored,
            ..config(5)
        });
        let (first, second) = (bench.stream(), bench.stream());
        bench.write(first, "a");
        bench.order(first, second);
        bench.write(second, "b");
        assert_eq!(cuStreamSynchronize(second), SUCCESS);
        bench.write(first, "c");
        assert_eq!(cuCtxSynchronize(), SUCCESS);
        assert_eq!(
            bench.finding_kinds().len(),
            races,
            "wait {ignored:?}: {:?}",
            bench.findings()
        );
    }
}

#[test]
fn waits_are_listed_with_the_calls_of_the_product() {
    let path = std::env::temp_dir().join(format!("simcuda-waits-{}", std::process::id()));
    let bench = bench(Config {
        count_waits: Some(path.clone()),
        ..config(5)
    });
    let (first, second) = (bench.stream(), bench.stream());
    bench.order(first, second);
    assert_eq!(cuStreamSynchronize(second), SUCCESS);
    assert_eq!(cuCtxSynchronize(), SUCCESS);
    let listed = std::fs::read_to_string(&path).expect("the list was written");
    std::fs::remove_file(&path).expect("the list is there");
    let lines: Vec<&str> = listed.lines().collect();
    assert_eq!(lines.len(), 3, "{listed}");
    assert!(lines[0].starts_with("1 cuStreamWaitEvent "), "{listed}");
    assert!(
        lines[1].starts_with("2 cuStreamSynchronize ") && lines[1].contains("waits_are_listed"),
        "{listed}"
    );
    assert!(lines[2].starts_with("3 cuCtxSynchronize "), "{listed}");
}

#[test]
fn the_null_stream_is_in_order_with_blocking_streams_only() {
    for (seed, is_blocking) in (0..20).zip([true, false].into_iter().cycle()) {
        let bench = bench(config(seed));
        let make = || {
            if is_blocking {
                bench.blocking_stream()
            } else {
                bench.stream()
            }
        };
        let (first, second) = (make(), make());
        bench.write(first, "a");
        bench.write(std::ptr::null_mut(), "null");
        bench.write(second, "b");
        assert_eq!(cuCtxSynchronize(), SUCCESS);
        if is_blocking {
            assert_eq!(bench.ran(), ["a", "null", "b"], "seed {seed}");
            assert_eq!(bench.finding_kinds(), [], "seed {seed}");
        } else {
            assert!(
                bench.finding_kinds().contains(&FindingKind::Race),
                "seed {seed}"
            );
        }
    }
}

#[test]
fn blocking_streams_are_not_in_order_with_each_other_without_the_null_stream() {
    let bench = bench(config(4));
    bench.write(std::ptr::null_mut(), "null");
    let (first, second) = (bench.blocking_stream(), bench.blocking_stream());
    bench.write(first, "a");
    bench.write(second, "b");
    assert_eq!(cuStreamSynchronize(std::ptr::null_mut()), SUCCESS);
    assert_eq!(
        bench.ran().len(),
        3,
        "waiting for the null stream waits for the blocking streams"
    );
    assert_eq!(bench.finding_kinds(), [FindingKind::Race]);
}

#[test]
fn the_default_stream_of_a_thread_is_a_blocking_stream_of_its_own() {
    let per_thread = 2 as CUstream;
    let bench = bench(config(4));
    bench.write(std::ptr::null_mut(), "null");
    bench.write(per_thread, "own");
    assert_eq!(cuStreamSynchronize(per_thread), SUCCESS);
    assert_eq!(bench.ran(), ["null", "own"]);
    assert_eq!(bench.finding_kinds(), []);
    let device = got(|device| cuStreamGetDevice(per_thread, device));
    assert_eq!(device, 0);
}

#[test]
fn events_give_simulated_times_and_the_documented_errors() {
    let bench = bench(config(6));
    let stream = bench.stream();
    let (start, end, never) = (bench.event(), bench.event(), bench.event());
    let untimed = got(|event| cuEventCreate(event, 2));
    assert_eq!(cuEventRecord(start, stream), SUCCESS);
    bench.run_all(stream, &["a", "b", "c"]);
    assert_eq!(cuEventRecord(end, stream), SUCCESS);
    assert_eq!(cuEventRecord(untimed, stream), SUCCESS);
    let elapsed = |start, end| {
        let mut value = MaybeUninit::uninit();
        cuEventElapsedTime_v2(Some(&mut value), start, end)
    };
    assert_eq!(elapsed(start, never), CUresult::CUDA_ERROR_NOT_READY);
    assert_eq!(cuEventSynchronize(end), SUCCESS);
    assert_eq!(elapsed(start, never), CUresult::CUDA_ERROR_INVALID_HANDLE);
    assert_eq!(elapsed(start, untimed), CUresult::CUDA_ERROR_INVALID_HANDLE);
    let milliseconds: f32 = got(|value| cuEventElapsedTime(value, start, end));
    // Three times two milliseconds, which f32 holds exactly.
    assert_eq!(milliseconds, 6.0);
    assert_eq!(cuEventQuery(never), SUCCESS);
    assert_eq!(cuEventSynchronize(never), SUCCESS);
    assert_eq!(cuStreamWaitEvent(stream, never, 0), SUCCESS);
    assert_eq!(cuEventCreate(None, 0), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(
        cuEventCreate(Some(&mut MaybeUninit::uninit()), 4),
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
}

#[test]
fn an_event_belongs_to_a_device_and_can_be_waited_for_on_another() {
    let bench = bench(config(6));
    let (first, event) = (bench.stream(), bench.event());
    bench.set_device(1);
    let second = bench.stream();
    assert_eq!(
        cuEventRecord(event, second),
        CUresult::CUDA_ERROR_INVALID_HANDLE
    );
    bench.write(first, "a");
    assert_eq!(cuEventRecord(event, first), SUCCESS);
    assert_eq!(cuStreamWaitEvent(second, event, 0), SUCCESS);
    bench.write(second, "b");
    assert_eq!(cuCtxSynchronize(), SUCCESS);
    assert_eq!(bench.ran(), ["a", "b"]);
    assert_eq!(bench.finding_kinds(), []);
}

#[test]
fn host_functions_run_in_order_with_the_lock_free() {
    static CALLED: Mutex<Vec<(usize, bool)>> = Mutex::new(Vec::new());
    unsafe extern "C" fn function(argument: *mut std::ffi::c_void) {
        let is_free = !is_held_by_this_thread() && crate::scheduler::in_host_function();
        CALLED
            .lock()
            .expect("no test fails while it holds this")
            .push((argument as usize, is_free));
    }
    let bench = bench(config(6));
    let stream = bench.stream();
    bench.run(stream, "a");
    assert_eq!(
        cuLaunchHostFunc(stream, Some(function), 41 as *mut _),
        SUCCESS
    );
    bench.run(stream, "b");
    assert_eq!(
        cuLaunchHostFunc(stream, Some(function), 42 as *mut _),
        SUCCESS
    );
    assert_eq!(
        cuLaunchHostFunc(stream, None, 42 as *mut _),
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(cuStreamSynchronize(stream), SUCCESS);
    assert_eq!(
        *CALLED.lock().expect("no test fails while it holds this"),
        [(41, true), (42, true)]
    );
    assert_eq!(bench.ran().len(), 4);
}

#[test]
fn a_full_machine_makes_room() {
    let bench = bench(config(6));
    let stream = bench.stream();
    (0..PENDING_MAX + 100).for_each(|_| bench.run(stream, "a"));
    assert_eq!(bench.ran().len(), 100);
    assert_eq!(cuStreamSynchronize(stream), SUCCESS);
    assert_eq!(bench.ran().len(), PENDING_MAX + 100);
}

#[test]
fn memory_of_a_pool_comes_and_goes_in_the_order_of_the_stream() {
    let bench = bench(config(6));
    let stream = bench.stream();
    bench.run(stream, "a");
    let pointer = got(|pointer| crate::memory::calls::cuMemAllocAsync(pointer, 64, stream));
    bench.run(stream, "b");
    assert_eq!(
        crate::memory::calls::cuMemFreeAsync(pointer, stream),
        SUCCESS
    );
    assert_eq!(cuStreamSynchronize(stream), SUCCESS);
    let (made, freed) = ("cuMemAllocAsync of 64 bytes", "cuMemFreeAsync of 64 bytes");
    assert_eq!(bench.ran(), ["a", made, "b", freed]);
}
