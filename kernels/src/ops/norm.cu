// Norms of rows, and their derivatives: see norm.rs. Sums are in the order of norm/cpu.rs, so f32
// has the CPU's bits.
#include "common.cuh"

/// A lane's elements in the columns that its warp takes at a time: packs of 4, a warp's apart.
constexpr u32 PACK = 4;
constexpr u32 PACKS = 4;
constexpr u32 PER_LANE = PACK * PACKS;
/// As in norm/cpu.rs.
constexpr u32 WARP_COLUMNS = WARP * PER_LANE;
constexpr u32 WARPS_MAX = 16;
constexpr u32 THREADS_MAX = WARPS_MAX * WARP;
constexpr u32 ROW_BLOCK = 16;

/// The column of this lane's element number `n`, of the columns from `start` on.
INLINE u64 column_of(u64 start, u32 n) { return start + ((n / PACK) * WARP + threadIdx.x % WARP) * PACK + n % PACK; }

/// Whether rows of so many columns at these addresses can be accessed in packs.
template <class T, class... Pointers> INLINE bool in_packs(u64 columns, Pointers... pointers) {
    return columns % PACK == 0 && aligned<PACK * sizeof(T)>(pointers...);
}

/// This lane's elements of a row; `absent` beyond its end, or everywhere if the row is null.
template <class T>
INLINE void load(float (&values)[PER_LANE], const T* row, u64 start, u64 columns, bool packed, float absent) {
    typedef Pack<T, PACK> P;
#pragma unroll
    for (u32 n = 0; n < PER_LANE; n += PACK) {
        const u64 column = column_of(start, n);
        if (packed && row != nullptr) {
            if (column < columns) {
                const P pack = load_pack<P>(row, column / PACK);
#pragma unroll
                for (u32 k = 0; k < PACK; k++) values[n + k] = wide(pack.values[k]);
            } else {
#pragma unroll
                for (u32 k = 0; k < PACK; k++) values[n + k] = absent;
            }
            continue;
        }
#pragma unroll
        for (u32 k = 0; k < PACK; k++) {
            values[n + k] = row != nullptr && column + k < columns ? wide(row[column + k]) : absent;
        }
    }
}

/// Four elements from a lane's number `n` on, each rounded once.
INLINE void store_pack_of(float* row, u64 pack, const float (&values)[PER_LANE], u32 n) {
    Pack<float> rounded;
    rounded.whole = make_uint4(__float_as_uint(values[n]), __float_as_uint(values[n + 1]), __float_as_uint(values[n + 2]),
                               __float_as_uint(values[n + 3]));
    store_pack(row, pack, rounded);
}
INLINE void store_pack_of(bf16* row, u64 pack, const float (&values)[PER_LANE], u32 n) {
    u32 bits[PACK];
#pragma unroll
    for (u32 k = 0; k < PACK; k++) bits[k] = narrow<bf16>(values[n + k]).bits;
    Pack<bf16, PACK> rounded;
    rounded.whole = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
    store_pack(row, pack, rounded);
}

template <class T>
INLINE void store(T* row, const float (&values)[PER_LANE], u64 start, u64 columns, bool packed) {
#pragma unroll
    for (u32 n = 0; n < PER_LANE; n += PACK) {
        const u64 column = column_of(start, n);
        if (packed) {
            if (column < columns) store_pack_of(row, column / PACK, values, n);
            continue;
        }
#pragma unroll
        for (u32 k = 0; k < PACK; k++) {
            if (column + k < columns) row[column + k] = narrow<T>(values[n + k]);
        }
    }
}

/// The sum over a row from each thread's four.
INLINE float row_sum(const float (&sums)[PACK]) { return block_sum((sums[0] + sums[1]) + (sums[2] + sums[3])); }

