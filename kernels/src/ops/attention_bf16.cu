// Attention in bf16 on tensor cores, for heads of a multiple of 16 columns, at most 128: see
// attention.rs. Sums and the softmax are f32; weights and their gradients are rounded to bf16
// before they are multiplied. On Hopper the four warps of a block multiply together, by `wgmma`,
// which alone reaches the full rate of its tensor cores; other GPUs multiply by `mma.sync`, each
// warp its own rows. Either way a lane has the same elements of a tile.
//
// A block of threads keeps some rows of queries, or of keys, and goes over the others a tile at a
// time: while it computes with one tile, the next is copied to shared memory. The heads of q that
// share a head of k are rows of one matrix, so a key is read once for all of them. dq has a kernel,
// dk and dv have another, and both compute the weights again: nothing is added atomically, and
// every sum has one order.
#include "common.cuh"

// Older GPUs cannot multiply bf16: attention/gpu.rs gives them attention.cu.
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

// ---- rows ----

/// Rows of one sequence: of a head of k, or if IS_SHARED of the heads of q that share one, where
/// row r is of token r / heads.
template <class T, bool IS_SHARED> struct Rows {
    T* first;
    u32 stride_bytes, heads, width, count, reciprocal;

    /// Exact, because row · heads < 2³¹ (attention/gpu.rs).
    INLINE u32 token(u32 row) const { return IS_SHARED ? __umulhi(row * 2, reciprocal) : row; }
    INLINE T* at(u32 row) const {
        T* of_token = (T*)((u64)first + (u64)token(row) * stride_bytes);
        return IS_SHARED ? of_token + (row - token(row) * heads) * width : of_token;
    }

    /// Starts to copy ROWS rows from `start` on to shared memory; zeros where there are none.
    template <u32 WIDTH, u32 ROWS> INLINE void copy(u32 to, u32 start) const {
        constexpr u32 CHUNKS = WIDTH / 8;
        UNROLLED for (u32 i = 0; i < ROWS * CHUNKS / THREADS; i++) {
            const u32 row = (i * THREADS + threadIdx.x) / CHUNKS, chunk = (i * THREADS + threadIdx.x) % CHUNKS;
            const bool inside = start + row < count && chunk * 8 < width;
            start_copy<16>(to + place_of<WIDTH, ROWS>(row, chunk), at(start + row) + chunk * 8, inside);
        }
    }

    /// Writes the warp's sums times its rows' factors, through its part of `memory`, so that stores
    /// have 16 bytes. The rows of the block begin at `start`.
    template <u32 WIDTH, u32 TILES>
    INLINE void write(u32 start, const Sums<TILES, WIDTH / 8>& sums, const float (&factor)[TILES * 2], u8* memory) const {
        constexpr u32 ROWS = WARPS * TILES * 16;
        // Products of other warps may still read these rows.
        if (IS_HOPPER) __syncthreads();
        __syncwarp();
        UNROLLED for (u32 i = 0; i < TILES * WIDTH / 4; i++) {
            const u32 row = i % (TILES * 2), n = i / (TILES * 2);
            const float* from = sums.at[row / 2][n] + row % 2 * 2;
            u32* to = reinterpret_cast<u32*>(memory + place_of<WIDTH, ROWS>(warp_row<TILES>() + lane_row(row), n) + pair() * 4);
            *to = narrow_pair(from[0] * factor[row], from[1] * factor[row]);
        }
        __syncwarp();
        UNROLLED for (u32 i = 0; i < TILES * 16 * WIDTH / 8 / WARP; i++) {
            const u32 number = (i * WARP + lane()) / (WIDTH / 8), chunk = (i * WARP + lane()) % (WIDTH / 8);
            const u32 row = warp_row<TILES>() + number / 16 * TILE_ROWS + number % 16;
            const uint4 eight = *reinterpret_cast<const uint4*>(memory + place_of<WIDTH, ROWS>(row, chunk));
            if (start + row >= count || chunk * 8 >= width) continue;
            *reinterpret_cast<uint4*>(at(start + row) + chunk * 8) = eight;
        }
    }
};

/// The sizes of attention.rs.
struct Sizes {
    u32 time, heads, kv_heads, width;
    float scale;
    bool is_causal;
    /// Heads of q that share a head of k, and ⌈2³¹ / that⌉ for `Rows::token`.
    u32 sharing, reciprocal;
    u32 window;
    const i32* begins;

