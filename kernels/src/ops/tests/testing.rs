//! Shared by the tests of operations: sizes, random inputs, comparison with f64.

use crate::ops::chunks::{Chunk, ChunkTable};
use crate::random::Random;
use crate::{DType, Device, Tensor};

/// Empty, one, odd, around SIMD widths and blocks, and large enough for all threads.
pub(crate) const SIZES: [usize; 12] = [0, 1, 2, 7, 15, 16, 17, 63, 255, 1025, 4099, 100_003];

/// Standard normals of a seed; each test uses its own.
pub(crate) fn random_f32(count: usize, seed: u64) -> Vec<f32> {
    let tensor = Tensor::randn(&[count], DType::F32, Device::Cpu, &mut Random::new(seed)).unwrap();
    tensor.to_vec().unwrap()
}

/// An f32 tensor on the CPU.
pub(crate) fn cpu(data: &[f32], shape: &[usize]) -> Tensor {
    cpu_of(data, shape)
}

/// A tensor of any dtype on the CPU.
pub(crate) fn cpu_of<T: crate::Element>(data: &[T], shape: &[usize]) -> Tensor {
    Tensor::from_slice(data, shape, Device::Cpu).unwrap()
}

/// Both halves of this many elements, of which the first decays, with a gap of one between them.
pub(crate) fn two_chunks(size: usize) -> ChunkTable {
    let chunk = |offset, len, decay| Chunk { offset, len, decay };
    let half = size / 2;
    let rest = size.saturating_sub(half + 1);
    let mut chunks = vec![chunk(0, half, true), chunk(half + 1, rest, false)];
    chunks.retain(|chunk| chunk.len > 0);
    ChunkTable::new(chunks).unwrap()
}

/// Every element is within `bound(index, reference)` of the f64 reference; NaN must match NaN, and
/// infinity the same infinity.
#[track_caller]
pub(crate) fn assert_close(got: &[f32], reference: &[f64], bound: impl Fn(usize, f64) -> f64) {
    assert_eq!(got.len(), reference.len());
    for (index, (&got, &reference)) in got.iter().zip(reference).enumerate() {
        let same = f64::from(got) == reference || (got.is_nan() && reference.is_nan());
        let error = (f64::from(got) - reference).abs();
        assert!(
            same || error <= bound(index, reference),
            "element {index}: got {got:e}, reference {reference:e}, error {error:e}, bound {:e}",
            bound(index, reference)
        );
    }
}

/// Held by tests that set the process's number of threads; all others pass with any number.
pub(crate) fn alone_with_the_pool() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    ALONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
