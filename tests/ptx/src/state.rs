//! The state of a warp: the registers of its lanes, where each lane is, and what it may touch.

use crate::decode::{Fixed, Program};
use crate::memory::Global;
use crate::moment::Moment;
use crate::op::{Reduce, Register, Width};
use crate::products::{Products, Warpgroup};
use crate::shared::Shared;

pub(crate) const LANES: usize = 32;

/// What all lanes of a block use.
pub(crate) struct Ground<'a, 'b> {
    pub(crate) program: &'a Program,
    pub(crate) shared: &'a mut Shared,
    pub(crate) global: &'a mut Global<'b>,
    pub(crate) parameters: &'a [u8],
    /// How many barriers of the block have ended, over all blocks and launches.
    pub(crate) barriers: u32,
    /// Of the block: four warps each.
    pub(crate) warpgroups: Vec<Warpgroup>,
    /// Lanes carry out atomics from the last to the first.
    pub(crate) is_downward: bool,
    /// None: approximate functions are rounded once. Else they err by chance, within the ISA's
    /// bounds.
    pub(crate) errors: Option<u64>,
    /// Instructions of warps and of lanes.
    pub(crate) counts: [u64; 2],
    pub(crate) left: u64,
}

impl Ground<'_, '_> {
    /// Threads met at a barrier that only some of the block take part in: what that orders is not
    /// followed.
    pub(crate) fn follow_no_more(&mut self) {
        self.shared.is_followed = false;
        self.global.order.stop();
    }
}

/// Why a warp does not go on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stop {
    Exited,
    /// At a barrier, as its instruction says.
    Barrier {
        id: u32,
        threads: Option<u32>,
        arrives_only: bool,
        reduce: Option<Reduce>,
        at: u32,
    },
}

/// A copy that was started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) bytes: u32,
    pub(crate) given: u32,
}

impl Copy {
    /// What it reads, in pieces that are powers of two and aligned to their size.
    pub(crate) fn pieces(self) -> impl Iterator<Item = (u64, u32)> {
        let mut done = 0;
        std::iter::from_fn(move || {
            if done == self.given {
                return None;
            }
            let left = (self.given - done).ilog2();
            let aligned = if done == 0 { 4 } else { done.trailing_zeros() };
            let (address, bytes) = (self.from + u64::from(done), 1 << left.min(aligned));
            done += bytes;
            Some((address, bytes))
        })
    }
}

/// The copies of one lane: of no group yet, and by group.
#[derive(Default, Debug)]
pub(crate) struct Copies {
    pub(crate) open: Vec<Copy>,
    pub(crate) groups: std::collections::VecDeque<Vec<Copy>>,
}

pub(crate) struct Warp {
    pub(crate) p: Vec<u32>,
    pub(crate) h: Vec<[u16; LANES]>,
    pub(crate) w: Vec<[u32; LANES]>,
    pub(crate) d: Vec<[u64; LANES]>,
    pub(crate) at: [u32; LANES],
    /// Lanes that go on, and lanes that wait for others of the warp.
    pub(crate) ready: u32,
    pub(crate) waiting: u32,
    pub(crate) at_barrier: u32,
    /// Lanes that have threads, and of these the ones that have not returned.
    pub(crate) threads: u32,
    pub(crate) live: u32,
    pub(crate) first_thread: u32,
    /// How many barriers of the warp have ended, by lane.
    pub(crate) barriers: [u32; LANES],
    /// By lane.
    pub(crate) local: Vec<u8>,
    pub(crate) copies: Vec<Copies>,
    pub(crate) products: Products,
}

/// The shape of a launch and the place of a block in it.
pub(crate) struct Site {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) at: [u32; 3],
    pub(crate) dynamic_shared_bytes: u32,
    pub(crate) shared_bytes: u32,
}

/// What an instruction does to the order of execution.
pub(crate) enum Effect {
    Next,
    /// Of lanes that are there.
    Branch(u32),
    Exit,
    Barrier,
}

