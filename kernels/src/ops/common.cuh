// What all kernels share: number types, indices, 16-byte loads, reductions in a fixed order, and
// with math.cuh random bits and the functions of math.rs. Kernels include only files of this
// folder, so no CUDA headers are needed.
//
// Compiled with --fmad=false and IEEE division and square root, so a * b + c rounds twice unless
// written fmaf(a, b, c), as in Rust. What is copied from math.rs, random.rs and dtype.rs has
// their bits, except for NaN's payload (a GPU has one NaN). PTX is only under __CUDA_ARCH__, beside
// plain code with the same results for other compilers.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#define INLINE __device__ __forceinline__
/// Before a loop of a constant number of rounds, whose arrays are registers then.
#define UNROLLED _Pragma("unroll")

/// A kernel that Rust finds by its name, with at most THREADS threads per block.
#define KERNEL(THREADS) extern "C" __global__ void __launch_bounds__(THREADS)

/// Threads per block unless a kernel needs another number: BLOCK_THREADS of launch.rs.
constexpr int BLOCK_THREADS = 256;

/// A version of a kernel per dtype that models compute in: VERSION(name in Rust, type here).
#define FOR_F32_AND_BF16(VERSION) VERSION(f32, float) VERSION(bf16, bf16)

// ---- numbers ----

/// bfloat16 and IEEE half, as bits: only for storage.
struct bf16 {
    u16 bits;
};
struct f16 {
    u16 bits;
};

INLINE float infinity() { return __uint_as_float(0x7f800000u); }
INLINE float nan_f32() { return __uint_as_float(0x7fc00000u); }
INLINE bool is_nan(float x) { return x != x; }
INLINE bool is_finite(float x) { return fabsf(x) < infinity(); }

/// As in dtype.rs: nearest, ties to even; NaN becomes quiet and keeps what fits of its
/// payload.
INLINE bf16 bf16_nearest(float x) {
    const u32 bits = __float_as_uint(x);
    const u32 nearest = (bits + (0x7fffu + ((bits >> 16) & 1u))) >> 16;
    return bf16{(u16)(is_nan(x) ? (bits >> 16) | 0x40u : nearest)};
}

INLINE float bf16_wide(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

INLINE f16 f16_nearest(float x) {
    const u32 sign = (__float_as_uint(x) >> 16) & 0x8000u;
    const u32 bits = __float_as_uint(x) & 0x7fffffffu;
    const u32 normal = (bits + (0xfffu + ((bits >> 13) & 1u)) - ((127u - 15u) << 23)) >> 13;
    const u32 subnormal = __float_as_uint(__uint_as_float(bits) + 0.5f) - 0x3f000000u;
    const u32 finite = bits < 0x38800000u ? subnormal : normal;
    const u32 beyond = is_nan(x) ? 0x7e00u | ((bits >> 13) & 0x3ffu) : 0x7c00u;
    return f16{(u16)(sign | (bits < 0x47800000u ? finite : beyond))};
}

INLINE float f16_wide(f16 x) {
    const u32 bits = x.bits;
    const u32 sign = (bits & 0x8000u) << 16;
    const u32 shifted = (bits & 0x7fffu) << 13;
    const u32 normal = shifted + ((127u - 15u) << 23);
    const u32 subnormal = __float_as_uint((float)(i32)(bits & 0x3ffu) * (1.0f / 16777216.0f));
    const u32 finite = (bits & 0x7c00u) == 0u ? subnormal : normal;
    return __uint_as_float(sign | ((bits & 0x7c00u) == 0x7c00u ? shifted | 0x7f800000u : finite));
}

/// x if f32 holds it, else its f32 neighbour whose last bit is odd (dtype.rs).
INLINE float f32_to_odd(double x) {
    const float near = (float)x;
    const double back = (double)near;
    const u32 bits = __float_as_uint(near);
    const u32 other = fabs(back) > fabs(x) ? bits - 1u : bits + 1u;
    return __uint_as_float(back != x && (bits & 1u) == 0u ? other : bits);
}

/// An element as f32, exactly.
INLINE float wide(float x) { return x; }
INLINE float wide(bf16 x) { return bf16_wide(x); }

/// A result as an element, rounded to nearest, ties to even. Every NaN becomes 0x7fff, as in
/// hardware.
template <class T> INLINE T narrow(float x);
template <> INLINE float narrow<float>(float x) { return x; }
template <> INLINE bf16 narrow<bf16>(float x) {
#if __CUDA_ARCH__ >= 800
    bf16 narrow;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(x));
    return narrow;
#else
    return is_nan(x) ? bf16{0x7fff} : bf16_nearest(x);
#endif
}

