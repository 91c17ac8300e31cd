// relu, relu², both forms of gelu, and their derivatives: see activation.rs.
#include "common.cuh"

// relu is not fmaxf, which would turn NaN into 0.
#define ACTIVATIONS(NAME, T)                                                                                           \
    KERNEL(BLOCK_THREADS) relu_##NAME(T* out, const T* x, u64 count) {                                                 \
        map(out, x, count, [](float x) { return x < 0.0f ? 0.0f : x; });                                               \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS) relu_backward_##NAME(T* dx, const T* dy, const T* y, u64 count) {                            \
        map(dx, dy, y, count, [](float dy, float y) { return y > 0.0f ? dy : 0.0f; });                                 \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS) relu_squared_##NAME(T* out, const T* x, u64 count) {                                         \
        map(out, x, count, [](float x) { return x < 0.0f ? 0.0f : x * x; });                                           \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS) relu_squared_backward_##NAME(T* dx, const T* dy, const T* x, u64 count) {                    \
        map(dx, dy, x, count, [](float dy, float x) { return x <= 0.0f ? 0.0f : dy * (x + x); });                      \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS) gelu_tanh_##NAME(T* out, const T* x, u64 count) {                                            \
        map(out, x, count, [](float x) { return gelu_tanh(x); });                                                      \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS) gelu_tanh_backward_##NAME(T* dx, const T* dy, const T* x, u64 count) {                       \
        map(dx, dy, x, count, [](float dy, float x) { return dy * gelu_tanh_grad(x); });                               \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS) gelu_erf_##NAME(T* out, const T* x, u64 count) {                                             \
        map(out, x, count, [](float x) { return gelu_erf(x); });                                                       \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS) gelu_erf_backward_##NAME(T* dx, const T* dy, const T* x, u64 count) {                        \
        map(dx, dy, x, count, [](float dy, float x) { return dy * gelu_erf_grad(x); });                                \
    }
FOR_F32_AND_BF16(ACTIVATIONS)
