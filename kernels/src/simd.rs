//! One binary for every x86-64: each hot loop is compiled three times (plain, AVX2 with FMA, AVX-512) and the widest
//! that this processor has is chosen at run time.
//!
//! The results do not depend on the choice: the loops use explicit `mul_add`, and sums keep a fixed number of lanes.

use std::sync::atomic::{AtomicU8, Ordering};

/// Which instructions may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    /// What every processor of the architecture has.
    Baseline = 1,
    /// AVX2 and FMA.
    Avx2 = 2,
    /// AVX-512 (F, BW, DQ, VL) besides.
    Avx512 = 3,
}

/// The level in use, once it is found.
static FOUND: AtomicU8 = AtomicU8::new(0);

/// The widest level that this processor has.
#[inline]
pub fn level() -> Level {
    match FOUND.load(Ordering::Relaxed) {
        0 => {
            let found = detect();
            FOUND.store(found as u8, Ordering::Relaxed);
            found
        }
        1 => Level::Baseline,
        2 => Level::Avx2,
        _ => Level::Avx512,
    }
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Level {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512) {
        (true, true) => Level::Avx512,
        (true, false) => Level::Avx2,
        _ => Level::Baseline,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Level {
    Level::Baseline
}

/// Declares a function whose body is compiled once for every level: `multiversion! { fn name[T: Bound](args) { … } }`.
/// The brackets hold type parameters and may be empty. What the body calls must be `#[inline(always)]` to take part.
macro_rules! multiversion {
    (
        $(#[$meta:meta])*
        $vis:vis fn $name:ident [$($param:ident : $bound:path),*] ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block
    ) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name<$($param: $bound),*>($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body<$($param: $bound),*>($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments)]
                fn avx512<$($param: $bound),*>($($arg: $ty),*) $(-> $ret)? {
                    body::<$($param),*>($($arg),*)
                }
                #[target_feature(enable = "avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments)]
                fn avx2<$($param: $bound),*>($($arg: $ty),*) $(-> $ret)? {
                    body::<$($param),*>($($arg),*)
                }
                match $crate::simd::level() {
                    // SAFETY: `level` found these features on this processor.
                    $crate::simd::Level::Avx512 => return unsafe { avx512::<$($param),*>($($arg),*) },
                    // SAFETY: as above.
                    $crate::simd::Level::Avx2 => return unsafe { avx2::<$($param),*>($($arg),*) },
                    $crate::simd::Level::Baseline => {}
                }
            }
            body::<$($param),*>($($arg),*)
        }
    };
}
pub(crate) use multiversion;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{alone_with_the_pool, cpu, cpu_of, random_f32};
    use crate::ops::{self, AdamwConstants, AdamwScalars, ChunkTable, CrossEntropyOut, Gelu};
    use crate::{DType, Device, Random, Tensor};

    /// The bits of what loops of every kind make of the same inputs.
    fn bits() -> Vec<u32> {
        const COUNT: usize = 70_001;
        let (x, y) = (cpu(&random_f32(COUNT, 1), &[COUNT]), cpu(&random_f32(COUNT, 2), &[COUNT]));
        let mut made = vec![
            ops::gelu(&x, Gelu::Erf).unwrap(),
            ops::gelu(&x, Gelu::Tanh).unwrap(),
            ops::relu(&x).unwrap(),
            ops::add(&x, &y).unwrap(),
            ops::sum(&x).unwrap(),
            ops::cast(&ops::cast(&x, DType::BF16).unwrap(), DType::F32).unwrap(),
            ops::cast(&ops::cast(&x, DType::F16).unwrap(), DType::F32).unwrap(),
            Tensor::rand(&[COUNT], DType::F32, Device::Cpu, &mut Random::new(3)).unwrap(),
        ];
        ops::axpy(&y, 0.3, &x).unwrap();
        let [values, first, second] = [x.clone(), x.zeros_like().unwrap(), x.zeros_like().unwrap()];
        let values = ops::scale(&values, 2.0).unwrap();
        let constants = AdamwConstants::default();
        let scalars = AdamwScalars { learning_rate: 1e-2, weight_decay: 0.1, step: 1 }.to_array(&constants).unwrap();
        let chunks = ChunkTable::whole(COUNT, true);
        ops::adamw(&values, &y, &first, &second, &chunks, &constants, &cpu(&scalars, &[4]), None, None).unwrap();
        made.extend([y, values, first, second]);
        for classes in [10, 700] {
            let logits = x.slice(0..70_000).unwrap().reshape(&[70_000 / classes, classes]).unwrap();
            let targets = cpu_of(&vec![3i64; 70_000 / classes], &[70_000 / classes]);
            let (losses, dlogits) = (logits.new_zeros(&[70_000 / classes]).unwrap(), logits.zeros_like().unwrap());
            let out = CrossEntropyOut { losses: &losses, dlogits: Some(&dlogits), weights: None };
            ops::cross_entropy(&logits, &targets, out, &Default::default()).unwrap();
            made.extend([losses, dlogits]);
        }
        made.iter().flat_map(|tensor| tensor.to_vec::<f32>().unwrap()).map(f32::to_bits).collect()
    }

    #[test]
    fn the_results_do_not_depend_on_the_level() {
        let _alone = alone_with_the_pool();
        let widest = level();
        let expected = bits();
        for narrower in [Level::Baseline, Level::Avx2].into_iter().filter(|&narrower| narrower < widest) {
            // Other tests may run at this level meanwhile, which by this very claim changes nothing for them.
            FOUND.store(narrower as u8, Ordering::Relaxed);
            let same = bits() == expected;
            FOUND.store(widest as u8, Ordering::Relaxed);
            assert!(same, "{narrower:?} differs from {widest:?}");
        }
    }
}
