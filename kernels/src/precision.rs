//! How GPUs multiply f32 matrices: in f32, or faster in TF32. A setting of the thread, which nests
//! like the rules of transfers.

use std::cell::Cell;

use serde::{Deserialize, Serialize};

/// How a GPU multiplies f32 matrices. The CPU always computes in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum F32Math {
    /// In f32: each product and each sum is rounded to 24 bits. The default.
    #[default]
    Strict,
    /// Operands are rounded to TF32 (11 bits, the range of f32), products are exact and sums are in
    /// f32: several times as fast, with a relative error of up to 2⁻⁹ per product.
    Tf32,
}

thread_local! {
    static MATH: Cell<F32Math> = const { Cell::new(F32Math::Strict) };
}

/// Runs `body` with matmuls of f32 computed as `math` says.
///
/// ```
/// use ddp_kernels::ops::{F32Math, f32_math, with_f32_math};
/// with_f32_math(F32Math::Tf32, || assert_eq!(f32_math(), F32Math::Tf32));
/// assert_eq!(f32_math(), F32Math::Strict);
/// ```
pub fn with_f32_math<R>(math: F32Math, body: impl FnOnce() -> R) -> R {
    /// Puts the former one back, by return or by panic.
    struct Restore(F32Math);
    impl Drop for Restore {
        fn drop(&mut self) {
            MATH.set(self.0);
        }
    }
    let _restore = Restore(MATH.replace(math));
    body()
}

/// What is in force on this thread.
pub fn f32_math() -> F32Math {
    MATH.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_nest_end_with_a_panic_and_belong_to_their_thread() {
        assert_eq!(f32_math(), F32Math::Strict);
        with_f32_math(F32Math::Tf32, || {
            with_f32_math(F32Math::Strict, || assert_eq!(f32_math(), F32Math::Strict));
            assert_eq!(f32_math(), F32Math::Tf32);
            assert_eq!(
                std::thread::spawn(f32_math).join().unwrap(),
                F32Math::Strict
            );
            let _ = std::panic::catch_unwind(|| {
                with_f32_math(F32Math::Strict, || panic!("on purpose"))
            });
            assert_eq!(f32_math(), F32Math::Tf32);
        });
        assert_eq!(f32_math(), F32Math::Strict);
    }
}
