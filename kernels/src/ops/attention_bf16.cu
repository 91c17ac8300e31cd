// Attention in bf16 on tensor cores, for heads of a multiple of 16 columns, at most 128: see
// attention.rs. Sums and the softmax are f32; weights and their gradients are rounded to bf16
// before they are multiplied.
//
// Each of four warps has 16 rows of queries, or of keys, and goes over the others STEP at a time.
// These are in shared memory twice where both are needed: row by row, and turned, with two
// neighbouring rows of a column in one word. dq, dk and dv each have a kernel that computes scores
// again, so nothing is added atomically, and every sum has one order.
#include "common.cuh"

constexpr u32 WARPS = 4;
/// Rows of a block of threads.
constexpr u32 SIDE = 16 * WARPS;
constexpr u32 THREADS = WARP * WARPS;
/// Words between rows are 4 more than a multiple of 8, so that the 8 rows and 4 words that a warp
/// reads at once are in 32 banks.
constexpr u32 GAP = 4;
constexpr float LOG2 = 1.44269504f;
constexpr float LN2 = 0.69314718f;

// ---- what a tensor core does ----

/// Four sums of a tile of 16 × 8: rows `group()` and 8 more, columns 2 `pair()` and one more.
struct Sums4 {
    float at[4];
};

/// The left operand, 16 × 16: rows as in `Sums4`; words hold columns 2 `pair()` and one more, then
/// 8 further on. [row, row + 8, row, row + 8] of [first, first, 8 on, 8 on].
struct Left4 {
    u32 at[4];
};

/// The lane's row within 8, and its pair of columns.
INLINE u32 group() { return threadIdx.x % WARP / 4; }
INLINE u32 pair() { return threadIdx.x % 4; }

/// sums += left · right, 16 × 8 × 16: PTX ISA, "mma.m16n8k16". `low` and `high` are column
/// `group()` of the right operand: rows 2 `pair()` and one more, then 8 further on.
INLINE void multiply_tile(Sums4& sums, const Left4& left, u32 low, u32 high) {
    float* c = sums.at;
    const u32* a = left.at;
#if __CUDA_ARCH__ >= 800
    float d0, d1, d2, d3;
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d0), "=f"(d1), "=f"(d2), "=f"(d3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
    c[0] = d0, c[1] = d1, c[2] = d2, c[3] = d3;
#else
    // Not launched on GPUs without this instruction (attention/gpu.rs).
    c[0] = c[1] = c[2] = c[3] = nan_f32() + __uint_as_float(a[0] ^ low ^ high);
#endif
}

/// 2ˣ within 2 ulp, subnormal results as 0.
INLINE float power_of_2(float x) {
#if __CUDA_ARCH__ >= 800
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
#else
    return exponential(x * LN2);
#endif
}

/// Two numbers as bf16 in one word, the first in its low half.
INLINE u32 two(float low, float high) {
#if __CUDA_ARCH__ >= 800
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return (u32)narrow<bf16>(low).bits | (u32)narrow<bf16>(high).bits << 16;
#endif
}

// ---- tiles ----

/// Rows of one head, `stride` elements apart, each aligned to 16 bytes.
struct Rows {
    const bf16* first;
    u64 stride, rows;
    u32 width;
};

/// Eight elements, zeros outside.
INLINE uint4 eight(const Rows& from, u64 row, u32 column) {
    const bool inside = row < from.rows && column < from.width;
    return inside ? *reinterpret_cast<const uint4*>(from.first + row * from.stride + column) : make_uint4(0, 0, 0, 0);
}

/// Rows as words of two columns.
template <u32 STEP, u32 WIDTH> struct alignas(16) Straight {
    u32 at[STEP][WIDTH / 2 + GAP];

    INLINE void load(const Rows& from, u64 start) {
        for (u32 i = threadIdx.x; i < STEP * WIDTH / 8; i += THREADS) {
            const u32 row = i / (WIDTH / 8), column = i % (WIDTH / 8) * 8;
            *reinterpret_cast<uint4*>(&at[row][column / 2]) = eight(from, start + row, column);
        }
    }
};

