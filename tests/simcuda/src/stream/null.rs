//! The null stream ("legacy default stream") and per-thread default streams.
//!
//! Work for the null stream of a device waits for everything given before to the blocking streams
//! of that device, and work given to those afterwards waits for it. Markers keep both orders: a
//! record at the end of one stream that the entry of the other is `after`.

use std::sync::Arc;

use cudarc::driver::sys::CUstream;

use super::queue::{create, marker};
use super::{Order, Stream};
use crate::error::CUresult;
use crate::event::Record;
use crate::handle::{HandleKind, StreamId, decode};
use crate::machine::{Machine, current_device};
use crate::report;

/// The stream of a handle. Null and CU_STREAM_LEGACY are the current device's null stream.
pub(crate) fn resolve(machine: &mut Machine, handle: CUstream) -> Result<StreamId, CUresult> {
    // The two numbers that cuda.h gives to CU_STREAM_LEGACY and CU_STREAM_PER_THREAD.
    match handle as usize {
        0 | 1 => legacy(machine),
        2 => per_thread(machine),
        _ => {
            let Some(stream) = decode(HandleKind::Stream, handle)
                .filter(|stream| *stream < machine.streams.all.len())
            else {
                return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
            };
            if let Some(destroyer) = machine.streams.all[stream].destroyed.clone() {
                let message = format!(
                    "stream {stream} is used after it was destroyed\n  destroyed in {}",
                    destroyer.stack
                );
                report::finding(machine, report::FindingKind::Handle, message);
                return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
            }
            Ok(stream)
        }
    }
}

fn legacy(machine: &mut Machine) -> Result<StreamId, CUresult> {
    let device = current_device(machine)?;
    Ok(legacy_of(machine, device))
}

/// The null stream of a device.
pub(crate) fn legacy_of(machine: &mut Machine, device: usize) -> StreamId {
    if let Some(stream) = machine.streams.legacy.get(&device) {
        return *stream;
    }
    let stream = create(machine, device, Order::Legacy, 0, 0);
    machine.streams.legacy.insert(device, stream);
    stream
}

fn per_thread(machine: &mut Machine) -> Result<StreamId, CUresult> {
    let device = current_device(machine)?;
    let key = (std::thread::current().id(), device);
    if let Some(stream) = machine.streams.per_thread.get(&key) {
        return Ok(*stream);
    }
    let stream = create(machine, device, Order::Blocking, 0, 0);
    machine.streams.per_thread.insert(key, stream);
    Ok(stream)
}

/// The blocking streams of a device, also those destroyed with something still in them.
fn blocking(machine: &Machine, device: usize) -> Vec<StreamId> {
    let streams = machine.streams.all.iter().enumerate();
    streams
        .filter(|(_, stream)| stream.device == device && stream.order == Order::Blocking)
        .map(|(id, _)| id)
        .collect()
}

/// The streams that the null stream waits for; none for any other stream.
pub(crate) fn blocking_of_null(machine: &Machine, stream: StreamId) -> Vec<StreamId> {
    let Stream { device, order, .. } = &machine.streams.all[stream];
    if *order == Order::Legacy {
        blocking(machine, *device)
    } else {
        Vec::new()
    }
}

/// What the next entry of `stream` must wait for by the null stream's rules.
pub(super) fn orders(machine: &mut Machine, stream: StreamId) -> Vec<Arc<Record>> {
    let device = machine.streams.all[stream].device;
    match machine.streams.all[stream].order {
        Order::Free => Vec::new(),
        Order::Blocking => {
            let Some(&null) = machine.streams.legacy.get(&device) else {
                return Vec::new();
            };
            let given = machine.streams.all[null].given;
            if std::mem::replace(&mut machine.streams.all[stream].is_behind_null, given) == given {
                return Vec::new();
            }
            vec![marker(machine, null)]
        }
        Order::Legacy => blocking(machine, device)
            .into_iter()
            .filter_map(|other| {
                let other_stream = &mut machine.streams.all[other];
                let given = other_stream.given;
                let is_new = std::mem::replace(&mut other_stream.null_is_behind, given) != given;
                is_new.then(|| marker(machine, other))
            })
            .collect(),
    }
}
