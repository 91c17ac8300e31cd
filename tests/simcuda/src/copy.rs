//! Copies and fills: what may be copied where, when the host's bytes are read, and which calls
//! wait.
//!
//! As the driver documents ("API synchronization behavior"): between device and pinned memory an
//! asynchronous copy only queues. To pageable memory it "might be synchronous": here the schedule
//! decides, and nothing is promised. From pageable memory it has read its source when it returns;
//! drivers do this, and programs rely on it. A synchronous copy to the host, or from pinned memory,
//! is complete when it returns. A synchronous copy from pageable memory has waited for the stream
//! and read its source, but may still be in flight.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{CUcontext, CUdeviceptr, CUstream};

use crate::context;
use crate::error::CUresult;
use crate::graph::capture;
use crate::handle::StreamId;
use crate::machine::{self, LockedMachine, Machine};
use crate::report::{self, FindingKind};
use crate::scheduler;
use crate::stream;
use crate::work::{Address, Failure, Memory, Reads, Touched, Work};

/// One end of a copy.
#[derive(Debug)]
enum End {
    /// Memory that the machine knows: device or pinned memory.
    Known(Address),
    /// Pageable host memory.
    Pageable(Address),
    /// The contents of pageable memory at the time of the call.
    Staged(Box<[u8]>),
}

impl End {
    fn known(&self) -> Option<Address> {
        if let Self::Known(address) = self {
            Some(*address)
        } else {
            None
        }
    }
}

/// A copy that a stream runs.
struct Copy {
    name: &'static str,
    to: End,
    from: End,
    bytes: u64,
    /// Both ends are on this device; decides the simulated duration.
    is_local: bool,
}

impl Work for Copy {
    fn describe(&self) -> String {
        format!("{} of {} bytes", self.name, self.bytes)
    }

    fn known_ranges(&self) -> Touched {
        let range = |end: &End| {
            end.known()
                .map(|address| address..address + self.bytes)
                .into_iter()
                .collect()
        };
        Touched {
            reads: range(&self.from),
            writes: range(&self.to),
            ..Touched::default()
        }
    }

    fn reads(&self) -> Reads {
        Reads::Copied
    }

    fn run(
        &self,
        _device: usize,
        memory: &dyn Memory,
        touched: &mut Touched,
    ) -> Result<(), Failure> {
        *touched = self.known_ranges();
        if let End::Pageable(address) = self.to {
            touched.writes.push(address..address + self.bytes);
            // The host no longer waits for it, and the caller may have released the memory.
            if machine::IS_ENDING.load(std::sync::atomic::Ordering::Relaxed) {
                return Ok(());
            }
        }
        let to = match &self.to {
            End::Known(address) | End::Pageable(address) => memory.host_pointer(*address),
            End::Staged(_) => unreachable!("nothing is copied to a staged source"),
        };
        let from = match &self.from {
            End::Known(address) | End::Pageable(address) => {
                memory.host_pointer(*address).cast_const()
            }
            End::Staged(bytes) => bytes.as_ptr(),
        };
        // SAFETY: known ranges were checked when this was queued and are checked again before it
        // runs. The caller of the copy vouches for a pageable end until it has waited. Copies whose
        // ends overlap are not queued.
        unsafe { std::ptr::copy_nonoverlapping(from, to, self.bytes as usize) };
        Ok(())
    }

    fn duration_ns(&self) -> u64 {
        // Half the memory rate within a device, else the rate of a link; only the order of
        // magnitude matters.
        2_000 + self.bytes / if self.is_local { 1_000 } else { 20 }
    }
}

/// A fill that a stream runs.
struct Fill {
    name: &'static str,
    to: Address,
    element: u32,
    element_bytes: u64,
    count: u64,
}

impl Work for Fill {
    fn describe(&self) -> String {
        format!("{} of {} elements", self.name, self.count)
    }

