//! A tensor's bytes, and which operations are using them.
//!
//! THE ALIASING RULE. Tensors are handles: clones and views share one storage, and operations write
//! into tensors given to them. To rule out data races, every storage lists the byte ranges in use.
//! An operation enters its operands before it touches a byte and leaves when it is done. A write
//! may not overlap anything; reads may overlap reads. A second operation that clashes gets an error
//! that names both, at once: waiting would only hide a missing order. Two threads may work on
//! different parts of one arena at the same time.
//!
//! On a GPU an operation leaves when its work is in the stream; from then on the order of streams
//! decides, and `memory/gpu.rs` protects the bytes. Host memory that a device copies from or to
//! stays in the list until the copy is done, or for the rest of the process if a failed copy may
//! still run.

use std::cell::RefCell;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::cuda::queue::Queue;
use crate::error::{Caller, Result, Site, TensorInfo};
use crate::memory::Block;
use crate::panics::{get_mut, lock};
use crate::stream::Event;
use crate::{Device, Element};

/// How a storage got its contents; the hints about needless transfers use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContentsOrigin {
    /// Made by a constructor that could have made it on any device.
    Computed,
    /// Filled from data that only the host has: a slice, a file.
    HostData,
    /// Copied from another device by the call at this line.
    Arrived(Device, Site),
}

/// The bytes of one or more tensors.
pub(crate) struct Storage {
    pub(crate) block: Block,
    pub(crate) bytes: usize,
    pub(crate) origin: ContentsOrigin,
    pub(crate) made_at: Site,
    /// Whether any operation has used the contents since they were made; transfers do not count.
    used: AtomicBool,
    /// Whether any operation or copy has changed the contents since they were made.
    changed: AtomicBool,
    in_use: Mutex<UseList>,
    /// How many references graphs hold, which use the memory only when they are launched.
    held_by_graphs: AtomicUsize,
}

/// One entry in the list of ranges in use.
#[derive(Clone, Debug)]
pub(crate) struct Use {
    token: u64,
    start: usize,
    end: usize,
    pub(crate) writes: bool,
    pub(crate) by: Caller,
    until: Until,
}

/// When a use is over.
#[derive(Clone, Debug)]
enum Until {
    /// When the call that entered the range leaves it.
    Call,
    /// When this event of a copy in flight has passed.
    Event(Event),
    /// Never: a copy failed, and the device may still be running it.
    Never,
}

impl Until {
    fn is_over(&self) -> bool {
        matches!(self, Until::Event(event) if event.is_done())
    }
}

/// The ranges in use.
#[derive(Debug, Default)]
struct UseList {
    uses: Vec<Use>,
    /// From this length on, finished copies are removed. It doubles, so the cost is constant a use.
    sweep_at: usize,
}

/// The shortest list that is worth sweeping.
const SWEEP_AT_LEAST: usize = 8;

impl UseList {
    fn sweep(&mut self) {
        if self.uses.len() >= self.sweep_at.max(SWEEP_AT_LEAST) {
            self.uses.retain(|used| !used.until.is_over());
            self.sweep_at = 2 * self.uses.len();
        }
    }
}

impl Storage {
    /// `bytes` bytes with unspecified but initialised contents on `info.device`.
    pub(crate) fn new(
        bytes: usize,
        origin: ContentsOrigin,
        pinned: bool,
        info: TensorInfo,
        by: Caller,
    ) -> Result<Arc<Storage>> {
        Ok(Arc::new(Storage {
            block: Block::new(bytes, pinned, info, by)?,
            bytes,
            origin,
            made_at: by.at,
            used: AtomicBool::new(false),
            changed: AtomicBool::new(false),
            in_use: Mutex::default(),
            held_by_graphs: AtomicUsize::new(0),
        }))
    }

    pub(crate) fn device(&self) -> Device {
        self.block.device
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

    pub(crate) fn graphs(&self) -> usize {
        self.held_by_graphs.load(Ordering::Relaxed)
    }

    /// Enters a byte range, or returns the use that clashes with it.
    pub(crate) fn enter(
        &self,
        range: Range<usize>,
        writes: bool,
        by: Caller,
    ) -> Result<Borrow<'_>, Box<Use>> {
        debug_assert!(range.start <= range.end && range.end <= self.bytes);
        static NEXT_TOKEN: AtomicU64 = AtomicU64::new(0);
        let token = NEXT_TOKEN.fetch_add(1, Ordering::Relaxed);
        let clash = |other: &Use| {
            (writes || other.writes) && range.start < other.end && other.start < range.end
        };
        // An empty range clashes with nothing.
        if !range.is_empty() {
            let uses = &mut lock(&self.in_use).uses;
            while let Some(position) = uses.iter().position(clash) {
                if !uses[position].until.is_over() {
                    return Err(Box::new(uses[position].clone()));
                }
                uses.swap_remove(position);
            }
            uses.push(Use {
                token,
                start: range.start,
                end: range.end,
                writes,
                by,
                until: Until::Call,
            });
        }
        Ok(Borrow {
            storage: self,
            token,
            range,
            writes,
        })
    }

