// scale: see scale.rs.
#include "common.cuh"

#define SCALE(NAME, T)                                                                                                 \
    KERNEL(BLOCK_THREADS) scale_##NAME(T* out, const T* x, u64 count, float factor) {                                  \
        map(out, x, count, [=](float x) { return x * factor; });                                                       \
    }
FOR_F32_AND_BF16(SCALE)
