// Elementwise chains: chain.rs writes a kernel for each below these functions.
#include "common.cuh"

INLINE float silu_of(float x) {
    float slope;
    return silu(x, slope);
}

INLINE float silu_slope(float x) {
    float slope;
    silu(x, slope);
    return slope;
}

/// The kernel of this thread's warp: the number of its row.
INLINE u64 row_of_warp() { return first_index() / WARP; }