    fn known_ranges(&self) -> Touched {
        let range = self.to..self.to + self.count * self.element_bytes;
        Touched {
            writes: vec![range],
            ..Touched::default()
        }
    }

    fn run(
        &self,
        _device: usize,
        memory: &dyn Memory,
        touched: &mut Touched,
    ) -> Result<(), Failure> {
        let to = memory.host_pointer(self.to);
        let count = self.count as usize;
        // SAFETY: the range was checked when this was queued and again before it runs, and starts
        // at a multiple of the element size.
        unsafe {
            match self.element_bytes {
                1 => std::ptr::write_bytes(to, self.element as u8, count),
                2 => std::slice::from_raw_parts_mut(to.cast::<u16>(), count)
                    .fill(self.element as u16),
                _ => std::slice::from_raw_parts_mut(to.cast::<u32>(), count).fill(self.element),
            }
        }
        *touched = self.known_ranges();
        Ok(())
    }

    fn duration_ns(&self) -> u64 {
        2_000 + self.count * self.element_bytes / 1_000
    }
}

/// The kind of memory that the caller claims.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    /// The machine must know it as device (or pinned) memory.
    Device,
    /// Host memory, pinned or not.
    Host,
    /// Decided by the address.
    Any,
}

/// A known end is watched and checked. An end that is claimed to be a device's is known, or the
/// check reports it.
fn is_known(machine: &Machine, address: Address, side: Side) -> bool {
    side == Side::Device || machine.memory.knows(address)
}

/// The copy of a call, and whether the caller must wait for it.
struct Request {
    name: &'static str,
    to: (Address, Side),
    from: (Address, Side),
    bytes: u64,
}

/// Which ends of a copy are pageable memory.
#[derive(Clone, Copy, Default)]
struct Pageable {
    to: bool,
    from: bool,
}

/// Whether a copy involves no device; it is then complete when its call returns.
fn is_between_hosts(machine: &Machine, request: &Request) -> bool {
    let is_host = |address| {
        machine
            .memory
            .holding(address)
            .is_none_or(|found| found.owner.device().is_none())
    };
    request.bytes > 0 && is_host(request.to.0) && is_host(request.from.0)
}

