//! Random numbers by counter: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1,
//! 2, 3", 2011).
//!
//! There is no state: a number is a pure function of a key (the seed), a draw (which tensor, which
//! step) and the index of its element. So any split of a tensor over threads, ranks or devices
//! gives the same bits, and a run resumes by remembering two integers. Element i of a draw is lane
//! i mod 4 of the block whose counter is [i/4 low, i/4 high, draw low, draw high]. Floats come from
//! the exact operations of `math.rs`, so they have the same bits at every SIMD level too.

use crate::dtype::{DType, Element};
use crate::math::{ln, sin_cos_turns};
use crate::simd::multiversion;
use crate::threads;

/// A seed of random numbers: equal seeds give equal bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seed(pub u64);

/// Hands out draws: each random tensor uses the next one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Random {
    seed: u64,
    next_draw: u64,
}

impl Random {
    /// Starts at draw 0 of `seed`.
    pub fn new(seed: u64) -> Random {
        Random { seed, next_draw: 0 }
    }

    /// Continues at a draw of `seed`, as `position` returned it.
    pub fn at(seed: u64, draw: u64) -> Random {
        Random {
            seed,
            next_draw: draw,
        }
    }

    /// The seed and the next draw.
    pub fn position(&self) -> (u64, u64) {
        (self.seed, self.next_draw)
    }

    pub(crate) fn next_draw(&mut self) -> Draw {
        let draw = self.next_draw;
        // 2⁶⁴ draws are never reached; wrapping only keeps the arithmetic total.
        self.next_draw = draw.wrapping_add(1);
        Draw {
            key: [self.seed as u32, (self.seed >> 32) as u32],
            draw,
        }
    }
}

/// Elements generated at a time, in a buffer that fits the L1 cache.
const BLOCK: usize = 1024;

multiversion! {
    fn fill_block[](draw: Draw, normal: bool, first: u64, out: &mut [f32]) {
        if normal { draw.convert::<Normal>(first, out) } else { draw.convert::<Uniform>(first, out) }
    }
}

multiversion! {
    fn fill_bits[](draw: Draw, first: u64, out: &mut [u32]) {
        draw.convert::<Bits>(first, out)
    }
}

impl Draw {
    /// Uniforms in [0, 1) or standard normals. Uniforms have as many bits as the type (53, 24, 8).
    /// Normals are generated in f32 and rounded to other types.
    pub(crate) fn fill<T: Element>(self, normal: bool, out: &mut [T]) {
        if T::DTYPE == DType::F64 && !normal {
            return self
                .fill_by_bits::<T, 2>(out, |bits| T::from_f64(uniform_f64(bits[0], bits[1])));
        }
        // As many bits as the type has; the rest is cut off, because rounding could reach 1.
        let steps = match T::DTYPE {
            DType::BF16 => 256.0,
            DType::F32 | DType::F64 => 16_777_216.0,
            DType::F16 | DType::U8 | DType::I32 | DType::I64 => unreachable!("refused before"),
        };
        threads::split_mut(out, BLOCK, |first, out| {
            let mut buffer = [0f32; BLOCK];
            for (index, out) in out.chunks_mut(BLOCK).enumerate() {
                let numbers = &mut buffer[..out.len()];
                fill_block(self, normal, (first + index * BLOCK) as u64, numbers);
                for (out, number) in out.iter_mut().zip(numbers) {
                    let kept = if normal {
                        *number
                    } else {
                        (*number * steps).trunc() / steps
                    };
                    *out = T::from_f64(f64::from(kept));
                }
            }
        });
    }

    /// Uniform integers in 0..`bound`.
    pub(crate) fn fill_below<T: Element>(self, bound: u32, out: &mut [T]) {
        self.fill_by_bits::<T, 1>(out, |bits| T::from_f64(f64::from(below(bits[0], bound))));
    }

    /// Each element from its own `WORDS` words.
    fn fill_by_bits<T: Element, const WORDS: usize>(
        self,
        out: &mut [T],
        make: impl Fn(&[u32]) -> T + Sync,
    ) {
        threads::split_mut(out, BLOCK, |first, out| {
            let mut words = [0u32; BLOCK];
            for (index, out) in out.chunks_mut(BLOCK / WORDS).enumerate() {
                let words = &mut words[..out.len() * WORDS];
                fill_bits(self, (first * WORDS + index * BLOCK) as u64, words);
                for (out, words) in out.iter_mut().zip(words.chunks(WORDS)) {
                    *out = make(words);
                }
            }
        });
    }
}

/// Four words, the unit the generator works in.
const LANES: usize = 4;

/// Ten rounds of Philox on one block: 128 random bits, a bijection of `counter` for each `key`.
#[inline(always)]
pub(crate) fn philox4x32(counter: [u32; LANES], key: [u32; 2]) -> [u32; LANES] {
    let ([mut a, mut b, mut c, mut d], [mut key_0, mut key_1]) = (counter, key);
    for _ in 0..10 {
        let product_a = u64::from(a) * 0xd251_1f53;
        let product_c = u64::from(c) * 0xcd9e_8d57;
        a = (product_c >> 32) as u32 ^ b ^ key_0;
        b = product_c as u32;
        c = (product_a >> 32) as u32 ^ d ^ key_1;
        d = product_a as u32;
        // The golden ratio, and √3 − 1: a Weyl sequence for a key schedule.
        key_0 = key_0.wrapping_add(0x9e37_79b9);
        key_1 = key_1.wrapping_add(0xbb67_ae85);
    }
    [a, b, c, d]
}

