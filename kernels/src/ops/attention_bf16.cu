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
#include "attention_tiles.cuh"

// Older GPUs cannot multiply bf16: attention/gpu.rs gives them attention.cu.
#if __CUDA_ARCH__ >= 800

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
