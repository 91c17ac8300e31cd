//! Random numbers as pure functions of keys, with the same bits on every machine: only integers,
//! and floats by +, −, × and ÷.

/// The odd number nearest to 2⁶⁴ over the golden ratio: steps of it spread over all 64 bits.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finalizer of SplitMix64: a bijection in which every result bit depends on every bit of
/// `value`.
#[inline]
pub(crate) fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// A key derived from `key`, different for every `part`.
#[inline]
pub(crate) fn derive(key: u64, part: u64) -> u64 {
    // The key is mixed first, so that (key, part) and (part, key) are unrelated.
    mix(mix(key.wrapping_add(STEP)) ^ part)
}

/// A sequence of random numbers.
#[derive(Clone, Debug)]
pub(crate) struct Draws(u64);

impl Draws {
    /// The sequence of `key`.
    #[inline]
    pub(crate) fn new(key: u64) -> Draws {
        Draws(key)
    }

    /// 64 random bits.
    #[inline]
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// A number below `bound`, uniform up to bound / 2⁶⁴.
    #[inline]
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(bound)) >> 64) as u64
    }

    /// A number in [-1, 1) with 24 bits.
    #[inline]
    pub(crate) fn signed(&mut self) -> f32 {
        (self.bits() >> 40) as f32 * (1.0 / 8_388_608.0) - 1.0
    }

    /// A number in [0, 1) with 24 bits.
    #[inline]
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 * (1.0 / 16_777_216.0)
    }

    /// Nearly standard normal: mean 0, variance 1, within ±3.47.
    #[inline]
    pub(crate) fn normal(&mut self) -> f32 {
        normal_of(self.bits())
    }
}

/// Nearly standard normal from 64 random bits: the sum of four uniforms of 16 bits has variance 4 /
/// 12 in units of 2¹⁶, so that √3 scales it to 1.
#[inline]
pub(crate) fn normal_of(bits: u64) -> f32 {
    let sum = (bits & 0xffff) + ((bits >> 16) & 0xffff) + ((bits >> 32) & 0xffff) + (bits >> 48);
    // Centred as an integer, so that the result is exactly symmetric: the mean of the sum is 2 ×
    // 65,535.
    let centred = sum as i32 - 2 * 65_535;
    centred as f32 * (1.732_050_8 / 65_536.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normals_have_mean_zero_and_variance_one() {
        const COUNT: usize = 200_000;
        let mut draws = Draws::new(7);
        let (mut sum, mut squares) = (0f64, 0f64);
        for _ in 0..COUNT {
            let number = f64::from(draws.normal());
            sum += number;
            squares += number * number;
        }
        // The mean of n is off by 1/√n = 0.0022; the mean square by √((kurtosis − 1)/n), with
        // kurtosis 2.7: 0.0029. Five of each.
        assert!((sum / COUNT as f64).abs() < 0.011, "{}", sum / COUNT as f64);
        assert!(
            (squares / COUNT as f64 - 1.0).abs() < 0.015,
            "{}",
            squares / COUNT as f64
        );
    }

    #[test]
    fn uniforms_stay_in_range_at_the_ends_of_their_bits() {
        assert_eq!(
            (u64::MAX >> 40) as f32 * (1.0 / 8_388_608.0) - 1.0,
            1.0 - 1.0 / 8_388_608.0
        );
        assert_eq!(normal_of(0), -normal_of(u64::MAX));
        let mut draws = Draws::new(0);
        assert!((0..10_000).all(|_| (-1.0..1.0).contains(&draws.signed())));
        assert!((0..10_000).all(|_| (0.0..1.0).contains(&draws.unit())));
        assert!((0..10_000).all(|_| draws.below(3) < 3));
    }
}
