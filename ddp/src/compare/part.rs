//! Where two runs part: the first step, and in it the first thing that was read or computed.

use std::fmt;

use serde::Serialize;

use super::logged::{Layer, Logged, Step};
use crate::shown::significant;
use crate::units::relative;

/// Something that a run reads or computes, in the order of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Thing {
    InitialWeights,
    Batch,
    Loss,
    Gradient,
    Update,
}

/// The first difference between two runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Parting {
    /// 0 before the first step.
    pub(super) step: u64,
    /// The last step before it that both logged, in which nothing differs.
    pub(super) same_until: Option<u64>,
    pub(super) thing: Thing,
    /// Of a gradient, an update or initial weights.
    pub(super) layer: Option<String>,
    /// The loss, or the norm of the layer, in each run.
    pub(super) values: Option<[f64; 2]>,
    /// How many layers differ in this thing, and of how many.
    pub(super) layers: [usize; 2],
}

impl fmt::Display for Parting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layer = self.layer.as_deref().unwrap_or_default();
        match self.thing {
            Thing::InitialWeights => write!(f, "the initial weights of layer {layer}"),
            Thing::Batch => write!(f, "the rows of the batch"),
            Thing::Loss => write!(f, "the loss"),
            Thing::Gradient => write!(f, "the gradient of layer {layer}"),
            Thing::Update => write!(f, "the update of layer {layer}"),
        }?;
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
        let [differing, of] = self.layers;
        if of > 1 {
            lines.push(format!("{differing} of {of} layers differ in it"));
        }
        if let Some([a, b]) = self.values {
            let what = if self.layer.is_some() {
                "norm"
            } else {
                "value"
            };
            let [own, other] = [a, b].map(|value| significant(value, 9));
            let apart = match relative(a, b) {
                0.0 => "equal, the bits are not".to_string(),
                apart => format!("{} apart", significant(apart, 2)),
            };
            lines.push(format!("{what} {own} in A, {other} in B: {apart}"));
        }
        if let Some(step) = self.same_until.filter(|step| step + 1 < self.step) {
            lines.push(format!(
                "step {step} is the same; between them no step is in both logs (--log-every 1 logs all)"
            ));
        }
        lines
    }
}

/// The first layer of `layers`, in this order, in which two runs differ.
fn first_layer<'a>(
    thing: Thing,
    layers: impl Iterator<Item = (Option<&'a Layer>, Option<&'a Layer>)>,
) -> Option<Parting> {
    let (mut first, mut counts) = (None, [0, 0]);
    for (a, b) in layers {
        counts[1] += 1;
        let is_same = a.zip(b).is_some_and(|(a, b)| (&a.0, &a.1) == (&b.0, &b.1));
        if !is_same {
            counts[0] += 1;
            first.get_or_insert((a, b));
        }
    }
    let (a, b) = first?;
    let norm = |layer: Option<&Layer>| layer?.2;
    Some(Parting {
        step: 0,
        same_until: None,
        thing,
        layer: a.or(b).map(|layer| layer.0.clone()),
        values: norm(a).zip(norm(b)).map(<[f64; 2]>::from),
        layers: counts,
    })
}

/// The layers of two runs side by side, the last first if `backwards`.
fn pairs<'a>(
    [a, b]: [&'a [Layer]; 2],
    backwards: bool,
) -> impl Iterator<Item = (Option<&'a Layer>, Option<&'a Layer>)> {
    let count = a.len().max(b.len());
    (0..count).map(move |index| {
        let index = if backwards { count - 1 - index } else { index };
        (a.get(index), b.get(index))
    })
}

/// The first difference within a step that both runs logged.
fn within(a: &Step, b: &Step) -> Option<Parting> {
    let plain = |thing, values| Parting {
        step: 0,
        same_until: None,
        thing,
        layer: None,
        values,
        layers: [0, 0],
    };
    let digests = a.digests.as_ref().zip(b.digests.as_ref());
    let batch = digests.filter(|(a, b)| a.batch != b.batch);
    let loss = || {
        let values = a.loss.zip(b.loss).map(<[f64; 2]>::from);
        (a.loss != b.loss).then(|| plain(Thing::Loss, values))
    };
    // Backward goes from the output to the input.
    let gradient = || {
        let (a, b) = digests?;
        first_layer(Thing::Gradient, pairs([&a.gradients, &b.gradients], true))
    };
    let update = || {
        let (a, b) = digests?;
        first_layer(Thing::Update, pairs([&a.weights, &b.weights], false))
    };
    let batch = batch.map(|_| plain(Thing::Batch, None));
    batch.or_else(loss).or_else(gradient).or_else(update)
}

/// The first difference between two runs, in the steps that both logged.
pub(super) fn parting(a: &Logged, b: &Logged) -> Option<Parting> {
    // Logs without initial weights have nothing to compare.
    let initial = [&a.initial_weights[..], &b.initial_weights];
    let both = initial.iter().all(|weights| !weights.is_empty());
    let initial = both.then(|| first_layer(Thing::InitialWeights, pairs(initial, false)));
    if let Some(parting) = initial.flatten() {
        return Some(parting);
    }
    let mut same_until = None;
    for (own, other) in common(a, b) {
        if let Some(parting) = within(own, other) {
            let step = own.step;
            return Some(Parting {
                step,
                same_until,
                ..parting
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
    a.steps
        .values()
        .filter_map(|own| Some((own, b.steps.get(&own.step)?)))
}