/// out = norm(x) · weight + bias, by a block for each row; norm(x + residual), which goes to `sum`,
/// if there is a residual. The last of a row's `width` statistics is 1/σ or 1/rms; the first of two
/// the mean. `sum` may be x or the residual.
template <class T>
INLINE void norm(
    T* out, T* sum, float* __restrict__ stats, const T* x, const T* residual, const T* __restrict__ weight,
    const T* __restrict__ bias, u64 rows, u64 columns, u32 width, float epsilon) {
    const bool packed = in_packs<T>(columns, out, sum, x, residual, weight, bias);
    const u64 own = threadIdx.x / WARP * WARP_COLUMNS, step = (u64)blockDim.x * PER_LANE;
    // Whether registers hold the row from pass to pass.
    const bool held = columns <= step;
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const u64 first = row * columns;
        const T* normed = (residual == nullptr ? x : sum) + first;
        float values[PER_LANE], others[PER_LANE];
        float sums[PACK] = {};
        for (u64 start = own; start < columns; start += step) {
            load(values, x + first, start, columns, packed, 0.0f);
            if (residual != nullptr) {
                load(others, residual + first, start, columns, packed, 0.0f);
#pragma unroll
                for (u32 n = 0; n < PER_LANE; n++) values[n] = wide(narrow<T>(values[n] + others[n]));
                store(sum + first, values, start, columns, packed);
            }
#pragma unroll
            for (u32 n = 0; n < PER_LANE; n++) sums[n % PACK] = sums[n % PACK] + values[n];
        }
        const float mean = width == 2 ? row_sum(sums) / (float)columns : 0.0f;
#pragma unroll
        for (u32 k = 0; k < PACK; k++) sums[k] = 0.0f;
        for (u64 start = own; start < columns; start += step) {
            if (!held) load(values, normed, start, columns, packed, 0.0f);
#pragma unroll
            for (u32 n = 0; n < PER_LANE; n++) {
                const float centred = column_of(start, n) < columns ? values[n] - mean : 0.0f;
                sums[n % PACK] = fmaf(centred, centred, sums[n % PACK]);
            }
        }
        const float scale = 1.0f / sqrtf(row_sum(sums) / (float)columns + epsilon);
        if (threadIdx.x == 0) {
            if (width == 2) stats[2 * row] = mean;
            stats[width * row + width - 1] = scale;
        }
        for (u64 start = own; start < columns; start += step) {
            if (!held) load(values, normed, start, columns, packed, 0.0f);
#pragma unroll
            for (u32 n = 0; n < PER_LANE; n++) values[n] = (values[n] - mean) * scale;
            load(others, weight, start, columns, packed, 1.0f);
            float added[PER_LANE];
            load(added, bias, start, columns, packed, -0.0f);
#pragma unroll
            for (u32 n = 0; n < PER_LANE; n++) values[n] = fmaf(values[n], others[n], added[n]);
            store(out + first, values, start, columns, packed);
        }
    }
}
// At least one block per processor: otherwise ptxas makes room for two on sm_100, and spills.
#define NORM(NAME, T)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS_MAX, 1)                                                       \
    norm_##NAME(T* out, T* sum, float* stats, const T* x, const T* residual, const T* weight, const T* bias, u64 rows, \
                u64 columns, u32 width, float epsilon) {                                                               \
        norm(out, sum, stats, x, residual, weight, bias, rows, columns, width, epsilon);                               \
    }
FOR_F32_AND_BF16(NORM)

/// Adds a row to this thread's part of a block's sums, which registers keep if they hold rows.
template <class F>
INLINE void add_row(
    float* row, float (&sums)[PER_LANE], u64 start, u64 columns, bool packed, bool held, bool is_first, bool is_last,
    F term) {
    if (row == nullptr) return;
    if (is_first || !held) load(sums, is_first ? nullptr : row, start, columns, packed, 0.0f);
#pragma unroll
    for (u32 n = 0; n < PER_LANE; n++) sums[n] = term(n, sums[n]);
    if (is_last || !held) store(row, sums, start, columns, packed);
}

