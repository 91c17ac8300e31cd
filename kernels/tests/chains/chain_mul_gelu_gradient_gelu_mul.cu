#include "chain.cu"

KERNEL(BLOCK_THREADS) chain_mul_gelu_gradient_gelu_mul(float* out0, float* out1, const float* x0, const float* x1, const float* x2, u64 count) {
for (u64 i = first_index(); i < count; i += grid_threads()) {
const float v0 = wide(x0[i]);
const float v1 = wide(x1[i]);
const float v2 = wide(x2[i]);
const float v3 = v0 * v2;
const float v4 = Gelu<float>::chain(v3, v1);
out0[i] = narrow<float>(v4);
const float v6 = Gelu<float>::value(v1);
const float v7 = v0 * v6;
out1[i] = narrow<float>(v7);
}
}
