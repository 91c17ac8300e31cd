// dropout: see dropout.rs.
#include "common.cuh"

constexpr u64 ROWS_MAX = 1ull << 40;

/// What decides besides row and column: `Pattern` of dropout.rs.
struct Pattern {
    u32 key_0, key_1, step, layer;
    /// An element is kept when its 24 random bits are at least this.
    i32 kept_from;

    /// The bits of columns 4 block to 4 block + 3.
    INLINE uint4 bits(u64 row, u64 block) const {
        const u32 mark = 1u << 31 | layer << 8 | (u32)(row >> 32);
        return philox4x32(make_uint4((u32)block, (u32)row, mark, step), key_0, key_1);
    }

    INLINE float apply(float x, u32 bits, float scale) const {
        return (i32)(bits >> 8) >= kept_from ? x * scale : 0.0f;
    }
};

/// x and out [rows, columns]; position is [step, global row of the first row]. A thread handles the
/// columns of one pack of one row, which are whole blocks of random bits. A position out of range
/// makes all of out NaN, because a kernel cannot refuse it.
template <bool PACKED, class T>
INLINE void dropout(T* out, const T* x, const i64* position, u64 rows, u64 columns, float scale, Pattern pattern) {
    typedef Pack<T> P;
    const i64 step = position[0];
    const u64 first_row = (u64)position[1];
    const bool valid = (u64)step >> 32 == 0 && first_row <= ROWS_MAX && first_row + rows <= ROWS_MAX;
    scale = valid ? scale : nan_f32();
    pattern.kept_from = valid ? pattern.kept_from : 0;
    pattern.step = (u32)step;

    const u64 groups = (columns + P::COUNT - 1) / P::COUNT, stride = grid_threads();
    // One division, then only additions.
    const u64 rows_on = stride / groups, groups_on = stride % groups;
    u64 row = first_index() / groups, group = first_index() % groups;
    while (row < rows) {
        const u64 first = row * columns + group * P::COUNT;
        const u64 left = columns - group * P::COUNT;
        P pack;
        if (PACKED) pack = load_pack<P>(x, first / P::COUNT);
        UNROLLED for (int block = 0; block < P::COUNT / 4; block++) {
            const uint4 words = pattern.bits(first_row + row, group * (P::COUNT / 4) + block);
            const u32 bits[4] = {words.x, words.y, words.z, words.w};
            UNROLLED for (int k = 0; k < 4; k++) {
                const int i = 4 * block + k;
                if (PACKED) {
                    pack.values[i] = narrow<T>(pattern.apply(wide(pack.values[i]), bits[k], scale));
                } else if (i < left) {
                    out[first + i] = narrow<T>(pattern.apply(wide(x[first + i]), bits[k], scale));
                }
            }
        }
        if (PACKED) store_pack(out, first / P::COUNT, pack);
        row += rows_on;
        group += groups_on;
        const bool over = group >= groups;
        group -= over ? groups : 0;
        row += over;
    }
}

#define DROPOUT(NAME, T)                                                                                               \
    KERNEL(BLOCK_THREADS)                                                                                              \
    dropout_##NAME(T* out, const T* x, const i64* position, u64 rows, u64 columns, float scale, i32 kept_from,         \
                   u32 layer, u32 key_0, u32 key_1) {                                                                  \
        const Pattern pattern{key_0, key_1, 0, layer, kept_from};                                                      \
        if (aligned(out, x) && columns % Pack<T>::COUNT == 0) {                                                        \
            dropout<true>(out, x, position, rows, columns, scale, pattern);                                            \
        } else {                                                                                                       \
            dropout<false>(out, x, position, rows, columns, scale, pattern);                                           \
        }                                                                                                              \
    }
FOR_F32_AND_BF16(DROPOUT)
