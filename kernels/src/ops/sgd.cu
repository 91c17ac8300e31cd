// sgd: see sgd.rs.
#include "update.cuh"

struct PlainSgd {
    static constexpr int STATE = 1, SCALARS = 2;
    static INLINE void step(float (&state)[STATE], float grad, const StepNumbers& of) {
        float& value = state[0];
#include "sgd_rule.cuh"
    }
};
UPDATE(sgd_plain_f32, PlainSgd)

template <bool NESTEROV> struct MomentumSgd {
    static constexpr int STATE = 2, SCALARS = 2;
    static INLINE void step(float (&state)[STATE], float grad, const StepNumbers& of) {
        float &value = state[0], &momentum = state[1];
#include "sgd_momentum_rule.cuh"
    }
};
UPDATE(sgd_momentum_f32, MomentumSgd<false>)
UPDATE(sgd_nesterov_f32, MomentumSgd<true>)
