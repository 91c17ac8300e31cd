// swiglu and its gradient: see activation.rs.
#include "common.cuh"

constexpr u32 PACK = 4;

/// out = silu(gate) · up, N columns at a time: `count` elements of out, rows of `columns`.
template <int N, class T> INLINE void swiglu(T* __restrict__ out, const T* __restrict__ x, u64 count, u64 columns) {
    typedef Pack<T, N> P;
    const u64 packs = columns / N;
    over_matrix(count / N, packs, [=](u64 i, u64 row, u64 pack) {
        const u64 at = 2 * row * packs + pack;
        P gate = load_pack<P>(x, at);
        const P up = load_pack<P>(x, at + packs);
        UNROLLED for (int k = 0; k < N; k++) {
            float slope;
            gate.values[k] = narrow<T>(silu(wide(gate.values[k]), slope) * wide(up.values[k]));
        }
        store_pack(out, i, gate);
    });
}

/// dx = the gradients of gate and up; dx may be x.
template <int N, class T>
INLINE void swiglu_backward(T* dx, const T* __restrict__ dout, const T* x, u64 count, u64 columns) {
    typedef Pack<T, N> P;
    const u64 packs = columns / N;
    over_matrix(count / N, packs, [=](u64 i, u64 row, u64 pack) {
        const u64 at = 2 * row * packs + pack;
        P gate = load_pack<P>(x, at), up = load_pack<P>(x, at + packs);
        const P gradient = load_pack<P>(dout, i);
        UNROLLED for (int k = 0; k < N; k++) {
            float slope;
            const float value = silu(wide(gate.values[k]), slope), dy = wide(gradient.values[k]);
            gate.values[k] = narrow<T>(dy * wide(up.values[k]) * slope);
            up.values[k] = narrow<T>(dy * value);
        }
        store_pack(dx, at, gate);
        store_pack(dx, at + packs, up);
    });
}

#define SWIGLU(NAME, T)                                                                                                \
    KERNEL(BLOCK_THREADS) swiglu_##NAME(T* out, const T* x, u64 count, u64 columns) {                                  \
        IN_PACKS(PACK, columns % PACK == 0 && aligned<PACK * sizeof(T)>(out, x), swiglu<N>(out, x, count, columns);)   \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS) swiglu_backward_##NAME(T* dx, const T* dout, const T* x, u64 count, u64 columns) {           \
        IN_PACKS(PACK, columns % PACK == 0 && aligned<PACK * sizeof(T)>(dx, dout, x),                                  \
                 swiglu_backward<N>(dx, dout, x, count, columns);)                                                     \
    }
FOR_F32_AND_BF16(SWIGLU)
