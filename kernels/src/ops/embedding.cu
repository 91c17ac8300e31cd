// The embedding of tokens and the gradient of its table: see embedding.rs.
#include "common.cuh"

constexpr u32 PACK = 4;
/// Rows that a block sorts, and sorted parts that a pass merges; as in embedding.rs.
constexpr u32 PART = 512;
constexpr u32 MERGED = 16;
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
};

/// Sorted rows are numbers: the key above, the row in the lower half. Key number `at` of them.
INLINE u32 sorted_key(const i64* order, u64 rows, u64 at) { return at < rows ? (u32)(order[at] >> 32) : NO_KEY; }

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

/// Sorts each part of PART rows by token and row into `half` of order (2, R). No two numbers are
/// equal, so a row's place is the count of lesser ones.
KERNEL(BLOCK_THREADS)
embedding_sort(
    i64* __restrict__ order, const void* __restrict__ tokens, u32 token_bytes, u64 rows, u64 vocabulary, u64 half) {
    constexpr u32 PER_THREAD = PART / BLOCK_THREADS;
    __shared__ i64 part[PART];
    const Tokens of{tokens, token_bytes, rows, vocabulary};
    const u64 begin = (u64)blockIdx.x * PART;
    i64 mine[PER_THREAD];
    UNROLLED for (u32 i = 0; i < PER_THREAD; i++) {
        const u32 at = i * BLOCK_THREADS + threadIdx.x;
        const u64 row = begin + at;
        // What is beyond the last row is greater than all.
        mine[i] = (i64)(row < rows ? of.key(row) : NO_KEY >> 1) << 32 | (i64)row;
        part[at] = mine[i];
    }
    __syncthreads();
    u32 lesser[PER_THREAD] = {};
#pragma unroll 8
    for (u32 other = 0; other < PART; other++) {
        const i64 number = part[other];
        UNROLLED for (u32 i = 0; i < PER_THREAD; i++) lesser[i] += (u32)(number < mine[i]);
    }
    UNROLLED for (u32 i = 0; i < PER_THREAD; i++)
        if (begin + i * BLOCK_THREADS + threadIdx.x < rows) order[half * rows + begin + lesser[i]] = mine[i];
}

/// Merges each MERGED sorted parts of `length` rows from `half` of order (2, R) to the other half.
/// A row's place is the count of lesser ones in each part, found by halving, in all parts at once.
KERNEL(BLOCK_THREADS) embedding_merge(i64* order, u64 rows, u32 length, u64 half) {
    const i64* sorted = order + half * rows;
    i64* merged = order + (1 - half) * rows;
    for (u64 at = first_index(); at < rows; at += grid_threads()) {
        const u64 begin = at - at % ((u64)length * MERGED);
        const i64 mine = sorted[at];
        u32 lesser[MERGED] = {};
        for (u32 step = length; step > 0; step /= 2) {
            UNROLLED for (u32 k = 0; k < MERGED; k++) {
                const u32 last = lesser[k] + step - 1;
                const u64 other = begin + (u64)k * length + last;
                if (last < length && other < rows && sorted[other] < mine) lesser[k] += step;
            }
        }
        u64 place = begin;
        UNROLLED for (u32 k = 0; k < MERGED; k++) place += lesser[k];
        merged[place] = mine;
    }
}

/// Adds each run of RUN sorted rows to the table's gradient, a block for each run. The sum of a
/// token that continues from the run before goes to row 2 run of `sums`, and of one that begins
/// here and continues in the next to the row after it, for `embedding_join`.
template <int N, class T>
INLINE void embedding_add(
    float* __restrict__ dtable, float* __restrict__ sums, const T* __restrict__ dout, const i64* __restrict__ order,
    u64 rows, u64 columns, u64 vocabulary) {
    /// The keys of the run, of the row before it and of the row after it.
    __shared__ u32 keys[RUN + 2];
    __shared__ u32 sorted[RUN];
    const u64 run = blockIdx.x, begin = run * RUN;
    const u32 height = rows - begin < RUN ? (u32)(rows - begin) : RUN;
    for (u32 i = threadIdx.x; i < height + 2; i += BLOCK_THREADS) {
        const u64 at = begin + i;
        keys[i] = at == 0 ? NO_KEY : sorted_key(order, rows, at - 1);
        if (i < height) sorted[i] = (u32)order[at];
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
                } else if (key < vocabulary) {
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
    embedding_add_##NAME(float* dtable, float* sums, const T* dout, const i64* order, u64 rows, u64 columns,           \
                         u64 vocabulary) {                                                                             \
        IN_PACKS(PACK, columns % PACK == 0 && aligned<PACK * sizeof(T)>(dout) && aligned(dtable, sums),                \
                 embedding_add<N>(dtable, sums, dout, order, rows, columns, vocabulary);)                              \
    }
FOR_F32_AND_BF16(EMBEDDING_ADD)

/// Adds the sums of a token that begins in this block's run and continues in others, in order.
KERNEL(BLOCK_THREADS)
embedding_join(
    float* __restrict__ dtable, const float* __restrict__ sums, const i64* __restrict__ order, u64 rows, u64 columns,
    u64 vocabulary) {
    const u64 run = blockIdx.x, begin = run * RUN, next = begin + RUN;
    if (next >= rows) return;
    const u32 key = sorted_key(order, rows, next - 1);
    const bool begins_here = begin == 0 || sorted_key(order, rows, begin - 1) != key;
    if (!begins_here || key >= vocabulary || sorted_key(order, rows, next) != key) return;
    // The first run after this one that does not begin with the token.
    u64 low = run + 1, high = (rows + RUN - 1) / RUN;
    while (high - low > 1) {
        const u64 middle = low + (high - low) / 2;
        if (sorted_key(order, rows, middle * RUN) == key) {
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
