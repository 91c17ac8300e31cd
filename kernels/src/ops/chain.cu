// Elementwise chains: chain.rs writes a kernel for each below these functions.
#include "common.cuh"

/// As `Math::tanh` in chain/cpu.rs.
INLINE float hyperbolic_tangent(float x) {
    const float size = fabsf(x), square = x * x;
    const float odd = polynomial(square, -0.0057049887f, 0.020639088f, -0.053739715f,
                                 0.13331442f, -0.3333328f);
    const float near = fmaf(odd * square, x, x);
    const float tail = 1.0f - 2.0f / (exponential(2.0f * size) + 1.0f);
    const float far = x < 0.0f ? -tail : tail;
    return size < 0.625f ? near : far;
}

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
