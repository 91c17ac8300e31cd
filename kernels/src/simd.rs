//! One binary for every x86-64: each hot loop is compiled three times (plain, AVX2 with FMA,
//! AVX-512), and the widest that this processor supports is chosen at run time. On aarch64 there is
//! the plain one alone, which has NEON.
//!
//! Results do not depend on the choice: loops use explicit `mul_add`, and sums have a fixed number
//! of lanes.
//!
//! `DDP_SIMD=avx2` (or `plain`) forbids wider ones, so that each can be tested and measured on any
//! processor.
//! Instructions that multiply bf16 count as wider still: `avx512` forbids all, `dpbf16` AMX.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

/// Which instructions may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    /// What every processor of the architecture supports.
    Baseline = 1,
    /// AVX2 and FMA.
    Avx2 = 2,
    /// Also AVX-512 (F, BW, DQ, VL).
    Avx512 = 3,
}

/// What multiplies bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Bf16Unit {
    /// Nothing: f32 arithmetic does.
    None,
    /// `vdpbf16ps` (AVX512_BF16).
    Dpbf16,
    /// Also `tdpbf16ps` (AMX).
    Amx,
}

/// The widest of this processor that Linux gives to this process and `DDP_SIMD` allows.
#[inline]
pub fn bf16_unit() -> Bf16Unit {
    static FOUND: OnceLock<Bf16Unit> = OnceLock::new();
    if level() < Level::Avx512 {
        return Bf16Unit::None;
    }
    *FOUND.get_or_init(|| {
        let allowed = match std::env::var("DDP_SIMD").as_deref() {
            Ok("avx512") => Bf16Unit::None,
            Ok("dpbf16") => Bf16Unit::Dpbf16,
            _ => Bf16Unit::Amx,
        };
        bf16_units().0.min(allowed)
    })
}

/// The widest of this processor, and why AMX cannot be used although the processor has it.
#[cfg(target_arch = "x86_64")]
pub fn bf16_units() -> (Bf16Unit, Option<std::io::Error>) {
    if detect() < Level::Avx512 || !is_x86_feature_detected!("avx512bf16") {
        return (Bf16Unit::None, None);
    }
    let leaf = std::arch::x86_64::__cpuid_count(7, 0);
    let has = |bit: u32| leaf.edx >> bit & 1 == 1;
    // AMX-BF16 and AMX-TILE.
    if !(has(22) && has(24)) {
        return (Bf16Unit::Dpbf16, None);
    }
    /// `ARCH_REQ_XCOMP_PERM` and `XFEATURE_XTILEDATA`.
    const ASK: [libc::c_long; 2] = [0x1023, 18];
    // SAFETY: `arch_prctl` with these numbers takes no pointer. It lets all threads of this process
    // use tiles.
    match unsafe { libc::syscall(libc::SYS_arch_prctl, ASK[0], ASK[1]) } {
        0 => (Bf16Unit::Amx, None),
        _ => (Bf16Unit::Dpbf16, Some(std::io::Error::last_os_error())),
    }
}

/// As on x86-64.
#[cfg(not(target_arch = "x86_64"))]
pub fn bf16_units() -> (Bf16Unit, Option<std::io::Error>) {
    (Bf16Unit::None, None)
}

/// The level in use, once known.
static FOUND: AtomicU8 = AtomicU8::new(0);

/// The widest level of this processor that `DDP_SIMD` allows.
#[inline]
pub fn level() -> Level {
    match FOUND.load(Ordering::Relaxed) {
        0 => {
            let found = detect().min(allowed());
            FOUND.store(found as u8, Ordering::Relaxed);
            found
        }
        1 => Level::Baseline,
        2 => Level::Avx2,
        _ => Level::Avx512,
    }
}

/// What `DDP_SIMD` says.
fn allowed() -> Level {
    match std::env::var("DDP_SIMD").as_deref() {
        Ok("plain") => Level::Baseline,
        Ok("avx2") => Level::Avx2,
        Ok("avx512" | "dpbf16") | Err(_) => Level::Avx512,
        Ok(other) => {
            tracing::warn!(
                "DDP_SIMD={other:?} is ignored: expected plain, avx2, avx512 or dpbf16, the widest \
                 instructions to use"
            );
            Level::Avx512
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Level {
    let avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
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

/// Declares a function whose body is compiled once per level: `multiversion! { fn name[T:
/// Bound](args) { … } }`. The brackets hold type parameters and may be empty; after a `;` they may
/// have a constant of usize, as in `[T: Bound; const N]`. Functions that the body calls must be
/// `#[inline(always)]`, or they stay at the plain level.
macro_rules! multiversion {
    (
        $(#[$meta:meta])*
        $vis:vis fn $name:ident [$($param:ident : $bound:path),* $(; const $N:ident)?] ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block
    ) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name<$($param: $bound),* $(, const $N: usize)?>($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body<$($param: $bound),* $(, const $N: usize)?>($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments)]
                fn avx512<$($param: $bound),* $(, const $N: usize)?>($($arg: $ty),*) $(-> $ret)? {
                    body::<$($param),* $(, $N)?>($($arg),*)
                }
                #[target_feature(enable = "avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments)]
                fn avx2<$($param: $bound),* $(, const $N: usize)?>($($arg: $ty),*) $(-> $ret)? {
                    body::<$($param),* $(, $N)?>($($arg),*)
                }
                match $crate::simd::level() {
                    // SAFETY: `level` found these features on this processor.
                    $crate::simd::Level::Avx512 => return unsafe { avx512::<$($param),* $(, $N)?>($($arg),*) },
                    // SAFETY: as above.
                    $crate::simd::Level::Avx2 => return unsafe { avx2::<$($param),* $(, $N)?>($($arg),*) },
                    $crate::simd::Level::Baseline => {}
                }
            }
            body::<$($param),* $(, $N)?>($($arg),*)
        }
    };
}
pub(crate) use multiversion;

#[cfg(test)]
mod tests;
