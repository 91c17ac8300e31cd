// causal_mask: see causal_mask.rs.
#include "common.cuh"

/// out (T, T) = -infinity above the diagonal, else 0. A pack may end in the next row.
template <class T> INLINE void causal_mask(T* out, u64 tokens) {
    typedef Pack<T> P;
    const T zero = narrow<T>(0.0f), hidden = narrow<T>(-infinity());
    const u64 count = tokens * tokens;
    const u64 packs = aligned(out) ? count / P::COUNT : 0;
    for (u64 i = first_index(); i < packs; i += grid_threads()) {
        u64 row = i * P::COUNT / tokens, column = i * P::COUNT % tokens;
        P pack;
#pragma unroll
        for (int k = 0; k < P::COUNT; k++) {
            pack.values[k] = column > row ? hidden : zero;
            const bool last = ++column == tokens;
            column = last ? 0 : column;
            row += last;
        }
        store_pack(out, i, pack);
    }
    for (u64 i = packs * P::COUNT + first_index(); i < count; i += grid_threads()) {
        out[i] = i % tokens > i / tokens ? hidden : zero;
    }
}

#define CAUSAL_MASK(NAME, T)                                                                       \
    KERNEL(BLOCK_THREADS) causal_mask_##NAME(T* out, u64 tokens) { causal_mask(out, tokens); }
FOR_F32_AND_BF16(CAUSAL_MASK)
