// What goes over the chunks of flat buffers: adamw, sgd, and the sums of squares that a norm is made of. See adamw.rs,
// sgd.rs and grad_norm.rs, whose bits these have, and chunks.rs for the table.
//
// One launch covers all chunks: a block (for the norm a warp) takes one quantum, and finds the chunk it is in by
// halving. What is read besides the buffers (table, scalars, scale, flag) stays in the first cache.
#include "common.cuh"

constexpr u32 QUANTUM = 1024;
/// A quantum is one pack a thread.
constexpr int QUANTUM_THREADS = QUANTUM / Pack<float>::COUNT;

/// A quantum of a chunk: at most QUANTUM elements.
struct Piece {
    u64 offset;
    u32 len;
    bool decays;
};

/// Quantum number `quantum`. `table` is, for each chunk: [how many quanta come before it] [its offset] [twice its
/// length, plus 1 if it decays]; the last two stand in `offset` and `length` instead where there is one chunk.
INLINE Piece piece_of(u64 quantum, const u64* __restrict__ table, u32 chunks, u64 offset, u64 length) {
    u64 before = 0;
    if (chunks > 1) {
        // The last chunk that begins at this quantum or earlier: chunks without elements begin where the next one does.
        u32 low = 0, high = chunks;
        while (high - low > 1) {
            const u32 middle = low + (high - low) / 2;
            if (table[middle] <= quantum) {
                low = middle;
            } else {
                high = middle;
            }
        }
        before = table[low];
        offset = table[chunks + low];
        length = table[2 * (u64)chunks + low];
    }
    const u64 start = (quantum - before) * QUANTUM;
    const u64 rest = (length >> 1) - start;
    return Piece{offset + start, rest < QUANTUM ? (u32)rest : QUANTUM, (length & 1) != 0};
}

/// The number in a `gradient_scale`, 1 if there is none.
INLINE float scale_of(const void* scale, u32 is_f64) {
    if (scale == nullptr) return 1.0f;
    return is_f64 ? (float)*static_cast<const double*>(scale) : *static_cast<const float*>(scale);
}

INLINE bool is_set(const i64* flag) { return flag != nullptr && *flag != 0; }

/// `element(i)` for every i in 0..len that this thread of a quantum's block has, one at a time.
template <class F> INLINE void each_element(u32 first, u32 len, F element) {
    for (u32 i = first + threadIdx.x; i < len; i += QUANTUM_THREADS) element(i);
}

// ---- the norm ------------------------------------------------------------------------------------------------------

