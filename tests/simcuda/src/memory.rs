//! Memory: what is allocated, by whom, who may access it, and what was freed. [`space`] lays out
//! addresses, [`pool`] keeps the pools' books, [`pinned`] watches the host's accesses, [`calls`]
//! has the entry points.
//!
//! Device addresses are addresses of this process: each device is one reserved range. Allocations
//! start at multiples of 256 and are at least [`RED_ZONE_BYTES`] apart. An address is not reused
//! before its device's range is exhausted, so that a stale pointer is recognised. New and freed
//! memory is filled with 0xFF (a NaN in every float type).
//!
//! An allocation is live from its call on. It ends twice: for calls that come after the call that
//! frees it, and for stream work when the free's own turn has come. In between, the race detector
//! decides who may use it.

pub mod allocation;
pub mod calls;
mod checks;
pub mod leaks;
pub mod pinned;
pub mod pool;
pub mod space;
#[cfg(test)]
mod tests;
pub mod unwritten;

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use crate::config::OwnBytes;
use crate::error::CUresult;

pub use self::allocation::{Allocation, End, Moment, Owner, Turn};
pub use self::checks::{
    begin, check_queued, finish, follow_contents, freed_meanwhile, settle_unwritten, take_turn,
};
pub use self::space::{ALIGNMENT_BYTES, POISON, RED_ZONE_BYTES};
use crate::report::FindingKind;
use crate::work::{Address, Memory, Views};

/// How many freed allocations are remembered.
const REMEMBERED: usize = 100_000;

/// All memory of the machine.
pub struct AddressSpace {
    arenas: Vec<space::Arena>,
    /// All arenas lie in this range; memory in it is at its device address.
    device_range: Range<Address>,
    views: Views,
    /// By first address, including remembered freed ones.
    allocations: BTreeMap<Address, Arc<Allocation>>,
    /// Freed allocations in order of freeing.
    forgettable: std::collections::VecDeque<Address>,
    /// Bytes allocated by cuMemAlloc per device; pools keep their own books.
    direct_bytes: Vec<u64>,
    memory_bytes: u64,
    /// The pools.
    pub pools: pool::Pools,
    /// (a, b): a's context may touch b's memory.
    peers: HashSet<(usize, usize)>,
    /// Whether the program has asked which devices have peer access. From then on it knows where
    /// the driver stages the copies of cuMemcpyPeerAsync.
    pub asked_for_peers: bool,
    /// Copies that use pinned memory and that the host has not waited for.
    pub in_flight: pinned::InFlight,
    /// Device memory that nothing has written.
    pub unwritten: unwritten::Unwritten,
}

/// A range that may not be accessed, and why.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The kind of finding.
    pub kind: FindingKind,
    /// What is there instead.
    pub message: String,
}

impl AddressSpace {
    /// The memory of `devices` devices with `memory_bytes` each, of which contexts have their part.
    pub fn new(devices: usize, memory_bytes: u64, own: OwnBytes) -> Self {
        let (arenas, device_range, views) = space::reserve(devices, memory_bytes);
        Self {
            arenas,
            device_range,
            views,
            allocations: BTreeMap::new(),
            forgettable: std::collections::VecDeque::new(),
            direct_bytes: vec![own.context; devices],
            memory_bytes,
            pools: pool::Pools::new(devices, own.piece),
            peers: HashSet::new(),
            asked_for_peers: false,
            in_flight: pinned::InFlight::default(),
            unwritten: unwritten::Unwritten::default(),
        }
    }

    /// Free bytes of a device.
    pub fn free_bytes(&self, device: usize) -> u64 {
        self.memory_bytes - self.direct_bytes[device] - self.pools.reserved_bytes(device)
    }

    /// The allocation that begins at `address`, live or remembered.
    pub fn at(&self, address: Address) -> Option<&Arc<Allocation>> {
        self.allocations.get(&address)
    }

    /// The allocation that holds `address` and was not freed.
    pub fn holding(&self, address: Address) -> Option<&Arc<Allocation>> {
        self.last_holding(address)
            .filter(|found| found.end().is_none())
    }

