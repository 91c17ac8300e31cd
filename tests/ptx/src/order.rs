//! Who touched global memory last, and whether that comes before what a thread does now: by the
//! thread's own order, by barriers of its block and its warp, and between blocks by release and
//! acquire patterns (PTX ISA, "Memory Consistency Model").
//!
//! Blocks run one after another, so a later one has seen what an earlier one did; a race is what
//! nothing orders. Two strong accesses whose scopes hold both threads do not race.

use std::collections::HashMap;

use crate::moment::{
    Moment, OF_BLOCK, OF_BLOCKS, OF_WARP, Other, Stamp, block_count, fences, moment, strength,
    warp_barriers, warp_of, who,
};
use crate::op::{Strength, Strong};

/// So many fences of a thread between two barriers are told apart. The last one publishes what
/// comes later, too.
const FENCES_APART: u8 = 7;
/// Beyond these numbers everything counts as published: races are missed, none is invented.
const FENCES_MAX: usize = 1 << 14;
const CHANNELS_MAX: usize = 1 << 11;

/// The last write and the last read of some bytes, and the instructions of both.
pub(crate) type Cell = [u64; 3];

/// Numbers, a bit each.
#[derive(Clone, Default)]
struct Set(Vec<u64>);

impl Set {
    fn add(&mut self, number: usize) {
        if self.0.len() <= number / 64 {
            self.0.resize(number / 64 + 1, 0);
        }
        self.0[number / 64] |= 1 << (number % 64);
    }

    fn add_all(&mut self, other: &Set) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        self.0
            .iter_mut()
            .zip(&other.0)
            .for_each(|(mine, theirs)| *mine |= theirs);
    }

    fn has(&self, number: usize) -> bool {
        self.0
            .get(number / 64)
            .is_some_and(|word| word >> (number % 64) & 1 != 0)
    }
}

/// The order of a launch.
pub(crate) struct Order {
    /// So many accesses are still compared; 0: none.
    pub(crate) left: u64,
    /// The first moment of the launch and of the running block.
    first: u32,
    block_first: u32,
    /// The first moment of each block that ran, and its number in the grid.
    blocks: Vec<(u32, u64)>,
    /// Fences with a scope of at least the device, in the order of execution.
    fences: Vec<Stamp>,
    /// How many there were before the running block.
    fences_before: usize,
    /// Of each thread, since the last barrier.
    fence_counts: Vec<u8>,
    /// By address: the fences that its value has published.
    channels: HashMap<u64, Set>,
    /// Of the running block, by thread: what its latest fence publishes, and what it has read and
    /// not fenced.
    released: HashMap<u32, Set>,
    pending: HashMap<u32, Set>,
    /// What threads of the running block have learnt, and when.
    acquired: Vec<(Stamp, Set)>,
    all_published: bool,
}

impl Order {
    pub(crate) fn new(first: u32, accesses_max: u64) -> Order {
        Order {
            left: accesses_max,
            first,
            block_first: first,
            blocks: Vec::new(),
            fences: Vec::new(),
            fences_before: 0,
            fence_counts: vec![0; 1024],
            channels: HashMap::new(),
            released: HashMap::new(),
            pending: HashMap::new(),
            acquired: Vec::new(),
            all_published: false,
        }
    }

    pub(crate) fn begin_block(&mut self, moment: u32, number: u64) {
        self.block_first = moment;
        self.blocks.push((moment, number));
        if self.fences_before < self.fences.len() {
            self.fence_counts.fill(0);
        }
        self.fences_before = self.fences.len();
        self.released.clear();
        self.pending.clear();
        self.acquired.clear();
    }

    /// A barrier of the block has ended.
    pub(crate) fn end_barrier(&mut self) {
        if self.fences_before < self.fences.len() {
            self.fence_counts.fill(0);
        }
    }

    /// Accesses of this launch are not compared any more: the order of their threads is not
    /// followed.
    pub(crate) fn stop(&mut self) {
        self.left = 0;
    }

    fn stamp(&self, now: Moment, strength: Strength) -> Stamp {
        let fences = self.fence_counts[now.thread as usize];
        u64::from(now.block) << 32
            | u64::from(now.warp & 0xffff) << 16
            | u64::from(now.thread) << 5
            | u64::from(fences) << 2
            | strength as u64
    }

    /// The number in the grid of the block that ran at a moment.
    pub(crate) fn block_at(&self, moment: u32) -> u64 {
        let after = self.blocks.partition_point(|(first, _)| *first <= moment);
        after.checked_sub(1).map_or(0, |at| self.blocks[at].1)
    }

    pub(crate) fn block_of(&self, stamp: Stamp) -> u64 {
        self.block_at(moment(stamp))
    }

    pub(crate) fn is_of_running_block(&self, stamp: Stamp) -> bool {
        moment(stamp) >= self.block_first && who(stamp) != OF_BLOCKS
    }

