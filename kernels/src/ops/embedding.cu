// The embedding of tokens and the gradient of its table: see embedding.rs.
#include "common.cuh"

constexpr u32 PACK = 4;
/// Rows whose place in the order a block finds: one a lane. Each warp counts in a part of a tile.
constexpr u32 PLACED_ROWS = WARP;
constexpr u32 WARPS = BLOCK_THREADS / WARP;
constexpr u32 PART = 256;
constexpr u32 TILE = PART * WARPS;
/// As in embedding.rs.
constexpr u32 RUN = 64;
/// Rows that a thread loads before it adds the first.
constexpr u32 IN_FLIGHT = 8;
/// Greater than every key.
constexpr u32 NO_KEY = ~0u;

/// The token of each row (R), of `bytes` each: u8, i32 or i64.
struct Tokens {
    const void* tokens;
    u32 bytes;
    u64 rows, vocabulary;

    /// The row's token; `vocabulary` for one outside of the table.
    INLINE u32 key(u64 row) const {
        // As unsigned numbers, negative ones are beyond every table.
        const u64 token = (u64)index_at(tokens, bytes, row);
        return (u32)(token < vocabulary ? token : vocabulary);
    }

    INLINE u32 key_or_none(u64 row) const { return row < rows ? key(row) : NO_KEY; }

    /// The key of row number `at` of the sorted ones.
    INLINE u32 sorted_key(const i32* order, u64 at) const { return at < rows ? key((u64)order[at]) : NO_KEY; }
};

/// out[r] = table[tokens[r]] + positions[r mod T], N columns at a time; positions may be null.
template <int N, class T>
INLINE void embedding(
    T* __restrict__ out, const T* __restrict__ table, const T* __restrict__ positions, const Tokens& tokens,
    u64 columns, u64 context) {
    typedef Pack<T, N> P;
    const u64 packs = columns / N;
    over_matrix(tokens.rows * packs, packs, [&](u64 i, u64 row, u64 pack) {
        const u64 token = tokens.key(row);
        P sum;
        if (token < tokens.vocabulary) {
            sum = load_pack<P>(table, token * packs + pack);
            if (positions != nullptr) {
                const P position = load_pack<P>(positions, row % context * packs + pack);
                UNROLLED for (int k = 0; k < N; k++)
                    sum.values[k] = narrow<T>(wide(sum.values[k]) + wide(position.values[k]));
            }
        } else {
            UNROLLED for (int k = 0; k < N; k++) sum.values[k] = narrow<T>(nan_f32());
        }
        store_pack(out, i, sum);
    });
}
#define EMBEDDING(NAME, T)                                                                                             \
    KERNEL(BLOCK_THREADS)                                                                                              \
    embedding_##NAME(T* out, const T* table, const T* positions, const void* tokens, u32 token_bytes, u64 rows,        \
                     u64 columns, u64 vocabulary, u64 context) {                                                       \
        const Tokens of{tokens, token_bytes, rows, vocabulary};                                                        \
        IN_PACKS(PACK, columns % PACK == 0 && aligned<PACK * sizeof(T)>(out, table, positions),                        \
                 embedding<N>(out, table, positions, of, columns, context);)                                           \
    }
FOR_F32_AND_BF16(EMBEDDING)

/// order = the rows sorted by token, those of one token in order. A row's place is the number of
/// rows before it, which a block counts for its rows among all: no memory that grows with the
/// vocabulary, and the same time for any tokens. Counting takes R² / 10¹³ s or so on a large GPU.
KERNEL(BLOCK_THREADS)
embedding_order(i32* __restrict__ order, const void* __restrict__ tokens, u32 token_bytes, u64 rows, u64 vocabulary) {
    __shared__ uint4 tile[TILE / 4];
    __shared__ u32 counts[WARPS][WARP];
    const Tokens of{tokens, token_bytes, rows, vocabulary};
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (u64 first = (u64)blockIdx.x * PLACED_ROWS; first < rows; first += (u64)gridDim.x * PLACED_ROWS) {
        const u64 row = first + lane;
        const u32 key = of.key_or_none(row);
        u32 before = 0;
        for (u64 start = 0; start < rows; start += TILE) {
            for (u32 i = threadIdx.x; i < TILE / 4; i += BLOCK_THREADS) {
                const u64 at = start + 4 * i;
                tile[i] = make_uint4(of.key_or_none(at), of.key_or_none(at + 1), of.key_or_none(at + 2),
                                     of.key_or_none(at + 3));
            }
            __syncthreads();
            const u64 part = start + warp * PART;
            const uint4* keys = tile + warp * (PART / 4);
            // Of the rows with the same token, earlier ones come before.
            const u32 bound = part + PART <= first ? key + 1 : key;
#pragma unroll 8
            for (u32 i = 0; i < PART / 4; i++) {
                const uint4 four = keys[i];
                before += (u32)(four.x < bound) + (u32)(four.y < bound) + (u32)(four.z < bound) + (u32)(four.w < bound);
            }
            if (part <= first && first < part + PART) {
                const u32* each = reinterpret_cast<const u32*>(keys);
                for (u32 i = 0; part + i < row; i++) before += (u32)(each[i] == key);
            }
            // The next tile overwrites this one.
            __syncthreads();
        }
        counts[warp][lane] = before;
        __syncthreads();
        if (warp == 0 && row < rows) {
            for (u32 i = 1; i < WARPS; i++) before += counts[i][lane];
            order[before] = (i32)row;
        }
        // The next rows overwrite the counts.
        __syncthreads();
    }
}

