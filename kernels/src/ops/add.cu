// add: see add.rs.
#include "common.cuh"

struct Add {
    INLINE float operator()(float a, float b) const { return a + b; }
};

#define ADD(NAME, T)                                                                                                   \
    KERNEL(BLOCK_THREADS) add_##NAME(T* out, const T* a, const T* b, u64 count) {                                      \
        map(out, a, b, count, Add());                                                                                  \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS) add_vector_##NAME(T* out, const T* a, const T* b, u64 count, u64 columns, u32 by_row) {      \
        map_vector(out, a, b, count, columns, by_row, Add());                                                          \
    }
FOR_F32_AND_BF16(ADD)
