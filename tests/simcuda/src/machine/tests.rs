//! What all calls have in common, through the entry points.

mod promises;

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;

use cudarc::driver::sys::{CUdriverProcAddressQueryResult as Query, CUevent, CUstream};

use super::testing::{Ended, cases, device, made, ok, refused};
use crate::context::{
    cuCtxEnablePeerAccess, cuCtxGetCurrent, cuCtxGetDevice, cuCtxPopCurrent_v2,
    cuCtxPushCurrent_v2, cuCtxSetCurrent, cuDevicePrimaryCtxRelease_v2, cuGetProcAddress_v2,
};
use crate::copy::{
    cuMemcpyDtoDAsync_v2, cuMemcpyDtoH_v2, cuMemcpyHtoDAsync_v2, cuMemcpyPeerAsync,
    cuMemsetD32Async,
};
use crate::device::calls::{
    cuDeviceCanAccessPeer, cuDeviceGet, cuDeviceGetCount, cuDeviceGetName, cuInit,
};
use crate::error::CUresult;
use crate::error::calls::cuGetErrorName;
use crate::event::calls::{cuEventCreate, cuEventElapsedTime, cuEventRecord, cuStreamWaitEvent};
use crate::graph::calls::{cuGraphInstantiateWithFlags, cuGraphLaunch};
use crate::graph::capture_calls::{cuStreamBeginCapture_v2, cuStreamEndCapture};
use crate::memory::calls::{
    cuMemAlloc_v2, cuMemAllocAsync, cuMemFree_v2, cuMemFreeAsync, cuMemGetInfo_v2,
};
use crate::stream::calls::{cuCtxSynchronize, cuStreamCreate, cuStreamSynchronize};

const TWO_DEVICES: (&str, &str) = ("SIMCUDA_DEVICES", "2");
const THREE_DEVICES: (&str, &str) = ("SIMCUDA_DEVICES", "3");
const ILLEGAL: (&str, &str) = ("SIMCUDA_FAULTS", "stream@2=illegal_address");

fn buffer(bytes: usize) -> u64 {
    made(|pointer| cuMemAllocAsync(pointer, bytes, null_mut()))
}

fn name_of(code: CUresult) -> String {
    let name: *const c_char = made(|name| cuGetErrorName(code.0, name));
    // SAFETY: names of codes are constants that end in zero.
    unsafe { CStr::from_ptr(name) }
        .to_string_lossy()
        .into_owned()
}

/// Device 0 fails at its second fill. `queue` orders a copy of what the first one wrote after that,
/// in a stream of device 1.
fn after_a_lost_device(queue: impl FnOnce(CUstream, CUevent, &dyn Fn())) {
    let lost = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
    let (third, first) = (device(2), device(0));
    let from = made(|pointer| cuMemAlloc_v2(pointer, 64));
    ok(cuMemsetD32Async(from, 1, 16, null_mut()));
    ok(cuMemsetD32Async(from, 2, 16, null_mut()));
    let event = made(|event| cuEventCreate(event, 0));
    ok(cuEventRecord(event, null_mut()));
    let second = device(1);
    ok(cuCtxEnablePeerAccess(first, 0));
    let (to, stream) = (
        made(|pointer| cuMemAlloc_v2(pointer, 64)),
        made(|stream| cuStreamCreate(stream, 1)),
    );
    queue(stream, event, &|| {
        ok(cuMemcpyPeerAsync(to, second, from, first, 64, stream))
    });
    assert_eq!(cuStreamSynchronize(stream), lost);
    ok(cuCtxSetCurrent(third));
    assert_eq!(cuEventElapsedTime(None, event, event), lost);
    buffer(64);
    ok(cuCtxSynchronize());
}

#[track_caller]
fn is_lost_in_turn(ended: &Ended) {
    ended.came_to_its_end();
    let told = "waits for work of device 0, which is lost";
    assert!(ended.text.contains(told), "{}", ended.text);
    assert!(!ended.text.contains("RACE"), "{}", ended.text);
}