/// Converts a number (cast.rs): floats round to nearest, ties to even; conversions to integers
/// truncate and saturate, and NaN becomes 0. Each pair of types rounds once.
template <class To> struct Convert {
    /// From float, double and integers that need no saturation.
    template <class From> static INLINE To from(From x) { return (To)x; }
    static INLINE To from(bf16 x) { return from(bf16_wide(x)); }
    static INLINE To from(f16 x) { return from(f16_wide(x)); }
};

/// To an integer. From `low` down and from `high` up it saturates.
template <class To, i64 LOWEST, i64 HIGHEST> struct ToInteger {
    template <class F> static INLINE To of_float(F x) {
        constexpr F low = (F)LOWEST, high = (F)HIGHEST;
        return x >= high ? (To)HIGHEST : x <= low ? (To)LOWEST : x == x ? (To)x : (To)0;
    }
    static INLINE To from(float x) { return of_float(x); }
    static INLINE To from(double x) { return of_float(x); }
    static INLINE To from(bf16 x) { return from(bf16_wide(x)); }
    static INLINE To from(f16 x) { return from(f16_wide(x)); }
    template <class From> static INLINE To from(From x) {
        return (To)(x < LOWEST ? LOWEST : x > HIGHEST ? HIGHEST : x);
    }
};
template <> struct Convert<u8> : ToInteger<u8, 0, 255> {};
template <> struct Convert<i32> : ToInteger<i32, -2147483648ll, 2147483647> {};
template <> struct Convert<i64> : ToInteger<i64, -9223372036854775807ll - 1, 9223372036854775807ll> {};

/// An f32 that rounds to the same 16 bits as x.
INLINE float sticky(float x) { return x; }
INLINE float sticky(double x) { return f32_to_odd(x); }
INLINE float sticky(u8 x) { return (float)x; }
INLINE float sticky(i32 x) { return f32_to_odd((double)x); }
INLINE float sticky(i64 x) {
    // Beyond 2³² only whether any of the low 16 bits is set matters.
    const u64 size = x < 0 ? 0ull - (u64)x : (u64)x;
    const u64 kept = (size >> 16) | (u64)((size & 0xffffull) != 0);
    const double wide = size < (1ull << 32) ? (double)size : (double)kept * 65536.0;
    return f32_to_odd(x < 0 ? -wide : wide);
}
INLINE float sticky(bf16 x) { return bf16_wide(x); }
INLINE float sticky(f16 x) { return f16_wide(x); }

template <> struct Convert<bf16> {
    template <class From> static INLINE bf16 from(From x) { return bf16_nearest(sticky(x)); }
};
template <> struct Convert<f16> {
    template <class From> static INLINE f16 from(From x) { return f16_nearest(sticky(x)); }
};

// ---- indices and memory ----

/// The index in a row of class indices or tokens, of `bytes` each: u8, i32 or i64.
INLINE i64 index_at(const void* indices, u32 bytes, u64 row) {
    if (bytes == 1) return static_cast<const u8*>(indices)[row];
    if (bytes == 4) return static_cast<const i32*>(indices)[row];
    return static_cast<const i64*>(indices)[row];
}

/// This thread's number in a one-dimensional grid, and the number of threads: for (u64 i =
/// first_index(); i < count; i += grid_threads()).
INLINE u64 first_index() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
INLINE u64 grid_threads() { return (u64)gridDim.x * blockDim.x; }

/// BYTES bytes as one memory access.
template <int BYTES> struct Word;
template <> struct Word<1> { typedef u8 type; };
template <> struct Word<2> { typedef u16 type; };
template <> struct Word<4> { typedef u32 type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<16> { typedef uint4 type; };

/// N neighbouring elements that one access moves: at most 16 bytes.
template <class T, int N = 16 / sizeof(T)> union Pack {
    static constexpr int COUNT = N;
    typedef typename Word<N * sizeof(T)>::type Whole;
    Whole whole;
    T values[N];
};

/// Pack number `index` of an array, which is aligned to packs.
template <class P, class T> INLINE P load_pack(const T* array, u64 index) {
    P pack;
    pack.whole = reinterpret_cast<const typename P::Whole*>(array)[index];
    return pack;
}

template <class P, class T> INLINE void store_pack(T* array, u64 index, P pack) {
    reinterpret_cast<typename P::Whole*>(array)[index] = pack.whole;
}

/// Two numbers as bf16 in one word, the first in its low half, each rounded once.
INLINE u32 narrow_pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return (u32)narrow<bf16>(low).bits | (u32)narrow<bf16>(high).bits << 16;
#endif
}

