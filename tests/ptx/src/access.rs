//! Loads, stores and copies of lanes, in every state space.

use crate::decode::{LOCAL_WINDOW, Owned, SHARED_WINDOW, WINDOW_BYTES};
use crate::finding::{Detail, Fault, Kind};
use crate::memory::{Bytes, How};
use crate::op::{Element, Place, Register, Strength, Strong, Width};
use crate::shared::Access;
use crate::state::{Ground, LANES, Warp, bits_of};
use crate::text::Space;

#[inline(always)]
pub(crate) fn address(warp: &Warp, place: &Place, lane: u32) -> u64 {
    let offset = place.offset as u64;
    match place.base {
        // Registers of 32 bits hold addresses of shared, local and parameter space.
        Some(base) if base.width == Width::W => {
            let base = u64::from(warp.w[base.slot as usize][lane as usize]);
            base.wrapping_add(offset) & 0xffff_ffff
        }
        Some(base) => warp.get(base, lane).wrapping_add(offset),
        None => offset,
    }
}

/// The space that a generic address is in, and the address there.
#[inline(always)]
fn resolved(space: Space, address: u64) -> (Space, u64) {
    if space != Space::Generic {
        return (space, address);
    }
    if address.wrapping_sub(SHARED_WINDOW) < WINDOW_BYTES {
        (Space::Shared, address - SHARED_WINDOW)
    } else if address.wrapping_sub(LOCAL_WINDOW) < WINDOW_BYTES {
        (Space::Local, address - LOCAL_WINDOW)
    } else {
        (Space::Global, address)
    }
}

#[cold]
fn misaligned(space: Space, address: u64, bytes: u32, lane: u32) -> Fault {
    let message = format!("{bytes} bytes at {address:#x} of {space:?} memory");
    let mut fault = Fault::new(Kind::Misaligned, lane, message);
    if space == Space::Global {
        fault.detail = Some(Box::new(Detail {
            bytes: Some(address..address.saturating_add(u64::from(bytes))),
            does: "touched",
            other: None,
        }));
    }
    fault
}

/// Where local memory of a lane is, if the variable there is large enough.
fn local(
    owned: &[Owned],
    bytes_each: u64,
    address: u64,
    bytes: u32,
    lane: u32,
) -> Result<usize, Fault> {
    let end = address.saturating_add(u64::from(bytes));
    if owned
        .iter()
        .any(|owned| owned.start <= address && end <= owned.start + owned.bytes)
    {
        return Ok((u64::from(lane) * bytes_each + address) as usize);
    }
    Err(Fault::new(
        Kind::OutOfBounds,
        lane,
        format!("{bytes} bytes at {address:#x} of local memory, where no variable is"),
    ))
}

/// Where the bytes are that a lane accesses, after a check, in memory that can be written.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn place(
    warp: &mut Warp,
    ground: &mut Ground<'_, '_>,
    lane: u32,
    (space, address): (Space, u64),
    bytes: u32,
    how: How,
    strong: Strong,
    at: u32,
) -> Result<*mut u8, Fault> {
    match space {
        Space::Global => {
            let moment = warp.moment(ground, lane, at);
            let strength = strong.strength;
            let place = ground.global.touch(address, bytes, how, strength, moment)?;
            if strength != Strength::Weak {
                match how {
                    How::Write => ground.global.publish(address, moment, strong, false),
                    _ => ground.global.observe(address, moment, strong),
                }
            }
            Ok(place)
        }
        Space::Shared => {
            let moment = warp.moment(ground, lane, at);
            let access = match how {
                How::Write => Access::Write,
                _ => Access::Read,
            };
            ground
                .shared
                .touch(address, u64::from(bytes), access, moment)?;
            Ok(ground.shared.place(address))
        }
        Space::Local => {
            let program = ground.program;
            let at = local(&program.local, program.local_bytes, address, bytes, lane)?;
            Ok(warp.local[at..at + bytes as usize].as_mut_ptr())
        }
        _ => Err(Fault::new(
            Kind::OutOfBounds,
            lane,
            format!("{space:?} memory, which these kernels do not have, or do not write"),
        )),
    }
}

/// The bytes of a parameter.
fn parameter<'a>(
    ground: &'a Ground<'_, '_>,
    address: u64,
    bytes: u32,
    lane: u32,
) -> Result<&'a [u8], Fault> {
    let found = address
        .checked_add(u64::from(bytes))
        .and_then(|end| ground.parameters.get(address as usize..end as usize));
    found.ok_or_else(|| {
        let message = format!("{bytes} bytes at {address} of the parameters");
        Fault::new(Kind::OutOfBounds, lane, message)
    })
}

/// The space and address that a lane accesses there, if it is aligned.
#[inline(always)]
pub(crate) fn target(
    warp: &Warp,
    place: &Place,
    lane: u32,
    bytes: u32,
) -> Result<(Space, u64), Fault> {
    let (space, address) = resolved(place.space, address(warp, place, lane));
    if address & u64::from(bytes - 1) != 0 {
        return Err(misaligned(space, address, bytes, lane));
    }
    Ok((space, address))
}

