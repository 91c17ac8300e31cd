// Attention in f32 arithmetic, for f32 and for the heads of bf16 that attention_bf16.cu does not
// take: see attention.rs.
//
// A block of threads has SIDE rows of queries, or of keys, and goes over the others SIDE at a time.
// Scores are tiles of SIDE × SIDE in registers, which take columns of both sides CHUNK at a time
// through shared memory. dq, dk and dv each have a kernel that computes scores again, so nothing is
// added atomically, and every sum has one order. That of dq, the first, also writes delta.
#include "common.cuh"

constexpr u32 SIDE = 64;
constexpr u32 CHUNK = 32;
/// Threads of a block are SPAN × SPAN. Each has FOUR neighbouring rows, and columns SPAN apart.
constexpr u32 SPAN = 16;
constexpr u32 FOUR = SIDE / SPAN;
/// Columns of a chunk that a thread sums.
constexpr u32 ACROSS = CHUNK / SPAN;

/// Rows of one head: `rows` of them, `stride` elements apart.
template <class T> struct Rows {
    const T* first;
    u64 stride, rows;
};

/// The rows of head `head` in a sequence.
template <class T> INLINE Rows<T> rows_of(const T* array, u64 stride, u64 time, u64 sequence, u64 head, u64 width) {
    return Rows<T>{array + sequence * time * stride + head * width, stride, time};
}

/// A chunk of the columns of SIDE rows. One more element a row spreads a column over the banks.
typedef float Chunk[SIDE][CHUNK + 1];
typedef float Weights[SIDE][SIDE + 1];

/// What the threads of a block share.
struct Shared {
    Chunk left, right;
    Weights weights;
};

/// Copies a chunk of columns of the rows from `start` on; zeros where there are none.
template <class T> INLINE void load(Chunk& chunk, const Rows<T>& from, u64 start, u64 column, u64 width) {
    for (u32 i = threadIdx.x; i < SIDE * CHUNK; i += SPAN * SPAN) {
        const u32 row = i / CHUNK, across = i % CHUNK;
        const bool inside = start + row < from.rows && column + across < width;
        chunk[row][across] = inside ? wide(from.first[(start + row) * from.stride + column + across]) : 0.0f;
    }
}

INLINE u32 first_row() { return threadIdx.x / SPAN * FOUR; }
INLINE u32 first_column() { return threadIdx.x % SPAN; }

/// tile[i][j] = left row · right row over all columns, in order.
template <class T>
INLINE void scores(float (&tile)[FOUR][FOUR], Shared& shared, const Rows<T>& left, u64 left_start, const Rows<T>& right,
                   u64 right_start, u64 width) {
    UNROLLED for (u32 i = 0; i < FOUR; i++) {
        UNROLLED for (u32 j = 0; j < FOUR; j++) tile[i][j] = 0.0f;
    }
    for (u64 column = 0; column < width; column += CHUNK) {
        // Others may still read the chunks of the round before.
        __syncthreads();
        load(shared.left, left, left_start, column, width);
        load(shared.right, right, right_start, column, width);
        __syncthreads();
#pragma unroll 4
        for (u32 step = 0; step < CHUNK; step++) {
            float a[FOUR], b[FOUR];
            UNROLLED for (u32 i = 0; i < FOUR; i++) a[i] = shared.left[first_row() + i][step];
            UNROLLED for (u32 j = 0; j < FOUR; j++) b[j] = shared.right[first_column() + j * SPAN][step];
            UNROLLED for (u32 i = 0; i < FOUR; i++) {
                UNROLLED for (u32 j = 0; j < FOUR; j++) tile[i][j] = fmaf(a[i], b[j], tile[i][j]);
            }
        }
    }
}

