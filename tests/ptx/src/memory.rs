//! Global memory while a launch runs on it: where addresses lead, which bytes the launch touches,
//! and who touched them last.
//!
//! Shadows outlive a launch and need no clearing: marks are taken at its end, and later launches
//! have later moments.

mod access;
mod shadow;

use std::collections::hash_map::Entry;
use std::ops::Range;

use self::shadow::{ATOMIC, KNOWN, PAGE_MARKS, READ, READ_ONLY, Run, Shadow, WRITTEN};
use crate::finding::{Fault, Kind};
use crate::moment::Moment;
use crate::op::{Strength, Strong};
use crate::order::Order;

pub(crate) use self::access::{How, wrong};
pub use self::shadow::{Footprint, Shadows};

/// The memory of a device, as kernels of a launch see it.
///
/// # Safety
/// The bytes of each [`Window`] stay where they are, to be read and written, until the launch ends.
/// Nothing in this process holds a reference to them meanwhile.
pub unsafe trait GlobalMemory {
    /// What an address leads to; None: nothing that the kernel may touch by it.
    fn find(&self, address: u64) -> Option<Window>;

    /// The first part of `range`, which is within one allocation, that nothing wrote before this
    /// launch.
    fn unwritten(&self, _range: &Range<u64>) -> Option<Range<u64>> {
        None
    }
}

/// An allocation, at the addresses by which a kernel reaches it.
#[derive(Clone, Debug)]
pub struct Window {
    /// These addresses.
    pub range: Range<u64>,
    /// Its own first address, the same in all windows on it. `range.start - start` is a multiple
    /// of 64.
    pub start: u64,
    /// Its bytes.
    pub data: *mut u8,
}

/// How many allocations keep their shadows between launches.
const KEPT: usize = 128;
/// The question whether something was written is asked for so many bytes at a time.
const ASKED_BYTES: u64 = 1 << 14;

/// An open window.
struct Sight {
    window: Window,
    shadow: usize,
    /// Some of it was never written before this launch.
    is_partial: bool,
}

/// Global memory during a launch.
pub(crate) struct Global<'a> {
    memory: &'a dyn GlobalMemory,
    shadows: &'a mut Shadows,
    sights: Vec<Sight>,
    open: Vec<Shadow>,
    /// The window that an instruction used last.
    latest: [u32; 256],
    pub(crate) order: Order,
    /// log2 of the bytes of a cell.
    cell_shift: u32,
    /// The first read of memory that nothing wrote.
    pub(crate) unwritten: Option<(Moment, Range<u64>, &'static str)>,
    /// The first access that makes bytes both written and read through the read-only path, and the
    /// allocation.
    stale: Option<(Moment, usize)>,
}

/// The largest access of one instruction.
pub(crate) type Bytes = [u8; 32];

