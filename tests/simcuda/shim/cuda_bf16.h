// bfloat16: storage, conversions that round to nearest even, arithmetic. The type's bits are CUDA's.
#pragma once
#include "halves.h"

struct alignas(2) __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    inline __nv_bfloat16(float x);
    inline operator float() const;
};
typedef __nv_bfloat16 nv_bfloat16;

inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    __nv_bfloat16 h;
    h.bits = bits;
    return h;
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) { return h.bits; }

inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    unsigned int bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return __ushort_as_bfloat16(0x7fff);
    return __ushort_as_bfloat16(static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16));
}
inline float __bfloat162float(__nv_bfloat16 h) { return __uint_as_float(static_cast<unsigned int>(h.bits) << 16); }
inline __nv_bfloat16::__nv_bfloat16(float x) : bits(__float2bfloat16_rn(x).bits) {}
inline __nv_bfloat16::operator float() const { return __bfloat162float(*this); }
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
inline __nv_bfloat16 __double2bfloat16(double x) { return __float2bfloat16_rn(static_cast<float>(x)); }

SIMCUDA_HALF(__nv_bfloat16, __nv_bfloat162, __float2bfloat16_rn, __bfloat162float)
typedef __nv_bfloat162 nv_bfloat162;
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
    return __float2bfloat16_rn(simcuda::odd_sum(static_cast<double>(__bfloat162float(a)) * __bfloat162float(b), __bfloat162float(c)));
}
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) { return {low, high}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return {__float2bfloat16_rn(low), __float2bfloat16_rn(high)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return __floats2bfloat162_rn(v.x, v.y); }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 h) { return {h, h}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {__bfloat162float(v.x), __bfloat162float(v.y)}; }