    /// The rows of head `line` of k in all sequences, or of the heads of q that share it.
    template <bool IS_SHARED, class T> INLINE Rows<T, IS_SHARED> rows(T* array, u32 stride, u32 line) const {
        const u32 heads = IS_SHARED ? sharing : 1;
        T* first = array + (u64)(line / kv_heads) * time * stride + line % kv_heads * heads * width;
        return Rows<T, IS_SHARED>{first, stride * (u32)sizeof(T), heads, width, time * heads, reciprocal};
    }
    /// A number for each row: (B·heads, T).
    template <class T> INLINE Rows<T, true> numbers(T* array, u32 line) const {
        return Rows<T, true>{array + (u64)line * sharing * time, sizeof(T), sharing, time, time * sharing, reciprocal};
    }
    /// The first key that a token attends to. It does not decrease along a sequence.
    INLINE u32 first_key(u32 line, u32 token) const {
        const u32 in_window = window != 0 && token >= window ? token + 1 - window : 0;
        if (begins == nullptr || token >= time) return in_window;
        return max(in_window, min((u32)max(begins[(u64)(line / kv_heads) * time + token], 0), token));
    }
    /// Keys that the queries of a token attend to, of those from its first on.
    INLINE u32 keys_of(u32 token) const { return min(token + (is_causal ? 1 : time), time); }
};

/// A block's rows of queries, and the keys they attend to: from a token's first one on if IS_APART.
template <u32 TILES, u32 STEP, bool IS_APART> struct Queries {
    static constexpr u32 ROWS = WARPS * TILES * 16;
    static constexpr bool APART = IS_APART;
    /// The head of k, counted over all sequences; the first row of the block, and of the warp.
    u32 line, start, own;
    /// How many keys: those of any row, those of all rows in whole tiles, those of any row of the
    /// warp, and those of each of the lane's rows.
    u32 end, whole, last, keys[TILES * 2];
    /// The first key: of any row, in whole tiles; and of each of the lane's rows.
    u32 begin, firsts[TILES * 2];

    INLINE Queries(const Sizes& sizes) {
        const auto rows = sizes.numbers<const float>(nullptr, 0);
        const u32 blocks = (rows.count + ROWS - 1) / ROWS;
        // Blocks with the most keys come first.
        line = blockIdx.x / blocks, start = (blocks - 1 - blockIdx.x % blocks) * ROWS, own = start + warp_row<TILES>();
        end = sizes.keys_of(rows.token(start + ROWS - 1)), whole = sizes.keys_of(rows.token(start)) / STEP * STEP;
        last = sizes.keys_of(rows.token(own + TILES * 16 - 1));
        UNROLLED for (u32 row = 0; row < TILES * 2; row++) keys[row] = sizes.keys_of(rows.token(own + lane_row(row)));
        begin = APART ? sizes.first_key(line, rows.token(start)) / STEP * STEP : 0;
        UNROLLED for (u32 row = 0; row < TILES * 2; row++)
            firsts[row] = APART ? sizes.first_key(line, rows.token(own + lane_row(row))) : 0;
    }
    /// Where the first tile of keys and values goes.
    INLINE u32 stage(u32 tile_bytes) const { return begin / STEP % STAGES * tile_bytes; }
    /// Whether a row attends to a key of a masked tile.
    INLINE bool attends(u32 row, u32 key) const { return key < keys[row] && (!APART || key >= firsts[row]); }
};

/// Reduces over the four lanes of a row; all get the result.
template <class F> INLINE float row_reduce(float x, F f) {
    x = f(x, __shfl_xor_sync(WHOLE_WARP, x, 2));
    return f(x, __shfl_xor_sync(WHOLE_WARP, x, 1));
}