/// Sums of SIDE rows over at most CHUNKS chunks of columns.
template <int CHUNKS> struct Sums {
    float at[CHUNKS][FOUR][ACROSS];

    INLINE void clear() {
        UNROLLED for (int chunk = 0; chunk < CHUNKS; chunk++) {
            UNROLLED for (u32 i = 0; i < FOUR; i++) {
                UNROLLED for (u32 j = 0; j < ACROSS; j++) at[chunk][i][j] = 0.0f;
            }
        }
    }

    INLINE void scale_row(u32 i, float factor) {
        UNROLLED for (int chunk = 0; chunk < CHUNKS; chunk++) {
            UNROLLED for (u32 j = 0; j < ACROSS; j++) at[chunk][i][j] *= factor;
        }
    }

    /// Adds Σ weights[row][k] right[k][column], in the order of k.
    template <class T> INLINE void add(Shared& shared, const Rows<T>& right, u64 start, u64 width) {
        UNROLLED for (int chunk = 0; chunk < CHUNKS; chunk++) {
            if (chunk * CHUNK >= width) break;
            // The weights are written, and the chunk of the round before is no longer read.
            __syncthreads();
            load(shared.right, right, start, chunk * CHUNK, width);
            __syncthreads();
#pragma unroll 4
            for (u32 step = 0; step < SIDE; step++) {
                float across[ACROSS];
                UNROLLED for (u32 j = 0; j < ACROSS; j++) across[j] = shared.right[step][first_column() + j * SPAN];
                UNROLLED for (u32 i = 0; i < FOUR; i++) {
                    const float weight = shared.weights[first_row() + i][step];
                    UNROLLED for (u32 j = 0; j < ACROSS; j++)
                        at[chunk][i][j] = fmaf(weight, across[j], at[chunk][i][j]);
                }
            }
        }
    }

    /// Writes row i times a factor to `to`, the first column of that row.
    template <class T> INLINE void write_row(T* to, u32 i, float factor, u64 width) const {
        UNROLLED for (int chunk = 0; chunk < CHUNKS; chunk++) {
            UNROLLED for (u32 j = 0; j < ACROSS; j++) {
                const u64 column = chunk * CHUNK + first_column() + j * SPAN;
                if (column < width) to[column] = narrow<T>(at[chunk][i][j] * factor);
            }
        }
    }
};

/// Reduces over the SPAN threads that share rows; all get the result.
template <class F> INLINE float row_reduce(float x, F f) {
    UNROLLED for (u32 distance = SPAN / 2; distance > 0; distance /= 2)
        x = f(x, __shfl_xor_sync(WHOLE_WARP, x, distance));
    return x;
}

/// The sizes of attention.rs.
struct Sizes {
    u64 time, heads, kv_heads, width;
    u32 causal;
    float scale;
    u32 window;
    const i32* begins;
    /// Scores s become cap·tanh(s / cap), unless it is 0.
    float cap;

    INLINE u64 blocks() const { return (time + SIDE - 1) / SIDE; }
    /// The first key that a query attends to. It does not decrease along a sequence.
    INLINE u32 first_key(u64 sequence, u32 query) const {
        const u32 in_window = window != 0 && query >= window ? query + 1 - window : 0;
        if (begins == nullptr || query >= time) return in_window;
        return max(in_window, min((u32)max(begins[sequence * time + query], 0), query));
    }
    INLINE bool attends(u64 sequence, u64 query, u64 key) const {
        return query < time && key < time && (causal == 0 || key <= query) && key >= first_key(sequence, query);
    }
};

/// Products of q and k become those whose scores, times the scale, are below the cap.
INLINE void cap_products(float (&tile)[FOUR][FOUR], const Sizes& sizes) {
    if (sizes.cap == 0.0f) return;
    const float ratio = sizes.scale / sizes.cap;
    UNROLLED for (u32 i = 0; i < FOUR; i++) {
        UNROLLED for (u32 j = 0; j < FOUR; j++) tile[i][j] = hyperbolic_tangent(tile[i][j] * ratio) / ratio;
    }
}

/// Below all scores, and finite: a row may not attend to any key of its first blocks, whose scores
/// are −∞ then and whose weights are 0.
constexpr float LOWEST = -3e38f;

