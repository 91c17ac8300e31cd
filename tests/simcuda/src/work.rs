//! What streams execute. Copies, kernels and library calls are all [`Work`]: they describe themselves for reports, are
//! run once their turn has come, and say which bytes they touched.

use std::ops::Range;

/// Addresses as the product sees them: device pointers, or host addresses of pinned memory.
pub type Address = u64;

/// The bytes that one piece of work touched, in no order; ranges may overlap and be adjacent.
#[derive(Clone, Debug, Default)]
pub struct Touched {
    /// Read.
    pub reads: Vec<Range<Address>>,
    /// Written. What is read and written stands in both.
    pub writes: Vec<Range<Address>>,
    /// Read and written as a whole (atomics): these do not race with each other.
    pub atomics: Vec<Range<Address>>,
}

/// Why work came to an end that it should not.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What the next calls return: CUDA_ERROR_ILLEGAL_ADDRESS and its like, which stay with the context.
    pub code: i32,
    /// What happened, for the report: `kernel relu_f32 wrote 4 bytes at 0x… one past the end of …`.
    pub message: String,
}

/// Which bytes may be touched: asked before every access.
pub trait Memory: Sync {
    /// Checks that `range` lies in one live allocation that `device` may access. The error says what is there instead: nothing, freed
    /// memory (and by whom), another device's memory without access, the end of an allocation.
    fn check(&self, device: usize, range: Range<Address>) -> Result<(), String>;

    /// The live allocation that holds `address` and that `device` may access, whole: what a check may be kept for.
    fn allocation(&self, device: usize, address: Address) -> Result<Range<Address>, String>;

    /// Where the bytes at `address` really are: device memory is at its own address, pinned memory has a second mapping.
    fn host_pointer(&self, address: Address) -> *mut u8;
}

/// One thing a stream does.
pub trait Work: Send + Sync {
    /// What it is, for reports: `kernel relu_f32<<<4, 256>>>`, `cuMemcpyHtoDAsync of 4096 bytes`.
    fn describe(&self) -> String;

    /// The ranges it is certain to touch, checked when it is given to a stream; kernels know only at the end of `run`.
    fn known_ranges(&self) -> Touched {
        Touched::default()
    }

    /// Does it on `device`, and says what it touched, also when it fails on the way.
    fn run(&self, device: usize, memory: &dyn Memory, touched: &mut Touched) -> Result<(), Failure>;

    /// How long it would take by the simulator's clock, which orders things and measures nothing.
    fn duration_ns(&self) -> u64;

    /// Whether it fills the compute engine of its device, so that no other kernel runs beside it.
    fn fills_device(&self) -> bool {
        true
    }
}
