// linear: what cuBLASLt's products do not cover. See linear/gpu.rs.
#include "common.cuh"

// ---- bias, activation and its derivative ----

struct Identity {
    static INLINE float value(float z) { return z; }
    static INLINE float chain(float dy, float) { return dy; }
};
struct Relu {
    // Not fmaxf: that would turn NaN into 0.
    static INLINE float value(float z) { return z < 0.0f ? 0.0f : z; }
    static INLINE float chain(float dy, float y) { return y > 0.0f ? dy : 0.0f; }
};
struct GeluTanh {
    static INLINE float value(float z) { return gelu_tanh(z); }
    static INLINE float chain(float dy, float z) { return dy * gelu_tanh_grad(z); }
};
struct GeluErf {
    static INLINE float value(float z) { return gelu_erf(z); }
    static INLINE float chain(float dy, float z) { return dy * gelu_erf_grad(z); }
};

/// The statement with F as the activation of this number in linear/gpu.rs.
#define WITH_ACTIVATION(NUMBER, F, ...)                                                                                \
    switch (NUMBER) {                                                                                                  \
    case 0: { typedef Identity F; __VA_ARGS__ } break;                                                                 \
    case 1: { typedef Relu F; __VA_ARGS__ } break;                                                                     \
    case 2: { typedef GeluTanh F; __VA_ARGS__ } break;                                                                 \
    case 3: { typedef GeluErf F; __VA_ARGS__ } break;                                                                  \
    }

/// y = activation(z); z may be y.
#define ACTIVATE(NAME, T)                                                                                              \
    KERNEL(BLOCK_THREADS) activate_##NAME(T* y, const T* z, u64 count, u32 activation) {                               \
        WITH_ACTIVATION(activation, F, map(y, z, count, [](float z) { return F::value(z); });)                         \
    }
FOR_F32_AND_BF16(ACTIVATE)

/// y = activation(y + bias), and y + bias itself to `pre`; bias and pre may be null. The activation
/// applies to the stored, rounded value.
template <class F, class T> INLINE void bias_activate(T* y, T* pre, const T* bias, u64 count, u64 columns) {
    over_matrix(count, columns, [=](u64 i, u64, u64 column) {
        const float sum = bias == nullptr ? wide(y[i]) : wide(y[i]) + wide(bias[column]);
        const T z = narrow<T>(sum);
        if (pre != nullptr) pre[i] = z;
        y[i] = narrow<T>(F::value(wide(z)));
    });
}
#define BIAS_ACTIVATE(NAME, T)                                                                                         \
    KERNEL(BLOCK_THREADS)                                                                                              \
    bias_activate_##NAME(T* y, T* pre, const T* bias, u64 count, u64 columns, u32 activation) {                        \
        WITH_ACTIVATION(activation, F, bias_activate<F>(y, pre, bias, count, columns);)                                \
    }
FOR_F32_AND_BF16(BIAS_ACTIVATE)

/// dx = dx · activation′(saved).
#define FOLD_BELOW(NAME, T)                                                                                            \
    KERNEL(BLOCK_THREADS) fold_below_##NAME(T* dx, const T* saved, u64 count, u32 activation) {                        \
        WITH_ACTIVATION(activation, F,                                                                                 \
                        map(dx, dx, saved, count, [](float dx, float saved) { return F::chain(dx, saved); });)         \
    }
FOR_F32_AND_BF16(FOLD_BELOW)

// ---- the gradient of the bias ----

/// Rows that are summed before their sum is added to the others: ROW_BLOCK of linear/gpu.rs, for
/// the CPU's bits in f32.
constexpr u32 ROW_BLOCK = 64;
/// Blocks are COLUMNS threads wide and at most this high; each row of threads sums a block of rows.
constexpr u32 COLUMNS = 32;
constexpr u32 ROW_BLOCKS_AT_ONCE = 16;

/// Rows that a thread loads before it stores the first.
constexpr u32 ROWS_IN_FLIGHT = 16;