template <class T, int CHUNKS>
INLINE void forward(T* __restrict__ out, float* __restrict__ log_sum_exp, const T* __restrict__ q_array,
                    const T* __restrict__ k_array, const T* __restrict__ v_array, u64 q_stride, u64 kv_stride, Sizes sizes) {
    __shared__ Shared shared;
    const u64 blocks = sizes.blocks(), width = sizes.width, time = sizes.time;
    // Blocks with the most keys come first.
    const u64 start = (blocks - 1 - blockIdx.x % blocks) * SIDE, line = blockIdx.x / blocks;
    const u64 sequence = line / sizes.heads, head = line % sizes.heads, kv_head = head * sizes.kv_heads / sizes.heads;
    const Rows<T> q = rows_of(q_array, q_stride, time, sequence, head, width);
    const Rows<T> k = rows_of(k_array, kv_stride, time, sequence, kv_head, width);
    const Rows<T> v = rows_of(v_array, kv_stride, time, sequence, kv_head, width);
    float largest[FOUR], sum[FOUR];
    Sums<CHUNKS> sums;
    sums.clear();
    UNROLLED for (u32 i = 0; i < FOUR; i++) largest[i] = LOWEST, sum[i] = 0.0f;
    const u64 end = sizes.causal != 0 && start + SIDE < time ? start + SIDE : time;
    u32 firsts[FOUR];
    UNROLLED for (u32 i = 0; i < FOUR; i++) firsts[i] = sizes.first_key(sequence, start + first_row() + i);
    for (u64 keys = sizes.first_key(sequence, start) / SIDE * SIDE; keys < end; keys += SIDE) {
        float tile[FOUR][FOUR];
        scores(tile, shared, q, start, k, keys, width);
        cap_products(tile, sizes);
        UNROLLED for (u32 i = 0; i < FOUR; i++) {
            const u64 query = start + first_row() + i;
            float most = largest[i];
            UNROLLED for (u32 j = 0; j < FOUR; j++) {
                const u64 key = keys + first_column() + j * SPAN;
                // Rows after the last one have any weights.
                const bool counts = key < time && (sizes.causal == 0 || key <= query) && key >= firsts[i];
                tile[i][j] = counts ? tile[i][j] * sizes.scale : -infinity();
                most = Largest()(most, tile[i][j]);
            }
            most = row_reduce(most, Largest());
            float of_row = 0.0f;
            UNROLLED for (u32 j = 0; j < FOUR; j++) {
                const float weight = exponential(tile[i][j] - most);
                shared.weights[first_row() + i][first_column() + j * SPAN] = weight;
                of_row += weight;
            }
            const float rescale = exponential(largest[i] - most);
            sum[i] = fmaf(sum[i], rescale, row_reduce(of_row, Sum()));
            sums.scale_row(i, rescale);
            largest[i] = most;
        }
        sums.add(shared, v, keys, width);
    }
    UNROLLED for (u32 i = 0; i < FOUR; i++) {
        const u64 query = start + first_row() + i;
        if (query >= time) break;
        sums.write_row(out + ((sequence * time + query) * sizes.heads + head) * width, i, 1.0f / sum[i], width);
        if (first_column() == 0) log_sum_exp[line * time + query] = largest[i] + logarithm(sum[i]);
    }
}

/// The operands of backward.
template <class T> struct Inputs {
    const T *q, *k, *v, *out, *dout;
    const float* log_sum_exp;
    float* delta;
    u64 q_stride, kv_stride;

    INLINE Rows<T> dout_rows(const Sizes& sizes, u64 sequence, u64 head) const {
        return rows_of(dout, sizes.heads * sizes.width, sizes.time, sequence, head, sizes.width);
    }

    /// Writes delta = Σ dout · out over the columns of a head for the block's rows: a warp a row.
    INLINE void write_delta(const Sizes& sizes, u64 sequence, u64 head, u64 start) const {
        const Rows<T> gradients = dout_rows(sizes, sequence, head);
        const Rows<T> outputs = rows_of(out, gradients.stride, sizes.time, sequence, head, sizes.width);
        for (u64 row = start + threadIdx.x / WARP; row < start + SIDE && row < sizes.time; row += SPAN * SPAN / WARP) {
            float sum = 0.0f;
            for (u64 i = row * gradients.stride + threadIdx.x % WARP; i < row * gradients.stride + sizes.width; i += WARP) {
                sum = fmaf(wide(gradients.first[i]), wide(outputs.first[i]), sum);
            }
            sum = warp_sum(sum);
            if (threadIdx.x % WARP == 0) delta[(sequence * sizes.heads + head) * sizes.time + row] = sum;
        }
        __syncthreads();
    }
};

