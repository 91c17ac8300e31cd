//! `wgmma`: products of a warpgroup, which run beside the instructions that follow them.
//!
//! Their results are computed at once. What the ISA forbids until they are waited for is followed
//! instead: registers in flight, accesses that need a `wgmma.fence`, and shared memory being read.

use std::collections::VecDeque;

use crate::decode::Program;
use crate::finding::{Fault, Kind};
use crate::op::{GroupProduct, Left, Op, Slot, Touched, Wgmma, Width};
use crate::state::{Ground, LANES, Warp};
use crate::tensor::{self, Descriptor};

/// How a product uses a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Of a product of so many columns.
    Accumulator(usize),
    /// Of A.
    Left,
}

#[derive(Clone, Copy, Debug)]
struct Use {
    role: Role,
    /// The instruction.
    at: u32,
}

/// What happened to a register.
#[derive(Clone, Copy, Debug, Default)]
struct Fragment {
    /// By a product that was not waited for.
    flight: Option<Use>,
    /// Since the last `wgmma.fence`: by a product, and by the last other instructions.
    product: Option<Use>,
    read: Option<u32>,
    written: Option<u32>,
}

/// A product that was not waited for.
#[derive(Debug)]
struct Flight {
    at: u32,
    /// 16 bytes of shared memory each.
    reads: Vec<u64>,
}

/// The products of a warp.
#[derive(Debug, Default)]
pub(crate) struct Products {
    is_fenced: bool,
    open: Vec<Flight>,
    groups: VecDeque<Vec<Flight>>,
    /// By slot of 32 bits; empty where a kernel has no products.
    fragments: Vec<Fragment>,
}

/// What all warps of a warpgroup execute alike.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Step {
    at: u32,
    /// Of the block, before it.
    barriers: u32,
    descriptors: [Option<u64>; 2],
    adds: bool,
}

/// The `wgmma` instructions that some of the four warps have executed, and others not yet.
#[derive(Debug, Default)]
pub(crate) struct Warpgroup {
    /// By warp.
    done: [usize; 4],
    /// How many all have executed.
    all: usize,
    steps: VecDeque<Step>,
}

impl Products {
    pub(crate) fn new(program: &Program) -> Products {
        let count = if program.fragments.is_empty() {
            0
        } else {
            program.counts[Width::W as usize]
        };
        Products {
            fragments: vec![Fragment::default(); count],
            ..Products::default()
        }
    }

    /// An instruction that is no `wgmma` touches fragments.
    pub(crate) fn touch(
        &mut self,
        program: &Program,
        touched: &Touched,
        lane: u32,
        at: u32,
    ) -> Result<(), Fault> {
        let writes = touched.writes.iter().map(|slot| (slot, true));
        let reads = touched.reads.iter().map(|slot| (slot, false));
        for (slot, is_write) in writes.chain(reads) {
            let fragment = &mut self.fragments[*slot as usize];
            if let Some(flight) = fragment.flight {
                let does = if is_write { "written" } else { "read" };
                return Err(in_flight(program, *slot, does, flight, lane));
            }
            if is_write {
                fragment.written = Some(at);
            } else {
                fragment.read = Some(at);
            }
        }
        Ok(())
    }

    /// Checks that a product may use a register now.
    fn check(&self, program: &Program, slot: Slot, role: Role) -> Result<(), Fault> {
        let fragment = &self.fragments[slot as usize];
        // Accumulators of one shape are used in order; A may be read by several at once.
        let differs = |other: &Use| other.role != role;
        if let Some(flight) = fragment.flight.filter(differs) {
            return Err(in_flight(program, slot, "used otherwise", flight, 0));
        }
        let before = match (fragment.written, fragment.read, fragment.product) {
            (Some(at), ..) => Some(("writes", at)),
            (_, Some(at), _) if role != Role::Left => Some(("reads", at)),
            (.., Some(other)) if differs(&other) => Some(("uses otherwise", other.at)),
            _ => None,
        };
        let Some((does, at)) = before else {
            return Ok(());
        };
        let message = format!(
            "line {} of the PTX {does} {} with no wgmma.fence after it",
            program.code[at as usize].line, program.fragments[&slot]
        );
        Err(Fault::new(Kind::Fence, 0, message))
    }

    /// Notes that a product uses its registers from now on.
    fn begin(&mut self, product: &GroupProduct, at: u32) {
        for (slot, role) in fragments_of(product) {
            let fragment = &mut self.fragments[slot as usize];
            fragment.flight = Some(Use { role, at });
            fragment.product = Some(Use { role, at });
        }
    }

    fn fence(&mut self) {
        self.is_fenced = true;
        for fragment in &mut self.fragments {
            *fragment = Fragment {
                flight: fragment.flight,
                ..Fragment::default()
            };
        }
    }
}

/// The registers of a product.
fn fragments_of(product: &GroupProduct) -> impl Iterator<Item = (Slot, Role)> {
    let left: &[Slot] = match &product.a {
        Left::Registers(slots) => slots,
        Left::Matrix { .. } => &[],
    };
    let role = Role::Accumulator(product.d.len() * 2);
    let sums = product.d.iter().map(move |slot| (*slot, role));
    left.iter().map(|slot| (*slot, Role::Left)).chain(sums)
}

