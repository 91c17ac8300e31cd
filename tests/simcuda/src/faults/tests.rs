//! Plans: what is parsed, what is refused, and that exactly the K-th is hit.

use std::sync::Arc;

use super::*;
use crate::error::CUresult;
use crate::work::{Address, Failure, Memory, Touched, Work};

#[test]
fn the_kth_call_of_a_function_is_refused_and_no_other() {
    let mut plan = Plan::parse("cuMemAllocFromPoolAsync@3=out_of_memory").unwrap();
    let refused: Vec<_> = (0..5)
        .map(|_| {
            plan.before_call("cuMemAllocFromPoolAsync", Some(0))
                .map(|it| it.code)
        })
        .collect();
    assert_eq!(
        refused,
        [
            None,
            None,
            Some(CUresult::CUDA_ERROR_OUT_OF_MEMORY),
            None,
            None
        ]
    );
    assert_eq!(plan.before_call("cuMemFreeAsync", Some(0)), None);
}

#[test]
fn a_function_is_named_with_or_without_its_version() {
    for name in ["cuMemAlloc", "cuMemAlloc_v2"] {
        let mut plan = Plan::parse(&format!("{name}@1=2")).unwrap();
        assert_eq!(
            plan.before_call("cuMemAlloc_v2", None).unwrap().code,
            CUresult::CUDA_ERROR_OUT_OF_MEMORY
        );
    }
}

#[test]
fn calls_are_counted_for_the_device_that_is_named() {
    let mut plan = Plan::parse("cuLaunchKernel@2/1=launch_failure").unwrap();
    assert_eq!(plan.before_call("cuLaunchKernel", Some(0)), None);
    assert_eq!(plan.before_call("cuLaunchKernel", Some(1)), None);
    assert_eq!(plan.before_call("cuLaunchKernel", Some(0)), None);
    let refused = plan.before_call("cuLaunchKernel", Some(1)).unwrap();
    assert_eq!(
        refused,
        Refused {
            code: CUresult::CUDA_ERROR_LAUNCH_FAILED,
            is_sticky: true
        }
    );
}

#[test]
fn a_missing_symbol_is_missing_for_good_and_for_both_its_names() {
    let mut plan = Plan::parse("symbol=cuGraphExecUpdate_v2").unwrap();
    assert!(plan.is_missing("cuGraphExecUpdate") && plan.is_missing("cuGraphExecUpdate_v2"));
    for _ in 0..3 {
        assert_eq!(
            plan.before_call("cuGraphExecUpdate_v2", None).unwrap().code,
            CUresult::CUDA_ERROR_NOT_SUPPORTED
        );
    }
}

#[test]
fn what_cannot_be_read_says_which_entry_and_why() {
    for (text, reason) in [
        ("cuInit", "expected a `=`"),
        ("cuInit=1", "expected `@K`"),
        ("cuInit@0=1", "counts from 1"),
        ("cuInit@x=1", "`x` is not a whole number"),
        ("cuInit@1=broken", "`broken` is not a kind of fault"),
        ("cuInit@1=0", "`0` is not a kind of fault"),
        ("cuInit@1=hang", "befalls operations"),
        ("launch@1=hang", "neither a function"),
        ("device/0=fast", "can be `slow`"),
    ] {
        let message = Plan::parse(&format!("no_peer; {text}")).unwrap_err();
        assert!(
            message.contains(reason) && message.contains(text),
            "{text}: {message}"
        );
    }
}

#[test]
fn every_form_in_the_table_is_read() {
    let plan = Plan::parse(
        "cuMemAllocFromPoolAsync@3=out_of_memory; cuLaunchKernel@5/1=launch_failure; stream@10=device_lost; kernel@7=hang; \
         copy@4=flip_bit; device/1=slow; symbol=cuMemPoolCreate; no_peer; cuInit@1=CUDA_ERROR_NO_DEVICE; cuInit@2=999;",
    )
    .unwrap();
    assert_eq!(plan.entries.len(), 7);
    assert!(plan.refuses_peers());
}

