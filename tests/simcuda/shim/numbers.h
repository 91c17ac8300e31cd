// Arithmetic: CUDA's names over the host's. Products and sums are never contracted (-ffp-contract=off): --fmad=false.
// Transcendentals are the host library's: right to the last bit or two, and not the bits of a GPU.
#pragma once

extern "C" {
#define SIMCUDA_ONE(NAME) double NAME(double); float NAME##f(float);
SIMCUDA_ONE(sqrt) SIMCUDA_ONE(cbrt) SIMCUDA_ONE(exp) SIMCUDA_ONE(exp2) SIMCUDA_ONE(expm1) SIMCUDA_ONE(log) SIMCUDA_ONE(log2)
SIMCUDA_ONE(log10) SIMCUDA_ONE(log1p) SIMCUDA_ONE(sin) SIMCUDA_ONE(cos) SIMCUDA_ONE(tan) SIMCUDA_ONE(asin) SIMCUDA_ONE(acos)
SIMCUDA_ONE(atan) SIMCUDA_ONE(sinh) SIMCUDA_ONE(cosh) SIMCUDA_ONE(tanh) SIMCUDA_ONE(asinh) SIMCUDA_ONE(acosh) SIMCUDA_ONE(atanh)
SIMCUDA_ONE(erf) SIMCUDA_ONE(erfc) SIMCUDA_ONE(lgamma) SIMCUDA_ONE(tgamma) SIMCUDA_ONE(floor) SIMCUDA_ONE(ceil)
SIMCUDA_ONE(trunc) SIMCUDA_ONE(round) SIMCUDA_ONE(rint) SIMCUDA_ONE(nearbyint) SIMCUDA_ONE(fabs)
#undef SIMCUDA_ONE
#define SIMCUDA_TWO(NAME) double NAME(double, double); float NAME##f(float, float);
SIMCUDA_TWO(pow) SIMCUDA_TWO(fmod) SIMCUDA_TWO(remainder) SIMCUDA_TWO(atan2) SIMCUDA_TWO(hypot) SIMCUDA_TWO(fmin) SIMCUDA_TWO(fmax)
SIMCUDA_TWO(copysign) SIMCUDA_TWO(fdim) SIMCUDA_TWO(nextafter)
#undef SIMCUDA_TWO
double fma(double, double, double);
float fmaf(float, float, float);
double ldexp(double, int);
float ldexpf(float, int);
double frexp(double, int*);
float frexpf(float, int*);
double scalbn(double, int);
float scalbnf(float, int);
long lrint(double);
long lrintf(float);
long lround(double);
long lroundf(float);
int abs(int);
long labs(long);
long long llabs(long long);
}

// C++'s overloads for float.
#define SIMCUDA_FLOAT(NAME) inline float NAME(float x) { return NAME##f(x); }
SIMCUDA_FLOAT(sqrt) SIMCUDA_FLOAT(cbrt) SIMCUDA_FLOAT(exp) SIMCUDA_FLOAT(exp2) SIMCUDA_FLOAT(expm1) SIMCUDA_FLOAT(log)
SIMCUDA_FLOAT(log2) SIMCUDA_FLOAT(log10) SIMCUDA_FLOAT(log1p) SIMCUDA_FLOAT(sin) SIMCUDA_FLOAT(cos) SIMCUDA_FLOAT(tan)
SIMCUDA_FLOAT(tanh) SIMCUDA_FLOAT(erf) SIMCUDA_FLOAT(erfc) SIMCUDA_FLOAT(floor) SIMCUDA_FLOAT(ceil) SIMCUDA_FLOAT(trunc)
SIMCUDA_FLOAT(round) SIMCUDA_FLOAT(rint) SIMCUDA_FLOAT(nearbyint) SIMCUDA_FLOAT(fabs)
#undef SIMCUDA_FLOAT
inline float pow(float x, float y) { return powf(x, y); }
inline float fmod(float x, float y) { return fmodf(x, y); }
inline float fmin(float x, float y) { return fminf(x, y); }
inline float fmax(float x, float y) { return fmaxf(x, y); }
inline float copysign(float x, float y) { return copysignf(x, y); }
inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
inline float ldexp(float x, int power) { return ldexpf(x, power); }
inline float abs(float x) { return fabsf(x); }
inline double abs(double x) { return fabs(x); }
inline long abs(long x) { return labs(x); }
inline long long abs(long long x) { return llabs(x); }

template <class T> inline constexpr bool isnan(T x) { return __builtin_isnan(x); }
template <class T> inline constexpr bool isinf(T x) { return __builtin_isinf(x); }
template <class T> inline constexpr bool isfinite(T x) { return __builtin_isfinite(x); }
template <class T> inline constexpr bool signbit(T x) { return __builtin_signbit(x); }

#define SIMCUDA_EXTREMA(T)                                            \
    inline constexpr T min(T a, T b) { return b < a ? b : a; }        \
    inline constexpr T max(T a, T b) { return a < b ? b : a; }
