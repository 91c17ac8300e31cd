// Tiles of attention_bf16.cu: how they are copied to shared memory, and how warps multiply them.
#pragma once
#include "common.cuh"

#if __CUDA_ARCH__ >= 800

constexpr u32 WARPS = 4;
constexpr u32 THREADS = WARP * WARPS;
/// Tiles of the other side in shared memory: one to compute with, one that is being copied.
constexpr u32 STAGES = 2;
constexpr float LOG2 = 1.44269504f;
constexpr float LN2 = 0.69314718f;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool IS_HOPPER = true;
#else
constexpr bool IS_HOPPER = false;
#endif

// ---- PTX ----

// Of a tile of 16 × 8 sums a lane has rows `group()` and 8 further on, columns 2 `pair()` and the
// next: [row][column]. Of a left operand, 16 × 16, it has words of two columns: both rows of these
// two columns, then both rows of the two that are 8 further on.
INLINE u32 lane() { return threadIdx.x % WARP; }
INLINE u32 group() { return lane() / 4; }
INLINE u32 pair() { return lane() % 4; }

/// sums += left · right, 16 × 8 × 16: PTX ISA, "mma.m16n8k16". `low` and `high` are column
/// `group()` of the right operand: rows 2 `pair()` and one more, then 8 further on.
INLINE void multiply(float (&c)[4], const u32 (&a)[4], u32 low, u32 high) {
    float d0, d1, d2, d3;
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d0), "=f"(d1), "=f"(d2), "=f"(d3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
    c[0] = d0, c[1] = d1, c[2] = d2, c[3] = d3;
}

/// Four tiles of 8 × 8 from shared memory: lane i gives the address of row i % 8 of tile i / 8, and
/// has of each tile columns 2 `pair()` and one more of row `group()`.
INLINE void load_tiles(u32 (&to)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
}

/// As `load_tiles`, of transposed tiles.
INLINE void load_turned(u32 (&to)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
}

/// Starts to copy BYTES bytes to shared memory, or zeros unless `inside`.
template <u32 BYTES> INLINE void start_copy(u32 to, const void* from, bool inside) {
    const u32 bytes = inside ? BYTES : 0;
    if (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
    }
}

/// Waits until the copies that the block's threads have started are there for all of them.
INLINE void finish_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    // wgmma reads through another proxy than these copies write.
    if (IS_HOPPER) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
}

// ---- shared memory ----

// A warp reads 8 packs of 16 bytes at once, one of each row, from all 32 banks. On Hopper rows lie
// in panels of 64 columns, and pack p of row r is at place p ^ r % 8: wgmma's 128-byte swizzle.
// Elsewhere 16 bytes are between two rows, which takes fewer registers for addresses.
constexpr u32 PANEL = 64, PANEL_BYTES = 128;
/// Bytes from a row to the next, and of rows of this width.
INLINE constexpr u32 pitch(u32 width) { return IS_HOPPER ? PANEL_BYTES : width * 2 + 16; }
INLINE constexpr u32 bytes_of(u32 rows, u32 width) { return rows * width / PANEL * PANEL_BYTES + (IS_HOPPER ? 0 : rows * 16); }
/// Where a pack is, of so many rows.
template <u32 WIDTH, u32 ROWS> INLINE u32 place_of(u32 row, u32 pack) {
    if (IS_HOPPER) return (pack / 8 * ROWS + row) * PANEL_BYTES + (pack % 8 ^ row % 8) * 16;
    return row * pitch(WIDTH) + pack * 16;
}

/// PTX ISA, "Asynchronous warpgroup level matrix multiply-accumulate operations": a matrix of
/// swizzled rows that begin at `first`, with 1,024 bytes between groups of 8.
INLINE u64 describe(u32 first) { return (1ull << 62) | (64ull << 32) | (64ull << 16) | (first >> 4); }

/// Before products: what was written to registers is seen by them.
INLINE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Defines multiply_group: c, 64 rows (16 of each warp) × COLUMNS, gets left · right added, or is
/// set to it if IS_FIRST. `left` is in registers or a descriptor; `right` describes columns, or
/// rows if IS_TURNED. SUMS numbers the operands of OUTPUTS; A to G number those that follow.
#define MULTIPLY_GROUP(COLUMNS, OUTPUTS, SUMS, A, B, C, D, E, F, G)                                                    \
    template <bool IS_FIRST, bool IS_TURNED>                                                                           \
    INLINE void multiply_group(float (&c)[COLUMNS / 8][4], const u32 (&a)[4], u64 right) {                             \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {" SUMS "}, {" A ", " B ", " C    \
                     ", " D "}, " E ", " F ", 1, 1, " G ";"                                                            \
                     : OUTPUTS                                                                                         \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right), "n"((int)!IS_FIRST),                    \
                       "n"((int)IS_TURNED));                                                                           \
    }                                                                                                                  \
    template <bool IS_FIRST, bool IS_TURNED>                                                                           \
    INLINE void multiply_group(float (&c)[COLUMNS / 8][4], u64 left, u64 right) {                                      \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {" SUMS "}, " A ", " B ", " C     \
                     ", 1, 1, 0, " D ";"                                                                               \
                     : OUTPUTS                                                                                         \
                     : "l"(left), "l"(right), "n"((int)!IS_FIRST), "n"((int)IS_TURNED));                               \
    }
