//! `wgmma`: products of a warpgroup, which run beside the instructions that follow them.
//!
//! Their results are computed at once. What the ISA forbids until they are waited for is followed
//! instead, by `products` and `shared`.

use crate::finding::{Fault, Kind};
use crate::op::{GroupProduct, Left, Slot, Wgmma};
use crate::products::Step;
use crate::state::{Ground, LANES, Warp};
use crate::tensor::{self, Descriptor};

/// Executes an instruction of the whole warp.
pub(crate) fn execute(
    warp: &mut Warp,
    ground: &mut Ground<'_, '_>,
    op: &Wgmma,
    at: u32,
) -> Result<(), Fault> {
    let mut step = Step {
        at,
        barriers: ground.barriers,
        descriptors: [None; 2],
        adds: false,
    };
    if let Wgmma::Multiply(product) = op {
        if let Left::Matrix { descriptor, .. } = product.a {
            step.descriptors[0] = Some(uniform(&warp.d[descriptor as usize])?);
        }
        step.descriptors[1] = Some(uniform(&warp.d[product.b as usize])?);
        step.adds = match warp.p[product.adds as usize] {
            0 => false,
            u32::MAX => true,
            mixed => {
                let message = format!("scale-d differs between lanes: {mixed:#x}");
                return Err(Fault::new(Kind::Warp, 0, message));
            }
        };
    }
    together(warp, ground, step)?;
    match op {
        Wgmma::Fence => warp.products.fence(),
        Wgmma::Multiply(product) => multiply(warp, ground, product, step.adds, at)?,
        Wgmma::Commit => warp.products.commit(),
        Wgmma::Wait { but } => wait(warp, ground, *but as usize, at)?,
    }
    Ok(())
}

/// A descriptor, which all lanes have alike.
fn uniform(values: &[u64; LANES]) -> Result<u64, Fault> {
    match values.iter().position(|value| *value != values[0]) {
        None => Ok(values[0]),
        Some(lane) => {
            let message = format!(
                "the descriptor is {:#x}, and {:#x} in lane 0",
                values[lane], values[0]
            );
            Err(Fault::new(Kind::Warp, lane as u32, message))
        }
    }
}

/// Checks that the four warps of a warpgroup execute the same.
fn together(warp: &Warp, ground: &mut Ground<'_, '_>, step: Step) -> Result<(), Fault> {
    let number = warp.first_thread as usize / 32;
    let Some(group) = ground.warpgroups.get_mut(number / 4) else {
        let message = "a warpgroup has four whole warps, and the block ends before";
        return Err(Fault::new(Kind::Warp, 0, message));
    };
    let Err(other) = group.execute(number % 4, step) else {
        return Ok(());
    };
    let message = if other.at == step.at {
        format!(
            "another warp of the warpgroup executes this after other barriers, or with other descriptors or scale-d: {:x?}, here {:x?}",
            other.descriptors, step.descriptors
        )
    } else {
        format!(
            "another warp of the warpgroup executes line {} of the PTX instead",
            ground.program.code[other.at as usize].line
        )
    };
    Err(Fault::new(Kind::Warp, 0, message))
}

/// Checks, at the end of a block, that no warp left out what others of its warpgroup executed. An
/// error has the thread and the instruction.
pub(crate) fn ended(ground: &Ground<'_, '_>) -> Result<(), (u32, u32, Fault)> {
    for (number, group) in ground.warpgroups.iter().enumerate() {
        if let Some((member, at)) = group.missing() {
            let thread = (number * 128 + member * 32) as u32;
            let message = "this warp returns without what another of its warpgroup executes";
            return Err((thread, at, Fault::new(Kind::Warp, 0, message)));
        }
    }
    Ok(())
}

fn multiply(
    warp: &mut Warp,
    ground: &mut Ground<'_, '_>,
    product: &GroupProduct,
    adds: bool,
    at: u32,
) -> Result<(), Fault> {
    let program = ground.program;
    warp.products.check(program, product)?;
    let mut reads = Vec::new();
    let columns = product.d.len() * 2;
    let left = match &product.a {
        Left::Registers(slots) => tensor::left_of(&slots.map(|slot| warp.w[slot as usize])),
        Left::Matrix {
            descriptor,
            is_turned,
        } => {
            let all = matrix(warp, ground, (*descriptor, *is_turned, 64), at, &mut reads)?;
            let first = warp.first_thread as usize / 32 % 4 * 16;
            std::array::from_fn(|k| std::array::from_fn(|row| all[k * 64 + first + row]))
        }
    };
    let right = (product.b, product.is_turned, columns);
    let right = matrix(warp, ground, right, at, &mut reads)?;
    let word = |slot: &Slot| warp.w[*slot as usize];
    let mut sums: Vec<[u32; LANES]> = if adds {
        product.d.iter().map(word).collect()
    } else {
        vec![[0; LANES]; product.d.len()]
    };
    tensor::multiply_in_group(&left, &right, product.is_negated, &mut sums);
    for (slot, sum) in product.d.iter().zip(sums) {
        warp.w[*slot as usize] = sum;
    }
    warp.products.begin(product, at, reads);
    Ok(())
}

/// Begins to read a matrix of 16 by `extent`: its elements, `[k][row or column]`. Each warp reads
/// all of it, as the product is of the warpgroup.
fn matrix(
    warp: &Warp,
    ground: &mut Ground<'_, '_>,
    (descriptor, is_turned, extent): (Slot, bool, usize),
    at: u32,
    reads: &mut Vec<u64>,
) -> Result<Vec<f32>, Fault> {
    let descriptor = Descriptor::of(warp.d[descriptor as usize][0])
        .map_err(|message| Fault::new(Kind::Stopped, 0, message))?;
    let (lines, pieces) = if is_turned {
        (16, extent / 8)
    } else {
        (extent, 2)
    };
    let moment = warp.moment(ground, 0, at);
    let mut elements = vec![0.0; 16 * extent];
    for line in 0..lines {
        for piece in 0..pieces {
            let address = descriptor.piece(line as u64, piece as u64);
            ground.shared.begin_read(address, moment)?;
            reads.push(address);
            let halves: [u8; 16] = ground.shared.load(address);
            for (number, half) in halves.chunks_exact(2).enumerate() {
                let along = piece * 8 + number;
                let (k, other) = if is_turned {
                    (line, along)
                } else {
                    (along, line)
                };
                let half = u16::from_le_bytes([half[0], half[1]]);
                elements[k * extent + other] = f32::from_bits(u32::from(half) << 16);
            }
        }
    }
    Ok(elements)
}

/// Ends all groups but the latest.
fn wait(warp: &mut Warp, ground: &mut Ground<'_, '_>, but: usize, at: u32) -> Result<(), Fault> {
    let moment = warp.moment(ground, 0, at);
    for address in warp.products.wait(ground.program, but) {
        ground.shared.end_read(address, moment)?;
    }
    // Others may read the same.
    for address in warp.products.reads() {
        ground.shared.goes_on_reading(address, moment);
    }
    Ok(())
}
