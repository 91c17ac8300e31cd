// Elementwise chains: chain.rs writes a kernel for each below these functions.
#include "common.cuh"

/// The kernel of this thread's warp: the number of its row.
INLINE u64 row_of_warp() { return first_index() / WARP; }