SIMCUDA_EXTREMA(int) SIMCUDA_EXTREMA(unsigned int) SIMCUDA_EXTREMA(long) SIMCUDA_EXTREMA(unsigned long)
SIMCUDA_EXTREMA(long long) SIMCUDA_EXTREMA(unsigned long long)
#undef SIMCUDA_EXTREMA
inline constexpr unsigned int min(int a, unsigned int b) { return min(static_cast<unsigned int>(a), b); }
inline constexpr unsigned int min(unsigned int a, int b) { return min(a, static_cast<unsigned int>(b)); }
inline constexpr unsigned int max(int a, unsigned int b) { return max(static_cast<unsigned int>(a), b); }
inline constexpr unsigned int max(unsigned int a, int b) { return max(a, static_cast<unsigned int>(b)); }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline unsigned int umin(unsigned int a, unsigned int b) { return min(a, b); }
inline unsigned int umax(unsigned int a, unsigned int b) { return max(a, b); }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float rcbrtf(float x) { return 1.0f / cbrtf(x); }
inline float exp10f(float x) { return powf(10.0f, x); }
inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678118654752440f); }
inline float __saturatef(float x) { return !(x > 0.0f) ? 0.0f : x > 1.0f ? 1.0f : x; }
inline void sincosf(float x, float* sine, float* cosine) { *sine = sinf(x), *cosine = cosf(x); }

// Rounding said by name: to nearest even, which is the host's.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __drcp_rn(double a) { return 1.0 / a; }
inline double __dsqrt_rn(double a) { return sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
// Fast versions: theirs are less exact than these.
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanhf(float x) { return tanhf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }

inline int __popc(unsigned int x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned int>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned int __brev(unsigned int x) {
    x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
    x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
    x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(x);
}
inline unsigned long long __brevll(unsigned long long x) {
    return static_cast<unsigned long long>(__brev(static_cast<unsigned int>(x))) << 32 | __brev(static_cast<unsigned int>(x >> 32));
}
inline unsigned int __byte_perm(unsigned int x, unsigned int y, unsigned int selector) {
    unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
    unsigned int result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned int chosen = selector >> (4 * i);
        unsigned int byte = static_cast<unsigned int>(bytes >> (8 * (chosen & 7))) & 0xff;
        result |= (chosen & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << (8 * i);
    }
    return result;
}
inline unsigned int __umulhi(unsigned int a, unsigned int b) { return static_cast<unsigned int>(static_cast<unsigned long long>(a) * b >> 32); }
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned int __funnelshift_l(unsigned int low, unsigned int high, unsigned int shift) {
    return static_cast<unsigned int>((static_cast<unsigned long long>(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned int __funnelshift_r(unsigned int low, unsigned int high, unsigned int shift) {
    return static_cast<unsigned int>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31));
}

namespace simcuda {
// The bits of one type as another. __builtin_memcpy of locals is a move and touches no memory.
template <class To, class From> inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits of two sizes");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
}  // namespace simcuda

inline int __float_as_int(float x) { return simcuda::bits<int>(x); }
inline unsigned int __float_as_uint(float x) { return simcuda::bits<unsigned int>(x); }
inline float __int_as_float(int x) { return simcuda::bits<float>(x); }
inline float __uint_as_float(unsigned int x) { return simcuda::bits<float>(x); }
inline long long __double_as_longlong(double x) { return simcuda::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return simcuda::bits<double>(x); }
inline double __hiloint2double(int high, int low) {
    return simcuda::bits<double>(static_cast<unsigned long long>(static_cast<unsigned int>(high)) << 32 | static_cast<unsigned int>(low));
}
inline int __double2hiint(double x) { return static_cast<int>(simcuda::bits<unsigned long long>(x) >> 32); }
inline int __double2loint(double x) { return static_cast<int>(simcuda::bits<unsigned long long>(x)); }

namespace simcuda {
// Conversions to integers clamp, and NaN becomes 0 (for unsigned too), as the instructions do.
template <class To> inline To clamped(double x, double low, double high) {
    if (x != x) return 0;
    return x <= low ? static_cast<To>(low) : x >= high ? static_cast<To>(high) : static_cast<To>(x);
}
}  // namespace simcuda

inline int __float2int_rn(float x) { return simcuda::clamped<int>(rint(static_cast<double>(x)), -2147483648.0, 2147483647.0); }
inline int __float2int_rz(float x) { return simcuda::clamped<int>(x, -2147483648.0, 2147483647.0); }
inline int __float2int_rd(float x) { return simcuda::clamped<int>(floor(static_cast<double>(x)), -2147483648.0, 2147483647.0); }
inline int __float2int_ru(float x) { return simcuda::clamped<int>(ceil(static_cast<double>(x)), -2147483648.0, 2147483647.0); }
inline unsigned int __float2uint_rn(float x) { return simcuda::clamped<unsigned int>(rint(static_cast<double>(x)), 0.0, 4294967295.0); }
inline unsigned int __float2uint_rz(float x) { return simcuda::clamped<unsigned int>(x, 0.0, 4294967295.0); }
inline int __double2int_rn(double x) { return simcuda::clamped<int>(rint(x), -2147483648.0, 2147483647.0); }
inline int __double2int_rz(double x) { return simcuda::clamped<int>(x, -2147483648.0, 2147483647.0); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned int x) { return static_cast<float>(x); }
inline float __ll2float_rn(long long x) { return static_cast<float>(x); }
inline float __ull2float_rn(unsigned long long x) { return static_cast<float>(x); }
inline double __int2double_rn(int x) { return static_cast<double>(x); }
inline double __uint2double_rn(unsigned int x) { return static_cast<double>(x); }
inline double __ll2double_rn(long long x) { return static_cast<double>(x); }
inline double __ull2double_rn(unsigned long long x) { return static_cast<double>(x); }
