//! Random numbers as a function of a stream and an index.

/// splitmix64, as in tests/peers/golden_torch.py.
pub(crate) fn mixed(stream: u64, index: u64) -> u64 {
    let mut z = (index + 1)
        .wrapping_mul(0x9E37_79B9_7F4A_7C15)
        .wrapping_add(
            stream
                .wrapping_mul(0xD134_2543_DE82_EF95)
                .wrapping_add(0x632B_E59B_D9B4_E019),
        );
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// In [-1, 1), exact in f32.
pub(crate) fn uniform(stream: u64, index: u64) -> f32 {
    (mixed(stream, index) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// A whole number from -2 to 2, whose sums are exact in f32 in any order.
pub(crate) fn whole(stream: u64, index: u64) -> f32 {
    (mixed(stream, index) % 5) as f32 - 2.0
}
