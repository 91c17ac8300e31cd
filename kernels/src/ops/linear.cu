// linear: what cuBLASLt's matmuls do not cover. See linear/gpu.rs.
#include "common.cuh"

// ---- bias, activation and its derivative ----

/// y = activation(z); z may be y.
#define ACTIVATE(NAME, T)                                                                                              \
    KERNEL(BLOCK_THREADS) activate_##NAME(T* y, const T* z, u64 count, u32 activation) {                               \
        WITH_ACTIVATION(activation, T, F, map(y, z, count, [](float z) { return F::value(z); });)                      \
    }
FOR_F32_AND_BF16(ACTIVATE)

/// y = activation(y + bias), and y + bias itself to `pre`; bias and pre may be null. The activation
/// applies to the stored, rounded value.
template <class F, int N, class T> INLINE void bias_activate(T* y, T* pre, const T* bias, u64 count, u64 columns) {
    typedef Pack<T, N> P;
    over_matrix(count / N, columns / N, [=](u64 i, u64, u64 column) {
        const P x = load_pack<P>(y, i), added = bias == nullptr ? P{} : load_pack<P>(bias, column);
        float sum[N];
        UNROLLED for (int k = 0; k < N; k++)
            sum[k] = wide(x.values[k]) + (bias == nullptr ? -0.0f : wide(added.values[k]));
        const P z = narrow_pack<T>(sum);
        if (pre != nullptr) store_pack(pre, i, z);
        UNROLLED for (int k = 0; k < N; k++) sum[k] = F::value(wide(z.values[k]));
        store_pack(y, i, narrow_pack<T>(sum));
    });
}
#define BIAS_ACTIVATE(NAME, T)                                                                                         \
    KERNEL(BLOCK_THREADS)                                                                                              \
    bias_activate_##NAME(T* y, T* pre, const T* bias, u64 count, u64 columns, u32 activation) {                        \
        constexpr int PACK = Pack<T>::COUNT;                                                                           \
        IN_PACKS(PACK, columns % PACK == 0 && aligned(y, pre, bias),                                                   \
                 WITH_ACTIVATION(activation, T, F, bias_activate<F, N>(y, pre, bias, count, columns);))                \
    }
FOR_F32_AND_BF16(BIAS_ACTIVATE)

/// dx = dx · activation′(saved).
#define FOLD_BELOW(NAME, T)                                                                                            \
    KERNEL(BLOCK_THREADS) fold_below_##NAME(T* dx, const T* saved, u64 count, u32 activation) {                        \
        WITH_ACTIVATION(activation, T, F,                                                                              \
                        map(dx, dx, saved, count, [](float dx, float saved) { return F::chain(dx, saved); });)         \
    }
FOR_F32_AND_BF16(FOLD_BELOW)

// ---- the gradient of the bias ----

/// Rows that are summed before their sum is added to the others, and blocks whose sums are added
/// before those are: as in linear.rs, for the CPU's bits in f32.
constexpr u32 ROW_BLOCK = 64;
constexpr u32 GROUP = 64;
/// The packs of columns that a warp sums.
constexpr u32 LANES = 32;
/// Rows that a thread loads before it stores the first.
constexpr u32 ROWS_IN_FLIGHT = 8;

/// Multiplies dx by activation′(saved), unless `saved` is null. Then sums dx over each block of
/// `block_rows` into `sums` (blocks, columns). A warp has LANES packs of N columns of a block.
template <class F, int N, class T>
INLINE void fold_and_sum(float* __restrict__ sums, T* dx, const T* saved, u64 rows, u64 columns, u64 block_rows) {
    typedef Pack<T, N> P;
    const u64 packs = columns / N, pack = (u64)blockIdx.x * LANES + threadIdx.x;
    if (pack >= packs) return;
    for (u64 block = blockIdx.y; block * block_rows < rows; block += gridDim.y) {
        const u64 begin = block * block_rows, first = begin * packs + pack;
        const u32 height = (u32)(rows - begin < block_rows ? rows - begin : block_rows);
        float sum[N] = {};
        for (u32 row = 0; row < height; row += ROWS_IN_FLIGHT) {
            P x[ROWS_IN_FLIGHT], y[ROWS_IN_FLIGHT];
            UNROLLED for (u32 k = 0; k < ROWS_IN_FLIGHT; k++) {
                // Beyond the last row it again, which is not used.
                const u64 at = first + (row + k < height ? row + k : height - 1) * packs;
                x[k] = load_pack<P>(dx, at);
                if (saved != nullptr) y[k] = load_pack<P>(saved, at);
            }
            UNROLLED for (u32 k = 0; k < ROWS_IN_FLIGHT; k++) {
                if (row + k >= height) break;
                if (saved != nullptr) {
                    float chained[N];
                    UNROLLED for (int i = 0; i < N; i++)
                        chained[i] = F::chain(wide(x[k].values[i]), wide(y[k].values[i]));
                    x[k] = narrow_pack<T>(chained);
                    store_pack(dx, first + (row + k) * packs, x[k]);
                }
                UNROLLED for (int i = 0; i < N; i++) sum[i] += wide(x[k].values[i]);
            }
        }
        UNROLLED for (int i = 0; i < N; i++) sums[block * columns + pack * N + i] = sum[i];
    }
}
#define FOLD_AND_SUM(NAME, T, N)                                                                                       \
    KERNEL(LANES)                                                                                                      \
    fold_and_sum_##NAME(float* sums, T* dx, const T* saved, u64 rows, u64 columns, u64 block_rows, u32 activation) {   \
        WITH_ACTIVATION(activation, T, F, fold_and_sum<F, N>(sums, dx, saved, rows, columns, block_rows);)             \
    }