    /// Whether what `old` stands for is before `new`.
    #[inline]
    fn is_before(&self, old: Stamp, new: Stamp) -> bool {
        let then = moment(old);
        if then < self.first {
            return true;
        }
        if then < self.block_first || who(old) == OF_BLOCKS {
            return self.is_known(old, new);
        }
        then < moment(new)
            || who(old) == who(new)
            || warp_of(who(old)) == warp_of(who(new)) && warp_barriers(old) < warp_barriers(new)
    }

    /// Whether both are strong, and of scopes that hold both threads.
    fn is_strong(&self, old: Stamp, new: Stamp) -> bool {
        let needed = if self.is_of_running_block(old) {
            Strength::Block
        } else {
            Strength::Device
        };
        strength(old).min(strength(new)) >= needed as u32
    }

    /// Whether the thread of `new` has learnt what other blocks did.
    #[cold]
    fn is_known(&self, old: Stamp, new: Stamp) -> bool {
        if self.all_published || self.acquired.is_empty() {
            return self.all_published;
        }
        let mut known = Set::default();
        for (when, set) in &self.acquired {
            if self.is_before(*when, new) {
                known.add_all(set);
            }
        }
        let block = self
            .blocks
            .partition_point(|(first, _)| *first <= moment(old));
        let begin = self.blocks[block.saturating_sub(1)].0;
        let end = self.blocks.get(block).map_or(u32::MAX, |(first, _)| *first);
        if who(old) == OF_BLOCKS {
            // Only how many they are is kept; blocks that began after the last of them are not
            // among them.
            let mut blocks: Vec<u64> = (0..self.fences_before)
                .take_while(|fence| moment(self.fences[*fence]) < end)
                .filter(|fence| known.has(*fence))
                .map(|fence| self.block_of(self.fences[fence]))
                .collect();
            blocks.dedup();
            let own = usize::from(moment(old) >= self.block_first);
            return blocks.len() + own >= block_count(old) as usize;
        }
        let start = self.fences.partition_point(|fence| moment(*fence) < begin);
        (start..self.fences_before)
            .take_while(|fence| moment(self.fences[*fence]) < end)
            .any(|fence| known.has(fence) && publishes(self.fences[fence], old))
    }

    /// What stands for both, of which `old` is not before `new`.
    fn joined(&self, old: Stamp, new: Stamp) -> Stamp {
        let (several, count) = if !self.is_of_running_block(old) {
            let before = if who(old) == OF_BLOCKS {
                block_count(old)
            } else {
                1
            };
            let is_counted = moment(old) >= self.block_first;
            let count = before + u32::from(!is_counted);
            (OF_BLOCKS, count.min(0xffff))
        } else if warp_of(who(old)) == warp_of(who(new)) {
            (OF_WARP + warp_of(who(new)), warp_barriers(new))
        } else {
            (OF_BLOCK, warp_barriers(new))
        };
        let weaker = strength(old).min(strength(new));
        u64::from(moment(new)) << 32
            | u64::from(count) << 16
            | u64::from(several) << 5
            | u64::from(FENCES_APART) << 2
            | u64::from(weaker)
    }

    /// Whether it is from an earlier launch, or there was none.
    fn is_old(&self, stamp: Stamp) -> bool {
        moment(stamp) < self.first
    }

    /// Compares weak accesses of threads one after another, each to as many cells; those of earlier
    /// launches cost little.
    pub(crate) fn each(
        &mut self,
        cells: &mut [Cell],
        is_write: bool,
        first: Moment,
        barriers: &[u32],
    ) -> Result<(), (u32, Other)> {
        let count = cells.len() / barriers.len();
        let turns = cells.chunks_exact_mut(count).zip(barriers);
        for (thread, (cells, warp)) in (first.thread..).zip(turns) {
            let now = Moment {
                thread,
                warp: *warp,
                ..first
            };
            let mine = self.stamp(now, Strength::Weak);
            if cells
                .iter()
                .any(|[written, read, _]| !self.is_old(*written) || !self.is_old(*read))
            {
                let compared = if is_write {
                    self.write(cells, now, Strength::Weak)
                } else {
                    self.read(cells, now, Strength::Weak)
                };
                compared.map_err(|other| (thread, other))?;
                continue;
            }
            let (own, shift) = if is_write { (0, 32) } else { (1, 0) };
            for cell in cells {
                cell[own] = mine;
                cell[2] = cell[2] & !(0xffff_ffff << shift) | u64::from(now.at) << shift;
            }
        }
        Ok(())
    }

    /// Compares a read with what was done to the same bytes, and notes it.
    pub(crate) fn read(
        &mut self,
        cells: &mut [Cell],
        now: Moment,
        strength: Strength,
    ) -> Result<(), Other> {
        let mine = self.stamp(now, strength);
        for cell in cells {
            let [written, read, sites] = *cell;
            if written != 0 && !self.is_before(written, mine) && !self.is_strong(written, mine) {
                return Err(written_by(written, sites));
            }
            if stands_for(read, mine) {
                continue;
            }
            if read != mine {
                // Of several blocks it stays.
                let is_alone =
                    self.is_old(read) || who(read) != OF_BLOCKS && self.is_before(read, mine);
                cell[1] = if is_alone {
                    mine
                } else {
                    self.joined(read, mine)
                };
            }
            cell[2] = sites & 0xffff_ffff_0000_0000 | u64::from(now.at);
        }
        Ok(())
    }

