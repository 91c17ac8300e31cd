// mse: see mse.rs. The sums follow its order, to get the CPU's bits. T is the dtype of pred and
// dpred.
#include "common.cuh"

/// Partial sums of a block of features, one per thread.
constexpr u32 LANES = 8;
/// Features that are summed together in lanes.
constexpr u32 BLOCK = 1024;
/// Lanes side by side in a thread block.
constexpr u32 GROUPS = BLOCK_THREADS / LANES;
/// Packs that a thread loads before it stores the first.
template <int N> constexpr u32 IN_FLIGHT = N == 1 ? 4 : 2;
/// Elements of a pack, which one lane adds: of bf16, whose sums have an order of their own.
constexpr int PACK = 4;

/// Σ (pred − target)² of at most BLOCK elements, N of them at a time in each lane of a group, and
/// dpred, if wanted, which may be pred itself.
template <int N, class T>
INLINE double squared_distance(T* dpred, const T* pred, const float* target, u64 len, float slope) {
    const u64 packs = len / N;
    double sum = 0.0;
    for (u64 start = threadIdx.x % LANES; start < packs; start += IN_FLIGHT<N> * LANES) {
        Pack<T, N> x[IN_FLIGHT<N>];
        Pack<float, N> y[IN_FLIGHT<N>];
        UNROLLED for (u32 k = 0; k < IN_FLIGHT<N>; k++) {
            // Beyond the last pack the thread's first again, which is not used.
            const u64 i = start + k * LANES < packs ? start + k * LANES : start;
            x[k] = load_pack<Pack<T, N>>(pred, i), y[k] = load_pack<Pack<float, N>>(target, i);
        }
        UNROLLED for (u32 k = 0; k < IN_FLIGHT<N>; k++) {
            if (start + k * LANES >= packs) break;
            float slopes[N];
            UNROLLED for (int j = 0; j < N; j++) {
                const float difference = wide(x[k].values[j]) - y[k].values[j];
                sum = fma((double)difference, (double)difference, sum);
                slopes[j] = slope * difference;
            }
            if (dpred != nullptr) store_pack(dpred, start + k * LANES, narrow_pack<T>(slopes));
        }
    }
    return sum;
}

/// Adds the lanes of each group pairwise. The whole warp must call it.
INLINE double over_lanes(double sum) {
    UNROLLED for (u32 distance = LANES / 2; distance > 0; distance /= 2)
        sum = sum + __shfl_xor_sync(WHOLE_WARP, sum, distance);
    return sum;
}

/// Rows of at most BLOCK features, one per group.
template <int N, class T>
INLINE void narrow_rows(
    float* __restrict__ losses, T* dpred, const T* pred, const float* __restrict__ target, u64 rows, u64 features,
    float slope) {
    const u64 row = (u64)blockIdx.x * GROUPS + threadIdx.x / LANES;
    const u64 start = row * features;
    double sum = 0.0;
    if (row < rows) {
        T* slopes = dpred == nullptr ? nullptr : dpred + start;
        sum = squared_distance<N>(slopes, pred + start, target + start, features, slope);
    }
    sum = over_lanes(sum);
    if (row < rows && threadIdx.x % LANES == 0) losses[row] = (float)sum;
}

/// Longer rows, one per thread block: its groups take blocks of features, and their sums are added
/// in order.
template <int N, class T>
INLINE void wide_rows(
    float* __restrict__ losses, T* dpred, const T* pred, const float* __restrict__ target, u64 features,
    float slope) {
    // Two halves in turns: thread 0 adds one while the other is filled.
    __shared__ double sums[2][GROUPS];
    const u32 group = threadIdx.x / LANES;
    const u64 row_start = blockIdx.x * features;
    double total = 0.0;
    u32 half = 0;
    for (u64 start = 0; start < features; start += GROUPS * BLOCK, half ^= 1) {
        const u64 own = start + (u64)group * BLOCK;
        double sum = 0.0;
        if (own < features) {
            const u64 len = features - own < BLOCK ? features - own : BLOCK;
            const u64 at = row_start + own;
            T* slopes = dpred == nullptr ? nullptr : dpred + at;
            sum = squared_distance<N>(slopes, pred + at, target + at, len, slope);
        }
        sum = over_lanes(sum);
        if (threadIdx.x % LANES == 0) sums[half][group] = sum;
        __syncthreads();
        // Groups past the end left zeros.
        if (threadIdx.x == 0) {
#pragma unroll 4
            for (u32 i = 0; i < GROUPS; i++) total = total + sums[half][i];
        }
    }
    if (threadIdx.x == 0) losses[blockIdx.x] = (float)total;
}

/// The end of a block that has written its rows: the block that ends last adds all rows to the
/// statistics, f32 (4) or null: the sum of losses, their divisor, correct rows, rows.
INLINE void add_totals(const float* losses, u64 rows, u64 features, float* stats, u64* counters) {
    if (stats == nullptr || !ends_last(counters)) return;
    const float loss = (float)total_of(losses, rows);
    if (threadIdx.x > 0) return;
    stats[0] = stats[0] + loss;
    stats[1] = stats[1] + (float)(rows * features);
    stats[3] = stats[3] + (float)rows;
}

#define MSE_ROWS(NAME, T, ROWS, ...)                                                                                   \
    KERNEL(BLOCK_THREADS) mse_##NAME(                                                                                  \
        float* losses, T* dpred, const T* pred, const float* target, u64 rows, u64 features, float slope,              \
        float* stats, u64* counters) {                                                                                 \
        IN_PACKS(PACK, sizeof(T) == 2 && features % PACK == 0 && aligned<2 * PACK>(dpred, pred) && aligned(target),    \
                 ROWS<N>(__VA_ARGS__);)                                                                                \
        add_totals(losses, rows, features, stats, counters);                                                           \
    }
#define MSE(NAME, T)                                                                                                   \
    MSE_ROWS(narrow_##NAME, T, narrow_rows, losses, dpred, pred, target, rows, features, slope)                        \
    MSE_ROWS(wide_##NAME, T, wide_rows, losses, dpred, pred, target, features, slope)
FOR_F32_AND_BF16(MSE)
