//! The machine's peak: multiply-adds from registers, and a copy larger than the caches.

use std::hint::black_box;
use std::sync::{Barrier, Mutex};
use std::time::Instant;

use ddp_kernels::{DType, Device, Random, Tensor};

/// Larger than any third-level cache in use.
pub(crate) const COPY_BYTES: usize = 256 << 20;

/// The limits that operations are measured against.
pub(crate) struct Machine {
    pub(crate) threads: usize,
    pub(crate) gflops: f64,
    pub(crate) copy_gb_s: f64,
}

pub(crate) fn measure(threads: usize) -> Machine {
    Machine {
        threads,
        gflops: (0..5)
            .map(|_| multiply_adds(threads, STEPS))
            .fold(0.0, f64::max),
        copy_gb_s: copy(),
    }
}

/// Bytes read and written a second by copying a tensor onto another.
fn copy() -> f64 {
    let count = COPY_BYTES / DType::F32.bytes();
    let source = Tensor::rand(&[count], DType::F32, Device::Cpu, &mut Random::new(1))
        .expect("memory for the bench");
    let target = source.zeros_like().expect("memory for the bench");
    let mut body = || target.copy_from(&source).expect("same shape");
    let seconds = crate::in_turn(&mut [&mut body]);
    2.0 * COPY_BYTES as f64 / crate::median(seconds[0].clone()) / 1e9
}

/// Independent multiply-adds: enough of them in flight to hide their latency on any processor of
/// today.
const CHAINS: usize = 12;
const STEPS: usize = 2_000_000;
const STEPS_BURST: usize = 5_000;

/// Multiplications and additions a second on all threads, in 10^9.
fn multiply_adds(threads: usize, steps: usize) -> f64 {
    let (sum, barrier) = (Mutex::new(0.0), Barrier::new(threads));
    ddp_kernels::threads::run(threads, |_| {
        // All threads start together, and each takes one piece.
        barrier.wait();
        let start = Instant::now();
        let flops = one_thread(steps);
        *sum.lock().expect("no thread panics") += flops / start.elapsed().as_secs_f64() / 1e9;
    });
    sum.into_inner().expect("no thread panics")
}

/// The same for about 10 µs: what the processor reaches right after other work.
pub(crate) fn multiply_adds_burst(threads: usize) -> f64 {
    multiply_adds(threads, STEPS_BURST)
}

fn one_thread(steps: usize) -> f64 {
    #[cfg(target_arch = "x86_64")]
    match ddp_kernels::simd::level() {
        // SAFETY: the level was found on this processor.
        ddp_kernels::simd::Level::Avx512 => return unsafe { avx512(steps) },
        // SAFETY: as above.
        ddp_kernels::simd::Level::Avx2 => return unsafe { avx2(steps) },
        ddp_kernels::simd::Level::Baseline => {}
    }
    let mut sums = [[0f32; 4]; CHAINS];
    for _ in 0..steps {
        for sum in &mut sums {
            for lane in sum.iter_mut() {
                *lane = *lane * black_box(0.999) + 1e-6;
            }
        }
    }
    black_box(sums);
    (steps * CHAINS * 4 * 2) as f64
}

#[cfg(target_arch = "x86_64")]
macro_rules! chains {
    ($name:ident, $feature:literal, $vector:ident, $set:ident, $fused:ident, $lanes:literal) => {
        #[target_feature(enable = $feature)]
        fn $name(steps: usize) -> f64 {
            use std::arch::x86_64::{$fused, $set, $vector};
            let (factor, addend) = ($set(black_box(0.999)), $set(black_box(1e-6)));
            let mut sums: [$vector; CHAINS] = std::array::from_fn(|chain| $set(chain as f32));
            for _ in 0..steps {
                for sum in &mut sums {
                    *sum = $fused(*sum, factor, addend);
                }
            }
            black_box(sums);
            (steps * CHAINS * $lanes * 2) as f64
        }
    };
}
#[cfg(target_arch = "x86_64")]
chains!(
    avx512,
    "avx512f",
    __m512,
    _mm512_set1_ps,
    _mm512_fmadd_ps,
    16
);
#[cfg(target_arch = "x86_64")]
chains!(avx2, "avx2,fma", __m256, _mm256_set1_ps, _mm256_fmadd_ps, 8);
