// axpy: see axpy.rs.
#include "common.cuh"

#define AXPY(NAME, T)                                                                                                  \
    KERNEL(BLOCK_THREADS) axpy_##NAME(T* y, const T* x, u64 count, float a) {                                          \
        map(y, y, x, count, [=](float y, float x) { return fmaf(a, x, y); });                                          \
    }
FOR_WIDE(AXPY)

/// y += a x, where y holds more of the sum than x could.
template <class T> INLINE void add_to_f32(float* y, const T* x, u64 count, float a) {
    for (u64 i = first_index(); i < count; i += grid_threads()) y[i] = fmaf(a, wide(x[i]), y[i]);
}

KERNEL(BLOCK_THREADS) axpy_bf16_to_f32(float* y, const bf16* x, u64 count, float a) { add_to_f32(y, x, count, a); }
KERNEL(BLOCK_THREADS) axpy_f16_to_f32(float* y, const f16* x, u64 count, float a) { add_to_f32(y, x, count, a); }
