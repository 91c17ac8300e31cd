//! What CUDA refuses while a stream captures, with the code that it documents.

use std::mem::MaybeUninit;

use cudarc::driver::sys::{CUstream, CUstreamCaptureStatus};

use super::super::capture_calls::*;
use super::{end, status};
use crate::copy::{cuMemcpyDtoHAsync_v2, cuMemcpyHtoDAsync_v2};
use crate::error::CUresult;
use crate::event::calls::*;
use crate::memory::calls::{cuMemAllocAsync, cuMemFreeAsync};
use crate::report::FindingKind;
use crate::stream::calls::*;
use crate::stream::tests::{Bench, SUCCESS, Touch, bench, config, got};

const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;
const NULL: CUstream = std::ptr::null_mut();

#[test]
fn invalid_capture_begins_and_ends_are_refused() {
    let bench = bench(config(1));
    let (first, second) = (bench.stream(), bench.stream());
    assert_eq!(
        cuStreamBeginCapture_v2(NULL, RELAXED),
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    );
    assert_eq!(
        cuStreamBeginCapture_v2(first, 7),
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(end(first), Err(CUresult::CUDA_ERROR_ILLEGAL_STATE));
    assert_eq!(cuStreamBeginCapture_v2(first, THREAD_LOCAL), SUCCESS);
    assert_eq!(
        cuStreamBeginCapture_v2(first, THREAD_LOCAL),
        CUresult::CUDA_ERROR_ILLEGAL_STATE
    );
    let handle = first as usize;
    let elsewhere = std::thread::spawn(move || end(handle as CUstream).err())
        .join()
        .expect("it does not panic");
    assert_eq!(
        elsewhere,
        Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)
    );
    bench.run(first, "a");
    bench.order(first, second);
    bench.run(second, "b");
    assert_eq!(
        end(first),
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED)
    );
    assert_eq!(
        status(second),
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
    );
    assert_eq!(cuStreamBeginCapture_v2(first, RELAXED), SUCCESS);
    bench.order(first, second);
    assert_eq!(
        end(second),
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED)
    );
    assert_eq!(
        end(first),
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
    );
    // A relaxed capture may be ended by another thread.
    assert_eq!(cuStreamBeginCapture_v2(first, RELAXED), SUCCESS);
    let ended = std::thread::spawn(move || end(handle as CUstream).is_ok())
        .join()
        .expect("it does not panic");
    assert!(ended);
    assert_eq!(bench.finding_kinds(), []);
}

#[test]
fn orders_across_the_border_of_a_capture_are_refused_and_break_it() {
    let bench = bench(config(1));
    let (first, second, outside) = (bench.stream(), bench.stream(), bench.stream());
    let event = bench.event();
    assert_eq!(cuEventRecord(event, outside), SUCCESS);
    assert_eq!(cuStreamBeginCapture_v2(first, THREAD_LOCAL), SUCCESS);
    assert_eq!(
        cuStreamWaitEvent(first, event, 0),
        CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION
    );
    assert_eq!(
        status(first),
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED
    );
    assert_eq!(
        bench.try_give(first, Touch::new("a")),
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
    );
    assert_eq!(
        end(first),
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
    );

    let captures = [first, second].map(|stream| cuStreamBeginCapture_v2(stream, THREAD_LOCAL));
    assert_eq!(captures, [SUCCESS; 2]);
    assert_eq!(cuEventRecord(event, first), SUCCESS);
    assert_eq!(
        cuStreamWaitEvent(second, event, 0),
        CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE
    );
    for stream in [first, second] {
        assert_eq!(
            end(stream),
            Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        );
    }
    // The event has no meaning any more: its capture is over.
    assert_eq!(
        cuStreamWaitEvent(second, event, 0),
        CUresult::CUDA_ERROR_CAPTURED_EVENT
    );
    assert_eq!(cuEventRecord(event, second), SUCCESS);
    assert_eq!(cuStreamWaitEvent(first, event, 0), SUCCESS);

    assert_eq!(cuStreamBeginCapture_v2(first, RELAXED), SUCCESS);
    assert_eq!(cuEventRecord(event, first), SUCCESS);
    assert_eq!(cuEventQuery(event), CUresult::CUDA_ERROR_CAPTURED_EVENT);
    assert_eq!(
        end(first),
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
    );
    assert_eq!(
        cuEventSynchronize(event),
        CUresult::CUDA_ERROR_CAPTURED_EVENT
    );
    assert_eq!(bench.finding_kinds(), []);
}

