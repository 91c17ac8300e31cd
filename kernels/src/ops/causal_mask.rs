//! causal_mask: which tokens (columns) each token (row) may not see, those after it. In a float dtype what is added to
//! the scores: 0 on and below the diagonal, −∞ above; in u8 the mask itself: 1 above the diagonal, else 0.

use crate::cuda::Source;
use crate::dtype::{DType, bf16, f16};
use crate::error::Result;
use crate::ops::call::{Call, Versions};
use crate::ops::elementwise::grid_of_packs;
use crate::ops::fill::{bits_of, kernel_for_width};
use crate::{Device, Element, Tensor, threads};

const MASKS: &[DType] = &[DType::F32, DType::F64, DType::BF16, DType::F16, DType::U8];
const VERSIONS: Versions = Versions { cpu: MASKS, cuda: MASKS };

static SOURCE: Source = Source::new("causal_mask.cu", include_str!("causal_mask.cu"));
const KERNELS: [&str; 4] = ["causal_mask_1", "causal_mask_2", "causal_mask_4", "causal_mask_8"];

/// The mask of `tokens` tokens, in a new tensor `[tokens, tokens]`.
#[track_caller]
pub fn causal_mask(tokens: usize, dtype: DType, device: Device) -> Result<Tensor> {
    let out = Tensor::empty(&[tokens, tokens], dtype, device)?;
    causal_mask_into(&out)?;
    Ok(out)
}

/// `out` [T, T] `=` the mask of T tokens.
#[track_caller]
pub fn causal_mask_into(out: &Tensor) -> Result<()> {
    let mut call = Call::new("causal_mask");
    let out = call.writes("out", out);
    let [tokens, _] = call.dims(out, "[tokens, tokens]")?;
    call.has_shape(out, &[tokens, tokens], "[tokens, tokens]")?;
    call.row_major(out)?;
    let placed = call.place(out, &VERSIONS)?;
    let dtype = placed.tensor(out).dtype();
    {
        let [mut lent_out] = placed.enter([out])?;
        if let Some(gpu) = placed.launcher()? {
            if tokens > 0 {
                let hidden = bits_of(if dtype == DType::U8 { 1.0 } else { f64::NEG_INFINITY }, dtype);
                let kernel = gpu.kernel(&SOURCE, kernel_for_width(KERNELS, dtype.bytes()))?.output(&lent_out);
                kernel.count(tokens).u64(hidden).launch(grid_of_packs(tokens * tokens, dtype))?;
            }
            drop(lent_out);
            return placed.finish();
        }
        match dtype {
            DType::F32 => write_rows(lent_out.elements_mut(), tokens, f32::NEG_INFINITY),
            DType::F64 => write_rows(lent_out.elements_mut(), tokens, f64::NEG_INFINITY),
            DType::BF16 => write_rows(lent_out.elements_mut(), tokens, bf16::NEG_INFINITY),
            DType::F16 => write_rows(lent_out.elements_mut(), tokens, f16::NEG_INFINITY),
            _ => write_rows(lent_out.elements_mut(), tokens, 1u8),
        }
    }
    placed.finish()
}

fn write_rows<T: Element>(out: &mut [T], tokens: usize, hidden: T) {
    if tokens == 0 {
        return;
    }
    threads::split_mut(out, tokens, |first, out| {
        for (row, out) in out.chunks_mut(tokens).enumerate() {
            let (seen, after) = out.split_at_mut(first / tokens + row + 1);
            // The zero of every dtype is its default.
            seen.fill(T::default());
            after.fill(hidden);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::with_element;
    use crate::ops::testing::cpu;

    #[test]
    fn every_dtype_and_size_hides_what_lies_above_the_diagonal() {
        for tokens in [0, 1, 2, 7, 64, 300] {
            for &dtype in MASKS {
                let mask = causal_mask(tokens, dtype, Device::Cpu).unwrap();
                let hidden = if dtype == DType::U8 { 1.0 } else { f64::NEG_INFINITY };
                with_element!(dtype, T => {
                    for (index, got) in mask.to_vec::<T>().unwrap().iter().enumerate() {
                        let (row, column) = (index / tokens, index % tokens);
                        let expected = if column > row { hidden } else { 0.0 };
                        assert_eq!(got.to_f64(), expected, "{dtype} [{row}, {column}] of {tokens}");
                    }
                });
            }
        }
    }

    #[test]
    fn other_shapes_dtypes_and_layouts_are_refused() {
        let error = causal_mask_into(&cpu(&[0.0; 6], &[2, 3])).unwrap_err().to_string();
        assert!(error.contains("causal_mask: out f32[2, 3] on cpu: expected shape [2, 2]"), "{error}");
        let error = causal_mask_into(&cpu(&[0.0; 6], &[6])).unwrap_err().to_string();
        assert!(error.contains("causal_mask: out f32[6] on cpu: expected 2 dimensions, [tokens, tokens]"), "{error}");
        let error = causal_mask(3, DType::I64, Device::Cpu).unwrap_err().to_string();
        assert!(error.contains("causal_mask: there is no version for i64 on cpu"), "{error}");
        let error = causal_mask_into(&cpu(&[0.0; 4], &[2, 2]).t().unwrap()).unwrap_err().to_string();
        assert!(error.contains("expected row-major elements"), "{error}");
        assert!(causal_mask(usize::MAX, DType::F32, Device::Cpu).is_err());
    }
}
