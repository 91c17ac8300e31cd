// Random bits, and the functions of math.rs, formulas.rs and activation.rs with the same bits.
// common.cuh includes it.
#pragma once

// ---- random bits (random.rs) ----

/// Philox4x32-10: 128 random bits, a bijection of the counter for each key.
INLINE uint4 philox4x32(uint4 counter, u32 key_0, u32 key_1) {
    u32 a = counter.x, b = counter.y, c = counter.z, d = counter.w;
    UNROLLED for (int round = 0; round < 10; round++) {
        const u64 product_a = (u64)a * 0xd2511f53u;
        const u64 product_c = (u64)c * 0xcd9e8d57u;
        a = (u32)(product_c >> 32) ^ b ^ key_0;
        b = (u32)product_c;
        c = (u32)(product_a >> 32) ^ d ^ key_1;
        d = (u32)product_a;
        key_0 += 0x9e3779b9u;
        key_1 += 0xbb67ae85u;
    }
    return make_uint4(a, b, c, d);
}

constexpr float UNIFORM_STEP = 1.0f / 16777216.0f;

/// A multiple of 2⁻²⁴ in [0, 1).
INLINE float uniform(u32 bits) { return (float)(i32)(bits >> 8) * UNIFORM_STEP; }

/// A multiple of 2⁻⁵³ in [0, 1).
INLINE double uniform_f64(u32 high, u32 low) {
    const u64 bits = ((u64)high << 32) | low;
    return (double)(bits >> 11) * (1.0 / 9007199254740992.0);
}

/// An integer in 0..bound.
INLINE u32 below(u32 bits, u32 bound) { return (u32)(((u64)bits * bound) >> 32); }

// ---- math.rs: the same bits ----

/// 1.5 × 2²³.
constexpr float ROUND_TO_INTEGER = 12582912.0f;
constexpr u32 ROUND_TO_INTEGER_BITS = 0x4b400000u;
constexpr float LOG2_E = 1.44269504088896340736f;
constexpr float LN_2 = 0.693147180559945309417232121458f;

// What texts that are Rust as well as CUDA call: see formulas.rs.
INLINE float fused(float a, float b, float c) { return fmaf(a, b, c); }
INLINE float root(float x) { return sqrtf(x); }
INLINE float select(bool condition, float yes, float no) { return condition ? yes : no; }
INLINE float number(float x) { return x; }

INLINE float at_least(float x, float low) { return x < low ? low : x; }
INLINE float at_most(float x, float high) { return x > high ? high : x; }

/// The polynomial with these coefficients, highest power first, one fused step per coefficient.
template <class... Rest> INLINE float polynomial(float x, float sum, Rest... rest) {
    ((sum = fmaf(sum, x, rest)), ...);
    return sum;
}

INLINE float exp_mantissa(float r) {
    return polynomial(r, 1.3780594e-3f, 8.3731245e-3f, 4.1669536e-2f, 1.6666472e-1f, 4.9999985e-1f, 1.0f, 1.0f);
}

INLINE float power_of_two(i32 n) { return __uint_as_float((u32)(n + 127) << 23); }

INLINE float exponential(float x) {
    x = at_most(at_least(x, -104.0f), 89.0f);
    const float shifted = fmaf(x, LOG2_E, ROUND_TO_INTEGER);
    const float whole = shifted - ROUND_TO_INTEGER;
    const float mantissa = exp_mantissa(fmaf(whole, -1.4286068e-6f, fmaf(whole, -0.69314575f, x)));
    const i32 n = (i32)(__float_as_uint(shifted) - ROUND_TO_INTEGER_BITS);
    return mantissa * power_of_two(n >> 1) * power_of_two(n - (n >> 1));
}

INLINE float exp_of_negative(float x) {
    const float shifted = fmaf(x, LOG2_E, ROUND_TO_INTEGER);
    const float whole = shifted - ROUND_TO_INTEGER;
    const float mantissa = exp_mantissa(fmaf(whole, -1.4286068e-6f, fmaf(whole, -0.69314575f, x)));
    return __uint_as_float(__float_as_uint(mantissa) + (__float_as_uint(shifted) << 23));
}

INLINE float logarithm(float x) {
    const bool subnormal = x < 1.17549435e-38f;
    const float normal = subnormal ? x * 8388608.0f : x;
    const u32 bits = __float_as_uint(normal);
    const u32 exponent_bits = (bits - 0x3f2aaaabu) & 0xff800000u;
    const float m = __uint_as_float(bits - exponent_bits);
    const float exponent = fmaf((float)(i32)exponent_bits, 1.0f / 8388608.0f, subnormal ? -23.0f : 0.0f);
    const float f = m - 1.0f;
    const float f2 = f * f;
    const float odd = polynomial(f2, -0.13031006f, -0.12148351f, -0.16684613f, -0.2499962f);
    const float even = polynomial(f2, 0.14086914f, 0.13981485f, 0.20012035f);
    const float tail = polynomial(f, fmaf(even, f, odd), 0.33333197f, -0.5f);
    const float finite = fmaf(exponent, LN_2, fmaf(tail, f2, f));
    const float special = x <= 0.0f ? (x == 0.0f ? -infinity() : nan_f32()) : x;
    return x > 0.0f && x < infinity() ? finite : special;
}

