// add, sub, mul, scale and axpy: see arithmetic.rs.
#include "common.cuh"

struct Add {
    INLINE float operator()(float a, float b) const { return a + b; }
};
struct Sub {
    INLINE float operator()(float a, float b) const { return a - b; }
};
struct Mul {
    INLINE float operator()(float a, float b) const { return a * b; }
};

#define ARITHMETIC(NAME, T)                                                                                            \
    KERNEL(BLOCK_THREADS) add_##NAME(T* out, const T* a, const T* b, u64 count) { map(out, a, b, count, Add()); }      \
    KERNEL(BLOCK_THREADS) sub_##NAME(T* out, const T* a, const T* b, u64 count) { map(out, a, b, count, Sub()); }      \
    KERNEL(BLOCK_THREADS) mul_##NAME(T* out, const T* a, const T* b, u64 count) { map(out, a, b, count, Mul()); }      \
    KERNEL(BLOCK_THREADS) add_vector_##NAME(T* out, const T* a, const T* b, u64 count, u64 columns, u32 by_row) {      \
        map_vector(out, a, b, count, columns, by_row, Add());                                                          \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS) sub_vector_##NAME(T* out, const T* a, const T* b, u64 count, u64 columns, u32 by_row) {      \
        map_vector(out, a, b, count, columns, by_row, Sub());                                                          \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS) mul_vector_##NAME(T* out, const T* a, const T* b, u64 count, u64 columns, u32 by_row) {      \
        map_vector(out, a, b, count, columns, by_row, Mul());                                                          \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS) scale_##NAME(T* out, const T* x, u64 count, float factor) {                                  \
        map(out, x, count, [=](float x) { return x * factor; });                                                       \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS) axpy_##NAME(T* y, const T* x, u64 count, float a) {                                          \
        map(y, y, x, count, [=](float y, float x) { return fmaf(a, x, y); });                                          \
    }
FOR_F32_AND_BF16(ARITHMETIC)

/// y += a x. The sum is in f32, which keeps what bf16 would lose.
KERNEL(BLOCK_THREADS) axpy_to_f32_bf16(float* y, const bf16* x, u64 count, float a) {
    map(y, y, x, count, [=](float y, float x) { return fmaf(a, x, y); });
}