#[test]
fn the_null_stream_is_out_of_use_while_a_blocking_stream_captures() {
    let bench = bench(config(1));
    let (blocking, free) = (bench.blocking_stream(), bench.stream());
    let implicit = CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    assert_eq!(cuStreamBeginCapture_v2(free, RELAXED), SUCCESS);
    bench.run(NULL, "allowed");
    assert!(end(free).is_ok());
    for touch in [
        |bench: &Bench| bench.try_give(NULL, Touch::new("a")).expect_err("refused"),
        |_: &Bench| cuStreamSynchronize(NULL),
        |_: &Bench| cuStreamQuery(NULL),
        |bench: &Bench| cuEventRecord(bench.event(), NULL),
    ] {
        assert_eq!(cuStreamBeginCapture_v2(blocking, RELAXED), SUCCESS);
        assert_eq!(touch(&bench), implicit);
        assert_eq!(
            end(blocking),
            Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        );
    }
    assert_eq!(cuStreamBeginCapture_v2(blocking, RELAXED), SUCCESS);
    assert_eq!(
        cuStreamIsCapturing(NULL, Some(&mut MaybeUninit::uninit())),
        implicit
    );
    assert!(end(blocking).is_ok(), "asking breaks nothing");
}

#[test]
fn waiting_for_what_captures_is_refused_and_found() {
    let unsupported = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    for (wait, name) in [
        (
            (|stream| cuStreamSynchronize(stream)) as fn(CUstream) -> CUresult,
            "cuStreamSynchronize",
        ),
        (|stream| cuStreamQuery(stream), "cuStreamQuery"),
        (|_| cuCtxSynchronize(), "cuCtxSynchronize"),
    ] {
        let bench = bench(config(1));
        let stream = bench.stream();
        assert_eq!(cuStreamBeginCapture_v2(stream, RELAXED), SUCCESS);
        assert_eq!(wait(stream), unsupported, "{name}");
        assert_eq!(bench.finding_kinds(), [FindingKind::Capture]);
        assert!(bench.findings()[0].message.contains(name));
        assert_eq!(
            end(stream),
            Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        );
    }
}

/// Whether an unsafe call is refused on this thread and on another while this one captures in
/// `mode`.
fn refused(mode: u32, own_mode: u32) -> [bool; 2] {
    [false, true].map(|is_elsewhere| {
        let bench = bench(config(1));
        let (stream, event) = (bench.stream(), bench.event());
        assert_eq!(cuEventRecord(event, bench.stream()), SUCCESS);
        assert_eq!(cuCtxSynchronize(), SUCCESS);
        assert_eq!(cuStreamBeginCapture_v2(stream, mode), SUCCESS);
        let handle = event as usize;
        let query = move || {
            let mut exchanged = own_mode;
            assert_eq!(
                cuThreadExchangeStreamCaptureMode(Some(&mut exchanged)),
                SUCCESS
            );
            let code = cuEventQuery(handle as _);
            assert_eq!(
                cuThreadExchangeStreamCaptureMode(Some(&mut exchanged)),
                SUCCESS
            );
            assert_eq!(exchanged, own_mode);
            code
        };
        let context = got(|context| crate::context::cuCtxGetCurrent(context)) as usize;
        let code = if is_elsewhere {
            let other = std::thread::spawn(move || {
                assert_eq!(crate::context::cuCtxSetCurrent(context as _), SUCCESS);
                query()
            });
            other.join().expect("it does not panic")
        } else {
            query()
        };
        let is_refused = code == CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        assert!(is_refused || code == SUCCESS);
        assert_eq!(
            end(stream).is_err(),
            is_refused,
            "what is refused breaks the capture"
        );
        assert_eq!(bench.finding_kinds().len(), usize::from(is_refused));
        is_refused
    })
}

