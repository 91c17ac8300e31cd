// progress: see progress.rs.
#include "common.cuh"

/// The device's own words of a lane: how many calls it has begun, and a hash of all of them.
struct Lane {
    u64 begun, chain;
};

/// A call begins. `board` is host memory: the ring of the lane (SLOTS x 3 words), then the word of the last call that began. Each word
/// carries the number of its call in the upper half, so that a host that reads in the middle sees which words belong together.
KERNEL(1) progress_begin(Lane* lane, volatile u64* board, u64 slots, u32 call, u32 place) {
    const u64 number = (lane->begun + 1u) & 0xffffffffu;
    u64 chain = (lane->chain ^ call) * 0x9e3779b97f4a7c15ull;
    chain ^= chain >> 29;
    lane->begun = number;
    lane->chain = chain;
    volatile u64* slot = board + number % slots * 3u;
    slot[0] = number << 32 | call;
    slot[1] = number << 32 | (chain & 0xffffffffu);
    slot[2] = number << 32 | place;
    // What the host reads last it may read first.
    __threadfence_system();
    board[slots * 3u] = number << 32 | call;
}

/// The lane's last call has ended.
KERNEL(1) progress_end(const Lane* lane, volatile u64* ended) { *ended = lane->begun; }
