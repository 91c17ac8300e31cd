// What linear and addmm do around the products of cuBLASLt: see linear/gpu.rs.
#include "common.cuh"

// ---- bias, activation and its derivative ---------------------------------------------------------------------------

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

/// The statement with F as the activation that linear/gpu.rs gives this number.
#define WITH_ACTIVATION(NUMBER, F, ...)                                                                                \
    switch (NUMBER) {                                                                                                  \
    case 0: { typedef Identity F; __VA_ARGS__ } break;                                                                 \
    case 1: { typedef Relu F; __VA_ARGS__ } break;                                                                     \
    case 2: { typedef GeluTanh F; __VA_ARGS__ } break;                                                                 \
    case 3: { typedef GeluErf F; __VA_ARGS__ } break;                                                                  \
    }

/// f(i, its column) for each element i of a row-major matrix.
template <class F> INLINE void over_matrix(u64 count, u64 columns, F f) {
    const u64 stride = grid_threads(), step = stride % columns;
    u64 column = first_index() % columns;
    for (u64 i = first_index(); i < count; i += stride) {
        f(i, column);
        column += step;
        if (column >= columns) column -= columns;
    }
}

/// y = activation(z); z may be y.
#define ACTIVATE(NAME, T)                                                                                              \
    KERNEL(BLOCK_THREADS) activate_##NAME(T* y, const T* z, u64 count, u32 activation) {                               \
        WITH_ACTIVATION(activation, F, map(y, z, count, [](float z) { return F::value(z); });)                         \
    }
FOR_WIDE(ACTIVATE)

/// y = activation(y + bias), and y + bias itself to `pre`; bias and pre may be null. What is stored is what is activated.
template <class F, class T> INLINE void bias_activate(T* y, T* pre, const T* bias, u64 count, u64 columns) {
    over_matrix(count, columns, [=](u64 i, u64 column) {
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
FOR_WIDE(BIAS_ACTIVATE)

/// dx = dx · activation′(saved).
#define FOLD_BELOW(NAME, T)                                                                                            \
    KERNEL(BLOCK_THREADS) fold_below_##NAME(T* dx, const T* saved, u64 count, u32 activation) {                        \
        WITH_ACTIVATION(activation, F,                                                                                 \
                        map(dx, dx, saved, count, [](float dx, float saved) { return F::chain(dx, saved); });)         \
    }
FOR_WIDE(FOLD_BELOW)

// ---- where there is no product -------------------------------------------------------------------------------------

/// out = beta · acc, acc being as large as out or one row of it, or out itself. A beta of 0 does not read acc.
#define SCALE_ROWS(NAME, T)                                                                                            \
    KERNEL(BLOCK_THREADS)                                                                                              \
    scale_rows_##NAME(T* out, const T* acc, u64 count, u64 columns, u32 broadcast, float beta) {                       \
        over_matrix(count, columns, [=](u64 i, u64 column) {                                                           \
            const u64 from = broadcast ? column : i;                                                                   \
            out[i] = narrow<T>(beta == 0.0f ? 0.0f : beta * wide(acc[from]));                                          \
        });                                                                                                            \
    }
FOR_WIDE(SCALE_ROWS)

// ---- the gradient of the bias --------------------------------------------------------------------------------------

/// Rows added up before their sum joins the others: ROW_BLOCK of linear.rs, so that f32 has the CPU's bits.
constexpr u32 ROW_BLOCK = 64;
/// Blocks are COLUMNS threads wide and at most this high; each row of threads has a block of rows.
constexpr u32 COLUMNS = 32;
constexpr u32 ROW_BLOCKS_AT_ONCE = 16;

/// db = Σ rows of dy, added to what is there with `accumulate`: sums of ROW_BLOCK rows, added up in their order.
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
        // The next round writes the sums again.
        __syncthreads();
    }
    if (inside && threadIdx.y == 0) db[column] = narrow<D>(total);
}

#define SUM_ROWS(NAME, T, NAME_OF_SUM, D)                                                                              \
    KERNEL(COLUMNS* ROW_BLOCKS_AT_ONCE)                                                                                \
    sum_rows_##NAME##_##NAME_OF_SUM(D* db, const T* dy, u64 rows, u64 columns, u32 accumulate) {                       \
        sum_rows(db, dy, rows, columns, accumulate);                                                                   \
    }
SUM_ROWS(f32, float, f32, float)
SUM_ROWS(bf16, bf16, bf16, bf16)
SUM_ROWS(bf16, bf16, f32, float)
SUM_ROWS(f16, f16, f16, f16)
SUM_ROWS(f16, f16, f32, float)
