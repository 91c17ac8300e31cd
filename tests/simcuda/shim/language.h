// CUDA C++ as g++ sees it: put in front of every kernel source. No host header comes with it, as with NVRTC.
// src/nvrtc/rewrite.rs has already replaced __shared__ and `extern __shared__`.
#pragma once
#include "runtime.h"

typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __inline__ inline
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __builtin_assume(condition) ((void)0)
#define NULL nullptr
#define CUDART_INF_F __builtin_inff()
#define CUDART_NAN_F __builtin_nanf("")

#include "vectors.h"

#pragma GCC visibility push(hidden)
extern "C" {
// Constant while one thread looks, and therefore not instrumented.
extern const uint3 threadIdx, blockIdx;
extern const dim3 blockDim, gridDim;
}
#pragma GCC visibility pop
static const int warpSize = 32;

#include "numbers.h"
#include "threads.h"
#include "ptx.h"

// g++ does not instrument what it inlines of these.
#define memcpy simcuda_memcpy
#define memmove simcuda_memcpy
#define memset simcuda_memset
#define __trap() simcuda_trap(__LINE__)
#ifdef NDEBUG
#define assert(condition) ((void)0)
#else
#define assert(condition) ((condition) ? (void)0 : simcuda_assert(#condition, __LINE__))
#endif
extern "C" int printf(const char* format, ...);

// ---- the table of kernels (written by src/nvrtc/rewrite.rs behind the source) ----

namespace simcuda {

// A static shared variable. Its margins are in no window, so an access there is an access out of bounds.
template <class T> struct Shared {
    u8 before[shared_margin_bytes];
    T value;
    u8 after[shared_margin_bytes];
};

template <unsigned... I> struct Indices {};
template <auto kernel> struct Call;

// Whether memory behind an argument of this type may hold pointers: by the type behind it.
template <class T, unsigned long alignment = alignof(T)> constexpr bool holds_pointers(T**) {
    return (__is_class(T) || __is_union(T)) && alignment == alignof(void*);
}
template <class T> constexpr bool holds_pointers(T***) { return true; }
template <class T> constexpr bool holds_pointers(T* const**) { return true; }
constexpr bool holds_pointers(const void*) { return false; }

template <class... A, void (*kernel)(A...)>
struct Call<kernel> {
    static constexpr u64 pointers = (0 | ... | holds_pointers(static_cast<A*>(nullptr)));
    static constexpr u32 count = sizeof...(A);
    static constexpr u32 bytes[] = {sizeof(A)..., 0};
    static constexpr u32 alignments[] = {alignof(A)..., 0};
    template <unsigned... I>
    __attribute__((no_sanitize_thread)) static void with(void** arguments, Indices<I...>) {
        (void)arguments;
        kernel(*static_cast<A*>(arguments[I])...);
    }
    static void run(void** arguments) { with(arguments, Indices<__integer_pack(sizeof...(A))...>{}); }
};

constexpr u32 bounds() { return threads_max; }
template <class... A> constexpr u32 bounds(u32 threads, A...) { return threads; }

template <auto kernel>
constexpr Kernel describe(const char* name, u32 threads, const char* groups, u64 cached) {
    using Thread = Call<kernel>;
    return {name, &Thread::run, Thread::bytes, Thread::alignments, Thread::count, threads, groups, cached,
            Thread::pointers};
}

}  // namespace simcuda

extern "C" __attribute__((visibility("hidden"))) void simcuda_run(simcuda::Launch*);
extern "C" __attribute__((visibility("hidden"))) unsigned char simcuda_library_begin[] __asm__("__ehdr_start");
extern "C" __attribute__((visibility("hidden"))) unsigned char simcuda_library_end[] __asm__("_end");