/// partials[quantum] = the sum of squares of one quantum, in `lane_sum`'s order; a warp each.
KERNEL(BLOCK_THREADS) grad_norm_partials_f32(
    double* __restrict__ partials, const float* __restrict__ grads, u64 quanta, const u64* __restrict__ table,
    u32 chunks, u64 offset, u64 length) {
    const u64 quantum = (u64)blockIdx.x * (BLOCK_THREADS / WARP) + threadIdx.x / WARP;
    if (quantum >= quanta) return;
    const u32 lane = threadIdx.x % WARP;
    const Piece piece = piece_of(quantum, table, chunks, offset, length);
    grads += piece.offset;
    double sum = 0.0;
    // The square of an f32 is exact in f64: fused or not, the sum is the same.
    if (piece.len == QUANTUM) {
        float x[QUANTUM / WARP];
#pragma unroll
        for (u32 i = 0; i < QUANTUM / WARP; i++) x[i] = grads[i * WARP + lane];
#pragma unroll
        for (u32 i = 0; i < QUANTUM / WARP; i++) sum = fma((double)x[i], (double)x[i], sum);
    } else {
        for (u32 i = lane; i < piece.len; i += WARP) sum = fma((double)grads[i], (double)grads[i], sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) partials[quantum] = sum;
}

// ---- adamw ---------------------------------------------------------------------------------------------------------

/// `Update` of adamw.rs.
struct Adamw {
    float gradient_scale, keep, step_size, second_correction, first_weight, beta2, second_weight, epsilon;

    INLINE void step(float& value, float grad, float& first, float& second) const {
        grad = grad * gradient_scale;
        const float m = fmaf(first_weight, grad - first, first);
        const float v = fmaf(second_weight * grad, grad, beta2 * second);
        const float denominator = fmaf(sqrtf(v), second_correction, epsilon);
        first = m;
        second = v;
        value = value * keep - step_size * m / denominator;
    }
};

KERNEL(QUANTUM_THREADS) adamw_f32(
    float* __restrict__ values, const float* __restrict__ grads, float* __restrict__ first_moments,
    float* __restrict__ second_moments, const float* __restrict__ scalars, const void* __restrict__ scale,
    u32 scale_is_f64, const i64* __restrict__ first_bad_step, float first_weight, float beta2, float second_weight,
    float epsilon, const u64* __restrict__ table, u32 chunks, u64 offset, u64 length) {
    typedef Pack<float> P;
    const Piece piece = piece_of(blockIdx.x, table, chunks, offset, length);
    values += piece.offset, grads += piece.offset, first_moments += piece.offset, second_moments += piece.offset;
    const u32 packs = aligned(values, grads, first_moments, second_moments) ? piece.len / P::COUNT : 0;
    const u32 own = threadIdx.x;
    P value, grad, first, second;
    // On their way before anything depends on the flag.
    if (own < packs) {
        grad = load_pack<P>(grads, own), first = load_pack<P>(first_moments, own);
        second = load_pack<P>(second_moments, own), value = load_pack<P>(values, own);
    }
    if (is_set(first_bad_step)) return;
    const Adamw update = {scale_of(scale, scale_is_f64), piece.decays ? scalars[0] : 1.0f, scalars[1], scalars[2],
                          first_weight, beta2, second_weight, epsilon};
    if (own < packs) {
#pragma unroll
        for (int i = 0; i < P::COUNT; i++) {
            update.step(value.values[i], grad.values[i], first.values[i], second.values[i]);
        }
        store_pack(values, own, value), store_pack(first_moments, own, first), store_pack(second_moments, own, second);
    }
    each_element(packs * P::COUNT, piece.len, [&](u32 i) {
        update.step(values[i], grads[i], first_moments[i], second_moments[i]);
    });
}

// ---- sgd -----------------------------------------------------------------------------------------------------------

/// `Update` of sgd.rs.
struct Sgd {
    float gradient_scale, learning_rate, decay, factor;

    template <bool MOMENTUM, bool NESTEROV> INLINE void step(float& value, float grad, float& momentum) const {
        grad = fmaf(decay, value, grad * gradient_scale);
        float direction = grad;
        if (MOMENTUM) {
            momentum = fmaf(factor, momentum, grad);
            direction = NESTEROV ? fmaf(factor, momentum, grad) : momentum;
        }
        value = value - learning_rate * direction;
    }
};

template <bool MOMENTUM, bool NESTEROV> INLINE void sgd_piece(
    float* __restrict__ values, const float* __restrict__ grads, float* __restrict__ momenta,
    const float* __restrict__ scalars, const void* __restrict__ scale, u32 scale_is_f64,
    const i64* __restrict__ first_bad_step, float factor, const Piece piece) {
    typedef Pack<float> P;
    values += piece.offset, grads += piece.offset;
    if (MOMENTUM) momenta += piece.offset;
    const u32 packs = aligned(values, grads, MOMENTUM ? momenta : values) ? piece.len / P::COUNT : 0;
    const u32 own = threadIdx.x;
    P value, grad, momentum;
    if (own < packs) {
        grad = load_pack<P>(grads, own), value = load_pack<P>(values, own);
        if (MOMENTUM) momentum = load_pack<P>(momenta, own);
    }
    if (is_set(first_bad_step)) return;
    const Sgd update = {scale_of(scale, scale_is_f64), scalars[0], piece.decays ? scalars[1] : 0.0f, factor};
    if (own < packs) {
#pragma unroll
        for (int i = 0; i < P::COUNT; i++) {
            update.step<MOMENTUM, NESTEROV>(value.values[i], grad.values[i], momentum.values[i]);
        }
        store_pack(values, own, value);
        if (MOMENTUM) store_pack(momenta, own, momentum);
    }
    each_element(packs * P::COUNT, piece.len, [&](u32 i) {
        float none = 0.0f;
        update.step<MOMENTUM, NESTEROV>(values[i], grads[i], MOMENTUM ? momenta[i] : none);
    });
}

#define SGD(NAME, MOMENTUM, NESTEROV)                                                                                  \
    KERNEL(QUANTUM_THREADS) sgd_##NAME##_f32(                                                                          \
        float* __restrict__ values, const float* __restrict__ grads, float* __restrict__ momenta,                      \
        const float* __restrict__ scalars, const void* __restrict__ scale, u32 scale_is_f64,                           \
        const i64* __restrict__ first_bad_step, float factor, const u64* __restrict__ table, u32 chunks, u64 offset,   \
        u64 length) {                                                                                                  \
        const Piece piece = piece_of(blockIdx.x, table, chunks, offset, length);                                       \
        sgd_piece<MOMENTUM, NESTEROV>(values, grads, momenta, scalars, scale, scale_is_f64, first_bad_step, factor,    \
                                      piece);                                                                          \
    }
SGD(plain, false, false)
SGD(momentum, true, false)
SGD(nesterov, true, true)
