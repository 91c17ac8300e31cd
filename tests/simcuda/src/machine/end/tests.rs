//! The end of the process, through the entry points: each case is a process that ends in some way.

use std::ffi::c_void;
use std::ptr::null_mut;

use cudarc::driver::sys::CUstream;

use crate::context::cuDevicePrimaryCtxRelease_v2;
use crate::copy::{cuMemcpyDtoHAsync_v2, cuMemsetD32Async};
use crate::error::CUresult;
use crate::event::calls::{cuEventCreate, cuEventDestroy_v2, cuEventRecord};
use crate::machine::testing::{cases, device, made, ok, played};
use crate::memory::calls::{
    cuMemAlloc_v2, cuMemAllocAsync, cuMemFree_v2, cuMemFreeAsync, cuMemFreeHost, cuMemHostAlloc,
};
use crate::stream::calls::{
    cuLaunchHostFunc, cuStreamCreate, cuStreamDestroy_v2, cuStreamSynchronize,
};

const COUNT: usize = 1024;
const BYTES: usize = 4 * COUNT;
const NON_BLOCKING: u32 = 1;

fn stream() -> CUstream {
    made(|stream| cuStreamCreate(stream, NON_BLOCKING))
}

fn buffer() -> u64 {
    made(|pointer| cuMemAlloc_v2(pointer, BYTES))
}

fn fill(buffer: u64, stream: CUstream) {
    ok(cuMemsetD32Async(buffer, 1, COUNT, stream));
}

/// Two streams fill one buffer without waiting.
fn race() {
    let buffer = buffer();
    fill(buffer, stream());
    fill(buffer, stream());
}

/// Ends the process: its handler runs after the product's end.
unsafe extern "C" fn never(_: *mut c_void) {
    std::process::abort();
}

#[test]
fn an_unawaited_race_is_found_at_exit_in_every_schedule() {
    let test = concat!(
        module_path!(),
        "::an_unawaited_race_is_found_at_exit_in_every_schedule"
    );
    for schedule in ["lazy", "random", "eager"] {
        let ended = played(test, &[("SIMCUDA_SCHEDULE", schedule)], || {
            device(0);
            race();
        });
        let Some(ended) = ended else { return };
        ended.is_found(&[
            "RACE",
            "on stream 1 of device 0",
            "found at the end of the process",
        ]);
    }
}