/// Writes eight bytes at the address that it holds.
struct Writes(Address, &'static str);

impl Work for Writes {
    fn describe(&self) -> String {
        self.1.to_owned()
    }

    fn run(
        &self,
        _device: usize,
        memory: &dyn Memory,
        touched: &mut Touched,
    ) -> Result<(), Failure> {
        // SAFETY: the tests give the address of eight bytes.
        unsafe { std::ptr::write_bytes(memory.host_pointer(self.0), 0, 8) };
        touched.writes.push(self.0..self.0 + 8);
        Ok(())
    }

    fn duration_ns(&self) -> u64 {
        7
    }
}

/// Memory in which every address is its own place.
struct Everything;

impl Memory for Everything {
    fn check(&self, _device: usize, _range: std::ops::Range<Address>) -> Result<(), String> {
        Ok(())
    }

    fn allocation(
        &self,
        _device: usize,
        address: Address,
    ) -> Result<std::ops::Range<Address>, String> {
        Ok(address..address + 1)
    }

    fn host_pointer(&self, address: Address) -> *mut u8 {
        address as *mut u8
    }
}

#[test]
fn kernels_and_copies_are_counted_apart() {
    let mut plan = Plan::parse("kernel@2=hang; copy@1=719").unwrap();
    let mut inject = |name| plan.inject(0, Arc::new(Writes(0, name)));
    assert!(!inject("kernel a<<<1, 1>>>").hangs);
    let copy = inject("cuMemcpyHtoDAsync of 8 bytes");
    assert!(!copy.hangs);
    assert_eq!(
        copy.work
            .run(0, &Everything, &mut Touched::default())
            .unwrap_err()
            .code,
        CUresult(719)
    );
    assert!(inject("kernel a<<<1, 1>>>").hangs);
    assert!(!inject("kernel a<<<1, 1>>>").hangs);
}

#[test]
fn a_flipped_bit_is_one_bit_of_what_was_written() {
    let mut plan = Plan::parse("copy@1=flip_bit").unwrap();
    let mut bytes = [0xffu8; 24];
    let address = bytes.as_mut_ptr() as Address + 8;
    let injected = plan.inject(0, Arc::new(Writes(address, "cuMemcpyAsync of 8 bytes")));
    injected
        .work
        .run(0, &Everything, &mut Touched::default())
        .unwrap();
    assert_eq!(
        bytes[8..16]
            .iter()
            .map(|byte| byte.count_ones())
            .sum::<u32>(),
        1
    );
    assert!(
        bytes[..8]
            .iter()
            .chain(&bytes[16..])
            .all(|byte| *byte == 0xff)
    );
}

#[test]
fn a_slow_device_takes_longer_and_the_others_do_not() {
    let mut plan = Plan::parse("device/1=slow").unwrap();
    assert_eq!(
        plan.inject(0, Arc::new(Writes(0, "kernel")))
            .work
            .duration_ns(),
        7
    );
    assert_eq!(
        plan.inject(1, Arc::new(Writes(0, "kernel")))
            .work
            .duration_ns(),
        700
    );
}

#[test]
fn faults_of_nccl_are_read_and_strike_the_kth_call_whose_turn_comes() {
    let plan = "nccl@2=async_error(system_error); nccl@3/1=slow(50); nccl@4=flip(7); nccl@5=lost; nccl@6=async_error";
    let mut plan = Plan::parse(plan).unwrap();
    let effects: Vec<_> = (0..6).map(|_| plan.strike_nccl("ncclSend", 1)).collect();
    let expected = [
        None,
        Some(NcclEffect::AsyncError(2)),
        Some(NcclEffect::Slow(50)),
        Some(NcclEffect::Flip(Some(7))),
        Some(NcclEffect::Lost),
        Some(NcclEffect::AsyncError(6)),
    ];
    assert_eq!(effects, expected);
    let mut plan = Plan::parse("nccl/ncclSend@2=hang; nccl@4=lost").unwrap();
    let calls = ["ncclSend", "ncclRecv", "ncclSend", "ncclSend"];
    assert_eq!(
        calls.map(|function| plan.strike_nccl(function, 0)),
        [None, None, Some(NcclEffect::Hang), Some(NcclEffect::Lost)]
    );
    let mut plan = Plan::parse("ncclAllReduce@2=remote_error; stream@1=hang").unwrap();
    assert_eq!(plan.before_nccl_call("ncclAllReduce", Some(0)), None);
    assert_eq!(plan.before_nccl_call("ncclBroadcast", Some(0)), None);
    assert_eq!(plan.before_nccl_call("ncclAllReduce", Some(0)), Some(6));
    assert_eq!(
        (plan.strike_queued_nccl(0), plan.strike_queued_nccl(0)),
        (Some(Struck::Hang), None)
    );
}

#[test]
fn an_entry_with_a_rank_counts_only_there() {
    for (rank, struck) in [(Some(1), true), (Some(0), false), (None, false)] {
        let mut plan = Plan::parse_for("rank1: nccl@1=hang", rank).unwrap();
        assert_eq!(
            plan.strike_nccl("ncclSend", 0).is_some(),
            struck,
            "{rank:?}"
        );
    }
    for (text, reason) in [
        ("rank1:nccl@1=broken", "is none of hang"),
        ("rankx:nccl@1=hang", "`rankx` is not `rankR`"),
        ("nccl@1=async_error(7)", "is not an NCCL code"),
        ("nccl@1=slow(fast)", "`fast` is not a whole number"),
        ("nccl@1=flip(3", "expected a `)`"),
        ("ncclSend@1=flip", "is not an NCCL code"),
    ] {
        let message = Plan::parse_for(text, Some(0)).unwrap_err();
        assert!(
            message.contains(reason) && message.contains(text),
            "{text}: {message}"
        );
    }
}
