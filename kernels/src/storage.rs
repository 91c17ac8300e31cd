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
//! done, whatever becomes of the handle that would wait for it. Where that cannot be known, after a copy that failed half-way, it stays for ever.

use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Device;
use crate::error::{Result, Site, TensorInfo};
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
    /// Whether any operation has used the contents since they were made; a transfer does not count.
    used: AtomicBool,
    /// Whether any operation or copy has changed the contents since they were made.
    changed: AtomicBool,
    in_use: Mutex<List>,
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
    until: Until,
}

/// When a use is over.
#[derive(Clone, Debug)]
enum Until {
    /// When the call that entered the range leaves it.
    Call,
    /// A copy in flight: when this has passed.
    Event(Event),
    /// Nobody can say: a copy failed, and the device may still be at it.
    Never,
}

impl Until {
    fn is_over(&self) -> bool {
        matches!(self, Until::Event(event) if event.is_done())
    }
}

/// The ranges in use.
#[derive(Debug, Default)]
struct List {
    uses: Vec<Use>,
    /// From this length on the copies that are done are looked for and taken out: each entry is looked at a constant number of times.
    sweep_at: usize,
}

/// The shortest list that is worth sweeping.
const SWEEP_AT_LEAST: usize = 8;

impl List {
    fn sweep(&mut self) {
        if self.uses.len() >= self.sweep_at.max(SWEEP_AT_LEAST) {
            self.uses.retain(|used| !used.until.is_over());
            self.sweep_at = 2 * self.uses.len();
        }
    }
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
        let block = Block::new(device, bytes, pinned, info, op, at)?;
        Ok(Arc::new(Storage {
            block,
            device,
            bytes,
            origin,
            made_at: at,
            pinned,
            used: AtomicBool::new(false),
            changed: AtomicBool::new(false),
            in_use: Mutex::default(),
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

    fn list(&self) -> MutexGuard<'_, List> {
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
        let uses = &mut list.uses;
        let clash = |other: &Use| (writes || other.writes) && range.start < other.end && other.start < range.end;
        debug_assert!(range.start <= range.end);
        // An empty range is in nobody's way, wherever it lies.
        if !range.is_empty() {
            while let Some(position) = uses.iter().position(clash) {
                if !uses[position].until.is_over() {
                    return Err(Box::new(uses[position].clone()));
                }
                uses.swap_remove(position);
            }
            uses.push(Use { token, start: range.start, end: range.end, writes, op, at, until: Until::Call });
        }
        drop(list);
        Ok(Borrow { storage: self, token, range, writes })
    }

    /// A range entered before is in use beyond the call that entered it.
    fn stay(&self, token: u64, until: Until) {
        let mut list = self.list();
        if let Some(entry) = list.uses.iter_mut().find(|entry| entry.token == token) {
            entry.until = until;
        }
        list.sweep();
    }

    /// Leaves a range entered before, unless a copy is to stay in it.
    fn leave(&self, token: u64) {
        let uses = &mut self.list().uses;
        if let Some(position) = uses.iter().position(|entry| entry.token == token)
            && let Until::Call = uses[position].until
        {
            uses.swap_remove(position);
        }
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        let list = std::mem::take(self.in_use.get_mut().unwrap_or_else(PoisonError::into_inner));
        for used in list.uses {
            match used.until {
                Until::Event(event) => self.block.hold_until(event),
                // A call that never left, which only a leak of its borrow can be, counts as one that goes on.
                Until::Never | Until::Call => self.block.keep_for_ever(),
            }
        }
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
    /// The first byte of the range. The memory must be the host's: of a GPU's there is an address and nothing to point into.
    fn pointer(&self) -> NonNull<u8> {
        debug_assert!(self.storage.device == Device::Cpu);
        // SAFETY: the block is one allocation of the host's, and the range was checked against its length when the tensor was made.
        unsafe { self.storage.block.pointer().add(self.range.start) }
    }

    /// Where the range begins, in its device's memory.
    pub(crate) fn address(&self) -> u64 {
        (self.storage.block.pointer().addr().get() + self.range.start) as u64
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
        self.storage.stay(self.token, Until::Event(until));
    }

    /// Host memory that a device may be using for all that is known: nobody else ever may, and it is not given back.
    pub(crate) fn leave_never(&self) {
        self.storage.stay(self.token, Until::Never);
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

#[cfg(test)]
mod tests {
    use std::panic::Location;

    use super::*;
    use crate::stream::Stream;
    use crate::{DType, Shape};

    fn storage() -> Arc<Storage> {
        let info = TensorInfo { name: None, dtype: DType::U8, shape: Shape::new(&[64]).unwrap(), device: Device::Cpu };
        Storage::new(Device::Cpu, 64, Origin::HostData, false, info, "test", Location::caller()).unwrap()
    }

    #[test]
    fn copies_that_are_done_do_not_pile_up() {
        let (storage, at) = (storage(), Location::caller());
        let passed = Stream::new(Device::Cpu).unwrap().record().unwrap();
        for _ in 0..1000 {
            // Reads overlap reads, so no reader after it ever meets the entry.
            storage.enter(0..64, false, "copy", at).unwrap().leave_after(passed.clone());
            assert!(storage.list().uses.len() <= SWEEP_AT_LEAST);
        }
        storage.enter(0..64, true, "write", at).unwrap();
        assert!(storage.list().uses.is_empty());
    }

    #[test]
    fn a_range_left_for_ever_is_in_use_for_ever_and_its_memory_is_nobody_else_s() {
        let (storage, at) = (storage(), Location::caller());
        let entered = storage.enter(8..16, false, "copy", at).unwrap();
        entered.leave_never();
        drop(entered);
        for _ in 0..2 * SWEEP_AT_LEAST {
            storage.enter(0..64, false, "read", at).unwrap().leave_never();
        }
        let other = storage.enter(10..11, true, "write", at).unwrap_err();
        assert!((other.op == "copy" || other.op == "read") && !other.writes, "{other:?}");
        let address = storage.block.pointer();
        drop(storage);
        let again: Vec<Arc<Storage>> = (0..64).map(|_| self::storage()).collect();
        assert!(again.iter().all(|other| other.block.pointer() != address));
    }

    #[test]
    fn a_range_s_address_is_where_it_begins() {
        let storage = storage();
        let entered = storage.enter(24..40, false, "read", Location::caller()).unwrap();
        assert_eq!(entered.address(), entered.elements::<u8>().as_ptr().addr() as u64);
    }
}