/// An element of what was read.
#[inline(always)]
pub(crate) fn value(bytes: &[u8], element: Element) -> u64 {
    let value = match *bytes {
        [a] => u64::from(a),
        [a, b] => u64::from(u16::from_le_bytes([a, b])),
        [a, b, c, d] => u64::from(u32::from_le_bytes([a, b, c, d])),
        [a, b, c, d, e, f, g, h] => u64::from_le_bytes([a, b, c, d, e, f, g, h]),
        _ => 0,
    };
    let unused = 64 - element.bytes * 8;
    if element.is_signed {
        (((value << unused) as i64) >> unused) as u64
    } else {
        value
    }
}

/// Lanes one after another that access global memory one after another: the first address.
#[inline(always)]
fn row(warp: &Warp, mask: u32, place: &Place, bytes: u32) -> Option<(u64, std::ops::Range<u32>)> {
    let Some(Register {
        width: Width::D,
        slot,
    }) = place.base
    else {
        return None;
    };
    let (start, count) = (mask.trailing_zeros(), mask.count_ones());
    if count < 2 || mask >> start != u32::MAX >> (32 - count) {
        return None;
    }
    let addresses = &warp.d[slot as usize][start as usize..(start + count) as usize];
    let first = addresses[0];
    let is_row = (0..)
        .zip(addresses)
        .fold(true, |is_row, (number, address)| {
            is_row & (address.wrapping_sub(first) == number * u64::from(bytes))
        });
    let first = first.wrapping_add(place.offset as u64);
    let is_global = resolved(place.space, first).0 == Space::Global;
    let is_aligned = first & u64::from(bytes - 1) == 0;
    (is_row && is_global && is_aligned).then_some((first, start..start + count))
}

/// Copies what is at `from`, which is so many bytes, a power of two up to 32.
///
/// # Safety
/// So many bytes can be read there.
#[inline(always)]
unsafe fn copied(from: *const u8, bytes: u32) -> Bytes {
    let mut to = [0; 32];
    // SAFETY: as the caller says; a constant size becomes one move.
    unsafe {
        match bytes {
            1 => to[0] = *from,
            2 => std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), 2),
            4 => std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), 4),
            8 => std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), 8),
            16 => std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), 16),
            _ => std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), bytes as usize),
        }
    }
    to
}

