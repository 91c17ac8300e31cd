//! The message of a failed launch: kernel, place, cause.

use std::ffi::CStr;
use std::ops::Range;

use super::library::{Kernel, Library, RawFailure, THREADS_MAX};
use super::symbols::MARGIN_BYTES;
use crate::error::CUresult;
use crate::work::{Address, Failure, Memory};

/// Kinds of failures, numbered as in `shim/runtime.h`.
pub(super) mod kind {
    pub(super) const NONE: u32 = 0;
    pub(in crate::kernel) const ADDRESS: u32 = 1;
    pub(super) const MISALIGNED: u32 = 2;
    pub(super) const RACE: u32 = 3;
    pub(super) const BARRIER: u32 = 4;
    pub(super) const WARP: u32 = 5;
    pub(super) const TRAP: u32 = 6;
    pub(super) const ASSERT: u32 = 7;
    pub(super) const UNWRITTEN: u32 = 8;
    pub(in crate::kernel) const INDEX: u32 = 9;
    pub(super) const COPY: u32 = 10;
}

/// What is needed to describe a failure.
pub(super) struct Scene<'a> {
    pub(super) describe: String,
    pub(super) library: &'a Library,
    pub(super) kernel: &'a Kernel,
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) dynamic_shared_bytes: u32,
    pub(super) device: usize,
    pub(super) memory: &'a dyn Memory,
    /// The allocation of the pointer from which a failed access strayed.
    pub(super) strayed: Option<Range<Address>>,
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