cases! {
    before_cu_init_only_the_library_itself_answers, [], {
        assert_eq!(refused(|count| cuDeviceGetCount(count)), CUresult::CUDA_ERROR_NOT_INITIALIZED);
        assert_eq!(name_of(CUresult::CUDA_ERROR_NOT_INITIALIZED), "CUDA_ERROR_NOT_INITIALIZED");
        ok(cuInit(0));
        assert_eq!(made(|count| cuDeviceGetCount(count)), 1);
        assert_eq!(refused(|device| cuDeviceGet(device, 1)), CUresult::CUDA_ERROR_INVALID_DEVICE);
        assert_eq!(refused(|device| cuCtxGetDevice(device)), CUresult::CUDA_ERROR_INVALID_CONTEXT);
        assert!(made(|context| cuCtxGetCurrent(context)).is_null());
    }, |ended| ended.is_clean();

    a_machine_without_devices_says_so, [("SIMCUDA_DEVICES", "0")], {
        assert_eq!(cuInit(0), CUresult::CUDA_ERROR_NO_DEVICE);
    }, |ended| ended.is_clean();

    the_name_says_that_there_is_no_hardware, [TWO_DEVICES], {
        device(0);
        let mut name = [0 as c_char; 64];
        // SAFETY: the place has the length that is said.
        ok(unsafe { cuDeviceGetName(name.as_mut_ptr(), 64, 1) });
        // SAFETY: the call has written a string that ends in zero.
        assert_eq!(unsafe { CStr::from_ptr(name.as_ptr()) }, c"Simulated GPU 1 (no hardware)");
        // SAFETY: as above, with too short a place: the name is cut.
        ok(unsafe { cuDeviceGetName(name.as_mut_ptr(), 10, 1) });
        // SAFETY: as above.
        assert_eq!(unsafe { CStr::from_ptr(name.as_ptr()) }, c"Simulated");
    }, |ended| ended.is_clean();

    contexts_are_current_by_thread_and_are_pushed_and_popped, [TWO_DEVICES], {
        let first = device(0);
        let second = device(1);
        assert_eq!(made(|device| cuCtxGetDevice(device)), 1);
        ok(cuCtxPushCurrent_v2(first));
        assert_eq!(made(|device| cuCtxGetDevice(device)), 0);
        assert_eq!(made(|context| cuCtxPopCurrent_v2(context)), first);
        assert_eq!(made(|context| cuCtxGetCurrent(context)), second);
        let other = std::thread::spawn(|| refused(|device| cuCtxGetDevice(device)));
        assert_eq!(other.join().unwrap(), CUresult::CUDA_ERROR_INVALID_CONTEXT);
    }, |ended| ended.is_clean();

    a_context_is_void_once_its_last_holder_has_given_it_back, [], {
        let context = device(0);
        ok(cuDevicePrimaryCtxRelease_v2(0));
        assert_eq!(refused(|device| cuCtxGetDevice(device)), CUresult::CUDA_ERROR_INVALID_CONTEXT);
        assert_eq!(cuDevicePrimaryCtxRelease_v2(0), CUresult::CUDA_ERROR_INVALID_CONTEXT);
        cuCtxSetCurrent(context);
    }, |ended| ended.is_found(&["HANDLE: the context of device 0 is used after its last holder gave it back"]);

    a_planned_failure_of_a_call_is_that_calls_alone, [("SIMCUDA_FAULTS", "cuMemAllocAsync@2=out_of_memory")], {
        device(0);
        buffer(64);
        let code = refused(|pointer| cuMemAllocAsync(pointer, 64, null_mut()));
        assert_eq!(code, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        buffer(64);
    }, |ended| ended.is_clean();

    a_lost_device_stays_lost_and_the_other_one_does_not, [TWO_DEVICES, ("SIMCUDA_FAULTS", "stream@2=device_lost")], {
        let lost = CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE;
        let (second, first) = (device(1), device(0));
        let pointer = buffer(64);
        ok(cuMemsetD32Async(pointer, 1, 16, null_mut()));
        ok(cuMemsetD32Async(pointer, 2, 16, null_mut()));
        let mut place = [0u32; 16];
        // SAFETY: the place has the 64 bytes that are said.
        assert_eq!(unsafe { cuMemcpyDtoH_v2(place.as_mut_ptr().cast(), pointer, 64) }, lost);
        assert_eq!(refused(|pointer| cuMemAllocAsync(pointer, 64, null_mut())), lost);
        assert_eq!(cuMemFreeAsync(pointer, null_mut()), lost);
        ok(cuCtxSetCurrent(second));
        buffer(64);
        ok(cuCtxSetCurrent(first));
        ok(cuDevicePrimaryCtxRelease_v2(0));
    }, |ended| {
        ended.came_to_its_end();
        assert!(ended.text.contains("simcuda: device 0 is lost (CUDA_ERROR_DEVICE_UNAVAILABLE)"), "{}", ended.text);
    };

    work_that_waits_for_a_lost_device_loses_its_own, [THREE_DEVICES, ILLEGAL], {
        after_a_lost_device(|stream, event, copy| {
            ok(cuStreamWaitEvent(stream, event, 0));
            copy();
        });
    }, |ended| is_lost_in_turn(&ended);

    a_graph_that_waits_for_a_lost_device_loses_its_own, [THREE_DEVICES, ILLEGAL], {
        after_a_lost_device(|stream, event, copy| {
            ok(cuStreamBeginCapture_v2(stream, 1));
            // CU_EVENT_WAIT_EXTERNAL
            ok(cuStreamWaitEvent(stream, event, 1));
            copy();
            let graph = made(|graph| cuStreamEndCapture(stream, graph));
            ok(cuGraphLaunch(made(|executable| cuGraphInstantiateWithFlags(executable, graph, 0)), stream));
        });
    }, |ended| is_lost_in_turn(&ended);

    a_missing_function_is_not_found_and_not_supported, [("SIMCUDA_FAULTS", "symbol=cuMemAllocAsync")], {
        device(0);
        let code = refused(|pointer| cuMemAllocAsync(pointer, 64, null_mut()));
        assert_eq!(code, CUresult::CUDA_ERROR_NOT_SUPPORTED);
        let mut function = std::mem::MaybeUninit::<*mut c_void>::uninit();
        let mut status = std::mem::MaybeUninit::uninit();
        // SAFETY: the name ends in zero.
        let code = unsafe {
            cuGetProcAddress_v2(c"cuMemAllocAsync".as_ptr(), Some(&mut function), 13000, 0, Some(&mut status))
        };
        assert_eq!(code, CUresult::CUDA_ERROR_NOT_FOUND);
        // SAFETY: the call has written its status.
        assert_eq!(unsafe { status.assume_init() }, Query::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    }, |ended| ended.is_clean();

    a_plan_that_cannot_be_read_ends_the_process, [("SIMCUDA_FAULTS", "cuInit=1")], {
        cuInit(0);
    }, |ended| {
        assert_eq!(ended.code, Some(2), "{}", ended.text);
        assert!(ended.text.contains("SIMCUDA_FAULTS: `cuInit=1`: expected `@K` before the `=`"), "{}", ended.text);
    };

    a_flipped_bit_arrives_at_the_host, [("SIMCUDA_FAULTS", "copy@1=flip_bit")], {
        device(0);
        let pointer = buffer(64);
        ok(cuMemsetD32Async(pointer, 0, 16, null_mut()));
        let mut place = [0u32; 16];
        // SAFETY: the place has the 64 bytes that are said.
        ok(unsafe { cuMemcpyDtoH_v2(place.as_mut_ptr().cast(), pointer, 64) });
        assert_eq!(place.iter().map(|word| word.count_ones()).sum::<u32>(), 1);
    }, |ended| ended.is_clean();

    without_peer_access_nothing_can_be_enabled, [TWO_DEVICES, ("SIMCUDA_NO_PEER", "1")], {
        let peer = device(1);
        device(0);
        assert_eq!(made(|can| cuDeviceCanAccessPeer(can, 0, 1)), 0);
        assert_eq!(cuCtxEnablePeerAccess(peer, 0), CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    }, |ended| ended.is_clean();

    peers_copy_once_access_is_enabled, [TWO_DEVICES], {
        let (second, first) = (device(1), device(0));
        let from = made(|pointer| cuMemAlloc_v2(pointer, 64));
        ok(cuMemsetD32Async(from, 7, 16, null_mut()));
        ok(cuCtxSetCurrent(second));
        ok(cuCtxEnablePeerAccess(first, 0));
        assert_eq!(cuCtxEnablePeerAccess(first, 0), CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
        let to = made(|pointer| cuMemAlloc_v2(pointer, 64));
        ok(cuCtxSetCurrent(first));
        let mut place = [0u32; 16];
        // SAFETY: the place has the 64 bytes that are said.
        ok(unsafe { cuMemcpyDtoH_v2(place.as_mut_ptr().cast(), from, 64) });
        ok(cuCtxSetCurrent(second));
        ok(cuMemcpyPeerAsync(to, second, from, first, 64, null_mut()));
        // SAFETY: as above.
        ok(unsafe { cuMemcpyDtoH_v2(place.as_mut_ptr().cast(), to, 64) });
        assert_eq!(place, [7; 16]);
    }, |ended| ended.is_clean();

    a_peer_copy_without_access_is_found, [TWO_DEVICES], {
        let first = device(0);
        let from = buffer(64);
        let second = device(1);
        cuMemcpyPeerAsync(buffer(64), second, from, first, 64, null_mut());
    }, |ended| ended.is_found(&["PEER COPY WITHOUT ACCESS: cuMemcpyPeerAsync of 64 bytes on device 1", "cuMemPoolSetAccess"]);

    a_peer_copy_with_the_wrong_context_is_found, [TWO_DEVICES], {
        let first = device(0);
        let from = buffer(64);
        let second = device(1);
        cuMemcpyPeerAsync(buffer(64), first, from, second, 64, null_mut());
    }, |ended| ended.is_found(&["WRONG DEVICE", "the context of device 0 was given for memory of device 1"]);

    a_pointer_of_another_device_is_found, [TWO_DEVICES], {
        device(0);
        let pointer = buffer(64);
        device(1);
        cuMemsetD32Async(pointer, 7, 16, null_mut());
    }, |ended| ended.is_found(&["WRONG DEVICE: cuMemsetD32Async of 16 elements on device 1", "memory of device 0"]);

    a_second_free_is_found, [], {
        device(0);
        let pointer = buffer(64);
        ok(cuMemFreeAsync(pointer, null_mut()));
        cuMemFreeAsync(pointer, null_mut());
    }, |ended| ended.is_found(&["DOUBLE FREE: cuMemFreeAsync", "frees the 64-byte allocation", "which was freed by cuMemFreeAsync"]);

    a_free_of_a_pointer_into_the_middle_is_found, [], {
        device(0);
        cuMemFreeAsync(buffer(64) + 16, null_mut());
    }, |ended| ended.is_found(&["OUT OF BOUNDS: cuMemFreeAsync", "does not name the beginning, but byte 16 of the 64-byte allocation"]);

    a_use_after_the_call_that_frees_is_found, [], {
        device(0);
        let pointer = buffer(64);
        ok(cuMemFreeAsync(pointer, null_mut()));
        cuMemsetD32Async(pointer, 7, 16, null_mut());
    }, |ended| ended.is_found(&["USE AFTER FREE: cuMemsetD32Async of 16 elements", "freed by cuMemFreeAsync"]);

    a_copy_onto_itself_is_found, [], {
        device(0);
        let pointer = buffer(64);
        cuMemcpyDtoDAsync_v2(pointer + 16, pointer, 32, null_mut());
    }, |ended| ended.is_found(&["source and destination overlap", "bytes 16..48 of the 64-byte allocation"]);

    a_pageable_source_is_read_before_the_call_returns, [], {
        device(0);
        let pointer = buffer(4);
        let mut value = 5u32;
        // SAFETY: four bytes are at either end.
        ok(unsafe { cuMemcpyHtoDAsync_v2(pointer, (&raw const value).cast(), 4, null_mut()) });
        value = 6;
        // SAFETY: as above.
        ok(unsafe { cuMemcpyDtoH_v2((&raw mut value).cast(), pointer, 4) });
        assert_eq!(value, 5);
    }, |ended| ended.is_clean();

    memory_that_was_freed_is_there_again, [("SIMCUDA_MEMORY_MB", "16")], {
        device(0);
        let free_bytes = || made(|free| cuMemGetInfo_v2(free, Some(&mut std::mem::MaybeUninit::uninit())));
        assert_eq!(free_bytes(), 16 << 20);
        let pointer = made(|pointer| cuMemAlloc_v2(pointer, 10 << 20));
        assert_eq!(free_bytes(), 6 << 20);
        assert_eq!(refused(|pointer| cuMemAlloc_v2(pointer, 7 << 20)), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        ok(cuMemFree_v2(pointer));
        assert_eq!(free_bytes(), 16 << 20);
        ok(cuMemFree_v2(0));
    }, |ended| ended.is_clean();
}
