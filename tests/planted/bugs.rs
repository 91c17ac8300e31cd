//! The planted mistakes, and what the simulator must say about each.

#[path = "bugs/programs.rs"]
mod programs;

use self::programs::*;
use crate::Version;

/// One planted mistake.
pub(crate) struct Bug {
    pub(crate) name: &'static str,
    /// The number of GPUs it needs.
    pub(crate) devices: usize,
    pub(crate) program: fn(Version),
    /// What the simulator must print about it: the cause, and both participants.
    pub(crate) told: &'static [&'static str],
}

pub(crate) const ALL: &[Bug] = &[
    Bug {
        name: "missing_event_wait",
        devices: 1,
        program: missing_event_wait,
        told: &[
            "RACE",
            "cuMemsetD32Async",
            "kernel add_one",
            "stream",
            "allocat",
        ],
    },
    Bug {
        name: "event_recorded_on_the_wrong_stream",
        devices: 1,
        program: event_recorded_on_the_wrong_stream,
        told: &[
            "RACE",
            "cuMemsetD32Async",
            "kernel add_one",
            "stream",
            "allocat",
        ],
    },
    Bug {
        name: "pinned_buffer_reused_too_early",
        devices: 1,
        program: pinned_buffer_reused_too_early,
        told: &[
            "HOST ACCESS",
            "write",
            "cuMemcpyHtoDAsync",
            "stream",
            "device 0",
            "allocat",
        ],
    },
    Bug {
        name: "pinned_buffer_read_too_early",
        devices: 1,
        program: pinned_buffer_read_too_early,
        told: &[
            "HOST ACCESS",
            "read",
            "cuMemcpyDtoHAsync",
            "stream",
            "device 0",
            "allocat",
        ],
    },
    Bug {
        name: "use_after_free",
        devices: 1,
        program: use_after_free,
        told: &[
            "USE AFTER FREE",
            "kernel add_one",
            "cuMemFreeAsync",
            "allocat",
        ],
    },
    Bug {
        name: "double_free",
        devices: 1,
        program: double_free,
        told: &["DOUBLE FREE", "cuMemFreeAsync", "allocat"],
    },
    Bug {
        name: "out_of_bounds_in_a_kernel",
        devices: 1,
        program: out_of_bounds_in_a_kernel,
        told: &["OUT OF BOUNDS", "kernel add_one", "allocat"],
    },
    Bug {
        name: "wrong_device_pointer",
        devices: 2,
        program: wrong_device_pointer,
        told: &["WRONG DEVICE", "kernel add_one", "device 0", "device 1"],
    },
    Bug {
        name: "peer_copy_without_access",
        devices: 2,
        program: peer_copy_without_access,
        told: &[
            "PEER COPY WITHOUT ACCESS",
            "cuMemcpyDtoDAsync",
            "device 0",
            "device 1",
        ],
    },
    Bug {
        name: "call_that_capture_forbids",
        devices: 1,
        program: call_that_capture_forbids,
        told: &["CAPTURE", "cuStreamSynchronize", "stream"],
    },
    Bug {
        name: "graph_replayed_after_its_buffer_was_freed",
        devices: 1,
        program: graph_replayed_after_its_buffer_was_freed,
        told: &[
            "USE AFTER FREE",
            "graph",
            "cuMemFree",
            "kernel add_one",
            "allocat",
        ],
    },
    Bug {
        name: "workspace_shared_by_two_streams",
        devices: 1,
        program: workspace_shared_by_two_streams,
        told: &["RACE", "cublasLtMatmul", "stream", "1048576", "allocat"],
    },
    Bug {
        name: "host_read_without_synchronisation",
        devices: 1,
        program: host_read_without_synchronisation,
        told: &[
            "HOST ACCESS",
            "read",
            "cuMemcpyDtoHAsync",
            "stream",
            "device 0",
            "allocat",
        ],
    },
    Bug {
        name: "memory_used_before_it_is_made",
        devices: 1,
        program: memory_used_before_it_is_made,
        told: &[
            "RACE",
            "cuMemAllocAsync",
            "cuMemsetD32Async",
            "stream",
            "allocat",
        ],
    },
    Bug {
        name: "synchronous_upload_still_on_its_way",
        devices: 1,
        program: synchronous_upload_still_on_its_way,
        told: &[
            "RACE",
            "cuMemcpyHtoD",
            "kernel add_one",
            "stream",
            "allocat",
        ],
    },
    Bug {
        name: "batch_slot_reused_too_early",
        devices: 1,
        program: batch_slot_reused_too_early,
        told: &[
            "RACE",
            "cuMemcpyHtoDAsync",
            "kernel add_one",
            "stream",
            "allocat",
        ],
    },
    Bug {
        name: "race_that_nobody_waits_for",
        devices: 1,
        program: race_that_nobody_waits_for,
        told: &[
            "RACE",
            "cuMemsetD32Async",
            "kernel add_one",
            "stream",
            "at the end of the process",
        ],
    },
    Bug {
        name: "wait_of_another_thread",
        devices: 1,
        program: wait_of_another_thread,
        told: &["RACE", "cuMemsetD32Async", "cuMemcpyDtoDAsync", "stream"],
    },
    Bug {
        name: "memory_that_nothing_has_written",
        devices: 1,
        program: memory_that_nothing_has_written,
        told: &[
            "NEVER WRITTEN",
            "kernel largest",
            "planted.cu:",
            "bytes: 4004..4008 of the 4008-byte allocation",
        ],
    },
    Bug {
        name: "race_after_a_million_accesses",
        devices: 1,
        program: race_after_a_million_accesses,
        told: &[
            "RACE",
            "race inside kernel late",
            "planted.cu:",
            "no barrier",
        ],
    },
    Bug {
        name: "restricted_operand_written_in_place",
        devices: 1,
        program: |version| in_place(version, false),
        told: &[
            "RACE",
            "kernel add_one_to",
            "not coherent",
            "bytes: 0..1024",
        ],
    },
    Bug {
        name: "cached_read_of_what_is_written",
        devices: 1,
        program: |version| in_place(version, true),
        told: &["RACE", "kernel add_one_by_ldg", "__ldg", "bytes: 0..1024"],
    },
    Bug {
        name: "index_into_another_allocation",
        devices: 1,
        program: index_into_another_allocation,
        told: &[
            "OUT OF BOUNDS",
            "kernel add_one_at",
            "another allocation",
            "pointer: of bytes 0..4004",
            "accessed: bytes 40..44",
            "allocat",
        ],
    },
    Bug {
        name: "host_function_reads_too_early",
        devices: 1,
        program: host_function_reads_too_early,
        told: &["RACE", "host function", "cuMemcpyDtoHAsync", "stream"],
    },
    Bug {
        name: MEMORY_NEVER_FREED,
        devices: 1,
        program: memory_never_freed,
        told: &[
            "NEVER FREED",
            "4004 bytes in 1 allocation",
            "cuMemAlloc",
            "memory_never_freed",
        ],
    },
];

/// Found with SIMCUDA_LEAKS=1: a program may keep memory until it ends.
pub(crate) const MEMORY_NEVER_FREED: &str = "memory_never_freed";

/// Not a multiple of any block or alignment, so that an access past the end does not hit padding.
pub(crate) const COUNT: usize = 1001;
