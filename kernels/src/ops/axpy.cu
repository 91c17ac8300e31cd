// axpy: see axpy.rs.
#include "common.cuh"

#define AXPY(NAME, T)                                                                                                  \
    KERNEL(BLOCK_THREADS) axpy_##NAME(T* y, const T* x, u64 count, float a) {                                          \
        map(y, y, x, count, [=](float y, float x) { return fmaf(a, x, y); });                                          \
    }
FOR_F32_AND_BF16(AXPY)

/// y += a x. The sum is in f32, which keeps what bf16 would lose.
KERNEL(BLOCK_THREADS) axpy_to_f32_bf16(float* y, const bf16* x, u64 count, float a) {
    map(y, y, x, count, [=](float y, float x) { return fmaf(a, x, y); });
}
