// How threads meet: barriers, warp functions, fences, atomics, and loads and stores with hints.
#pragma once

// The line tells one barrier of the source from another, also where the compiler has copied or merged the calls.
#define __syncthreads() ((void)simcuda_barrier(__LINE__, simcuda::BARRIER_PLAIN, 0))
#define __syncthreads_and(predicate) ((int)simcuda_barrier(__LINE__, simcuda::BARRIER_AND, (predicate) != 0))
#define __syncthreads_or(predicate) ((int)simcuda_barrier(__LINE__, simcuda::BARRIER_OR, (predicate) != 0))
#define __syncthreads_count(predicate) ((int)simcuda_barrier(__LINE__, simcuda::BARRIER_COUNT, (predicate) != 0))

#define __SIMCUDA_HERE unsigned line = __builtin_LINE()

inline void __syncwarp(unsigned mask = 0xffffffffu, __SIMCUDA_HERE) { simcuda_warp(line, simcuda::WARP_SYNC, mask, 0, 0); }
inline unsigned __activemask() { return simcuda_active_mask(); }
inline unsigned __ballot_sync(unsigned mask, int predicate, __SIMCUDA_HERE) {
    return static_cast<unsigned>(simcuda_warp(line, simcuda::WARP_BALLOT, mask, 0, predicate != 0));
}
inline int __any_sync(unsigned mask, int predicate, __SIMCUDA_HERE) { return __ballot_sync(mask, predicate, line) != 0; }
// Not equal to the mask where lanes it names do not exist: all of the others said yes, so none said no.
inline int __all_sync(unsigned mask, int predicate, __SIMCUDA_HERE) { return __ballot_sync(mask, predicate == 0, line) == 0; }

namespace simcuda {

template <class T> inline u64 packed(T value) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    u64 bytes = 0;
    __builtin_memcpy(&bytes, &value, sizeof value);
    return bytes;
}

template <class T> inline T unpacked(u64 bytes) {
    T value;
    __builtin_memcpy(&value, &bytes, sizeof value);
    return value;
}

template <class T> inline T shuffle(unsigned line, unsigned mask, T value, int source) {
    return unpacked<T>(simcuda_warp(line, WARP_SHUFFLE, mask, static_cast<unsigned>(source), packed(value)));
}

}  // namespace simcuda

// Beyond the segment of `width` lanes a lane keeps its own value; __shfl_sync wraps within it.
template <class T> inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, __SIMCUDA_HERE) {
    int self = static_cast<int>(simcuda_lane());
    return simcuda::shuffle(line, mask, value, (self & ~(width - 1)) + (lane & (width - 1)));
}
template <class T> inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, __SIMCUDA_HERE) {
    int self = static_cast<int>(simcuda_lane()), first = self & ~(width - 1);
    return simcuda::shuffle(line, mask, value, self - static_cast<int>(delta) < first ? self : self - static_cast<int>(delta));
}
template <class T> inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, __SIMCUDA_HERE) {
    int self = static_cast<int>(simcuda_lane()), last = self | (width - 1);
    return simcuda::shuffle(line, mask, value, self + static_cast<int>(delta) > last ? self : self + static_cast<int>(delta));
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, __SIMCUDA_HERE) {
    int self = static_cast<int>(simcuda_lane()), other = self ^ lanes;
    return simcuda::shuffle(line, mask, value, other > (self | (width - 1)) ? self : other);
}
template <class T> inline unsigned __match_any_sync(unsigned mask, T value, __SIMCUDA_HERE) {
    return static_cast<unsigned>(simcuda_warp(line, simcuda::WARP_MATCH, mask, 0, simcuda::packed(value)));
}
#define SIMCUDA_REDUCE(NAME, T, OPERATION)                                              \
    inline T NAME(unsigned mask, T value, __SIMCUDA_HERE) {                             \
        return static_cast<T>(simcuda_warp(line, simcuda::OPERATION, mask, 0, static_cast<unsigned>(value))); \
    }
