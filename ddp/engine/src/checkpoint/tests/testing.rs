//! A state for the tests of this crate and of `ddp`: a new field needs a value only here.

use super::{Position, ScheduleState, State, TaskSpec, WorldState};

/// That of one rank after `step` steps over 40 rows.
pub(crate) fn state(step: u64) -> State {
    State {
        format: 1,
        program: "a test".into(),
        versions: Default::default(),
        step,
        samples: 4 * step,
        config: serde_json::Map::new(),
        position: Position {
            seed: 7,
            epoch: 0,
            in_epoch: step,
            rows: 40,
            batch: 4,
            drop_last: false,
        },
        schedule: ScheduleState {
            steps: 100,
            warmup_steps: 10,
            learning_rate: 0.1 + 0.2,
        },
        optimizer_since: 0,
        world: WorldState {
            ranks: 1,
            optimizer_parts: 1,
            devices: vec!["cpu".into()],
        },
        task: TaskSpec::Regression { outputs: 3 },
        row_shape: vec![5],
        image: Vec::new(),
        normalization: None,
        target_normalization: None,
        plan: Default::default(),
        columns: None,
        class_weights: Vec::new(),
        own_loss: None,
        label: None,
        base: None,
        fingerprint: "rows".into(),
        held_out: Some("other rows".into()),
        best: None,
        last: None,
        progress: Default::default(),
    }
}