#[test]
fn unsafe_calls_are_refused_as_the_modes_of_capture_and_thread_say() {
    assert_eq!(refused(GLOBAL, GLOBAL), [true, true]);
    assert_eq!(refused(THREAD_LOCAL, GLOBAL), [true, false]);
    assert_eq!(refused(RELAXED, GLOBAL), [false, false]);
    assert_eq!(refused(GLOBAL, THREAD_LOCAL), [true, false]);
    assert_eq!(refused(GLOBAL, RELAXED), [false, false]);
}

/// A call with device memory and a stream.
type Call<'a> = &'a dyn Fn(u64, CUstream) -> CUresult;

#[test]
fn what_needs_memory_of_its_own_is_refused_in_a_capture_and_breaks_it() {
    let unsupported = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    let invalidated = CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    let mut host = [0u8; 64];
    let pageable = host.as_mut_ptr() as usize;
    let calls: [(&str, Call<'_>); 4] = [
        ("cuMemAllocAsync of 64 bytes", &|_, stream| {
            cuMemAllocAsync(Some(&mut MaybeUninit::uninit()), 64, stream)
        }),
        ("cuMemFreeAsync of 0x", &|device, stream| {
            cuMemFreeAsync(device, stream)
        }),
        (
            "cuMemcpyHtoDAsync_v2 of 64 bytes with pageable memory",
            &|device, stream| {
                // SAFETY: the 64 bytes are there; the call is refused.
                unsafe { cuMemcpyHtoDAsync_v2(device, pageable as *const _, 64, stream) }
            },
        ),
        (
            "cuMemcpyDtoHAsync_v2 of 64 bytes with pageable memory",
            &|device, stream| {
                // SAFETY: as above.
                unsafe { cuMemcpyDtoHAsync_v2(pageable as *mut _, device, 64, stream) }
            },
        ),
    ];
    for (name, call) in calls {
        let bench = bench(config(1));
        let stream = bench.stream();
        let device = got(|pointer| cuMemAllocAsync(pointer, 64, stream));
        assert_eq!(cuStreamBeginCapture_v2(stream, RELAXED), SUCCESS);
        assert_eq!(call(device, stream), unsupported, "{name}");
        assert_eq!(bench.finding_kinds(), [FindingKind::Capture]);
        let message = &bench.findings()[0].message;
        assert!(
            message.contains(name) && message.contains("breaks the capture"),
            "{message}"
        );
        // The refused call breaks the capture, which later calls report without another finding.
        assert_eq!(call(device, stream), invalidated, "{name}");
        assert_eq!(end(stream), Err(invalidated));
        assert_eq!(bench.finding_kinds().len(), 1);
        assert_eq!(
            cuMemFreeAsync(device, stream),
            SUCCESS,
            "what was refused has freed nothing"
        );
    }
}

#[test]
fn destroying_a_stream_that_captures_leaves_nothing_behind() {
    let bench = bench(config(1));
    let (first, second) = (bench.stream(), bench.stream());
    assert_eq!(cuStreamBeginCapture_v2(first, THREAD_LOCAL), SUCCESS);
    bench.order(first, second);
    assert_eq!(cuStreamDestroy_v2(first), SUCCESS);
    assert_eq!(
        status(second),
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
    );
    bench.run(second, "a");
    assert_eq!(cuCtxSynchronize(), SUCCESS);
    assert_eq!(bench.ran(), ["a"]);
}
