//! Global memory as a launch sees it: a copy, made page by page when a page is first touched, so
//! that what the launch writes can be compared with what something else writes.

use std::ops::Range;

/// Where global memory is. Addresses are those that kernels use.
pub trait Source {
    /// The allocation that holds `address`.
    fn allocation(&self, address: u64) -> Option<Range<u64>>;

    /// The bytes at `address`, all within one allocation.
    fn read(&self, address: u64, to: &mut [u8]);
}

const PAGE_BYTES: u64 = 4096;
const PAGE_WORDS: usize = PAGE_BYTES as usize / 64;

struct Page {
    bytes: [u8; PAGE_BYTES as usize],
    written: [u64; PAGE_WORDS],
    /// Read through the read-only path.
    read_only: [u64; PAGE_WORDS],
}

struct Window {
    range: Range<u64>,
    pages: Vec<Option<Box<Page>>>,
}

/// The copy.
pub struct Overlay<'a> {
    source: &'a dyn Source,
    windows: Vec<Window>,
    latest: usize,
}

/// The largest access of one instruction.
pub(crate) type Bytes = [u8; 32];

/// Why an access is not possible.
#[derive(Debug)]
pub(crate) enum Denied {
    /// Nothing is at this address, or the allocation ends before the access does.
    Bounds(String),
    /// Bytes that were written are read through the read-only path, or the other way round.
    ReadOnly(String),
}

fn mask_of(offset: u64, bytes: u64) -> (usize, u64) {
    (
        (offset / 64) as usize,
        (u64::MAX >> (64 - bytes)) << (offset % 64),
    )
}

impl<'a> Overlay<'a> {
    /// Nothing copied yet.
    pub fn new(source: &'a dyn Source) -> Overlay<'a> {
        Overlay {
            source,
            windows: Vec::new(),
            latest: 0,
        }
    }

    #[inline]
    fn window(&mut self, address: u64, bytes: u64) -> Result<usize, Denied> {
        let holds = |window: &Window| window.range.contains(&address);
        if !self.windows.get(self.latest).is_some_and(holds) {
            self.latest = match self.windows.iter().position(holds) {
                Some(known) => known,
                None => self.open(address)?,
            };
        }
        let range = &self.windows[self.latest].range;
        if address + bytes > range.end {
            let (length, past) = (range.end - range.start, address + bytes - range.end);
            return Err(Denied::Bounds(format!(
                "{bytes} bytes at {address:#x}, which end {past} bytes past the end of the {length} bytes allocated at {:#x}",
                range.start
            )));
        }
        Ok(self.latest)
    }

    #[cold]
    fn open(&mut self, address: u64) -> Result<usize, Denied> {
        let none = || Denied::Bounds(format!("address {address:#x}, where nothing is allocated"));
        let range = self
            .source
            .allocation(address)
            .filter(|range| range.contains(&address))
            .ok_or_else(none)?;
        let count = (range.end - 1) / PAGE_BYTES - range.start / PAGE_BYTES + 1;
        let pages = (0..count).map(|_| None).collect();
        self.windows.push(Window { range, pages });
        Ok(self.windows.len() - 1)
    }

    #[inline]
    fn page(&mut self, window: usize, address: u64) -> &mut Page {
        let window = &mut self.windows[window];
        let number = address / PAGE_BYTES;
        let slot = &mut window.pages[(number - window.range.start / PAGE_BYTES) as usize];
        if slot.is_none() {
            *slot = Some(copied(self.source, &window.range, number));
        }
        slot.as_mut().expect("it was just made")
    }

    /// Reads up to 32 bytes, aligned to their size.
    #[inline]
    pub(crate) fn read(
        &mut self,
        address: u64,
        bytes: u32,
        read_only: bool,
    ) -> Result<&[u8], Denied> {
        let window = self.window(address, u64::from(bytes))?;
        let page = self.page(window, address);
        let at = address % PAGE_BYTES;
        if read_only {
            let (word, mask) = mask_of(at, u64::from(bytes));
            if page.written[word] & mask != 0 {
                return Err(Denied::ReadOnly(format!(
                    "{bytes} bytes at {address:#x} are read through the read-only path, and this launch has written them"
                )));
            }
            page.read_only[word] |= mask;
        }
        Ok(&page.bytes[at as usize..at as usize + bytes as usize])
    }

    /// Writes up to 32 bytes, aligned to their size.
    #[inline]
    pub(crate) fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), Denied> {
        let window = self.window(address, bytes.len() as u64)?;
        let page = self.page(window, address);
        let at = address % PAGE_BYTES;
        let (word, mask) = mask_of(at, bytes.len() as u64);
        if page.read_only[word] & mask != 0 {
            return Err(Denied::ReadOnly(format!(
                "{} bytes at {address:#x} are written, and this launch has read them through the read-only path",
                bytes.len()
            )));
        }
        page.written[word] |= mask;
        page.bytes[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    /// What was written: address and bytes of each stretch, which never cross a multiple of 64.
    pub fn written(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.windows
            .iter()
            .flat_map(|window| {
                let first = window.range.start / PAGE_BYTES;
                window
                    .pages
                    .iter()
                    .enumerate()
                    .filter_map(move |(at, page)| {
                        Some(((first + at as u64) * PAGE_BYTES, page.as_deref()?))
                    })
            })
            .flat_map(|(address, page)| {
                page.written
                    .iter()
                    .enumerate()
                    .flat_map(move |(word, mask)| {
                        stretches(*mask).map(move |range| {
                            let (start, end) = (word * 64 + range.start, word * 64 + range.end);
                            (address + start as u64, &page.bytes[start..end])
                        })
                    })
            })
    }
}

/// Ranges of bits that are set.
fn stretches(mut mask: u64) -> impl Iterator<Item = Range<usize>> {
    std::iter::from_fn(move || {
        if mask == 0 {
            return None;
        }
        let start = mask.trailing_zeros();
        let length = (mask >> start).trailing_ones();
        mask &= if start + length == 64 {
            0
        } else {
            u64::MAX << (start + length)
        };
        Some(start as usize..(start + length) as usize)
    })
}

#[cold]
fn copied(source: &dyn Source, range: &Range<u64>, number: u64) -> Box<Page> {
    let mut page = Box::new(Page {
        bytes: [0; PAGE_BYTES as usize],
        written: [0; PAGE_WORDS],
        read_only: [0; PAGE_WORDS],
    });
    let start = range.start.max(number * PAGE_BYTES);
    let end = range.end.min((number + 1) * PAGE_BYTES);
    let at = (start % PAGE_BYTES) as usize;
    source.read(start, &mut page.bytes[at..at + (end - start) as usize]);
    page
}
