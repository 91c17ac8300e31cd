// muon_direction and divide_by_norm: see muon.rs.
#include "chunks.cuh"

KERNEL(QUANTUM_THREADS) muon_direction_f32(
    float* __restrict__ grads, float* __restrict__ momenta, const float* __restrict__ scale,
    const i64* __restrict__ flags, float beta, float weight, u32 nesterov, const u64* __restrict__ table, u32 chunks,
    u64 offset, u64 length) {
    if (is_set(flags)) return;
    const Piece piece = piece_of(blockIdx.x, table, chunks, offset, length);
    grads += piece.offset, momenta += piece.offset;
    const float factor = scale_of(scale);
    each_element(0, piece.len, [&](u32 i) {
        const float grad = grads[i] * factor;
        const float momentum = fmaf(weight, grad - momenta[i], momenta[i]);
        momenta[i] = momentum;
        grads[i] = nesterov != 0 ? fmaf(beta, momentum - grad, grad) : momentum;
    });
}

KERNEL(BLOCK_THREADS) divide_by_norm_f32(float* x, const float* __restrict__ norm, u64 count) {
    const float divisor = norm[1] < 1e-7f ? 1e-7f : norm[1];
    map(x, x, count, [=](float x) { return x / divisor; });
}
