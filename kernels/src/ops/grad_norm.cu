// grad_norm_partials and clip_scale: see step.rs.
#include "chunks.cuh"

/// partials[quantum] = the sum of squares of one quantum, in `lane_sum`'s order; one warp each.
KERNEL(BLOCK_THREADS) grad_norm_partials_f32(
    double* __restrict__ partials, const float* __restrict__ grads, u64 quanta, const u64* __restrict__ table,
    u32 chunks, u64 offset, u64 length) {
    const u64 quantum = (u64)blockIdx.x * (BLOCK_THREADS / WARP) + threadIdx.x / WARP;
    if (quantum >= quanta) return;
    double sum = 0.0;
    // The square of an f32 is exact in f64, so fused or not the sum is the same.
    each_of_lane(grads, piece_of(quantum, table, chunks, offset, length),
                 [&](float x, u32) { sum = fma((double)x, (double)x, sum); });
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) partials[quantum] = sum;
}

constexpr u32 CLIP_THREADS = 512;
constexpr u32 PER_THREAD = 8;
constexpr u32 TILE = CLIP_THREADS * PER_THREAD;

/// The next tile of partials, padded with zeros, which change no sum.
INLINE void fetch(double (&tile)[PER_THREAD], const double* __restrict__ partials, u64 start, u64 count) {
    UNROLLED for (u32 i = 0; i < PER_THREAD; i++) {
        const u64 index = start + i * CLIP_THREADS + threadIdx.x;
        tile[i] = index < count ? partials[index] : 0.0;
    }
}

/// `mark` of step.rs. A step that ends after the stop word was set does not count, because its
/// gradients are garbage, nor does one for which a rank is not ready.
///
/// The host stores `stop` before it aborts NCCL, and kernels whose results that makes garbage end
/// because they saw the abort. The stream orders this kernel after them, so it sees `stop`, too: a
/// volatile load is relaxed and of scope sys, past all caches.
INLINE void mark(
    i64* flags, i64* own, const float* stats, u64 stats_count, i64 step, bool good, const float* stopped,
    const volatile u64* stop) {
    if (flags[0] < 0 || (stop != nullptr && *stop != 0) || (stopped != nullptr && *stopped != 0.0f)) {
        if (flags[0] == 0) flags[0] = -1;
        return;
    }
    bool stats_good = true;
    for (u64 i = 0; i < stats_count; i++) stats_good = stats_good && is_finite(stats[i]);
    if (own != nullptr && *own == 0 && !stats_good) *own = step;
    if (flags[0] == 0) flags[0] = flags[1] != 0 ? flags[1] : good && stats_good ? 0 : step;
    flags[2] = step;
}

/// out = [scale, norm], by one block. One warp adds, in `lane_sum`'s order; the others load.
KERNEL(CLIP_THREADS) clip_scale_f32(
    float* __restrict__ out, const double* __restrict__ partials, u64 count, double max_norm,
    const float* __restrict__ divisor, i64* flags, i64* own, const float* __restrict__ stats, u64 stats_count,
    const i64* __restrict__ step, const float* __restrict__ stopped, const volatile u64* stop) {
    __shared__ double tile[TILE];
    double next[PER_THREAD];
    double lane = 0.0;
    fetch(next, partials, 0, count);
    for (u64 start = 0; start < count; start += TILE) {
        UNROLLED for (u32 i = 0; i < PER_THREAD; i++) tile[i * CLIP_THREADS + threadIdx.x] = next[i];
        __syncthreads();
        fetch(next, partials, start + TILE, count);
        if (threadIdx.x < WARP) {
#pragma unroll 16
            for (u32 i = threadIdx.x; i < TILE; i += WARP) lane = lane + tile[i];
        }
        __syncthreads();
    }
    if (threadIdx.x >= WARP) return;
    const double sum = warp_sum(lane);
    if (threadIdx.x > 0) return;
    const double rows = scale_of(divisor);
    const double mean = rows == 0.0 ? 0.0 : 1.0 / rows;
    const double norm = mean * sqrt(sum);
    const double limit = max_norm / (norm + 1e-6);
    const double scale = max_norm == 0.0 || limit > 1.0 ? mean : mean * limit;
    out[0] = (float)scale;
    out[1] = (float)norm;
    const bool good = is_finite((float)scale) && is_finite((float)norm);
    if (flags != nullptr) mark(flags, own, stats, stats_count, *step, good, stopped, stop);
}
