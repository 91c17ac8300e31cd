// cross_entropy: formulas in cross_entropy.rs; the order of sums in rows.rs, which the kernels
// follow to get the CPU's bits, except for many classes in bf16.
//
// Up to 64 classes: 32 rows per block, in shared memory. More: a row per block, read three times
// (maximum, sum, gradient), mostly from caches; twice in bf16, where maximum and sum are found in
// one pass. T is the dtype of the logits and their gradient; all else is f32.
#include "cross_entropy.cuh"

// ---- up to 64 classes ----

constexpr u32 NARROW_CLASSES_MAX = 64;
constexpr u32 NARROW_ROWS = WARP;
constexpr u32 NARROW_THREADS = 128;

/// Elements that a thread has at a time. The rows of a whole block are whole packs.
constexpr u32 NARROW_PACK = 4;

/// Calls `body(index of the first, rows, classes)` for packs of elements of `rows` rows of
/// `classes`, in memory order. The last one of some rows may have elements of the next row.
template <class F> INLINE void each_narrow(u32 rows, u32 classes, F body) {
    for (u32 i = threadIdx.x * NARROW_PACK; i < rows * classes; i += NARROW_THREADS * NARROW_PACK) {
        u32 row[NARROW_PACK] = {i / classes}, column[NARROW_PACK] = {i % classes};
        UNROLLED for (u32 k = 1; k < NARROW_PACK; k++) {
            const bool ends = column[k - 1] + 1 == classes;
            row[k] = row[k - 1] + ends, column[k] = ends ? 0 : column[k - 1] + 1;
        }
        body(i, row, column);
    }
}

/// What the threads of a block share, by row.
struct NarrowRow {
    float largest;
    Factors factors;
    Target target;
};

template <class T>
INLINE void narrow_rows(Problem problem, const Totals totals, u64 rows, T* dlogits, const T* logits) {
    // x, then eᶻ. Rows are an odd number of words apart, so a warp with one row per lane has no
    // bank conflicts.
    __shared__ float tile[NARROW_ROWS * (NARROW_CLASSES_MAX + 1)];
    __shared__ NarrowRow shared_rows[NARROW_ROWS];
    __shared__ float shared_weight_sum;
    const u32 columns = (u32)problem.classes, pitch = columns | 1;
    const u64 first_row = (u64)blockIdx.x * NARROW_ROWS;
    const u64 first = first_row * columns;
    const u32 count = rows - first_row < NARROW_ROWS ? (u32)(rows - first_row) : NARROW_ROWS;
    const bool has_row = threadIdx.x < count;
    const u64 row = first_row + threadIdx.x;
    float* own = tile + threadIdx.x * pitch;

    typedef Pack<T, NARROW_PACK> P;
    const bool packed = aligned<sizeof(P)>(dlogits, logits);
    each_narrow(count, columns, [&](u32 i, const u32(&row)[NARROW_PACK], const u32(&column)[NARROW_PACK]) {
        P pack = {};
        if (packed && i + NARROW_PACK <= count * columns) {
            pack = load_pack<P>(logits + first, i / NARROW_PACK);
        } else {
            for (u32 k = 0; k < NARROW_PACK && i + k < count * columns; k++) pack.values[k] = logits[first + i + k];
        }
        UNROLLED for (u32 k = 0; k < NARROW_PACK; k++) tile[row[k] * pitch + column[k]] = wide(pack.values[k]);
    });
    if (threadIdx.x / WARP == 1) {
        const float sum = weight_sum_of(problem);
        if (threadIdx.x % WARP == 0) shared_weight_sum = sum;
    }
    __syncthreads();
    Target target = {};
    float target_z = 0.0f, weighted_z = 0.0f;
    bool is_correct = false;
    if (has_row) {
        target = target_of(problem, row);
        float largest = -infinity();
        for (u32 i = 0; i < columns; i++) largest = own[i] > largest ? own[i] : largest;
        if (target.is_class) {
            const float target_x = own[target.class_index];
            target_z = target_x - largest;
            is_correct = totals.stats != nullptr;
            for (u32 i = 0; i < columns; i++) is_correct &= is_below(own[i], i, target_x, target.class_index);
        }
        if (problem.smooths) {
            const bool is_weighted = problem.class_weights != nullptr;
            for (u32 i = 0; i < columns; i++)
                weighted_z = add_weighted(problem, is_weighted, weighted_z, i, own[i] - largest);
        }
        shared_rows[threadIdx.x].largest = largest;
        shared_rows[threadIdx.x].target = target;
    }
    __syncthreads();
    problem.weight_sum = shared_weight_sum;
    for (u32 i = threadIdx.x; i < count * columns; i += NARROW_THREADS) {
        float& x = tile[i / columns * pitch + i % columns];
        x = exponential(x - shared_rows[i / columns].largest);
    }
    __syncthreads();
    if (has_row) {
        float sum = 0.0f;
        for (u32 i = 0; i < columns; i++) sum = sum + own[i];
        const float loss = loss_of(problem, logarithm(sum), target_z, target.weight, weighted_z);
        problem.losses[row] = target.is_ignored ? 0.0f : loss;
        if (problem.weights != nullptr) problem.weights[row] = target.weight;
        shared_rows[threadIdx.x].factors = factors_of(problem, sum, target.weight);
    }
    if (dlogits != nullptr) {
        __syncthreads();
        each_narrow(count, columns, [&](u32 i, const u32(&row)[NARROW_PACK], const u32(&column)[NARROW_PACK]) {
            float gradients[NARROW_PACK] = {};
            UNROLLED for (u32 k = 0; k < NARROW_PACK; k++) {
                if (i + k >= count * columns) break;
                const NarrowRow& of = shared_rows[row[k]];
                const float e = tile[row[k] * pitch + column[k]];
                gradients[k] = gradient_of(problem, e, column[k], of.factors, of.target);
            }
            const P pack = narrow_pack<T>(gradients);
            if (packed && i + NARROW_PACK <= count * columns) return store_pack(dlogits + first, i / NARROW_PACK, pack);
            for (u32 k = 0; k < NARROW_PACK && i + k < count * columns; k++) dlogits[first + i + k] = pack.values[k];
        });
    }
    // The first warp has all rows of the block.
    const u32 correct = __popc(__ballot_sync(WHOLE_WARP, is_correct));
    const u32 counted = __popc(__ballot_sync(WHOLE_WARP, has_row && !target.is_ignored));
    add_totals(problem, totals, rows, correct, counted);
}