/// Columns as words of two rows.
template <u32 STEP, u32 WIDTH> struct Turned {
    u32 at[WIDTH][STEP / 2 + GAP];

    INLINE void load(const Rows& from, u64 start) {
        for (u32 i = threadIdx.x; i < STEP * WIDTH / 16; i += THREADS) {
            // Lanes have neighbouring rows: their words are in different banks.
            const u32 row = i % (STEP / 2) * 2, column = i / (STEP / 2) * 8;
            const uint4 low = eight(from, start + row, column), high = eight(from, start + row + 1, column);
            const u32 lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                at[column + 2 * k][row / 2] = (lows[k] & 0xffffu) | highs[k] << 16;
                at[column + 2 * k + 1][row / 2] = lows[k] >> 16 | (highs[k] & 0xffff0000u);
            }
        }
    }
};

/// 16 rows × 16·TILES columns of a left operand.
template <u32 TILES> struct Left {
    Left4 at[TILES];

    /// The warp's rows of the block's that begin at `start`.
    INLINE void load(const Rows& from, u64 start) {
        const u64 row = start + threadIdx.x / WARP * 16 + group();
#pragma unroll
        for (u32 k = 0; k < TILES; k++) {
#pragma unroll
            for (u32 part = 0; part < 4; part++) {
                const u64 of = row + part % 2 * 8;
                const u32 column = k * 16 + part / 2 * 8 + pair() * 2;
                const bool inside = of < from.rows && column < from.width;
                at[k].at[part] = inside ? *reinterpret_cast<const u32*>(from.first + of * from.stride + column) : 0;
            }
        }
    }
};

/// 16 rows × 8·TILES columns of sums.
template <u32 TILES> struct Sums {
    Sums4 at[TILES];

    INLINE void clear() {
#pragma unroll
        for (u32 n = 0; n < TILES; n++) at[n] = Sums4{{0.0f, 0.0f, 0.0f, 0.0f}};
    }

    /// Adds left · right: column `c` of the right operand is `right[c]`.
    template <u32 DEPTH, u32 WORDS>
    INLINE void add(const Left<DEPTH>& left, const u32 (&right)[TILES * 8][WORDS]) {
#pragma unroll
        for (u32 n = 0; n < TILES; n++) {
            const u32* words = right[n * 8 + group()];
#pragma unroll
            for (u32 k = 0; k < DEPTH; k++) {
                multiply_tile(at[n], left.at[k], words[k * 8 + pair()], words[k * 8 + 4 + pair()]);
            }
        }
    }

    /// As the left operand of another product.
    INLINE Left<TILES / 2> narrowed() const {
        Left<TILES / 2> left;
#pragma unroll
        for (u32 k = 0; k < TILES / 2; k++) {
            const float *low = at[2 * k].at, *high = at[2 * k + 1].at;
            left.at[k] = Left4{{two(low[0], low[1]), two(low[2], low[3]), two(high[0], high[1]), two(high[2], high[3])}};
        }
        return left;
    }

    /// Writes the lane's row `half` times a factor to `to`, the first column of that row.
    INLINE void write_row(bf16* to, u32 half, float factor, u32 width) const {
#pragma unroll
        for (u32 n = 0; n < TILES; n++) {
            const u32 column = n * 8 + pair() * 2;
            const u32 word = two(at[n].at[half * 2] * factor, at[n].at[half * 2 + 1] * factor);
            if (column < width) *reinterpret_cast<u32*>(to + column) = word;
        }
    }
};

/// Reduces over the four lanes of a row; all get the result.
template <class F> INLINE float row_reduce(float x, F f) {
    x = f(x, __shfl_xor_sync(WHOLE_WARP, x, 2));
    return f(x, __shfl_xor_sync(WHOLE_WARP, x, 1));
}

// ---- kernels ----

/// The sizes of attention.rs.
struct Sizes {
    u64 time, heads, kv_heads;
    u32 width, causal;
    float scale;

