// Rotary positions: see rope.rs.
#include "common.cuh"

constexpr u32 PACK = 4;

/// Turns the heads of each row, N points at a time, a block for a row.
template <int N, class T>
INLINE void rope(
    T* out, const T* x, const float* __restrict__ table, u64 rows, u64 columns, u64 heads, u64 head_size,
    u64 turned, u64 positions, float direction) {
    typedef Pack<T, N> P;
    typedef Pack<float, N> Angles;
    const u32 half = (u32)(turned / 2), packs = half / N;
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const float* angles = table + row % positions * turned;
        for (u32 i = threadIdx.x; i < (u32)heads * packs; i += blockDim.x) {
            const u32 point = i % packs * N;
            const u64 at = row * columns + (u64)(i / packs) * head_size + point;
            P left = load_pack<P>(x, at / N), right = load_pack<P>(x, (at + half) / N);
            const Angles cosines = load_pack<Angles>(angles, point / N);
            const Angles sines = load_pack<Angles>(angles, (point + half) / N);
            UNROLLED for (int k = 0; k < N; k++) {
                const float a = wide(left.values[k]), b = wide(right.values[k]);
                const float cosine = cosines.values[k], sine = direction * sines.values[k];
                left.values[k] = narrow<T>(fmaf(a, cosine, 0.0f - b * sine));
                right.values[k] = narrow<T>(fmaf(b, cosine, a * sine));
            }
            store_pack(out, at / N, left);
            store_pack(out, (at + half) / N, right);
        }
        if (out == x) continue;
        const u64 of_row = columns / N;
        for (u64 i = threadIdx.x; i < of_row; i += blockDim.x) {
            if (i * N < heads * head_size && i * N % head_size < turned) continue;
            store_pack(out, row * of_row + i, load_pack<P>(x, row * of_row + i));
        }
    }
}
#define ROPE(NAME, T)                                                                                                  \
    KERNEL(BLOCK_THREADS)                                                                                              \
    rope_##NAME(T* out, const T* x, const float* table, u64 rows, u64 columns, u64 heads, u64 head_size,               \
                u64 turned, u64 positions, float direction) {                                                          \
        const bool whole = turned / 2 % PACK == 0 && head_size % PACK == 0 && columns % PACK == 0;                     \
        IN_PACKS(PACK, whole && aligned<PACK * sizeof(T)>(out, x) && aligned<PACK * sizeof(float)>(table),             \
                 rope<N>(out, x, table, rows, columns, heads, head_size, turned, positions, direction);)               \
    }
FOR_F32_AND_BF16(ROPE)