SIMCUDA_REDUCE(__reduce_add_sync, unsigned, WARP_ADD)
SIMCUDA_REDUCE(__reduce_add_sync, int, WARP_ADD)
SIMCUDA_REDUCE(__reduce_min_sync, unsigned, WARP_MIN)
SIMCUDA_REDUCE(__reduce_min_sync, int, WARP_MIN_SIGNED)
SIMCUDA_REDUCE(__reduce_max_sync, unsigned, WARP_MAX)
SIMCUDA_REDUCE(__reduce_max_sync, int, WARP_MAX_SIGNED)
SIMCUDA_REDUCE(__reduce_and_sync, unsigned, WARP_AND)
SIMCUDA_REDUCE(__reduce_or_sync, unsigned, WARP_OR)
SIMCUDA_REDUCE(__reduce_xor_sync, unsigned, WARP_XOR)
#undef SIMCUDA_REDUCE

// Threads run one at a time and in the order of the program: nothing to wait for. The fence is remembered, because without it
// an atomic does not publish what was written before.
inline void __threadfence() { simcuda_fence(); }
inline void __threadfence_block() {}
inline void __threadfence_system() { simcuda_fence(); }
inline void __nanosleep(unsigned) {}
inline long long clock64() { return static_cast<long long>(simcuda_clock()); }
inline int clock() { return static_cast<int>(simcuda_clock()); }

template <class T> inline T __ldg(const T* pointer) { return *static_cast<const T*>(simcuda_cached(pointer, sizeof(T))); }
template <class T> inline T __ldcs(const T* pointer) { return *pointer; }
template <class T> inline T __ldca(const T* pointer) { return *pointer; }
template <class T> inline T __ldcg(const T* pointer) { return *pointer; }
template <class T> inline T __ldlu(const T* pointer) { return *pointer; }
template <class T> inline void __stcs(T* pointer, T value) { *pointer = value; }
template <class T> inline void __stcg(T* pointer, T value) { *pointer = value; }
template <class T> inline void __stwb(T* pointer, T value) { *pointer = value; }
template <class T> inline void __stwt(T* pointer, T value) { *pointer = value; }

namespace simcuda {

template <class T> struct Same { using Type = T; };

// Reads, changes and writes as one: no other thread runs in between. Past the hook, which follows it as an atomic, the access
// itself must not be seen again as a plain one.
template <class T>
__attribute__((no_sanitize_thread, noinline)) T exchange(T* pointer, T value) {
    T old = *pointer;
    *pointer = value;
    return old;
}
template <class T>
__attribute__((no_sanitize_thread, noinline)) T look(T* pointer) {
    return *pointer;
}

template <class T, class Change> inline T atomic(T* pointer, Change change) {
    simcuda_atomic(const_cast<void*>(static_cast<const volatile void*>(pointer)), sizeof(T));
    T old = look(pointer), now = change(old);
    exchange(pointer, now);
    simcuda_order(const_cast<void*>(static_cast<const volatile void*>(pointer)), old != now);
    return old;
}

}  // namespace simcuda

// The value takes the pointer's type, as with CUDA's overloads.
#define SIMCUDA_ATOMIC(NAME, CHANGE)                                                        \
    template <class T> inline T NAME(T* pointer, typename simcuda::Same<T>::Type value) {   \
        return simcuda::atomic(pointer, [=](T old) -> T { return CHANGE; });                \
    }                                                                                       \
    template <class T> inline T NAME##_block(T* pointer, typename simcuda::Same<T>::Type value) { return NAME(pointer, value); } \
    template <class T> inline T NAME##_system(T* pointer, typename simcuda::Same<T>::Type value) { return NAME(pointer, value); }
SIMCUDA_ATOMIC(atomicAdd, old + value)
SIMCUDA_ATOMIC(atomicSub, old - value)
SIMCUDA_ATOMIC(atomicMax, old < value ? value : old)
SIMCUDA_ATOMIC(atomicMin, value < old ? value : old)
SIMCUDA_ATOMIC(atomicExch, value)
SIMCUDA_ATOMIC(atomicOr, old | value)
SIMCUDA_ATOMIC(atomicAnd, old & value)
SIMCUDA_ATOMIC(atomicXor, old ^ value)
SIMCUDA_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
SIMCUDA_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
#undef SIMCUDA_ATOMIC
template <class T>
inline T atomicCAS(T* pointer, typename simcuda::Same<T>::Type expected, typename simcuda::Same<T>::Type value) {
    return simcuda::atomic(pointer, [=](T old) -> T { return old == expected ? value : old; });
}