/// The gradient of a row by x, and the sums of a block of rows for weight and bias, by a block of
/// threads for each block of rows. `dx` may be dy, the residual's gradient or both.
template <class T>
INLINE void norm_backward(
    T* dx, const T* dy, const T* __restrict__ x, const float* __restrict__ stats, const T* __restrict__ weight,
    const T* dresidual, float* weight_sums, float* bias_sums, u64 rows, u64 columns, u32 width) {
    const bool packed = in_packs<T>(columns, dx, dy, x, weight, dresidual);
    const bool sums_packed = in_packs<float>(columns, weight_sums, bias_sums);
    const u64 own = threadIdx.x / WARP * WARP_COLUMNS, step = (u64)blockDim.x * PER_LANE;
    const bool held = columns <= step;
    for (u64 block = blockIdx.x; block * ROW_BLOCK < rows; block += gridDim.x) {
        const u64 begin = block * ROW_BLOCK, end = rows - begin < ROW_BLOCK ? rows : begin + ROW_BLOCK;
        float* of_weight = weight_sums == nullptr ? nullptr : weight_sums + block * columns;
        float* of_bias = bias_sums == nullptr ? nullptr : bias_sums + block * columns;
        float dweight[PER_LANE], dbias[PER_LANE];
        for (u64 row = begin; row < end; row++) {
            const u64 first = row * columns;
            const float mean = width == 2 ? stats[2 * row] : 0.0f, scale = stats[width * row + width - 1];
            float gradients[PER_LANE], normed[PER_LANE], others[PER_LANE];
            float sums[PACK] = {}, products[PACK] = {};
            for (u64 start = own; start < columns; start += step) {
                load(gradients, dy + first, start, columns, packed, 0.0f);
                load(normed, x + first, start, columns, packed, 0.0f);
                load(others, weight, start, columns, packed, 1.0f);
#pragma unroll
                for (u32 n = 0; n < PER_LANE; n++) {
                    normed[n] = (normed[n] - mean) * scale;
                    const float scaled = gradients[n] * others[n];
                    sums[n % PACK] = sums[n % PACK] + scaled;
                    products[n % PACK] = fmaf(scaled, normed[n], products[n % PACK]);
                }
            }
            const float along_one = width == 2 ? row_sum(sums) / (float)columns : 0.0f;
            const float against_x = 0.0f - row_sum(products) / (float)columns;
            for (u64 start = own; start < columns; start += step) {
                if (!held) {
                    load(gradients, dy + first, start, columns, packed, 0.0f);
                    load(normed, x + first, start, columns, packed, 0.0f);
#pragma unroll
                    for (u32 n = 0; n < PER_LANE; n++) normed[n] = (normed[n] - mean) * scale;
                }
                add_row(of_weight, dweight, start, columns, sums_packed, held, row == begin, row + 1 == end,
                        [&](u32 n, float sum) { return fmaf(gradients[n], normed[n], sum); });
                add_row(of_bias, dbias, start, columns, sums_packed, held, row == begin, row + 1 == end,
                        [&](u32 n, float sum) { return sum + gradients[n]; });
                load(others, weight, start, columns, packed, 1.0f);
#pragma unroll
                for (u32 n = 0; n < PER_LANE; n++) {
                    gradients[n] = fmaf(normed[n], against_x, gradients[n] * others[n] - along_one);
                }
                load(others, dresidual == nullptr ? nullptr : dresidual + first, start, columns, packed, -0.0f);
#pragma unroll
                for (u32 n = 0; n < PER_LANE; n++) gradients[n] = fmaf(scale, gradients[n], others[n]);
                store(dx + first, gradients, start, columns, packed);
            }
        }
    }
}
#define NORM_BACKWARD(NAME, T)                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS_MAX, 1)                                                       \
    norm_backward_##NAME(T* dx, const T* dy, const T* x, const float* stats, const T* weight, const T* dresidual,      \
                         float* weight_sums, float* bias_sums, u64 rows, u64 columns, u32 width) {                     \
        norm_backward(dx, dy, x, stats, weight, dresidual, weight_sums, bias_sums, rows, columns, width);              \
    }
FOR_F32_AND_BF16(NORM_BACKWARD)
