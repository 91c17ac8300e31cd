#include "chain.cu"

KERNEL(BLOCK_THREADS) chain_mul_row_max_sub_exp_row_sum_add_div(bf16* out0, const float* x0, u64 count) {
const u64 row = row_of_warp(), lane = threadIdx.x % WARP;
if (row >= count) return;
const float v1 = __uint_as_float(1040187392u);
float v3 = -infinity();
for (u64 i = row * 1024 + lane; i < (row + 1) * 1024; i += WARP) {
const float v0 = wide(x0[i]);
const float v2 = v0 * v1;
v3 = Largest()(v3, v2);
}
v3 = 0.0f + warp_max(v3);
float v6 = 0.0f;
for (u64 i = row * 1024 + lane; i < (row + 1) * 1024; i += WARP) {
const float v0 = wide(x0[i]);
const float v2 = v0 * v1;
const float v4 = v2 - v3;
const float v5 = exponential(v4);
v6 = v6 + v5;
}
v6 = warp_sum(v6);
const float v7 = __uint_as_float(814313567u);
const float v8 = v6 + v7;
for (u64 i = row * 1024 + lane; i < (row + 1) * 1024; i += WARP) {
const float v0 = wide(x0[i]);
const float v2 = v0 * v1;
const float v4 = v2 - v3;
const float v5 = exponential(v4);
const float v9 = v5 / v8;
out0[i] = narrow<bf16>(v9);
}
}
