// digest_quanta: see digest.rs.
#include "chunks.cuh"

/// The key of an element of a quantum: `digest_mix` of digest.rs, made odd.
INLINE u64 key_of(u32 index) {
    u64 x = ((u64)index + 1) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return (x ^ (x >> 31)) | 1;
}

/// out[3 quantum] = hash, sum and sum of squares of one quantum; one warp each.
KERNEL(BLOCK_THREADS) digest_quanta_f32(
    i64* __restrict__ out, const float* __restrict__ x, u64 quanta, const u64* __restrict__ table, u32 chunks,
    u64 offset, u64 length) {
    const u64 quantum = (u64)blockIdx.x * (BLOCK_THREADS / WARP) + threadIdx.x / WARP;
    if (quantum >= quanta) return;
    u64 hash = 0;
    double sum = 0.0, squares = 0.0;
    each_of_lane(x, piece_of(quantum, table, chunks, offset, length), [&](float element, u32 index) {
        // The square of an f32 is exact in f64.
        const double wide = (double)element;
        const u64 bits = (u64)__double_as_longlong(wide);
        hash += (bits >> 29 | bits << 35) * key_of(index);
        sum = sum + wide;
        squares = fma(wide, wide, squares);
    });
    hash = warp_sum(hash);
    sum = warp_sum(sum);
    squares = warp_sum(squares);
    if (threadIdx.x % WARP > 0) return;
    out[3 * quantum] = (i64)hash;
    out[3 * quantum + 1] = __double_as_longlong(sum);
    out[3 * quantum + 2] = __double_as_longlong(squares);
}