/// The softmax of the lane's rows over the keys so far.
template <u32 TILES> struct Softmax {
    static constexpr float SLACK = 8.0f;
    /// Below all scores, and finite: a row may not attend to any key of its first tiles, whose
    /// scores are −∞ then and whose weights are 0.
    static constexpr float LOWEST = -3e38f;
    /// What weights are relative to, in powers of 2, and the lane's part of their sum.
    float largest[TILES * 2], sum[TILES * 2];

    INLINE Softmax() {
        UNROLLED for (u32 row = 0; row < TILES * 2; row++) largest[row] = LOWEST, sum[row] = 0.0f;
    }

    /// Turns scores into weights. While a row's are below 2^SLACK, they stay relative to an older
    /// largest score, so most tiles need no rescaling. No row depends on others. On Hopper one tile
    /// after the other, which takes fewer registers; elsewhere they fill each other's waits.
    template <u32 KEYS, u32 COLUMNS> INLINE void add(Sums<TILES, KEYS>& scores, Sums<TILES, COLUMNS>& sums, float scale) {
        constexpr u32 COUNT = IS_HOPPER ? 1 : TILES;
        UNROLLED for (u32 t = 0; t < TILES; t += COUNT)
            add_tiles<COUNT>(scores.template from<COUNT>(t), sums.template from<COUNT>(t), scale, largest + t * 2, sum + t * 2);
    }
    template <u32 COUNT, u32 KEYS, u32 COLUMNS>
    INLINE static void add_tiles(Sums<COUNT, KEYS>& scores, Sums<COUNT, COLUMNS>& sums, float scale, float* largest, float* sum) {
        float most[COUNT * 2];
        bool is_larger = false;
        UNROLLED for (u32 row = 0; row < COUNT * 2; row++) most[row] = -infinity();
        scores.each([&](float& score, u32 row, u32) { most[row] = fmaxf(most[row], score); });
        UNROLLED for (u32 row = 0; row < COUNT * 2; row++) {
            most[row] = row_reduce(most[row], fmaxf) * scale;
            is_larger |= most[row] > largest[row] + SLACK;
        }
        if (__any_sync(WHOLE_WARP, is_larger)) {
            float rescale[COUNT * 2];
            UNROLLED for (u32 row = 0; row < COUNT * 2; row++) {
                const float before = largest[row];
                largest[row] = most[row] > before + SLACK ? most[row] : before;
                rescale[row] = exp2_of(before - largest[row]);
                sum[row] *= rescale[row];
            }
            sums.each([&](float& x, u32 row, u32) { x *= rescale[row]; });
        }
        scores.each([&](float& score, u32 row, u32) {
            score = exp2_of(fmaf(score, scale, -largest[row]));
            sum[row] += score;
        });
    }
};

/// Calls `use(first key, offset of the tile, is_masked)` for each tile of keys and values, while
/// the next one is copied.
template <u32 WIDTH, u32 STEP, class Block, class Rows, class Use>
INLINE void each_tile(const Block& block, const Rows& k, const Rows& v, u32 k_rows, u32 v_rows, const Use& use) {
    constexpr u32 TILE_BYTES = bytes_of(STEP, WIDTH);
    const auto sweep = [&](u32 from, u32 to, bool is_masked) __attribute__((always_inline)) {
        for (u32 keys = from; keys < to; keys += STEP) {
            const u32 stage = keys / STEP % STAGES * TILE_BYTES, other = TILE_BYTES - stage;
            finish_copies();
            if (keys + STEP < block.end) {
                k.template copy<WIDTH, STEP>(k_rows + other, keys + STEP);
                v.template copy<WIDTH, STEP>(v_rows + other, keys + STEP);
            }
            if (!IS_HOPPER && is_masked && keys >= block.last) continue;
            use(keys, stage, is_masked);
        }
    };
    if (Block::APART) {
        sweep(block.begin, block.end, true);
    } else {
        sweep(0, block.whole, false);
        sweep(block.whole, block.end, true);
    }
}

extern __shared__ __align__(1024) uint4 block_memory[];

// ---- kernels ----

