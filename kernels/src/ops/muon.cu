// muon_direction and divide_by_norm: see muon.rs.
#include "update.cuh"

struct Direction {
    static constexpr int STATE = 2, SCALARS = 0;
    static INLINE void step(float (&state)[STATE], float grad, const StepNumbers& of) {
        float &direction = state[0], &momentum = state[1];
#include "muon_rule.cuh"
    }
};
UPDATE(muon_direction_f32, Direction)

KERNEL(BLOCK_THREADS) divide_by_norm_f32(float* x, const float* __restrict__ norm, u64 count) {
    const float divisor = norm[1] < 1e-7f ? 1e-7f : norm[1];
    map(x, x, count, [=](float x) { return x / divisor; });
}