// ---- more, in f32 ----

/// Classes that are summed together in lanes: `BLOCK` of rows.rs.
constexpr u32 BLOCK = 512;
constexpr u32 PER_LANE_OF_BLOCK = BLOCK / WARP;
constexpr u32 WIDE_THREADS = 512;
/// Blocks of classes whose sums are kept at once.
constexpr u32 SUMS_MAX = 1024;
/// Elements that a thread loads before it stores the first.
constexpr u32 IN_FLIGHT = 4;

/// What the threads of a block share.
struct Wide {
    float e_sums[SUMS_MAX], z_sums[SUMS_MAX];
    float sum, weight_sum;
};

/// The sums over one block of classes, by one warp.
INLINE void wide_block(
    const Problem& problem, const float* logits, u64 start, float largest, float& e_sum, float& z_sum) {
    const u32 lane = threadIdx.x % WARP;
    float x[PER_LANE_OF_BLOCK];
    UNROLLED for (u32 j = 0; j < PER_LANE_OF_BLOCK; j++) {
        const u64 i = start + j * WARP + lane;
        x[j] = i < problem.classes ? logits[i] : 0.0f;
    }
    e_sum = 0.0f, z_sum = 0.0f;
    UNROLLED for (u32 j = 0; j < PER_LANE_OF_BLOCK; j++) {
        const u64 i = start + j * WARP + lane;
        if (i >= problem.classes) break;
        const float z = x[j] - largest;
        if (problem.smooths) z_sum = add_weighted(problem, problem.class_weights != nullptr, z_sum, i, z);
        e_sum = e_sum + exponential(z);
    }
    e_sum = warp_sum(e_sum);
    if (problem.smooths) z_sum = warp_sum(z_sum);
}

/// The sums over a row, block by block in f64; valid in thread 0. All threads of the block must
/// call it.
INLINE void wide_sums(
    const Problem& problem, const float* logits, float largest, Wide& shared, double& sum, double& weighted_z) {
    const u64 blocks = (problem.classes + BLOCK - 1) / BLOCK;
    sum = 0.0, weighted_z = 0.0;
    for (u64 first = 0; first < blocks; first += SUMS_MAX) {
        const u32 count = blocks - first < SUMS_MAX ? (u32)(blocks - first) : SUMS_MAX;
        // The previous round's sums were added.
        if (first > 0) __syncthreads();
        for (u32 block = threadIdx.x / WARP; block < count; block += blockDim.x / WARP) {
            float e_sum, z_sum;
            wide_block(problem, logits, (first + block) * BLOCK, largest, e_sum, z_sum);
            if (threadIdx.x % WARP == 0) shared.e_sums[block] = e_sum, shared.z_sums[block] = z_sum;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            for (u32 block = 0; block < count; block++) sum = sum + (double)shared.e_sums[block];
            if (problem.smooths) {
                for (u32 block = 0; block < count; block++) weighted_z = weighted_z + (double)shared.z_sums[block];
            }
        }
    }
}