/// The weights of the queries from `start` on for the keys from `keys` on, with keys as rows if
/// TURNED; and with WITH_GRADIENT times their gradients less delta.
template <bool TURNED, bool WITH_GRADIENT, class T>
INLINE void write_weights(Shared& shared, const Inputs<T>& in, const Sizes& sizes, u64 sequence, u64 head, u64 start, u64 keys) {
    const u64 kv_head = head * sizes.kv_heads / sizes.heads, line = (sequence * sizes.heads + head) * sizes.time;
    const Rows<T> q = rows_of(in.q, in.q_stride, sizes.time, sequence, head, sizes.width);
    const Rows<T> k = rows_of(in.k, in.kv_stride, sizes.time, sequence, kv_head, sizes.width);
    float tile[FOUR][FOUR], gradient[FOUR][FOUR];
    TURNED ? scores(tile, shared, k, keys, q, start, sizes.width) : scores(tile, shared, q, start, k, keys, sizes.width);
    cap_products(tile, sizes);
    const float ratio = sizes.cap == 0.0f ? 0.0f : sizes.scale / sizes.cap;
    if (WITH_GRADIENT) {
        const Rows<T> v = rows_of(in.v, in.kv_stride, sizes.time, sequence, kv_head, sizes.width);
        const Rows<T> dout = in.dout_rows(sizes, sequence, head);
        TURNED ? scores(gradient, shared, v, keys, dout, start, sizes.width)
               : scores(gradient, shared, dout, start, v, keys, sizes.width);
    }
    UNROLLED for (u32 i = 0; i < FOUR; i++) {
        UNROLLED for (u32 j = 0; j < FOUR; j++) {
            const u32 row = first_row() + i, column = first_column() + j * SPAN;
            const u64 query = start + (TURNED ? column : row), key = keys + (TURNED ? row : column);
            float weight = 0.0f;
            if (sizes.attends(sequence, query, key)) {
                weight = exponential(tile[i][j] * sizes.scale - in.log_sum_exp[line + query]);
                if (WITH_GRADIENT) {
                    const float share = tile[i][j] * ratio;
                    weight *= gradient[i][j] - in.delta[line + query];
                    if (sizes.cap != 0.0f) weight *= 1.0f - share * share;
                }
            }
            shared.weights[row][column] = weight;
        }
    }
}

template <class T, int CHUNKS>
INLINE void query_gradient(T* __restrict__ dq, u64 dq_stride, const Inputs<T>& in, const Sizes& sizes) {
    __shared__ Shared shared;
    const u64 blocks = sizes.blocks(), time = sizes.time, width = sizes.width;
    const u64 start = (blocks - 1 - blockIdx.x % blocks) * SIDE, line = blockIdx.x / blocks;
    const u64 sequence = line / sizes.heads, head = line % sizes.heads, kv_head = head * sizes.kv_heads / sizes.heads;
    const Rows<T> k = rows_of(in.k, in.kv_stride, time, sequence, kv_head, width);
    in.write_delta(sizes, sequence, head, start);
    Sums<CHUNKS> sums;
    sums.clear();
    const u64 end = sizes.causal != 0 && start + SIDE < time ? start + SIDE : time;
    for (u64 keys = sizes.first_key(sequence, start) / SIDE * SIDE; keys < end; keys += SIDE) {
        write_weights<false, true>(shared, in, sizes, sequence, head, start, keys);
        sums.add(shared, k, keys, width);
    }
    UNROLLED for (u32 i = 0; i < FOUR; i++) {
        const u64 query = start + first_row() + i;
        if (query >= time) break;
        sums.write_row(dq + (sequence * time + query) * dq_stride + head * width, i, sizes.scale, width);
    }
}

