//! Memory that every stream has for itself, made when an operation first needs it. It is freed when
//! another stream first needs some and neither handles nor graphs of its stream are left, so that a
//! process may make streams again and again.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

use super::GpuLaunch;
use crate::Tensor;
use crate::cuda::devices::GPUS_MAX;
use crate::cuda::queue::Queue;
use crate::error::Result;
use crate::panics::lock;
use crate::stream::Stream;

/// What one stream has.
struct StreamMemory {
    stream: Weak<Queue>,
    /// By name, with its address. Each tensor holds the stream.
    tensors: Vec<(&'static str, u64, Tensor)>,
}

/// By the stream's number, for each device.
static KEPT: [Mutex<BTreeMap<u64, StreamMemory>>; GPUS_MAX] =
    [const { Mutex::new(BTreeMap::new()) }; GPUS_MAX];

impl StreamMemory {
    /// Whether nothing else holds the stream. Graphs hold those that they were captured from.
    fn is_unused(&self) -> bool {
        self.stream.strong_count() <= self.tensors.len()
    }
}

impl GpuLaunch {
    /// The address of this stream's memory of this name, if it was made.
    pub(super) fn known_stream_memory(&self, name: &'static str) -> Option<u64> {
        let kept = lock(&KEPT[self.gpu.index]);
        let mut tensors = kept.get(&self.queue.id)?.tensors.iter();
        tensors
            .find(|(known, ..)| *known == name)
            .map(|&(_, address, _)| address)
    }

    /// The same, made if necessary: `bytes`, each of them `byte` if that is given.
    pub(super) fn stream_memory(
        &self,
        name: &'static str,
        bytes: usize,
        byte: Option<u8>,
    ) -> Result<u64> {
        if let Some(address) = self.known_stream_memory(name) {
            return Ok(address);
        }
        let current = Stream::current_queue(self.gpu.device(), self.by)?;
        assert!(
            Arc::ptr_eq(&current, &self.queue),
            "tensors would hold another stream"
        );
        lock(&KEPT[self.gpu.index]).retain(|_, memory| !memory.is_unused());
        let (tensor, address) = self.memory(name, bytes, byte)?;
        let mut kept = lock(&KEPT[self.gpu.index]);
        let own = kept.entry(self.queue.id).or_insert_with(|| StreamMemory {
            stream: Arc::downgrade(&self.queue),
            tensors: Vec::new(),
        });
        // Another thread may have made it since.
        match own.tensors.iter().find(|(known, ..)| *known == name) {
            Some((_, address, _)) => Ok(*address),
            None => {
                own.tensors.push((name, address, tensor));
                Ok(address)
            }
        }
    }
}
