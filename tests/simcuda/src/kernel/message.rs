//! The message of a failed launch: kernel, place, cause.

use std::ffi::CStr;

use super::library::{RawFailure, THREADS_MAX};
use crate::error::CUresult;
use crate::work::{Failure, Memory};

/// Kinds of failures, numbered as in `shim/runtime.h`.
mod kind {
    pub(super) const NONE: u32 = 0;
    pub(super) const ADDRESS: u32 = 1;
    pub(super) const MISALIGNED: u32 = 2;
    pub(super) const RACE: u32 = 3;
    pub(super) const BARRIER: u32 = 4;
    pub(super) const WARP: u32 = 5;
    pub(super) const TRAP: u32 = 6;
    pub(super) const ASSERT: u32 = 7;
}

/// What is needed to describe a failure.
pub(super) struct Scene<'a> {
    pub(super) describe: String,
    pub(super) name: &'a str,
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) device: usize,
    pub(super) memory: &'a dyn Memory,
    /// Where the code stands that did it.
    pub(super) place: Option<String>,
}

fn index(linear: u64, size: [u32; 3]) -> String {
    let (x, y) = (u64::from(size[0]), u64::from(size[1]));
    format!("({}, {}, {})", linear % x, linear / x % y, linear / x / y)
}

fn access(kind: u32) -> &'static str {
    match kind {
        0 => "read",
        1 => "wrote",
        _ => "updated (atomic)",
    }
}

impl Scene<'_> {
    fn thread(&self, block: u64, thread: u32) -> String {
        match thread {
            THREADS_MAX => format!("several threads of block {}", index(block, self.grid)),
            several if several > THREADS_MAX => "threads of several blocks".to_owned(),
            _ => format!(
                "thread {} of block {}",
                index(thread.into(), self.block),
                index(block, self.grid)
            ),
        }
    }

    /// Names the allocation of an address; other addresses are the block's shared memory.
    fn whereabouts(&self, address: u64) -> String {
        match self.memory.allocation(self.device, address) {
            Ok(range) => {
                format!(
                    "byte {} of the {} bytes at {:#x}",
                    address - range.start,
                    range.end - range.start,
                    range.start
                )
            }
            Err(_) => "shared memory".to_owned(),
        }
    }

    /// The failure that a launch returned.
    pub(super) fn failure(&self, raw: &RawFailure) -> Option<Failure> {
        let text = if raw.text.is_null() {
            String::new()
        } else {
            // SAFETY: a text of the library's constants, which is loaded.
            unsafe { CStr::from_ptr(raw.text) }
                .to_string_lossy()
                .into_owned()
        };
        let me = self.thread(raw.block, raw.thread);
        let place = self
            .place
            .as_ref()
            .map(|place| format!(" at {place}"))
            .unwrap_or_default();
        let line = if raw.line == 0 {
            String::new()
        } else {
            format!(" in line {}", raw.line)
        };
        let plural = if raw.size_bytes == 1 { "" } else { "s" };
        let what = format!(
            "{} {} byte{plural} at {:#x}",
            access(raw.access),
            raw.size_bytes,
            raw.address
        );
        let (code, message) = match raw.kind {
            kind::NONE => return None,
            kind::ADDRESS => {
                let why = self
                    .memory
                    .check(self.device, raw.address..raw.address + raw.size_bytes);
                let why = why
                    .err()
                    .unwrap_or_else(|| "memory that the kernel may not touch".to_owned());
                (
                    CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
                    format!("{me} {what}{place}: {why}"),
                )
            }
            kind::MISALIGNED => (
                CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
                format!(
                    "{me} {what}{place}, which is not a multiple of {}",
                    raw.size_bytes
                ),
            ),
            kind::RACE => {
                let other = self.thread(raw.other_block, raw.other_thread);
                let same = raw.block == raw.other_block && raw.other_thread <= THREADS_MAX;
                let missing = if same {
                    "no barrier is between them"
                } else {
                    "nothing orders the blocks of a launch"
                };
                let message = format!(
                    "race inside kernel {}: {me} {what}{place}, {other} {} byte {:#x} ({}), and {missing}",
                    self.name,
                    access(raw.other_access),
                    raw.address,
                    self.whereabouts(raw.address)
                );
                (CUresult::CUDA_ERROR_LAUNCH_FAILED, message)
            }
            kind::BARRIER => (CUresult::CUDA_ERROR_LAUNCH_FAILED, self.barrier(raw, &line)),
            kind::WARP => (
                CUresult::CUDA_ERROR_LAUNCH_FAILED,
                format!("divergence in a warp: {me}{line} {text}"),
            ),
            kind::TRAP => (
                CUresult::CUDA_ERROR_LAUNCH_FAILED,
                format!("{me} called __trap{line}"),
            ),
            kind::ASSERT => (
                CUresult::CUDA_ERROR_ASSERT,
                format!("{me}: assertion `{text}` failed{line}"),
            ),
            other => (
                CUresult::CUDA_ERROR_LAUNCH_FAILED,
                format!("{me}: failure {other}"),
            ),
        };
        Some(Failure {
            code,
            message: format!("{}: {message}", self.describe),
        })
    }

    fn barrier(&self, raw: &RawFailure, line: &str) -> String {
        let threads: u64 = self.block.iter().map(|size| u64::from(*size)).product();
        let other = index(raw.other_thread.into(), self.block);
        let what = if raw.exited > 0 {
            format!(
                "{} have returned from the kernel, thread {other} among them",
                raw.exited
            )
        } else {
            format!(
                "thread {other} waits at another one, in line {}",
                raw.other_access
            )
        };
        format!(
            "divergence at a barrier: {} of {threads} threads of block {} wait at __syncthreads{line}, and {what}",
            raw.arrived,
            index(raw.block, self.grid)
        )
    }
}
