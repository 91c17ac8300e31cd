// mul: see mul.rs.
#include "common.cuh"

struct Mul {
    INLINE float operator()(float a, float b) const { return a * b; }
};

#define MUL(NAME, T)                                                                                                   \
    KERNEL(BLOCK_THREADS) mul_##NAME(T* out, const T* a, const T* b, u64 count) {                                      \
        map(out, a, b, count, Mul());                                                                                  \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS) mul_vector_##NAME(T* out, const T* a, const T* b, u64 count, u64 columns, u32 by_row) {      \
        map_vector(out, a, b, count, columns, by_row, Mul());                                                          \
    }
FOR_F32_AND_BF16(MUL)
