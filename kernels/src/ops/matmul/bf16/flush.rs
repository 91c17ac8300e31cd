//! Arithmetic in which subnormal numbers are 0.

/// `x`, or 0 of its sign where it is subnormal.
#[inline(always)]
pub(super) fn flushed(x: f32) -> f32 {
    let bits = x.to_bits();
    let is_tiny = bits & 0x7f80_0000 == 0;
    f32::from_bits(if is_tiny { bits & 0x8000_0000 } else { bits })
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
