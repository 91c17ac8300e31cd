//! The books of memory pools: used, reserved, access. They do not deal with addresses.
//!
//! A free returns memory to the pool at the call, as in CUDA: the next allocation of the same
//! stream may take it at once, other streams by the dependencies that the driver finds or inserts.
//! It stays reserved until it is trimmed or a synchronisation finds more than the release threshold
//! reserved. While the host has not learnt that the free is done, trimming counts it as in use,
//! which CUDA allows. Reservations are whole pieces.

pub mod calls;

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::error::CUresult;
use crate::race::Actor;

/// Pools are numbered in the order of their creation; the first ones are the devices' default
/// pools.
pub type PoolId = usize;

/// What allocations in a pool are rounded up to.
const GRAIN_BYTES: u64 = 512;

/// How much access a device has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// To read.
    Read,
    /// To read and write.
    ReadWrite,
}

/// One pool.
#[derive(Debug)]
pub struct Pool {
    /// Where its memory is.
    pub device: usize,
    /// Whether it is a device's own, which cannot be destroyed.
    pub is_default: bool,
    /// Destroyed: it lives until its last allocation is freed.
    pub is_destroyed: bool,
    /// No more than this many bytes; 0 for no limit.
    pub max_bytes: u64,
    /// How much a synchronisation leaves reserved.
    pub release_threshold: u64,
    /// Follow events, opportunistic, internal dependencies: the three attributes of reuse.
    pub reuse: [bool; 3],
    /// What it reserves at a time.
    piece: u64,
    used: u64,
    used_high: u64,
    /// Freed in stream order, and the host does not know yet that it is done.
    unseen: u64,
    reserved: u64,
    reserved_high: u64,
    access: HashMap<usize, Access>,
}

/// The figures of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Books {
    /// Allocated.
    pub used: u64,
    /// The most that was, since it was reset.
    pub used_high: u64,
    /// Taken from the device.
    pub reserved: u64,
    /// The most that was, since it was reset.
    pub reserved_high: u64,
}

/// All pools.
#[derive(Debug)]
pub struct Pools {
    all: Vec<Pool>,
    piece: u64,
    /// The pool that cuMemAllocAsync takes from, by device.
    current: Vec<PoolId>,
    /// Frees that have run, of each stream in order: how many bytes, and the stream's moment. Until
    /// the host knows it.
    frees: BTreeMap<(PoolId, Actor), VecDeque<(u64, u64)>>,
}

impl Pools {
    /// A default pool for each device. All reserve pieces of this many bytes.
    pub fn new(devices: usize, piece: u64) -> Self {
        let mut pools = Self {
            all: Vec::new(),
            piece,
            current: (0..devices).collect(),
            frees: BTreeMap::new(),
        };
        for device in 0..devices {
            pools.create(device, 0);
            pools.all[device].is_default = true;
        }
        pools
    }

    /// A new pool.
    pub fn create(&mut self, device: usize, max_bytes: u64) -> PoolId {
        self.all.push(Pool {
            device,
            is_default: false,
            is_destroyed: false,
            max_bytes,
            release_threshold: 0,
            reuse: [true; 3],
            piece: self.piece,
            used: 0,
            used_high: 0,
            unseen: 0,
            reserved: 0,
            reserved_high: 0,
            access: HashMap::new(),
        });
        self.all.len() - 1
    }

    /// A pool that was not destroyed, or was.
    pub fn get(&self, pool: PoolId) -> Option<&Pool> {
        self.all.get(pool)
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, pool: PoolId) -> Option<&mut Pool> {
        self.all.get_mut(pool)
    }

    /// What cuMemAllocAsync takes from.
    pub fn current(&self, device: usize) -> PoolId {
        self.current[device]
    }

    /// Sets the pool that cuMemAllocAsync takes from.
    pub fn set_current(&mut self, device: usize, pool: PoolId) {
        self.current[device] = pool;
    }

    /// The pool takes no more allocations; free memory returns to the device at once.
    pub fn destroy(&mut self, pool: PoolId) {
        let device = self.all[pool].device;
        self.all[pool].is_destroyed = true;
        self.all[pool].trim(0);
        if self.current[device] == pool {
            self.current[device] = device;
        }
    }

