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

// PTX ISA, "Asynchronous warpgroup level matrix multiply-accumulate operations". A descriptor has an address / 16 in bits 0 to 13, and the
// bytes / 16 from 8 rows to the next 8 in bits 32 to 45; bits 62 and 63 are 1 for rows of 128 bytes, whose packs of 16 bytes are swizzled:
// bits 4 to 6 of an address are changed by bits 7 to 9. Other layouts are not modelled.
inline const unsigned short* of_swizzled(unsigned long long matrix, unsigned row, unsigned column) {
    const unsigned int first = (matrix & 0x3fff) << 4, step = (matrix >> 32 & 0x3fff) << 4;
    const unsigned int address = first + row / 8 * step + row % 8 * 128 + column * 2;
    return reinterpret_cast<const unsigned short*>(simcuda_shared_pointer(matrix >> 62 == 1 ? address ^ (address >> 7 & 7) << 4 : ~0u));
}

// The four warps of a group multiply 64 x 16 by 16 x N; a warp has 16 of the rows: of d as of c above for N / 8 tiles, of a in registers as
// of a above. Rows of a matrix in shared memory are rows of a, columns of b, or with `is_turned` rows of b. Each of
// the four warps multiplies its 16 rows at once and alone, so missing waits and fences do not show; sums are added as above.
template <unsigned N>
SIMCUDA_UNSEEN inline void multiply_in_group(float* const (&d)[N / 2], const unsigned (*held)[shared_words_max], unsigned long long left,
                                             unsigned long long right, bool adds, bool is_turned, unsigned line, void* site) {
    const unsigned int lane = simcuda_lane(), group = lane / 4, pair = lane % 4, first = threadIdx.x / 32 % 4 * 16;
    for (unsigned int pack = lane; pack < N * 2; pack += 32) {
        const unsigned int wide = is_turned ? N / 8 : 2;
        simcuda_read(of_swizzled(right, pack / wide, pack % wide * 8), 16, site);
    }
    if (!held) simcuda_read(of_swizzled(left, first + lane / 2, lane % 2 * 8), 16, site);
    // What is held is shared already; else all wait here.
    if (!held) simcuda_share(line, &lane, 1);
    auto value = [](unsigned int half) { return __uint_as_float(half << 16); };
    for (unsigned int i = 0; i < N / 2; i++) {
        const unsigned int row = group + i / 2 % 2 * 8, column = i / 4 * 8 + pair * 2 + i % 2;
        float sum = adds ? *d[i] : 0.0f;
        for (unsigned int k = 0; k < 16; k++) {
            unsigned int a = held ? held[group * 4 + k / 2 % 4][i / 2 % 2 + k / 8 * 2] >> k % 2 * 16 & 0xffffu : *of_swizzled(left, first + row, k);
            sum += value(a) * value(is_turned ? *of_swizzled(right, k, column) : *of_swizzled(right, column, k));
        }
        *d[i] = sum;
    }
}
#define SIMCUDA_4(D) float &D##0, float &D##1, float &D##2, float &D##3
#define SIMCUDA_16(D) SIMCUDA_4(D##0), SIMCUDA_4(D##1), SIMCUDA_4(D##2), SIMCUDA_4(D##3)
#define SIMCUDA_24(D) SIMCUDA_16(D##0), SIMCUDA_4(D##1), SIMCUDA_4(D##2)
#define SIMCUDA_32(D) SIMCUDA_16(D##0), SIMCUDA_16(D##1)
#define SIMCUDA_4_OF(D) &D##0, &D##1, &D##2, &D##3
#define SIMCUDA_16_OF(D) SIMCUDA_4_OF(D##0), SIMCUDA_4_OF(D##1), SIMCUDA_4_OF(D##2), SIMCUDA_4_OF(D##3)
#define SIMCUDA_24_OF(D) SIMCUDA_16_OF(D##0), SIMCUDA_4_OF(D##1), SIMCUDA_4_OF(D##2)
#define SIMCUDA_32_OF(D) SIMCUDA_16_OF(D##0), SIMCUDA_16_OF(D##1)
#define SIMCUDA_WGMMA(N, COUNT)                                                                                                                 \
    SIMCUDA_UNSEEN inline void wgmma_mma_async_sync_aligned_m64n##N##k16_f32_bf16_bf16(                                                         \
        SIMCUDA_##COUNT(d), unsigned int a0, unsigned int a1, unsigned int a2, unsigned int a3, unsigned long long right, int adds, int, int,   \
        int is_turned, __SIMCUDA_HERE) {                                                                                                        \
        float* const d[] = {SIMCUDA_##COUNT##_OF(d)};                                                                                           \
        const unsigned int own[4] = {a0, a1, a2, a3};                                                                                           \
        multiply_in_group<N>(d, simcuda_share(line, own, 4), 0, right, adds, is_turned, line, __builtin_return_address(0));                     \
    }                                                                                                                                           \
    SIMCUDA_UNSEEN inline void wgmma_mma_async_sync_aligned_m64n##N##k16_f32_bf16_bf16(                                                         \
        SIMCUDA_##COUNT(d), unsigned long long left, unsigned long long right, int adds, int, int, int, int is_turned, __SIMCUDA_HERE) {        \
        float* const d[] = {SIMCUDA_##COUNT##_OF(d)};                                                                                           \
        multiply_in_group<N>(d, nullptr, left, right, adds, is_turned, line, __builtin_return_address(0));                                      \
    }
SIMCUDA_WGMMA(48, 24)
SIMCUDA_WGMMA(64, 32)
#undef SIMCUDA_WGMMA
inline void wgmma_fence_sync_aligned() {}
inline void wgmma_commit_group_sync_aligned() {}
inline void wgmma_wait_group_sync_aligned(int) {}
inline void fence_proxy_async_shared_cta() {}

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
