//! Pinned memory that a kernel touches at its product address. Those pages may be closed to the
//! host because a copy is in flight, but the kernel is not the host. They are opened while it runs
//! and restored afterwards.

use std::ops::Range;

use crate::work::Address;

/// The pages that hold a range.
pub(super) fn pages_of(range: &Range<Address>) -> Range<Address> {
    range.start & !4095..(range.end + 4095) & !4095
}

/// Pages opened for a launch, with their former protection.
pub(super) struct Opened {
    before: Vec<(Range<Address>, i32)>,
}

impl Opened {
    /// Opens the pages of `range`.
    pub(super) fn new(range: &Range<Address>) -> Self {
        let pages = pages_of(range);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let before = protections(&maps, &pages);
        protect(&pages, libc::PROT_READ | libc::PROT_WRITE);
        Self { before }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.before
            .iter()
            .for_each(|(pages, protection)| protect(pages, *protection));
    }
}

fn protect(pages: &Range<Address>, protection: i32) {
    // SAFETY: pages of pinned memory, which the room of memory maps for the product and closes in
    // the same way; the lock of the machine is held while a launch runs, so nobody changes them
    // meanwhile.
    unsafe {
        libc::mprotect(
            pages.start as *mut libc::c_void,
            (pages.end - pages.start) as usize,
            protection,
        )
    };
}

/// The parts of `pages` with their protections, from the kernel's list of mappings.
fn protections(maps: &str, pages: &Range<Address>) -> Vec<(Range<Address>, i32)> {
    let mut found = Vec::new();
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let (Some(range), Some(flags)) = (words.next(), words.next()) else {
            continue;
        };
        let Some((start, end)) = range.split_once('-') else {
            continue;
        };
        let (Ok(start), Ok(end)) = (
            Address::from_str_radix(start, 16),
            Address::from_str_radix(end, 16),
        ) else {
            continue;
        };
        let part = start.max(pages.start)..end.min(pages.end);
        if part.is_empty() {
            continue;
        }
        let mut protection = libc::PROT_NONE;
        for (flag, bit) in [
            ('r', libc::PROT_READ),
            ('w', libc::PROT_WRITE),
            ('x', libc::PROT_EXEC),
        ] {
            if flags.contains(flag) {
                protection |= bit;
            }
        }
        found.push((part, protection));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protections_are_read_for_the_pages_asked_for_only() {
        let maps = "1000-3000 rw-p 00000000 00:00 0\n3000-4000 ---p 00000000 00:00 0 [x]\n9000-a000 r-xp 0 00:00 0\n";
        let (all, none) = (libc::PROT_READ | libc::PROT_WRITE, libc::PROT_NONE);
        assert_eq!(
            protections(maps, &(0x2000..0x5000)),
            [(0x2000..0x3000, all), (0x3000..0x4000, none)]
        );
    }
}
