// adamw: see adamw.rs.
#include "update.cuh"

struct Adamw {
    static constexpr int STATE = 3, SCALARS = 4;
    static INLINE void step(float (&state)[STATE], float grad, const StepNumbers& of) {
        float &value = state[0], &first = state[1], &second = state[2];
#include "adamw_rule.cuh"
    }
};
UPDATE(adamw_f32, Adamw)
