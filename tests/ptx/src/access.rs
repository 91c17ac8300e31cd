//! Loads, stores and copies of lanes, in every state space.

use crate::decode::{LOCAL_WINDOW, Owned, SHARED_WINDOW, WINDOW_BYTES};
use crate::finding::{Fault, Kind};
use crate::memory::{Bytes, Denied};
use crate::op::{Element, Place, Register, Width};
use crate::shared::Access;
use crate::state::{Ground, Warp, bits_of};
use crate::text::Space;

#[inline(always)]
pub(crate) fn address(warp: &Warp, place: &Place, lane: u32) -> u64 {
    let base = place.base.map_or(0, |base| warp.get(base, lane));
    let address = base.wrapping_add(place.offset as u64);
    // Registers of 32 bits hold addresses of shared, local and parameter space.
    if place.base.is_some_and(|base| base.width == Width::W) {
        address & 0xffff_ffff
    } else {
        address
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

fn denied(denied: Denied, lane: u32) -> Fault {
    match denied {
        Denied::Bounds(message) => Fault::new(Kind::OutOfBounds, lane, message),
        Denied::ReadOnly(message) => Fault::new(Kind::ReadOnly, lane, message),
    }
}

fn misaligned(space: Space, address: u64, bytes: u32, lane: u32) -> Fault {
    Fault::new(
        Kind::Misaligned,
        lane,
        format!("{bytes} bytes at {address:#x} of {space:?} memory"),
    )
}

/// Where local memory of a lane is, if the variable there is large enough.
fn local(
    owned: &[Owned],
    bytes_each: u64,
    address: u64,
    bytes: u32,
    lane: u32,
) -> Result<usize, Fault> {
    let end = address + u64::from(bytes);
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

/// The bytes that a lane reads, in any space but local memory, which is the warp's.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
pub(crate) fn read<'g>(
    warp: &Warp,
    ground: &'g mut Ground<'_, '_>,
    lane: u32,
    (space, address): (Space, u64),
    bytes: u32,
    read_only: bool,
    access: Access,
    at: u32,
) -> Result<&'g [u8], Fault> {
    match space {
        Space::Global => ground
            .global
            .read(address, bytes, read_only)
            .map_err(|it| denied(it, lane)),
        Space::Shared => {
            let moment = warp.moment(ground, lane, at);
            ground
                .shared
                .touch(address, u64::from(bytes), access, moment)?;
            Ok(ground.shared.bytes(address, bytes))
        }
        Space::Param => {
            let end = address + u64::from(bytes);
            let found = ground.parameters.get(address as usize..end as usize);
            found.ok_or_else(|| {
                Fault::new(
                    Kind::OutOfBounds,
                    lane,
                    format!("{bytes} bytes at {address} of the parameters"),
                )
            })
        }
        _ => Err(Fault::new(
            Kind::OutOfBounds,
            lane,
            "constant memory, which these kernels do not have",
        )),
    }
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

#[inline(always)]
pub(crate) fn write(
    warp: &mut Warp,
    ground: &mut Ground<'_, '_>,
    lane: u32,
    place: &Place,
    bytes: &[u8],
    access: Access,
    at: u32,
) -> Result<(), Fault> {
    let (space, address) = target(warp, place, lane, bytes.len() as u32)?;
    match space {
        Space::Global => ground
            .global
            .write(address, bytes)
            .map_err(|it| denied(it, lane)),
        Space::Shared => {
            let moment = warp.moment(ground, lane, at);
            ground
                .shared
                .touch(address, bytes.len() as u64, access, moment)?;
            ground.shared.store(address, bytes);
            Ok(())
        }
        Space::Local => {
            let to = local(
                &ground.program.local,
                ground.program.local_bytes,
                address,
                bytes.len() as u32,
                lane,
            )?;
            warp.local[to..to + bytes.len()].copy_from_slice(bytes);
            Ok(())
        }
        _ => Err(Fault::new(
            Kind::OutOfBounds,
            lane,
            "a space that cannot be written",
        )),
    }
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

#[allow(clippy::too_many_arguments)]
#[inline(always)]
pub(crate) fn load(
    warp: &mut Warp,
    ground: &mut Ground<'_, '_>,
    mask: u32,
    place: &Place,
    element: Element,
    read_only: bool,
    to: &[Register],
    at: u32,
) -> Result<(), Fault> {
    let (size, bytes) = (element.bytes as usize, element.bytes * to.len() as u32);
    for lane in bits_of(mask) {
        let target = target(warp, place, lane, bytes)?;
        if target.0 == Space::Local {
            let from = local(
                &ground.program.local,
                ground.program.local_bytes,
                target.1,
                bytes,
                lane,
            )?;
            for (index, register) in to.iter().enumerate() {
                let start = from + index * size;
                let value = value(&warp.local[start..start + size], element);
                warp.set(*register, lane, value);
            }
            continue;
        }
        let found = read(
            warp,
            ground,
            lane,
            target,
            bytes,
            read_only,
            Access::Read,
            at,
        )?;
        match (to, size) {
            ([register], 4) if register.width == Width::W => {
                warp.w[register.slot as usize][lane as usize] = value(&found[..4], element) as u32;
            }
            _ => {
                for (register, bytes) in to.iter().zip(found.chunks_exact(size)) {
                    warp.set(*register, lane, value(bytes, element));
                }
            }
        }
    }
    Ok(())
}

#[inline(always)]
pub(crate) fn store(
    warp: &mut Warp,
    ground: &mut Ground<'_, '_>,
    mask: u32,
    place: &Place,
    element: Element,
    from: &[Register],
    at: u32,
) -> Result<(), Fault> {
    let size = element.bytes as usize;
    for lane in bits_of(mask) {
        let mut bytes: Bytes = [0; 32];
        for (index, register) in from.iter().enumerate() {
            let value = warp.get(*register, lane).to_le_bytes();
            bytes[index * size..(index + 1) * size].copy_from_slice(&value[..size]);
        }
        write(
            warp,
            ground,
            lane,
            place,
            &bytes[..size * from.len()],
            Access::Write,
            at,
        )?;
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
            let mut bytes = [0; 32];
            // Pieces that are aligned: what is given may be any number of bytes.
            let mut done = 0;
            while done < copy.given {
                let piece = 1
                    << (copy.given - done).ilog2().min(if done == 0 {
                        4
                    } else {
                        done.trailing_zeros()
                    });
                let found = ground
                    .global
                    .read(copy.from + u64::from(done), piece, false)
                    .map_err(|it| denied(it, lane))?;
                bytes[done as usize..(done + piece) as usize].copy_from_slice(found);
                done += piece;
            }
            let moment = warp.moment(ground, lane, at);
            ground
                .shared
                .touch(copy.to, u64::from(copy.bytes), Access::Arrive, moment)?;
            ground.shared.store(copy.to, &bytes[..copy.bytes as usize]);
        }
    }
    Ok(())
}
