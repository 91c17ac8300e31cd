//! A tensor's bytes, and who is using them right now.
//!
//! THE ALIASING RULE. Tensors are handles: clones and views share one storage, and operations write into tensors
//! given to them. What keeps that free of data races is a list in every storage of the byte ranges in use. An
//! operation enters each of its operands before it touches a byte and leaves when it is done; a write may not
//! overlap anything, reads may overlap reads. Whoever comes second gets an error naming both operations, at once:
//! waiting would only hide a missing order. So safe code cannot race, and parts of one arena (two parameters'
//! gradients, say) can be worked on by two threads at the same time.
//!
//! On a GPU an operation leaves when it has been given to its stream; from then on the order of streams counts, and
//! `memory/gpu.rs` keeps the bytes. Host memory that a device copies from or to by itself stays in the list until that copy is
//! done, whatever becomes of the handle that would wait for it.

use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Device;
use crate::error::{OperandInfo, Result, Site, TensorInfo};
use crate::memory::Block;
use crate::stream::Event;

/// How a storage's contents came to be: what the hints about needless transfers go by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Made by a constructor that could have made it on any device.
    Computed,
    /// Filled from data that only the host has: a slice, a file.
    HostData,
    /// Copied here from another device, by the call at this line.
    Arrived(Device, Site),
}

/// The bytes behind one or more tensors.
pub(crate) struct Storage {
    block: Block,
    device: Device,
    bytes: usize,
    pub(crate) origin: Origin,
    pub(crate) made_at: Site,
    /// Host memory that a device copies from and to without a detour.
    pinned: bool,
    /// What the first tensor here was.
    info: TensorInfo,
    /// Whether any operation has used the contents since they were made; a transfer does not count.
    used: AtomicBool,
    /// Whether any operation or copy has changed the contents since they were made.
    changed: AtomicBool,
    in_use: Mutex<Vec<Use>>,
    /// How many of the references to this are graphs', which use it only when they are launched.
    held_by_graphs: AtomicUsize,
}

/// One entry in the list of ranges in use.
#[derive(Clone, Debug)]
pub(crate) struct Use {
    token: u64,
    start: usize,
    end: usize,
    pub(crate) writes: bool,
    pub(crate) op: &'static str,
    pub(crate) at: Site,
    /// A copy in flight: the entry is over when this has passed.
    until: Option<Event>,
}

impl Storage {
    /// `bytes` bytes on `device`, contents unspecified but initialised.
    pub(crate) fn new(
        device: Device,
        bytes: usize,
        origin: Origin,
        pinned: bool,
        info: TensorInfo,
        op: &'static str,
        at: Site,
    ) -> Result<Arc<Storage>> {
        let block = Block::new(device, bytes, pinned, info.clone(), op, at)?;
        Ok(Arc::new(Storage {
            block,
            device,
            bytes,
            origin,
            made_at: at,
            pinned,
            info,
            used: AtomicBool::new(false),
            changed: AtomicBool::new(false),
            in_use: Mutex::new(Vec::new()),
            held_by_graphs: AtomicUsize::new(0),
        }))
    }