/// These numbers as a pack, each rounded once.
template <class T, int N> INLINE Pack<T, N> narrow_pack(const float (&x)[N]) {
    Pack<T, N> pack;
    if constexpr (sizeof(T) == 2 && N == 8) {
        pack.whole = make_uint4(narrow_pair(x[0], x[1]), narrow_pair(x[2], x[3]), narrow_pair(x[4], x[5]),
                                narrow_pair(x[6], x[7]));
    } else {
        UNROLLED for (int i = 0; i < N; i++) pack.values[i] = narrow<T>(x[i]);
    }
    return pack;
}

/// Stores a pack of f32 as bf16.
INLINE void store_rounded(bf16* array, u64 index, const Pack<float>& pack) {
    constexpr int COUNT = Pack<float>::COUNT;
    u32 halves[COUNT / 2] = {};
    UNROLLED for (int i = 0; i < COUNT; i++)
        halves[i / 2] |= (u32)Convert<bf16>::from(pack.values[i]).bits << (i % 2 * 16);
    Pack<bf16, COUNT> rounded;
    rounded.whole = make_uint2(halves[0], halves[1]);
    store_pack(array, index, rounded);
}

/// Whether all of these addresses are aligned to packs of BYTES bytes.
template <int BYTES = 16, class... Pointers> INLINE bool aligned(Pointers... pointers) {
    return ((... | reinterpret_cast<u64>(pointers)) & (BYTES - 1)) == 0;
}

/// The statements with N as COUNT where IS_WHOLE says that all is whole packs of so many elements,
/// else with N as 1.
#define IN_PACKS(COUNT, IS_WHOLE, ...)                                                                                 \
    if (IS_WHOLE) {                                                                                                    \
        constexpr int N = COUNT;                                                                                       \
        __VA_ARGS__                                                                                                    \
    } else {                                                                                                           \
        constexpr int N = 1;                                                                                           \
        __VA_ARGS__                                                                                                    \
    }

/// Packs that a thread loads before it stores the first, to keep the memory busy.
constexpr int PACKS_IN_FLIGHT = 2;

/// out[i] = f(a[i], b[i]) in f32, rounded once; a, b or both may be out.
template <class T, class B, class F> INLINE void map(T* out, const T* a, const B* b, u64 count, F f) {
    typedef Pack<T> P;
    typedef Pack<B, P::COUNT> Right;
    const u64 packs = aligned(out, a) && aligned<sizeof(Right)>(b) ? count / P::COUNT : 0;
    const u64 stride = grid_threads();
    for (u64 first = first_index(); first < packs; first += PACKS_IN_FLIGHT * stride) {
        P left[PACKS_IN_FLIGHT];
        Right right[PACKS_IN_FLIGHT];
        UNROLLED for (int k = 0; k < PACKS_IN_FLIGHT; k++) {
            if (first + k * stride >= packs) break;
            left[k] = load_pack<P>(a, first + k * stride);
            right[k] = load_pack<Right>(b, first + k * stride);
        }
        UNROLLED for (int k = 0; k < PACKS_IN_FLIGHT; k++) {
            if (first + k * stride >= packs) break;
            float result[P::COUNT];
            UNROLLED for (int i = 0; i < P::COUNT; i++)
                result[i] = f(wide(left[k].values[i]), wide(right[k].values[i]));
            store_pack(out, first + k * stride, narrow_pack<T>(result));
        }
    }
    for (u64 i = packs * P::COUNT + first_index(); i < count; i += stride) {
        out[i] = narrow<T>(f(wide(a[i]), wide(b[i])));
    }
}

/// out[i] = f(x[i]) in f32, rounded once; x may be out.
template <class T, class F> INLINE void map(T* out, const T* x, u64 count, F f) {
    map(out, x, x, count, [=](float x, float) { return f(x); });
}

/// f(i, its row, its column) for each element i of a row-major matrix.
template <class F> INLINE void over_matrix(u64 count, u64 columns, F f) {
    const u64 stride = grid_threads(), down = stride / columns, across = stride % columns;
    u64 row = first_index() / columns, column = first_index() % columns;
    for (u64 i = first_index(); i < count; i += stride) {
        f(i, row, column);
        row += down;
        column += across;
        if (column >= columns) {
            row++;
            column -= columns;
        }
    }
}

// ---- reductions in a fixed order ----

constexpr int WARP = 32;
constexpr u32 WHOLE_WARP = 0xffffffffu;

struct Sum {
    template <class T> INLINE T operator()(T a, T b) const { return a + b; }
};

/// The larger; NaN if either is.
struct Largest {
    INLINE float operator()(float a, float b) const { return is_nan(a) || a > b ? a : b; }
};

