//! Element types and reductions: the arithmetic of a ring.
//!
//! Sums are not taken in rank order. As in a ring, where the starting rank moves with each chunk,
//! element `i` starts at rank `(i / CHUNK_ELEMENTS + first) mod N` and is folded in ring order:
//! each hop combines the incoming value with the rank's own and rounds to the element type. `first`
//! is 0; for a reduce-scatter it is the rank after the one that keeps the slice, and `i` counts in
//! that slice. So float sums differ from those in rank order, those of a reduce-scatter differ from
//! those of an all-reduce, and all ranks have the same bits.

use half::{bf16, f16};

/// How many consecutive elements start at one rank.
pub(super) const CHUNK_ELEMENTS: usize = 64;

/// An element type that NCCL moves and reduces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    Bf16,
}

impl Type {
    /// From an `ncclDataType_t`; None for those that are not modelled (8-bit floats) or do not
    /// exist.
    pub(super) fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            0 => Self::I8,
            1 => Self::U8,
            2 => Self::I32,
            3 => Self::U32,
            4 => Self::I64,
            5 => Self::U64,
            6 => Self::F16,
            7 => Self::F32,
            8 => Self::F64,
            9 => Self::Bf16,
            _ => return None,
        })
    }

    pub(super) fn bytes(self) -> u64 {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::I8 => "i8",
            Self::U8 => "u8",
            Self::I32 => "i32",
            Self::U32 => "u32",
            Self::I64 => "i64",
            Self::U64 => "u64",
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::Bf16 => "bf16",
        }
    }
}

/// How two elements are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reduction {
    Sum,
    Product,
    Max,
    Min,
}

impl Reduction {
    /// From an `ncclRedOp_t`; None for the average and those that do not exist.
    pub(super) fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            0 => Self::Sum,
            1 => Self::Product,
            2 => Self::Max,
            3 => Self::Min,
            _ => return None,
        })
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Product => "product",
            Self::Max => "max",
            Self::Min => "min",
        }
    }
}

/// One hop of the ring.
trait Element: Copy {
    fn combine(self, other: Self, how: Reduction) -> Self;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Element for $type {
            fn combine(self, other: Self, how: Reduction) -> Self {
                match how {
                    Reduction::Sum => self.wrapping_add(other),
                    Reduction::Product => self.wrapping_mul(other),
                    Reduction::Max => self.max(other),
                    Reduction::Min => self.min(other),
                }
            }
        }
    )*};
}
integers!(i8, u8, i32, u32, i64, u64);

macro_rules! floats {
    ($($type:ty),*) => {$(
        impl Element for $type {
            fn combine(self, other: Self, how: Reduction) -> Self {
                match how {
                    Reduction::Sum => self + other,
                    Reduction::Product => self * other,
                    Reduction::Max => self.max(other),
                    Reduction::Min => self.min(other),
                }
            }
        }
    )*};
}
floats!(f32, f64);

macro_rules! halves {
    ($($type:ty),*) => {$(
        impl Element for $type {
            fn combine(self, other: Self, how: Reduction) -> Self {
                Self::from_f32(self.to_f32().combine(other.to_f32(), how))
            }
        }
    )*};
}
halves!(f16, bf16);

/// Combines `sources`, one per rank, into `to`: elements `from_index..` of the reduction. All have
/// the same length in whole elements.
pub(super) fn fold(
    kind: Type,
    how: Reduction,
    sources: &[&[u8]],
    to: &mut [u8],
    from_index: usize,
    first: usize,
) {
    match kind {
        Type::I8 => fold_as::<i8>(how, sources, to, from_index, first),
        Type::U8 => fold_as::<u8>(how, sources, to, from_index, first),
        Type::I32 => fold_as::<i32>(how, sources, to, from_index, first),
        Type::U32 => fold_as::<u32>(how, sources, to, from_index, first),
        Type::I64 => fold_as::<i64>(how, sources, to, from_index, first),
        Type::U64 => fold_as::<u64>(how, sources, to, from_index, first),
        Type::F16 => fold_as::<f16>(how, sources, to, from_index, first),
        Type::F32 => fold_as::<f32>(how, sources, to, from_index, first),
        Type::F64 => fold_as::<f64>(how, sources, to, from_index, first),
        Type::Bf16 => fold_as::<bf16>(how, sources, to, from_index, first),
    }
}

