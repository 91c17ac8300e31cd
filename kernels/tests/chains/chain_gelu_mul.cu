#include "chain.cu"

KERNEL(BLOCK_THREADS) chain_gelu_mul(bf16* out0, const bf16* x0, const bf16* x1, u64 count) {
for (u64 i = first_index(); i < count; i += grid_threads()) {
const float v0 = wide(x0[i]);
const float v1 = wide(x1[i]);
const float v2 = Gelu<float>::value(v0);
const float v3 = v2 * v1;
out0[i] = narrow<bf16>(v3);
}
}
