// One step of an optimizer over chunks, whatever its rule: see update.rs.
#pragma once
#include "chunks.cuh"

// What the texts of rules are written in, besides arithmetic and what formulas.rs names.
#define let const float

/// What a rule reads besides an element's own numbers.
struct StepNumbers {
    float scalars[4], constants[4];
    /// Whether weight decay applies to this chunk.
    bool decays;
};

/// A block's quantum. RULE::STATE is the number of buffers that change, RULE::SCALARS that of
/// scalars. A rule without scalars replaces the gradients: they are the first of `state`.
template <class RULE> INLINE void update(
    float* (&state)[3], const float* grads, bf16* copies, const float* scalars, const float* scale, i64* flags,
    bool guards, StepNumbers of, const Piece& piece) {
    typedef Pack<float> P;
    constexpr int STATE = RULE::STATE;
    u64 places = 0;
    UNROLLED for (int k = 0; k < STATE; k++) places |= reinterpret_cast<u64>(state[k] += piece.offset);
    if (RULE::SCALARS != 0) places |= reinterpret_cast<u64>(grads += piece.offset);
    if (copies != nullptr) copies += piece.offset;
    const bool packed = (places & 15) == 0 && aligned<8>(copies);
    const u32 packs = packed ? piece.len / P::COUNT : 0;
    const u32 own = threadIdx.x;
    P pack[STATE], grad;
    // Loaded before anything depends on the flag.
    if (own < packs) {
        UNROLLED for (int k = 0; k < STATE; k++) pack[k] = load_pack<P>(state[k], own);
        grad = RULE::SCALARS != 0 ? load_pack<P>(grads, own) : pack[0];
    }
    if (is_set(flags)) return;
    UNROLLED for (int k = 0; k < RULE::SCALARS; k++) of.scalars[k] = scalars[k];
    of.decays = piece.decays;
    const float gradient_scale = scale_of(scale);
    bool good = true;
    const auto step = [&](float (&x)[STATE], float grad) {
        if (guards && !is_finite(grad)) {
            good = false;
        } else {
            RULE::step(x, grad * gradient_scale, of);
        }
    };
    if (own < packs) {
        UNROLLED for (int i = 0; i < P::COUNT; i++) {
            float x[STATE];
            UNROLLED for (int k = 0; k < STATE; k++) x[k] = pack[k].values[i];
            step(x, grad.values[i]);
            UNROLLED for (int k = 0; k < STATE; k++) pack[k].values[i] = x[k];
        }
        UNROLLED for (int k = 0; k < STATE; k++) store_pack(state[k], own, pack[k]);
        if (copies != nullptr) store_rounded(copies, own, pack[0]);
    }
    each_element(packs * P::COUNT, piece.len, [&](u32 i) {
        float x[STATE];
        UNROLLED for (int k = 0; k < STATE; k++) x[k] = state[k][i];
        step(x, RULE::SCALARS != 0 ? grads[i] : x[0]);
        UNROLLED for (int k = 0; k < STATE; k++) state[k][i] = x[k];
        if (copies != nullptr) copies[i] = Convert<bf16>::from(x[0]);
    });
    if (guards) mark_gradient(flags, good);
}

/// A rule's kernel. Buffers that the rule does not have are null.
#define UPDATE(NAME, ...)                                                                                              \
    KERNEL(QUANTUM_THREADS) NAME(                                                                                      \
        float* __restrict__ values, const float* __restrict__ grads, float* __restrict__ first,                        \
        float* __restrict__ second, bf16* __restrict__ copies, const float* __restrict__ scalars,                      \
        const float* __restrict__ scale, i64* flags, u32 guards, float a, float b, float c, float d,                   \
        const u64* __restrict__ table, u32 chunks, u64 offset, u64 length) {                                           \
        float* state[] = {values, first, second};                                                                      \
        const Piece piece = piece_of(blockIdx.x, table, chunks, offset, length);                                       \
        update<__VA_ARGS__>(state, grads, copies, scalars, scale, flags, guards != 0, {{}, {a, b, c, d}}, piece);      \
    }