/// The gradient of a row; each element is read and written by one thread.
INLINE void wide_gradient(
    const Problem& problem, const float* logits, float* dlogits, float largest, const Factors& factors,
    const Target& target) {
    for (u64 start = threadIdx.x; start < problem.classes; start += IN_FLIGHT * blockDim.x) {
        float x[IN_FLIGHT];
        UNROLLED for (u32 k = 0; k < IN_FLIGHT; k++) {
            const u64 i = start + k * blockDim.x;
            x[k] = i < problem.classes ? logits[i] : 0.0f;
        }
        UNROLLED for (u32 k = 0; k < IN_FLIGHT; k++) {
            const u64 i = start + k * blockDim.x;
            if (i >= problem.classes) break;
            dlogits[i] = gradient_of(problem, exponential(x[k] - largest), i, factors, target);
        }
    }
}

/// The largest of a row, and whether the target is the first of the largest.
INLINE float wide_largest(
    const Problem& problem, const float* logits, float target_x, u64 target, bool& is_correct) {
    float largest = -infinity();
    bool fits = true;
#pragma unroll 8
    for (u64 i = threadIdx.x; i < problem.classes; i += blockDim.x) {
        const float x = logits[i];
        largest = x > largest ? x : largest;
        fits &= is_below(x, i, target_x, target);
    }
    is_correct = __syncthreads_and(fits) != 0;
    return block_max(largest);
}

INLINE void wide_rows(Problem problem, const Totals totals, u64 rows, float* dlogits, const float* logits) {
    __shared__ Wide shared;
    const u64 classes = problem.classes;
    if (threadIdx.x < WARP) {
        const float sum = weight_sum_of(problem);
        if (threadIdx.x == 0) shared.weight_sum = sum;
    }
    __syncthreads();
    problem.weight_sum = shared.weight_sum;
    u32 correct = 0, counted = 0;
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const Target target = target_of(problem, row);
        const float* of_row = logits + row * classes;
        const float target_x = of_row[target.class_index];
        bool is_correct;
        const float largest = wide_largest(problem, of_row, target_x, target.class_index, is_correct);
        correct += is_correct && target.is_class, counted += !target.is_ignored;
        double sum, weighted_z;
        wide_sums(problem, of_row, largest, shared, sum, weighted_z);
        if (threadIdx.x == 0) {
            const float log_sum = logarithm((float)sum);
            const float loss = loss_of(problem, log_sum, target_x - largest, target.weight, (float)weighted_z);
            problem.losses[row] = target.is_ignored ? 0.0f : loss;
            if (problem.weights != nullptr) problem.weights[row] = target.weight;
            shared.sum = (float)sum;
        }
        if (dlogits == nullptr) continue;
        __syncthreads();
        const Factors factors = factors_of(problem, shared.sum, target.weight);
        wide_gradient(problem, of_row, dlogits + row * classes, largest, factors, target);
    }
    add_totals(problem, totals, rows, correct, counted);
}

// ---- more, in bf16 ----

constexpr int PACK = Pack<bf16>::COUNT;
/// Packs that a thread loads before it uses the first.
constexpr u32 PACKS_AT_ONCE = 4;
/// Below every logit of a row whose largest is within ±2e38, and finite in units of log₂ e. Other
/// rows have no finite loss.
constexpr float LOWEST = -2e38f;

/// A row: packs, and up to 7 elements before and after these.
struct Row {
    const bf16* logits;
    u32 head, packs, classes;

    INLINE Row(const bf16* logits, u64 count) : logits(logits), classes((u32)count) {
        const u32 before = (0u - (u32)(reinterpret_cast<u64>(logits) / sizeof(bf16))) % PACK;
        head = before < classes ? before : classes;
        packs = (classes - head) / PACK;
    }

    /// The first class of a pack.
    INLINE u32 first(u32 pack) const { return head + pack * PACK; }

    /// The class outside of the packs that this thread has; `classes` if it has none.
    INLINE u32 edge() const {
        const u32 index = threadIdx.x < head ? threadIdx.x : threadIdx.x + packs * PACK;
        return index < classes ? index : classes;
    }

