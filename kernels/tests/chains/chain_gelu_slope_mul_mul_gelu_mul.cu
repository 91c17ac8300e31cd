#include "chain.cu"

KERNEL(BLOCK_THREADS) chain_gelu_slope_mul_mul_gelu_mul(float* out0, float* out1, const float* x0, const float* x1, const float* x2, u64 count) {
for (u64 i = first_index(); i < count; i += grid_threads()) {
const float v0 = wide(x0[i]);
const float v1 = wide(x1[i]);
const float v2 = wide(x2[i]);
const float v3 = gelu_erf_grad(v1);
const float v4 = v0 * v2;
const float v5 = v4 * v3;
out0[i] = narrow<float>(v5);
const float v7 = gelu_erf(v1);
const float v8 = v0 * v7;
out1[i] = narrow<float>(v8);
}
}
