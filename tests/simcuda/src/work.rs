//! What streams execute. Copies, kernels and library calls are all [`Work`]: they describe
//! themselves for reports, run when their turn comes, and say which bytes they touched.

use std::ops::Range;

use crate::error::CUresult;

/// Addresses as the product sees them: device pointers, or host addresses of pinned memory.
pub type Address = u64;

/// The bytes that one piece of work touched, in no order; ranges may overlap.
#[derive(Clone, Debug, Default)]
pub struct Touched {
    /// Read.
    pub reads: Vec<Range<Address>>,
    /// Written. Bytes both read and written are in both lists.
    pub writes: Vec<Range<Address>>,
    /// Atomics: these do not race with each other.
    pub atomics: Vec<Range<Address>>,
    /// With [`Reads::Watched`]: what was read and never written, and by whom.
    pub unwritten: Option<(Range<Address>, String)>,
}

/// What work does with the bytes that it reads; decides what it means if they were never written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// It computes with them.
    Used,
    /// It copies the first range that it reads to the first that it writes.
    Copied,
    /// It looks at each read itself: [`Touched::unwritten`].
    Watched,
}

/// Why work failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What later calls return: CUDA_ERROR_ILLEGAL_ADDRESS and similar codes stay with the context.
    pub code: CUresult,
    /// What happened, for the report: `kernel relu_f32 wrote 4 bytes at 0x… one past the end of …`.
    pub message: String,
}

/// Device memory is mapped several times, so that an address says which pointer it came from: view
/// 0 is what the product sees, and a launch gives each allocation of its arguments another view.
#[derive(Clone, Copy, Debug, Default)]
pub struct Views {
    /// Where view 0 begins.
    pub low: Address,
    /// From one view to the next: a power of two, or 0 if there are no views.
    pub each_bytes: u64,
}

impl Views {
    /// How many there are.
    pub const COUNT: usize = 16;

    /// Bytes from the first view to the end of the last.
    pub fn bytes(&self) -> u64 {
        self.each_bytes * Self::COUNT as u64
    }

    /// The view of an address, and the address in view 0.
    pub fn split(&self, address: Address) -> (usize, Address) {
        let at = address.wrapping_sub(self.low);
        if at >= self.bytes() {
            return (0, address);
        }
        let view = at / self.each_bytes;
        (view as usize, address - view * self.each_bytes)
    }

    /// The address in another view of an address in view 0.
    pub fn at(&self, view: usize, address: Address) -> Address {
        address + view as u64 * self.each_bytes
    }
}

/// Which bytes may be accessed: checked before every access.
pub trait Memory: Sync {
    /// Checks that `range` lies in one live allocation that `device` may access. The error says
    /// what is there instead: nothing, freed memory (and by whom), another device's memory without
    /// access, the end of an allocation.
    fn check(&self, device: usize, range: Range<Address>) -> Result<(), String>;

    /// The live allocation that holds `address` and that `device` may access, as a whole, so that
    /// the check can be cached.
    fn allocation(&self, device: usize, address: Address) -> Result<Range<Address>, String>;

    /// The first part of `range` that nothing has written since it was allocated.
    fn unwritten(&self, _range: &Range<Address>) -> Option<Range<Address>> {
        None
    }

    /// The views of device memory.
    fn views(&self) -> Views {
        Views::default()
    }

    /// Bytes in words: of which allocation, and who made it.
    fn describe(&self, range: &Range<Address>) -> String {
        format!("{:#x}..{:#x}", range.start, range.end)
    }

    /// Where the bytes at `address` are mapped: device memory at its own address, pinned memory at
    /// a second mapping.
    fn host_pointer(&self, address: Address) -> *mut u8;
}

/// One thing a stream does.
pub trait Work: Send + Sync {
    /// What it is, for reports: `kernel relu_f32<<<4, 256>>>`, `cuMemcpyHtoDAsync of 4096 bytes`.
    fn describe(&self) -> String;

    /// The ranges it certainly touches, checked when it is queued; kernels know only at the end of
    /// `run`.
    fn known_ranges(&self) -> Touched {
        Touched::default()
    }

    /// What it does with the bytes that it reads.
    fn reads(&self) -> Reads {
        Reads::Used
    }

    /// Runs on `device`, and says what it touched, even if it fails.
    fn run(&self, device: usize, memory: &dyn Memory, touched: &mut Touched)
    -> Result<(), Failure>;

    /// Its duration on the simulated clock, which orders and measures nothing.
    fn duration_ns(&self) -> u64;

    /// Whether it fills the compute engine of its device, so that no other kernel runs beside it.
    fn fills_device(&self) -> bool {
        true
    }
}

/// A function of the host that a stream calls.
#[derive(Clone, Copy)]
pub struct HostFunction {
    pub(crate) function: unsafe extern "C" fn(*mut std::ffi::c_void),
    /// An opaque address that belongs to the callee.
    pub(crate) argument: usize,
}
