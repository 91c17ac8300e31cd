use super::*;
use proptest::prelude::*;

/// The reduction written as plainly as can be, on the bits of one element of each rank.
fn reference(dtype: DType, reduce: Reduce, ranks: &[u64]) -> u64 {
    fn fold<N: WideNumber>(reduce: Reduce, all: impl Iterator<Item = N>) -> N {
        let combine = |a: N, b: N| match reduce {
            Reduce::Sum => a.plus(b),
            _ if a.is_nan() => a,
            _ if b.is_nan() => b,
            Reduce::Max => {
                if b > a {
                    b
                } else {
                    a
                }
            }
            Reduce::Min => {
                if b < a {
                    b
                } else {
                    a
                }
            }
        };
        all.reduce(combine).unwrap()
    }
    let bits = ranks.iter().copied();
    match dtype {
        DType::F32 => {
            u64::from(fold(reduce, bits.map(|bits| f32::from_bits(bits as u32))).to_bits())
        }
        DType::F64 => fold(reduce, bits.map(f64::from_bits)).to_bits(),
        DType::I64 => fold(reduce, bits.map(|bits| bits as i64)) as u64,
        DType::BF16 => {
            let wide = fold(
                reduce,
                bits.map(|bits| bf16::from_bits(bits as u16).to_f32()),
            );
            u64::from(bf16::from_f32(wide).to_bits())
        }
        DType::F16 | DType::U8 | DType::I32 => unreachable!(),
    }
}

/// Equal to the bit, or both NaN: which NaN a sum of several gives is the processor's choice.
fn same(dtype: DType, left: u64, right: u64) -> bool {
    let is_nan = |bits: u64| match dtype {
        DType::F32 => f32::from_bits(bits as u32).is_nan(),
        DType::F64 => f64::from_bits(bits).is_nan(),
        DType::BF16 => bf16::from_bits(bits as u16).is_nan(),
        DType::F16 | DType::U8 | DType::I32 | DType::I64 => false,
    };
    left == right || (is_nan(left) && is_nan(right))
}

/// The bits of element `index`.
fn bits(dtype: DType, bytes: &[u8], index: usize) -> u64 {
    let size = dtype.bytes();
    let mut wide = [0; 8];
    wide[..size].copy_from_slice(&bytes[index * size..][..size]);
    u64::from_le_bytes(wide)
}

#[test]
fn sixteen_bits_become_thirty_two_exactly() {
    for bits in 0..=u16::MAX {
        let brain = bf16::from_bits(bits);
        assert!(brain.wide().to_bits() == brain.to_f32().to_bits() || brain.is_nan());
        assert!(bf16::narrow(brain.wide()) == brain || brain.is_nan());
    }
}

proptest! {
    #[test]
    fn thirty_two_bits_become_sixteen_by_rounding_once(bits in any::<u32>(), near in any::<u16>(), off in -2i32..3) {
        // Any number, and numbers around those where rounding turns.
        let tie = u32::from(near) << 16 | 0x8000;
        for wide in [bits, tie, tie.wrapping_add_signed(off)].map(f32::from_bits) {
            let brain = bf16::narrow(wide);
            prop_assert!(brain.to_bits() == bf16::from_f32(wide).to_bits() || (brain.is_nan() && wide.is_nan()));
        }
    }

    #[test]
    fn every_type_and_operation_equals_the_plain_loop(
        seed in any::<u64>(),
        count in 0usize..150,
        ranks in 2usize..6,
        mine in 0usize..5,
        shift in 0usize..9,
    ) {
        let mine = mine % ranks;
        for dtype in [DType::F32, DType::BF16, DType::F64, DType::I64] {
            for operation in [Reduce::Sum, Reduce::Max, Reduce::Min] {
                let bytes = count * dtype.bytes();
                let stride = bytes + 24;
                let mut random = seed | 1;
                let mut all = vec![0u8; ranks * stride + shift];
                for (index, byte) in all.iter_mut().enumerate() {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    // Often all bits of a byte alike: zeros, infinities and NaNs come up.
                    *byte = [(random >> 33) as u8, 0, 0xff, 0x7f][(random >> 60) as usize % 4 * (index % 3 % 2)];
                }
                let expected: Vec<u64> = (0..count)
                    .map(|index| {
                        let of = |rank: usize| bits(dtype, &all[shift + rank * stride..], index);
                        reference(dtype, operation, &(0..ranks).map(of).collect::<Vec<_>>())
                    })
                    .collect();
                let mut own = all[shift + mine * stride..][..bytes].to_vec();
                let first = all[shift..].as_ptr();
                let sources = Sources { first, stride_bytes: stride, ranks, mine };
                // SAFETY: every source lies within `all`, which nothing writes meanwhile.
                unsafe { reduce(dtype, operation, &mut own, sources) };
                for (index, &expected) in expected.iter().enumerate() {
                    let found = bits(dtype, &own, index);
                    prop_assert!(same(dtype, found, expected), "{dtype} {operation:?}: {found:x} {expected:x}");
                }
            }
        }
    }
}
