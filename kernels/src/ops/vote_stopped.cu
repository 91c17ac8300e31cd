// vote_stopped: see step.rs.
#include "common.cuh"

/// Whether steps were stopped, by the flags of the last one or by the stop word.
KERNEL(1) vote_stopped_f32(float* vote, const i64* __restrict__ flags, const volatile u64* stop) {
    *vote = flags[0] < 0 || (stop != nullptr && *stop != 0) ? 1.0f : 0.0f;
}