/// Forward for a block of rows of queries.
template <u32 WIDTH, u32 TILES, u32 STEP, bool APART>
INLINE void forward(bf16* out, float* log_sum_exp, const bf16* q_array, const bf16* k_array, const bf16* v_array, u32 q_stride,
                    u32 kv_stride, const Sizes& sizes) {
    constexpr u32 TILE_BYTES = bytes_of(STEP, WIDTH);
    const Queries<TILES, STEP, APART> block(sizes);
    u8* memory = reinterpret_cast<u8*>(block_memory);
    const u32 q_rows = (u32)__cvta_generic_to_shared(memory), k_rows = q_rows + bytes_of(block.ROWS, WIDTH);
    const u32 v_rows = k_rows + STAGES * TILE_BYTES;
    const auto q = sizes.rows<true>(q_array, q_stride, block.line);
    const auto k = sizes.rows<false>(k_array, kv_stride, block.line), v = sizes.rows<false>(v_array, kv_stride, block.line);
    q.template copy<WIDTH, block.ROWS>(q_rows, block.start);
    k.template copy<WIDTH, STEP>(k_rows + block.stage(TILE_BYTES), block.begin);
    v.template copy<WIDTH, STEP>(v_rows + block.stage(TILE_BYTES), block.begin);
    // NVIDIA's compilers from 12.1 to 13.0 may give the registers of rows that wgmma reads in each
    // round to the weights as well (launch/check-kernels finds that). From shared memory it takes
    // 2% longer with 1,024 tokens, 2 to 11% with 4,096.
    constexpr bool HELD = WIDTH <= 64 && !IS_HOPPER;
    // Other rows are first read with the first tile, which waits for all of these copies.
    if (HELD) finish_copies();
    OwnRows<WIDTH, TILES, HELD> left;
    left.begin(q_rows);
    Softmax<TILES> softmax;
    Sums<TILES, WIDTH / 8> sums;
    sums.clear();
    each_tile<WIDTH, STEP>(block, k, v, k_rows, v_rows, [&](u32 keys, u32 stage, bool is_masked) __attribute__((always_inline)) {
        Sums<TILES, STEP / 8> scores;
        left.template add_scores<true>(scores, k_rows + stage);
        scores.finish();
        if (is_masked) {
            scores.each([&](float& score, u32 row, u32 column) {
                if (!block.attends(row, keys + lane_column(column))) score = -infinity();
            });
        }
        softmax.add(scores, sums, sizes.scale * LOG2);
        Left<TILES, STEP / 16> weights;
        weights.narrow(scores);
        add_weighted<WIDTH>(sums, weights, v_rows + stage);
        sums.finish();
    });
    const auto logs = sizes.numbers(log_sum_exp, block.line);
    float factor[TILES * 2];
    UNROLLED for (u32 i = 0; i < TILES * 2; i++) {
        const u32 row = block.own + lane_row(i);
        const float total = row_reduce(softmax.sum[i], Sum());
        factor[i] = 1.0f / total;
        if (pair() == 0 && row < q.count) *logs.at(row) = fmaf(softmax.largest[i], LN2, logarithm(total));
    }
    const auto to = sizes.rows<true>(out, sizes.heads * sizes.width, block.line);
    to.template write<WIDTH>(block.start, sums, factor, memory);
}

/// The operands of backward.
struct Operands {
    bf16 *dq, *dk, *dv;
    float* delta;
    const bf16 *q, *k, *v, *out, *dout;
    const float* log_sum_exp;
    u32 dq_stride, dkv_stride, q_stride, kv_stride;
};

