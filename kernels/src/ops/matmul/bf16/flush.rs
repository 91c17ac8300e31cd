//! Arithmetic in which subnormal numbers are 0.
//!
//! A result is 0 where it is below the smallest normal number after rounding to 24 bits, as x86
//! does it. ARM's flag for that (FPCR.FZ) looks before rounding, so it would make other bits of
//! sums just below that number: there, numbers are flushed one by one.

/// `x`, or 0 of its sign where it is subnormal.
#[inline(always)]
pub(super) fn flushed(x: f32) -> f32 {
    let bits = x.to_bits();
    let is_tiny = bits & 0x7f80_0000 == 0;
    f32::from_bits(if is_tiny { bits & 0x8000_0000 } else { bits })
}

/// `a · b + sum` of operands that are not subnormal, rounded once; 0 where it would be subnormal.
#[inline(always)]
pub(super) fn multiply_add(a: f32, b: f32, sum: f32) -> f32 {
    /// 2²⁴.
    const UP: f32 = 16_777_216.0;
    let result = a.mul_add(b, sum);
    // A subnormal number has fewer bits, so one just below may have been rounded up to this.
    // Further up it has all 24.
    let is_tiny = result.abs() == f32::MIN_POSITIVE
        && (a * UP).mul_add(b, sum * UP).abs() < UP * f32::MIN_POSITIVE;
    if is_tiny {
        0f32.copysign(result)
    } else {
        flushed(result)
    }
}

/// Runs `body`, whose vector arithmetic takes subnormal operands and results as 0: MXCSR's DAZ and
/// FTZ. `body` does arithmetic in kernels alone, which compute no constants.
#[inline(always)]
pub(super) fn flushing(body: impl FnOnce()) {
    #[cfg(target_arch = "x86_64")]
    let _restore = x86::Flushing::begin();
    body();
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;

    /// MXCSR's bits FTZ and DAZ.
    const FLUSH: u32 = 0x8040;

    /// Restores MXCSR when it is dropped.
    pub(super) struct Flushing(u32);

    impl Flushing {
        #[inline(always)]
        pub(super) fn begin() -> Flushing {
            let mut before = 0u32;
            // SAFETY: every x86-64 has it; it writes these four bytes.
            unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut before, options(nostack)) };
            set(before | FLUSH);
            Flushing(before)
        }
    }

    impl Drop for Flushing {
        #[inline(always)]
        fn drop(&mut self) {
            set(self.0);
        }
    }

    #[inline(always)]
    fn set(mxcsr: u32) {
        // SAFETY: every x86-64 has it. Rounding and exceptions stay as Rust wants them; how
        // subnormal numbers count changes only around the kernels, and the bits say what Rust's
        // rules for them would not: that is what these kernels are for.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const mxcsr, options(nostack, readonly)) };
    }
}
