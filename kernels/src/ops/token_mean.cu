// token_mean and its gradient: see patches.rs.
#include "common.cuh"

constexpr u32 PACK = 4;

/// out[b][c] = the mean of x[b][t][c] over the first `tokens` t, N columns at a time: `count`
/// elements of out.
template <int N, class T>
INLINE void token_mean(
    T* __restrict__ out, const T* __restrict__ x, u64 count, u64 columns, u64 time, u64 tokens) {
    typedef Pack<T, N> P;
    const u64 packs = columns / N;
    over_matrix(count / N, packs, [=](u64 i, u64 sequence, u64 pack) {
        const u64 first = sequence * time * packs + pack;
        const P start = load_pack<P>(x, first);
        float sum[N];
        UNROLLED for (int k = 0; k < N; k++) sum[k] = wide(start.values[k]);
        for (u64 token = 1; token < tokens; token++) {
            const P value = load_pack<P>(x, first + token * packs);
            UNROLLED for (int k = 0; k < N; k++) sum[k] += wide(value.values[k]);
        }
        UNROLLED for (int k = 0; k < N; k++) sum[k] = sum[k] / (float)tokens;
        store_pack(out, i, narrow_pack<T>(sum));
    });
}

/// dx[b][t][c] = dout[b][c] / tokens for the first `tokens` t, else 0: `count` elements of dx.
template <int N, class T>
INLINE void token_mean_backward(
    T* __restrict__ dx, const T* __restrict__ dout, u64 count, u64 columns, u64 time, u64 tokens) {
    typedef Pack<T, N> P;
    const u64 packs = columns / N;
    over_matrix(count / N, packs, [=](u64 i, u64 row, u64 pack) {
        const P of_mean = row % time < tokens ? load_pack<P>(dout, row / time * packs + pack) : P{};
        float gradient[N];
        UNROLLED for (int k = 0; k < N; k++) gradient[k] = wide(of_mean.values[k]) / (float)tokens;
        store_pack(dx, i, narrow_pack<T>(gradient));
    });
}

#define TOKEN_MEAN(NAME, T, FUNCTION)                                                                                  \
    KERNEL(BLOCK_THREADS)                                                                                              \
    FUNCTION##_##NAME(T* out, const T* x, u64 count, u64 columns, u64 time, u64 tokens) {                              \
        IN_PACKS(PACK, columns % PACK == 0 && aligned<PACK * sizeof(T)>(out, x),                                       \
                 FUNCTION<N>(out, x, count, columns, time, tokens);)                                                   \
    }
#define TOKEN_MEANS(NAME, T) TOKEN_MEAN(NAME, T, token_mean) TOKEN_MEAN(NAME, T, token_mean_backward)
FOR_F32_AND_BF16(TOKEN_MEANS)
