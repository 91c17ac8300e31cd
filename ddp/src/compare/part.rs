//! Where two runs part: the first step, and in it the first thing that was read or computed.

use std::fmt;

use serde::Serialize;

use super::logged::{Logged, Step};
use crate::shown::significant;
use crate::units::relative;

/// Something that a step read or computed.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Thing {
    thing: &'static str,
    /// Of a gradient or of weights.
    layer: Option<String>,
    #[serde(skip)]
    bits: String,
    /// The loss, or the norm of the layer.
    value: Option<f64>,
}

/// The first difference between two runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Parting {
    /// 0 before the first step.
    pub(super) step: u64,
    /// The last step before it that both logged, in which nothing differs.
    same_until: Option<u64>,
    #[serde(flatten)]
    a: Thing,
    value_in_b: Option<f64>,
    /// In how many layers that thing differs.
    layers: usize,
}

impl fmt::Display for Parting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the {}", self.a.thing)?;
        if let Some(layer) = &self.a.layer {
            write!(f, " of layer {layer}")?;
        }
        match self.step {
            0 => write!(f, ", before the first step"),
            step => write!(f, " of step {step}"),
        }
    }
}

impl Parting {
    /// What else is known of it, as lines.
    pub(super) fn details(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if self.layers > 1 {
            lines.push(format!("it differs in {} layers", self.layers));
        }
        if let Some((a, b)) = self.a.value.zip(self.value_in_b) {
            let what = self.a.layer.as_ref().map_or("value", |_| "norm");
            let apart = apart_text(relative(a, b));
            let [a, b] = [a, b].map(|value| significant(value, 9));
            lines.push(format!("{what} {a} in A, {b} in B: {apart}"));
        }
        if let Some(step) = self.same_until.filter(|step| step + 1 < self.step) {
            lines.push(format!(
                "step {step} is the same; no step between them is in both logs (--log-every 1 logs \
                 all)"
            ));
        }
        lines
    }
}

/// `equal`, `0.00012 apart`
pub(super) fn apart_text(relative: f64) -> String {
    match relative {
        0.0 => "equal".to_string(),
        apart => format!("{} apart", significant(apart, 2)),
    }
}

/// What a step read and computed, in this order: only the loss without `digests`.
fn things(step: &Step, digests: bool) -> Vec<Thing> {
    let thing = |thing, layer, bits: &str, value| Thing {
        thing,
        layer,
        bits: bits.into(),
        value,
    };
    let bits = format!("{:?}", step.loss.map(f64::to_bits));
    let loss = thing("loss", None, &bits, step.loss);
    let Some(digests) = step.digests.as_ref().filter(|_| digests) else {
        return vec![loss];
    };
    let weights = match step.step {
        0 => "initial weights",
        _ => "update",
    };
    let batch = thing("batch", None, &digests.batch, None);
    // Backward goes from the output to the input.
    let gradients = digests
        .gradients
        .iter()
        .rev()
        .map(|layer| ("gradient", layer));
    let layers = gradients.chain(digests.weights.iter().map(|layer| (weights, layer)));
    let layers = layers.map(|(name, of)| thing(name, Some(of.0.clone()), &of.1, of.2));
    [batch, loss].into_iter().chain(layers).collect()
}

/// The first difference between two runs, in the steps that both logged.
pub(super) fn parting(a: &Logged, b: &Logged) -> Option<Parting> {
    let mut same_until = None;
    for (own, other) in common(a, b) {
        let both = own.digests.is_some() && other.digests.is_some();
        let (a, b) = (things(own, both), things(other, both));
        // A layer may be in one model only.
        let mut differing = (0..a.len().max(b.len())).filter(|&at| a.get(at) != b.get(at));
        if let Some(at) = differing.next() {
            let thing = a.get(at).or(b.get(at)).expect("one of them has it");
            let same_thing = |&at: &usize| a.get(at).is_some_and(|a| a.thing == thing.thing);
            return Some(Parting {
                step: own.step,
                same_until,
                value_in_b: b.get(at).and_then(|thing| thing.value),
                layers: 1 + differing.filter(same_thing).count(),
                a: thing.clone(),
            });
        }
        same_until = Some(own.step);
    }
    None
}

/// The steps that both runs logged, in order.
pub(super) fn common<'a>(
    a: &'a Logged,
    b: &'a Logged,
) -> impl Iterator<Item = (&'a Step, &'a Step)> {
    let steps = a.steps.values();
    steps.filter_map(|own| Some((own, b.steps.get(&own.step)?)))
}
