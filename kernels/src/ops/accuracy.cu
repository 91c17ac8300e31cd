// accuracy: see accuracy.rs.
#include "common.cuh"

/// An index of 1, 4 or 8 bytes: u8, i32 or i64.
INLINE i64 index_at(const void* indices, u32 bytes, u64 i) {
    if (bytes == 1) return static_cast<const u8*>(indices)[i];
    if (bytes == 4) return static_cast<const i32*>(indices)[i];
    return static_cast<const i64*>(indices)[i];
}

/// Whether `target` is the first of the largest of a row, with NaN above everything. The whole warp
/// gets the same result.
template <class T> INLINE bool is_argmax(const T* __restrict__ logits, u64 classes, u64 target) {
    const float largest = wide(logits[target]);
    const bool any_is_less = !is_nan(largest);
    bool fits = true;
#pragma unroll 4
    for (u64 i = threadIdx.x % WARP; i < classes; i += WARP) {
        const float x = wide(logits[i]);
        // Nothing before the target may be as large, and nothing after it larger. Only an earlier
        // NaN beats a NaN; a NaN elsewhere fails both comparisons.
        const bool good = i < target ? (any_is_less ? x < largest : !is_nan(x)) : (any_is_less ? x <= largest : true);
        fits = fits && good;
    }
    return __ballot_sync(WHOLE_WARP, !fits) == 0;
}

/// out = [0, 0], to which the next kernel adds.
KERNEL(WARP) accuracy_zero(i64* out) {
    if (threadIdx.x < 2) out[threadIdx.x] = 0;
}

/// out += [right, counted] over the rows, one per warp. An invalid target counts and is never
/// right.
template <class T>
INLINE void count_rows(
    i64* out, const T* __restrict__ logits, const void* __restrict__ targets, u32 target_bytes, u64 rows, u64 classes,
    i64 ignore_index, u32 ignores) {
    __shared__ u32 counts[2][BLOCK_THREADS / WARP];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 right = 0, counted = 0;
    for (u64 row = first_index() / WARP; row < rows; row += grid_threads() / WARP) {
        const i64 target = index_at(targets, target_bytes, row);
        if (ignores && target == ignore_index) continue;
        counted++;
        const bool is_class = target >= 0 && (u64)target < classes;
        if (is_class && is_argmax(logits + row * classes, classes, (u64)target)) right++;
    }
    if (lane == 0) counts[0][warp] = right, counts[1][warp] = counted;
    __syncthreads();
    if (threadIdx.x >= 2) return;
    u64 total = 0;
    for (u32 i = 0; i < BLOCK_THREADS / WARP; i++) total += counts[threadIdx.x][i];
    // Integers: their sum is the same in any order.
    atomicAdd(reinterpret_cast<u64*>(out) + threadIdx.x, total);
}

#define ACCURACY(NAME, T)                                                                                              \
    KERNEL(BLOCK_THREADS) accuracy_##NAME(                                                                             \
        i64* out, const T* logits, const void* targets, u32 target_bytes, u64 rows, u64 classes, i64 ignore_index,     \
        u32 ignores) {                                                                                                 \
        count_rows(out, logits, targets, target_bytes, rows, classes, ignore_index, ignores);                          \
    }
FOR_F32_AND_BF16(ACCURACY)
