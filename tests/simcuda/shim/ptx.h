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
#define SIMCUDA_UNSEEN __attribute__((no_sanitize_thread, noinline))
SIMCUDA_UNSEEN inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2, float& d3, unsigned int a0,
                                                                               unsigned int a1, unsigned int a2, unsigned int a3,
                                                                               unsigned int b0, unsigned int b1, float c0, float c1,
                                                                               float c2, float c3, __SIMCUDA_HERE) {
    const unsigned int group = simcuda_lane() / 4, pair = simcuda_lane() % 4;
    const unsigned int own[6] = {a0, a1, a2, a3, b0, b1};
    const unsigned int(*lanes)[shared_words_max] = simcuda_share(line, own, 6);
    // By row (group, group + 8) or column (2 pair, 2 pair + 1), the sixteen elements along k.
    float left[2][16], right[2][16];
    auto unpack = [](float* to, unsigned int word) {
        to[0] = __uint_as_float(word << 16);
        to[1] = __uint_as_float(word & 0xffff0000u);
    };
    for (unsigned int from = 0; from < 4; from++) {
        for (unsigned int i = 0; i < 4; i++) unpack(left[i % 2] + from * 2 + i / 2 * 8, lanes[group * 4 + from][i]);
        for (unsigned int i = 0; i < 4; i++) unpack(right[i % 2] + from * 2 + i / 2 * 8, lanes[(pair * 2 + i % 2) * 4 + from][4 + i / 2]);
    }
    float sums[4] = {c0, c1, c2, c3};
    for (unsigned int i = 0; i < 4; i++) {
        for (unsigned int k = 0; k < 16; k++) sums[i] += left[i / 2][k] * right[i % 2][k];
    }
    d0 = sums[0], d1 = sums[1], d2 = sums[2], d3 = sums[3];
}

// PTX ISA, "ldmatrix": lane i gives the address, a multiple of 16, of row i % 8 of matrix i / 8, which has 8 rows of 8 elements.
// Of each matrix a lane gets a word: row lane / 4, columns 2 (lane % 4) and one more; with .trans rows and columns change places.
SIMCUDA_UNSEEN inline void load_matrices(unsigned int (&to)[4], unsigned int address, bool is_transposed, unsigned int line, void* site) {
    simcuda_read(simcuda_shared_pointer(address), 16, site);
    const unsigned int(*lanes)[shared_words_max] = simcuda_share(line, &address, 1);
    const unsigned int group = simcuda_lane() / 4, pair = simcuda_lane() % 4;
    for (unsigned int matrix = 0; matrix < 4; matrix++) {
        to[matrix] = 0;
        for (unsigned int i = 0; i < 2; i++) {
            const unsigned int row = is_transposed ? pair * 2 + i : group, column = is_transposed ? group : pair * 2 + i;
            const unsigned char* first = simcuda_shared_pointer(lanes[matrix * 8 + row][0]);
            to[matrix] |= static_cast<unsigned int>(reinterpret_cast<const unsigned short*>(first)[column]) << (i * 16);
        }
    }
}
#define SIMCUDA_LDMATRIX(NAME, IS_TRANSPOSED)                                                                                       \
    SIMCUDA_UNSEEN inline void NAME(unsigned int& to0, unsigned int& to1, unsigned int& to2, unsigned int& to3, unsigned int address, \
                                    __SIMCUDA_HERE) {                                                                               \
        unsigned int to[4];                                                                                                         \
        load_matrices(to, address, IS_TRANSPOSED, line, __builtin_return_address(0));                                               \
        to0 = to[0], to1 = to[1], to2 = to[2], to3 = to[3];                                                                         \
    }
SIMCUDA_LDMATRIX(ldmatrix_sync_aligned_m8n8_x4_shared_b16, false)
SIMCUDA_LDMATRIX(ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16, true)
#undef SIMCUDA_LDMATRIX

// PTX ISA, "cp.async": .ca takes 4, 8 or 16 bytes, .cg 16; the last operand says how many are copied, and zeros fill the rest.
SIMCUDA_UNSEEN inline void cp_async_ca_shared_global(unsigned int to, const void* from, unsigned int size_bytes, unsigned int bytes) {
    simcuda_start_copy(to, from, size_bytes, bytes, __builtin_return_address(0));
}
SIMCUDA_UNSEEN inline void cp_async_cg_shared_global(unsigned int to, const void* from, unsigned int size_bytes, unsigned int bytes) {
    simcuda_start_copy(to, from, size_bytes, bytes, __builtin_return_address(0));
}
inline void cp_async_commit_group() { simcuda_end_group(); }
inline void cp_async_wait_group(unsigned int pending) { simcuda_wait_for_copies(pending); }
#undef SIMCUDA_UNSEEN

}  // namespace simcuda::ptx

// An address in shared memory has 32 bits. Here it counts from the dynamic shared memory.
inline size_t __cvta_generic_to_shared(const void* pointer) {
    return static_cast<unsigned int>(static_cast<const unsigned char*>(pointer) - simcuda_dynamic_shared);
}
