// progress: see progress.rs.
#include "common.cuh"

/// The device's own words of a lane: how many calls began, and a hash of all of them.
struct Lane {
    u64 begun, chain;
};

/// The report of call `number`, in a slot of three words. Each has the number in its upper half, so
/// that a host that reads in between sees which words belong together. Volatile stores are relaxed
/// ones of scope sys: each word arrives whole and soon, in any order with the others.
INLINE void tell(volatile u64* slot, u64 number, u32 call, u64 chain, u32 place) {
    slot[0] = number << 32 | call;
    slot[1] = number << 32 | (chain & 0xffffffffu);
    slot[2] = number << 32 | place;
}

/// A call begins. `board` is host memory: the ring of the last `slots` calls, the ring of every
/// `stride`th call (`sparse_slots`; both are powers of two), then the number of the last call
/// begun.
KERNEL(1) progress_begin(Lane* lane, volatile u64* board, u64 slots, u64 stride, u64 sparse_slots, u32 call, u32 place) {
    const u64 number = (lane->begun + 1u) & 0xffffffffu;
    u64 chain = (lane->chain ^ call) * 0x9e3779b97f4a7c15ull;
    chain ^= chain >> 29;
    lane->begun = number;
    lane->chain = chain;
    tell(board + number % slots * 3u, number, call, chain, place);
    if (number % stride == 0u) {
        tell(board + (slots + number / stride % sparse_slots) * 3u, number, call, chain, place);
    }
    // No fence, so the host may see this number before its slot: it takes a slot only whole, and a
    // missing one means "not yet". Nothing else is read because of these words.
    board[(slots + sparse_slots) * 3u] = number << 32 | call;
}

/// The lane's last call ended. The stream orders it after that call; the host reads no results of
/// the call because of it (it waits for events), so it releases nothing.
KERNEL(1) progress_end(const Lane* lane, volatile u64* ended) { *ended = lane->begun; }