#[cold]
fn in_flight(program: &Program, slot: Slot, does: &str, flight: Use, lane: u32) -> Fault {
    let message = format!(
        "{} is {does} while the wgmma at line {} of the PTX uses it: no wgmma.wait_group of its group has ended",
        program.fragments[&slot], program.code[flight.at as usize].line
    );
    Fault::new(Kind::Flight, lane, message)
}

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
        Wgmma::Multiply(product) => multiply(warp, ground, product, step)?,
        Wgmma::Commit => {
            let group = std::mem::take(&mut warp.products.open);
            warp.products.groups.push_back(group);
        }
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
    let next = group.done[number % 4] - group.all;
    match group.steps.get(next) {
        None => group.steps.push_back(step),
        Some(other) if *other == step => {}
        Some(other) => {
            let place = ground.program.code[other.at as usize].line;
            let message = if other.at == step.at {
                format!(
                    "another warp of the warpgroup executes this after other barriers, or with other descriptors or scale-d: {:x?}, here {:x?}",
                    other.descriptors, step.descriptors
                )
            } else {
                format!("another warp of the warpgroup executes line {place} of the PTX instead")
            };
            return Err(Fault::new(Kind::Warp, 0, message));
        }
    }
    group.done[number % 4] += 1;
    if group.done.iter().all(|done| *done > group.all) {
        group.all += 1;
        group.steps.pop_front();
    }
    Ok(())
}

/// Checks, at the end of a block, that no warp left out what others of its warpgroup executed. An
/// error has the thread and the instruction.
pub(crate) fn ended(ground: &Ground<'_, '_>) -> Result<(), (u32, u32, Fault)> {
    for (number, group) in ground.warpgroups.iter().enumerate() {
        if let Some(step) = group.steps.front() {
            let missing = group.done.iter().position(|done| *done == group.all);
            let thread = number * 128 + missing.unwrap_or(0) * 32;
            let message = "this warp returns without what another of its warpgroup executes";
            return Err((thread as u32, step.at, Fault::new(Kind::Warp, 0, message)));
        }
    }
    Ok(())
}

fn multiply(
    warp: &mut Warp,
    ground: &mut Ground<'_, '_>,
    product: &GroupProduct,
    step: Step,
) -> Result<(), Fault> {
    let program = ground.program;
    if !warp.products.is_fenced {
        let message = "no wgmma.fence before the first wgmma.mma_async";
        return Err(Fault::new(Kind::Fence, 0, message));
    }
    for (slot, role) in fragments_of(product) {
        warp.products.check(program, slot, role)?;
    }
    let mut reads = Vec::new();
    let columns = product.d.len() * 2;
    let left = match (&product.a, step.descriptors[0]) {
        (Left::Matrix { is_turned, .. }, Some(descriptor)) => {
            let all = matrix(
                warp, ground, descriptor, *is_turned, 64, step.at, &mut reads,
            )?;
            let first = warp.first_thread as usize / 32 % 4 * 16;
            std::array::from_fn(|k| std::array::from_fn(|row| all[k * 64 + first + row]))
        }
        (Left::Registers(slots), _) => tensor::left_of(&slots.map(|slot| warp.w[slot as usize])),
        (Left::Matrix { .. }, None) => unreachable!("execute read the descriptor"),
    };
    let descriptor = step.descriptors[1].expect("execute read the descriptor");
    let is_turned = product.is_turned;
    let right = matrix(
        warp, ground, descriptor, is_turned, columns, step.at, &mut reads,
    )?;
    let word = |slot: &Slot| warp.w[*slot as usize];
    let mut sums: Vec<[u32; LANES]> = if step.adds {
        product.d.iter().map(word).collect()
    } else {
        vec![[0; LANES]; product.d.len()]
    };
    tensor::multiply_in_group(&left, &right, product.is_negated, &mut sums);
    for (slot, sum) in product.d.iter().zip(sums) {
        warp.w[*slot as usize] = sum;
    }
    warp.products.begin(product, step.at);
    warp.products.open.push(Flight { at: step.at, reads });
    Ok(())
}

/// Begins to read a matrix of 16 by `extent`: its elements, `[k][row or column]`. Each warp reads
/// all of it, as the product is of the warpgroup.
fn matrix(
    warp: &Warp,
    ground: &mut Ground<'_, '_>,
    bits: u64,
    is_turned: bool,
    extent: usize,
    at: u32,
    reads: &mut Vec<u64>,
) -> Result<Vec<f32>, Fault> {
    let descriptor =
        Descriptor::of(bits).map_err(|message| Fault::new(Kind::Stopped, 0, message))?;
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
    let program = ground.program;
    let moment = warp.moment(ground, 0, at);
    let products = &mut warp.products;
    let product_at = |at: u32| match &program.code[at as usize].op {
        Op::Wgmma(Wgmma::Multiply(product)) => product,
        _ => unreachable!("only products fly"),
    };
    while products.groups.len() > but {
        for flight in products.groups.pop_front().into_iter().flatten() {
            for (slot, _) in fragments_of(product_at(flight.at)) {
                products.fragments[slot as usize].flight = None;
            }
            for address in flight.reads {
                ground.shared.end_read(address, moment)?;
            }
        }
    }
    // Others may use the same.
    for flight in products.groups.iter().flatten().chain(&products.open) {
        for (slot, role) in fragments_of(product_at(flight.at)) {
            products.fragments[slot as usize].flight = Some(Use {
                role,
                at: flight.at,
            });
        }
        for address in &flight.reads {
            ground.shared.goes_on_reading(*address, moment);
        }
    }
    Ok(())
}
