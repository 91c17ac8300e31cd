// addmm: what cuBLASLt's product does not cover. See addmm.rs.
#include "common.cuh"

/// out = beta · acc. acc is as large as out, or one row of it, or out itself. It is not read if
/// beta is 0.
#define SCALE_ROWS(NAME, T)                                                                                            \
    KERNEL(BLOCK_THREADS)                                                                                              \
    scale_rows_##NAME(T* out, const T* acc, u64 count, u64 columns, u32 broadcast, float beta) {                       \
        over_matrix(count, columns, [=](u64 i, u64 column) {                                                           \
            const u64 from = broadcast ? column : i;                                                                   \
            out[i] = narrow<T>(beta == 0.0f ? 0.0f : beta * wide(acc[from]));                                          \
        });                                                                                                            \
    }
FOR_F32_AND_BF16(SCALE_ROWS)
