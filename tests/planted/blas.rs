//! The part of cuBLASLt that the programs need: one square f32 product with a workspace.

use std::ffi::c_void;

use cudarc::cublaslt::sys::{self, cublasStatus_t};

use crate::cuda::{Buffer, Gpu, Stream};

/// Rows and columns of all matrices.
pub(crate) const SIDE: usize = 64;
/// Bytes of workspace that a product may use.
pub(crate) const WORKSPACE_BYTES: usize = 1 << 20;

/// A handle and a plan; both live as long as the process.
pub(crate) struct Blas<'a> {
    gpu: &'a Gpu,
    handle: sys::cublasLtHandle_t,
    operation: sys::cublasLtMatmulDesc_t,
    layout: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

fn check(call: &str, status: cublasStatus_t) {
    assert_eq!(status, cublasStatus_t::CUBLAS_STATUS_SUCCESS, "{call}");
}

impl<'a> Blas<'a> {
    pub(crate) fn new(gpu: &'a Gpu) -> Self {
        gpu.make_current();
        let (mut handle, mut operation, mut layout) = (
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
        );
        let mut preference = std::ptr::null_mut();
        let (side, f32) = (SIDE as u64, sys::cudaDataType_t::CUDA_R_32F);
        // SAFETY: each call writes one handle to a local variable that outlives it.
        unsafe {
            check("cublasLtCreate", sys::cublasLtCreate(&raw mut handle));
            let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
            check(
                "cublasLtMatmulDescCreate",
                sys::cublasLtMatmulDescCreate(&raw mut operation, compute, f32),
            );
            check(
                "cublasLtMatrixLayoutCreate",
                sys::cublasLtMatrixLayoutCreate(&raw mut layout, f32, side, side, side as i64),
            );
            check(
                "cublasLtMatmulPreferenceCreate",
                sys::cublasLtMatmulPreferenceCreate(&raw mut preference),
            );
        }
        let bytes = WORKSPACE_BYTES as u64;
        let attribute =
            sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let mut count = 0;
        let mut result = std::mem::MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::uninit();
        // SAFETY: all handles were just created; the attribute is documented as a u64, and 8 bytes
        // are passed; one result is requested, and there is room for one.
        unsafe {
            check(
                "cublasLtMatmulPreferenceSetAttribute",
                sys::cublasLtMatmulPreferenceSetAttribute(
                    preference,
                    attribute,
                    (&raw const bytes).cast(),
                    8,
                ),
            );
            check(
                "cublasLtMatmulAlgoGetHeuristic",
                sys::cublasLtMatmulAlgoGetHeuristic(
                    handle,
                    operation,
                    layout,
                    layout,
                    layout,
                    layout,
                    preference,
                    1,
                    result.as_mut_ptr(),
                    &raw mut count,
                ),
            );
        }
        assert_eq!(count, 1, "an algorithm for {SIDE}x{SIDE} f32");
        // SAFETY: a count of one means that the one result was written.
        let algorithm = unsafe { result.assume_init() }.algo;
        Self {
            gpu,
            handle,
            operation,
            layout,
            algorithm,
        }
    }

    /// output = input * input.
    pub(crate) fn square(&self, input: Buffer, output: Buffer, workspace: Buffer, stream: Stream) {
        self.gpu.make_current();
        let (alpha, beta) = (1.0f32, 0.0f32);
        let pointer = |buffer: Buffer| buffer.address() as *mut c_void;
        // SAFETY: the handles live as long as the process; alpha and beta are f32, the scale type,
        // and read during the call; the others are device addresses, which the library only passes
        // to the device.
        let status = unsafe {
            sys::cublasLtMatmul(
                self.handle,
                self.operation,
                (&raw const alpha).cast(),
                pointer(input),
                self.layout,
                pointer(input),
                self.layout,
                (&raw const beta).cast(),
                pointer(output),
                self.layout,
                pointer(output),
                self.layout,
                &raw const self.algorithm,
                pointer(workspace),
                WORKSPACE_BYTES,
                stream.raw().cast(),
            )
        };
        check("cublasLtMatmul", status);
    }
}