/// Where an address is with respect to `range`: in it, before it, or past its end.
fn near(address: u64, range: Range<u64>) -> String {
    let bytes = range.end - range.start;
    if address < range.start {
        format!("{} bytes before the {bytes} bytes", range.start - address)
    } else if address >= range.end {
        format!(
            "{} bytes past the end of the {bytes} bytes",
            address - range.end
        )
    } else {
        format!("byte {} of the {bytes} bytes", address - range.start)
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

    /// ` at kernel.cu:12`, or nothing.
    fn place(&self, site: u64) -> String {
        self.library
            .line_of(site)
            .map(|place| format!(" at {place}"))
            .unwrap_or_default()
    }

    /// Names the shared variable that an address is in or near, or else the kind of memory.
    fn of_library(&self, address: u64) -> Option<String> {
        let Kernel {
            shared,
            shared_names,
            ..
        } = self.kernel;
        let is_near = |range: &Range<u64>| {
            address + MARGIN_BYTES >= range.start && address < range.end + MARGIN_BYTES
        };
        let variable = shared
            .iter()
            .map(|span| span.begin as u64..span.end as u64)
            .zip(shared_names)
            .find(|(range, _)| is_near(range));
        let start = self.library.dynamic_shared;
        let dynamic = start..start + u64::from(self.dynamic_shared_bytes);
        if let Some((range, name)) = variable {
            Some(format!(
                "{} of shared variable `{name}`",
                near(address, range)
            ))
        } else if is_near(&dynamic) {
            let near = near(address, dynamic);
            Some(format!("{near} of dynamic shared memory of the launch"))
        } else if self.library.memory.contains(&address) {
            Some("a variable of the module, which is not simulated".to_owned())
        } else {
            None
        }
    }

    /// Names what is at an address.
    fn whereabouts(&self, address: u64) -> String {
        match self.memory.allocation(self.device, address) {
            Ok(range) => format!("{} at {:#x}", near(address, range.clone()), range.start),
            Err(_) => self
                .of_library(address)
                .unwrap_or_else(|| "no memory of a device".to_owned()),
        }
    }

    /// `wrote 4 bytes at 0x… at kernel.cu:12`
    fn deed(&self, raw: &RawFailure) -> String {
        let plural = if raw.size_bytes == 1 { "" } else { "s" };
        format!(
            "{} {} byte{plural} at {:#x}{}",
            access(raw.access),
            raw.size_bytes,
            raw.address,
            self.place(raw.site)
        )
    }

    /// The first read of memory that nothing has written.
    pub(super) fn unwritten(&self, raw: &RawFailure) -> Option<(Range<Address>, String)> {
        let range = raw.address..raw.address + raw.size_bytes;
        let who = self.thread(raw.block, raw.thread);
        (raw.kind == kind::UNWRITTEN).then(|| (range, format!("{who} {}", self.deed(raw))))
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
        let line = if raw.line == 0 {
            String::new()
        } else {
            format!(" in line {}", raw.line)
        };
        let (code, message) = match raw.kind {
            kind::NONE => return None,
            kind::ADDRESS => {
                let range = raw.address..raw.address + raw.size_bytes;
                let why = self.of_library(raw.address).or_else(|| {
                    let checked = self.memory.check(self.device, range.clone());
                    checked.err()
                });
                let why = why.or_else(|| self.another_allocation(&range));
                let why = why.unwrap_or_else(|| "memory that the kernel may not touch".to_owned());
                (
                    CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
                    format!("{me} {}: {why}", self.deed(raw)),
                )
            }
            kind::INDEX => (
                CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
                self.outside_array(raw, &text),
            ),
            kind::MISALIGNED => (
                CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
                format!(
                    "{me} {}, which is not a multiple of {}",
                    self.deed(raw),
                    raw.size_bytes
                ),
            ),
            kind::RACE => (CUresult::CUDA_ERROR_LAUNCH_FAILED, self.race(raw)),
            kind::COPY => (CUresult::CUDA_ERROR_LAUNCH_FAILED, self.copy(raw)),
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

    /// An access landed in live memory that its pointer does not reach.
    fn another_allocation(&self, range: &Range<Address>) -> Option<String> {
        let own = self.strayed.as_ref()?;
        Some(format!(
            "another allocation than the one its pointer is of\n  pointer: of bytes {}\n  accessed: bytes {}",
            self.memory.describe(own),
            self.memory.describe(range)
        ))
    }

    /// The launch has read bytes through the cache that is not coherent, and has written them.
    pub(super) fn stale(&self, bytes: &Range<Address>) -> Failure {
        Failure {
            code: CUresult::CUDA_ERROR_LAUNCH_FAILED,
            message: format!(
                "race inside kernel {}: it reads bytes by __ldg, or through a parameter `const T* __restrict__`, which may go \
                 through a cache that is not coherent, and writes them in the same launch\n  bytes: {}\n  help: \
                 a plain pointer (no __restrict__, no __ldg), or another output",
                self.kernel.name,
                self.memory.describe(bytes)
            ),
        }
    }

    fn race(&self, raw: &RawFailure) -> String {
        let other = self.thread(raw.other_block, raw.other_thread);
        let same = raw.block == raw.other_block && raw.other_thread <= THREADS_MAX;
        let missing = if same {
            "no barrier is between them"
        } else {
            "nothing orders the blocks of a launch"
        };
        format!(
            "race inside kernel {}: {} {}, {other} {} byte {:#x}{} ({}), and {missing}",
            self.kernel.name,
            self.thread(raw.block, raw.thread),
            self.deed(raw),
            access(raw.other_access),
            raw.address,
            self.place(raw.other_site),
            self.whereabouts(raw.address)
        )
    }

    /// Bytes were touched that a copy is going to write.
    fn copy(&self, raw: &RawFailure) -> String {
        format!(
            "race inside kernel {}: {} {} ({}), while a copy by cp.async is in flight to it: {} started it{} and has not waited \
             for its group (cp.async.commit_group, cp.async.wait_group)",
            self.kernel.name,
            self.thread(raw.block, raw.thread),
            self.deed(raw),
            self.whereabouts(raw.address),
            self.thread(raw.block, raw.other_thread),
            self.place(raw.other_site)
        )
    }

    /// An array's type says how long it is. The compiler does not say its name.
    fn outside_array(&self, raw: &RawFailure, kind: &str) -> String {
        let place = self.library.line_of(raw.site).unwrap_or_default();
        let shared: Vec<&str> = self
            .library
            .shared_uses
            .iter()
            .filter_map(|used| used.strip_prefix(&place)?.strip_prefix(' '))
            .collect();
        let names = match shared[..] {
            [] => String::new(),
            _ => format!(
                " (shared variables in this line: `{}`)",
                shared.join("`, `")
            ),
        };
        format!(
            "{} used index {} of an array {kind} at {place}, which is out of its bounds{names}",
            self.thread(raw.block, raw.thread),
            raw.address.cast_signed()
        )
    }

    fn barrier(&self, raw: &RawFailure, line: &str) -> String {
        let threads: u64 = self.block.iter().map(|size| u64::from(*size)).product();
        format!(
            "divergence at a barrier: {} of {threads} threads of block {} wait at __syncthreads{line}, and thread {} waits at \
             another one, in line {}",
            raw.arrived,
            index(raw.block, self.grid),
            index(raw.other_thread.into(), self.block),
            raw.other_access
        )
    }
}