/// dq for a block of rows of queries, and delta, the sums of dout · out over a row.
template <u32 WIDTH, u32 TILES, u32 STEP, bool APART> INLINE void query_gradient(const Operands& in, const Sizes& sizes) {
    constexpr u32 TILE_BYTES = bytes_of(STEP, WIDTH);
    const Queries<TILES, STEP, APART> block(sizes);
    u8* memory = reinterpret_cast<u8*>(block_memory);
    const u32 q_rows = (u32)__cvta_generic_to_shared(memory), dout_rows = q_rows + bytes_of(block.ROWS, WIDTH);
    const u32 k_rows = dout_rows + bytes_of(block.ROWS, WIDTH), v_rows = k_rows + STAGES * TILE_BYTES;
    const auto q = sizes.rows<true>(in.q, in.q_stride, block.line);
    const auto dout = sizes.rows<true>(in.dout, sizes.heads * sizes.width, block.line);
    const auto k = sizes.rows<false>(in.k, in.kv_stride, block.line), v = sizes.rows<false>(in.v, in.kv_stride, block.line);
    const auto out = sizes.rows<true>(in.out, sizes.heads * sizes.width, block.line);
    const auto logs = sizes.numbers(in.log_sum_exp, block.line);
    q.template copy<WIDTH, block.ROWS>(q_rows, block.start);
    dout.template copy<WIDTH, block.ROWS>(dout_rows, block.start);
    k.template copy<WIDTH, STEP>(k_rows + block.stage(TILE_BYTES), block.begin);
    v.template copy<WIDTH, STEP>(v_rows + block.stage(TILE_BYTES), block.begin);
    finish_copies();
    OwnRows<WIDTH, TILES, true> left, left_dout;
    left.begin(q_rows), left_dout.begin(dout_rows);
    float log[TILES * 2], delta[TILES * 2], factor[TILES * 2];
    UNROLLED for (u32 i = 0; i < TILES * 2; i++) {
        const u32 row = block.own + lane_row(i);
        log[i] = row < q.count ? *logs.at(row) * LOG2 : 0.0f;
        delta[i] = 0.0f, factor[i] = sizes.scale;
        UNROLLED for (u32 n = 0; n < WIDTH / 8; n++) {
            const u32 column = lane_column(n * 2), gradients = left_dout.held.at[i / 2][n / 2][n % 2 * 2 + i % 2];
            const bool inside = row < out.count && column < out.width;
            const u32 outputs = inside ? *reinterpret_cast<const u32*>(out.at(row) + column) : 0;
            delta[i] = fmaf(__uint_as_float(outputs << 16), __uint_as_float(gradients << 16), delta[i]);
            delta[i] = fmaf(__uint_as_float(outputs & 0xffff0000u), __uint_as_float(gradients & 0xffff0000u), delta[i]);
        }
        delta[i] = row_reduce(delta[i], Sum());
        if (pair() == 0 && row < out.count) *sizes.numbers(in.delta, block.line).at(row) = delta[i];
    }
    Sums<TILES, WIDTH / 8> sums;
    sums.clear();
    each_tile<WIDTH, STEP>(block, k, v, k_rows, v_rows, [&](u32 keys, u32 stage, bool is_masked) __attribute__((always_inline)) {
        Sums<TILES, STEP / 8> scores, gradients;
        const auto begin_gradients = [&] {
            gradients.each([&](float& gradient, u32 row, u32) { gradient = -delta[row]; });
        };
        // Before products, which the compiler would have end before other sums are written.
        if (IS_HOPPER) begin_gradients(), gradients.pin();
        left.template add_scores<true>(scores, k_rows + stage);
        if (!IS_HOPPER) begin_gradients();
        left_dout.template add_scores<false>(gradients, v_rows + stage);
        scores.template finish<1>();
        scores.each([&](float& score, u32 row, u32 column) {
            score = exp2_of(fmaf(score, sizes.scale * LOG2, -log[row]));
            if (is_masked && !block.attends(row, keys + lane_column(column))) score = 0.0f;
        });
        gradients.finish();
        scores.each([&](float& score, u32 row, u32 column) {
            score *= gradients.at[row / 2][column / 2][row % 2 * 2 + column % 2];
        });
        Left<TILES, STEP / 16> weights;
        weights.narrow(scores);
        add_weighted<WIDTH>(sums, weights, k_rows + stage);
        sums.finish();
    });
    sizes.rows<true>(in.dq, in.dq_stride, block.line).template write<WIDTH>(block.start, sums, factor, memory);
}

