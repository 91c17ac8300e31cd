//! Errors: of calls, of work that fails or hangs, and findings in kernels.

use super::*;

#[test]
fn the_schedule_decides_which_call_returns_an_asynchronous_error() {
    let mut refused_at = std::collections::BTreeSet::new();
    for seed in 0..40 {
        let bench = bench(Config {
            faults: Plan::parse("stream@1=launch_failure").expect("a plan"),
            ..config(seed)
        });
        let (stream, memory) = (bench.stream(), got(|out| cuMemAlloc_v2(out, 64)));
        let call = |_| cuMemsetD32Async(memory, 0, 1, stream);
        let mut results: Vec<CUresult> = (0..6).map(call).collect();
        results.push(cuStreamSynchronize(stream));
        refused_at.insert(results.iter().position(|result| *result != SUCCESS));
    }
    assert!(
        !refused_at.contains(&None) && refused_at.len() > 4,
        "{refused_at:?}"
    );
}

#[test]
fn destroyed_and_foreign_handles_are_refused_and_what_was_queued_still_runs() {
    let bench = bench(config(6));
    let (stream, event) = (bench.stream(), bench.event());
    bench.run(stream, "a");
    assert_eq!(cuEventRecord(event, stream), SUCCESS);
    assert_eq!(cuStreamDestroy_v2(stream), SUCCESS);
    assert_eq!(bench.ran(), Vec::<String>::new());
    assert_eq!(cuEventSynchronize(event), SUCCESS);
    assert_eq!(bench.ran(), ["a"]);
    assert_eq!(
        cuStreamSynchronize(event.cast()),
        CUresult::CUDA_ERROR_INVALID_HANDLE
    );
    assert_eq!(bench.finding_kinds(), []);
    assert_eq!(
        cuStreamSynchronize(stream),
        CUresult::CUDA_ERROR_INVALID_HANDLE
    );
    assert_eq!(cuEventDestroy_v2(event), SUCCESS);
    assert_eq!(cuEventQuery(event), CUresult::CUDA_ERROR_INVALID_HANDLE);
    assert_eq!(
        bench.finding_kinds(),
        [FindingKind::Handle, FindingKind::Handle]
    );
    assert_eq!(
        cuStreamDestroy_v2(std::ptr::null_mut()),
        CUresult::CUDA_ERROR_INVALID_HANDLE
    );
    assert_eq!(cuCtxSynchronize(), SUCCESS);
}

#[test]
fn priorities_are_taken_into_the_range_and_flags_are_checked() {
    let _bench = bench(config(6));
    let stream = got(|stream| cuStreamCreateWithPriority(stream, NON_BLOCKING, -100));
    assert_eq!(got(|priority| cuStreamGetPriority(stream, priority)), -5);
    assert_eq!(got(|flags| cuStreamGetFlags(stream, flags)), NON_BLOCKING);
    assert_eq!(
        cuStreamCreate(Some(&mut MaybeUninit::uninit()), 2),
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(cuStreamCreate(None, 0), CUresult::CUDA_ERROR_INVALID_VALUE);
}

#[test]
fn work_that_fails_loses_its_device_and_leaves_the_others() {
    let bench = bench(config(6));
    let stream = bench.stream();
    let launch_failed = CUresult::CUDA_ERROR_LAUNCH_FAILED;
    bench
        .try_give(
            stream,
            Touch {
                fails_with: Some(launch_failed),
                ..Touch::new("a")
            },
        )
        .expect("it fails later");
    bench.run(stream, "never");
    bench.set_device(1);
    let other = bench.stream();
    bench.run(other, "b");
    assert_eq!(cuStreamSynchronize(stream), launch_failed);
    assert_eq!(bench.try_give(stream, Touch::new("c")), Err(launch_failed));
    assert_eq!(cuStreamSynchronize(other), SUCCESS);
    let ran = bench.ran();
    assert!(
        !ran.contains(&"never".to_owned()) && ran.contains(&"b".to_owned()),
        "{ran:?}"
    );
    assert_eq!(bench.finding_kinds(), []);
}

#[test]
fn what_a_kernel_does_wrong_is_a_finding_and_what_it_asks_for_is_not() {
    let cases = [
        (
            "race inside kernel sum",
            CUresult::CUDA_ERROR_LAUNCH_FAILED,
            vec![FindingKind::Race],
        ),
        (
            "out of bounds",
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            vec![FindingKind::OutOfBounds],
        ),
        (
            "divergence at a barrier",
            CUresult::CUDA_ERROR_LAUNCH_FAILED,
            vec![FindingKind::Kernel],
        ),
        (
            "0x1002, which is not a multiple of 4",
            CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
            vec![FindingKind::Kernel],
        ),
        ("assertion", CUresult::CUDA_ERROR_ASSERT, vec![]),
    ];
    for (name, code, found) in cases {
        let bench = bench(config(6));
        let stream = bench.stream();
        bench
            .try_give(
                stream,
                Touch {
                    fails_with: Some(code),
                    ..Touch::new(name)
                },
            )
            .expect("it fails later");
        assert_eq!(cuStreamSynchronize(stream), code);
        assert_eq!(bench.finding_kinds(), found, "{name}");
    }
}

#[test]
fn hung_work_blocks_only_its_waiters() {
    let faults = Plan::parse("stream@2=hang").expect("a plan");
    let bench = bench(Config {
        faults,
        ..config(6)
    });
    let (hung, other, event) = (bench.stream(), bench.stream(), bench.event());
    bench.run_all(hung, &["a", "hangs", "c"]);
    assert_eq!(cuEventRecord(event, hung), SUCCESS);
    bench.run(other, "d");
    let handle = hung as usize;
    // It never ends: the test leaves it behind.
    let context = got(|context| crate::context::cuCtxGetCurrent(context)) as usize;
    let waiting = std::thread::spawn(move || {
        assert_eq!(crate::context::cuCtxSetCurrent(context as _), SUCCESS);
        cuStreamSynchronize(handle as CUstream)
    });
    assert_eq!(cuStreamSynchronize(other), SUCCESS);
    for _ in 0..50 {
        assert_eq!(cuEventQuery(event), CUresult::CUDA_ERROR_NOT_READY);
        assert_eq!(cuStreamQuery(hung), CUresult::CUDA_ERROR_NOT_READY);
        // Sleep: nothing may happen meanwhile.
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert!(!waiting.is_finished());
    let ran = bench.ran();
    assert!(
        ran.contains(&"a".to_owned()) && !ran.contains(&"c".to_owned()),
        "{ran:?}"
    );
    // Losing the device ends the wait, so that no later test finds this thread in its machine.
    LockedMachine::take().devices[0].lost = Some(CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE);
    assert_ne!(waiting.join().expect("it does not panic"), SUCCESS);
}
