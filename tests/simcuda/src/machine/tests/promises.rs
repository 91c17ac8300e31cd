//! What CUDA does not promise: programs that rely on it are wrong, even if they work, and must be
//! found.

use std::ffi::c_void;
use std::ptr::null_mut;

use cudarc::driver::sys::{CUmemPool_attribute, CUstream};

use crate::context::cuCtxSetCurrent;
use crate::copy::{
    cuMemcpyAsync, cuMemcpyDtoHAsync_v2, cuMemcpyHtoD_v2, cuMemsetD32_v2, cuMemsetD32Async,
};
use crate::error::CUresult;
use crate::event::calls::{
    cuEventCreate, cuEventDestroy_v2, cuEventElapsedTime, cuEventQuery, cuEventRecord,
    cuEventSynchronize,
};
use crate::machine::testing::{cases, device, made, ok, played, refused};
use crate::memory::calls::{
    cuMemAlloc_v2, cuMemAllocAsync, cuMemFree_v2, cuMemFreeAsync, cuMemHostAlloc,
};
use crate::memory::pool::calls::{
    cuDeviceGetDefaultMemPool, cuMemPoolGetAttribute, cuMemPoolTrimTo,
};
use crate::stream::calls::{
    cuCtxSynchronize, cuLaunchHostFunc, cuStreamCreate, cuStreamQuery, cuStreamSynchronize,
};

const COUNT: usize = 1024;
const BYTES: usize = 4 * COUNT;
const SCHEDULES: [&str; 3] = ["lazy", "random", "eager"];

fn stream() -> CUstream {
    made(|stream| cuStreamCreate(stream, 1))
}

fn buffer() -> u64 {
    made(|pointer| cuMemAlloc_v2(pointer, BYTES))
}

fn fill(buffer: u64, stream: CUstream) {
    ok(cuMemsetD32Async(buffer, 7, COUNT, stream));
}

fn pinned() -> *mut u32 {
    let pinned: *mut c_void = made(|pointer| cuMemHostAlloc(pointer, BYTES, 0));
    pinned.cast()
}

fn download(to: *mut u32, from: u64, stream: CUstream) {
    // SAFETY: tests pass memory of BYTES bytes that lives until the copy was waited for or the
    // process ends.
    ok(unsafe { cuMemcpyDtoHAsync_v2(to.cast(), from, BYTES, stream) });
}

/// Runs a case under every schedule and expects a finding with these words.
fn is_found_in_every_schedule(test: &str, words: &[&str], case: impl Fn()) {
    for schedule in SCHEDULES {
        match played(test, &[("SIMCUDA_SCHEDULE", schedule)], &case) {
            Some(ended) => ended.is_found(words),
            None => return,
        }
    }
}

#[test]
fn memory_that_is_used_by_a_stream_before_it_is_made_in_another_is_found() {
    let test = concat!(
        module_path!(),
        "::memory_that_is_used_by_a_stream_before_it_is_made_in_another_is_found"
    );
    is_found_in_every_schedule(
        test,
        &["RACE", "cuMemAllocAsync of 4096 bytes", "cuMemsetD32Async"],
        || {
            device(0);
            let (maker, user) = (stream(), stream());
            let buffer = made(|pointer| cuMemAllocAsync(pointer, BYTES, maker));
            fill(buffer, user);
            // In the lazy schedule the allocation has not run yet.
            ok(cuStreamSynchronize(user));
        },
    );
}

#[test]
fn a_synchronous_pageable_upload_may_return_before_it_ends() {
    let test = concat!(
        module_path!(),
        "::a_synchronous_pageable_upload_may_return_before_it_ends"
    );
    is_found_in_every_schedule(
        test,
        &["RACE", "cuMemcpyHtoD_v2 of 4096 bytes", "cuMemsetD32Async"],
        || {
            device(0);
            let (buffer, values) = (buffer(), [1u32; COUNT]);
            // SAFETY: the values are as many bytes as is said.
            ok(unsafe { cuMemcpyHtoD_v2(buffer, values.as_ptr().cast(), BYTES) });
            fill(buffer, stream());
        },
    );
}