/// dk and dv for a block of keys: sums over the rows of queries, in their order. Scores are turned:
/// keys are rows.
template <u32 WIDTH, u32 TILES, u32 STEP, bool APART> INLINE void key_gradients(const Operands& in, const Sizes& sizes) {
    constexpr u32 ROWS = WARPS * TILES * 16, TILE_BYTES = bytes_of(STEP, WIDTH);
    const u32 blocks = (sizes.time + ROWS - 1) / ROWS, line = blockIdx.x / blocks, start = blockIdx.x % blocks * ROWS;
    u8* memory = reinterpret_cast<u8*>(block_memory);
    const u32 k_rows = (u32)__cvta_generic_to_shared(memory), v_rows = k_rows + bytes_of(ROWS, WIDTH);
    const u32 q_rows = v_rows + bytes_of(ROWS, WIDTH), dout_rows = q_rows + STAGES * TILE_BYTES;
    // Of each tile STEP logarithms, then STEP sums; a thread copies one of these numbers.
    float* numbers = reinterpret_cast<float*>(memory + 2 * bytes_of(ROWS, WIDTH) + 2 * STAGES * TILE_BYTES);
    const auto q = sizes.rows<true>(in.q, in.q_stride, line);
    const auto dout = sizes.rows<true>(in.dout, sizes.heads * sizes.width, line);
    const auto number = sizes.numbers<const float>(threadIdx.x < STEP ? in.log_sum_exp : in.delta, line);
    const auto copy = [&](u32 stage, u32 row) {
        q.template copy<WIDTH, STEP>(q_rows + stage * TILE_BYTES, row);
        dout.template copy<WIDTH, STEP>(dout_rows + stage * TILE_BYTES, row);
        row += threadIdx.x % STEP;
        const u32 to = (u32)__cvta_generic_to_shared(numbers + stage * 2 * STEP + threadIdx.x);
        if (threadIdx.x < 2 * STEP) start_copy<4>(to, number.at(row), row < q.count);
    };
    // Rows before the first attend to none of these keys, and from `whole` on to all.
    const u32 first = sizes.is_causal ? start * sizes.sharing : 0, masked = ((ROWS - 1) * sizes.sharing + STEP - 1) / STEP * STEP;
    const u32 whole = sizes.is_causal ? min(first + masked, q.count) : 0, own = start + warp_row<TILES>();
    // From `end` on tokens attend to later keys only.
    u32 end = q.count;
    for (u32 low = first; APART && low < end;) {
        const u32 middle = low + (end - low) / 2;
        if (sizes.first_key(line, q.token(middle)) >= start + ROWS)
            end = middle;
        else
            low = middle + 1;
    }
    sizes.rows<false>(in.k, in.kv_stride, line).template copy<WIDTH, ROWS>(k_rows, start);
    sizes.rows<false>(in.v, in.kv_stride, line).template copy<WIDTH, ROWS>(v_rows, start);
    copy(0, first);
    OwnRows<WIDTH, TILES, false> left_k, left_v;
    left_k.begin(k_rows), left_v.begin(v_rows);
    Sums<TILES, WIDTH / 8> dk_sums, dv_sums;
    dk_sums.clear(), dv_sums.clear();
    const auto sweep = [&](u32 from, u32 to, bool is_masked) __attribute__((always_inline)) {
        for (u32 row = from; row < to; row += STEP) {
            const u32 stage = (row - first) / STEP % STAGES, tile = stage * TILE_BYTES;
            finish_copies();
            if (row + STEP < end) copy(1 - stage, row + STEP);
            if (!IS_HOPPER && is_masked && row + STEP <= own * sizes.sharing) continue;
            const float* logs = numbers + stage * 2 * STEP;
            u32 firsts[STEP / 4];
            UNROLLED for (u32 column = 0; APART && column < STEP / 4; column++)
                firsts[column] = sizes.first_key(line, q.token(row + lane_column(column)));
            Sums<TILES, STEP / 8> scores, gradients;
            const auto begin_gradients = [&] {
                gradients.each([&](float& gradient, u32, u32 column) { gradient = -logs[STEP + lane_column(column)]; });
            };
            // On Hopper these products run beside the exponentials.
            if (IS_HOPPER) begin_gradients(), gradients.pin();
            left_k.template add_scores<true>(scores, q_rows + tile);
            if (IS_HOPPER) left_v.template add_scores<false>(gradients, dout_rows + tile);
            scores.template finish<1>();
            scores.each([&](float& score, u32 key, u32 column) {
                const u32 query = row + lane_column(column);
                score = exp2_of(fmaf(score, sizes.scale * LOG2, logs[lane_column(column)] * -LOG2));
                if (is_masked && query < (own + lane_row(key)) * sizes.sharing) score = 0.0f;
                if (APART && own + lane_row(key) < firsts[column]) score = 0.0f;
            });
            Left<TILES, STEP / 16> weights, weighted;
            weights.narrow(scores);
            add_weighted<WIDTH>(dv_sums, weights, dout_rows + tile);
            if (!IS_HOPPER) begin_gradients(), left_v.template add_scores<false>(gradients, dout_rows + tile);
            gradients.template finish<1>();
            gradients.each([&](float& gradient, u32 key, u32 column) {
                gradient *= scores.at[key / 2][column / 2][key % 2 * 2 + column % 2];
            });
            weighted.narrow(gradients);
            add_weighted<WIDTH>(dk_sums, weighted, q_rows + tile);
            dk_sums.finish(), dv_sums.finish();
        }
    };
    if (APART) {
        sweep(first, end, true);
    } else {
        sweep(first, whole, true);
        sweep(whole, end, false);
    }
    float one[TILES * 2], factor[TILES * 2];
    UNROLLED for (u32 row = 0; row < TILES * 2; row++) one[row] = 1.0f, factor[row] = sizes.scale;
    sizes.rows<false>(in.dk, in.dkv_stride, line).template write<WIDTH>(start, dk_sums, factor, memory);
    sizes.rows<false>(in.dv, in.dkv_stride, line).template write<WIDTH>(start, dv_sums, one, memory);
}

