// 16-bit floats (binary16): storage, conversions that round to nearest even, arithmetic. The type's bits are CUDA's.
#pragma once
#include "halves.h"

struct alignas(2) __half {
    unsigned short bits;
    __half() = default;
    inline __half(float x);
    inline operator float() const;
};
typedef __half half;

inline __half __ushort_as_half(unsigned short bits) {
    __half h;
    h.bits = bits;
    return h;
}
inline unsigned short __half_as_ushort(__half h) { return h.bits; }

inline __half __float2half_rn(float x) {
    unsigned int bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    unsigned int rounded;
    if (magnitude > 0x7f800000u) return __ushort_as_half(0x7fff);
    if (magnitude >= 0x477ff000u) {
        rounded = 0x7c00u;  // 65,520 and more round to infinity
    } else if (magnitude < 0x38800000u) {
        // Below the smallest normal: adding 0.5 leaves the multiple of 2^-24 in the low bits, rounded by the addition.
        rounded = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u;
    } else {
        rounded = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    }
    return __ushort_as_half(static_cast<unsigned short>(sign | rounded));
}
inline float __half2float(__half h) {
    unsigned int sign = (h.bits & 0x8000u) << 16, magnitude = h.bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    if (magnitude >= 0x400u) return __uint_as_float(sign | ((magnitude << 13) + 0x38000000u));
    return __uint_as_float(sign | __float_as_uint(static_cast<float>(magnitude) * 5.9604644775390625e-08f));
}
inline __half::__half(float x) : bits(__float2half_rn(x).bits) {}
inline __half::operator float() const { return __half2float(*this); }
inline __half __float2half(float x) { return __float2half_rn(x); }

SIMCUDA_HALF(__half, __half2, __float2half_rn, __half2float)
typedef __half2 half2;
inline __half __hfma(__half a, __half b, __half c) {
    return __float2half_rn(simcuda::odd_sum(static_cast<double>(__half2float(a)) * __half2float(b), __half2float(c)));
}
inline __half2 __halves2half2(__half low, __half high) { return {low, high}; }
inline __half2 __floats2half2_rn(float low, float high) { return {__float2half_rn(low), __float2half_rn(high)}; }
inline __half2 __float22half2_rn(float2 v) { return __floats2half2_rn(v.x, v.y); }
inline __half2 __half2half2(__half h) { return {h, h}; }
inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }
