//! Shared memory of a block: its bytes, their owners, and for each cell of them (as many bytes as
//! the kernel's smallest access) who touched it last and when.

use crate::decode::Owned;
use crate::finding::{Detail, Fault, Kind};
use crate::moment::{self, Moment, Other};

/// A lane's number stands for its thread; these for several.
const MANY_OF_WARP: u32 = 1 << 10;
const MANY: u32 = 1 << 11;

#[derive(Clone, Copy, Default)]
struct Touch {
    /// 0: nobody did.
    block: u32,
    warp: u32,
    who: u32,
    at: u32,
}

impl Touch {
    fn of(moment: Moment) -> Touch {
        Touch {
            block: moment.block,
            warp: moment.warp,
            who: moment.thread,
            at: moment.at,
        }
    }

    /// Whether what was done then is before the moment, by a barrier or by the thread's own order.
    #[inline]
    fn is_before(self, moment: Moment) -> bool {
        self.block < moment.block
            || self.who == moment.thread
            || self.who & MANY == 0
                && (self.who ^ moment.thread) & 0x3e0 == 0
                && self.warp < moment.warp
    }

    /// What stands for this and for a touch at the moment.
    fn joined(self, moment: Moment) -> Touch {
        let mut both = Touch::of(moment);
        if self.who != moment.thread && self.block == moment.block && !self.is_before(moment) {
            let is_of_warp = self.who & MANY == 0 && (self.who ^ moment.thread) & 0x3e0 == 0;
            both.who = if is_of_warp {
                moment.thread & 0x3e0 | MANY_OF_WARP
            } else {
                MANY
            };
        }
        both
    }
}

#[derive(Clone, Copy, Default)]
struct Cell {
    written: Touch,
    read: Touch,
    /// By an atomic.
    updated: Touch,
    /// How many proxy fences there were before it was written.
    fences: u32,
    /// The warps whose `wgmma` in flight read here, a bit each.
    readers: u32,
    /// A copy that was started and not waited for writes here.
    is_awaited: bool,
}

pub(crate) struct Shared {
    bytes: Vec<u8>,
    owned: Vec<Owned>,
    cells: Vec<Cell>,
    /// log2 of the bytes of a cell.
    cell_shift: u32,
    /// How many proxy fences there were, from 1, up to the last one of each thread and in all.
    fenced: Vec<u32>,
    fences: u32,
    /// Off where threads meet at barriers that only some of the block take part in.
    pub(crate) is_followed: bool,
    /// Off where no access is compared with others: cells stay as they are.
    has_cells: bool,
    /// Which variable was touched last.
    last: usize,
}

/// How shared memory is touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
    /// Read and write at once; does not race with its like.
    Atomic,
    /// Starts a copy.
    Start,
    /// Ends a copy.
    Arrive,
}

impl Access {
    fn did(self) -> &'static str {
        match self {
            Access::Read => "read",
            Access::Atomic => "updated (atomic)",
            Access::Write | Access::Start | Access::Arrive => "wrote",
        }
    }
}

impl Shared {
    /// `cell_bytes`: a power of two that divides the size of every access. `has_cells`: whether
    /// accesses are compared.
    pub(crate) fn new(owned: Vec<Owned>, cell_bytes: u32, has_cells: bool) -> Shared {
        let end = owned
            .iter()
            .map(|owned| owned.start + owned.bytes)
            .max()
            .unwrap_or(0) as usize;
        Shared {
            // What nothing wrote is NaN, and no sensible index.
            bytes: vec![0xff; end],
            cells: vec![
                Cell::default();
                end.div_ceil(cell_bytes as usize) * usize::from(has_cells)
            ],
            cell_shift: cell_bytes.trailing_zeros(),
            owned,
            fenced: vec![1; 1024],
            fences: 1,
            is_followed: true,
            has_cells,
            last: 0,
        }
    }

    pub(crate) fn reset(&mut self) {
        self.bytes.fill(0xff);
        self.is_followed = true;
        self.fenced.fill(1);
        self.fences = 1;
        // Numbers of barriers grow over all blocks, so older touches order themselves. Copies and
        // products that the last block did not wait for are forgotten.
        for cell in &mut self.cells {
            (cell.is_awaited, cell.fences, cell.readers) = (false, 0, 0);
        }
    }

    /// `fence.proxy.async` of lanes.
    pub(crate) fn fence_proxy(&mut self, first_thread: u32, lanes: u32) {
        self.fences += 1;
        for lane in (0..32).filter(|lane| lanes >> lane & 1 != 0) {
            self.fenced[(first_thread + lane) as usize] = self.fences;
        }
    }

