// Norms of rows, and their derivatives: see norm.rs. In f32 sums are in the order of norm/cpu.rs
// and have the CPU's bits. bf16 has twice as many columns in a pack, and so another order.
//
// A warp has a row of up to WARP * PACKS packs, wider rows several warps of a block. Registers hold
// the row while the next one is loaded.
#include "common.cuh"

/// Packs of a row that a lane has at a time, a warp's packs apart.
constexpr u32 PACKS = 4;
/// As in norm/cpu.rs.
constexpr u32 WARPS_MAX = 8;
constexpr u32 THREADS_MAX = WARPS_MAX * WARP;

/// The columns of this lane. Not PACKED: the elements of a pack are accessed one by one, because
/// rows of this many columns at these addresses are not aligned.
template <class T, bool PACKED> struct Lane {
    typedef Pack<T> P;
    static constexpr u32 PACK = P::COUNT;
    static constexpr u32 WARP_COLUMNS = WARP * PACK * PACKS;

    u32 columns;

    /// f(n, first column) for each pack of this lane in the warp's columns from `start` on.
    template <class F> INLINE void each(u32 start, F f) const {
        UNROLLED for (u32 n = 0; n < PACKS; n++) {
            const u32 column = start + (n * WARP + threadIdx.x % WARP) * PACK;
            if (column < columns) f(n, column);
        }
    }

    /// Whether element k of the pack from `column` on, of which the first is in the row, is too.
    INLINE bool has(u32 column, u32 k) const { return PACKED || column + k < columns; }

    /// Packs of a row, or of `absent` if it is null.
    INLINE void load(P (&packs)[PACKS], const T* row, u32 start, float absent) const {
        each(start, [&](u32 n, u32 column) {
            if (PACKED && row != nullptr) {
                packs[n] = load_pack<P>(row, column / PACK);
                return;
            }
            UNROLLED for (u32 k = 0; k < PACK; k++) {
                packs[n].values[k] = row != nullptr && has(column, k) ? row[column + k] : narrow<T>(absent);
            }
        });
    }

    /// Stores a pack from `column` on.
    INLINE void store(T* row, u32 column, const P& pack) const {
        if (PACKED) return store_pack(row, column / PACK, pack);
        UNROLLED for (u32 k = 0; k < PACK; k++) {
            if (has(column, k)) row[column + k] = pack.values[k];
        }
    }

    /// Sums of a lane's columns over rows.
    typedef Pack<float> Sums[PACKS][PACK / 4];

    /// Stores sums in a row, which may be null, or loads them.
    template <bool STORES> INLINE void move_sums(Sums& sums, float* row, u32 start) const {
        if (row == nullptr) return;
        each(start, [&](u32 n, u32 column) {
            UNROLLED for (u32 k = 0; k < PACK; k++) {
                Pack<float>& pack = sums[n][k / 4];
                if (PACKED && k % 4 == 0) {
                    if (STORES) store_pack(row + column, k / 4, pack);
                    else pack = load_pack<Pack<float>>(row + column, k / 4);
                }
                if (!PACKED && has(column, k)) {
                    if (STORES) row[column + k] = pack.values[k % 4];
                    else pack.values[k % 4] = row[column + k];
                }
            }
        });
    }

    /// The sum over a row from the lanes' sums of columns.
    static INLINE float row_sum(float (&sums)[PACK]) {
        UNROLLED for (u32 width = PACK / 2; width > 0; width /= 2) {
            UNROLLED for (u32 k = 0; k < width; k++) sums[k] = sums[2 * k] + sums[2 * k + 1];
        }
        return block_sum(sums[0]);
    }
};

/// Whether this many columns are held in the registers of a block.
template <class T> INLINE bool held(u64 columns) { return columns <= blockDim.x * PACKS * Pack<T>::COUNT; }