    pub(crate) fn device(&self) -> Device {
        self.device
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn id(&self) -> u64 {
        self.block.id()
    }

    pub(crate) fn block(&self) -> &Block {
        &self.block
    }

    pub(crate) fn is_pinned(&self) -> bool {
        self.pinned
    }

    pub(crate) fn was_used(&self) -> bool {
        self.used.load(Ordering::Relaxed)
    }

    pub(crate) fn mark_used(&self) {
        self.used.store(true, Ordering::Relaxed);
    }

    pub(crate) fn was_changed(&self) -> bool {
        self.changed.load(Ordering::Relaxed)
    }

    pub(crate) fn mark_changed(&self) {
        self.used.store(true, Ordering::Relaxed);
        self.changed.store(true, Ordering::Relaxed);
    }

    /// Counts a reference of a graph's, or its end.
    pub(crate) fn count_graph(&self, one_more: bool) {
        if one_more {
            self.held_by_graphs.fetch_add(1, Ordering::Relaxed);
        } else {
            self.held_by_graphs.fetch_sub(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn graphs(&self) -> usize {
        self.held_by_graphs.load(Ordering::Relaxed)
    }

    fn list(&self) -> MutexGuard<'_, Vec<Use>> {
        // Only pushes and removals happen under this lock: a panic cannot leave the list half changed.
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a byte range, or says which use of it is in the way.
    pub(crate) fn enter(
        &self,
        range: Range<usize>,
        writes: bool,
        op: &'static str,
        at: Site,
    ) -> Result<Borrow<'_>, Box<Use>> {
        debug_assert!(range.end <= self.bytes);
        static NEXT_TOKEN: AtomicU64 = AtomicU64::new(0);
        let token = NEXT_TOKEN.fetch_add(1, Ordering::Relaxed);
        let mut list = self.list();
        let clash = |other: &Use| (writes || other.writes) && range.start < other.end && other.start < range.end;
        debug_assert!(range.start <= range.end);
        // An empty range is in nobody's way, wherever it lies.
        if !range.is_empty() {
            while let Some(position) = list.iter().position(clash) {
                if !list[position].until.as_ref().is_some_and(Event::is_done) {
                    return Err(Box::new(list[position].clone()));
                }
                list.swap_remove(position);
            }
            list.push(Use { token, start: range.start, end: range.end, writes, op, at, until: None });
        }
        drop(list);
        Ok(Borrow { storage: self, token, range, writes })
    }

    /// Leaves a range entered before once `until` has passed.
    fn leave_after(&self, token: u64, until: Event) {
        if let Some(entry) = self.list().iter_mut().find(|entry| entry.token == token) {
            entry.until = Some(until);
        }
    }

    /// For errors about the memory as a whole.
    pub(crate) fn as_operand(&self, role: &'static str) -> OperandInfo {
        OperandInfo { role, tensor: self.info.clone() }
    }

    /// Leaves a range entered before.
    fn leave(&self, token: u64) {
        let mut list = self.list();
        if let Some(position) = list.iter().position(|entry| entry.token == token) {
            list.swap_remove(position);
        }
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        let list = std::mem::take(self.in_use.get_mut().unwrap_or_else(PoisonError::into_inner));
        self.block.hold_until(list.into_iter().filter_map(|entry| entry.until));
    }
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Storage {} of {} bytes on {}", self.id(), self.bytes, self.device)
    }
}

/// The right to read, or to read and write, a byte range of a storage, until it is dropped.
#[derive(Debug)]
pub(crate) struct Borrow<'a> {
    storage: &'a Storage,
    token: u64,
    range: Range<usize>,
    writes: bool,
}

impl Borrow<'_> {
    /// The first byte of the range.
    fn pointer(&self) -> NonNull<u8> {
        // SAFETY: the range was checked against the storage's length when the tensor was made.
        unsafe { self.storage.block.pointer().add(self.range.start) }
    }

    /// Where the range begins, in its device's memory.
    pub(crate) fn address(&self) -> u64 {
        self.pointer().addr().get() as u64
    }

    /// The range as elements. The memory must be the host's.
    pub(crate) fn elements<T: crate::Element>(&self) -> &[T] {
        let count = self.check::<T>();
        // SAFETY: the bytes are initialised (memory.rs), aligned (the block to 256, offsets to whole elements),
        // any bit pattern is a T (Element is sealed to plain numbers), and the list of ranges in use keeps every
        // writer out while this borrow lives; `elements_mut` needs `&mut self`, so no slice of ours overlaps.
        unsafe { std::slice::from_raw_parts(self.pointer().cast().as_ptr(), count) }
    }

    /// The range as elements to write. The memory must be the host's.
    pub(crate) fn elements_mut<T: crate::Element>(&mut self) -> &mut [T] {
        let count = self.check::<T>();
        assert!(self.writes, "a borrow for reading was used for writing");
        // SAFETY: as in `elements`; besides, a writing borrow is the only entry that overlaps its range, and
        // `&mut self` makes this the only slice made from it.
        unsafe { std::slice::from_raw_parts_mut(self.pointer().cast().as_ptr(), count) }
    }

    /// Host memory that a device uses by itself until `until`: nobody else may before.
    pub(crate) fn leave_after(self, until: Event) {
        self.storage.leave_after(self.token, until);
        std::mem::forget(self);
    }

    fn check<T: crate::Element>(&self) -> usize {
        assert!(self.storage.device == Device::Cpu, "host access to memory of {}", self.storage.device);
        let size = size_of::<T>();
        assert!(self.range.start.is_multiple_of(size) && self.range.len().is_multiple_of(size));
        self.range.len() / size
    }
}

impl Drop for Borrow<'_> {
    fn drop(&mut self) {
        self.storage.leave(self.token);
    }
}
