// add_in_order: see add_in_order.rs.
#include "common.cuh"

/// Sums that are left at a time: DEPTH of add_in_order.rs.
constexpr int DEPTH = 10;

/// Adds pack `i` of N elements of all parts. `left` are this thread's sums, a block apart.
template <int N, class T>
INLINE void add_pack(T* out, const T* others, const T* rows, const i32* order, u64 parts, u64 count, u64 stride, u64 i,
                     Pack<T>* left) {
    typedef Pack<T, N> P;
    P sum;
    u32 depth = 0;
    for (u64 part = 0; part < parts; part++) {
        const i32 word = order[part], source = word & 3;
        sum = load_pack<P>(source == 0 ? others : source == 1 ? rows : out, i);
        if (source == 0) others += count;
        if (source == 1) rows += stride;
        for (i32 additions = word >> 2; additions > 0; additions--) {
            depth--;
#pragma unroll
            for (int k = 0; k < N; k++) {
                sum.values[k] = narrow<T>(wide(left[depth * BLOCK_THREADS].values[k]) + wide(sum.values[k]));
            }
        }
#pragma unroll
        for (int k = 0; k < N; k++) left[depth * BLOCK_THREADS].values[k] = sum.values[k];
        depth++;
    }
    store_pack(out, i, sum);
}

#define ADD_IN_ORDER(NAME, T)                                                                                          \
    KERNEL(BLOCK_THREADS)                                                                                              \
    add_in_order_##NAME(T* out, const T* others, const T* rows, const i32* order, u64 parts, u64 count, u64 stride) {  \
        constexpr u64 PACK = Pack<T>::COUNT;                                                                           \
        __shared__ Pack<T> left[DEPTH * BLOCK_THREADS];                                                                \
        Pack<T>* mine = left + threadIdx.x;                                                                            \
        const bool packed = aligned(out, others, rows) && count % PACK == 0 && stride % PACK == 0;                     \
        const u64 packs = packed ? count / PACK : 0;                                                                   \
        for (u64 i = first_index(); i < packs; i += grid_threads())                                                    \
            add_pack<PACK>(out, others, rows, order, parts, count, stride, i, mine);                                   \
        for (u64 i = packs * PACK + first_index(); i < count; i += grid_threads())                                     \
            add_pack<1>(out, others, rows, order, parts, count, stride, i, mine);                                      \
    }
FOR_F32_AND_BF16(ADD_IN_ORDER)
