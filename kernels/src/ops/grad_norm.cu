// clip_scale: see grad_norm.rs. (grad_norm_partials goes over a chunk table: chunks.cu.)
#include "common.cuh"

constexpr u32 CLIP_THREADS = 512;
constexpr u32 PER_THREAD = 8;
constexpr u32 TILE = CLIP_THREADS * PER_THREAD;

/// The next tile of partials, zeros behind their end: adding those changes nothing.
INLINE void fetch(double (&tile)[PER_THREAD], const double* __restrict__ partials, u64 start, u64 count) {
#pragma unroll
    for (u32 i = 0; i < PER_THREAD; i++) {
        const u64 index = start + i * CLIP_THREADS + threadIdx.x;
        tile[i] = index < count ? partials[index] : 0.0;
    }
}

/// out = [scale, norm], by one block. The order of the sum is `lane_sum`'s, so one warp adds; the others keep it fed.
KERNEL(CLIP_THREADS) clip_scale_f32(
    float* __restrict__ out, const double* __restrict__ partials, u64 count, double max_norm,
    const void* __restrict__ divisor, u32 divisor_is_f64) {
    __shared__ double tile[TILE];
    double next[PER_THREAD];
    double lane = 0.0;
    fetch(next, partials, 0, count);
    for (u64 start = 0; start < count; start += TILE) {
#pragma unroll
        for (u32 i = 0; i < PER_THREAD; i++) tile[i * CLIP_THREADS + threadIdx.x] = next[i];
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
    double rows = 1.0;
    if (divisor != nullptr) {
        rows = divisor_is_f64 ? *static_cast<const double*>(divisor) : (double)*static_cast<const float*>(divisor);
    }
    const double mean = rows == 0.0 ? 0.0 : 1.0 / rows;
    const double norm = mean * sqrt(sum);
    const double limit = max_norm / (norm + 1e-6);
    const double scale = max_norm == 0.0 || limit > 1.0 ? mean : mean * limit;
    out[0] = (float)scale;
    out[1] = (float)norm;
}
