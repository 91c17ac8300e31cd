// mark_nonfinite: see step.rs.
#include "common.cuh"

/// As integers without sign, NaN and infinities are larger than all other floats.
constexpr u32 INFINITY_BITS = 0x7f800000u;
constexpr int PACKS = 4;

INLINE u32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
INLINE u32 larger(u32 a, u32 b) { return a > b ? a : b; }

KERNEL(BLOCK_THREADS) mark_nonfinite_f32(
    i64* first_bad_step, const float* __restrict__ x, u64 count, const i64* __restrict__ step) {
    typedef Pack<float> P;
    // Up to three elements before the first multiple of 16 bytes.
    const u64 before = (0 - reinterpret_cast<u64>(x) / sizeof(float)) % P::COUNT;
    const u64 head = before < count ? before : count;
    const u64 packs = (count - head) / P::COUNT;
    const u64 first = first_index(), stride = grid_threads();
    u32 largest = 0;
    for (u64 at = first; at < packs; at += PACKS * stride) {
        P pack[PACKS];
        UNROLLED for (int k = 0; k < PACKS; k++) {
            // Past the end, this thread's first element again, which changes nothing.
            pack[k] = load_pack<P>(x + head, at + k * stride < packs ? at + k * stride : at);
        }
        UNROLLED for (int k = 0; k < PACKS; k++) {
            UNROLLED for (int i = 0; i < P::COUNT; i++) largest = larger(largest, magnitude(pack[k].values[i]));
        }
    }
    if (first < head) largest = larger(largest, magnitude(x[first]));
    for (u64 i = head + packs * P::COUNT + first; i < count; i += stride) largest = larger(largest, magnitude(x[i]));
    // All threads would write the same value. Relaxed, without a fence: only later kernels read it.
    if (__ballot_sync(WHOLE_WARP, largest >= INFINITY_BITS) != 0 && threadIdx.x % WARP == 0) {
        atomicCAS(reinterpret_cast<u64*>(first_bad_step), 0ull, (u64)*step);
    }
}
