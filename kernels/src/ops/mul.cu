// mul: see mul.rs.
#include "common.cuh"

#define MUL(NAME, T)                                                                                                   \
    KERNEL(BLOCK_THREADS) mul_##NAME(T* out, const T* a, const T* b, u64 count) {                                      \
        map(out, a, b, count, [](float a, float b) { return a * b; });                                                 \
    }
FOR_F32_AND_BF16(MUL)
