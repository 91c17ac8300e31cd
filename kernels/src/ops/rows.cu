// row_sum and row_mean: see rows.rs, whose order this follows to get the CPU's bits.
#include "common.cuh"

/// This warp's row.
INLINE u64 row_of_warp() { return first_index() / WARP; }

/// out[row] = the sum of the row / divisor.
template <class T>
INLINE void row_sum(T* __restrict__ out, const T* __restrict__ x, u64 rows, u64 columns, double divisor) {
    const u64 row = row_of_warp();
    if (row >= rows) return;
    double total = 0.0;
    for (u64 start = 0; start < columns; start += SUM_BLOCK) {
        total = total + warp_sum_of(x + row * columns + start, columns - start);
    }
    if (threadIdx.x % WARP == 0) out[row] = narrow<T>((float)(total / divisor));
}

#define ROWS(NAME, T)                                                                                                  \
    KERNEL(BLOCK_THREADS) row_sum_##NAME(T* out, const T* x, u64 rows, u64 columns, double divisor) {                  \
        row_sum(out, x, rows, columns, divisor);                                                                       \
    }
FOR_F32_AND_BF16(ROWS)
