//! In which order blocks and warps run: a choice that follows from a seed.

/// A small generator of numbers: an order from a seed.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % bound.max(1)
    }
}

/// An order of things that are done one after another.
#[derive(Clone, Copy)]
pub(super) enum Turns {
    Forward,
    Backward,
    /// The i-th is `i * step + first`: step and the number of all have no common divisor.
    Scattered {
        step: u64,
        first: u64,
    },
}

impl Turns {
    pub(super) fn of(count: u64, random: &mut Random) -> Turns {
        match random.below(3) {
            0 => Turns::Forward,
            1 => Turns::Backward,
            _ => {
                let divides = |mut a: u64, mut b: u64| {
                    while b != 0 {
                        (a, b) = (b, a % b);
                    }
                    a
                };
                let mut step = random.below(count) | 1;
                while divides(step, count) != 1 {
                    step += 1;
                }
                let first = random.below(count);
                Turns::Scattered { step, first }
            }
        }
    }

    pub(super) fn at(self, index: u64, count: u64) -> u64 {
        match self {
            Turns::Forward => index,
            Turns::Backward => count - 1 - index,
            Turns::Scattered { step, first } => {
                let place = u128::from(index) * u128::from(step) + u128::from(first);
                (place % u128::from(count)) as u64
            }
        }
    }
}