#[test]
fn a_blocking_free_does_not_synchronise_the_host() {
    let test = concat!(
        module_path!(),
        "::a_blocking_free_does_not_synchronise_the_host"
    );
    is_found_in_every_schedule(
        test,
        &[
            "HOST ACCESS",
            "it has run, but the host has not waited for it",
        ],
        || {
            device(0);
            let (from, to, other) = (buffer(), pinned(), buffer());
            let stream = stream();
            fill(from, stream);
            download(to, from, stream);
            ok(cuMemFree_v2(other));
            // SAFETY: in bounds; the test is whether it is too early.
            unsafe { to.read_volatile() };
        },
    );
}

#[test]
fn memory_that_is_freed_before_its_stream_has_come_to_make_it_is_found() {
    let test = concat!(
        module_path!(),
        "::memory_that_is_freed_before_its_stream_has_come_to_make_it_is_found"
    );
    is_found_in_every_schedule(
        test,
        &[
            "4096-byte allocation made by cuMemAllocAsync",
            "cuMemFreeAsync",
        ],
        || {
            device(0);
            let (maker, user) = (stream(), stream());
            let buffer = made(|pointer| cuMemAllocAsync(pointer, BYTES, maker));
            ok(cuMemFreeAsync(buffer, user));
            ok(cuStreamSynchronize(user));
            ok(cuStreamSynchronize(maker));
        },
    );
}

/// Sets the flag that it is given.
unsafe extern "C" fn set(flag: *mut c_void) {
    // SAFETY: the test gives an AtomicBool that outlives the call.
    unsafe { &*flag.cast::<std::sync::atomic::AtomicBool>() }
        .store(true, std::sync::atomic::Ordering::Release);
}