/// Multiplies dx by activation′(saved), unless `saved` is null. Then sums dx over each block of
/// rows into `sums` (blocks, columns). A warp handles COLUMNS columns of a block.
template <class F, class T>
INLINE void fold_and_sum(float* __restrict__ sums, T* dx, const T* saved, u64 rows, u64 columns) {
    const u64 column = (u64)blockIdx.x * COLUMNS + threadIdx.x;
    if (column >= columns) return;
    for (u64 block = blockIdx.y; block * ROW_BLOCK < rows; block += gridDim.y) {
        const u64 begin = block * ROW_BLOCK;
        const u32 height = rows - begin < ROW_BLOCK ? (u32)(rows - begin) : ROW_BLOCK;
        const u64 first = begin * columns + column;
        float sum = 0.0f;
        for (u32 row = 0; row < height; row += ROWS_IN_FLIGHT) {
            T x[ROWS_IN_FLIGHT], y[ROWS_IN_FLIGHT];
#pragma unroll
            for (u32 k = 0; k < ROWS_IN_FLIGHT; k++) {
                if (row + k >= height) break;
                x[k] = dx[first + (row + k) * columns];
                if (saved != nullptr) y[k] = saved[first + (row + k) * columns];
            }
#pragma unroll
            for (u32 k = 0; k < ROWS_IN_FLIGHT; k++) {
                if (row + k >= height) break;
                if (saved != nullptr) {
                    x[k] = narrow<T>(F::chain(wide(x[k]), wide(y[k])));
                    dx[first + (row + k) * columns] = x[k];
                }
                sum += wide(x[k]);
            }
        }
        sums[block * columns + column] = sum;
    }
}
#define FOLD_AND_SUM(NAME, T)                                                                                          \
    KERNEL(COLUMNS)                                                                                                    \
    fold_and_sum_##NAME(float* sums, T* dx, const T* saved, u64 rows, u64 columns, u32 activation) {                   \
        WITH_ACTIVATION(activation, F, fold_and_sum<F>(sums, dx, saved, rows, columns);)                               \
    }
FOR_F32_AND_BF16(FOLD_AND_SUM)

/// db = Σ rows of sums, added to the old value with `accumulate`, in order.
KERNEL(BLOCK_THREADS) add_row_sums_f32(
    float* __restrict__ db, const float* __restrict__ sums, u64 blocks, u64 columns, u32 accumulate) {
    for (u64 column = first_index(); column < columns; column += grid_threads()) {
        float total = accumulate ? db[column] : 0.0f;
#pragma unroll 8
        for (u64 block = 0; block < blocks; block++) total += sums[block * columns + column];
        db[column] = total;
    }
}

/// db = Σ rows of dy, added to the old value with `accumulate`: sums of ROW_BLOCK rows, added in
/// order.
template <class D, class T>
INLINE void sum_rows(D* __restrict__ db, const T* __restrict__ dy, u64 rows, u64 columns, u32 accumulate) {
    __shared__ float sums[ROW_BLOCKS_AT_ONCE][COLUMNS];
    const u64 column = (u64)blockIdx.x * COLUMNS + threadIdx.x;
    const bool inside = column < columns;
    float total = inside && accumulate && threadIdx.y == 0 ? wide(db[column]) : 0.0f;
    for (u64 first = 0; first < rows; first += (u64)blockDim.y * ROW_BLOCK) {
        const u64 begin = first + (u64)threadIdx.y * ROW_BLOCK;
        float sum = 0.0f;
        if (inside && begin < rows) {
            const u32 height = rows - begin < ROW_BLOCK ? (u32)(rows - begin) : ROW_BLOCK;
            const T* value = dy + begin * columns + column;
#pragma unroll 8
            for (u32 row = 0; row < height; row++, value += columns) sum += wide(*value);
        }
        sums[threadIdx.y][threadIdx.x] = sum;
        __syncthreads();
        if (threadIdx.y == 0) {
            for (u32 block = 0; block < blockDim.y && first + (u64)block * ROW_BLOCK < rows; block++) {
                total += sums[block][threadIdx.x];
            }
        }
        // The next round overwrites the sums.
        __syncthreads();
    }
    if (inside && threadIdx.y == 0) db[column] = narrow<D>(total);
}

#define SUM_ROWS(NAME, T, NAME_OF_SUM, D)                                                          \
    KERNEL(COLUMNS* ROW_BLOCKS_AT_ONCE)                                                            \
    sum_rows_to_##NAME_OF_SUM##_##NAME(                                                            \
        D* db, const T* dy, u64 rows, u64 columns, u32 accumulate) {                               \
        sum_rows(db, dy, rows, columns, accumulate);                                               \
    }
SUM_ROWS(f32, float, f32, float)
SUM_ROWS(bf16, bf16, bf16, bf16)
SUM_ROWS(bf16, bf16, f32, float)
