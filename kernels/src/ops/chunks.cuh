// Chunk tables (chunks.rs), and what kernels over chunks share: scales, and marks of gradients that
// are not finite.
#pragma once
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

/// Quantum number `quantum`. `table` has for each chunk: [the number of quanta before it] [its
/// offset] [twice its length, plus 1 if it decays]. For a single chunk, `offset` and `length` hold
/// the last two instead.
INLINE Piece piece_of(u64 quantum, const u64* __restrict__ table, u32 chunks, u64 offset, u64 length) {
    u64 before = 0;
    if (chunks > 1) {
        // The last chunk that begins at this quantum or earlier: an empty chunk begins where the
        // next does.
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

/// Calls `each(element, index)` for a lane's elements of a piece of `x`, in ascending order. Those
/// of a whole quantum are loaded first.
template <typename Each>
INLINE void each_of_lane(const float* __restrict__ x, const Piece& piece, Each each) {
    const u32 lane = threadIdx.x % WARP;
    x += piece.offset;
    if (piece.len == QUANTUM) {
        float elements[QUANTUM / WARP];
        UNROLLED for (u32 i = 0; i < QUANTUM / WARP; i++) elements[i] = x[i * WARP + lane];
        UNROLLED for (u32 i = 0; i < QUANTUM / WARP; i++) each(elements[i], i * WARP + lane);
    } else {
        for (u32 i = lane; i < piece.len; i += WARP) each(x[i], i);
    }
}

/// The first element of a `gradient_scale` or a divisor; 1 if it is null.
INLINE float scale_of(const float* scale) { return scale == nullptr ? 1.0f : *scale; }

INLINE bool is_set(const i64* flag) { return flag != nullptr && *flag != 0; }

/// Marks in the flags of a step (STEP_FLAGS of step.rs) that a gradient is not finite. The
/// whole warp must call it. Update kernels do not read what this writes: all blocks decide alike.
/// A relaxed atomic without a fence: only later kernels read it, and a kernel's end orders that.
INLINE void mark_gradient(i64* flags, bool good) {
    if (__ballot_sync(WHOLE_WARP, !good) != 0 && threadIdx.x % WARP == 0) {
        atomicCAS(reinterpret_cast<u64*>(flags) + 1, 0ull, (u64)flags[2]);
    }
}

/// Calls `element(i)` for each i in 0..len of this thread, in a quantum's block.
template <class F> INLINE void each_element(u32 first, u32 len, F element) {
    for (u32 i = first + threadIdx.x; i < len; i += QUANTUM_THREADS) element(i);
}