    /// The last allocation that held `address`, freed or not.
    fn last_holding(&self, address: Address) -> Option<&Arc<Allocation>> {
        let (_, found) = self.allocations.range(..=address).next_back()?;
        found.range.contains(&address).then_some(found)
    }

    /// Whether an address is a device's, or in pinned memory (also freed); anything else is
    /// pageable.
    pub fn knows(&self, address: Address) -> bool {
        self.device_range.contains(&address) || self.last_holding(address).is_some()
    }

    /// Gives `device` access to the memory of `peer`; false if it already had it.
    pub fn enable_peer(&mut self, device: usize, peer: usize) -> bool {
        self.peers.insert((device, peer))
    }

    /// Revokes the access; false if there was none.
    pub fn disable_peer(&mut self, device: usize, peer: usize) -> bool {
        self.peers.remove(&(device, peer))
    }

    /// Takes memory that no work can reach, as libraries keep it.
    pub fn take_directly(&mut self, device: usize, bytes: u64) -> Result<(), CUresult> {
        if bytes > self.free_bytes(device) {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        self.direct_bytes[device] += bytes;
        Ok(())
    }

    /// Gives such memory back.
    pub fn give_back_directly(&mut self, device: usize, bytes: u64) {
        self.direct_bytes[device] -= bytes;
    }

    /// Allocates device memory. If it belongs to a pool, the caller keeps the pool's books.
    pub fn allocate(
        &mut self,
        owner: Owner,
        bytes: u64,
        made: allocation::Made,
    ) -> Result<Arc<Allocation>, CUresult> {
        let device = owner
            .device()
            .expect("pinned memory is made by the room of pinned memory");
        if owner.pool().is_none() {
            self.take_directly(device, bytes)?;
        }
        let start = self.place(device, bytes)?;
        let allocation = Arc::new(Allocation::new(start..start + bytes, owner, made));
        self.allocations.insert(start, Arc::clone(&allocation));
        self.unwritten.add(start..start + bytes);
        Ok(allocation)
    }

    /// Finds space in the range of `device` and maps it.
    fn place(&mut self, device: usize, bytes: u64) -> Result<Address, CUresult> {
        let arena = &mut self.arenas[device];
        let start = match arena.fresh(bytes) {
            Some(start) => start,
            None => {
                let live = self
                    .allocations
                    .range(arena.range.clone())
                    .filter(|(_, allocation)| !allocation.has_ended(Moment::Runs))
                    .map(|(_, allocation)| allocation.range.clone());
                arena
                    .between(live, bytes)
                    .ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?
            }
        };
        let taken: Vec<Address> = self
            .allocations
            .range(start..start + bytes)
            .map(|(start, _)| *start)
            .collect();
        taken
            .iter()
            .for_each(|stale| drop(self.allocations.remove(stale)));
        // Remembered allocations that reach into the new one are forgotten too; live ones were
        // avoided.
        if let Some((before, allocation)) = self.allocations.range(..start).next_back()
            && allocation.range.end > start
        {
            let before = *before;
            self.allocations.remove(&before);
        }
        space::poison(start, bytes);
        Ok(start)
    }

    /// The free's turn has come: the bytes are gone, the record is kept.
    pub fn release(&mut self, allocation: &Arc<Allocation>) {
        allocation.finish_end();
        // The pool's books changed at the call: it may hand out the bytes again at once.
        if let Owner::Device { device, pool: None } = allocation.owner {
            self.direct_bytes[device] -= allocation.bytes();
        }
        match &allocation.owner {
            Owner::Host(mapping) => mapping.close(self.in_flight.uses(allocation)),
            Owner::Device { .. } => space::discard(&allocation.range),
        }
        self.unwritten.remove(&allocation.range);
        self.forgettable.push_back(allocation.range.start);
        if self.forgettable.len() > REMEMBERED
            && let Some(oldest) = self.forgettable.pop_front()
            && self
                .allocations
                .get(&oldest)
                .is_some_and(|old| old.has_ended(Moment::Runs))
        {
            self.allocations.remove(&oldest);
        }
    }

    /// Pinned memory of `bytes`.
    pub fn allocate_pinned(
        &mut self,
        bytes: u64,
        made: allocation::Made,
    ) -> Result<Arc<Allocation>, CUresult> {
        let mapping = pinned::Mapping::new(bytes)?;
        let start = mapping.product;
        // The kernel may reuse unmapped addresses: forget what was known of them.
        let stale: Vec<Address> = self
            .allocations
            .range(start..start + bytes)
            .map(|(start, _)| *start)
            .collect();
        stale
            .iter()
            .for_each(|stale| drop(self.allocations.remove(stale)));
        let allocation = Arc::new(Allocation::new(
            start..start + bytes,
            Owner::Host(mapping),
            made,
        ));
        self.allocations.insert(start, Arc::clone(&allocation));
        Ok(allocation)
    }

    /// A synchronisation returns what pools hold above their thresholds.
    pub fn release_at_synchronize(&mut self) {
        self.pools.trim_all();
    }

    /// The device that the range of an operation is checked for. cuMemcpyPeerAsync reaches each
    /// side through its own device where the driver stages. A free may have been queued since.
    pub fn reached_by(&self, device: usize, describe: &str, range: &Range<Address>) -> usize {
        if !self.asked_for_peers || !describe.starts_with("cuMemcpyPeerAsync") {
            return device;
        }
        let found = self.last_holding(range.start);
        found
            .and_then(|found| found.owner.device())
            .unwrap_or(device)
    }

    /// Whether `device` may access the memory of `owner`.
    fn may_access(&self, device: usize, owner: &Owner) -> bool {
        match owner {
            Owner::Host(_) => true,
            Owner::Device { device: home, .. } if *home == device => true,
            Owner::Device {
                pool: Some(pool), ..
            } => self.pools.gives_access(*pool, device),
            Owner::Device {
                device: home,
                pool: None,
            } => self.peers.contains(&(device, *home)),
        }
    }

    /// Names bytes by their allocation: `bytes 0..64 of the 4096-byte allocation made by …`.
    pub fn describe(&self, range: &Range<Address>) -> String {
        match self.last_holding(range.start) {
            Some(allocation) => {
                let start = allocation.range.start;
                format!(
                    "{}..{} of {allocation}{}",
                    range.start - start,
                    range.end - start,
                    ended(allocation)
                )
            }
            None => format!("{:#x}..{:#x}, of no allocation", range.start, range.end),
        }
    }

    /// Why `device` may not access `range`, if so.
    pub fn violation(
        &self,
        device: usize,
        range: &Range<Address>,
        moment: Moment,
    ) -> Option<Violation> {
        if range.is_empty() {
            return None;
        }
        match self.find(device, range.start, moment) {
            Err(violation) => Some(with_range(violation, range)),
            Ok(allocation) if range.end > allocation.range.end => {
                let message = format!(
                    "{} bytes past the end of {allocation}",
                    range.end - allocation.range.end
                );
                Some(with_range(
                    Violation {
                        kind: FindingKind::OutOfBounds,
                        message,
                    },
                    range,
                ))
            }
            Ok(_) => None,
        }
    }

    /// The live allocation at `address` that `device` may touch.
    fn find(
        &self,
        device: usize,
        address: Address,
        moment: Moment,
    ) -> Result<&Arc<Allocation>, Violation> {
        let before = self
            .allocations
            .range(..=address)
            .next_back()
            .map(|(_, allocation)| allocation);
        match before.filter(|allocation| allocation.range.contains(&address)) {
            Some(allocation) if allocation.has_ended(moment) => {
                let end = allocation
                    .end()
                    .map_or_else(|| "freed".to_owned(), End::to_string);
                let message = format!(
                    "byte {} of {allocation}, {end}",
                    address - allocation.range.start
                );
                Err(Violation {
                    kind: FindingKind::UseAfterFree,
                    message,
                })
            }
            Some(allocation) if !self.may_access(device, &allocation.owner) => {
                Err(no_access(device, address, allocation))
            }
            Some(allocation) => Ok(allocation),
            None => Err(self.nowhere(address, before)),
        }
    }

    /// What lies near an address outside of all allocations.
    fn nowhere(&self, address: Address, before: Option<&Arc<Allocation>>) -> Violation {
        let after = self
            .allocations
            .range(address..)
            .next()
            .map(|(_, allocation)| allocation);
        let arena = self
            .arenas
            .iter()
            .position(|arena| arena.range.contains(&address));
        let is_near = |other: Address| match arena {
            Some(arena) => self.arenas[arena].range.contains(&other),
            // Pinned memory: the guard page after it.
            None => other.abs_diff(address) <= 4096,
        };
        let before = before
            .filter(|allocation| is_near(allocation.range.start) || is_near(allocation.range.end));
        let after = after.filter(|allocation| is_near(allocation.range.start));
        let message = match (before, after) {
            (Some(before), Some(after))
                if after.range.start - address < address - before.range.end =>
            {
                format!(
                    "{} bytes before {after}{}",
                    after.range.start - address,
                    ended(after)
                )
            }
            (Some(before), _) => {
                format!(
                    "{} bytes past the end of {before}{}",
                    address - before.range.end,
                    ended(before)
                )
            }
            (None, Some(after)) => format!(
                "{} bytes before {after}{}",
                after.range.start - address,
                ended(after)
            ),
            (None, None) if address < 4096 => "a null pointer".to_owned(),
            (None, None) if arena.is_some() => "memory that was never allocated".to_owned(),
            (None, None) => {
                "no memory of this machine (pageable memory of the host, or no pointer at all)"
                    .to_owned()
            }
        };
        Violation {
            kind: FindingKind::OutOfBounds,
            message,
        }
    }
}

fn with_range(violation: Violation, range: &Range<Address>) -> Violation {
    let Violation { kind, message } = violation;
    let bytes = range.end - range.start;
    let unit = if bytes == 1 { "byte" } else { "bytes" };
    Violation {
        kind,
        message: format!("{bytes} {unit} at {:#x}: {message}", range.start),
    }
}

fn ended(allocation: &Allocation) -> String {
    allocation
        .end()
        .map_or_else(String::new, |end| format!(", {end}"))
}

fn no_access(device: usize, address: Address, allocation: &Allocation) -> Violation {
    let home = allocation.owner.device().unwrap_or_default();
    let way_out = if allocation.owner.pool().is_some() {
        "cuMemPoolSetAccess"
    } else {
        "cuCtxEnablePeerAccess"
    };
    let message = format!(
        "byte {} of {allocation}, which device {device} was given no access to (it is memory of device {home}; access would come \
         from {way_out})",
        address - allocation.range.start
    );
    Violation {
        kind: FindingKind::WrongDevice,
        message,
    }
}

impl Memory for AddressSpace {
    fn check(&self, device: usize, range: Range<Address>) -> Result<(), String> {
        self.violation(device, &range, Moment::Runs)
            .map_or(Ok(()), |violation| Err(violation.message))
    }

    fn allocation(&self, device: usize, address: Address) -> Result<Range<Address>, String> {
        match self.find(device, address, Moment::Runs) {
            Ok(allocation) => Ok(allocation.range.clone()),
            Err(violation) => Err(violation.message),
        }
    }

    fn unwritten(&self, range: &Range<Address>) -> Option<Range<Address>> {
        self.unwritten.within(range).next()
    }

    fn views(&self) -> Views {
        self.views
    }

    fn describe(&self, range: &Range<Address>) -> String {
        Self::describe(self, range)
    }

    fn host_pointer(&self, address: Address) -> *mut u8 {
        if self.device_range.contains(&address) {
            return address as *mut u8;
        }
        let before = self
            .allocations
            .range(..=address)
            .next_back()
            .map(|(_, allocation)| allocation);
        match before.map(|allocation| (allocation, &allocation.owner)) {
            Some((allocation, Owner::Host(mapping))) if allocation.range.contains(&address) => {
                (mapping.simulator + (address - mapping.product)) as *mut u8
            }
            _ => address as *mut u8,
        }
    }
}
