// axpy: see axpy.rs.
#include "common.cuh"

#define AXPY(NAME, T)                                                                                                  \
    KERNEL(BLOCK_THREADS) axpy_##NAME(T* y, const T* x, u64 count, float a) {                                          \
        map(y, y, x, count, [=](float y, float x) { return fmaf(a, x, y); });                                          \
    }
FOR_WIDE(AXPY)
