// The same numbers in another dtype: see cast.rs.
#include "common.cuh"

/// A thread handles 16 bytes of the wider type; only four elements when bytes are written from
/// narrow types, so that they fit one register.
template <class To, class From> INLINE void cast(To* out, const From* x, u64 count) {
    constexpr int WIDER = sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From);
    constexpr int EACH = sizeof(To) == 1 && WIDER < 4 ? 4 : 16 / WIDER;
    typedef Pack<From, EACH> In;
    typedef Pack<To, EACH> Out;
    const bool packed = aligned<sizeof(In)>(x) && aligned<sizeof(Out)>(out);
    const u64 packs = packed ? count / EACH : 0;
    for (u64 i = first_index(); i < packs; i += grid_threads()) {
        const In in = load_pack<In>(x, i);
        Out converted;
        UNROLLED for (int k = 0; k < EACH; k++) converted.values[k] = Convert<To>::from(in.values[k]);
        store_pack(out, i, converted);
    }
    for (u64 i = packs * EACH + first_index(); i < count; i += grid_threads()) out[i] = Convert<To>::from(x[i]);
}

#define CAST(FROM, From, TO, To)                                                                                       \
    KERNEL(BLOCK_THREADS)                                                                                              \
    cast_##FROM##_to_##TO(To* __restrict__ out, const From* __restrict__ x, u64 count) { cast(out, x, count); }

CAST(bf16, bf16, f32, float) CAST(f16, f16, f32, float) CAST(f64, double, f32, float) CAST(u8, u8, f32, float) CAST(i32, i32, f32, float) CAST(i64, i64, f32, float)
CAST(f32, float, bf16, bf16) CAST(f16, f16, bf16, bf16) CAST(f64, double, bf16, bf16) CAST(u8, u8, bf16, bf16) CAST(i32, i32, bf16, bf16) CAST(i64, i64, bf16, bf16)
CAST(f32, float, f16, f16) CAST(bf16, bf16, f16, f16) CAST(f64, double, f16, f16) CAST(u8, u8, f16, f16) CAST(i32, i32, f16, f16) CAST(i64, i64, f16, f16)
CAST(f32, float, f64, double) CAST(bf16, bf16, f64, double) CAST(f16, f16, f64, double) CAST(u8, u8, f64, double) CAST(i32, i32, f64, double) CAST(i64, i64, f64, double)
CAST(f32, float, u8, u8) CAST(bf16, bf16, u8, u8) CAST(f16, f16, u8, u8) CAST(f64, double, u8, u8) CAST(i32, i32, u8, u8) CAST(i64, i64, u8, u8)
CAST(f32, float, i32, i32) CAST(bf16, bf16, i32, i32) CAST(f16, f16, i32, i32) CAST(f64, double, i32, i32) CAST(u8, u8, i32, i32) CAST(i64, i64, i32, i32)
CAST(f32, float, i64, i64) CAST(bf16, bf16, i64, i64) CAST(f16, f16, i64, i64) CAST(f64, double, i64, i64) CAST(u8, u8, i64, i64) CAST(i32, i32, i64, i64)
