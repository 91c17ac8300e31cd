// relu² and its derivative: see relu_squared.rs.
#include "common.cuh"

#define RELU_SQUARED(NAME, T)                                                                                          \
    KERNEL(BLOCK_THREADS) relu_squared_##NAME(T* out, const T* x, u64 count) {                                         \
        map(out, x, count, [](float x) { return x < 0.0f ? 0.0f : x * x; });                                           \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS) relu_squared_backward_##NAME(T* dx, const T* dy, const T* x, u64 count) {                    \
        map(dx, dy, x, count, [](float dy, float x) { return x <= 0.0f ? 0.0f : dy * (x + x); });                      \
    }
FOR_F32_AND_BF16(RELU_SQUARED)
