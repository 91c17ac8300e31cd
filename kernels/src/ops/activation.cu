// Activations and their derivatives: see activation.rs.
#include "common.cuh"

#define ACTIVATIONS(NAME, T)                                                                                           \
    KERNEL(BLOCK_THREADS) activate_##NAME(T* out, const T* x, u64 count, u32 activation) {                             \
        WITH_ACTIVATION(activation, float, F, map(out, x, count, [](float x) { return F::value(x); });)                \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS)                                                                                              \
    activate_backward_##NAME(T* dx, const T* dy, const T* saved, u64 count, u32 activation) {                          \
        WITH_ACTIVATION(activation, float, F,                                                                          \
                        map(dx, dy, saved, count, [](float dy, float saved) { return F::chain(dy, saved); });)         \
    }
FOR_F32_AND_BF16(ACTIVATIONS)
