//! Products of a warpgroup that were begun: the registers that they use, what they read, and what
//! other warps of the warpgroup did.

use std::collections::VecDeque;

use crate::decode::Program;
use crate::finding::{Fault, Kind};
use crate::op::{GroupProduct, Left, Op, Slot, Touched, Wgmma, Width};

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
pub(crate) struct Step {
    pub(crate) at: u32,
    /// Of the block, before it.
    pub(crate) barriers: u32,
    pub(crate) descriptors: [Option<u64>; 2],
    pub(crate) adds: bool,
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

    /// Checks that a product may use its registers now.
    pub(crate) fn check(&self, program: &Program, product: &GroupProduct) -> Result<(), Fault> {
        if !self.is_fenced {
            let message = "no wgmma.fence before the first wgmma.mma_async";
            return Err(Fault::new(Kind::Fence, 0, message));
        }
        for (slot, role) in fragments_of(product) {
            self.check_fragment(program, slot, role)?;
        }
        Ok(())
    }

    fn check_fragment(&self, program: &Program, slot: Slot, role: Role) -> Result<(), Fault> {
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

    /// Notes that a product uses its registers, and reads shared memory, from now on.
    pub(crate) fn begin(&mut self, product: &GroupProduct, at: u32, reads: Vec<u64>) {
        for (slot, role) in fragments_of(product) {
            let fragment = &mut self.fragments[slot as usize];
            fragment.flight = Some(Use { role, at });
            fragment.product = Some(Use { role, at });
        }
        self.open.push(Flight { at, reads });
    }

    pub(crate) fn fence(&mut self) {
        self.is_fenced = true;
        for fragment in &mut self.fragments {
            *fragment = Fragment {
                flight: fragment.flight,
                ..Fragment::default()
            };
        }
    }

    pub(crate) fn commit(&mut self) {
        let group = std::mem::take(&mut self.open);
        self.groups.push_back(group);
    }

    /// Ends all groups but the latest: what they read of shared memory.
    pub(crate) fn wait(&mut self, program: &Program, but: usize) -> Vec<u64> {
        let product_at = |at: u32| match &program.code[at as usize].op {
            Op::Wgmma(Wgmma::Multiply(product)) => product,
            _ => unreachable!("only products fly"),
        };
        let mut reads = Vec::new();
        while self.groups.len() > but {
            for flight in self.groups.pop_front().into_iter().flatten() {
                for (slot, _) in fragments_of(product_at(flight.at)) {
                    self.fragments[slot as usize].flight = None;
                }
                reads.extend(flight.reads);
            }
        }
        // Others may use the same.
        for flight in self.groups.iter().flatten().chain(&self.open) {
            for (slot, role) in fragments_of(product_at(flight.at)) {
                let at = flight.at;
                self.fragments[slot as usize].flight = Some(Use { role, at });
            }
        }
        reads
    }

    /// What products that were not waited for read.
    pub(crate) fn reads(&self) -> impl Iterator<Item = u64> {
        let flights = self.groups.iter().flatten().chain(&self.open);
        flights.flat_map(|flight| flight.reads.iter().copied())
    }
}

impl Warpgroup {
    /// A warp executes a step; the error is what another did in its place.
    pub(crate) fn execute(&mut self, member: usize, step: Step) -> Result<(), Step> {
        match self.steps.get(self.done[member] - self.all) {
            None => self.steps.push_back(step),
            Some(other) if *other == step => {}
            Some(other) => return Err(*other),
        }
        self.done[member] += 1;
        if self.done.iter().all(|done| *done > self.all) {
            self.all += 1;
            self.steps.pop_front();
        }
        Ok(())
    }

    /// A warp that has not executed what others have, and that instruction.
    pub(crate) fn missing(&self) -> Option<(usize, u32)> {
        let step = self.steps.front()?;
        let member = self.done.iter().position(|done| *done == self.all)?;
        Some((member, step.at))
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