/// 2⁻²⁴, the spacing of [`uniform`].
const UNIFORM_STEP: f32 = 1.0 / (1 << 24) as f32;

/// A multiple of 2⁻²⁴ in [0, 1), each as likely as the others; exact.
#[inline(always)]
pub(crate) fn uniform(bits: u32) -> f32 {
    // Through i32: that conversion is one instruction at every SIMD level, the unsigned one is not.
    (bits >> 8) as i32 as f32 * UNIFORM_STEP
}

/// A multiple of 2⁻⁵³ in [0, 1), each as likely as the others; exact.
#[inline(always)]
pub(crate) fn uniform_f64(high: u32, low: u32) -> f64 {
    let bits = (u64::from(high) << 32) | u64::from(low);
    (bits >> 11) as f64 * (1.0 / (1_u64 << 53) as f64)
}

/// Four independent standard normals from one block (Box–Muller, two at a time). None is beyond
/// 5.77 in size: √(2 ln 2²⁴), which a true normal exceeds once in 10⁸.
#[inline(always)]
pub(crate) fn normals(bits: [u32; LANES]) -> [f32; LANES] {
    let (first, second) = normal_pair(bits[0], bits[1]);
    let (third, fourth) = normal_pair(bits[2], bits[3]);
    [first, second, third, fourth]
}

#[inline(always)]
fn normal_pair(radius_bits: u32, angle_bits: u32) -> (f32, f32) {
    // In (0, 1], so that the logarithm is finite.
    let radius = (-2.0 * ln(uniform(radius_bits) + UNIFORM_STEP)).sqrt();
    let (sin, cos) = sin_cos_turns(uniform(angle_bits));
    (radius * cos, radius * sin)
}

/// An integer in 0..bound (0 when `bound` is 0), by multiply and shift. Each has probability
/// 1/bound to within 2⁻³²: plain for shuffles and crops, and it never loops, so the counter stays a
/// plain index.
#[inline(always)]
pub(crate) fn below(bits: u32, bound: u32) -> u32 {
    ((u64::from(bits) * u64::from(bound)) >> 32) as u32
}

/// One draw, such as the elements of a random tensor: an endless sequence, readable at any index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Draw {
    /// The seed.
    pub(crate) key: [u32; 2],
    /// Which of the seed's sequences; each use of a seed needs its own.
    pub(crate) draw: u64,
}

// The fillers are generic and always inlined: a caller's `#[target_feature]` function decides how
// wide they run.
impl Draw {
    /// The block holding elements 4 `index` to 4 `index` + 3.
    #[inline(always)]
    pub(crate) fn block(&self, index: u64) -> [u32; LANES] {
        philox4x32(
            [
                index as u32,
                (index >> 32) as u32,
                self.draw as u32,
                (self.draw >> 32) as u32,
            ],
            self.key,
        )
    }

    /// Elements from `first` on, made from blocks as `C` does.
    #[inline(always)]
    pub(crate) fn convert<C: Drawn>(&self, first: u64, out: &mut [C::Element]) {
        let mut index = first / LANES as u64;
        let skipped = (first % LANES as u64) as usize;
        // `first` may lie inside a block, and so may the end. `index` stays near 2⁶² at most.
        let head_count = if skipped == 0 {
            0
        } else {
            (LANES - skipped).min(out.len())
        };
        let (head, rest) = out.split_at_mut(head_count);
        if head_count > 0 {
            head.copy_from_slice(&C::convert(self.block(index))[skipped..skipped + head_count]);
            index += 1;
        }
        let (blocks, tail) = rest.as_chunks_mut::<LANES>();
        for block in blocks {
            *block = C::convert(self.block(index));
            index += 1;
        }
        if !tail.is_empty() {
            let count = tail.len();
            tail.copy_from_slice(&C::convert(self.block(index))[..count]);
        }
    }
}

/// How to convert a block. A trait instead of a closure, because a closure that is not inlined is
/// compiled without the caller's `#[target_feature]`: for normals that cost 32 ns instead of 1 per
/// element (AVX-512).
pub(crate) trait Drawn {
    type Element: Copy;
    fn convert(bits: [u32; LANES]) -> [Self::Element; LANES];
}

/// Raw bits.
pub(crate) struct Bits;
/// Uniforms in [0, 1).
pub(crate) struct Uniform;
/// Standard normals.
pub(crate) struct Normal;

impl Drawn for Bits {
    type Element = u32;
    #[inline(always)]
    fn convert(bits: [u32; LANES]) -> [u32; LANES] {
        bits
    }
}

impl Drawn for Uniform {
    type Element = f32;
    #[inline(always)]
    fn convert(bits: [u32; LANES]) -> [f32; LANES] {
        [
            uniform(bits[0]),
            uniform(bits[1]),
            uniform(bits[2]),
            uniform(bits[3]),
        ]
    }
}

impl Drawn for Normal {
    type Element = f32;
    #[inline(always)]
    fn convert(bits: [u32; LANES]) -> [f32; LANES] {
        normals(bits)
    }
}

#[cfg(test)]
mod tests;