/// out = norm(x) · weight + bias; norm(x + residual), which goes to `sum`, if there is a residual.
/// The last of a row's `width` statistics is 1/σ or 1/rms; the first of two the mean. `sum` may be
/// x or the residual.
template <bool PACKED, bool HELD, class T>
INLINE void norm(
    T* out, T* sum, float* __restrict__ stats, const T* x, const T* residual, const T* __restrict__ weight,
    const T* __restrict__ bias, u64 rows, u64 columns, u32 width, float epsilon) {
    typedef Lane<T, PACKED> L;
    typedef typename L::P P;
    constexpr u32 PACK = L::PACK;
    const L lane{(u32)columns};
    const u32 own = threadIdx.x / WARP * L::WARP_COLUMNS;
    const auto after = [=](u32 start) { return HELD ? ~0u : start + blockDim.x / WARP * L::WARP_COLUMNS; };
    P values[PACKS], others[PACKS], next[PACKS], next_others[PACKS];
    const auto fetch = [&](P (&values)[PACKS], P (&others)[PACKS], u64 row, u32 start) {
        lane.load(values, x + row * columns, start, 0.0f);
        if (residual != nullptr) lane.load(others, residual + row * columns, start, 0.0f);
    };
    if (HELD && blockIdx.x < rows) fetch(next, next_others, blockIdx.x, own);
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const u64 first = row * columns;
        if (HELD) {
            UNROLLED for (u32 n = 0; n < PACKS; n++) values[n] = next[n], others[n] = next_others[n];
            if (row + gridDim.x < rows) fetch(next, next_others, row + gridDim.x, own);
        }
        float sums[PACK] = {};
        for (u32 start = own; start < columns; start = after(start)) {
            if (!HELD) fetch(values, others, row, start);
            lane.each(start, [&](u32 n, u32 column) {
                if (residual != nullptr) {
                    float sum_of[P::COUNT];
                    UNROLLED for (u32 k = 0; k < PACK; k++)
                        sum_of[k] = wide(values[n].values[k]) + wide(others[n].values[k]);
                    values[n] = narrow_pack<T>(sum_of);
                    lane.store(sum + first, column, values[n]);
                }
                UNROLLED for (u32 k = 0; k < PACK; k++) sums[k] = sums[k] + wide(values[n].values[k]);
            });
        }
        const T* normed = (residual == nullptr ? x : sum) + first;
        const float mean = width == 2 ? L::row_sum(sums) / (float)columns : 0.0f;
        UNROLLED for (u32 k = 0; k < PACK; k++) sums[k] = 0.0f;
        for (u32 start = own; start < columns; start = after(start)) {
            if (!HELD) lane.load(values, normed, start, 0.0f);
            lane.each(start, [&](u32 n, u32 column) {
                UNROLLED for (u32 k = 0; k < PACK; k++) {
                    const float centred = lane.has(column, k) ? wide(values[n].values[k]) - mean : 0.0f;
                    sums[k] = fmaf(centred, centred, sums[k]);
                }
            });
        }
        const float variance = L::row_sum(sums) / (float)columns + epsilon;
        // Where squares overflow, a scale of 0 would hide it.
        const float scale = is_finite(variance) ? 1.0f / sqrtf(variance) : nan_f32();
        if (threadIdx.x == 0) {
            if (width == 2) stats[2 * row] = mean;
            stats[width * row + width - 1] = scale;
        }
        for (u32 start = own; start < columns; start = after(start)) {
            if (!HELD) lane.load(values, normed, start, 0.0f);
            P added[PACKS];
            lane.load(others, weight, start, 1.0f);
            lane.load(added, bias, start, -0.0f);
            lane.each(start, [&](u32 n, u32 column) {
                float result[P::COUNT];
                UNROLLED for (u32 k = 0; k < PACK; k++) {
                    const float centred = (wide(values[n].values[k]) - mean) * scale;
                    result[k] = fmaf(centred, wide(others[n].values[k]), wide(added[n].values[k]));
                }
                lane.store(out + first, column, narrow_pack<T>(result));
            });
        }
    }
}

