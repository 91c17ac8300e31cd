// token_mean and its gradient: see token_mean.rs.
#include "common.cuh"

/// out[b][c] = the mean of x[b][t][c] over the first `tokens` t: `count` elements of out.
template <class T>
INLINE void token_mean(
    T* __restrict__ out, const T* __restrict__ x, u64 count, u64 columns, u64 time, u64 tokens) {
    over_matrix(count, columns, [=](u64 i, u64 sequence, u64 column) {
        const T* first = x + sequence * time * columns + column;
        float sum = wide(first[0]);
        for (u64 token = 1; token < tokens; token++) sum += wide(first[token * columns]);
        out[i] = narrow<T>(sum / (float)tokens);
    });
}

/// dx[b][t][c] = dout[b][c] / tokens for the first `tokens` t, else 0: `count` elements of dx.
template <class T>
INLINE void token_mean_backward(
    T* __restrict__ dx, const T* __restrict__ dout, u64 count, u64 columns, u64 time, u64 tokens) {
    over_matrix(count, columns, [=](u64 i, u64 row, u64 column) {
        const float gradient = wide(dout[row / time * columns + column]) / (float)tokens;
        dx[i] = narrow<T>(row % time < tokens ? gradient : 0.0f);
    });
}

#define TOKEN_MEAN(NAME, T)                                                                                            \
    KERNEL(BLOCK_THREADS)                                                                                              \
    token_mean_##NAME(T* out, const T* x, u64 count, u64 columns, u64 time, u64 tokens) {                              \
        token_mean(out, x, count, columns, time, tokens);                                                              \
    }                                                                                                                  \
    KERNEL(BLOCK_THREADS)                                                                                              \
    token_mean_backward_##NAME(T* dx, const T* dout, u64 count, u64 columns, u64 time, u64 tokens) {                   \
        token_mean_backward(dx, dout, count, columns, time, tokens);                                                   \
    }
FOR_F32_AND_BF16(TOKEN_MEAN)
