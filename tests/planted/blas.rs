//! The part of cuBLASLt that the programs need: square f32 matmuls with a workspace, and the mask
//! of a ReLU if asked for.

use std::ffi::c_void;

use cudarc::cublaslt::sys::{self, cublasStatus_t};

use crate::cuda::{Buffer, Gpu, Stream};

/// Rows and columns of most matrices.
pub(crate) const SIDE: usize = 64;
/// Floats that the mask of SIDE columns takes, 128 bits each.
pub(crate) const MASK_COUNT: usize = SIDE * 128 / 32;
/// Bytes of workspace that a matmul may use.
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
        Self::with(gpu, SIDE, None)
    }

    /// A plan for matrices of this many rows and columns. With a mask it keeps where ReLU let
    /// values through.
    pub(crate) fn with(gpu: &'a Gpu, side: usize, mask: Option<Buffer>) -> Self {
        gpu.make_current();
        let (mut handle, mut operation, mut layout) = (
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
        );
        let mut preference = std::ptr::null_mut();
        let (side, f32) = (side as u64, sys::cudaDataType_t::CUDA_R_32F);
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
        if let Some(mask) = mask {
            keep_mask(operation, mask);
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
        assert_eq!(count, 1, "an algorithm for {side}x{side} f32");
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
        self.multiply([input, output, output], 0.0, workspace, stream);
    }

    /// The algorithm of `other`, whatever it is for.
    pub(crate) fn with_algorithm_of(self, other: &Self) -> Self {
        let algorithm = other.algorithm;
        Self { algorithm, ..self }
    }

    /// output = input * input + beta * existing, in whatever context is current.
    pub(crate) fn multiply(
        &self,
        [input, existing, output]: [Buffer; 3],
        beta: f32,
        workspace: Buffer,
        stream: Stream,
    ) {
        let alpha = 1.0f32;
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
                pointer(existing),
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

/// Makes ReLU and its mask part of an operation.
fn keep_mask(operation: sys::cublasLtMatmulDesc_t, mask: Buffer) {
    use sys::cublasLtMatmulDescAttributes_t as Attribute;
    let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_RELU_AUX as u32;
    let (address, ld) = (mask.address(), 128i64);
    let set = |attribute, value: *const c_void, bytes| {
        // SAFETY: the operation is live; the value is a local variable with the attribute's size.
        check("cublasLtMatmulDescSetAttribute", unsafe {
            sys::cublasLtMatmulDescSetAttribute(operation, attribute, value, bytes)
        });
    };
    set(
        Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE,
        (&raw const epilogue).cast(),
        4,
    );
    set(
        Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
        (&raw const address).cast(),
        8,
    );
    set(
        Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD,
        (&raw const ld).cast(),
        8,
    );
}
