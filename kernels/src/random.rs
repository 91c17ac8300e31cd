//! Random numbers by counter (Philox): element `i` of draw `d` under a seed is a pure function of
//! the three, so its bits do not depend on the device, the number of threads or the order of
//! execution.

use crate::dtype::{DType, Element};
use crate::philox::{Bits, Normal, Stream, Uniform, uniform_f64};
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
        Draw(Stream {
            key: [self.seed as u32, (self.seed >> 32) as u32],
            draw,
        })
    }
}

/// The elements of one random tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draw(Stream);

/// Elements generated at a time, in a buffer that fits the L1 cache.
const BLOCK: usize = 1024;

multiversion! {
    fn fill_block[](stream: Stream, normal: bool, first: u64, out: &mut [f32]) {
        if normal { stream.fill::<Normal>(first, out) } else { stream.fill::<Uniform>(first, out) }
    }
}

multiversion! {
    fn fill_bits[](stream: Stream, first: u64, out: &mut [u32]) {
        stream.fill::<Bits>(first, out)
    }
}

impl Draw {
    /// Its seed and draw, for kernels that generate it on a GPU.
    pub(crate) fn stream(self) -> Stream {
        self.0
    }

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
            _ => 16_777_216.0,
        };
        threads::split_mut(out, BLOCK, |first, out| {
            let mut buffer = [0f32; BLOCK];
            for (index, out) in out.chunks_mut(BLOCK).enumerate() {
                let numbers = &mut buffer[..out.len()];
                fill_block(self.0, normal, (first + index * BLOCK) as u64, numbers);
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
        self.fill_by_bits::<T, 1>(out, |bits| {
            T::from_f64(f64::from(crate::philox::below(bits[0], bound)))
        });
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
                fill_bits(self.0, (first * WORDS + index * BLOCK) as u64, words);
                for (out, words) in out.iter_mut().zip(words.chunks(WORDS)) {
                    *out = make(words);
                }
            }
        });
    }
}

#[cfg(test)]
mod tests;
