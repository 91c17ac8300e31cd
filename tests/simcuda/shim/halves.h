// Part of cuda_fp16.h and cuda_bf16.h: what both 16-bit floats have. Arithmetic goes through float and rounds once, to nearest
// even, as the instructions do: a float has enough bits that its own rounding does not show (24 >= 2 * 11 + 2).
#pragma once

namespace simcuda {
// product + addend, whose double is rounded to a float towards the odd neighbour: whatever is rounded from that is as if it had been
// rounded once from the exact sum. The product of two 16-bit floats is exact in a double.
inline float odd_sum(double product, double addend) {
    double sum = product + addend, part = sum - product;
    double lost = (product - (sum - part)) + (addend - part);
    unsigned long long sum_bits = bits<unsigned long long>(sum);
    if (lost != 0 && isfinite(sum) && !(sum_bits & 1)) sum = bits<double>(sum_bits + ((lost > 0) == (sum > 0) ? 1 : -1));
    float rounded = static_cast<float>(sum);
    unsigned int rounded_bits = __float_as_uint(rounded);
    if (!isfinite(rounded) || static_cast<double>(rounded) == sum || (rounded_bits & 1)) return rounded;
    if (rounded == 0) return __uint_as_float((sum < 0 ? 0x80000000u : 0u) | 1u);
    return __uint_as_float(rounded_bits + ((sum > rounded) == (rounded > 0) ? 1 : -1));
}
}  // namespace simcuda

#define SIMCUDA_HALF(H, H2, OF_FLOAT, TO_FLOAT)                                                                   \
    struct alignas(4) H2 {                                                                                        \
        H x, y;                                                                                                   \
    };                                                                                                            \
    inline H operator+(H a, H b) { return OF_FLOAT(TO_FLOAT(a) + TO_FLOAT(b)); }                                  \
    inline H operator-(H a, H b) { return OF_FLOAT(TO_FLOAT(a) - TO_FLOAT(b)); }                                  \
    inline H operator*(H a, H b) { return OF_FLOAT(TO_FLOAT(a) * TO_FLOAT(b)); }                                  \
    inline H operator/(H a, H b) { return OF_FLOAT(TO_FLOAT(a) / TO_FLOAT(b)); }                                  \
    inline H operator-(H a) { return OF_FLOAT(-TO_FLOAT(a)); }                                                    \
    inline H& operator+=(H& a, H b) { return a = a + b; }                                                         \
    inline H& operator-=(H& a, H b) { return a = a - b; }                                                         \
    inline H& operator*=(H& a, H b) { return a = a * b; }                                                         \
    inline H& operator/=(H& a, H b) { return a = a / b; }                                                         \
    inline bool operator==(H a, H b) { return TO_FLOAT(a) == TO_FLOAT(b); }                                       \
    inline bool operator!=(H a, H b) { return TO_FLOAT(a) != TO_FLOAT(b); }                                       \
    inline bool operator<(H a, H b) { return TO_FLOAT(a) < TO_FLOAT(b); }                                         \
    inline bool operator>(H a, H b) { return TO_FLOAT(a) > TO_FLOAT(b); }                                         \
    inline bool operator<=(H a, H b) { return TO_FLOAT(a) <= TO_FLOAT(b); }                                       \
    inline bool operator>=(H a, H b) { return TO_FLOAT(a) >= TO_FLOAT(b); }                                       \
    inline H __hadd(H a, H b) { return a + b; }                                                                   \
    inline H __hsub(H a, H b) { return a - b; }                                                                   \
    inline H __hmul(H a, H b) { return a * b; }                                                                   \
    inline H __hdiv(H a, H b) { return a / b; }                                                                   \
    inline H __hneg(H a) { return -a; }                                                                           \
    inline H __habs(H a) { return OF_FLOAT(fabsf(TO_FLOAT(a))); }                                                 \
    inline H __hmax(H a, H b) { return OF_FLOAT(fmaxf(TO_FLOAT(a), TO_FLOAT(b))); }                               \
    inline H __hmin(H a, H b) { return OF_FLOAT(fminf(TO_FLOAT(a), TO_FLOAT(b))); }                               \
    inline bool __heq(H a, H b) { return a == b; }                                                                \
    inline bool __hgt(H a, H b) { return a > b; }                                                                 \
    inline bool __hlt(H a, H b) { return a < b; }                                                                 \
    inline bool __hisnan(H a) { return isnan(TO_FLOAT(a)); }                                                      \
    inline H2 operator+(H2 a, H2 b) { return {a.x + b.x, a.y + b.y}; }                                            \
    inline H2 operator*(H2 a, H2 b) { return {a.x * b.x, a.y * b.y}; }                                            \
    inline H2 __hadd2(H2 a, H2 b) { return a + b; }                                                               \
    inline H2 __hmul2(H2 a, H2 b) { return a * b; }                                                               \
    inline float __low2float(H2 v) { return TO_FLOAT(v.x); }                                                      \
    inline float __high2float(H2 v) { return TO_FLOAT(v.y); }