/// Reduces the values of all 32 lanes with a commutative `f`: the upper half onto the lower until
/// one is left, in the order of `tree_sum` (ops/float.rs). Every lane gets the result, and all
/// lanes must call it.
template <class T, class F> INLINE T warp_reduce(T x, F f) {
    UNROLLED for (int distance = WARP / 2; distance > 0; distance /= 2)
        x = f(x, __shfl_xor_sync(WHOLE_WARP, x, distance));
    return x;
}

template <class T> INLINE T warp_sum(T x) { return warp_reduce(x, Sum()); }
INLINE float warp_max(float x) { return warp_reduce(x, Largest()); }

/// Reduces the values of all threads of a block: each warp with `warp_reduce`, then the warps'
/// results. `identity` is neutral under `f`. Every thread gets the result, and all threads must
/// call it; the block is one-dimensional, with a multiple of 32 threads.
template <class T, class F> INLINE T block_reduce(T x, T identity, F f) {
    __shared__ T partials[WARP];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    x = warp_reduce(x, f);
    if (blockDim.x == WARP) return x;
    if (lane == 0) partials[warp] = x;
    __syncthreads();
    x = warp_reduce(lane < blockDim.x / WARP ? partials[lane] : identity, f);
    // The next call overwrites the partials.
    __syncthreads();
    return x;
}

/// Elements that a warp sums in its lanes: lane i has the elements i, i + 32 …; BLOCK of sum.rs.
constexpr u32 SUM_BLOCK = 1024;

/// The sum of one block of at most SUM_BLOCK elements, in all lanes of a warp.
template <class T> INLINE double warp_sum_of(const T* __restrict__ x, u64 length) {
    const u32 lane = threadIdx.x % WARP;
    double sum = 0.0;
    if (length >= SUM_BLOCK) {
        T elements[SUM_BLOCK / WARP];
        UNROLLED for (u32 i = 0; i < SUM_BLOCK / WARP; i++) elements[i] = x[i * WARP + lane];
        UNROLLED for (u32 i = 0; i < SUM_BLOCK / WARP; i++) sum = sum + (double)wide(elements[i]);
    } else {
        for (u32 i = lane; i < length; i += WARP) sum = sum + (double)wide(x[i]);
    }
    return warp_sum(sum);
}

/// Runs of blocks of elements whose sums are added in order: RUNS_MAX of sum.rs.
constexpr u32 RUNS_MAX = 256;

/// Whether this block is the last of its grid to come here, having written what it has to: the last
/// one may read what all wrote, past the first cache. The whole block must call it. `counter` is
/// zero before a kernel and after it.
///
/// In the terms of PTX's memory model (all of scope gpu, all atomics relaxed): fence and atomicAdd
/// are a release pattern, atomicAdd and the second fence an acquire pattern. Every release precedes
/// the last block's acquire in observation order, because the additions are a chain of
/// read-modify-writes. The barriers before and after make both hold for all threads of a block:
/// a fence after the last barrier would acquire for no thread but the one that has the atomic.
INLINE bool ends_last(u64* counter) {
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(counter, 1ull) == gridDim.x - 1;
        if (is_last) atomicExch(counter, 0ull);
        __threadfence();
    }
    __syncthreads();
    return is_last;
}

/// The sum of x in the order of sum.rs; valid in thread 0. The whole block must call it. Reads past
/// the first cache, because other blocks wrote x.
INLINE double total_of(const float* x, u64 count) {
    __shared__ double sums[WARP];
    const u32 warps = blockDim.x / WARP, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const u64 blocks = (count + SUM_BLOCK - 1) / SUM_BLOCK;
    const u64 run = (blocks + RUNS_MAX - 1) / RUNS_MAX;
    double total = 0.0, of_run = 0.0;
    for (u64 first = 0; first < blocks; first += warps) {
        const u64 start = (first + warp) * SUM_BLOCK;
        if (start < count) {
            const u64 end = count - start < SUM_BLOCK ? count : start + SUM_BLOCK;
            double sum = 0.0;
#pragma unroll 4
            for (u64 i = start + lane; i < end; i += WARP) sum = sum + (double)__ldcg(x + i);
            sum = warp_sum(sum);
            if (lane == 0) sums[warp] = sum;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            for (u32 i = 0; i < warps && first + i < blocks; i++) {
                of_run = of_run + sums[i];
                if ((first + i + 1) % run == 0) total = total + of_run, of_run = 0.0;
            }
        }
        // The next round overwrites the sums.
        __syncthreads();
    }
    return total + of_run;
}

template <class T> INLINE T block_sum(T x) { return block_reduce(x, T(0), Sum()); }
INLINE float block_max(float x) { return block_reduce(x, -infinity(), Largest()); }

#include "math.cuh"
