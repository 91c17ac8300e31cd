// copy_valid: see step.rs.
#include "common.cuh"

/// out = x, unless the flags or the stop word say that the step has no result. Only the first block
/// may vote, so what it copies and its vote agree.
KERNEL(BLOCK_THREADS) copy_valid_f32(
    float* __restrict__ out, const float* __restrict__ x, u64 count, const i64* __restrict__ flags, float* vote,
    const volatile u64* stop) {
    __shared__ u32 is_over;
    if (threadIdx.x == 0) {
        const bool is_stopped = flags[0] < 0 || (stop != nullptr && *stop != 0);
        is_over = is_stopped || flags[0] != 0;
        if (vote != nullptr) *vote = is_stopped ? 1.0f : 0.0f;
    }
    __syncthreads();
    if (is_over) return;
    for (u64 i = first_index(); i < count; i += grid_threads()) out[i] = x[i];
}