/// Lanes that access words of 32 bits in the variable of shared memory that was touched last, where
/// no access is compared: where each lane's words begin, and the bytes of the variable.
#[inline(always)]
fn words<'a>(
    warp: &Warp,
    ground: &'a mut Ground<'_, '_>,
    mask: u32,
    place: &Place,
    element: Element,
    registers: &[Register],
) -> Option<([u64; LANES], &'a mut [u8])> {
    let are_words = element.bytes == 4 && registers.iter().all(|it| it.width == Width::W);
    let window = match place.space {
        Space::Shared => 0,
        Space::Generic => SHARED_WINDOW,
        _ => return None,
    };
    let base = place.base.filter(|_| are_words)?;
    let (start, bytes) = ground.shared.uncompared()?;
    let size = 4 * registers.len() as u64;
    let from = (place.offset as u64)
        .wrapping_sub(start)
        .wrapping_sub(window);
    let slot = base.slot as usize;
    let places = match base.width {
        Width::W => warp.w[slot].map(|base| u64::from(base.wrapping_add(from as u32))),
        Width::D => warp.d[slot].map(|base| base.wrapping_add(from)),
        _ => return None,
    };
    let end = (bytes.len() as u64).checked_sub(size)?;
    let is_well = places.iter().enumerate().all(|(lane, &place)| {
        let is_in_place = place <= end && place.wrapping_add(start) & (size - 1) == 0;
        mask >> lane & 1 == 0 || is_in_place
    });
    is_well.then_some((places, bytes))
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
pub(crate) fn load(
    warp: &mut Warp,
    ground: &mut Ground<'_, '_>,
    mask: u32,
    from: &Place,
    element: Element,
    (how, strong): (How, Strong),
    to: &[Register],
    at: u32,
) -> Result<(), Fault> {
    let (size, bytes) = (element.bytes as usize, element.bytes * to.len() as u32);
    if let Some((address, lanes)) = row(warp, mask, from, bytes)
        && strong == Strong::WEAK
    {
        let first = warp.moment(ground, lanes.start, at);
        let barriers = &warp.barriers[lanes.start as usize..lanes.end as usize];
        let found = ground
            .global
            .touch_row(address, bytes, how, first, barriers)?;
        if let Some(data) = found {
            for (number, lane) in lanes.enumerate() {
                for (index, register) in to.iter().enumerate() {
                    let start = number * bytes as usize + index * size;
                    // SAFETY: `touch_row` has checked that so many bytes are there for each lane.
                    let found = unsafe { copied(data.wrapping_add(start), element.bytes) };
                    warp.set(*register, lane, value(&found[..size], element));
                }
            }
            return Ok(());
        }
    }
    if let Some((places, held)) = words(warp, ground, mask, from, element, to) {
        for lane in bits_of(mask) {
            let at = places[lane as usize] as usize;
            for (register, word) in to.iter().zip(held[at..].as_chunks().0) {
                warp.w[register.slot as usize][lane as usize] = u32::from_le_bytes(*word);
            }
        }
        return Ok(());
    }
    for lane in bits_of(mask) {
        let target = target(warp, from, lane, bytes)?;
        if target.0 == Space::Param {
            let found = parameter(ground, target.1, bytes, lane)?;
            for (register, bytes) in to.iter().zip(found.chunks_exact(size)) {
                warp.set(*register, lane, value(bytes, element));
            }
            continue;
        }
        let from = place(warp, ground, lane, target, bytes, how, strong, at)?;
        for (index, register) in to.iter().enumerate() {
            let from = from.wrapping_add(index * size);
            // SAFETY: `place` has checked that so many bytes are there.
            unsafe {
                if size == 4 && register.width == Width::W {
                    warp.w[register.slot as usize][lane as usize] =
                        from.cast::<u32>().read_unaligned();
                } else {
                    let found = copied(from, element.bytes);
                    warp.set(*register, lane, value(&found[..size], element));
                }
            }
        }
    }
    Ok(())
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
pub(crate) fn store(
    warp: &mut Warp,
    ground: &mut Ground<'_, '_>,
    mask: u32,
    to: &Place,
    element: Element,
    strong: Strong,
    from: &[Register],
    at: u32,
) -> Result<(), Fault> {
    let size = element.bytes as usize;
    let count = size * from.len();
    if let Some((address, lanes)) = row(warp, mask, to, count as u32)
        && strong == Strong::WEAK
    {
        let first = warp.moment(ground, lanes.start, at);
        let barriers = &warp.barriers[lanes.start as usize..lanes.end as usize];
        let found = ground
            .global
            .touch_row(address, count as u32, How::Write, first, barriers)?;
        if let Some(data) = found {
            for (number, lane) in lanes.enumerate() {
                for (index, register) in from.iter().enumerate() {
                    let value = warp.get(*register, lane).to_le_bytes();
                    let to = data.wrapping_add(number * count + index * size);
                    // SAFETY: `touch_row` has checked that so many bytes are there for each lane.
                    unsafe { std::ptr::copy_nonoverlapping(value.as_ptr(), to, size) };
                }
            }
            return Ok(());
        }
    }
    if let Some((places, held)) = words(warp, ground, mask, to, element, from) {
        for lane in bits_of(mask) {
            let at = places[lane as usize] as usize;
            for (register, word) in from.iter().zip(held[at..].as_chunks_mut().0) {
                *word = warp.w[register.slot as usize][lane as usize].to_le_bytes();
            }
        }
        return Ok(());
    }
    for lane in bits_of(mask) {
        let target = target(warp, to, lane, count as u32)?;
        let to = place(
            warp,
            ground,
            lane,
            target,
            count as u32,
            How::Write,
            strong,
            at,
        )?;
        for (index, register) in from.iter().enumerate() {
            let to = to.wrapping_add(index * size);
            // SAFETY: `place` has checked that so many bytes are there.
            unsafe {
                if size == 4 && register.width == Width::W {
                    let value = warp.w[register.slot as usize][lane as usize];
                    to.cast::<u32>().write_unaligned(value);
                } else {
                    let value = warp.get(*register, lane).to_le_bytes();
                    std::ptr::copy_nonoverlapping(value.as_ptr(), to, size);
                }
            }
        }
    }
    Ok(())
}

/// Carries out the copies of all groups but the latest; with `all` also those of no group.
pub(crate) fn finish_copies(
    warp: &mut Warp,
    ground: &mut Ground<'_, '_>,
    mask: u32,
    but: u32,
    all: bool,
    at: u32,
) -> Result<(), Fault> {
    for lane in bits_of(mask) {
        let copies = &mut warp.copies[lane as usize];
        let mut due = Vec::new();
        while copies.groups.len() > but as usize {
            due.extend(copies.groups.pop_front().into_iter().flatten());
        }
        if all {
            due.append(&mut copies.open);
        }
        for copy in due {
            let moment = warp.moment(ground, lane, at);
            let mut bytes = [0; 32];
            for (address, piece) in copy.pieces() {
                let global = &mut ground.global;
                let from = global.touch(address, piece, How::Read, Strength::Weak, moment)?;
                // SAFETY: `touch` has checked that so many bytes are there.
                let found = unsafe { copied(from, piece) };
                let done = (address - copy.from) as usize;
                bytes[done..done + piece as usize].copy_from_slice(&found[..piece as usize]);
            }
            ground
                .shared
                .touch(copy.to, u64::from(copy.bytes), Access::Arrive, moment)?;
            ground.shared.store(copy.to, &bytes[..copy.bytes as usize]);
        }
    }
    Ok(())
}