impl<'a> Global<'a> {
    /// `cell_bytes`: a power of two up to 16 that divides the size of every access, except that a
    /// `cp.async` may read less of its source. `accesses_max`: how many are compared with others.
    pub(crate) fn new(
        memory: &'a dyn GlobalMemory,
        shadows: &'a mut Shadows,
        cell_bytes: u32,
        accesses_max: u64,
    ) -> Global<'a> {
        let first = shadows.begin();
        Global {
            memory,
            shadows,
            sights: Vec::new(),
            open: Vec::new(),
            latest: [u32::MAX; 256],
            order: Order::new(first, accesses_max),
            cell_shift: cell_bytes.trailing_zeros(),
            unwritten: None,
            stale: None,
        }
    }

    /// The moment at which the launch begins.
    pub(crate) fn first_moment(&self) -> u32 {
        self.shadows.moment
    }

    /// Who first made bytes both written and read through the read-only path, and the first of all
    /// these bytes.
    pub(crate) fn stale(&self) -> Option<(Moment, Range<u64>)> {
        let (moment, number) = self.stale?;
        let shadow = &self.open[number];
        let first = shadow.range.start / 64 * 64;
        let (mut run, mut found) = (Run::default(), Vec::new());
        for (group, marks) in shadow.marks.iter().enumerate() {
            let word = marks[READ_ONLY] & (marks[WRITTEN] | marks[ATOMIC]);
            run.add(first + group as u64 * 64, word, &mut found);
        }
        run.finish(&mut found);
        found.into_iter().next().map(|bytes| (moment, bytes))
    }

    /// Ends the launch, whose last moment is given.
    pub(crate) fn end(mut self, moment: u32) -> Footprint {
        self.shadows.moment = moment + 1;
        self.open.sort_by_key(|shadow| shadow.range.start);
        let mut footprint = Footprint::default();
        for mut shadow in self.open.drain(..) {
            shadow.take(&mut footprint);
            shadow.used = self.shadows.launch;
            let key = (shadow.range.start, shadow.range.end);
            self.shadows.allocations.insert(key, shadow);
        }
        let allocations = &mut self.shadows.allocations;
        while allocations.len() > KEPT {
            let oldest = allocations
                .iter()
                .min_by_key(|(key, shadow)| (shadow.used, **key));
            let Some(key) = oldest.map(|(key, _)| *key) else {
                break;
            };
            allocations.remove(&key);
        }
        footprint
    }

    #[inline(always)]
    fn sight(
        &mut self,
        at: u32,
        lane: u32,
        address: u64,
        bytes: u32,
        how: How,
    ) -> Result<usize, Fault> {
        let latest = self.latest[at as usize & 255] as usize;
        if let Some(sight) = self.sights.get(latest) {
            let range = &sight.window.range;
            let (offset, length) = (address.wrapping_sub(range.start), range.end - range.start);
            if offset < length && u64::from(bytes) <= length - offset {
                return Ok(latest);
            }
        }
        self.look(at, lane, address, bytes, how)
    }

    #[cold]
    fn look(
        &mut self,
        at: u32,
        lane: u32,
        address: u64,
        bytes: u32,
        how: How,
    ) -> Result<usize, Fault> {
        let known = self
            .sights
            .iter()
            .position(|sight| sight.window.range.contains(&address));
        let Some(number) = known.or_else(|| self.open(address)) else {
            let why = ", which is outside of every allocation".to_owned();
            return Err(wrong(Kind::OutOfBounds, lane, how, address, bytes, why));
        };
        let range = &self.sights[number].window.range;
        let end = address + u64::from(bytes);
        if end > range.end {
            let (length, past) = (range.end - range.start, end - range.end);
            let why = format!(
                ", which end {past} bytes past the end of the {length} bytes allocated at {:#x}",
                range.start
            );
            return Err(wrong(Kind::OutOfBounds, lane, how, address, bytes, why));
        }
        self.latest[at as usize & 255] = number as u32;
        Ok(number)
    }

    #[cold]
    fn open(&mut self, address: u64) -> Option<usize> {
        let window = self.memory.find(address)?;
        let range = window.start..window.start + (window.range.end - window.range.start);
        let known = self.open.iter().position(|shadow| shadow.range == range);
        let shadow = known.unwrap_or_else(|| {
            let key = (range.start, range.end);
            let mut shadow = match self.shadows.allocations.entry(key) {
                Entry::Occupied(kept) => kept.remove(),
                Entry::Vacant(_) => Shadow::new(range.clone()),
            };
            let cells = &mut shadow.cells[self.cell_shift as usize];
            if self.order.left > 0 && cells.is_empty() {
                let count = ((range.end - 1) >> self.cell_shift) - (range.start >> self.cell_shift);
                *cells = vec![[0; 3]; count as usize + 1];
            }
            self.open.push(shadow);
            self.open.len() - 1
        });
        self.sights.push(Sight {
            is_partial: self.memory.unwritten(&range).is_some(),
            window,
            shadow,
        });
        Some(self.sights.len() - 1)
    }

    /// Checks an access of a lane, and notes it. The bytes are where the pointer leads, and no more
    /// than `bytes`, a power of two that divides the address.
    #[inline(always)]
    pub(crate) fn touch(
        &mut self,
        address: u64,
        bytes: u32,
        how: How,
        strength: Strength,
        now: Moment,
    ) -> Result<*mut u8, Fault> {
        let lane = now.thread % 32;
        let number = self.sight(now.at, lane, address, bytes, how)?;
        let sight = &self.sights[number];
        let offset = address - sight.window.range.start;
        let own = sight.window.start + offset;
        let shadow = &mut self.open[sight.shadow];
        let group = (own / 64 - shadow.range.start / 64) as usize;
        let bits = (u64::MAX >> (64 - bytes)) << (own % 64);
        shadow.pages[group / PAGE_MARKS] = 1;
        let marks = &mut shadow.marks[group];
        // Of a read or an atomic: bytes of which it is not known that anything wrote them.
        let questioned = if how == How::Write {
            0
        } else {
            bits & !(marks[WRITTEN] | marks[ATOMIC] | marks[KNOWN])
        };
        let is_stale = match how {
            How::Read => {
                marks[READ] |= bits;
                false
            }
            How::ReadOnly => {
                marks[READ] |= bits;
                marks[READ_ONLY] |= bits;
                (marks[WRITTEN] | marks[ATOMIC]) & bits != 0
            }
            How::Write => {
                marks[WRITTEN] |= bits;
                marks[READ_ONLY] & bits != 0
            }
            How::Atomic => {
                marks[ATOMIC] |= bits;
                marks[READ_ONLY] & bits != 0
            }
        };
        if is_stale && self.stale.is_none() {
            self.stale = Some((now, sight.shadow));
        }
        // Safe arithmetic: the offset is within the window.
        let data = sight.window.data.wrapping_add(offset as usize);
        if questioned != 0 && sight.is_partial {
            self.ask(number, own..own + u64::from(bytes), questioned, how, now);
        }
        if self.order.left > 0 {
            self.compare(number, own, bytes, how, strength, now)?;
        }
        Ok(data)
    }

    /// The same for weak accesses of threads one after another to bytes one after another, if no
    /// question is to be asked of any of them; None else, and nothing is noted. `barriers`: those
    /// of the warp, by lane.
    #[inline(always)]
    pub(crate) fn touch_row(
        &mut self,
        address: u64,
        bytes: u32,
        how: How,
        first: Moment,
        barriers: &[u32],
    ) -> Result<Option<*mut u8>, Fault> {
        let count = barriers.len() as u64;
        let length = u64::from(bytes) * count;
        let latest = self.latest[first.at as usize & 255] as usize;
        let Some(sight) = self.sights.get(latest) else {
            return Ok(None);
        };
        let range = &sight.window.range;
        let offset = address.wrapping_sub(range.start);
        if offset >= range.end - range.start || length > range.end - range.start - offset {
            return Ok(None);
        }
        let own = sight.window.start + offset;
        let is_partial = sight.is_partial && how != How::Write;
        let data = sight.window.data.wrapping_add(offset as usize);
        let shadow = &mut self.open[sight.shadow];
        let base = shadow.range.start / 64;
        let groups = (own / 64 - base) as usize..((own + length - 1) / 64 - base) as usize + 1;
        let bits_of = |group: usize| {
            let start = (base + group as u64) * 64;
            let (from, to) = (own.max(start), (own + length).min(start + 64));
            (u64::MAX >> (64 - (to - from))) << (from - start)
        };
        for group in groups.clone() {
            let (bits, marks) = (bits_of(group), &shadow.marks[group]);
            let written = marks[WRITTEN] | marks[ATOMIC];
            let is_stale = match how {
                How::ReadOnly => written & bits != 0,
                How::Read => false,
                _ => marks[READ_ONLY] & bits != 0,
            };
            if is_stale || is_partial && bits & !(written | marks[KNOWN]) != 0 {
                return Ok(None);
            }
        }
        for group in groups {
            let bits = bits_of(group);
            let marks = &mut shadow.marks[group];
            marks[if how == How::Write { WRITTEN } else { READ }] |= bits;
            if how == How::ReadOnly {
                marks[READ_ONLY] |= bits;
            }
            shadow.pages[group / PAGE_MARKS] = 1;
        }
        if self.order.left < count || barriers.iter().any(|barriers| *barriers > 0xffff) {
            self.order.left = 0;
            return Ok(Some(data));
        }
        self.order.left -= count;
        let start = shadow.range.start >> self.cell_shift;
        let cells = (own >> self.cell_shift) - start..((own + length) >> self.cell_shift) - start;
        let all = &mut shadow.cells[self.cell_shift as usize];
        if let Some(cells) = all.get_mut(cells.start as usize..cells.end as usize)
            && u64::from(bytes) >> self.cell_shift != 0
        {
            let compared = self.order.each(cells, how == How::Write, first, barriers);
            compared.map_err(|(thread, other)| {
                let own = own + u64::from(thread - first.thread) * u64::from(bytes);
                let mut fault = wrong(Kind::Race, thread % 32, how, own, bytes, String::new());
                if let Some(detail) = &mut fault.detail {
                    detail.other = Some(other);
                }
                fault
            })?;
        }
        Ok(Some(data))
    }

    /// Asks whether bytes that are read were ever written, and notes the first that were not. The
    /// launch goes on.
    #[cold]
    fn ask(&mut self, number: usize, bytes: Range<u64>, questioned: u64, how: How, now: Moment) {
        let shadow = &mut self.open[self.sights[number].shadow];
        let own = bytes.start;
        let asked = own..(own + ASKED_BYTES).min(shadow.range.end);
        let until = self
            .memory
            .unwritten(&asked)
            .map_or(asked.end, |part| part.start);
        // The next question is about what follows.
        let mut at = own;
        while at < until {
            let next = until.min((at | 63) + 1);
            let group = (at / 64 - shadow.range.start / 64) as usize;
            shadow.marks[group][KNOWN] |= (u64::MAX >> (64 - (next - at))) << (at % 64);
            shadow.pages[group / PAGE_MARKS] = 1;
            at = next;
        }
        let known = shadow.marks[(own / 64 - shadow.range.start / 64) as usize][KNOWN];
        if questioned & !known != 0 && self.unwritten.is_none() {
            self.unwritten = Some((now, bytes, how.does()));
        }
    }

    #[inline(never)]
    fn compare(
        &mut self,
        number: usize,
        own: u64,
        bytes: u32,
        how: How,
        strength: Strength,
        now: Moment,
    ) -> Result<(), Fault> {
        self.order.left -= 1;
        if now.warp > 0xffff {
            self.order.stop();
            return Ok(());
        }
        let shadow = &mut self.open[self.sights[number].shadow];
        let base = shadow.range.start >> self.cell_shift;
        let first = (own >> self.cell_shift) - base;
        let end = ((own + u64::from(bytes) - 1) >> self.cell_shift) + 1 - base;
        let cells = &mut shadow.cells[self.cell_shift as usize];
        let Some(cells) = cells.get_mut(first as usize..end as usize) else {
            return Ok(());
        };
        let compared = match how {
            How::Read | How::ReadOnly => self.order.read(cells, now, strength),
            How::Write | How::Atomic => self.order.write(cells, now, strength),
        };
        compared.map_err(|other| {
            let why = String::new();
            let mut fault = wrong(Kind::Race, now.thread % 32, how, own, bytes, why);
            if let Some(detail) = &mut fault.detail {
                detail.other = Some(other);
            }
            fault
        })
    }

    /// The address of an allocation's byte itself, whichever window leads to it.
    fn own(&self, at: u32, address: u64) -> u64 {
        let latest = self.latest[at as usize & 255] as usize;
        self.sights.get(latest).map_or(address, |sight| {
            let range = &sight.window.range;
            address
                .wrapping_sub(range.start)
                .wrapping_add(sight.window.start)
        })
    }

    /// A strong read of an address that was just touched.
    pub(crate) fn observe(&mut self, address: u64, now: Moment, strong: Strong) {
        let own = self.own(now.at, address);
        self.order.observe(own, now, strong);
    }

    /// A strong write.
    pub(crate) fn publish(&mut self, address: u64, now: Moment, strong: Strong, is_atomic: bool) {
        let own = self.own(now.at, address);
        self.order.publish(own, now, strong, is_atomic);
    }
}
