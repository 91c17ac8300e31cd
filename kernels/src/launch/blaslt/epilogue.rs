//! Which epilogues cuBLASLt computes, and which are left to a pass of ours.

use super::library::{GELU, GELU_GRADIENT, NOTHING, RELU};
use super::plan::{BlasArgs, MatmulKind, MatmulPlan};
use crate::DType;
use crate::cuda::calls::driver;
use crate::dtype::bf16;
use crate::error::Result;
use crate::launch::GpuLaunch;

/// Bytes that are read back from either end of an output.
const PIECE_BYTES: usize = 4096;

impl GpuLaunch {
    /// Whether relu of NaN is NaN with this plan; true for a kind without relu. NVIDIA does not
    /// document it, and a 0 would hide a diverged training. So each plan is tried before its first
    /// use, on operands whose D may be overwritten. Waits for the stream.
    pub(super) fn keeps_nan(
        &self,
        plan: &MatmulPlan,
        kind: &MatmulKind,
        operands: &BlasArgs,
    ) -> Result<bool> {
        if kind.epilogue & RELU == 0 {
            return Ok(true);
        }
        let operands = BlasArgs {
            alpha: f32::NAN,
            ..*operands
        };
        self.bind()?;
        // SAFETY: the context is current; the caller vouches for the operands.
        if unsafe { plan.run(&operands) }.is_err() {
            return Ok(false);
        }
        let elements = kind.batch as usize * kind.rows as usize * kind.columns as usize;
        let bytes = elements * kind.dtypes[1].bytes();
        let piece = bytes.min(PIECE_BYTES);
        let last = operands.d + (bytes - piece) as u64;
        let keeps = self.is_nan(operands.d, piece, kind)? && self.is_nan(last, piece, kind)?;
        if !keeps {
            tracing::debug!("relu of NaN is not NaN in an algorithm for {kind:?}: it is not used");
        }
        Ok(keeps)
    }

    /// Whether all elements of a piece of D are NaN.
    fn is_nan(&self, address: u64, bytes: usize, kind: &MatmulKind) -> Result<bool> {
        let mut here = vec![0u8; bytes];
        let (to, stream) = (here.as_mut_ptr().cast(), self.queue.raw());
        // SAFETY: the caller has bound the context and given D to this stream. The host's memory
        // outlives the copy: after an error it is leaked.
        let read = unsafe { driver!(cuMemcpyDtoHAsync_v2(to, address, bytes, stream)) }
            .and_then(|()| self.queue.synchronize());
        if let Err(fault) = read {
            // The device may still write to it.
            here.leak();
            return Err(self.failed(fault));
        }
        let bf16_is_nan = |&bytes: &[u8; 2]| bf16::from_le_bytes(bytes).is_nan();
        let f32_is_nan = |&bytes: &[u8; 4]| f32::from_le_bytes(bytes).is_nan();
        Ok(match kind.dtypes[1] {
            DType::BF16 => here.as_chunks().0.iter().all(bf16_is_nan),
            DType::F32 => here.as_chunks().0.iter().all(f32_is_nan),
            other => unreachable!("no matmul of {other} on a GPU"),
        })
    }

    /// Whether gelu is an epilogue. It was a slower kernel before CUDA 12.5, and is known to be
    /// fast on Hopper alone.
    pub(crate) fn fuses_gelu(&self) -> Result<bool> {
        let is_fast = self.gpu.capability == (9, 0) && self.cublaslt_version()? >= 120_500;
        Ok(is_fast && uses_epilogues())
    }

    /// Whether this kind's epilogue is left to a pass of ours.
    pub(super) fn leaves(&self, kind: &MatmulKind) -> Result<bool> {
        let has_gelu = kind.epilogue & (GELU | GELU_GRADIENT) != 0;
        let is_slow = has_gelu && !self.fuses_gelu()?;
        Ok(is_slow || (kind.epilogue != NOTHING && !uses_epilogues()))
    }
}

/// Whether epilogues are used at all: `DDP_EPILOGUES=off` leaves them to passes of ours.
fn uses_epilogues() -> bool {
    std::env::var_os("DDP_EPILOGUES").is_none_or(|value| value != "off")
}