/// Kernels for heads of at most WIDTH columns. A warp keeps TILES tiles of 16 rows in forward,
/// where a tile of the other side has STEP rows, and OWN in backward: with two, what it reads from
/// shared memory is used twice, but registers do not suffice where both gradients of 128 columns
/// are summed, or rows of 128 columns have a first key of their own.
#define ATTENTION(NAME, WIDTH, APART, TILES, STEP, BLOCKS, OWN, DQ_STEP, DQ_BLOCKS, DKV_STEP, DKV_BLOCKS)              \
    KERNEL(THREADS COMMA BLOCKS)                                                                                       \
    attention_tensor_##NAME##_bf16(bf16* out, float* log_sum_exp, const bf16* q, const bf16* k, const bf16* v,         \
                                   u32 q_stride, u32 kv_stride, u32 time, u32 heads, u32 kv_heads, u32 width,          \
                                   u32 causal, float scale, u32 window, const i32* begins) {                           \
        forward<WIDTH, TILES, STEP, APART>(out, log_sum_exp, q, k, v, q_stride, kv_stride, SIZES);                     \
    }                                                                                                                  \
    GRADIENT(attention_tensor_dq_##NAME, DQ_BLOCKS, query_gradient<WIDTH COMMA OWN COMMA DQ_STEP COMMA APART>)         \
    GRADIENT(attention_tensor_dkv_##NAME, DKV_BLOCKS, key_gradients<WIDTH COMMA OWN COMMA DKV_STEP COMMA APART>)
#define COMMA ,
#define SIZES                                                                                                          \
    Sizes{time,        heads,           kv_heads, width, scale, causal != 0, heads / kv_heads,                         \
          0x7fffffffu / (heads / kv_heads) + 1, window, begins}
#define GRADIENT(NAME, BLOCKS, FUNCTION)                                                                               \
    KERNEL(THREADS COMMA BLOCKS)                                                                                       \
    NAME##_bf16(bf16* dq, bf16* dk, bf16* dv, float* delta, u32 dq_stride, u32 dkv_stride, const bf16* q,              \
                const bf16* k, const bf16* v, const bf16* out, const bf16* dout, const float* log_sum_exp,             \
                u32 q_stride, u32 kv_stride, u32 time, u32 heads, u32 kv_heads, u32 width, u32 causal, float scale,    \
                u32 window, const i32* begins) {                                                                       \
        FUNCTION(Operands{dq, dk, dv, delta, q, k, v, out, dout, log_sum_exp, dq_stride, dkv_stride, q_stride,         \
                          kv_stride}, SIZES);                                                                          \
    }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Tiles by what an H200 measured (tests/evidence/h200.md): for heads of 64 three or four blocks on
// a multiprocessor, of which one computes exponentials while others multiply. Those for windows and
// documents (apart) follow from them.
constexpr u32 HOPPER_STEP = 48;
ATTENTION(64, 64, false, 1, 64, 4, 1, 64, 3, HOPPER_STEP, 3)
ATTENTION(128, 128, false, 2, 64, 2, 1, 64, 2, 64, 2)
ATTENTION(apart_64, 64, true, 1, 64, 4, 1, 64, 3, HOPPER_STEP, 3)
ATTENTION(apart_128, 128, true, 1, 64, 2, 1, 64, 2, 64, 2)
#else
// A multiprocessor holds two blocks (one where it has 100 KiB), with 255 registers for a thread.
constexpr u32 BACKWARD_STEP = 32;
ATTENTION(64, 64, false, 2, 64, 2, 2, BACKWARD_STEP, 2, BACKWARD_STEP, 2)
ATTENTION(128, 128, false, 2, 32, 2, 1, BACKWARD_STEP, 2, BACKWARD_STEP, 2)
// For windows, and sequences of several documents.
ATTENTION(apart_64, 64, true, 2, 64, 2, 2, BACKWARD_STEP, 2, BACKWARD_STEP, 2)
ATTENTION(apart_128, 128, true, 1, 32, 2, 1, BACKWARD_STEP, 2, BACKWARD_STEP, 2)
#endif
#endif