    /// A range stays in use after the call that entered it.
    fn stay(&self, token: u64, until: Until) {
        let mut list = lock(&self.in_use);
        if let Some(entry) = list.uses.iter_mut().find(|entry| entry.token == token) {
            entry.until = until;
        }
        list.sweep();
    }

    /// Leaves a range, unless it stays in use.
    fn leave(&self, token: u64) {
        let uses = &mut lock(&self.in_use).uses;
        if let Some(position) = uses.iter().position(|entry| entry.token == token)
            && let Until::Call = uses[position].until
        {
            uses.swap_remove(position);
        }
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        for used in std::mem::take(get_mut(&mut self.in_use)).uses {
            match used.until {
                Until::Event(event) => self.block.hold_until(event),
                // A call that never left has leaked its borrow and may still use the memory.
                Until::Never | Until::Call => self.block.keep_forever(),
            }
        }
    }
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (id, bytes, device) = (self.block.id, self.bytes, self.device());
        write!(f, "Storage {id} of {bytes} bytes on {device}")
    }
}

/// Memory that a graph uses, and keeps.
#[derive(Debug)]
pub(crate) struct KeptMemory(Arc<Storage>);

thread_local! {
    /// What the graph that this thread captures uses.
    static KEPT: RefCell<Vec<KeptMemory>> = const { RefCell::new(Vec::new()) };
}

impl KeptMemory {
    /// The graph that this thread captures keeps `storage`.
    pub(crate) fn keep(storage: &Arc<Storage>) {
        KEPT.with_borrow_mut(|kept| {
            if !kept.iter().rev().any(|it| Arc::ptr_eq(&it.0, storage)) {
                storage.held_by_graphs.fetch_add(1, Ordering::Relaxed);
                kept.push(KeptMemory(storage.clone()));
            }
        });
    }

    /// Takes what this thread's capture keeps.
    pub(crate) fn take() -> Vec<KeptMemory> {
        KEPT.take()
    }

    /// The memory is freed after the work of `queue`.
    pub(crate) fn adopt(&self, queue: &Arc<Queue>) {
        self.0.block.adopt(queue);
    }
}

impl Drop for KeptMemory {
    fn drop(&mut self) {
        self.0.held_by_graphs.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The right to read, or to read and write, a byte range of a storage until it is dropped.
#[derive(Debug)]
pub(crate) struct Borrow<'a> {
    storage: &'a Storage,
    token: u64,
    range: Range<usize>,
    writes: bool,
}

impl Borrow<'_> {
    /// The address of the range in its device's memory.
    pub(crate) fn address(&self) -> u64 {
        (self.storage.block.pointer.addr().get() + self.range.start) as u64
    }

    /// The range as elements. It must be in host memory.
    pub(crate) fn elements<T: Element>(&self) -> &[T] {
        let (start, count) = self.first_and_count();
        // SAFETY: the bytes are initialised (memory.rs), aligned (the block to 256, offsets to
        // whole elements), any bit pattern is a T (Element is sealed to plain numbers), and the
        // list of ranges in use keeps every writer out while this borrow lives; `elements_mut`
        // needs `&mut self`, so no slice of it overlaps.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), count) }
    }

    /// The range as elements to write. It must be in host memory.
    pub(crate) fn elements_mut<T: Element>(&mut self) -> &mut [T] {
        assert!(self.writes, "a borrow for reading was used for writing");
        let (start, count) = self.first_and_count();
        // SAFETY: as in `elements`; besides, a writing borrow is the only entry that overlaps its
        // range, and `&mut self` makes this the only slice made from it.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), count) }
    }

    /// The range, in host memory, stays in use until `event` has passed.
    pub(crate) fn leave_after(self, event: Event) {
        self.storage.stay(self.token, Until::Event(event));
    }

    /// The range, in host memory, stays in use for the rest of the process.
    pub(crate) fn leave_never(&self) {
        self.storage.stay(self.token, Until::Never);
    }

    fn first_and_count<T: Element>(&self) -> (NonNull<T>, usize) {
        let device = self.storage.device();
        assert!(device == Device::Cpu, "host access to memory of {device}");
        let size = size_of::<T>();
        assert!(self.range.start.is_multiple_of(size) && self.range.len().is_multiple_of(size));
        // SAFETY: the block is one host allocation, and `enter` got a range within its length.
        let start = unsafe { self.storage.block.pointer.add(self.range.start) };
        (start.cast(), self.range.len() / size)
    }
}

impl Drop for Borrow<'_> {
    fn drop(&mut self) {
        self.storage.leave(self.token);
    }
}

#[cfg(test)]
mod tests;