impl Warp {
    pub(crate) fn new(program: &Program) -> Warp {
        let count = |width: Width| program.counts[width as usize];
        Warp {
            p: vec![0; count(Width::P)],
            h: vec![[0; LANES]; count(Width::H)],
            w: vec![[0; LANES]; count(Width::W)],
            d: vec![[0; LANES]; count(Width::D)],
            at: [0; LANES],
            ready: 0,
            waiting: 0,
            at_barrier: 0,
            threads: 0,
            live: 0,
            first_thread: 0,
            barriers: [0; LANES],
            local: vec![0; program.local_bytes as usize * LANES],
            copies: Vec::new(),
            products: Products::default(),
        }
    }

    /// Puts its lanes at the start of the kernel.
    pub(crate) fn start(&mut self, program: &Program, site: &Site, first_thread: u32) {
        let count = (site.block.iter().product::<u32>() - first_thread).min(LANES as u32);
        self.threads = u32::MAX >> (32 - count);
        (self.live, self.ready, self.waiting, self.at_barrier) = (self.threads, self.threads, 0, 0);
        (self.at, self.first_thread, self.barriers) = ([0; LANES], first_thread, [0; LANES]);
        // A register that nothing has written holds what is no sensible number or index.
        self.p.fill(u32::MAX);
        self.h.fill([u16::MAX; LANES]);
        self.w.fill([u32::MAX; LANES]);
        self.d.fill([u64::MAX; LANES]);
        self.local.fill(0xff);
        self.copies.clear();
        self.copies.resize_with(LANES, Copies::default);
        self.products = Products::new(program);
        for (register, fixed) in &program.fixed {
            for lane in 0..LANES as u32 {
                self.set(*register, lane, value_of(*fixed, site, first_thread, lane));
            }
        }
    }

    /// A register's value in a lane, zeros above its width.
    #[inline(always)]
    pub(crate) fn get(&self, register: Register, lane: u32) -> u64 {
        let (slot, at) = (register.slot as usize, lane as usize);
        match register.width {
            Width::P => u64::from(self.p[slot] >> lane & 1),
            Width::H => u64::from(self.h[slot][at]),
            Width::W => u64::from(self.w[slot][at]),
            Width::D => self.d[slot][at],
        }
    }

    #[inline(always)]
    pub(crate) fn set(&mut self, register: Register, lane: u32, value: u64) {
        let (slot, at) = (register.slot as usize, lane as usize);
        match register.width {
            Width::P => self.p[slot] = self.p[slot] & !(1 << lane) | ((value & 1) as u32) << lane,
            Width::H => self.h[slot][at] = value as u16,
            Width::W => self.w[slot][at] = value as u32,
            Width::D => self.d[slot][at] = value,
        }
    }

    #[inline(always)]
    pub(crate) fn moment(&self, ground: &Ground<'_, '_>, lane: u32, at: u32) -> Moment {
        Moment {
            block: ground.barriers,
            warp: self.barriers[lane as usize],
            thread: self.first_thread + lane,
            at,
        }
    }
}

pub(crate) fn bits_of(mut mask: u32) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        if mask == 0 {
            return None;
        }
        let lane = mask.trailing_zeros();
        mask &= mask - 1;
        Some(lane)
    })
}

fn value_of(fixed: Fixed, site: &Site, first_thread: u32, lane: u32) -> u64 {
    let thread = first_thread + lane;
    let [x, y, _] = site.block;
    let value = match fixed {
        Fixed::Bits(bits) => return bits,
        Fixed::Thread(0) => thread % x,
        Fixed::Thread(1) => thread / x % y,
        Fixed::Thread(_) => thread / x / y,
        Fixed::Threads(axis) => site.block[usize::from(axis)],
        Fixed::Block(axis) => site.at[usize::from(axis)],
        Fixed::Blocks(axis) => site.grid[usize::from(axis)],
        Fixed::Lane => lane,
        Fixed::Warp => first_thread / 32,
        Fixed::Lanes(0) => (1 << lane) - 1,
        Fixed::Lanes(1) => u32::MAX >> (31 - lane),
        Fixed::Lanes(2) => u32::MAX << lane,
        Fixed::Lanes(3) => (u32::MAX << lane) & !(1 << lane),
        Fixed::Lanes(_) => 1 << lane,
        Fixed::DynamicShared => site.dynamic_shared_bytes,
        Fixed::TotalShared => site.shared_bytes,
    };
    u64::from(value)
}