cases! {
    a_download_to_pageable_memory_is_there_once_it_was_waited_for, [], {
        device(0);
        let (stream, buffer) = (stream(), buffer());
        fill(buffer, stream);
        let mut values = [0u32; COUNT];
        download(values.as_mut_ptr(), buffer, stream);
        assert_eq!(std::hint::black_box(&values)[0], 0, "lazy: the call has not waited");
        ok(cuStreamSynchronize(stream));
        assert_eq!(std::hint::black_box(&values), &[7; COUNT]);
    }, |ended| ended.is_clean();

    a_download_to_pageable_memory_may_be_there_at_once, [("SIMCUDA_SCHEDULE", "eager")], {
        device(0);
        let (stream, buffer) = (stream(), buffer());
        fill(buffer, stream);
        let mut values = [0u32; COUNT];
        download(values.as_mut_ptr(), buffer, stream);
        assert_eq!(std::hint::black_box(&values), &[7; COUNT]);
    }, |ended| ended.is_clean();

    a_download_to_memory_that_is_gone_at_the_end_is_not_done, [], {
        device(0);
        let (stream, buffer) = (stream(), buffer());
        fill(buffer, stream);
        // SAFETY: a fresh page anywhere, of which nothing is used.
        let page = unsafe {
            libc::mmap(null_mut(), BYTES, libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        download(page.cast(), buffer, stream);
        // SAFETY: nobody uses it.
        unsafe { libc::munmap(page, BYTES) };
    }, |ended| ended.is_clean();

    a_synchronous_upload_has_read_its_source_and_is_in_order_with_what_was_waited_for, [], {
        device(0);
        let (stream, buffer, mut values) = (stream(), buffer(), [1u32; COUNT]);
        // SAFETY: the values are as many bytes as is said.
        ok(unsafe { cuMemcpyHtoD_v2(buffer, values.as_ptr().cast(), BYTES) });
        values.fill(2);
        ok(cuCtxSynchronize());
        download(values.as_mut_ptr(), buffer, stream);
        ok(cuStreamSynchronize(stream));
        assert_eq!(std::hint::black_box(&values), &[1; COUNT]);
    }, |ended| ended.is_clean();

    what_leaves_the_device_out_is_over_when_its_call_returns, [], {
        device(0);
        let (stream, first, second) = (stream(), pinned(), pinned());
        ok(cuMemsetD32_v2(first as u64, 5, COUNT));
        // SAFETY: in bounds, and each call is over.
        unsafe {
            assert_eq!(first.read_volatile(), 5);
            ok(cuMemcpyAsync(second as u64, first as u64, BYTES, stream));
            assert_eq!(second.read_volatile(), 5);
            let mut values = [0u32; COUNT];
            ok(cuMemcpyAsync(values.as_mut_ptr() as u64, second as u64, BYTES, stream));
            assert_eq!(std::hint::black_box(&values), &[5; COUNT]);
        }
    }, |ended| ended.is_clean();

    what_a_host_function_has_told_the_host_it_may_rely_on, [], {
        device(0);
        let (stream, other, from, to) = (stream(), stream(), buffer(), pinned());
        let told = std::sync::atomic::AtomicBool::new(false);
        fill(from, stream);
        download(to, from, stream);
        ok(cuLaunchHostFunc(stream, Some(set), (&raw const told).cast_mut().cast()));
        // Lets the streams progress without waiting for any of this.
        let event = made(|event| cuEventCreate(event, 0));
        ok(cuEventRecord(event, stream));
        fill(buffer(), other);
        while !told.load(std::sync::atomic::Ordering::Acquire) {
            let _ = cuEventQuery(event);
        }
        // SAFETY: in bounds, and the copy is over.
        assert_eq!(unsafe { to.read_volatile() }, 7);
    }, |ended| ended.is_clean();

    what_the_host_does_not_know_to_be_freed_cannot_be_trimmed, [], {
        device(0);
        let (stream, pool) = (stream(), made(|pool| cuDeviceGetDefaultMemPool(pool, 0)));
        let reserved = || {
            let mut bytes = 0u64;
            let which = CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT as u32;
            // SAFETY: this attribute is a 64-bit number.
            ok(unsafe { cuMemPoolGetAttribute(pool, which, (&raw mut bytes).cast()) });
            bytes
        };
        let buffer = made(|pointer| cuMemAllocAsync(pointer, BYTES, stream));
        ok(cuMemFreeAsync(buffer, stream));
        ok(cuMemPoolTrimTo(pool, 0));
        assert_eq!(reserved(), 2 << 20);
        ok(cuStreamSynchronize(null_mut()));
        ok(cuMemPoolTrimTo(pool, 0));
        assert_eq!(reserved(), 2 << 20, "it is another stream that was waited for");
        ok(cuStreamSynchronize(stream));
        ok(cuMemPoolTrimTo(pool, 0));
        assert_eq!(reserved(), 0);
    }, |ended| ended.is_clean();

    without_a_current_context_handles_do_not_help, [], {
        device(0);
        let (stream, buffer) = (stream() as usize, buffer());
        let event = made(|event| cuEventCreate(event, 0)) as usize;
        std::thread::spawn(move || {
            let (stream, event, none) = (stream as CUstream, event as *mut _, CUresult::CUDA_ERROR_INVALID_CONTEXT);
            assert_eq!(cuMemsetD32Async(buffer, 0, COUNT, stream), none);
            assert_eq!(cuStreamSynchronize(stream), none);
            assert_eq!(cuStreamQuery(stream), none);
            assert_eq!(cuEventRecord(event, stream), none);
            assert_eq!(cuEventSynchronize(event), none);
            assert_eq!(refused(|pointer| cuMemAllocAsync(pointer, BYTES, stream)), none);
            assert_eq!(cuMemFree_v2(buffer), none);
            assert_eq!(cuEventDestroy_v2(event), none);
            // Documented without it.
            ok(cuEventQuery(event));
        }).join().unwrap();
    }, |ended| ended.is_clean();

    the_time_between_events_of_two_devices_cannot_be_told, [("SIMCUDA_DEVICES", "2")], {
        let events = [0, 1].map(|ordinal| {
            device(ordinal);
            let event = made(|event| cuEventCreate(event, 0));
            ok(cuEventRecord(event, null_mut()));
            ok(cuEventSynchronize(event));
            event
        });
        let code = refused(|milliseconds| cuEventElapsedTime(milliseconds, events[0], events[1]));
        assert_eq!(code, CUresult::CUDA_ERROR_INVALID_HANDLE);
        ok(cuCtxSetCurrent(null_mut()));
    }, |ended| ended.is_clean();
}
