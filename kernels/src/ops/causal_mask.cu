// The causal mask, by the width of an element: see causal_mask.rs.
#include "common.cuh"

/// out [tokens, tokens] = hidden above the diagonal, else 0. A pack may go on in the next row.
template <class T> INLINE void causal_mask(T* out, u64 tokens, T hidden) {
    typedef Pack<T> P;
    const u64 count = tokens * tokens;
    const u64 packs = aligned(out) ? count / P::COUNT : 0;
    for (u64 i = first_index(); i < packs; i += grid_threads()) {
        u64 row = i * P::COUNT / tokens, column = i * P::COUNT % tokens;
        P pack;
#pragma unroll
        for (int k = 0; k < P::COUNT; k++) {
            pack.values[k] = column > row ? hidden : T(0);
            const bool last = ++column == tokens;
            column = last ? 0 : column;
            row += last;
        }
        store_pack(out, i, pack);
    }
    for (u64 i = packs * P::COUNT + first_index(); i < count; i += grid_threads()) {
        out[i] = i % tokens > i / tokens ? hidden : T(0);
    }
}

#define CAUSAL_MASK(BYTES, T)                                                                                          \
    KERNEL(BLOCK_THREADS) causal_mask_##BYTES(T* out, u64 tokens, u64 hidden) {                                        \
        causal_mask<T>(out, tokens, (T)hidden);                                                                        \
    }
CAUSAL_MASK(1, u8)
CAUSAL_MASK(2, u16)
CAUSAL_MASK(4, u32)
CAUSAL_MASK(8, u64)