/// Queues a copy.
fn queue(machine: &mut Machine, request: &Request, stream: StreamId) -> Result<Pageable, CUresult> {
    let Request {
        name,
        to,
        from,
        bytes,
    } = *request;
    if bytes == 0 {
        return Ok(Pageable::default());
    }
    if to.0.checked_add(bytes).is_none()
        || from.0.checked_add(bytes).is_none()
        || to.0 == 0
        || from.0 == 0
    {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    if to.0 < from.0 + bytes && from.0 < to.0 + bytes {
        let message = format!(
            "{name} of {bytes} bytes: source and destination overlap, which leaves the result undefined\n  destination: bytes {}\n  \
             source: bytes {}",
            machine.memory.describe(&(to.0..to.0 + bytes)),
            machine.memory.describe(&(from.0..from.0 + bytes))
        );
        report::finding(machine, FindingKind::Race, message);
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let (to_known, from_known) = (
        is_known(machine, to.0, to.1),
        is_known(machine, from.0, from.1),
    );
    if stream::is_capturing(machine, stream) && !(to_known && from_known) {
        let message = format!(
            "{name} of {bytes} bytes with pageable memory of the host (the graph would keep its address and use whatever is there at \
             each launch: use pinned memory)"
        );
        return Err(capture::unsupported(machine, stream, &message));
    }
    let from_end = if from_known {
        End::Known(from.0)
    } else {
        // SAFETY: the caller of the copy vouches for `bytes` readable bytes of host memory there.
        // They are read now, as documented.
        End::Staged(
            unsafe { std::slice::from_raw_parts(from.0 as *const u8, bytes as usize) }.into(),
        )
    };
    let to_end = if to_known {
        End::Known(to.0)
    } else {
        End::Pageable(to.0)
    };
    let home = |address| {
        machine
            .memory
            .holding(address)
            .and_then(|found| found.owner.device())
    };
    let is_local = home(to.0).is_some() && home(to.0) == home(from.0);
    let work = Copy {
        name,
        to: to_end,
        from: from_end,
        bytes,
        is_local,
    };
    stream::enqueue(machine, stream, Arc::new(work))?;
    Ok(Pageable {
        to: !to_known,
        from: !from_known,
    })
}

/// A copy in a stream.
fn copy_async(request: Request, stream: CUstream) -> CUresult {
    machine::call_waiting(request.name, |machine: &mut LockedMachine| {
        let stream = stream::resolve(machine, stream)?;
        let Pageable { to, .. } = queue(machine, &request, stream)?;
        if is_between_hosts(machine, &request) && !stream::is_capturing(machine, stream) {
            return scheduler::synchronize_stream(machine, stream);
        }
        if to {
            let goal = scheduler::goal_stream(machine, stream);
            return scheduler::perhaps_wait(machine, &goal);
        }
        Ok(())
    })
}

/// A copy of the synchronous kind, in the null stream.
fn copy_sync(request: Request) -> CUresult {
    machine::call_waiting(request.name, |machine: &mut LockedMachine| {
        machine::current_device(machine)?;
        capture::forbid(machine, request.name)?;
        let stream = stream::resolve(machine, std::ptr::null_mut())?;
        // Before the copy is queued, because a copy from pageable memory is not waited for: errors
        // must surface first.
        let before = scheduler::goal_stream(machine, stream);
        let Pageable { to, from } = queue(machine, &request, stream)?;
        if from && !to {
            return scheduler::wait_for(machine, &before);
        }
        scheduler::synchronize_stream(machine, stream)
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: CUdeviceptr,
    from: *const c_void,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    let (to, from) = ((to, Side::Device), (from as Address, Side::Host));
    copy_async(
        Request {
            name: "cuMemcpyHtoDAsync_v2",
            to,
            from,
            bytes: bytes as u64,
        },
        stream,
    )
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    let (to, from) = ((to as Address, Side::Host), (from, Side::Device));
    copy_async(
        Request {
            name: "cuMemcpyDtoHAsync_v2",
            to,
            from,
            bytes: bytes as u64,
        },
        stream,
    )
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(
    to: CUdeviceptr,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    let (to, from) = ((to, Side::Device), (from, Side::Device));
    copy_async(
        Request {
            name: "cuMemcpyDtoDAsync_v2",
            to,
            from,
            bytes: bytes as u64,
        },
        stream,
    )
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyAsync(
    to: CUdeviceptr,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    let (to, from) = ((to, Side::Any), (from, Side::Any));
    copy_async(
        Request {
            name: "cuMemcpyAsync",
            to,
            from,
            bytes: bytes as u64,
        },
        stream,
    )
}

/// See the driver's documentation. The driver stages copies between devices without peer access.
/// That is a finding unless the program has called cuDeviceCanAccessPeer.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyPeerAsync(
    to: CUdeviceptr,
    to_context: CUcontext,
    from: CUdeviceptr,
    from_context: CUcontext,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    machine::call("cuMemcpyPeerAsync", |machine| {
        let stream = stream::resolve(machine, stream)?;
        for (address, handle) in [(to, to_context), (from, from_context)] {
            let said = context::resolve(machine, handle)?;
            let Some(found) = machine.memory.holding(address) else {
                continue;
            };
            if let Some(home) = found.owner.device().filter(|home| *home != said) {
                let message = format!(
                    "cuMemcpyPeerAsync of {bytes} bytes: the context of device {said} was given for memory of device {home}: {found}"
                );
                report::finding(machine, FindingKind::WrongDevice, message);
                return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
            }
        }
        let request = Request {
            name: "cuMemcpyPeerAsync",
            to: (to, Side::Device),
            from: (from, Side::Device),
            bytes: bytes as u64,
        };
        queue(machine, &request, stream).map(|_| ())
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(
    to: CUdeviceptr,
    from: *const c_void,
    bytes: usize,
) -> CUresult {
    let (to, from) = ((to, Side::Device), (from as Address, Side::Host));
    copy_sync(Request {
        name: "cuMemcpyHtoD_v2",
        to,
        from,
        bytes: bytes as u64,
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(
    to: *mut c_void,
    from: CUdeviceptr,
    bytes: usize,
) -> CUresult {
    let (to, from) = ((to as Address, Side::Host), (from, Side::Device));
    copy_sync(Request {
        name: "cuMemcpyDtoH_v2",
        to,
        from,
        bytes: bytes as u64,
    })
}

/// See the driver's documentation. It is ordered in the null stream and not waited for.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoD_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> CUresult {
    machine::call("cuMemcpyDtoD_v2", |machine| {
        let stream = stream::resolve(machine, std::ptr::null_mut())?;
        let (to, from) = ((to, Side::Device), (from, Side::Device));
        queue(
            machine,
            &Request {
                name: "cuMemcpyDtoD_v2",
                to,
                from,
                bytes: bytes as u64,
            },
            stream,
        )
        .map(|_| ())
    })
}

fn fill(
    name: &'static str,
    to: CUdeviceptr,
    element: u32,
    element_bytes: u64,
    count: usize,
    stream: CUstream,
) -> CUresult {
    machine::call(name, |machine| {
        let stream = stream::resolve(machine, stream)?;
        queue_fill(machine, name, to, (element, element_bytes), count, stream)
    })
}

/// Queues a fill with an element of some size.
fn queue_fill(
    machine: &mut Machine,
    name: &'static str,
    to: CUdeviceptr,
    (element, element_bytes): (u32, u64),
    count: usize,
    stream: StreamId,
) -> Result<(), CUresult> {
    let count = count as u64;
    if count == 0 {
        return Ok(());
    }
    let end = count
        .checked_mul(element_bytes)
        .and_then(|bytes| bytes.checked_add(to));
    if end.is_none() || !to.is_multiple_of(element_bytes) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    stream::enqueue(
        machine,
        stream,
        Arc::new(Fill {
            name,
            to,
            element,
            element_bytes,
            count,
        }),
    )
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(
    to: CUdeviceptr,
    value: u8,
    count: usize,
    stream: CUstream,
) -> CUresult {
    fill("cuMemsetD8Async", to, value.into(), 1, count, stream)
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD16Async(
    to: CUdeviceptr,
    value: u16,
    count: usize,
    stream: CUstream,
) -> CUresult {
    fill("cuMemsetD16Async", to, value.into(), 2, count, stream)
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32Async(
    to: CUdeviceptr,
    value: u32,
    count: usize,
    stream: CUstream,
) -> CUresult {
    fill("cuMemsetD32Async", to, value, 4, count, stream)
}

/// A synchronous fill in the null stream: waits only if it fills pinned memory.
fn fill_sync(
    name: &'static str,
    to: CUdeviceptr,
    element: u32,
    element_bytes: u64,
    count: usize,
) -> CUresult {
    machine::call_waiting(name, |machine: &mut LockedMachine| {
        machine::current_device(machine)?;
        capture::forbid(machine, name)?;
        let stream = stream::resolve(machine, std::ptr::null_mut())?;
        queue_fill(machine, name, to, (element, element_bytes), count, stream)?;
        let is_pinned = machine
            .memory
            .holding(to)
            .is_some_and(|found| found.owner.device().is_none());
        if is_pinned {
            scheduler::synchronize_stream(machine, stream)
        } else {
            Ok(())
        }
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8_v2(to: CUdeviceptr, value: u8, count: usize) -> CUresult {
    fill_sync("cuMemsetD8_v2", to, value.into(), 1, count)
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32_v2(to: CUdeviceptr, value: u32, count: usize) -> CUresult {
    fill_sync("cuMemsetD32_v2", to, value, 4, count)
}
