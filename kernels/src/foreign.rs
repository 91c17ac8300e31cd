//! Access for NVIDIA's libraries that this crate does not call itself: another crate may load one,
//! and give it memory and a stream under the same rules as an operation of this crate.
//!
//! Memory that a call enters is in use until the call returns; from then on the order of the stream
//! protects it. A stream's first use of memory waits as `memory/gpu.rs` says, and a captured graph
//! keeps the memory that its work uses.
//!
//! ```
//! use ddp_kernels::foreign::{Library, functions};
//! use std::ffi::c_int;
//!
//! functions! {
//!     /// NCCL's functions that this example calls.
//!     pub struct Functions {
//!         fn ncclGetVersion(*mut c_int) -> c_int;
//!     }
//! }
//!
//! match Library::nccl(|library| Functions::load(library, "Install a newer one")) {
//!     Ok(_functions) => {}
//!     Err(why) => assert!(why.contains("NCCL"), "{why}"),
//! }
//! ```

use std::ffi::c_void;

use crate::cuda::Gpu;
use crate::cuda::nodes::{self, NodeKind};
use crate::error::{Caller, Result, Site};
pub use crate::library::{Library, functions};
use crate::storage::Borrow;
use crate::stream::Stream;
use crate::{Device, Tensor};

/// The most operands of one call.
pub const OPERANDS_MAX: usize = 64;

/// A tensor that a call uses.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// Its role in the call, for messages.
    pub role: &'static str,
    /// The elements, which must be row-major.
    pub tensor: &'a Tensor,
    /// Whether the call may change them. It may always read them.
    pub writes: bool,
}

/// Memory that was entered for one call, until this is dropped. Using the stream and the addresses
/// is unsafe, and allowed only while this exists.
#[derive(Debug)]
pub struct Entered<'a> {
    stream: *mut c_void,
    addresses: [u64; OPERANDS_MAX],
    borrows: [Option<Borrow<'a>>; OPERANDS_MAX],
    count: usize,
}

impl Entered<'_> {
    /// The driver's stream (the same as a `cudaStream_t`). While this thread captures, the graph's
    /// stream.
    pub fn stream(&self) -> *mut c_void {
        self.stream
    }

    /// The device address of each operand, in order.
    pub fn addresses(&self) -> &[u64] {
        &self.addresses[..self.count]
    }
}

/// Enters the memory of `operands` for work on `stream`, which must be a GPU's, and makes that
/// device's context current. Drop the result once the work is given to the stream.
///
/// The work may touch only the operands' elements and change only those entered for writing. It
/// must go to the stream that is entered, or to others that this one waits for before its next
/// work.
pub fn enter<'a>(
    op: &'static str,
    stream: &Stream,
    at: Site,
    operands: &[Operand<'a>],
) -> Result<Entered<'a>> {
    let by = Caller { op, at };
    let device = stream.device();
    let Some(queue) = stream.queue() else {
        let got = format!("one on {device}");
        return Err(by.value("stream", "one of a GPU", got));
    };
    if operands.len() > OPERANDS_MAX {
        let (most, got) = (format!("at most {OPERANDS_MAX}"), operands.len());
        return Err(by.value("operands", most, got));
    }
    let mut entered = Entered {
        stream: queue.raw().cast(),
        addresses: [0; OPERANDS_MAX],
        borrows: [const { None }; OPERANDS_MAX],
        count: operands.len(),
    };
    for (index, operand) in operands.iter().enumerate() {
        let tensor = operand.tensor;
        if tensor.device() != device {
            let expected = format!("a tensor on {device}, the stream's device");
            return Err(by.value(operand.role, expected, tensor));
        }
        if tensor.is_transposed() {
            let got = format!("{tensor}, transposed");
            let expected = "rows in order: call .contiguous() first";
            return Err(by.value(operand.role, expected, got));
        }
        let borrow = tensor.enter_for(operand.role, operand.writes, queue, by)?;
        entered.addresses[index] = borrow.address();
        entered.borrows[index] = Some(borrow);
    }
    queue.gpu.bind().map_err(|fault| fault.of(by, device))?;
    nodes::note(|notes| {
        notes.begin();
        for (operand, &address) in operands.iter().zip(entered.addresses()) {
            notes.operand(address, operand.tensor.bytes(), [true, operand.writes]);
        }
        notes.node(NodeKind::Foreign, op.into(), op, entered.addresses());
    });
    Ok(entered)
}

/// Makes the context of `device` current, for libraries that use the current device.
pub fn bind(device: Device, op: &'static str, at: Site) -> Result<()> {
    let by = Caller { op, at };
    let Device::Cuda(index) = device else {
        return Err(by.value("device", "a GPU", device));
    };
    Gpu::get(index, by)?
        .bind()
        .map_err(|fault| fault.of(by, device))
}

/// The number of this thread's capture of `stream`, if any. Each capture has its own number.
pub fn capture(stream: &Stream) -> Option<u64> {
    let capture = stream.queue()?.capture();
    (capture != 0).then_some(capture)
}
