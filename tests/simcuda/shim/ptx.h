// Models of the PTX instructions that kernels contain, by their names with underscores: rewrite.rs turns asm into calls.
// An instruction that is not here does not compile.
#pragma once

namespace simcuda::ptx {

// PTX ISA, "cvt": .rn is to nearest, ties to even; a NaN becomes 0x7fff; without .ftz subnormals are kept.
inline void cvt_rn_bf16_f32(unsigned short& to, float from) {
    unsigned int bits = __float_as_uint(from), kept = bits >> 16, lost = bits & 0xffffu;
    bool is_up = lost > 0x8000u || (lost == 0x8000u && (kept & 1u));
    to = static_cast<unsigned short>(from != from ? 0x7fffu : kept + is_up);
}

// The first operand goes to the upper half, the second to the lower.
inline void cvt_rn_bf16x2_f32(unsigned int& to, float high, float low) {
    unsigned short halves[2];
    cvt_rn_bf16_f32(halves[0], low);
    cvt_rn_bf16_f32(halves[1], high);
    to = static_cast<unsigned int>(halves[1]) << 16 | halves[0];
}

// PTX ISA, "ex2": within 2^-22, relative; .ftz makes subnormal operands and results zero. Here to the last bit or so.
inline void ex2_approx_ftz_f32(float& to, float from) {
    float power = exp2f(from);
    to = power < 1.17549435e-38f ? 0.0f : power;
}

// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type". With group = lane / 4 and pair = lane % 4, a lane has
//   of a (16 x 16): rows group, group + 8, group, group + 8; columns 2 pair and one more, of the last two words 8 further on;
//   of b (16 x 8):  column group; rows 2 pair and one more, of the second word 8 further on;
//   of c and d (16 x 8): rows group, group, group + 8, group + 8; columns 2 pair and 2 pair + 1 by turns.
// The lower half of a word has the lower column or row. Products of bf16 are exact in f32. PTX leaves the order and the rounding
// of the sum open; here they are added to c one by one, k from 0 to 15, each rounded to nearest.
inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2, float& d3, unsigned int a0,
                                                                unsigned int a1, unsigned int a2, unsigned int a3, unsigned int b0,
                                                                unsigned int b1, float c0, float c1, float c2, float c3) {
    const unsigned int group = simcuda_lane() / 4, pair = simcuda_lane() % 4;
    // By row (group, group + 8) or column (2 pair, 2 pair + 1), the sixteen elements along k.
    float left[2][16], right[2][16];
    auto unpack = [](float* to, unsigned int word) {
        to[0] = __uint_as_float(word << 16);
        to[1] = __uint_as_float(word & 0xffff0000u);
    };
    for (unsigned int from = 0; from < 4; from++) {
        for (unsigned int row = 0; row < 2; row++) {
            const unsigned int low = row == 0 ? a0 : a1, high = row == 0 ? a2 : a3;
            const unsigned long long words = __shfl_sync(0xffffffffu, static_cast<unsigned long long>(high) << 32 | low, group * 4 + from);
            unpack(left[row] + from * 2, static_cast<unsigned int>(words));
            unpack(left[row] + from * 2 + 8, static_cast<unsigned int>(words >> 32));
        }
        for (unsigned int column = 0; column < 2; column++) {
            const unsigned long long own = static_cast<unsigned long long>(b1) << 32 | b0;
            const unsigned long long words = __shfl_sync(0xffffffffu, own, (pair * 2 + column) * 4 + from);
            unpack(right[column] + from * 2, static_cast<unsigned int>(words));
            unpack(right[column] + from * 2 + 8, static_cast<unsigned int>(words >> 32));
        }
    }
    float sums[4] = {c0, c1, c2, c3};
    for (unsigned int i = 0; i < 4; i++) {
        for (unsigned int k = 0; k < 16; k++) sums[i] += left[i / 2][k] * right[i % 2][k];
    }
    d0 = sums[0], d1 = sums[1], d2 = sums[2], d3 = sums[3];
}

}  // namespace simcuda::ptx
