// sum, mean and row_sum: see sum.rs, whose order this follows to get the CPU's bits.
#include "common.cuh"

constexpr int RUN_THREADS = 512;
constexpr int ONE_RUN_THREADS = 1024;

/// The sum of x[0..len] by one thread block: a warp per block of elements, added in order; valid in
/// thread 0.
INLINE double run_total(const float* __restrict__ x, u64 len) {
    // Two halves in turns: thread 0 adds one while the other is filled.
    __shared__ double sums[2][WARP];
    const u32 warps = blockDim.x / WARP, warp = threadIdx.x / WARP;
    double total = 0.0;
    u32 half = 0;
    for (u64 start = 0; start < len; start += (u64)warps * SUM_BLOCK, half ^= 1) {
        const u64 own = start + (u64)warp * SUM_BLOCK;
        if (own < len) {
            const double sum = warp_sum_of(x + own, len - own);
            if (threadIdx.x % WARP == 0) sums[half][warp] = sum;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            const u64 blocks = (len - start + SUM_BLOCK - 1) / SUM_BLOCK;
            const u32 count = blocks < warps ? (u32)blocks : warps;
            for (u32 i = 0; i < count; i++) total = total + sums[half][i];
        }
    }
    return total;
}

/// out = sum / divisor if every run is one block of elements, so that elements are in the order of
/// blocks.
KERNEL(ONE_RUN_THREADS) sum_f32(float* __restrict__ out, const float* __restrict__ x, u64 count, double divisor) {
    const double total = run_total(x, count);
    if (threadIdx.x == 0) *out = (float)(total / divisor);
}

/// sums[run] for runs of run_len elements, one thread block each.
KERNEL(RUN_THREADS) sum_runs_f32(double* __restrict__ sums, const float* __restrict__ x, u64 count, u64 run_len) {
    const u64 start = blockIdx.x * run_len;
    const u64 rest = count - start;
    const double total = run_total(x + start, rest < run_len ? rest : run_len);
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

/// out = the runs' sum / divisor.
KERNEL(RUNS_MAX) sum_of_runs_f32(float* __restrict__ out, const double* __restrict__ sums, u32 runs, double divisor) {
    __shared__ double near[RUNS_MAX];
    if (threadIdx.x < runs) near[threadIdx.x] = sums[threadIdx.x];
    __syncthreads();
    if (threadIdx.x > 0) return;
    double total = 0.0;
    for (u32 i = 0; i < runs; i++) total = total + near[i];
    *out = (float)(total / divisor);
}

/// This warp's row.
INLINE u64 row_of_warp() { return first_index() / WARP; }

/// out[row] = the sum of the row.
template <class T>
INLINE void row_sum(T* __restrict__ out, const T* __restrict__ x, u64 rows, u64 columns) {
    const u64 row = row_of_warp();
    if (row >= rows) return;
    double total = 0.0;
    for (u64 start = 0; start < columns; start += SUM_BLOCK) {
        total = total + warp_sum_of(x + row * columns + start, columns - start);
    }
    if (threadIdx.x % WARP == 0) out[row] = narrow<T>((float)total);
}

#define ROWS(NAME, T)                                                                                                  \
    KERNEL(BLOCK_THREADS) row_sum_##NAME(T* out, const T* x, u64 rows, u64 columns) {                                  \
        row_sum(out, x, rows, columns);                                                                                \
    }
FOR_F32_AND_BF16(ROWS)