    /// What all pools of a device have taken from it.
    pub fn reserved_bytes(&self, device: usize) -> u64 {
        self.all
            .iter()
            .filter(|pool| pool.device == device)
            .map(|pool| pool.reserved)
            .sum()
    }

    /// What a synchronisation does.
    pub fn trim_all(&mut self) {
        for pool in &mut self.all {
            pool.trim(pool.release_threshold);
        }
    }

    /// Whether `device` has been given access to a pool of another device.
    pub fn gives_access(&self, pool: PoolId, device: usize) -> bool {
        self.all[pool].access.contains_key(&device)
    }

    /// Books an allocation of `bytes`, given that `device_free` bytes of the device are free.
    pub fn take(&mut self, pool: PoolId, bytes: u64, device_free: u64) -> Result<(), CUresult> {
        let pool = &mut self.all[pool];
        let out_of_memory = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        let used = bytes
            .checked_next_multiple_of(GRAIN_BYTES)
            .and_then(|grains| pool.used.checked_add(grains))
            .ok_or(out_of_memory)?;
        if pool.max_bytes > 0 && used > pool.max_bytes {
            return Err(out_of_memory);
        }
        if used > pool.reserved {
            let reserved = used
                .checked_next_multiple_of(pool.piece)
                .ok_or(out_of_memory)?;
            if reserved - pool.reserved > device_free {
                return Err(out_of_memory);
            }
            pool.reserved = reserved;
            pool.reserved_high = pool.reserved_high.max(reserved);
        }
        pool.used = used;
        pool.used_high = pool.used_high.max(used);
        Ok(())
    }

    /// Books a free whose turn in its stream is still to come: see [`Pools::has_run`].
    pub fn give_back_in_order(&mut self, pool: PoolId, bytes: u64) {
        self.all[pool].unseen += bytes.next_multiple_of(GRAIN_BYTES);
        self.give_back(pool, bytes);
    }

    /// The turn of such a free has come in the stream of `actor`, at this moment of it.
    pub fn has_run(&mut self, pool: PoolId, bytes: u64, actor: Actor, moment: u64) {
        let frees = self.frees.entry((pool, actor)).or_default();
        frees.push_back((bytes, moment));
    }

    /// Books a free.
    pub fn give_back(&mut self, pool: PoolId, bytes: u64) {
        let pool = &mut self.all[pool];
        pool.used -= bytes.next_multiple_of(GRAIN_BYTES);
        if pool.is_destroyed {
            pool.trim(0);
        }
    }

    /// The host has learnt of something: frees that it `knows` to be done are no longer in use.
    pub fn see_what_is_known(&mut self, knows: impl Fn(Actor, u64) -> bool) {
        let Self { all, frees, .. } = self;
        frees.retain(|&(pool, actor), frees| {
            let pool = &mut all[pool];
            while let Some((bytes, _)) = frees.pop_front_if(|(_, moment)| knows(actor, *moment)) {
                pool.unseen -= bytes.next_multiple_of(GRAIN_BYTES);
            }
            if pool.is_destroyed {
                pool.trim(0);
            }
            !frees.is_empty()
        });
    }
}

impl Pool {
    /// Its figures.
    pub fn books(&self) -> Books {
        Books {
            used: self.used,
            used_high: self.used_high,
            reserved: self.reserved,
            reserved_high: self.reserved_high,
        }
    }

    /// Returns unused memory, down to `keep` bytes.
    pub fn trim(&mut self, keep: u64) {
        let needed = (self.used + self.unseen).next_multiple_of(self.piece);
        self.reserved = self.reserved.min(needed.max(keep));
    }

    /// The high-water marks begin anew.
    pub fn reset_used_high(&mut self) {
        self.used_high = self.used;
    }

    /// The high-water marks begin anew.
    pub fn reset_reserved_high(&mut self) {
        self.reserved_high = self.reserved;
    }

    /// How much access `device` has.
    pub fn access_of(&self, device: usize) -> Option<Access> {
        if device == self.device {
            Some(Access::ReadWrite)
        } else {
            self.access.get(&device).copied()
        }
    }

    /// Gives or takes access.
    pub fn set_access(&mut self, device: usize, access: Option<Access>) {
        match access {
            Some(access) => self.access.insert(device, access),
            None => self.access.remove(&device),
        };
    }
}