/// Adds each run of RUN sorted rows to the table's gradient, a block for each run. The sum of a
/// token that continues from the run before goes to row 2 run of `sums`, and of one that begins
/// here and continues in the next to the row after it, for `embedding_join`.
template <int N, class T>
INLINE void embedding_add(
    float* __restrict__ dtable, float* __restrict__ sums, const T* __restrict__ dout, const i32* __restrict__ order,
    const Tokens& tokens, u64 columns) {
    /// The keys of the run, of the row before it and of the row after it.
    __shared__ u32 keys[RUN + 2];
    __shared__ i32 sorted[RUN];
    const u64 run = blockIdx.x, begin = run * RUN;
    const u32 height = tokens.rows - begin < RUN ? (u32)(tokens.rows - begin) : RUN;
    for (u32 i = threadIdx.x; i < height + 2; i += BLOCK_THREADS) {
        const u64 at = begin + i;
        keys[i] = at == 0 ? NO_KEY : tokens.sorted_key(order, at - 1);
        if (i < height) sorted[i] = order[at];
    }
    __syncthreads();
    typedef Pack<T, N> P;
    typedef Pack<float, N> Sum;
    const u64 packs = columns / N, stride = (u64)gridDim.y * blockDim.x;
    for (u64 pack = (u64)blockIdx.y * blockDim.x + threadIdx.x; pack < packs; pack += stride) {
        bool begins_here = keys[0] != keys[1];
        Sum sum = {};
        for (u32 first = 0; first < height; first += IN_FLIGHT) {
            P x[IN_FLIGHT];
            UNROLLED for (u32 k = 0; k < IN_FLIGHT; k++) {
                // Beyond the last row it again, which is not used.
                const u32 i = first + k < height ? first + k : height - 1;
                x[k] = load_pack<P>(dout, (u64)sorted[i] * packs + pack);
            }
            UNROLLED for (u32 k = 0; k < IN_FLIGHT; k++) {
                const u32 i = first + k;
                if (i >= height) break;
                UNROLLED for (int c = 0; c < N; c++) sum.values[c] = sum.values[c] + wide(x[k].values[c]);
                const bool ends_here = keys[i + 1] != keys[i + 2];
                if (!ends_here && i + 1 < height) continue;
                const u64 key = keys[i + 1];
                if (!begins_here || !ends_here) {
                    store_pack(sums, (2 * run + begins_here) * packs + pack, sum);
                } else if (key < tokens.vocabulary) {
                    Sum entry = load_pack<Sum>(dtable, key * packs + pack);
                    UNROLLED for (int c = 0; c < N; c++) entry.values[c] = entry.values[c] + sum.values[c];
                    store_pack(dtable, key * packs + pack, entry);
                }
                begins_here = true, sum = Sum{};
            }
        }
    }
}
#define EMBEDDING_ADD(NAME, T)                                                                                         \
    KERNEL(BLOCK_THREADS)                                                                                              \
    embedding_add_##NAME(float* dtable, float* sums, const T* dout, const i32* order, const void* tokens,              \
                         u32 token_bytes, u64 rows, u64 columns, u64 vocabulary) {                                     \
        const Tokens of{tokens, token_bytes, rows, vocabulary};                                                        \
        IN_PACKS(PACK, columns % PACK == 0 && aligned<PACK * sizeof(T)>(dout) && aligned(dtable, sums),                \
                 embedding_add<N>(dtable, sums, dout, order, of, columns);)                                            \
    }
FOR_F32_AND_BF16(EMBEDDING_ADD)

/// Adds the sums of a token that begins in this block's run and continues in others, in order.
KERNEL(BLOCK_THREADS)
embedding_join(
    float* __restrict__ dtable, const float* __restrict__ sums, const i32* __restrict__ order,
    const void* __restrict__ tokens, u32 token_bytes, u64 rows, u64 columns, u64 vocabulary) {
    const Tokens of{tokens, token_bytes, rows, vocabulary};
    const u64 run = blockIdx.x, begin = run * RUN, next = begin + RUN;
    if (next >= rows) return;
    const u32 key = of.sorted_key(order, next - 1);
    const bool begins_here = begin == 0 || of.sorted_key(order, begin - 1) != key;
    if (!begins_here || key >= vocabulary || of.sorted_key(order, next) != key) return;
    // The first run after this one that does not begin with the token.
    u64 low = run + 1, high = (rows + RUN - 1) / RUN;
    while (high - low > 1) {
        const u64 middle = low + (high - low) / 2;
        if (of.sorted_key(order, middle * RUN) == key) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const u64 stride = (u64)gridDim.y * blockDim.x;
    for (u64 column = (u64)blockIdx.y * blockDim.x + threadIdx.x; column < columns; column += stride) {
        float total = sums[(2 * run + 1) * columns + column];
#pragma unroll 8
        for (u64 other = run + 1; other < high; other++) total = total + sums[2 * other * columns + column];
        dtable[key * columns + column] = dtable[key * columns + column] + total;
    }
}

KERNEL(BLOCK_THREADS) split_documents(i64* tokens, i32* begins, const i64* codes, u64 rows) {
    for (u64 row = first_index(); row < rows; row += grid_threads()) {
        const i64 code = codes[row];
        tokens[row] = code & 0xffffffffll;
        begins[row] = (i32)(code >> 32);
    }
}
