//! Products of dense matrices, for the simulated cuBLASLt. They are here because this crate is
//! compiled with every optimisation.

/// A matrix without gaps, by columns or by rows.
#[derive(Debug)]
pub struct Dense<T> {
    /// Its elements.
    pub values: Vec<T>,
    /// From one row to the next.
    pub row_stride: usize,
    /// From one column to the next.
    pub column_stride: usize,
}

/// A number that matrices have.
pub trait Element: Sized {
    /// AB of `rows`×k and k×`columns`, column by column. Every element adds its products in order,
    /// each rounded once.
    fn product(a: &Dense<Self>, b: &Dense<Self>, sizes: [usize; 3]) -> Vec<Self>;
}

/// Products that are added in one pass over a column: its sums are read and written once for them.
const TOGETHER: usize = 8;

macro_rules! element {
    ($name:ident, $real:ty) => {
        mod $name {
            use super::{Dense, TOGETHER};

            #[inline(always)]
            fn add<const N: usize>(
                sums: &mut [$real],
                values: [&[$real]; N],
                stride: usize,
                factors: [$real; N],
            ) {
                let end = (sums.len() - 1) * stride + 1;
                let values = values.map(|values| &values[..end]);
                for (at, sum) in sums.iter_mut().enumerate() {
                    for (values, factor) in values.iter().zip(factors) {
                        *sum = values[at * stride].mul_add(factor, *sum);
                    }
                }
            }

            #[inline(always)]
            fn body(
                a: &Dense<$real>,
                b: &Dense<$real>,
                [rows, columns, k]: [usize; 3],
            ) -> Vec<$real> {
                let mut all = vec![0.0; rows * columns];
                if rows == 0 {
                    return all;
                }
                for (column, sums) in all.chunks_mut(rows).enumerate() {
                    let values = |along: usize| &a.values[along * a.column_stride..];
                    let factor =
                        |along: usize| b.values[along * b.row_stride + column * b.column_stride];
                    let whole = k - k % TOGETHER;
                    for along in (0..whole).step_by(TOGETHER) {
                        let lines: [_; TOGETHER] = std::array::from_fn(|next| values(along + next));
                        let factors = std::array::from_fn(|next| factor(along + next));
                        // Where lines have no gaps, the compiler uses vectors.
                        if a.row_stride == 1 {
                            add(sums, lines, 1, factors);
                        } else {
                            add(sums, lines, a.row_stride, factors);
                        }
                    }
                    for along in whole..k {
                        add(sums, [values(along)], a.row_stride, [factor(along)]);
                    }
                }
                all
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2(a: &Dense<$real>, b: &Dense<$real>, sizes: [usize; 3]) -> Vec<$real> {
                body(a, b, sizes)
            }

            impl super::Element for $real {
                fn product(a: &Dense<Self>, b: &Dense<Self>, sizes: [usize; 3]) -> Vec<Self> {
                    #[cfg(target_arch = "x86_64")]
                    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                        // SAFETY: the processor has these features.
                        return unsafe { avx2(a, b, sizes) };
                    }
                    body(a, b, sizes)
                }
            }
        }
    };
}

element!(single, f32);
element!(double, f64);