    INLINE u64 blocks() const { return (time + SIDE - 1) / SIDE; }
    INLINE bool attends(u64 query, u64 key) const { return query < time && key < time && (causal == 0 || key <= query); }
    INLINE u64 kv_head(u64 head) const { return head * kv_heads / heads; }
    INLINE Rows rows_of(const bf16* array, u64 stride, u64 sequence, u64 head) const {
        return Rows{array + sequence * time * stride + head * width, stride, time, width};
    }
    /// Keys that a block of queries attends to.
    INLINE u64 keys_end(u64 start) const { return causal != 0 && start + SIDE < time ? start + SIDE : time; }
};

/// The lane's first row of a block of threads.
INLINE u64 own_row(u64 start) { return start + threadIdx.x / WARP * 16 + group(); }

template <u32 WIDTH>
INLINE void forward(bf16* out, float* log_sum_exp, const bf16* q_array, const bf16* k_array, const bf16* v_array,
                    u64 q_stride, u64 kv_stride, const Sizes& sizes) {
    constexpr u32 STEP = 64;
    __shared__ Straight<STEP, WIDTH> k_rows;
    __shared__ Turned<STEP, WIDTH> v_turned;
    const u64 blocks = sizes.blocks();
    // Blocks with the most keys come first.
    const u64 start = (blocks - 1 - blockIdx.x % blocks) * SIDE, line = blockIdx.x / blocks;
    const u64 sequence = line / sizes.heads, head = line % sizes.heads;
    const Rows k = sizes.rows_of(k_array, kv_stride, sequence, sizes.kv_head(head));
    const Rows v = sizes.rows_of(v_array, kv_stride, sequence, sizes.kv_head(head));
    Left<WIDTH / 16> q;
    q.load(sizes.rows_of(q_array, q_stride, sequence, head), start);
    const float scale = sizes.scale * LOG2;
    float largest[2] = {-infinity(), -infinity()}, sum[2] = {0.0f, 0.0f};
    Sums<WIDTH / 8> sums;
    sums.clear();
    for (u64 keys = 0; keys < sizes.keys_end(start); keys += STEP) {
        __syncthreads();
        k_rows.load(k, keys);
        v_turned.load(v, keys);
        __syncthreads();
        Sums<STEP / 8> scores;
        scores.clear();
        scores.add(q, k_rows.at);
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u64 query = own_row(start) + half * 8;
            float most = largest[half];
#pragma unroll
            for (u32 n = 0; n < STEP / 8; n++) {
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    float& score = scores.at[n].at[half * 2 + i];
                    const u64 key = keys + n * 8 + pair() * 2 + i;
                    // Rows after the last one have any weights.
                    score = key < sizes.time && (sizes.causal == 0 || key <= query) ? score * scale : -infinity();
                    most = Largest()(most, score);
                }
            }
            most = row_reduce(most, Largest());
            const float rescale = power_of_2(largest[half] - most);
            largest[half] = most;
            float of_row = 0.0f;
#pragma unroll
            for (u32 n = 0; n < STEP / 8; n++) {
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    float& score = scores.at[n].at[half * 2 + i];
                    score = power_of_2(score - most);
                    of_row += score;
                }
            }
            sum[half] = fmaf(sum[half], rescale, row_reduce(of_row, Sum()));
#pragma unroll
            for (u32 n = 0; n < WIDTH / 8; n++) {
                sums.at[n].at[half * 2] *= rescale;
                sums.at[n].at[half * 2 + 1] *= rescale;
            }
        }
        sums.add(scores.narrowed(), v_turned.at);
    }
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u64 query = own_row(start) + half * 8;
        if (query >= sizes.time) continue;
        bf16* to = out + ((sequence * sizes.time + query) * sizes.heads + head) * sizes.width;
        sums.write_row(to, half, 1.0f / sum[half], sizes.width);
        if (pair() == 0) log_sum_exp[line * sizes.time + query] = fmaf(largest[half], LN2, logarithm(sum[half]));
    }
}

