// sgd: see sgd.rs.
#include "chunks.cuh"

/// `Update` of sgd.rs.
struct Sgd {
    float gradient_scale, learning_rate, decay, factor;
    /// Whether an element whose gradient is not finite stays as it is.
    bool guards;

    /// Whether the gradient is finite or is not looked at.
    template <bool MOMENTUM, bool NESTEROV> INLINE bool step(float& value, float grad, float& momentum) const {
        if (guards && !is_finite(grad)) return false;
        grad = fmaf(decay, value, grad * gradient_scale);
        float direction = grad;
        if (MOMENTUM) {
            momentum = fmaf(factor, momentum, grad);
            direction = NESTEROV ? fmaf(factor, momentum, grad) : momentum;
        }
        value = value - learning_rate * direction;
        return true;
    }
};

template <bool MOMENTUM, bool NESTEROV> INLINE void sgd_piece(
    float* __restrict__ values, const float* __restrict__ grads, float* __restrict__ momenta,
    bf16* __restrict__ copies, const float* __restrict__ scalars, const float* __restrict__ scale, i64* flags,
    u32 guards, float factor, const Piece piece) {
    typedef Pack<float> P;
    values += piece.offset, grads += piece.offset;
    if (MOMENTUM) momenta += piece.offset;
    if (copies != nullptr) copies += piece.offset;
    const bool packed = aligned(values, grads, MOMENTUM ? momenta : values) && aligned<8>(copies);
    const u32 packs = packed ? piece.len / P::COUNT : 0;
    const u32 own = threadIdx.x;
    P value, grad, momentum;
    if (own < packs) {
        grad = load_pack<P>(grads, own), value = load_pack<P>(values, own);
        if (MOMENTUM) momentum = load_pack<P>(momenta, own);
    }
    if (is_set(flags)) return;
    const Sgd update = {scale_of(scale), scalars[0], piece.decays ? scalars[1] : 0.0f, factor, guards != 0};
    bool good = true;
    if (own < packs) {
        UNROLLED for (int i = 0; i < P::COUNT; i++) {
            good &= update.step<MOMENTUM, NESTEROV>(value.values[i], grad.values[i], momentum.values[i]);
        }
        store_pack(values, own, value);
        if (MOMENTUM) store_pack(momenta, own, momentum);
        if (copies != nullptr) store_rounded(copies, own, value);
    }
    each_element(packs * P::COUNT, piece.len, [&](u32 i) {
        float none = 0.0f;
        good &= update.step<MOMENTUM, NESTEROV>(values[i], grads[i], MOMENTUM ? momenta[i] : none);
        if (copies != nullptr) copies[i] = Convert<bf16>::from(values[i]);
    });
    if (guards) mark_gradient(flags, good);
}

#define SGD(NAME, MOMENTUM, NESTEROV)                                                                                  \
    KERNEL(QUANTUM_THREADS) sgd_##NAME##_f32(                                                                          \
        float* __restrict__ values, const float* __restrict__ grads, float* __restrict__ momenta,                      \
        bf16* __restrict__ copies, const float* __restrict__ scalars, const float* __restrict__ scale, i64* flags,     \
        u32 guards, float factor, const u64* __restrict__ table, u32 chunks, u64 offset, u64 length) {                                           \
        const Piece piece = piece_of(blockIdx.x, table, chunks, offset, length);                                       \
        sgd_piece<MOMENTUM, NESTEROV>(                                                                                 \
            values, grads, momenta, copies, scalars, scale, flags, guards, factor, piece);                             \
    }
SGD(plain, false, false)
SGD(momentum, true, false)
SGD(nesterov, true, true)
