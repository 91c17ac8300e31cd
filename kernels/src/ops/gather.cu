// Selected rows of a table, as bytes, by the width of one access: see gather.rs.
#include "common.cuh"

/// All bits set: NaN in every float dtype, 255, −1.
template <class T> INLINE T all_ones() { return (T)~(T)0; }
template <> INLINE uint2 all_ones<uint2>() { return make_uint2(~0u, ~0u); }
template <> INLINE uint4 all_ones<uint4>() { return make_uint4(~0u, ~0u, ~0u, ~0u); }

/// out [count, words] [r] = table [table_rows, words] [rows[r]], with all bits set if the table has
/// no such row. A block's threads along x share the columns of threadIdx.y rows; blocks along x
/// share the rows, blocks along y the columns.
template <class T>
INLINE void gather_rows(T* out, const T* table, const i64* rows, u64 count, u64 words, u64 table_rows) {
    const u64 columns_at_once = (u64)gridDim.y * blockDim.x;
    const u64 rows_at_once = (u64)gridDim.x * blockDim.y;
    for (u64 r = (u64)blockIdx.x * blockDim.y + threadIdx.y; r < count; r += rows_at_once) {
        // As unsigned numbers, negative ones are beyond every table.
        const u64 row = (u64)rows[r];
        const bool there = row < table_rows;
        const T* from = table + (there ? row * words : 0ull);
        for (u64 c = (u64)blockIdx.y * blockDim.x + threadIdx.x; c < words; c += columns_at_once) {
            out[r * words + c] = there ? from[c] : all_ones<T>();
        }
    }
}

#define GATHER_ROWS(BYTES)                                                                                             \
    KERNEL(BLOCK_THREADS)                                                                                              \
    gather_rows_##BYTES(Word<BYTES>::type* __restrict__ out, const Word<BYTES>::type* __restrict__ table,              \
                        const i64* __restrict__ rows, u64 count, u64 words, u64 table_rows) {                          \
        gather_rows(out, table, rows, count, words, table_rows);                                                       \
    }
GATHER_ROWS(1)
GATHER_ROWS(2)
GATHER_ROWS(4)
GATHER_ROWS(8)
GATHER_ROWS(16)