fn fold_as<T: Element>(
    how: Reduction,
    sources: &[&[u8]],
    to: &mut [u8],
    from_index: usize,
    first: usize,
) {
    let size = size_of::<T>();
    let count = to.len() / size;
    let ranks = sources.len();
    assert!(
        sources.iter().all(|source| source.len() == to.len()),
        "one length for all ranks"
    );
    let mut at = 0;
    while at < count {
        let index = from_index + at;
        let chunk = at * size..count.min(at + CHUNK_ELEMENTS - index % CHUNK_ELEMENTS) * size;
        let start = (index / CHUNK_ELEMENTS + first) % ranks;
        to[chunk.clone()].copy_from_slice(&sources[start][chunk.clone()]);
        for hop in 1..ranks {
            combine::<T>(
                how,
                &sources[(start + hop) % ranks][chunk.clone()],
                &mut to[chunk.clone()],
            );
        }
        at = chunk.end / size;
    }
}

/// One hop of a chunk: the incoming values are in `to`, the rank's own in `own`.
fn combine<T: Element>(how: Reduction, own: &[u8], to: &mut [u8]) {
    for (own, to) in own
        .chunks_exact(size_of::<T>())
        .zip(to.chunks_exact_mut(size_of::<T>()))
    {
        // SAFETY: both are as long as a T, which is a number, of which any bits are one; nothing is
        // aligned here, and nothing has to be.
        unsafe {
            let sum = own
                .as_ptr()
                .cast::<T>()
                .read_unaligned()
                .combine(to.as_ptr().cast::<T>().read_unaligned(), how);
            to.as_mut_ptr().cast::<T>().write_unaligned(sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folded(values: &[Vec<f32>], from_index: usize, first: usize) -> Vec<f32> {
        let bytes: Vec<Vec<u8>> = values
            .iter()
            .map(|values| {
                values
                    .iter()
                    .flat_map(|value| value.to_le_bytes())
                    .collect()
            })
            .collect();
        let sources: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
        let mut to = vec![0; bytes[0].len()];
        fold(
            Type::F32,
            Reduction::Sum,
            &sources,
            &mut to,
            from_index,
            first,
        );
        to.chunks_exact(4)
            .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
            .collect()
    }

    /// 1, 2^24 and -2^24 in f32: what is left of the 1 says in which order they were added.
    #[test]
    fn each_chunk_starts_at_another_rank_and_goes_round_the_ring() {
        let big = 16_777_216.0;
        let values = [vec![1.0; 200], vec![big; 200], vec![-big; 200]];
        let sums = folded(&values, 0, 0);
        // Chunk 0: (1 + 2^24) - 2^24, in which the 1 is rounded away; chunk 1: (2^24 - 2^24) + 1;
        // chunk 2: (-2^24 + 1) + 2^24 = 1.
        assert_eq!(
            (sums[0], sums[63], sums[64], sums[128]),
            (0.0, 0.0, 1.0, 1.0)
        );
        assert_eq!(sums[192], 0.0, "the fourth chunk starts at rank 0 again");
        assert_eq!(folded(&values, 70, 0)[..3], sums[70..73]);
        assert_eq!(folded(&values, 0, 1)[0], 1.0);
    }

    #[test]
    fn halves_are_rounded_at_every_hop() {
        // 256 + 1 is no bf16 and rounds to 256 (to even): twice, so that 258, the rounded sum of
        // all, does not come out.
        let sources: Vec<[u8; 2]> = [256.0, 1.0, 1.0]
            .map(|value| bf16::from_f32(value).to_le_bytes())
            .into();
        let sources: Vec<&[u8]> = sources.iter().map(|bytes| bytes.as_slice()).collect();
        let mut to = [0; 2];
        fold(Type::Bf16, Reduction::Sum, &sources, &mut to, 0, 0);
        assert_eq!(bf16::from_le_bytes(to).to_f32(), 256.0);
    }

    #[test]
    fn every_reduction_and_type_is_that_of_its_name() {
        let fold_i8 = |how| {
            let mut to = [0];
            fold(Type::I8, how, &[&[100], &[3], &[254]], &mut to, 0, 0);
            to[0] as i8
        };
        // 254 is -2.
        assert_eq!(fold_i8(Reduction::Sum), 101);
        assert_eq!(
            fold_i8(Reduction::Product),
            (100i8).wrapping_mul(3).wrapping_mul(-2)
        );
        assert_eq!(
            (fold_i8(Reduction::Max), fold_i8(Reduction::Min)),
            (100, -2)
        );
        for raw in 0..10 {
            let kind = Type::from_raw(raw).unwrap();
            let (mut ones, bytes) = (vec![0; 8], kind.bytes() as usize);
            fold(kind, Reduction::Sum, &[&[0; 8], &[0; 8]], &mut ones, 0, 0);
            assert_eq!((ones, 8 % bytes), (vec![0; 8], 0), "{kind:?}");
        }
        assert_eq!(Type::from_raw(10), None);
    }
}
