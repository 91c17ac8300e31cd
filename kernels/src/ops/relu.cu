// relu and its derivative: see relu.rs.
#include "common.cuh"

#define RELU(NAME, T)                                                                                                  \
    KERNEL(BLOCK_THREADS) relu_##NAME(T* out, const T* x, u64 count) {                                                 \
        /* Not fmaxf: that would turn NaN into 0. */ \
        map(out, x, count, [](float x) { return x < 0.0f ? 0.0f : x; });                                               \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS) relu_backward_##NAME(T* dx, const T* dy, const T* y, u64 count) {                            \
        map(dx, dy, y, count, [](float dy, float y) { return y > 0.0f ? dy : 0.0f; });                                 \
    }
FOR_F32_AND_BF16(RELU)
