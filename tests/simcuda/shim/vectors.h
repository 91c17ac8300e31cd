// CUDA's vector types, with its alignments, and their make_ functions.
#pragma once

#define SIMCUDA_VECTORS(NAME, T, TWO, FOUR)                                                                   \
    struct NAME##1 { T x; };                                                                                  \
    struct alignas(TWO) NAME##2 { T x, y; };                                                                  \
    struct NAME##3 { T x, y, z; };                                                                            \
    struct alignas(FOUR) NAME##4 { T x, y, z, w; };                                                           \
    inline constexpr NAME##1 make_##NAME##1(T x) { return {x}; }                                              \
    inline constexpr NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                                      \
    inline constexpr NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }                              \
    inline constexpr NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }

SIMCUDA_VECTORS(char, signed char, 2, 4)
SIMCUDA_VECTORS(uchar, unsigned char, 2, 4)
SIMCUDA_VECTORS(short, short, 4, 8)
SIMCUDA_VECTORS(ushort, unsigned short, 4, 8)
SIMCUDA_VECTORS(int, int, 8, 16)
SIMCUDA_VECTORS(uint, unsigned int, 8, 16)
SIMCUDA_VECTORS(long, long, 16, 16)
SIMCUDA_VECTORS(ulong, unsigned long, 16, 16)
SIMCUDA_VECTORS(longlong, long long, 16, 16)
SIMCUDA_VECTORS(ulonglong, unsigned long long, 16, 16)
SIMCUDA_VECTORS(float, float, 8, 16)
SIMCUDA_VECTORS(double, double, 16, 16)
#undef SIMCUDA_VECTORS

struct dim3 {
    unsigned int x, y, z;
    constexpr dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};