    /// The same for a write; of an atomic, which does not race with its like, too.
    pub(crate) fn write(
        &mut self,
        cells: &mut [Cell],
        now: Moment,
        strength: Strength,
    ) -> Result<(), Other> {
        let mine = self.stamp(now, strength);
        for cell in cells {
            let [written, read, sites] = *cell;
            // Atomics of several blocks stay what they are.
            let is_strong = self.is_strong(written, mine);
            let is_like = is_strong && who(written) == OF_BLOCKS && !self.is_old(written);
            let is_after = written == 0 || !is_like && self.is_before(written, mine);
            if !is_after && !is_strong {
                return Err(written_by(written, sites));
            }
            if read != 0 && !self.is_before(read, mine) && !self.is_strong(read, mine) {
                let (stamp, at) = (read, sites as u32);
                let does = "read";
                return Err(Other { stamp, at, does });
            }
            if stands_for(written, mine) {
                continue;
            }
            cell[0] = if is_after {
                mine
            } else {
                self.joined(written, mine)
            };
            cell[2] = sites & 0xffff_ffff | u64::from(now.at) << 32;
        }
        Ok(())
    }

    /// `fence` and `membar`.
    pub(crate) fn fence(&mut self, now: Moment, strong: Strong) {
        if self.left == 0 || self.all_published || strong.strength != Strength::Device {
            return;
        }
        if strong.acquires
            && let Some(set) = self.pending.remove(&now.thread)
        {
            self.acquired.push((self.stamp(now, Strength::Weak), set));
        }
        if strong.releases {
            self.release(now);
        }
    }

    /// What the thread did and knows will be published by its next strong write.
    fn release(&mut self, now: Moment) {
        if self.fences.len() == FENCES_MAX {
            self.all_published = true;
            return;
        }
        let stamp = self.stamp(now, Strength::Weak);
        let mut set = self.released.remove(&now.thread).unwrap_or_default();
        for (when, known) in &self.acquired {
            if self.is_before(*when, stamp) {
                set.add_all(known);
            }
        }
        set.add(self.fences.len());
        self.fences.push(stamp);
        self.released.insert(now.thread, set);
        let count = &mut self.fence_counts[now.thread as usize];
        *count = (*count + 1).min(FENCES_APART);
    }

    /// A strong read: what the value publishes is learnt with the next fence, or at once.
    pub(crate) fn observe(&mut self, address: u64, now: Moment, strong: Strong) {
        if self.left == 0 || strong.strength != Strength::Device {
            return;
        }
        let Some(set) = self.channels.get(&address) else {
            return;
        };
        if strong.acquires {
            let stamp = self.stamp(now, Strength::Weak);
            self.acquired.push((stamp, set.clone()));
        } else {
            self.pending.entry(now.thread).or_default().add_all(set);
        }
    }

    /// A strong write: whoever reads it learns what the thread's fences before it publish. An
    /// atomic also passes on what was published there; a store does not.
    pub(crate) fn publish(&mut self, address: u64, now: Moment, strong: Strong, is_atomic: bool) {
        if self.left == 0 || self.all_published || strong.strength != Strength::Device {
            return;
        }
        if strong.releases {
            self.release(now);
        }
        if !is_atomic {
            self.channels.remove(&address);
        }
        if let Some(set) = self.released.get(&now.thread) {
            self.channels.entry(address).or_default().add_all(set);
            self.all_published |= self.channels.len() > CHANNELS_MAX;
        }
    }
}

/// Whether an access that was noted is at the same point of the same thread as a new one, and
/// weaker: whatever races with the new one races with it.
fn stands_for(noted: Stamp, new: Stamp) -> bool {
    (noted ^ new) & !3 == 0 && strength(noted) < strength(new)
}

#[cold]
fn written_by(stamp: Stamp, sites: u64) -> Other {
    let does = if strength(stamp) == Strength::Weak as u32 {
        "wrote"
    } else {
        "updated (atomic)"
    };
    let at = (sites >> 32) as u32;
    Other { stamp, at, does }
}

/// Whether a fence publishes an access of its block: of the same thread before it, or of another
/// one before a barrier that comes before it.
fn publishes(fence: Stamp, access: Stamp) -> bool {
    if moment(access) != moment(fence) {
        return moment(access) < moment(fence);
    }
    if who(access) == who(fence) {
        return fences(access) <= fences(fence);
    }
    warp_of(who(access)) == warp_of(who(fence)) && warp_barriers(access) < warp_barriers(fence)
}
