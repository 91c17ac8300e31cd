//! The bytes themselves: which call of which device copies them, on which stream, and who waits for what.
//!
//! `now` is for calls after which both tensors may be used at once: host memory has been read or written when it returns, device
//! memory is in the order of the devices' current streams. `on` gives the copy to one stream and returns; what the host could see of it (pinned
//! memory) stays in the list of ranges in use until the copy is done.
//!
//! A call that fails may come after ones that did not, with the device at work on what they asked for. So after an error the streams are waited for,
//! and if even that fails the host's memory stays in use for ever (`settle`).

use std::sync::Arc;

use super::ledger::Kind;
use crate::cuda::fault::{Fault, Outcome};
use crate::cuda::peers::{Link, link};
use crate::cuda::queue::{Mark, Queue};
use crate::cuda::{Gpu, capture, copies};
use crate::error::{Error, Result, Site, TensorInfo};
use crate::shape::Shape;
use crate::storage::{Borrow, Origin, Storage};
use crate::stream::{Event, Stream};
use crate::{DType, Device, Tensor};

/// One copy, of entered tensors.
pub(super) struct Copy<'a> {
    pub(super) target: &'a Tensor,
    pub(super) source: &'a Tensor,
    pub(super) op: &'static str,
    pub(super) at: Site,
}