/// dv if VALUES, else dk: sums over the heads of q that share the head, and in each over its
/// queries, in order.
template <class T, int CHUNKS, bool VALUES>
INLINE void key_gradient(T* __restrict__ gradient, u64 gradient_stride, const Inputs<T>& in, const Sizes& sizes) {
    __shared__ Shared shared;
    const u64 blocks = sizes.blocks(), time = sizes.time, width = sizes.width, group = sizes.heads / sizes.kv_heads;
    const u64 keys = blockIdx.x % blocks * SIDE, line = blockIdx.x / blocks;
    const u64 sequence = line / sizes.kv_heads, kv_head = line % sizes.kv_heads;
    Sums<CHUNKS> sums;
    sums.clear();
    for (u64 head = kv_head * group; head < (kv_head + 1) * group; head++) {
        const Rows<T> right = VALUES ? in.dout_rows(sizes, sequence, head)
                                     : rows_of(in.q, in.q_stride, time, sequence, head, width);
        for (u64 start = sizes.causal != 0 ? keys : 0; start < time; start += SIDE) {
            if (sizes.first_key(sequence, start) >= keys + SIDE) break;
            write_weights<true, !VALUES>(shared, in, sizes, sequence, head, start, keys);
            sums.add(shared, right, start, width);
        }
    }
    UNROLLED for (u32 i = 0; i < FOUR; i++) {
        const u64 key = keys + first_row() + i;
        if (key >= time) break;
        T* to = gradient + (sequence * time + key) * gradient_stride + kv_head * width;
        sums.write_row(to, i, VALUES ? 1.0f : sizes.scale, width);
    }
}

/// Kernels for heads of at most CHUNKS chunks, with that width in their names. A multiprocessor
/// holds BLOCKS blocks of threads; without that number the compiler makes room for more of them and
/// spills.
#define ATTENTION(NAME, T, CHUNKS, WIDTH, BLOCKS)                                                                      \
    KERNEL(SPAN* SPAN COMMA BLOCKS)                                                                                    \
    attention_##WIDTH##_##NAME(T* out, float* log_sum_exp, const T* q, const T* k, const T* v, u64 q_stride,           \
                               u64 kv_stride, u64 time, u64 heads, u64 kv_heads, u64 width, u32 causal, float scale,   \
                               u32 window, const i32* begins, float cap) {                                             \
        const Sizes sizes{time, heads, kv_heads, width, causal, scale, window, begins, cap};                           \
        forward<T, CHUNKS>(out, log_sum_exp, q, k, v, q_stride, kv_stride, sizes);                                     \
    }                                                                                                                  \
    GRADIENT(NAME, T, BLOCKS, attention_dq_##WIDTH, query_gradient<T COMMA CHUNKS>(dq, dq_stride, in, sizes))            \
    GRADIENT(NAME, T, BLOCKS, attention_dk_##WIDTH, key_gradient<T COMMA CHUNKS COMMA false>(dk, dkv_stride, in, sizes)) \
    GRADIENT(NAME, T, BLOCKS, attention_dv_##WIDTH, key_gradient<T COMMA CHUNKS COMMA true>(dv, dkv_stride, in, sizes))
#define COMMA ,
#define GRADIENT(NAME, T, BLOCKS, KERNEL_NAME, ...)                                                                    \
    KERNEL(SPAN* SPAN COMMA BLOCKS)                                                                                    \
    KERNEL_NAME##_##NAME(T* dq, T* dk, T* dv, float* delta, u64 dq_stride, u64 dkv_stride, const T* q, const T* k,     \
                         const T* v, const T* out, const T* dout, const float* log_sum_exp, u64 q_stride,              \
                         u64 kv_stride, u64 time, u64 heads, u64 kv_heads, u64 width, u32 causal, float scale,         \
                         u32 window, const i32* begins, float cap) {                                                   \
        const Sizes sizes{time, heads, kv_heads, width, causal, scale, window, begins, cap};                           \
        const Inputs<T> in{q, k, v, out, dout, log_sum_exp, delta, q_stride, kv_stride};                               \
        __VA_ARGS__;                                                                                                   \
    }
ATTENTION(f32, float, 2, 64, 2)
ATTENTION(f32, float, 8, 256, 1)
ATTENTION(bf16, bf16, 8, 256, 1)