cases! {
    the_end_runs_nothing_where_that_is_turned_off, [("SIMCUDA_DRAIN", "0")], {
        device(0);
        race();
    }, |ended| ended.is_clean();

    what_hangs_is_passed_over_and_hides_nothing_of_other_streams, [("SIMCUDA_FAULTS", "stream@1=hang")], {
        device(0);
        let hung = stream();
        fill(buffer(), hung);
        fill(buffer(), hung);
        race();
    }, |ended| ended.is_found(&["RACE", "found at the end of the process"]);

    the_end_comes_though_all_hangs, [("SIMCUDA_FAULTS", "stream@1=hang")], {
        device(0);
        let hung = stream();
        fill(buffer(), hung);
        fill(buffer(), hung);
    }, |ended| ended.is_clean();

    what_was_destroyed_before_the_end_is_missed_by_nobody, [], {
        device(0);
        let (stream, buffer) = (stream(), made(|pointer| cuMemAllocAsync(pointer, BYTES, null_mut())));
        ok(cuStreamSynchronize(null_mut()));
        let event = made(|event| cuEventCreate(event, 0));
        fill(buffer, stream);
        ok(cuEventRecord(event, stream));
        ok(cuMemFreeAsync(buffer, stream));
        ok(cuEventDestroy_v2(event));
        ok(cuStreamDestroy_v2(stream));
    }, |ended| ended.is_clean();

    a_context_that_was_given_back_is_missed_by_nobody, [], {
        device(0);
        fill(buffer(), stream());
        ok(cuDevicePrimaryCtxRelease_v2(0));
    }, |ended| ended.is_clean();

    host_functions_are_not_called_at_the_end_and_hide_nothing_behind_them, [], {
        device(0);
        let (first, buffer) = (stream(), buffer());
        ok(cuLaunchHostFunc(first, Some(never), null_mut()));
        fill(buffer, first);
        fill(buffer, stream());
    }, |ended| ended.is_found(&["RACE", "found at the end of the process"]);

    after_a_finding_nothing_more_runs, [], {
        device(0);
        race();
        let freed = made(|pointer| cuMemAllocAsync(pointer, BYTES, null_mut()));
        ok(cuMemFreeAsync(freed, null_mut()));
        cuMemFreeAsync(freed, null_mut());
    }, |ended| {
        ended.is_found(&["DOUBLE FREE"]);
        assert_eq!(ended.text.matches("simcuda: ").count(), 1, "{}", ended.text);
    };

    after_a_signal_nothing_more_runs, [], {
        device(0);
        race();
        std::process::abort();
    }, |ended| {
        assert_eq!(ended.code, None, "{}", ended.text);
        assert!(!ended.text.contains("simcuda: "), "{}", ended.text);
    };

    an_exit_by_the_program_itself_is_an_end_too, [], {
        device(0);
        race();
        std::process::exit(3);
    }, |ended| ended.is_found(&["RACE", "found at the end of the process"]);

    a_lost_device_ends_as_it_is, [("SIMCUDA_FAULTS", "stream@1=device_lost")], {
        device(0);
        fill(buffer(), stream());
    }, |ended| ended.came_to_its_end();

    a_thread_that_goes_on_does_not_keep_the_process, [], {
        let context = device(0) as usize;
        let (started, starts) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            ok(crate::context::cuCtxSetCurrent(context as *mut _));
            let (stream, buffer) = (stream(), buffer());
            loop {
                // What it returns while the process ends does not matter.
                let _ = cuMemsetD32Async(buffer, 1, COUNT, stream);
                let _ = started.send(());
            }
        });
        starts.recv().expect("the thread has started");
    }, |ended| ended.is_clean();

    a_thread_that_never_comes_out_of_the_simulator_does_not_keep_the_process, [], {
        device(0);
        race();
        let (inside, is_inside) = std::sync::mpsc::channel();
        std::thread::spawn(move || crate::machine::call("cuInit", |_| {
            inside.send(()).expect("the test waits for it");
            loop {
                std::thread::park();
            }
        }));
        is_inside.recv().expect("the thread has started");
    }, |ended| {
        ended.came_to_its_end();
        assert!(ended.text.contains("holds the simulator's lock: pending work does not run"), "{}", ended.text);
    };

    a_forked_child_does_not_run_what_is_its_parents, [], {
        device(0);
        race();
        // SAFETY: the child calls nothing but exit, whose handlers of ours only compare numbers.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: takes no pointer and does not return.
            unsafe { libc::exit(5) };
        }
        let mut status = 0;
        // SAFETY: writes to a local variable.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        println!("the child ended with {}", libc::WEXITSTATUS(status));
    }, |ended| ended.is_found(&["the child ended with 5", "RACE", "found at the end of the process"]);

    what_was_never_freed_is_a_finding, [("SIMCUDA_LEAKS", "1")], {
        device(0);
        for _ in 0..2 {
            buffer();
        }
        let kept: *mut c_void = made(|pointer| cuMemHostAlloc(pointer, 64, 0));
        assert!(!kept.is_null());
        ok(cuMemFree_v2(buffer()));
        ok(cuMemFreeHost(made(|pointer| cuMemHostAlloc(pointer, 64, 0))));
    }, |ended| {
        ended.is_found(&[
            "NEVER FREED: 8256 bytes in 3 allocations were never freed",
            "8192 bytes in 2 allocations made by cuMemAlloc on device 0",
            "64 bytes in 1 allocation made by cuMemHostAlloc\n",
            "at tests/simcuda/src/machine/end/tests.rs:",
        ]);
    };

    where_all_was_freed_there_is_nothing_to_tell, [("SIMCUDA_LEAKS", "1")], {
        device(0);
        ok(cuMemFree_v2(buffer()));
        let ordered = made(|pointer| cuMemAllocAsync(pointer, BYTES, null_mut()));
        ok(cuMemFreeAsync(ordered, null_mut()));
    }, |ended| ended.is_clean();

    a_download_that_nobody_waited_for_runs_at_the_end, [], {
        device(0);
        let (stream, buffer) = (stream(), buffer());
        let pinned: *mut c_void = made(|pointer| cuMemHostAlloc(pointer, BYTES, 0));
        fill(buffer, stream);
        // SAFETY: pinned memory of BYTES bytes.
        assert_eq!(unsafe { cuMemcpyDtoHAsync_v2(pinned, buffer, BYTES, stream) }, CUresult::CUDA_SUCCESS);
    }, |ended| ended.is_clean();
}
