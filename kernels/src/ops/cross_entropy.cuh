// What the kernels of cross_entropy.cu share: a problem, the target, loss and gradient of one row,
// and the statistics of all.
#pragma once
#include "common.cuh"

/// What all rows share.
struct Problem {
    /// (B), of `target_bytes` each: u8, i32 or i64
    const void* targets;
    u32 target_bytes;
    /// Whether rows with target `ignore_index` are ignored.
    bool ignores;
    bool smooths;
    i64 ignore_index;
    /// (C), or null
    const float* class_weights;
    u64 classes;
    float target_share, class_share, gradient_scale;
    /// Σ class_weights
    float weight_sum;
    /// (B)
    float* losses;
    /// (B), or null
    float* weights;
};

/// What the rows add to the statistics of a step.
struct Totals {
    /// f32 (4), or null: the sum of losses, their divisor, correct rows, rows.
    float* stats;
    /// How many blocks ended, and their counts of correct rows and of rows. Zero between kernels.
    u64* counters;
};

/// Bits of `options`.
constexpr u32 IGNORES = 1, SMOOTHS = 2;

/// Parameters of every kernel: `logits` (B, C), and `dlogits` (B, C), null or `logits`' own memory.
#define PARAMETERS(T)                                                                                                  \
    float *losses, T *dlogits, float *weights, const T *logits, const void *targets, u32 target_bytes,                 \
        const float *class_weights, u64 rows, u64 classes, i64 ignore_index, u32 options, float target_share,          \
        float class_share, float gradient_scale, float *stats, u64 *counters
#define TOTALS                                                                                                         \
    Totals {                                                                                                           \
        stats, counters                                                                                                \
    }
#define PROBLEM                                                                                                        \
    Problem {                                                                                                          \
        targets, target_bytes, (options & IGNORES) != 0, (options & SMOOTHS) != 0, ignore_index, class_weights,        \
            classes, target_share, class_share, gradient_scale, (float)classes, losses, weights                        \
    }

/// The target of one row.
struct Target {
    /// 0 if the row is ignored or its target is invalid.
    u64 class_index;
    bool is_ignored;
    bool is_class;
    /// The class's weight; 0 for ignored rows, NaN for an invalid target, which makes loss and
    /// gradient NaN.
    float weight;
};

INLINE Target target_of(const Problem& problem, u64 row) {
    const i64 index = index_at(problem.targets, problem.target_bytes, row);
    const bool is_ignored = problem.ignores && index == problem.ignore_index;
    const bool is_class = !is_ignored && index >= 0 && (u64)index < problem.classes;
    float weight = is_ignored ? 0.0f : nan_f32();
    if (is_class) weight = problem.class_weights == nullptr ? 1.0f : problem.class_weights[index];
    return Target{is_class ? (u64)index : 0, is_ignored, is_class, weight};
}

/// `Problem::loss`: from ln s, z of the target, its weight, and Σ w z.
INLINE float loss_of(const Problem& problem, float log_sum, float target_z, float weight, float weighted_z) {
    const float target = problem.target_share * (weight * (log_sum - target_z));
    if (!problem.smooths) return target;
    return fmaf(problem.class_share, fmaf(problem.weight_sum, log_sum, 0.0f - weighted_z), target);
}

/// The factors of one row's gradient: dx_c = softmax eᶻ_c − class w_c − target [c = y].
struct Factors {
    float softmax, class_part, target;
};

INLINE Factors factors_of(const Problem& problem, float sum, float weight) {
    const float target = problem.target_share * weight;
    const float total = problem.smooths ? fmaf(problem.class_share, problem.weight_sum, target) : target;
    return Factors{problem.gradient_scale * total / sum, problem.gradient_scale * problem.class_share,
                   problem.gradient_scale * target};
}

/// eᶻ of one class becomes its gradient. An invalid target makes it NaN, because its weight is.
INLINE float gradient_of(
    const Problem& problem, float e, u64 class_index, const Factors& factors, const Target& target) {
    if (target.is_ignored) return 0.0f;
    float gradient;
    if (problem.smooths) {
        const float weight = problem.class_weights == nullptr ? 1.0f : problem.class_weights[class_index];
        gradient = fmaf(e, factors.softmax, 0.0f - factors.class_part * weight);
    } else {
        gradient = e * factors.softmax;
    }
    return class_index == target.class_index ? gradient - factors.target : gradient;
}

/// Σ class_weights in `lane_sum`'s order, by one warp; C without weights.
INLINE float weight_sum_of(const Problem& problem) {
    if (problem.class_weights == nullptr || !problem.smooths) return problem.weight_sum;
    float sum = 0.0f;
#pragma unroll 8
    for (u64 i = threadIdx.x % WARP; i < problem.classes; i += WARP) sum = sum + problem.class_weights[i];
    return warp_sum(sum);
}

/// Adds one class to a lane's Σ w z. `is_weighted` if there are weights.
INLINE float add_weighted(const Problem& problem, bool is_weighted, float sum, u64 class_index, float z) {
    return is_weighted ? fmaf(problem.class_weights[class_index], z, sum) : sum + z;
}

/// Whether x leaves the target the first of the largest, as in rows.rs.
INLINE bool is_below(float x, u64 class_index, float target_x, u64 target) {
    if (class_index == target) return true;
    if (is_nan(target_x)) return class_index > target || !is_nan(x);
    return class_index < target ? x < target_x : x <= target_x;
}

// ---- the statistics ----

/// The end of a block that has written its rows: the block that ends last adds all rows to the
/// statistics. `correct` and `counted` are of this block, valid in thread 0.
INLINE void add_totals(const Problem& problem, const Totals& totals, u64 rows, u32 correct, u32 counted) {
    if (totals.stats == nullptr) return;
    if (threadIdx.x == 0) {
        // Integers: their sum is the same in any order. Relaxed: the fence of ends_last, which
        // thread 0 comes to next, publishes them.
        atomicAdd(totals.counters + 1, (u64)correct);
        atomicAdd(totals.counters + 2, (u64)counted);
    }
    if (!ends_last(totals.counters)) return;
    const float loss = (float)total_of(problem.losses, rows);
    const float weight = problem.weights == nullptr ? 0.0f : (float)total_of(problem.weights, rows);
    if (threadIdx.x > 0) return;
    // Thread 0 has acquired what all blocks added (ends_last). The next kernel finds the zeros.
    const float all_correct = (float)atomicExch(totals.counters + 1, 0ull);
    const float all_counted = (float)atomicExch(totals.counters + 2, 0ull);
    totals.stats[0] = totals.stats[0] + loss;
    totals.stats[1] = totals.stats[1] + (problem.weights == nullptr ? all_counted : weight);
    totals.stats[2] = totals.stats[2] + all_correct;
    totals.stats[3] = totals.stats[3] + all_counted;
}
