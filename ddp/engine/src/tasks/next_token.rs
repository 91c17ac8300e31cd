//! Learning the next token at each position: the cross-entropy, and what follows from it.

use std::collections::BTreeMap;
use std::f64::consts::LN_2;

use ddp_data::{IGNORED, counted};
use ddp_kernels::{Device, Tensor};
use ddp_nn::{CrossEntropy, Loss};
use serde_json::{Value, json};

use super::task::{
    Evaluation, LossOptions, PredictionOptions, Predictions, Task, Totals, figures_text,
};
use crate::error::{Error, Result};

/// The token after each.
#[derive(Clone, Copy, Debug)]
pub(super) struct LearnNextToken {
    pub(super) vocabulary: usize,
    /// Whether tokens are the bytes of texts.
    pub(super) are_bytes: bool,
}

impl Task for LearnNextToken {
    // With a setting of the loss the perplexity would not follow from it.
    fn learns(&self) -> &'static str {
        "tokens"
    }

    fn loss(&self, _options: &LossOptions, _device: Device) -> Result<Box<dyn Loss>> {
        Ok(Box::new(CrossEntropy::default()))
    }

    fn figures(&self, loss: f64) -> Vec<(&'static str, f64)> {
        let bits = self.are_bytes.then_some(("bits_per_byte", loss / LN_2));
        let perplexity = [("perplexity", loss.exp())];
        perplexity.into_iter().chain(bits).collect()
    }

    fn wrong_target(&self, target: f64) -> Option<String> {
        let count = self.vocabulary;
        let is_token = (0.0..count as f64).contains(&target) || target == IGNORED as f64;
        (!is_token).then(|| format!("target {target}: expected a token from 0 to {}", count - 1))
    }

    fn evaluation(&self, _columns: Option<Vec<String>>) -> Box<dyn Evaluation> {
        Box::new(Tokens(*self))
    }

    fn predictions(&self, _options: PredictionOptions) -> Result<Box<dyn Predictions>> {
        Err(Error::Usage(
            "predict: expected a model with one answer for each row, got one that predicts the next token at every \
             position; help: evaluate it instead"
                .into(),
        ))
    }
}

/// Counts tokens: all else follows from the loss.
struct Tokens(LearnNextToken);

impl Evaluation for Tokens {
    fn width(&self) -> usize {
        1
    }

    fn needs_outputs(&self) -> bool {
        false
    }

    fn count(&mut self, _losses: &Tensor, targets: &Tensor) -> Result<Vec<f64>> {
        Ok(vec![counted(targets)? as f64])
    }

    fn text(&self, totals: &Totals) -> String {
        let (tokens, loss) = (totals.sums[0], totals.loss);
        let figures: BTreeMap<_, _> = self.0.figures(loss).into_iter().collect();
        let figures = figures_text(|name| figures.get(name).copied());
        format!("loss {loss:.4}{figures} ({tokens} tokens)")
    }

    fn json(&self, totals: &Totals) -> Value {
        let mut json = json!({ "tokens": totals.sums[0] as u64 });
        for (name, figure) in self.0.figures(totals.loss) {
            json[name] = json!(figure);
        }
        json
    }
}