/// The gradient of a row by x, and the sums of a block of rows for weight and bias, by a block of
/// threads for each block of rows. `dx` may be dy, the residual's gradient or both. With SUMS, also
/// the sums of dx as it is stored, of rows that a warp holds.
template <bool PACKED, bool HELD, bool SUMS, class T>
INLINE void norm_backward(
    T* dx, const T* dy, const T* __restrict__ x, const float* __restrict__ stats, const T* __restrict__ weight,
    const T* dresidual, float* weight_sums, float* bias_sums, u64 rows, u64 columns, u64 block_rows, u32 width,
    float* dx_sums) {
    typedef Lane<T, PACKED> L;
    typedef typename L::P P;
    constexpr u32 PACK = L::PACK;
    const L lane{(u32)columns};
    const u32 own = threadIdx.x / WARP * L::WARP_COLUMNS;
    const auto after = [=](u32 start) { return HELD ? ~0u : start + blockDim.x / WARP * L::WARP_COLUMNS; };
    const u64 begin = blockIdx.x * block_rows, end = rows - begin < block_rows ? rows : begin + block_rows;
    float* of_weight = weight_sums == nullptr ? nullptr : weight_sums + blockIdx.x * columns;
    float* of_bias = bias_sums == nullptr ? nullptr : bias_sums + blockIdx.x * columns;
    typename L::Sums dweight = {}, dbias = {};
    // Registers are full. Each lane has its own part.
    __shared__ Pack<float> passed[PACKS][PACK / 4][WARP];
    UNROLLED for (u32 n = 0; SUMS && n < PACKS; n++) {
        UNROLLED for (u32 k = 0; k < PACK / 4; k++) passed[n][k][threadIdx.x] = Pack<float>{};
    }
    P gradients[PACKS], inputs[PACKS], weights[PACKS], next_gradients[PACKS], next_inputs[PACKS];
    float mean = 0.0f, scale = 0.0f, next_mean = 0.0f, next_scale = 0.0f;
    const auto fetch = [&](P (&gradients)[PACKS], P (&inputs)[PACKS], u64 row, u32 start) {
        lane.load(gradients, dy + row * columns, start, 0.0f);
        lane.load(inputs, x + row * columns, start, 0.0f);
    };
    const auto fetch_stats = [&](u64 row) {
        if (width == 2) next_mean = stats[2 * row];
        next_scale = stats[width * row + width - 1];
    };
    if (HELD) fetch(next_gradients, next_inputs, begin, own);
    for (u32 start = own; !HELD && start < columns; start = after(start)) {
        lane.template move_sums<true>(dweight, of_weight, start);
        lane.template move_sums<true>(dbias, of_bias, start);
    }
    fetch_stats(begin);
    for (u64 row = begin; row < end; row++) {
        const u64 first = row * columns;
        mean = next_mean, scale = next_scale;
        P others[PACKS];
        if (HELD) {
            UNROLLED for (u32 n = 0; n < PACKS; n++) gradients[n] = next_gradients[n], inputs[n] = next_inputs[n];
            lane.load(others, dresidual == nullptr ? nullptr : dresidual + first, own, -0.0f);
            lane.load(weights, weight, own, 1.0f);
            if (row + 1 < end) fetch(next_gradients, next_inputs, row + 1, own);
        }
        if (row + 1 < end) fetch_stats(row + 1);
        float sums[PACK] = {}, products[PACK] = {};
        for (u32 start = own; start < columns; start = after(start)) {
            if (!HELD) fetch(gradients, inputs, row, start), lane.load(weights, weight, start, 1.0f);
            lane.each(start, [&](u32 n, u32 column) {
                UNROLLED for (u32 k = 0; k < PACK; k++) {
                    const float normed = (wide(inputs[n].values[k]) - mean) * scale;
                    const float scaled = wide(gradients[n].values[k]) * wide(weights[n].values[k]);
                    sums[k] = sums[k] + scaled;
                    products[k] = fmaf(scaled, normed, products[k]);
                }
            });
        }
        const float along_one = width == 2 ? L::row_sum(sums) / (float)columns : 0.0f;
        const float against_x = 0.0f - L::row_sum(products) / (float)columns;
        for (u32 start = own; start < columns; start = after(start)) {
            if (!HELD) {
                fetch(gradients, inputs, row, start), lane.load(weights, weight, start, 1.0f);
                lane.load(others, dresidual == nullptr ? nullptr : dresidual + first, start, -0.0f);
                lane.template move_sums<false>(dweight, of_weight, start);
                lane.template move_sums<false>(dbias, of_bias, start);
            }
            lane.each(start, [&](u32 n, u32 column) {
                float result[P::COUNT];
                UNROLLED for (u32 k = 0; k < PACK; k++) {
                    const float normed = (wide(inputs[n].values[k]) - mean) * scale;
                    const float gradient = wide(gradients[n].values[k]);
                    float &of_weight = dweight[n][k / 4].values[k % 4], &of_bias = dbias[n][k / 4].values[k % 4];
                    of_weight = fmaf(gradient, normed, of_weight);
                    of_bias = of_bias + gradient;
                    const float scaled = gradient * wide(weights[n].values[k]) - along_one;
                    result[k] = fmaf(scale, fmaf(normed, against_x, scaled), wide(others[n].values[k]));
                }
                const P stored = narrow_pack<T>(result);
                lane.store(dx + first, column, stored);
                UNROLLED for (u32 k = 0; SUMS && k < PACK / 4; k++) {
                    Pack<float> sum = passed[n][k][threadIdx.x];
                    UNROLLED for (u32 i = 0; i < 4; i++) sum.values[i] += wide(stored.values[4 * k + i]);
                    passed[n][k][threadIdx.x] = sum;
                }
            });
            if (!HELD || row + 1 == end) {
                lane.template move_sums<true>(dweight, of_weight, start);
                lane.template move_sums<true>(dbias, of_bias, start);
            }
        }
    }
    if (SUMS) {
        lane.each(own, [&](u32 n, u32 column) {
            UNROLLED for (u32 k = 0; k < PACK / 4; k++) {
                store_pack(dx_sums + blockIdx.x * columns + column, k, passed[n][k][threadIdx.x]);
            }
        });
    }
}

