//! Copies the bytes: which call on which stream, and what waits for it.
//!
//! `now` leaves both tensors ready for use: host memory is read or written when it returns, and
//! device memory is ordered on the devices' current streams. `on` gives the copy to one stream and
//! returns; pinned memory stays in the list of ranges in use until the copy is done.
//!
//! A call may fail after earlier ones have queued work on the device. So after an error the host
//! waits for the stream, and if that fails too, the host memory stays in use (`settle`).

use std::sync::Arc;

use super::ledger::TransferKind;
use crate::cuda::calls::Outcome;
use crate::cuda::queue::{Queue, is_capturing};
use crate::cuda::{Gpu, copies};
use crate::error::{Caller, Result};
use crate::storage::Borrow;
use crate::stream::{Event, Stream, gpu_of};
use crate::{Device, Tensor};

/// One copy between entered tensors.
pub(super) struct Copy<'a> {
    target: &'a Tensor,
    source: &'a Tensor,
    by: Caller,
}

impl<'a> Copy<'a> {
    pub(super) fn new(target: &'a Tensor, source: &'a Tensor, by: Caller) -> Copy<'a> {
        Copy { target, source, by }
    }

    /// Copies so that both tensors may be used at once.
    pub(super) fn now(&self, target: &mut Borrow<'_>, source: &Borrow<'_>) -> Result<TransferKind> {
        let (to, from) = (self.target.device(), self.source.device());
        let kind = TransferKind::between(from, to);
        if to == Device::Cpu && from == Device::Cpu {
            crate::threads::copy(target.elements_mut::<u8>(), source.elements::<u8>());
            return Ok(kind);
        }
        // The target's stream, if that is on a GPU, else the source's.
        let device = if to == Device::Cpu { from } else { to };
        let queue = Stream::current_queue(device, self.by)?;
        if to == Device::Cpu {
            self.download(&queue, target, source)?;
            self.settle(&queue, Some(target), queue.synchronize())?;
        } else if from == Device::Cpu {
            self.upload(&queue, target, source)?;
            self.settle(&queue, Some(source), queue.synchronize())?;
        } else if to == from {
            self.within(&queue, target, source)?;
        } else {
            // After the earlier work of the source's stream, and before its later work.
            let sources = Stream::current_queue(from, self.by)?;
            let written = sources.record(false).and_then(|mark| queue.wait(&mark));
            self.settle(&queue, None, written)?;
            let kind = self.between(&queue, target, source)?;
            let read = queue.record(false).and_then(|mark| sources.wait(&mark));
            self.settle(&queue, None, read)?;
            return Ok(kind);
        }
        Ok(kind)
    }

    /// Gives the copy to `stream`; the event is the point after it.
    pub(super) fn on(
        &self,
        stream: &Stream,
        mut target: Borrow<'_>,
        source: Borrow<'_>,
    ) -> Result<(TransferKind, Event)> {
        let (to, from) = (self.target.device(), self.source.device());
        let kind = TransferKind::between(from, to);
        let Some(queue) = stream.queue() else {
            return Ok((self.now(&mut target, &source)?, stream.record()?));
        };
        // Host memory that the copy uses, and whether it may continue after this returns.
        let (host, pinned) = if to == Device::Cpu {
            self.download(queue, &mut target, &source)?;
            (target, self.target.is_pinned())
        } else if from == Device::Cpu {
            self.upload(queue, &target, &source)?;
            (source, self.source.is_pinned())
        } else if to == from {
            self.within(queue, &target, &source)?;
            return Ok((kind, self.mark(queue, None)?));
        } else {
            let kind = self.between(queue, &target, &source)?;
            return Ok((kind, self.mark(queue, None)?));
        };
        let done = self.mark(queue, Some(&host))?;
        if pinned {
            host.leave_after(done.clone());
        } else {
            self.settle(queue, Some(&host), queue.synchronize())?;
        }
        Ok((kind, done))
    }

    /// The point after all work of `queue` so far, which includes a copy from or to `host`.
    fn mark(&self, queue: &Arc<Queue>, host: Option<&Borrow<'_>>) -> Result<Event> {
        let mark = self.settle(queue, host, queue.record(false))?;
        Ok(Event::of(mark, queue.gpu.device()))
    }

    /// Checks the outcome of starting a copy on `queue`, from or to `host`. After an error it waits
    /// until the copy has stopped, or else keeps the memory borrowed.
    fn settle<T>(
        &self,
        queue: &Queue,
        host: Option<&Borrow<'_>>,
        outcome: Outcome<T>,
    ) -> Result<T> {
        outcome.map_err(|fault| {
            if let Some(host) = host
                && queue.synchronize().is_err()
            {
                host.leave_never();
            }
            fault.of(self.by, queue.gpu.device())
        })
    }

    /// Refuses a copy during a capture: a graph would repeat it with whatever memory holds then.
    fn refuse_capture(&self, queue: &Queue) -> Result<()> {
        if !is_capturing() {
            return Ok(());
        }
        let is_item = self.by.op == "item";
        let from = self.source.device();
        let to = if is_item {
            Device::Cpu
        } else {
            self.target.device()
        };
        let why = format!("a graph cannot copy from {from} to {to}");
        let help = if is_item {
            "leave the result in its tensor and call item() after the launch"
        } else {
            "copy before the capture, or after each launch"
        };
        Err(self.by.capture(queue.gpu.device(), why, help))
    }

    fn visit(&self, tensor: &Tensor, queue: &Arc<Queue>) -> Result<()> {
        tensor.storage().block.visit(queue, self.by)
    }

    fn upload(&self, queue: &Arc<Queue>, target: &Borrow<'_>, source: &Borrow<'_>) -> Result<()> {
        self.refuse_capture(queue)?;
        self.visit(self.target, queue)?;
        let bytes = source.elements::<u8>();
        if bytes.is_empty() {
            return Ok(());
        }
        let (to, from) = (target.address(), bytes.as_ptr());
        // SAFETY: both are entered and of the same length, and the target is on the stream's
        // device. The callers wait for the copy, or keep the range in use until it is done.
        let outcome = unsafe { copies::upload(queue, to, from, bytes.len()) };
        self.settle(queue, Some(source), outcome)
    }

    fn download(
        &self,
        queue: &Arc<Queue>,
        target: &mut Borrow<'_>,
        source: &Borrow<'_>,
    ) -> Result<()> {
        self.refuse_capture(queue)?;
        self.visit(self.source, queue)?;
        let bytes = target.elements_mut::<u8>();
        if bytes.is_empty() {
            return Ok(());
        }
        let (to, from) = (bytes.as_mut_ptr(), source.address());
        // SAFETY: as in `upload`, with source and target exchanged.
        let outcome = unsafe { copies::download(queue, to, from, bytes.len()) };
        self.settle(queue, Some(target), outcome)
    }

    fn within(&self, queue: &Arc<Queue>, target: &Borrow<'_>, source: &Borrow<'_>) -> Result<()> {
        for tensor in [self.target, self.source] {
            tensor.join_capture(queue);
            self.visit(tensor, queue)?;
        }
        let bytes = self.source.bytes();
        if bytes == 0 {
            return Ok(());
        }
        let (to, from) = (target.address(), source.address());
        // SAFETY: both are entered, one of them for writing, so they do not overlap; both are on
        // the stream's device.
        let outcome = unsafe { copies::within(queue, to, from, bytes) };
        self.settle(queue, None, outcome)
    }

    /// From one GPU to another, on a stream of either.
    fn between(
        &self,
        queue: &Arc<Queue>,
        target: &Borrow<'_>,
        source: &Borrow<'_>,
    ) -> Result<TransferKind> {
        self.refuse_capture(queue)?;
        let (target_gpu, source_gpu) = (self.gpu(self.target)?, self.gpu(self.source)?);
        let linked = self.settle(queue, None, copies::are_linked(target_gpu, source_gpu))?;
        for tensor in [self.target, self.source] {
            self.visit(tensor, queue)?;
        }
        let bytes = self.source.bytes();
        if bytes > 0 {
            let to = (target.address(), target_gpu);
            let from = (source.address(), source_gpu);
            // SAFETY: both are entered, and they are freed after this stream's work (`visit`).
            let outcome = unsafe { copies::between(queue, to, from, bytes) };
            self.settle(queue, None, outcome)?;
        }
        Ok(if linked || bytes == 0 {
            TransferKind::Peer
        } else {
            TransferKind::Staged
        })
    }

    fn gpu(&self, tensor: &Tensor) -> Result<&'static Gpu> {
        let gpu = gpu_of(tensor.device(), self.by)?;
        Ok(gpu.expect("only tensors on GPUs come here"))
    }
}

/// The one element of a tensor on a GPU.
pub(super) fn element<T: crate::Element>(
    tensor: &Tensor,
    entered: &Borrow<'_>,
    by: Caller,
) -> Result<T> {
    let queue = &Stream::current_queue(tensor.device(), by)?;
    let copy = Copy::new(tensor, tensor, by);
    copy.refuse_capture(queue)?;
    copy.visit(tensor, queue)?;
    // On the heap, where it can stay if the device may still be writing to it.
    let mut value = Box::new(T::from_f64(0.0));
    let to = (&raw mut *value).cast();
    // SAFETY: the tensor is entered and has one element of this type; the value is not touched
    // before the stream has passed.
    let outcome = unsafe { copies::download(queue, to, entered.address(), size_of::<T>()) };
    if let Err(fault) = outcome.and_then(|()| queue.synchronize()) {
        if queue.synchronize().is_err() {
            Box::leak(value);
        }
        return Err(fault.of(by, queue.gpu.device()));
    }
    Ok(*value)
}
