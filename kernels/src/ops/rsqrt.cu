// rsqrt: see rsqrt.rs.
#include "common.cuh"

#define RSQRT(NAME, T)                                                                                                 \
    KERNEL(BLOCK_THREADS) rsqrt_##NAME(T* out, const T* x, u64 count, float epsilon) {                                 \
        map(out, x, count, [=](float x) { return 1.0f / sqrtf(x + epsilon); });                                        \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS) rsqrt_backward_##NAME(T* dx, const T* dy, const T* y, u64 count) {                           \
        map(dx, dy, y, count, [](float dy, float y) { return -0.5f * dy * (y * y * y); });                             \
    }
FOR_F32_AND_BF16(RSQRT)
