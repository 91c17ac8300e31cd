//! What is done to features before a model sees them: `(x - shift) * scale`, in f32, the same in training and wherever the model is used.

use serde::{Deserialize, Serialize};

/// A shift and a scale for each feature of a row, or one of each for all.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Normalization {
    /// What is taken away: one number, or as many as a row has features.
    pub shift: Vec<f32>,
    /// What is multiplied with then; as many.
    pub scale: Vec<f32>,
}