/// The operands of backward.
struct Inputs {
    const bf16 *q, *k, *v, *dout;
    const float *log_sum_exp, *delta;
    u64 q_stride, kv_stride;
};

/// The weight of a key for a query, from their score; `line` is the query's head.
INLINE float weight_of(float score, u64 query, u64 key, u64 line, const Inputs& in, const Sizes& sizes) {
    if (!sizes.attends(query, key)) return 0.0f;
    return power_of_2((score * sizes.scale - in.log_sum_exp[line + query]) * LOG2);
}

constexpr u32 BACKWARD_STEP = 32;

template <u32 WIDTH> INLINE void query_gradient(bf16* dq, u64 dq_stride, const Inputs& in, const Sizes& sizes) {
    constexpr u32 STEP = BACKWARD_STEP;
    __shared__ Straight<STEP, WIDTH> k_rows, v_rows;
    __shared__ Turned<STEP, WIDTH> k_turned;
    const u64 blocks = sizes.blocks(), time = sizes.time;
    const u64 start = (blocks - 1 - blockIdx.x % blocks) * SIDE, head_line = blockIdx.x / blocks;
    const u64 sequence = head_line / sizes.heads, head = head_line % sizes.heads, line = head_line * time;
    const Rows k = sizes.rows_of(in.k, in.kv_stride, sequence, sizes.kv_head(head));
    const Rows v = sizes.rows_of(in.v, in.kv_stride, sequence, sizes.kv_head(head));
    Left<WIDTH / 16> q, dout;
    q.load(sizes.rows_of(in.q, in.q_stride, sequence, head), start);
    dout.load(sizes.rows_of(in.dout, sizes.heads * sizes.width, sequence, head), start);
    Sums<WIDTH / 8> sums;
    sums.clear();
    for (u64 keys = 0; keys < sizes.keys_end(start); keys += STEP) {
        __syncthreads();
        k_rows.load(k, keys);
        v_rows.load(v, keys);
        k_turned.load(k, keys);
        __syncthreads();
        Sums<STEP / 8> scores, gradients;
        scores.clear();
        gradients.clear();
        scores.add(q, k_rows.at);
        gradients.add(dout, v_rows.at);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u64 query = own_row(start) + i / 2 * 8;
            const float delta = query < time ? in.delta[line + query] : 0.0f;
#pragma unroll
            for (u32 n = 0; n < STEP / 8; n++) {
                const u64 key = keys + n * 8 + pair() * 2 + i % 2;
                const float weight = weight_of(scores.at[n].at[i], query, key, line, in, sizes);
                scores.at[n].at[i] = weight * (gradients.at[n].at[i] - delta);
            }
        }
        sums.add(scores.narrowed(), k_turned.at);
    }
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u64 query = own_row(start) + half * 8;
        bf16* to = dq + (sequence * time + query) * dq_stride + head * sizes.width;
        if (query < time) sums.write_row(to, half, sizes.scale, sizes.width);
    }
}

