// gelu, both forms, and their derivatives: see gelu.rs.
#include "common.cuh"

#define GELU(NAME, T, FORM)                                                                                            \
    KERNEL(BLOCK_THREADS) FORM##_##NAME(T* out, const T* x, u64 count) {                                               \
        map(out, x, count, [](float x) { return FORM(x); });                                                           \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS) FORM##_backward_##NAME(T* dx, const T* dy, const T* x, u64 count) {                          \
        map(dx, dy, x, count, [](float dy, float x) { return dy * FORM##_grad(x); });                                  \
    }
#define BOTH_FORMS(NAME, T) GELU(NAME, T, gelu_tanh) GELU(NAME, T, gelu_erf)
FOR_F32_AND_BF16(BOTH_FORMS)