    #[inline(always)]
    fn check(&mut self, address: u64, bytes: u64, lane: u32) -> Result<(), Fault> {
        let holds = |owned: &Owned| {
            owned.start <= address && address.saturating_add(bytes) <= owned.start + owned.bytes
        };
        if address & (bytes - 1) == 0 {
            if self.owned.get(self.last).is_some_and(holds) {
                return Ok(());
            }
            if let Some(found) = self.owned.iter().position(holds) {
                self.last = found;
                return Ok(());
            }
        }
        Err(self.misplaced(address, bytes, lane))
    }

    #[cold]
    fn misplaced(&self, address: u64, bytes: u64, lane: u32) -> Fault {
        if !address.is_multiple_of(bytes) {
            return Fault::new(
                Kind::Misaligned,
                lane,
                format!("{bytes} bytes at {address:#x} of shared memory"),
            );
        }
        let near = self.owned.iter().min_by_key(|owned| {
            let end = owned.start + owned.bytes;
            if address < owned.start {
                owned.start - address
            } else {
                address.saturating_sub(end)
            }
        });
        let place = match near {
            Some(owned) if address < owned.start => {
                format!("{} bytes before {}", owned.start - address, owned.name)
            }
            Some(owned) => {
                format!(
                    "from byte {} of {}, which has {}, on",
                    address - owned.start,
                    owned.name,
                    owned.bytes
                )
            }
            None => "of a block that has none".to_owned(),
        };
        Fault::new(
            Kind::OutOfBounds,
            lane,
            format!("{bytes} bytes of shared memory {place}"),
        )
    }

    /// The variable that was touched last, where no access is compared: its place and its bytes.
    #[inline(always)]
    pub(crate) fn uncompared(&mut self) -> Option<(u64, &mut [u8])> {
        let owned = self.owned.get(self.last).filter(|_| !self.has_cells)?;
        let range = owned.start as usize..(owned.start + owned.bytes) as usize;
        Some((owned.start, &mut self.bytes[range]))
    }

    /// Checks an access of a lane and notes it.
    #[inline(always)]
    pub(crate) fn touch(
        &mut self,
        address: u64,
        bytes: u64,
        access: Access,
        moment: Moment,
    ) -> Result<(), Fault> {
        self.check(address, bytes, moment.thread % 32)?;
        if self.has_cells {
            self.note(address, bytes, access, moment)
        } else {
            Ok(())
        }
    }

    /// Compares an access with those before it.
    fn note(
        &mut self,
        address: u64,
        bytes: u64,
        access: Access,
        moment: Moment,
    ) -> Result<(), Fault> {
        let reads = access == Access::Read;
        let (first, end) = (
            address >> self.cell_shift,
            (address + bytes) >> self.cell_shift,
        );
        for cell in &mut self.cells[first as usize..end as usize] {
            if cell.is_awaited && access != Access::Arrive {
                return Err(awaited(cell, address, access, moment));
            }
            if cell.readers != 0 && !reads {
                return Err(in_flight(cell, address, access, moment));
            }
            if access == Access::Arrive {
                cell.is_awaited = false;
                (cell.written, cell.fences) = (Touch::of(moment), self.fences);
                continue;
            }
            if !cell.written.is_before(moment) && self.is_followed {
                let written = cell.written;
                return Err(self.race(written, "wrote", (address, bytes), access, moment));
            }
            // Atomics do not race with each other.
            if access != Access::Atomic && !cell.updated.is_before(moment) && self.is_followed {
                let (updated, does) = (cell.updated, Access::Atomic.did());
                return Err(self.race(updated, does, (address, bytes), access, moment));
            }
            if reads {
                cell.read = cell.read.joined(moment);
                continue;
            }
            if !cell.read.is_before(moment) && self.is_followed {
                let read = cell.read;
                return Err(self.race(read, "read", (address, bytes), access, moment));
            }
            // The numbers of reads that were ordered are done with.
            if access == Access::Start {
                cell.is_awaited = true;
            }
            if access == Access::Atomic {
                cell.updated = cell.updated.joined(moment);
            } else {
                (cell.written, cell.fences) = (Touch::of(moment), self.fences);
            }
        }
        Ok(())
    }

