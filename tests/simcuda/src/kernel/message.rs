//! The message of a failed launch: kernel, place, cause.

use std::ops::Range;

use ddp_ptx::{Finding, Kind};

use crate::error::CUresult;
use crate::work::{Address, Failure, Memory, Views};

/// What is needed to describe a failure.
pub(super) struct Scene<'a> {
    pub(super) describe: String,
    pub(super) device: usize,
    pub(super) memory: &'a dyn Memory,
    pub(super) views: Views,
}

/// `thread (1, 0, 0) of block (0, 0, 0)`
fn thread(finding: &Finding) -> String {
    let ([x, y, z], [i, j, k]) = (finding.thread, finding.block);
    format!("thread ({x}, {y}, {z}) of block ({i}, {j}, {k})")
}

/// ` at kernel.cu:12`, or the line of the PTX.
fn place(finding: &Finding) -> String {
    match &finding.source {
        Some(source) => format!(" at {source}"),
        None => format!(" in line {} of its PTX", finding.line),
    }
}

impl Scene<'_> {
    /// The bytes in view 0.
    fn own(&self, bytes: &Range<Address>) -> Range<Address> {
        let start = self.views.split(bytes.start).1;
        start..start + (bytes.end - bytes.start)
    }

    /// Names what is at an address.
    fn whereabouts(&self, address: Address) -> String {
        match self.memory.allocation(self.device, address) {
            Ok(range) => {
                let (at, bytes) = (address - range.start, range.end - range.start);
                format!("byte {at} of the {bytes} bytes at {:#x}", range.start)
            }
            Err(_) => "no memory of a device".to_owned(),
        }
    }

    /// `wrote 4 bytes at 0x… at kernel.cu:12`
    fn deed(&self, finding: &Finding, bytes: &Range<Address>, does: &str) -> String {
        let count = bytes.end - bytes.start;
        let plural = if count == 1 { "" } else { "s" };
        format!(
            "{does} {count} byte{plural} at {:#x}{}",
            bytes.start,
            place(finding)
        )
    }

    /// The first read of memory that nothing has written.
    pub(super) fn unwritten(&self, finding: &Finding) -> Option<(Range<Address>, String)> {
        let (bytes, does) = finding.access.as_deref()?;
        let bytes = self.own(bytes);
        let deed = self.deed(finding, &bytes, does);
        Some((bytes, format!("{} {deed}", thread(finding))))
    }

    /// Why the bytes may not be accessed. `strayed`: the allocation of the pointer, if they are not
    /// in it.
    fn denied(&self, bytes: &Range<Address>, strayed: Option<Range<Address>>) -> String {
        if let Err(why) = self.memory.check(self.device, bytes.clone()) {
            return why;
        }
        strayed.map_or("memory that the kernel may not touch".to_owned(), |own| {
            // An access landed in live memory that its pointer does not reach.
            format!(
                "another allocation than the one its pointer is of\n  pointer: of bytes {}\n  accessed: bytes {}",
                self.memory.describe(&own),
                self.memory.describe(bytes)
            )
        })
    }

    /// What a mistake means for the program.
    pub(super) fn failure(&self, finding: &Finding, strayed: Option<Range<Address>>) -> Failure {
        let (who, at, what) = (thread(finding), place(finding), &finding.message);
        let access = finding
            .access
            .as_deref()
            .map(|(bytes, does)| (self.own(bytes), *does));
        let code = match finding.kind {
            Kind::OutOfBounds => CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            Kind::Misaligned => CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
            _ => CUresult::CUDA_ERROR_LAUNCH_FAILED,
        };
        let kernel = &finding.kernel;
        let message = match (finding.kind, access) {
            (Kind::OutOfBounds, Some((bytes, does))) => {
                let deed = self.deed(finding, &bytes, does);
                format!("{who} {deed}: {}", self.denied(&bytes, strayed))
            }
            (Kind::Misaligned, Some((bytes, does))) => format!(
                "{who} {}, which is not a multiple of {}",
                self.deed(finding, &bytes, does),
                bytes.end - bytes.start
            ),
            (Kind::Misaligned, None) => {
                format!("{who}{at}: {what}, which is not a multiple of its size")
            }
            (Kind::ReadOnly, Some((bytes, _))) => format!(
                "race inside kernel {kernel}: it reads bytes by __ldg, or through a parameter `const T* __restrict__`, which may go \
                 through a cache that is not coherent, and writes them in the same launch: {who}{at} was the first\n  bytes: \
                 {}\n  help: a plain pointer (no __restrict__, no __ldg), or another output",
                self.memory.describe(&bytes)
            ),
            (Kind::Race, Some((bytes, _))) => format!(
                "race inside kernel {kernel}: {who}{at} {what} ({})",
                self.whereabouts(bytes.start)
            ),
            (Kind::Race | Kind::Copy | Kind::Flight | Kind::Fence, _) => {
                format!("race inside kernel {kernel}: {who}{at} {what}")
            }
            (Kind::Barrier, _) => format!("divergence at a barrier: {who}{at}: {what}"),
            (Kind::Warp, _) => format!("divergence in a warp: {who}{at}: {what}"),
            _ => format!("{who}{at}: {what}"),
        };
        Failure {
            code,
            message: format!("{}: {message}", self.describe),
        }
    }
}
