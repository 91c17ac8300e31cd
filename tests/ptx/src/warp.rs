//! A warp: the registers of its lanes, where each lane is, and the execution of instructions.
//!
//! Lanes at the same instruction execute it together. Where they part, those that are furthest behind in
//! the text go on first, so that they meet again where the paths do; any order would be allowed.

use crate::decode::{Fixed, Program};
use crate::finding::{Fault, Kind};
use crate::lanes;
use crate::memory::Overlay;
use crate::op::{Coded, Op, Reduce, Register, Slot, Width};
use crate::shared::{Moment, Shared};

pub(crate) const LANES: usize = 32;
/// So many instructions without a change of lanes, and the others get a turn.
const TURN: u32 = 1 << 20;

/// What all lanes of a block use.
pub(crate) struct Ground<'a, 'b> {
    pub(crate) program: &'a Program,
    pub(crate) shared: &'a mut Shared,
    pub(crate) global: &'a mut Overlay<'b>,
    pub(crate) parameters: &'a [u8],
    /// How many barriers of the block have ended, over all blocks.
    pub(crate) barriers: u32,
    /// None: approximate functions are rounded once. Else they err by chance, within the ISA's bounds.
    pub(crate) errors: Option<u64>,
    /// Instructions of warps and of lanes.
    pub(crate) counts: [u64; 2],
    pub(crate) left: u64,
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
    ready: u32,
    waiting: u32,
    at_barrier: u32,
    /// Lanes that have threads, and of these the ones that have not returned.
    pub(crate) threads: u32,
    pub(crate) live: u32,
    pub(crate) first_thread: u32,
    /// How many barriers of the warp have ended.
    pub(crate) barriers: u32,
    /// By lane.
    pub(crate) local: Vec<u8>,
    pub(crate) copies: Vec<Copies>,
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
            barriers: 0,
            local: vec![0; program.local_bytes as usize * LANES],
            copies: Vec::new(),
        }
    }

    /// Puts its lanes at the start of the kernel.
    pub(crate) fn start(&mut self, program: &Program, site: &Site, first_thread: u32) {
        let count = (site.block.iter().product::<u32>() - first_thread).min(LANES as u32);
        self.threads = u32::MAX >> (32 - count);
        (self.live, self.ready, self.waiting, self.at_barrier) = (self.threads, self.threads, 0, 0);
        (self.at, self.first_thread, self.barriers) = ([0; LANES], first_thread, 0);
        // A register that nothing has written holds what is no sensible number or index.
        self.p.fill(u32::MAX);
        self.h.fill([u16::MAX; LANES]);
        self.w.fill([u32::MAX; LANES]);
        self.d.fill([u64::MAX; LANES]);
        self.local.fill(0xff);
        self.copies.clear();
        self.copies.resize_with(LANES, Copies::default);
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

    pub(crate) fn moment(&self, ground: &Ground<'_, '_>, lane: u32, at: u32) -> Moment {
        Moment {
            block: ground.barriers,
            warp: self.barriers,
            thread: self.first_thread + lane,
            at,
        }
    }

    /// Lanes that wait go on after their barrier.
    pub(crate) fn pass_barrier(&mut self) {
        for lane in bits_of(self.at_barrier) {
            self.at[lane as usize] += 1;
        }
        self.ready |= self.at_barrier;
        self.at_barrier = 0;
    }

    /// Runs to the end or to a barrier. An error has the instruction.
    pub(crate) fn run(&mut self, ground: &mut Ground<'_, '_>) -> Result<Stop, (u32, Fault)> {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma")
        {
            // SAFETY: this machine has what the function is compiled for.
            return unsafe { self.run_wide(ground) };
        }
        self.go(ground)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
    fn run_wide(&mut self, ground: &mut Ground<'_, '_>) -> Result<Stop, (u32, Fault)> {
        self.go(ground)
    }

    #[inline(always)]
    fn go(&mut self, ground: &mut Ground<'_, '_>) -> Result<Stop, (u32, Fault)> {
        let mut is_late = false;
        loop {
            if self.ready == 0 {
                if let Some(stop) = self.stopped(ground)? {
                    return Ok(stop);
                }
                continue;
            }
            // The group that is furthest behind, or ahead where that one took its turn.
            let places = bits_of(self.ready).map(|lane| self.at[lane as usize]);
            let at = if is_late { places.max() } else { places.min() }.unwrap_or(0);
            let mut group = 0;
            let mut next = u32::MAX;
            for lane in bits_of(self.ready) {
                let place = self.at[lane as usize];
                if place == at {
                    group |= 1 << lane;
                } else if place > at {
                    next = next.min(place);
                }
            }
            is_late = self.run_group(ground, at, group, next)?;
        }
    }

    /// Runs lanes that are together until they part, meet others, or wait; true if they only took their
    /// turn.
    #[inline(always)]
    fn run_group(
        &mut self,
        ground: &mut Ground<'_, '_>,
        start: u32,
        group: u32,
        next: u32,
    ) -> Result<bool, (u32, Fault)> {
        let program = ground.program;
        let mut at = start;
        let are_others = group != self.ready;
        for _ in 0..TURN {
            let Coded { op, guard, .. } = &program.code[at as usize];
            let mask = match guard {
                None => group,
                Some((slot, is_negated)) => {
                    let value = self.p[*slot as usize];
                    group & if *is_negated { !value } else { value }
                }
            };
            ground.counts[0] += 1;
            ground.counts[1] += u64::from(mask.count_ones());
            if let Some(members) = lanes::members(self, op) {
                // Lanes that skip it go on only after those that do not.
                if mask != 0 && !self.gather(members, mask, at)? {
                    self.place(group & !mask, at + 1);
                    return Ok(false);
                }
            }
            match lanes::execute(self, ground, op, mask, at).map_err(|fault| (at, fault))? {
                Effect::Next => at += 1,
                Effect::Branch(target) if mask == group => at = target,
                Effect::Branch(_) if mask == 0 => at += 1,
                Effect::Branch(target) => {
                    self.place(mask, target);
                    self.place(group & !mask, at + 1);
                    return Ok(false);
                }
                Effect::Exit => {
                    lanes::finish_copies(self, ground, mask, 0, true, at)
                        .map_err(|fault| (at, fault))?;
                    self.live &= !mask;
                    self.ready &= !mask;
                    self.place(group & !mask, at + 1);
                    return Ok(false);
                }
                Effect::Barrier if mask == 0 => at += 1,
                Effect::Barrier => {
                    self.place(mask, at);
                    self.place(group & !mask, at + 1);
                    self.ready &= !mask;
                    self.at_barrier |= mask;
                    return Ok(false);
                }
            }
            if at >= next {
                self.place(group, at);
                return Ok(false);
            }
        }
        ground.left = ground.left.saturating_sub(1);
        if ground.left == 0 {
            let message =
                "the kernel does not end: raise the number of instructions that a launch may take";
            return Err((
                at,
                Fault::new(Kind::Stopped, group.trailing_zeros(), message),
            ));
        }
        self.place(group, at);
        Ok(are_others)
    }

    fn place(&mut self, lanes: u32, at: u32) {
        for lane in bits_of(lanes) {
            self.at[lane as usize] = at;
        }
    }

    /// Whether all of an instruction's members are there; if not, those that are wait.
    #[inline(always)]
    fn gather(&mut self, members: u32, mask: u32, at: u32) -> Result<bool, (u32, Fault)> {
        let needed = members & self.live;
        if mask & !members != 0 {
            let lane = (mask & !members).trailing_zeros();
            let message =
                format!("lane {lane} is not among the members {members:#x} that it names");
            return Err((at, Fault::new(Kind::Warp, lane, message)));
        }
        if needed & !mask == 0 {
            return Ok(true);
        }
        // Some wait here already?
        let here = bits_of(self.waiting)
            .filter(|lane| self.at[*lane as usize] == at)
            .fold(mask, |all, lane| all | 1 << lane);
        self.place(here, at);
        if needed & !here == 0 {
            // They are a group from now on.
            self.waiting &= !here;
            self.ready |= here;
        } else {
            self.waiting |= mask;
            self.ready &= !mask;
        }
        Ok(false)
    }

    /// No lane goes on: why.
    #[cold]
    fn stopped(&mut self, ground: &Ground<'_, '_>) -> Result<Option<Stop>, (u32, Fault)> {
        let code = &ground.program.code;
        if self.waiting != 0 {
            let lane = self.waiting.trailing_zeros();
            let at = self.at[lane as usize];
            let members = lanes::members(self, &code[at as usize].op).unwrap_or(0);
            // Others may have returned since they came.
            let here = bits_of(self.waiting)
                .filter(|it| self.at[*it as usize] == at)
                .fold(0, |all, it| all | 1 << it);
            if members & self.live & !here == 0 {
                self.waiting &= !here;
                self.ready |= here;
                return Ok(None);
            }
            let missing = (members & self.live & !here).trailing_zeros();
            let place = code[self.at[missing as usize] as usize].line;
            let message = format!(
                "lanes {here:#x} wait for lane {missing}, which waits at line {place} of the PTX"
            );
            return Err((at, Fault::new(Kind::Warp, lane, message)));
        }
        if self.live == 0 {
            return Ok(Some(Stop::Exited));
        }
        let lane = self.at_barrier.trailing_zeros();
        let at = self.at[lane as usize];
        if let Some(other) = bits_of(self.at_barrier).find(|it| self.at[*it as usize] != at) {
            let place = code[self.at[other as usize] as usize].line;
            let message =
                format!("lane {other} of the warp is at another barrier, line {place} of the PTX");
            return Err((at, Fault::new(Kind::Barrier, lane, message)));
        }
        let Op::Barrier {
            id,
            threads,
            arrives_only,
            reduce,
        } = &code[at as usize].op
        else {
            return Err((
                at,
                Fault::new(Kind::Barrier, lane, "lanes wait for nothing"),
            ));
        };
        let word = |slot: Slot| self.w[slot as usize][lane as usize];
        Ok(Some(Stop::Barrier {
            id: word(*id),
            threads: threads.map(word),
            arrives_only: *arrives_only,
            reduce: *reduce,
            at,
        }))
    }

    /// Lanes that wait at a barrier.
    pub(crate) fn at_barrier(&self) -> u32 {
        self.at_barrier
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