    /// f(number of the first, packs) for the packs of this thread, `blockDim.x` apart: −∞ from
    /// number `end` on.
    template <class F> INLINE void each(u32 end, F f) const {
        for (u32 at = threadIdx.x; at < end; at += PACKS_AT_ONCE * blockDim.x) {
            Pack<bf16> pack[PACKS_AT_ONCE];
            UNROLLED for (u32 k = 0; k < PACKS_AT_ONCE; k++) {
                pack[k].whole = make_uint4(0xff80ff80u, 0xff80ff80u, 0xff80ff80u, 0xff80ff80u);
                if (at + k * blockDim.x < end) pack[k] = load_pack<Pack<bf16>>(logits + head, at + k * blockDim.x);
            }
            f(at, pack);
        }
    }
};

/// The largest of a pack and `largest`. Like all here it ignores NaN, which 2ˣ then propagates.
INLINE float largest_of(const Pack<bf16>& pack, float largest) {
    UNROLLED for (u32 i = 0; i < PACK; i++) largest = fmaxf(largest, wide(pack.values[i]));
    return largest;
}

/// What a thread, then the block, knows of a row: the largest, Σ e^(x − largest) and Σ w x.
struct Online {
    float largest, sum, weighted_x;

    /// 2^that is e^(x − largest).
    INLINE float exponent(float x) const { return fmaf(x, LOG2_E, 0.0f - largest * LOG2_E); }

    /// Makes `to`, which is as large or larger, the largest.
    INLINE void raise(float to) {
        sum = sum * exp2_of(largest * LOG2_E - to * LOG2_E);
        largest = to;
    }

    INLINE void join() {
        raise(block_max(largest));
        sum = block_sum(sum);
    }
};

/// Maximum and sums of a row in one pass; the same in all threads.
template <bool SMOOTHS, bool WEIGHTED> INLINE Online online(const Problem& problem, const Row& row) {
    Online online{LOWEST, 0.0f, 0.0f};
    row.each(row.packs, [&](u32 at, const Pack<bf16>(&pack)[PACKS_AT_ONCE]) {
        float largest = online.largest;
        UNROLLED for (u32 k = 0; k < PACKS_AT_ONCE; k++) largest = largest_of(pack[k], largest);
        online.raise(largest);
        UNROLLED for (u32 k = 0; k < PACKS_AT_ONCE; k++) {
            float sum = 0.0f;
            UNROLLED for (u32 i = 0; i < PACK; i++) sum = sum + exp2_of(online.exponent(wide(pack[k].values[i])));
            online.sum = online.sum + sum;
            const u32 number = at + k * blockDim.x;
            if (!SMOOTHS || number >= row.packs) continue;
            UNROLLED for (u32 i = 0; i < PACK; i++) {
                const float x = wide(pack[k].values[i]);
                online.weighted_x = add_weighted(problem, WEIGHTED, online.weighted_x, row.first(number) + i, x);
            }
        }
    });
    const u32 edge = row.edge();
    if (edge < row.classes) {
        const float x = wide(row.logits[edge]);
        online.raise(fmaxf(online.largest, x));
        online.sum = online.sum + exp2_of(online.exponent(x));
        if (SMOOTHS) online.weighted_x = add_weighted(problem, WEIGHTED, online.weighted_x, edge, x);
    }
    online.join();
    if (SMOOTHS) online.weighted_x = block_sum(online.weighted_x);
    return online;
}

/// Whether the target is the first of the largest; false in a row whose sum is not finite. Only
/// rows where the target is one of the largest are read again, up to it.
INLINE bool is_first_largest(const Row& row, const Online& online, float target_x, u32 target) {
    if (!(target_x >= online.largest && is_finite(online.sum))) return false;
    const u32 before = target < row.head ? 0 : (target - row.head) / PACK;
    const u32 packs = before < row.packs ? before : row.packs;
    float largest = LOWEST;
    row.each(packs, [&](u32, const Pack<bf16>(&pack)[PACKS_AT_ONCE]) {
        UNROLLED for (u32 k = 0; k < PACKS_AT_ONCE; k++) largest = largest_of(pack[k], largest);
    });
    // The elements before the target in its pack, and before all packs.
    const u32 near = row.first(packs) + threadIdx.x;
    if (threadIdx.x < PACK && near < target) largest = fmaxf(largest, wide(row.logits[near]));
    if (row.edge() < target) largest = fmaxf(largest, wide(row.logits[row.edge()]));
    return __syncthreads_and(largest < target_x) != 0;
}

