//! Random numbers by counter (Philox): element `i` of draw `d` under a seed is a pure function of the three. So the
//! bits do not depend on the device, the number of threads, or the order in which anything ran.

use crate::dtype::{DType, Element};
use crate::philox::{Stream, uniform_f64};
use crate::simd::multiversion;
use crate::threads;

/// Hands out draws: each random tensor takes the next one.
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

    /// Starts at a given draw of `seed`: what `position` said when it was saved.
    pub fn at(seed: u64, draw: u64) -> Random {
        Random { seed, next_draw: draw }
    }

    /// The seed, and the draw that comes next.
    pub fn position(&self) -> (u64, u64) {
        (self.seed, self.next_draw)
    }

    pub(crate) fn next_draw(&mut self) -> Draw {
        let draw = self.next_draw;
        // 2⁶⁴ draws are never reached; wrapping only keeps the arithmetic total.
        self.next_draw = draw.wrapping_add(1);
        Draw(Stream { key: [self.seed as u32, (self.seed >> 32) as u32], draw })
    }
}

/// The elements of one random tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draw(Stream);

/// Elements made at a time, in a buffer that stays in the first cache.
const BLOCK: usize = 1024;

multiversion! {
    fn fill_block[](stream: Stream, normal: bool, first: u64, out: &mut [f32]) {
        if normal { stream.fill_normal(first, out) } else { stream.fill_uniform(first, out) }
    }
}

multiversion! {
    fn fill_bits[](stream: Stream, first: u64, out: &mut [u32]) {
        stream.fill_bits(first, out)
    }
}

impl Draw {
    /// Its place among all random numbers, for kernels that make them on a GPU.
    pub(crate) fn stream(self) -> Stream {
        self.0
    }

    /// Uniforms in [0, 1) or standard normals. Uniforms have as many bits as the type (53, 24, 11, 8); other normals than
    /// f32's are the f32 number, rounded.
    pub(crate) fn fill<T: Element>(self, normal: bool, out: &mut [T]) {
        if T::DTYPE == DType::F64 && !normal {
            return self.fill_by_bits::<T, 2>(out, |bits| T::from_f64(uniform_f64(bits[0], bits[1])));
        }
        // As many bits as the type has, cut off: rounding the others would reach 1.
        let steps = match T::DTYPE {
            DType::BF16 => 256.0,
            DType::F16 => 2048.0,
            _ => 16_777_216.0,
        };
        threads::split_mut(out, BLOCK, |first, out| {
            let mut buffer = [0f32; BLOCK];
            for (index, out) in out.chunks_mut(BLOCK).enumerate() {
                let numbers = &mut buffer[..out.len()];
                fill_block(self.0, normal, (first + index * BLOCK) as u64, numbers);
                for (out, number) in out.iter_mut().zip(numbers) {
                    let kept = if normal { *number } else { (*number * steps).trunc() / steps };
                    *out = T::from_f64(f64::from(kept));
                }
            }
        });
    }

    /// Whole numbers uniform in 0..`bound`.
    pub(crate) fn fill_below<T: Element>(self, bound: u32, out: &mut [T]) {
        self.fill_by_bits::<T, 1>(out, |bits| T::from_f64(f64::from(crate::philox::below(bits[0], bound))));
    }

    /// Each element from `WORDS` words of its own.
    fn fill_by_bits<T: Element, const WORDS: usize>(self, out: &mut [T], make: impl Fn(&[u32]) -> T + Sync) {
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
mod tests {
    use super::*;
    use crate::{Device, Tensor};

    #[test]
    fn a_saved_position_continues_with_the_same_numbers() {
        let mut random = Random::new(7);
        let _ = Tensor::randn(&[5], DType::F32, Device::Cpu, &mut random).unwrap();
        let (seed, draw) = random.position();
        let next = Tensor::rand(&[9], DType::F32, Device::Cpu, &mut random).unwrap();
        let again = Tensor::rand(&[9], DType::F32, Device::Cpu, &mut Random::at(seed, draw)).unwrap();
        assert_eq!(next.to_vec::<f32>().unwrap(), again.to_vec::<f32>().unwrap());
    }

    #[test]
    fn a_long_tensor_filled_by_many_threads_has_the_bits_of_its_pieces() {
        let stream = Stream { key: [3, 0], draw: 0 };
        let long = Tensor::randn(&[100_003], DType::F32, Device::Cpu, &mut Random::new(3)).unwrap();
        let long = long.to_vec::<f32>().unwrap();
        for first in [0, 1, 1023, 77_777, 100_002] {
            let mut one = [0f32];
            stream.fill_normal(first as u64, &mut one);
            assert_eq!(one[0].to_bits(), long[first].to_bits(), "element {first}");
        }
    }

    #[test]
    fn every_dtype_stays_in_range() {
        let mut random = Random::new(1);
        let uniform = Tensor::rand(&[10_000], DType::F64, Device::Cpu, &mut random).unwrap().to_vec::<f64>().unwrap();
        assert!(uniform.iter().all(|u| (0.0..1.0).contains(u)));
        assert!(uniform.iter().any(|u| (u * 16_777_216.0).fract() != 0.0), "more than 24 bits");
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            let uniform = Tensor::rand(&[100_000], dtype, Device::Cpu, &mut random).unwrap();
            let uniform = uniform.to_dtype(DType::F64).unwrap().to_vec::<f64>().unwrap();
            assert!(uniform.iter().all(|u| (0.0..1.0).contains(u)), "{dtype}");
            // The mean of n uniforms is off by 1/√(12 n), here 0.0009; five of those, and half a step of bf16.
            let mean = uniform.iter().sum::<f64>() / 100_000.0;
            assert!((mean - 0.5).abs() < 5.0 * 0.0009 + 1.0 / 512.0, "{dtype}: {mean}");
        }
        let labels = Tensor::randint(10, &[10_000], DType::I64, Device::Cpu, &mut random).unwrap();
        let labels = labels.to_vec::<i64>().unwrap();
        assert!((0..10).all(|class| labels.contains(&class)) && labels.iter().all(|&l| (0..10).contains(&l)));
    }
}
