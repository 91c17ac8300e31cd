// Writes a matrix's transpose, by the width of an element: see copy.rs.
#include "common.cuh"

constexpr int TILE = 32;
/// Rows of a tile that a block moves at a time.
constexpr int AT_ONCE = BLOCK_THREADS / TILE;

/// out [rows, columns] [r][c] = x [columns, rows] [c][r], tile by tile through shared memory, so
/// that both are accessed along their rows.
template <class T> INLINE void transpose(T* out, const T* x, u64 rows, u64 columns) {
    // One extra column, so that a column's elements are in different banks.
    __shared__ T tile[TILE][TILE + 1];
    const u32 lane = threadIdx.x % TILE, line = threadIdx.x / TILE;
    const u64 across = (columns + TILE - 1) / TILE, down = (rows + TILE - 1) / TILE;
    for (u64 index = blockIdx.x; index < across * down; index += gridDim.x) {
        const u64 first_row = index / across * TILE, first_column = index % across * TILE;
        for (u32 k = line; k < TILE; k += AT_ONCE) {
            const u64 row = first_row + lane, column = first_column + k;
            if (row < rows && column < columns) tile[k][lane] = x[column * rows + row];
        }
        __syncthreads();
        for (u32 k = line; k < TILE; k += AT_ONCE) {
            const u64 row = first_row + k, column = first_column + lane;
            if (row < rows && column < columns) out[row * columns + column] = tile[lane][k];
        }
        __syncthreads();
    }
}

#define TRANSPOSE(BYTES, T)                                                                                            \
    KERNEL(BLOCK_THREADS)                                                                                              \
    transpose_##BYTES(T* __restrict__ out, const T* __restrict__ x, u64 rows, u64 columns) {                           \
        transpose(out, x, rows, columns);                                                                              \
    }
TRANSPOSE(1, u8)
TRANSPOSE(2, u16)
TRANSPOSE(4, u32)
TRANSPOSE(8, u64)