/// dlogits[c] = gradient(logits[c], c) in f32, rounded once.
template <class F> INLINE void store_gradients(const Row& row, bf16* dlogits, F gradient) {
    // Whether packs of one are packs of the other.
    const bool together = aligned(dlogits + row.head);
    row.each(row.packs, [&](u32 at, const Pack<bf16>(&pack)[PACKS_AT_ONCE]) {
        UNROLLED for (u32 k = 0; k < PACKS_AT_ONCE; k++) {
            const u32 number = at + k * blockDim.x;
            if (number >= row.packs) break;
            float x[PACK];
            UNROLLED for (u32 i = 0; i < PACK; i++) x[i] = gradient(wide(pack[k].values[i]), row.first(number) + i);
            const Pack<bf16> rounded = narrow_pack<bf16>(x);
            if (together) store_pack(dlogits + row.head, number, rounded);
            for (u32 i = 0; !together && i < PACK; i++) dlogits[row.first(number) + i] = rounded.values[i];
        }
    });
    const u32 edge = row.edge();
    if (edge < row.classes) dlogits[edge] = narrow<bf16>(gradient(wide(row.logits[edge]), edge));
}

/// As `wide_rows`, with a row read twice: sums, gradient. WEIGHTED: smoothed, with class weights.
template <bool SMOOTHS, bool WEIGHTED>
INLINE void packed_rows(
    Problem problem, const Totals totals, u64 rows, bf16* dlogits, const bf16* logits) {
    __shared__ float weight_sum;
    if (SMOOTHS && threadIdx.x < WARP) {
        const float sum = weight_sum_of(problem);
        if (threadIdx.x == 0) weight_sum = sum;
    }
    __syncthreads();
    if (SMOOTHS) problem.weight_sum = weight_sum;
    u32 correct = 0, counted = 0;
    for (u64 index = blockIdx.x; index < rows; index += gridDim.x) {
        const Target target = target_of(problem, index);
        const Row row(logits + index * problem.classes, problem.classes);
        bf16* gradients = dlogits == nullptr ? nullptr : dlogits + index * problem.classes;
        float loss = 0.0f;
        if (!target.is_ignored) {
            const float target_x = wide(row.logits[target.class_index]);
            const Online sums = online<SMOOTHS, WEIGHTED>(problem, row);
            const float target_z = sums.exponent(target_x) * LN_2;
            const float weighted_z = sums.weighted_x - problem.weight_sum * sums.largest;
            loss = loss_of(problem, logarithm(sums.sum), target_z, target.weight, weighted_z);
            counted++;
            if (totals.stats != nullptr && target.is_class) {
                correct += is_first_largest(row, sums, target_x, (u32)target.class_index);
            }
            const Factors factors = factors_of(problem, sums.sum, target.weight);
            const auto gradient = [&](float x, u32 class_index) {
                const float e = exp2_of(sums.exponent(x));
                if (!SMOOTHS) return e * factors.softmax;
                const float weight = WEIGHTED ? problem.class_weights[class_index] : 1.0f;
                return fmaf(e, factors.softmax, 0.0f - factors.class_part * weight);
            };
            if (gradients != nullptr) {
                store_gradients(row, gradients, gradient);
                // The thread that stored the target's gradient may be another one.
                __syncthreads();
                if (threadIdx.x == 0) {
                    const float of_target = gradient(target_x, (u32)target.class_index) - factors.target;
                    gradients[target.class_index] = narrow<bf16>(of_target);
                }
            }
        } else if (gradients != nullptr) {
            store_gradients(row, gradients, [](float, u32) { return 0.0f; });
        }
        if (threadIdx.x > 0) continue;
        problem.losses[index] = loss;
        if (problem.weights != nullptr) problem.weights[index] = target.weight;
    }
    add_totals(problem, totals, rows, correct, counted);
}

// ---- the kernels ----

#define NARROW(NAME, T)                                                                                                \
    KERNEL(NARROW_THREADS) cross_entropy_narrow_##NAME(PARAMETERS(T)) {                                                \
        narrow_rows(PROBLEM, TOTALS, rows, dlogits, logits);                                                           \
    }
FOR_F32_AND_BF16(NARROW)

// At most two blocks per processor: otherwise ptxas makes room for three on sm_100, and spills.
extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 2) cross_entropy_wide_f32(PARAMETERS(float)) {
    wide_rows(PROBLEM, TOTALS, rows, dlogits, logits);
}
extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 2) cross_entropy_wide_bf16(PARAMETERS(bf16)) {
    packed_rows<false, false>(PROBLEM, TOTALS, rows, dlogits, logits);
}
extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 1) cross_entropy_smooth_bf16(PARAMETERS(bf16)) {
    packed_rows<true, false>(PROBLEM, TOTALS, rows, dlogits, logits);
}
extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 1) cross_entropy_weighted_bf16(PARAMETERS(bf16)) {
    packed_rows<true, true>(PROBLEM, TOTALS, rows, dlogits, logits);
}