/// 2ˣ within 2 ulp, for results that are rounded to bf16; 0 where it is subnormal.
INLINE float exp2_of(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

/// x sigmoid(x), and its derivative.
INLINE float silu(float x, float& slope) {
    x = at_least(x, -104.0f);
    const float e = exponential(-fabsf(x));
    const float near = 1.0f / (1.0f + e);
    const float far = e * near;
    const float s = x < 0.0f ? far : near;
    slope = fmaf(at_most(x, 104.0f), near * far, s);
    return x * s;
}

INLINE float silu(float x) {
    float slope;
    return silu(x, slope);
}

INLINE float silu_slope(float x) {
    float slope;
    silu(x, slope);
    return slope;
}

constexpr float TWICE_U_1 = 1.595769f;
constexpr float TWICE_U_3 = 0.071354814f;

/// As `math::tanh`.
INLINE float hyperbolic_tangent(float x) {
    const float size = fabsf(x), square = x * x;
    const float odd = polynomial(square, -0.0057049887f, 0.020639088f, -0.053739715f,
                                 0.13331442f, -0.3333328f);
    const float near = fmaf(odd * square, x, x);
    const float tail = 1.0f - 2.0f / (exponential(2.0f * size) + 1.0f);
    const float far = x < 0.0f ? -tail : tail;
    return size < 0.625f ? near : far;
}

INLINE float gelu_tanh(float x) {
    x = at_least(x, -15.0f);
    return x * sigmoid(x * fmaf(TWICE_U_3, x * x, TWICE_U_1));
}

INLINE float gelu_tanh_grad(float x) {
    x = at_most(at_least(x, -15.0f), 15.0f);
    const float x2 = x * x;
    const float e = exponential(-(fabsf(x) * fmaf(TWICE_U_3, x2, TWICE_U_1)));
    const float near = 1.0f / (1.0f + e);
    const float far = e * near;
    const float s = x < 0.0f ? far : near;
    const float slope = fmaf(3.0f * TWICE_U_3, x2, TWICE_U_1);
    return fmaf(x * slope, near * far, s);
}

/// The normal distribution at x, and e^(−x²/2).
INLINE float normal_cdf(float x, float& e) {
    const float a = at_most(fabsf(x), 13.0f);
    e = exp_of_negative(-0.5f * (a * a));
    e = a == 13.0f ? 0.0f : e;
    const float s = (a - 2.5f) / (a + 2.5f);
    const float upper_tail = e * polynomial(s, 0.00013064427f, 0.001282203f, 0.003128505f, -0.005121346f,
                                            -0.024563706f, 0.1131336f, -0.22806965f, 0.14133134f);
    return x < 0.0f ? upper_tail : 1.0f - upper_tail;
}

INLINE float gelu_erf(float x) {
    x = at_least(x, -15.0f);
    float e;
    return x * normal_cdf(x, e);
}

INLINE float gelu_erf_grad(float x) {
    x = at_most(at_least(x, -15.0f), 15.0f);
    float e;
    const float integral = normal_cdf(x, e);
    return fmaf(x * 0.3989423f, e, integral);
}

// ---- activations: their values and derivatives times dy ----

struct Identity {
    static INLINE float value(float z) { return z; }
    static INLINE float chain(float dy, float) { return dy; }
};

#include "activations.cuh"

/// With the GPU's own 2ˣ and quotient, which are exact enough for bf16.
template <> struct GeluTanh<bf16> {
    /// sigmoid(2u), where tanh u is in the formula; z is from −15 up, or NaN.
    static INLINE float sigmoid_of(float z) {
        return __fdividef(1.0f, 1.0f + exp2_of(z * fmaf(TWICE_U_3, z * z, TWICE_U_1) * -LOG2_E));
    }
    static INLINE float value(float z) {
        z = at_least(z, -15.0f);
        return z * sigmoid_of(z);
    }
    static INLINE float chain(float dy, float z) {
        z = at_most(at_least(z, -15.0f), 15.0f);
        const float s = sigmoid_of(z), slope = fmaf(3.0f * TWICE_U_3, z * z, TWICE_U_1);
        return dy * fmaf(z * slope * s, 1.0f - s, s);
    }
};

/// (sin 2πu, cos 2πu) for u in [0, 1).
INLINE float2 sin_cos_turns(float u) {
    const float shifted = fmaf(u, 4.0f, ROUND_TO_INTEGER);
    const u32 quarter = __float_as_uint(shifted);
    const float f = fmaf(shifted - ROUND_TO_INTEGER, -0.25f, u);
    const float f2 = f * f;
    const float sin = f * polynomial(f2, -75.24007f, 81.58813f, -41.34163f, 6.2831855f);
    const float cos = polynomial(f2, 59.245964f, -85.44374f, 64.93932f, -19.739208f, 1.0f);
    const bool swap = (quarter & 1u) != 0u;
    const u32 sin_sign = (quarter & 2u) << 30, cos_sign = ((quarter + 1u) & 2u) << 30;
    return make_float2(__uint_as_float(__float_as_uint(swap ? cos : sin) ^ sin_sign),
                       __uint_as_float(__float_as_uint(swap ? sin : cos) ^ cos_sign));
}

/// Two independent standard normals (Box–Muller).
INLINE float2 normal_pair(u32 radius_bits, u32 angle_bits) {
    const float radius = sqrtf(-2.0f * logarithm(uniform(radius_bits) + UNIFORM_STEP));
    const float2 turned = sin_cos_turns(uniform(angle_bits));
    return make_float2(radius * turned.y, radius * turned.x);
}