#define NORM(SUFFIX, T, PACKED)                                                                                        \
    KERNEL(THREADS_MAX)                                                                                                \
    norm_##SUFFIX(T* out, T* sum, float* stats, const T* x, const T* residual, const T* weight, const T* bias,         \
                  u64 rows, u64 columns, u32 width, float epsilon) {                                                   \
        if (PACKED && held<T>(columns)) {                                                                              \
            norm<PACKED, PACKED>(out, sum, stats, x, residual, weight, bias, rows, columns, width, epsilon);           \
        } else {                                                                                                       \
            norm<PACKED, false>(out, sum, stats, x, residual, weight, bias, rows, columns, width, epsilon);            \
        }                                                                                                              \
    }                                                                                                                  \
    KERNEL(THREADS_MAX)                                                                                                \
    norm_backward_##SUFFIX(T* dx, const T* dy, const T* x, const float* stats, const T* weight, const T* dresidual,    \
                           float* weight_sums, float* bias_sums, u64 rows, u64 columns, u64 block_rows, u32 width) {   \
        if (PACKED && held<T>(columns)) {                                                                              \
            norm_backward<PACKED, PACKED, false>(dx, dy, x, stats, weight, dresidual, weight_sums, bias_sums, rows,    \
                                                 columns, block_rows, width, nullptr);                                 \
        } else {                                                                                                       \
            norm_backward<PACKED, false, false>(dx, dy, x, stats, weight, dresidual, weight_sums, bias_sums, rows,     \
                                                columns, block_rows, width, nullptr);                                  \
        }                                                                                                              \
    }
#define NORMS(NAME, T) NORM(NAME, T, true) NORM(unaligned_##NAME, T, false)
FOR_F32_AND_BF16(NORMS)

KERNEL(WARP)
norm_backward_summed_bf16(bf16* dx, const bf16* dy, const bf16* x, const float* stats, const bf16* weight,
                          const bf16* dresidual, float* weight_sums, float* bias_sums, u64 rows, u64 columns,
                          u64 block_rows, u32 width, float* dx_sums) {
    norm_backward<true, true, true>(dx, dy, x, stats, weight, dresidual, weight_sums, bias_sums, rows, columns,
                                    block_rows, width, dx_sums);
}
