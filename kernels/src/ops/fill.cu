// One value everywhere, by the width of an element (create.rs), and counting (Tensor::arange).
#include "common.cuh"

/// `value` holds the element's bits in its lowest bits.
template <class T> INLINE void fill(T* out, u64 count, T value) {
    typedef Pack<T> P;
    P pack;
    UNROLLED for (int i = 0; i < P::COUNT; i++) pack.values[i] = value;
    const u64 packs = aligned(out) ? count / P::COUNT : 0;
    for (u64 i = first_index(); i < packs; i += grid_threads()) store_pack(out, i, pack);
    for (u64 i = packs * P::COUNT + first_index(); i < count; i += grid_threads()) out[i] = value;
}

#define FILL(BYTES, T)                                                                                                 \
    KERNEL(BLOCK_THREADS) fill_##BYTES(T* out, u64 count, u64 value) { fill<T>(out, count, (T)value); }
FILL(1, u8)
FILL(2, u16)
FILL(4, u32)
FILL(8, u64)

#define ARANGE(NAME, T)                                                                                                \
    KERNEL(BLOCK_THREADS) arange_##NAME(T* out, u64 count) {                                                           \
        for (u64 i = first_index(); i < count; i += grid_threads()) out[i] = Convert<T>::from((double)i);              \
    }
FOR_F32_AND_BF16(ARANGE)
ARANGE(f16, f16)
ARANGE(f64, double)
ARANGE(u8, u8)
ARANGE(i32, i32)
ARANGE(i64, i64)
