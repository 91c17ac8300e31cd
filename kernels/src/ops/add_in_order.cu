// add_in_order: see sum.rs.
#include "common.cuh"

/// Sums that are left at a time: DEPTH of sum.rs.
constexpr int DEPTH = 10;

/// Adds pack `i` of N elements of all parts. A word of `order` is as in sum.rs. `memory`
/// is for the sums that are left in each thread.
template <int N, class T>
INLINE void add_pack(T* out, const T* others, const T* rows, const i32* order, u64 parts, u64 count, u64 stride, u64 i,
                     void* memory) {
    typedef Pack<T, N> P;
    P* left = static_cast<P*>(memory) + threadIdx.x;
    P sum;
    u32 depth = 0;
    for (u64 part = 0; part < parts; part++) {
        const i32 word = order[part], source = word & 3;
        sum = load_pack<P>(source == 0 ? others : source == 1 ? rows : out, i);
        if (source == 0) others += count;
        if (source == 1) rows += stride;
        for (i32 additions = word >> 2; additions > 0; additions--) {
            const P before = load_pack<P>(left, --depth * BLOCK_THREADS);
            UNROLLED for (int k = 0; k < N; k++)
                sum.values[k] = narrow<T>(wide(before.values[k]) + wide(sum.values[k]));
        }
        store_pack(left, depth++ * BLOCK_THREADS, sum);
    }
    store_pack(out, i, sum);
}

#define ADD_IN_ORDER(NAME, T)                                                                                          \
    KERNEL(BLOCK_THREADS)                                                                                              \
    add_in_order_##NAME(T* out, const T* others, const T* rows, const i32* order, u64 parts, u64 count, u64 stride) {  \
        constexpr u64 PACK = Pack<T>::COUNT;                                                                           \
        __shared__ Pack<T> left[DEPTH * BLOCK_THREADS];                                                                \
        const bool packed = aligned(out, others, rows) && count % PACK == 0 && stride % PACK == 0;                     \
        if (packed) {                                                                                                  \
            for (u64 i = first_index(); i < count / PACK; i += grid_threads())                                         \
                add_pack<PACK>(out, others, rows, order, parts, count, stride, i, left);                               \
        } else {                                                                                                       \
            for (u64 i = first_index(); i < count; i += grid_threads())                                                \
                add_pack<1>(out, others, rows, order, parts, count, stride, i, left);                                  \
        }                                                                                                              \
    }
FOR_F32_AND_BF16(ADD_IN_ORDER)
