// sub: see sub.rs.
#include "common.cuh"

struct Sub {
    INLINE float operator()(float a, float b) const { return a - b; }
};

#define SUB(NAME, T)                                                                                                   \
    KERNEL(BLOCK_THREADS) sub_##NAME(T* out, const T* a, const T* b, u64 count) {                                      \
        map(out, a, b, count, Sub());                                                                                  \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS) sub_vector_##NAME(T* out, const T* a, const T* b, u64 count, u64 columns, u32 by_row) {      \
        map_vector(out, a, b, count, columns, by_row, Sub());                                                          \
    }
FOR_F32_AND_BF16(SUB)