impl Copy<'_> {
    /// Copies so that both tensors may be used at once.
    pub(super) fn now(&self, target: &mut Borrow<'_>, source: &Borrow<'_>) -> Result<Kind> {
        let kind = Kind::between(self.source.device(), self.target.device());
        match (self.gpu(self.target)?, self.gpu(self.source)?) {
            (None, None) => crate::threads::copy(target.elements_mut::<u8>(), source.elements::<u8>()),
            (Some(_), None) => {
                let queue = self.current(self.target.device())?;
                self.upload(&queue, target, source)?;
                self.settle(&[&queue], &[source], queue.synchronize())?;
            }
            (None, Some(_)) => {
                let queue = self.current(self.source.device())?;
                self.download(&queue, target, source)?;
                self.settle(&[&queue], &[target], queue.synchronize())?;
            }
            (Some(gpu), Some(other)) if gpu.index == other.index => {
                self.within(&self.current(self.target.device())?, target, source)?;
            }
            (Some(_), Some(_)) => {
                // After what was given to the source's stream so far, and before what will be.
                let (queue, sources) = (self.current(self.target.device())?, self.current(self.source.device())?);
                let before = sources.record(false).and_then(|written| queue.wait(&written));
                self.fault(&queue, before)?;
                let kind = self.across(&queue, target, source)?;
                let after = queue.record(false).and_then(|read| sources.wait(&read));
                self.settle(&[&queue], &[], after)?;
                return Ok(kind);
            }
        }
        Ok(kind)
    }

    /// Gives the copy to `stream`; the event is the point after it.
    pub(super) fn on(&self, stream: &Stream, mut target: Borrow<'_>, source: Borrow<'_>) -> Result<(Kind, Event)> {
        let kind = Kind::between(self.source.device(), self.target.device());
        let (target_gpu, source_gpu) = (self.gpu(self.target)?, self.gpu(self.source)?);
        let Some(queue) = stream.queue() else {
            return Ok((self.now(&mut target, &source)?, stream.record()?));
        };
        match (target_gpu, source_gpu) {
            (None, None) => Ok((self.now(&mut target, &source)?, self.mark(queue, &[])?)),
            (Some(_), None) => {
                self.upload(queue, &target, &source)?;
                let done = self.mark(queue, &[&source])?;
                if self.source.is_pinned() {
                    source.leave_after(done.clone());
                } else {
                    self.settle(&[queue], &[&source], queue.synchronize())?;
                }
                Ok((kind, done))
            }
            (None, Some(_)) => {
                self.download(queue, &mut target, &source)?;
                let done = self.mark(queue, &[&target])?;
                if self.target.is_pinned() {
                    target.leave_after(done.clone());
                } else {
                    self.settle(&[queue], &[&target], queue.synchronize())?;
                }
                Ok((kind, done))
            }
            (Some(gpu), Some(other)) if gpu.index == other.index => {
                self.within(queue, &target, &source)?;
                Ok((kind, self.mark(queue, &[])?))
            }
            (Some(_), Some(_)) => Ok((self.across(queue, &target, &source)?, self.mark(queue, &[])?)),
        }
    }

    /// The point after all that `queue` was given so far, which includes a copy from or to `hosts`.
    fn mark(&self, queue: &Arc<Queue>, hosts: &[&Borrow<'_>]) -> Result<Event> {
        let mark = self.settle(&[queue], hosts, queue.record(false))?;
        Ok(Event::of(mark, queue.gpu.device()))
    }

    /// The outcome of a call in the course of a copy on `queues` from or to memory of the host. On an error nothing of the copy is under way any more
    /// when this returns, or that memory stays in use for ever.
    fn settle<T>(&self, queues: &[&Arc<Queue>], hosts: &[&Borrow<'_>], outcome: Outcome<T>) -> Result<T> {
        outcome.map_err(|fault| {
            // All of them, also after one that fails.
            let waited: Vec<bool> = queues.iter().map(|queue| queue.synchronize().is_ok()).collect();
            if waited.contains(&false) {
                hosts.iter().for_each(|host| host.leave_never());
            }
            fault.of(self.op, queues[0].gpu.device(), self.at)
        })
    }

    /// The GPU that a tensor's memory is of.
    fn gpu(&self, tensor: &Tensor) -> Result<Option<&'static Gpu>> {
        match tensor.device() {
            Device::Cuda(index) if tensor.device().is_accelerator() => Gpu::get(index, self.op, self.at).map(Some),
            _ => Ok(None),
        }
    }

    fn current(&self, device: Device) -> Result<Arc<Queue>> {
        let stream = Stream::current_at(device, self.op, self.at)?;
        Ok(stream.queue().expect("a GPU's stream").clone())
    }

    fn fault<T>(&self, queue: &Queue, outcome: Outcome<T>) -> Result<T> {
        outcome.map_err(|fault: Fault| fault.of(self.op, queue.gpu.device(), self.at))
    }

    /// A graph that copied from host memory would copy whatever is there at each launch.
    fn refuse_capture(&self, queue: &Queue) -> Result<()> {
        if !queue.is_captured() && !capture::is_capturing() {
            return Ok(());
        }
        let (from, to) = (self.source.device(), self.target.device());
        let why = if self.op == "item" {
            "a graph hands no number to the host. Leave the result in its tensor, and call item() after the launch"
                .to_string()
        } else {
            format!("a graph copies nothing from {from} to {to}. Copy before the capture, or after each launch")
        };
        Err(Error::Capture { op: self.op, device: queue.gpu.device(), why, at: self.at })
    }

    fn upload(&self, queue: &Arc<Queue>, target: &Borrow<'_>, source: &Borrow<'_>) -> Result<()> {
        self.refuse_capture(queue)?;
        self.target.storage().block().visit(queue, self.op, self.at)?;
        let bytes = source.elements::<u8>();
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: both are entered, the target's memory is the stream's device's (`visit`), as long as the source. The callers wait for the copy, or
        // leave the range in use until it is done.
        let outcome = unsafe { copies::upload(queue, target.address(), bytes.as_ptr(), bytes.len()) };
        self.settle(&[queue], &[source], outcome)
    }

    fn download(&self, queue: &Arc<Queue>, target: &mut Borrow<'_>, source: &Borrow<'_>) -> Result<()> {
        self.refuse_capture(queue)?;
        self.source.storage().block().visit(queue, self.op, self.at)?;
        let bytes = target.elements_mut::<u8>();
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: as in `upload`, the other way round.
        let outcome = unsafe { copies::download(queue, bytes.as_mut_ptr(), source.address(), bytes.len()) };
        self.settle(&[queue], &[target], outcome)
    }

    fn within(&self, queue: &Arc<Queue>, target: &Borrow<'_>, source: &Borrow<'_>) -> Result<()> {
        for tensor in [self.target, self.source] {
            tensor.join_capture(queue);
            tensor.storage().block().visit(queue, self.op, self.at)?;
        }
        if self.source.bytes() == 0 {
            return Ok(());
        }
        // SAFETY: both are entered, one of them for writing, so they do not overlap; both are the stream's device's.
        let outcome = unsafe { copies::within(queue, target.address(), source.address(), self.source.bytes()) };
        self.fault(queue, outcome)
    }

    /// From one GPU to another, on a stream of either.
    fn across(&self, queue: &Arc<Queue>, target: &Borrow<'_>, source: &Borrow<'_>) -> Result<Kind> {
        self.refuse_capture(queue)?;
        let bytes = self.source.bytes();
        let (Some(target_gpu), Some(source_gpu)) = (self.gpu(self.target)?, self.gpu(self.source)?) else {
            unreachable!("only tensors on GPUs come here")
        };
        let link = self.fault(queue, link(target_gpu, source_gpu))?;
        for tensor in [self.target, self.source] {
            tensor.storage().block().visit(queue, self.op, self.at)?;
        }
        if bytes == 0 {
            return Ok(Kind::Peer);
        }
        let (to, from) = ((target.address(), target_gpu), (source.address(), source_gpu));
        match link {
            Link::Direct => {
                // SAFETY: both are entered and stay: whoever drops them frees them after this stream (`visit`).
                let outcome = unsafe { copies::peer(queue, to, from, bytes) };
                self.settle(&[queue], &[], outcome)?;
                Ok(Kind::Peer)
            }
            Link::Staged => {
                self.staged(queue, to, from, bytes)?;
                Ok(Kind::Staged)
            }
        }
    }

    fn staged(
        &self,
        queue: &Arc<Queue>,
        to: (u64, &'static Gpu),
        from: (u64, &'static Gpu),
        bytes: usize,
    ) -> Result<()> {
        let stage_bytes = bytes.min(copies::STAGE_BYTES);
        let stages = [self.stage(stage_bytes)?, self.stage(if bytes > stage_bytes { stage_bytes } else { 0 })?];
        let mut entered = Vec::with_capacity(2);
        for stage in &stages {
            let range = 0..stage.bytes();
            entered.push(stage.enter(range, true, self.op, self.at).expect("nobody else has the stage"));
        }
        let [first, second] = &mut entered[..] else { unreachable!("two stages") };
        let pointers = [first.elements_mut::<u8>().as_mut_ptr(), second.elements_mut::<u8>().as_mut_ptr()];
        let sides = self.fault(queue, copies::sides(queue, to.1, from.1))?;
        // Freed after the sides too: should this fail half-way, they are ordered before nothing of `queue`.
        for tensor in [self.target, self.source] {
            tensor.storage().block().adopt(&sides.down);
            tensor.storage().block().adopt(&sides.up);
        }
        // SAFETY: both tensors are entered, and whoever drops them frees them after both sides. The stages are pinned, ours alone, and stay in use
        // until the mark below has passed; after an error `settle` waits for both sides, or leaves them for ever.
        let outcome = unsafe { copies::staged(queue, &sides, to.0, from.0, bytes, pointers) };
        let stages_entered: Vec<&Borrow<'_>> = entered.iter().collect();
        let done: Mark = self.settle(&[&sides.up, &sides.down], &stages_entered, outcome)?;
        let done = Event::of(done, to.1.device());
        for stage in entered {
            stage.leave_after(done.clone());
        }
        Ok(())
    }

    fn stage(&self, bytes: usize) -> Result<Arc<Storage>> {
        let shape = Shape::new(&[bytes])?;
        let info = TensorInfo { name: Some("stage".into()), dtype: DType::U8, shape, device: Device::Cpu };
        Storage::new(Device::Cpu, bytes, Origin::HostData, true, info, self.op, self.at)
    }
}

/// The one element of a tensor on a GPU.
pub(super) fn element<T: crate::Element>(
    tensor: &Tensor,
    entered: &Borrow<'_>,
    op: &'static str,
    at: Site,
) -> Result<T> {
    let stream = Stream::current_at(tensor.device(), op, at)?;
    let queue = stream.queue().expect("a GPU's stream");
    // On the heap, where it can stay if nobody can say when the device is done with it.
    let mut value = Box::new(T::from_f64(0.0));
    let copy = Copy { target: tensor, source: tensor, op, at };
    copy.refuse_capture(queue)?;
    tensor.storage().block().visit(queue, op, at)?;
    // SAFETY: the tensor is entered and has one element of this type; the value is ours, and is not touched before the stream has passed.
    let outcome = unsafe { copies::download(queue, (&raw mut *value).cast(), entered.address(), size_of::<T>()) };
    if let Err(fault) = outcome.and_then(|()| queue.synchronize()) {
        if queue.synchronize().is_err() {
            Box::leak(value);
        }
        return copy.fault(queue, Err(fault));
    }
    Ok(*value)
}