    fn cells(&mut self, address: u64, bytes: u64) -> &mut [Cell] {
        if !self.has_cells {
            return &mut [];
        }
        let (first, end) = (
            address >> self.cell_shift,
            (address + bytes) >> self.cell_shift,
        );
        &mut self.cells[first as usize..end as usize]
    }

    /// A `wgmma` begins to read 16 bytes, through the async proxy.
    pub(crate) fn begin_read(&mut self, address: u64, moment: Moment) -> Result<(), Fault> {
        self.touch(address, 16, Access::Read, moment)?;
        let fenced = std::mem::take(&mut self.fenced);
        let cells = self.cells(address, 16);
        let unfenced = cells
            .iter()
            .find(|cell| cell.fences >= fenced[cell.written.who as usize])
            .map(|cell| unfenced(cell.written, address, moment));
        for cell in cells {
            cell.readers |= 1 << (moment.thread / 32);
        }
        self.fenced = fenced;
        unfenced.map_or(Ok(()), Err)
    }

    /// That `wgmma` was waited for.
    pub(crate) fn end_read(&mut self, address: u64, moment: Moment) -> Result<(), Fault> {
        for cell in self.cells(address, 16) {
            cell.readers &= !(1 << (moment.thread / 32));
        }
        self.touch(address, 16, Access::Read, moment)
    }

    /// Another `wgmma` that is not waited for reads there, too.
    pub(crate) fn goes_on_reading(&mut self, address: u64, moment: Moment) {
        for cell in self.cells(address, 16) {
            cell.readers |= 1 << (moment.thread / 32);
        }
    }

    #[inline]
    pub(crate) fn load<const N: usize>(&self, address: u64) -> [u8; N] {
        let mut found = [0; N];
        found.copy_from_slice(&self.bytes[address as usize..address as usize + N]);
        found
    }

    /// Where a byte is.
    pub(crate) fn place(&mut self, address: u64) -> *mut u8 {
        self.bytes[address as usize..].as_mut_ptr()
    }

    pub(crate) fn store(&mut self, address: u64, bytes: &[u8]) {
        self.bytes[address as usize..address as usize + bytes.len()].copy_from_slice(bytes);
    }
}

#[cold]
fn awaited(cell: &Cell, address: u64, access: Access, moment: Moment) -> Fault {
    let message = format!(
        "{} shared memory at {address:#x}, while a copy by cp.async is in flight to it: thread {} of the block started it and has not waited for its group",
        access.did(),
        cell.written.who
    );
    Fault::new(Kind::Copy, moment.thread % 32, message)
}

#[cold]
fn in_flight(cell: &Cell, address: u64, access: Access, moment: Moment) -> Fault {
    let message = format!(
        "{} shared memory at {address:#x}, which a wgmma of warp {} reads: no wgmma.wait_group of its group has ended",
        access.did(),
        cell.readers.trailing_zeros()
    );
    Fault::new(Kind::Flight, moment.thread % 32, message)
}

#[cold]
fn unfenced(written: Touch, address: u64, moment: Moment) -> Fault {
    let message = format!(
        "shared memory at {address:#x} is read through the async proxy, and thread {} of the block wrote it at instruction {} without a fence.proxy.async after that",
        written.who, written.at
    );
    Fault::new(Kind::Fence, moment.thread % 32, message)
}

impl Shared {
    /// Where an address is, in words.
    fn describe(&self, address: u64) -> String {
        let holds = |owned: &&Owned| (owned.start..owned.start + owned.bytes).contains(&address);
        match self.owned.iter().find(holds) {
            Some(owned) => format!("byte {} of {}", address - owned.start, owned.name),
            None => format!("{address:#x} of shared memory"),
        }
    }

    #[cold]
    fn race(
        &self,
        touch: Touch,
        does: &'static str,
        (address, bytes): (u64, u64),
        access: Access,
        moment: Moment,
    ) -> Fault {
        let did = access.did();
        let place = self.describe(address);
        let mut fault = Fault::new(
            Kind::Race,
            moment.thread % 32,
            format!("{did} {bytes} bytes from {place} on"),
        );
        let who = match touch.who {
            who if who & MANY != 0 => moment::OF_BLOCK,
            who if who & MANY_OF_WARP != 0 => moment::OF_WARP + (who & 0x3e0) / 32,
            who => who,
        };
        fault.detail = Some(Box::new(Detail {
            bytes: None,
            does: did,
            other: Some(Other {
                stamp: u64::from(touch.block) << 32 | u64::from(who) << 5,
                at: touch.at,
                does,
            }),
        }));
        fault
    }
}