/// dv if VALUES, else dk: sums over the heads of q that share the head, and in each over its
/// queries, in order. Scores are turned: keys are rows.
template <u32 WIDTH, bool VALUES>
INLINE void key_gradient(bf16* gradient, u64 gradient_stride, const Inputs& in, const Sizes& sizes) {
    constexpr u32 STEP = BACKWARD_STEP;
    __shared__ Straight<STEP, WIDTH> q_rows, dout_rows;
    __shared__ Turned<STEP, WIDTH> turned;
    const u64 blocks = sizes.blocks(), time = sizes.time, group_size = sizes.heads / sizes.kv_heads;
    const u64 keys = blockIdx.x % blocks * SIDE, kv_line = blockIdx.x / blocks;
    const u64 sequence = kv_line / sizes.kv_heads, kv_head = kv_line % sizes.kv_heads;
    Left<WIDTH / 16> k, v;
    k.load(sizes.rows_of(in.k, in.kv_stride, sequence, kv_head), keys);
    if (!VALUES) v.load(sizes.rows_of(in.v, in.kv_stride, sequence, kv_head), keys);
    Sums<WIDTH / 8> sums;
    sums.clear();
    for (u64 head = kv_head * group_size; head < (kv_head + 1) * group_size; head++) {
        const u64 line = (sequence * sizes.heads + head) * time;
        const Rows q = sizes.rows_of(in.q, in.q_stride, sequence, head);
        const Rows dout = sizes.rows_of(in.dout, sizes.heads * sizes.width, sequence, head);
        for (u64 start = sizes.causal != 0 ? keys : 0; start < time; start += STEP) {
            __syncthreads();
            q_rows.load(q, start);
            if (!VALUES) dout_rows.load(dout, start);
            turned.load(VALUES ? dout : q, start);
            __syncthreads();
            Sums<STEP / 8> scores, gradients;
            scores.clear();
            scores.add(k, q_rows.at);
            if (!VALUES) {
                gradients.clear();
                gradients.add(v, dout_rows.at);
            }
#pragma unroll
            for (u32 n = 0; n < STEP / 8; n++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u64 query = start + n * 8 + pair() * 2 + i % 2, key = own_row(keys) + i / 2 * 8;
                    float& score = scores.at[n].at[i];
                    score = weight_of(score, query, key, line, in, sizes);
                    if (!VALUES && query < time) score *= gradients.at[n].at[i] - in.delta[line + query];
                }
            }
            sums.add(scores.narrowed(), turned.at);
        }
    }
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u64 key = own_row(keys) + half * 8;
        bf16* to = gradient + (sequence * time + key) * gradient_stride + kv_head * sizes.width;
        if (key < time) sums.write_row(to, half, VALUES ? 1.0f : sizes.scale, sizes.width);
    }
}

/// Kernels for heads of at most WIDTH columns. A multiprocessor holds BLOCKS blocks of threads;
/// without that number the compiler makes room for more of them and spills.
#define ATTENTION(WIDTH, BLOCKS)                                                                                       \
    KERNEL(THREADS COMMA BLOCKS)                                                                                       \
    attention_tensor_##WIDTH##_bf16(bf16* out, float* log_sum_exp, const bf16* q, const bf16* k, const bf16* v,        \
                                    u64 q_stride, u64 kv_stride, u64 time, u64 heads, u64 kv_heads, u64 width,         \
                                    u32 causal, float scale) {                                                         \
        const Sizes sizes{time, heads, kv_heads, (u32)width, causal, scale};                                           \
        forward<WIDTH>(out, log_sum_exp, q, k, v, q_stride, kv_stride, sizes);                                         \
    }                                                                                                                  \
    GRADIENT(BLOCKS, attention_tensor_dq_##WIDTH, query_gradient<WIDTH>)                                                       \
    GRADIENT(BLOCKS, attention_tensor_dk_##WIDTH, key_gradient<WIDTH COMMA false>)                                             \
    GRADIENT(BLOCKS, attention_tensor_dv_##WIDTH, key_gradient<WIDTH COMMA true>)
#define COMMA ,
#define GRADIENT(BLOCKS, NAME, FUNCTION)                                                                               \
    KERNEL(THREADS COMMA BLOCKS)                                                                                       \
    NAME##_bf16(bf16* gradient, u64 gradient_stride, const bf16* q, const bf16* k, const bf16* v, const bf16* dout,    \
                const float* log_sum_exp, const float* delta, u64 q_stride, u64 kv_stride, u64 time, u64 heads,        \
                u64 kv_heads, u64 width, u32 causal, float scale) {                                                    \
        const Sizes sizes{time, heads, kv_heads, (u32)width, causal, scale};                                           \
        const Inputs in{q, k, v, dout, log_sum_exp, delta, q_stride, kv_stride};                                       \
        FUNCTION(gradient, gradient_stride, in, sizes);                                                                \
    }
ATTENTION(64, 3)
ATTENTION(128, 2)
