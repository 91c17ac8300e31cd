// adamw: see adamw.rs.
#include "chunks.cuh"

/// `Update` of adamw.rs.
struct Adamw {
    float gradient_scale, keep, step_size, second_correction, first_weight, beta2, second_weight, epsilon;
    /// Whether an element whose gradient is not finite stays as it is.
    bool guards;

    /// Whether the gradient is finite or is not looked at.
    INLINE bool step(float& value, float grad, float& first, float& second) const {
        if (guards && !is_finite(grad)) return false;
        grad = grad * gradient_scale;
        const float m = fmaf(first_weight, grad - first, first);
        const float v = fmaf(second_weight * grad, grad, beta2 * second);
        const float denominator = fmaf(sqrtf(v), second_correction, epsilon);
        first = m;
        second = v;
        value = value * keep - step_size * m / denominator;
        return true;
    }
};

KERNEL(QUANTUM_THREADS) adamw_f32(
    float* __restrict__ values, const float* __restrict__ grads, float* __restrict__ first_moments,
    float* __restrict__ second_moments, bf16* __restrict__ copies, const float* __restrict__ scalars,
    const float* __restrict__ scale, i64* flags, u32 guards, float first_weight, float beta2, float second_weight,
    float epsilon, const u64* __restrict__ table, u32 chunks, u64 offset, u64 length) {
    typedef Pack<float> P;
    const Piece piece = piece_of(blockIdx.x, table, chunks, offset, length);
    values += piece.offset, grads += piece.offset, first_moments += piece.offset, second_moments += piece.offset;
    if (copies != nullptr) copies += piece.offset;
    const bool packed = aligned(values, grads, first_moments, second_moments) && aligned<8>(copies);
    const u32 packs = packed ? piece.len / P::COUNT : 0;
    const u32 own = threadIdx.x;
    P value, grad, first, second;
    // Loaded before anything depends on the flag.
    if (own < packs) {
        grad = load_pack<P>(grads, own), first = load_pack<P>(first_moments, own);
        second = load_pack<P>(second_moments, own), value = load_pack<P>(values, own);
    }
    if (is_set(flags)) return;
    const Adamw update = {scale_of(scale), piece.decays ? scalars[0] : 1.0f, scalars[1], scalars[2],
                          first_weight, beta2, second_weight, epsilon, guards != 0};
    bool good = true;
    if (own < packs) {
        UNROLLED for (int i = 0; i < P::COUNT; i++) {
            good &= update.step(value.values[i], grad.values[i], first.values[i], second.values[i]);
        }
        store_pack(values, own, value), store_pack(first_moments, own, first), store_pack(second_moments, own, second);
        if (copies != nullptr) store_rounded(copies, own, value);
    }
    each_element(packs * P::COUNT, piece.len, [&](u32 i) {
        good &= update.step(values[i], grads[i], first_moments[i], second_moments[i]);
        if (copies != nullptr) copies[i] = Convert<bf16>::from(values[i]);
    });
    if (guards) mark_gradient(flags, good);
}
