//! The entry points: handles, attributes, the search, and matmuls on streams of a machine.

use std::mem::MaybeUninit;
use std::ptr::NonNull;

use cudarc::cublaslt::sys::cublasLtMatmulHeuristicResult_t;

use super::super::algorithm::*;
use super::super::objects::*;
use super::super::*;
use crate::copy::cuMemsetD8_v2;
use crate::memory::calls::cuMemAlloc_v2;
use crate::report::FindingKind;
use crate::stream::calls::cuStreamSynchronize;
use crate::stream::tests::{Bench, SUCCESS, bench, config, got};

const DONE: Status = Status::CUBLAS_STATUS_SUCCESS;
const INVALID: Status = Status::CUBLAS_STATUS_INVALID_VALUE;
const UNSUPPORTED: Status = Status::CUBLAS_STATUS_NOT_SUPPORTED;
const SIDE: u64 = 16;

fn made(create: impl FnOnce(Out<'_, usize>) -> Status) -> usize {
    let mut handle = MaybeUninit::new(0);
    assert_eq!(create(Some(&mut handle)), DONE);
    // SAFETY: it was zero from the start.
    unsafe { handle.assume_init() }
}

fn set(handle: usize, attribute: u32, value: u32) -> Status {
    // SAFETY: four bytes of a local variable.
    unsafe { cublasLtMatmulDescSetAttribute(handle, attribute, (&raw const value).cast(), 4) }
}

fn workspace_max(preference: usize, bytes: u64) -> Status {
    // SAFETY: eight bytes of a local variable.
    unsafe { cublasLtMatmulPreferenceSetAttribute(preference, 1, (&raw const bytes).cast(), 8) }
}

/// A handle of the device that is current, and what a square f32 matmul takes.
struct Plan {
    library: usize,
    operation: usize,
    layout: usize,
    preference: usize,
}

impl Plan {
    fn new() -> Self {
        Self {
            library: made(|out| cublasLtCreate(out)),
            operation: made(|out| cublasLtMatmulDescCreate(out, 68, 0)),
            layout: made(|out| cublasLtMatrixLayoutCreate(out, 0, SIDE, SIDE, SIDE as i64)),
            preference: made(|out| cublasLtMatmulPreferenceCreate(out)),
        }
    }

    fn search(&self) -> (Status, i32, MaybeUninit<cublasLtMatmulHeuristicResult_t>) {
        let mut result = MaybeUninit::uninit();
        let mut count = MaybeUninit::new(-1);
        // SAFETY: there is room for the one result that is requested.
        let status = unsafe {
            cublasLtMatmulAlgoGetHeuristic(
                self.library,
                self.operation,
                self.layout,
                self.layout,
                self.layout,
                self.layout,
                self.preference,
                1,
                NonNull::new(result.as_mut_ptr()),
                Some(&mut count),
            )
        };
        // SAFETY: it was -1 from the start.
        (status, unsafe { count.assume_init() }, result)
    }

    fn found(&self) -> cublasLtMatmulHeuristicResult_t {
        let (status, count, result) = self.search();
        assert_eq!((status, count), (DONE, 1));
        // SAFETY: a count of one says that the one result was written.
        unsafe { result.assume_init() }
    }

    fn multiply(&self, [a, d, workspace]: [Address; 3], stream: CUstream) -> Status {
        let algorithm = self.found();
        let (alpha, beta) = (1.0f32, 0.0f32);
        // SAFETY: alpha and beta are local variables of the scale type, read during the call.
        unsafe {
            cublasLtMatmul(
                self.library,
                self.operation,
                (&raw const alpha).cast(),
                a,
                self.layout,
                a,
                self.layout,
                (&raw const beta).cast(),
                d,
                self.layout,
                d,
                self.layout,
                Some(&algorithm.algo),
                workspace,
                algorithm.workspaceSize,
                stream,
            )
        }
    }
}

fn machine() -> Bench {
    bench(config(1))
}

#[test]
fn a_handle_is_of_one_kind_and_of_no_use_once_destroyed() {
    let _machine = machine();
    let plan = Plan::new();
    assert_eq!(cublasLtMatrixLayoutDestroy(plan.operation), INVALID);
    assert_eq!(cublasLtMatmulDescDestroy(plan.operation), DONE);
    assert_eq!(cublasLtMatmulDescDestroy(plan.operation), INVALID);
    assert_eq!(plan.search().0, INVALID);
    assert_eq!(
        (cublasLtDestroy(plan.library), cublasLtDestroy(plan.library)),
        (DONE, INVALID)
    );
    assert_eq!(cublasLtMatmulPreferenceCreate(None), INVALID);
}

#[test]
fn attributes_have_their_documented_sizes_and_are_read_back() {
    let _machine = machine();
    let plan = Plan::new();
    assert_eq!(set(plan.operation, 3, 1), DONE);
    let (mut value, mut written) = (0u32, MaybeUninit::new(0));
    let to = (&raw mut value).cast::<c_void>();
    // SAFETY: room for four bytes is a local variable; no room is asked for in the second call.
    unsafe {
        assert_eq!(
            cublasLtMatmulDescGetAttribute(plan.operation, 3, to, 4, Some(&mut written)),
            DONE
        );
        assert_eq!((value, written.assume_init()), (1, 4));
        let null = std::ptr::null_mut();
        assert_eq!(
            cublasLtMatrixLayoutGetAttribute(plan.layout, 2, null, 0, Some(&mut written)),
            DONE
        );
        assert_eq!(written.assume_init(), 8);
        assert_eq!(
            cublasLtMatrixLayoutGetAttribute(plan.layout, 2, to, 4, None),
            INVALID
        );
    }
    assert_eq!(
        set(plan.operation, 8, 1),
        INVALID,
        "a pointer of four bytes"
    );
    assert_eq!(
        set(plan.operation, 17, 1),
        UNSUPPORTED,
        "a scale that is not modelled"
    );
}

#[test]
fn the_search_finds_one_algorithm_with_the_workspace_that_is_allowed_or_none() {
    let _machine = machine();
    let plan = Plan::new();
    assert_eq!(plan.found().workspaceSize, 0);
    assert_eq!(workspace_max(plan.preference, 32 << 20), DONE);
    assert_eq!(plan.found().workspaceSize, 1 << 20);
    assert_eq!(set(plan.operation, 7, 512), DONE);
    assert_eq!(
        (plan.search().0, plan.search().1),
        (UNSUPPORTED, 0),
        "BGRADB with op(B) = N"
    );
}

#[test]
fn a_matmul_is_work_of_its_stream_and_must_be_of_its_device() {
    let machine = machine();
    let plan = Plan::new();
    assert_eq!(workspace_max(plan.preference, 1 << 20), DONE);
    let memory = [SIDE * SIDE * 4, SIDE * SIDE * 4, 1 << 20]
        .map(|bytes| got(|out| cuMemAlloc_v2(out, bytes as usize)));
    for address in memory {
        assert_eq!(cuMemsetD8_v2(address, 0, 1024), SUCCESS);
    }
    assert_eq!(cuStreamSynchronize(std::ptr::null_mut()), SUCCESS);
    let (first, second) = (machine.stream(), machine.stream());
    assert_eq!(plan.multiply(memory, first), DONE);
    assert_eq!(
        plan.multiply([memory[0] + 4, memory[1], memory[2]], first),
        INVALID,
        "less aligned than promised"
    );
    machine.set_device(1);
    let elsewhere = machine.stream();
    assert_eq!(
        plan.multiply(memory, elsewhere),
        INVALID,
        "a stream of another device"
    );
    machine.set_device(0);
    assert_eq!(cuStreamSynchronize(first), SUCCESS);
    assert_eq!(machine.finding_kinds(), []);
    let other = [memory[0], got(|out| cuMemAlloc_v2(out, 4096)), memory[2]];
    assert_eq!(
        (plan.multiply(memory, first), plan.multiply(other, second)),
        (DONE, DONE)
    );
    assert_eq!(
        (cuStreamSynchronize(first), cuStreamSynchronize(second)),
        (SUCCESS, SUCCESS)
    );
    assert_eq!(
        machine.finding_kinds(),
        [FindingKind::Race],
        "one workspace, two streams"
    );
}