FOLD_AND_SUM(f32, float, 4)
FOLD_AND_SUM(bf16, bf16, 8)
FOLD_AND_SUM(unaligned_f32, float, 1)
FOLD_AND_SUM(unaligned_bf16, bf16, 1)

constexpr u32 SUM_COLUMNS = 8;
constexpr u32 GROUPS_AT_ONCE = 16;

/// db = Σ rows of sums, added to the old value with `accumulate`: a group by a thread, in order,
/// and then the groups in order. The old value comes before the first group's.
KERNEL(SUM_COLUMNS* GROUPS_AT_ONCE) add_row_sums_f32(
    float* __restrict__ db, const float* __restrict__ sums, u64 blocks, u64 columns, u32 accumulate) {
    __shared__ float of_groups[GROUPS_AT_ONCE][SUM_COLUMNS];
    const u32 lane = threadIdx.x % SUM_COLUMNS, group = threadIdx.x / SUM_COLUMNS;
    const u64 column = (u64)blockIdx.x * SUM_COLUMNS + lane;
    const bool inside = column < columns;
    // Adding −0 changes nothing.
    float total = -0.0f;
    u64 first = 0;
    do {
        const u64 begin = first + group * GROUP;
        const u32 count = !inside || begin >= blocks ? 0 : blocks - begin < GROUP ? (u32)(blocks - begin) : GROUP;
        float sum = inside && accumulate && begin == 0 ? db[column] : 0.0f;
        if (count == GROUP) {
            // One wait for memory instead of several.
            float loaded[GROUP];
            UNROLLED for (u32 i = 0; i < GROUP; i++) loaded[i] = sums[(begin + i) * columns + column];
            UNROLLED for (u32 i = 0; i < GROUP; i++) sum += loaded[i];
        } else {
#pragma unroll 16
            for (u32 i = 0; i < count; i++) sum += sums[(begin + i) * columns + column];
        }
        of_groups[group][lane] = sum;
        __syncthreads();
        for (u32 i = 0; i < GROUPS_AT_ONCE && (i == 0 || first + i * GROUP < blocks); i++) total += of_groups[i][lane];
        // The next round overwrites the sums.
        __syncthreads();
        first += GROUPS_AT_ONCE * GROUP;
    } while (first < blocks);
    if (inside && group == 0) db[column] = total;
}

constexpr u32 ROW_BLOCKS_AT_ONCE = 16;

/// db = Σ rows of dy, added to the old value with `accumulate`: sums of ROW_BLOCK rows, added as
/// `add_row_sums_f32` does. A block is LANES packs of N columns wide.
template <int N, class D, class T>
INLINE void sum_rows(D* __restrict__ db, const T* __restrict__ dy, u64 rows, u64 columns, u32 accumulate) {
    typedef Pack<T, N> P;
    __shared__ float sums[ROW_BLOCKS_AT_ONCE][LANES][N];
    const u64 packs = columns / N, pack = (u64)blockIdx.x * LANES + threadIdx.x;
    const bool inside = pack < packs, is_first = inside && threadIdx.y == 0;
    float total[N], group[N] = {};
    UNROLLED for (int i = 0; i < N; i++) {
        total[i] = -0.0f;
        if (is_first && accumulate) group[i] = wide(db[pack * N + i]);
    }
    for (u64 first = 0; first < rows; first += (u64)blockDim.y * ROW_BLOCK) {
        const u64 begin = first + (u64)threadIdx.y * ROW_BLOCK;
        const u32 height = !inside || begin >= rows ? 0 : rows - begin < ROW_BLOCK ? (u32)(rows - begin) : ROW_BLOCK;
        float sum[N] = {};
#pragma unroll 8
        for (u32 row = 0; row < height; row++) {
            const P value = load_pack<P>(dy, (begin + row) * packs + pack);
            UNROLLED for (int i = 0; i < N; i++) sum[i] += wide(value.values[i]);
        }
        UNROLLED for (int i = 0; i < N; i++) sums[threadIdx.y][threadIdx.x][i] = sum[i];
        __syncthreads();
        if (is_first) {
            UNROLLED for (int i = 0; i < N; i++) {
                if (first > 0 && first % (GROUP * ROW_BLOCK) == 0) total[i] += group[i], group[i] = 0.0f;
                for (u32 block = 0; block < blockDim.y && first + (u64)block * ROW_BLOCK < rows; block++) {
                    group[i] += sums[block][threadIdx.x][i];
                }
            }
        }
        // The next round overwrites the sums.
        __syncthreads();
    }
    UNROLLED for (int i = 0; i < N; i++) {
        if (is_first) db[pack * N + i] = narrow<D>(total[i] + group[i]);
    }
}

#define SUM_ROWS(NAME, T, D, N)                                                                                        \
    extern "C" __global__ void __launch_bounds__(LANES* ROW_BLOCKS_AT_ONCE, 1)                                         \
    sum_rows_to_##NAME(D* db, const T* dy, u64 rows, u64 columns, u32 accumulate) {                                    \
        sum_rows<N>(db, dy, rows, columns, accumulate);                                                                \
    }
#define SUM_ROWS_OF(NAME, T, D) SUM_ROWS(NAME, T, D, 4) SUM_ROWS(unaligned_##NAME, T, D, 1)
SUM_ROWS_OF(f32_f32, float, float)
SUM_ROWS_OF(bf16_bf16, bf16, bf16)
SUM_ROWS_OF(f32_bf16, bf16, float)