#define FOUR(C) "+f"((C)[0]), "+f"((C)[1]), "+f"((C)[2]), "+f"((C)[3])
#define OUTPUTS_24 FOUR(c[0]), FOUR(c[1]), FOUR(c[2]), FOUR(c[3]), FOUR(c[4]), FOUR(c[5])
#define SUMS_24                                                                                                        \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
MULTIPLY_GROUP(48, OUTPUTS_24, SUMS_24, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
#define OUTPUTS_32 OUTPUTS_24, FOUR(c[6]), FOUR(c[7])
#define SUMS_32 SUMS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
MULTIPLY_GROUP(64, OUTPUTS_32, SUMS_32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")

// ---- tiles ----

/// Sums of TILES · 16 rows and COLUMNS · 8 columns.
template <u32 TILES, u32 COLUMNS> struct Sums {
    float at[TILES][COLUMNS][4];

    /// Some of the tiles.
    template <u32 COUNT> INLINE Sums<COUNT, COLUMNS>& from(u32 tile) { return reinterpret_cast<Sums<COUNT, COLUMNS>&>(at[tile]); }
    /// f(an element, its row of `lane_row`, its column of `lane_column`), known to the compiler.
    template <class F> INLINE void each(F f) {
        UNROLLED for (u32 row = 0; row < TILES * 2; row++) {
            UNROLLED for (u32 column = 0; column < COLUMNS * 2; column++)
                f(at[row / 2][column / 2][row % 2 * 2 + column % 2], row, column);
        }
    }
    INLINE void clear() {
        each([](float& x, u32, u32) { x = 0.0f; });
    }
    /// Keeps the compiler from moving writes and reads of these sums over this place.
    INLINE void pin() {
        each([](float& x, u32, u32) { asm volatile("" : "+f"(x)::"memory"); });
    }
    /// Waits for all products but the last PENDING groups, before these sums are read.
    template <u32 PENDING = 0> INLINE void finish() {
        if (!IS_HOPPER) return;
        asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
        pin();
    }
};

/// Rows from one tile of a warp to its next. `wgmma` takes 16 rows of each warp.
constexpr u32 TILE_ROWS = IS_HOPPER ? WARPS * 16 : 16;
/// Where in the warp's tiles the lane's row number `row` and its column number `column` are.
INLINE u32 lane_row(u32 row) { return row / 2 * TILE_ROWS + row % 2 * 8 + group(); }
INLINE u32 lane_column(u32 column) { return column / 2 * 8 + pair() * 2 + column % 2; }
/// The first row of the warp in a block of threads.
template <u32 TILES> INLINE u32 warp_row() { return threadIdx.x / WARP * (IS_HOPPER ? 16 : TILES * 16); }

/// A left operand of TILES · 16 rows and DEPTH · 16 columns.
template <u32 TILES, u32 DEPTH> struct Left {
    u32 at[TILES][DEPTH][4];

    /// Sums as a left operand.
    INLINE void narrow(const Sums<TILES, DEPTH * 2>& sums) {
        UNROLLED for (u32 i = 0; i < TILES * DEPTH * 4; i++) {
            const float* from = sums.at[i / 4 / DEPTH][i / 4 % DEPTH * 2 + i % 4 / 2] + i % 2 * 2;
            at[i / 4 / DEPTH][i / 4 % DEPTH][i % 4] = narrow_pair(from[0], from[1]);
        }
    }
};

/// The address that a lane gives for 16 × 16 elements of the rows that begin at `first`: as a left
/// operand, or transposed as a right one; and as a right one whose columns are these rows.
template <u32 WIDTH> INLINE u32 straight(u32 first) {
    return first + lane() % 16 * pitch(WIDTH) + (lane() / 16 ^ (IS_HOPPER ? lane() % 8 : 0)) * 16;
}
template <u32 WIDTH> INLINE u32 across(u32 first) {
    return first + (lane() % 8 + lane() / 16 * 8) * pitch(WIDTH) + lane() / 8 % 2 * 16;
}

/// The warp's rows, WIDTH columns, as a left operand: in registers if HELD, else read at each use.
template <u32 WIDTH, u32 TILES, bool HELD> struct OwnRows {
    static constexpr u32 ROWS = WARPS * TILES * 16;
    /// Of the block's rows, and of the warp's.
    u32 all, address;
    Left<TILES, HELD ? WIDTH / 16 : 1> held;

    /// The rows of the block begin at `first`.
    INLINE void begin(u32 first) {
        all = first, address = straight<WIDTH>(first + warp_row<TILES>() * pitch(WIDTH));
        UNROLLED for (u32 i = 0; HELD && i < WIDTH / 16 * TILES; i++)
            load_tiles(held.at[i % TILES][i / TILES], place(i % TILES, i / TILES));
    }
    INLINE u32 place(u32 tile, u32 k) const {
        const u32 row = address + tile * TILE_ROWS * pitch(WIDTH);
        return IS_HOPPER ? (row ^ k % 4 * 32) + panel(k) : row + k * 32;
    }
    /// Where the panel with column 16 k begins.
    INLINE static constexpr u32 panel(u32 k) { return k / 4 * ROWS * PANEL_BYTES; }

    /// One product of a tile: from zero if IS_FIRST.
    template <bool IS_FIRST, u32 COLUMNS> INLINE void add_group(float (&sums)[COLUMNS][4], u32 t, u32 k, u64 right) const {
        if (HELD)
            multiply_group<IS_FIRST, false>(sums, held.at[t][HELD ? k : 0], right);
        else
            multiply_group<IS_FIRST, false>(sums, describe(all + t * TILE_ROWS * PANEL_BYTES + panel(k) + k % 4 * 32), right);
    }

    /// sums += these rows · rightᵀ; = if IS_FIRST. The rows of `right` begin at `right`. The
    /// caller finishes the sums.
    template <bool IS_FIRST, u32 COLUMNS> INLINE void add_scores(Sums<TILES, COLUMNS>& sums, u32 right) const {
        constexpr u32 RIGHT = COLUMNS * 8;
        if constexpr (IS_HOPPER) {
            begin_products();
            UNROLLED for (u32 k = 0; k < WIDTH / 16; k++) {
                const u64 columns = describe(right + k / 4 * RIGHT * PANEL_BYTES + k % 4 * 32);
                UNROLLED for (u32 t = 0; t < TILES; t++) {
                    if (IS_FIRST && k == 0) add_group<true>(sums.at[t], t, k, columns);
                    else add_group<false>(sums.at[t], t, k, columns);
                }
            }
            end_products();
        } else {
            if (IS_FIRST) sums.clear();
            UNROLLED for (u32 k = 0; k < WIDTH / 16; k++) {
                u32 a[TILES][4];
                UNROLLED for (u32 t = 0; t < TILES; t++) {
                    if (!HELD) load_tiles(a[t], place(t, k));
                    UNROLLED for (u32 i = 0; HELD && i < 4; i++) a[t][i] = held.at[t][k][i];
                }
                UNROLLED for (u32 n = 0; n < COLUMNS; n += 2) {
                    u32 b[4];
                    load_tiles(b, across<WIDTH>(right) + n * 8 * pitch(WIDTH) + k * 32);
                    UNROLLED for (u32 t = 0; t < TILES; t++) {
                        multiply(sums.at[t][n], a[t], b[0], b[1]);
                        multiply(sums.at[t][n + 1], a[t], b[2], b[3]);
                    }
                }
            }
        }
    }
};

/// sums += left · right, whose rows begin at `right`. The caller finishes the sums.
template <u32 WIDTH, u32 TILES, u32 DEPTH>
INLINE void add_weighted(Sums<TILES, WIDTH / 8>& sums, const Left<TILES, DEPTH>& left, u32 right) {
    constexpr u32 RIGHT = DEPTH * 16;
    if constexpr (IS_HOPPER) {
        begin_products();
        UNROLLED for (u32 k = 0; k < DEPTH; k++) {
            UNROLLED for (u32 n = 0; n < WIDTH / PANEL; n++) {
                const u64 rows = describe(right + (n * RIGHT + k * 16) * PANEL_BYTES);
                UNROLLED for (u32 t = 0; t < TILES; t++)
                    multiply_group<false, true>(reinterpret_cast<float(&)[8][4]>(sums.at[t][n * 8]), left.at[t][k], rows);
            }
        }
        end_products();
    } else {
        UNROLLED for (u32 k = 0; k < DEPTH; k++) {
            UNROLLED for (u32 n = 0; n < WIDTH / 8; n += 2) {
                u32 b[4];
                load_turned(b, straight<WIDTH>(right) + k * 16 * pitch(WIDTH) + n * 16);
                UNROLLED for (u32 t = 0; t < TILES; t++) {
                    multiply(sums.at[t][n], left.at[t][k], b[0], b[1]);
                    multiply(sums.at[t][n + 1], left.at[t][k], b[2], b[3]);
                }
            }
        }
    }
}
#endif
