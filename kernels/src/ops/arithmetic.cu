// scale and axpy: see arithmetic.rs.
#include "common.cuh"

#define ARITHMETIC(NAME, T)                                                                                            \
    KERNEL(BLOCK_THREADS) scale_##NAME(T* out, const T* x, u64 count, float factor) {                                  \
        map(out, x, count, [=](float x) { return x * factor; });                                                       \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS) axpy_##NAME(T* y, const T* x, u64 count, float a) {                                          \
        map(y, y, x, count, [=](float y, float x) { return fmaf(a, x, y); });                                          \
    }
FOR_F32_AND_BF16(ARITHMETIC)

/// y += a x. The sum is in f32, which keeps what bf16 would lose.
KERNEL(BLOCK_THREADS) axpy_to_f32_bf16(float* y, const bf16* x, u64 count, float a) {
    map(y, y, x, count, [=](float y, float x) { return fmaf(a, x, y); });
}
