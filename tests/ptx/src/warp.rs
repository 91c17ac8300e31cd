//! The execution of a warp.
//!
//! Lanes at the same instruction execute it together. Where they part, those that are furthest
//! behind in the text go on first, so that they meet again where the paths do; any order would be
//! allowed.

use crate::access;
use crate::finding::{Fault, Kind};
use crate::lanes;
use crate::op::{Coded, Op, Slot};
use crate::state::{Effect, Ground, Stop, Warp, bits_of};

/// So many instructions without a change of lanes, and the others get a turn.
const TURN: u32 = 1 << 20;

impl Warp {
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

    /// Runs lanes that are together until they part, meet others, or wait; true if they only took
    /// their turn.
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
            let Coded {
                op, guard, touched, ..
            } = &program.code[at as usize];
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
            if let Some(touched) = touched
                && mask != 0
            {
                self.products
                    .touch(program, touched, mask.trailing_zeros(), at)
                    .map_err(|fault| (at, fault))?;
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
                    access::finish_copies(self, ground, mask, 0, true, at)
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
