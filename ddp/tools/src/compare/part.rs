//! Where two runs first differ: the step, and in it the first thing that was read or computed.

use std::fmt;

use ddp_kernels::setting::SettingName;
use serde::Serialize;

use super::logged::{Digests, LoggedLayer, LoggedStep, Steps};
use crate::shown::significant;
use crate::units::relative;

/// A tensor or number that a step read or computed: the layer of a gradient or of weights, the
/// bits, and the loss or the norm of the layer.
type ComparedValue = (Option<String>, String, Option<f64>);

/// The first difference between two runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Parting {
    /// 0 before the first step.
    pub(crate) step: u64,
    /// The last step before it that both logged, in which nothing differs.
    pub(super) same_until: Option<u64>,
    pub(crate) thing: &'static str,
    layer: Option<String>,
    value: Option<f64>,
    value_in_b: Option<f64>,
    /// In how many layers of both runs that thing differs.
    layers: usize,
    /// Layers that have that thing in one run only.
    only_in_a: Vec<String>,
    only_in_b: Vec<String>,
    /// The first step, if initial weights differ and its batch does too.
    batch_too: Option<u64>,
}

impl fmt::Display for Parting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the {}", self.thing)?;
        let mut layer = self.layer.iter();
        layer.try_for_each(|layer| write!(f, " of layer {layer}"))?;
        match self.step {
            0 => write!(f, ", before the first step"),
            step => write!(f, " of step {step}"),
        }
    }
}

impl Parting {
    /// What else is known of it, as lines.
    pub(crate) fn details(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if self.layers > 1 {
            lines.push(format!("it differs in {} layers", self.layers));
        }
        if let Some(step) = self.batch_too {
            lines.push(format!("the batch of step {step} differs too"));
        }
        for (layers, run) in [(&self.only_in_a, 'A'), (&self.only_in_b, 'B')] {
            if !layers.is_empty() {
                lines.push(format!("layers only in {run}: {}", layers.join(", ")));
            }
        }
        if let Some((a, b)) = self.value.zip(self.value_in_b) {
            let what = self.layer.as_ref().map_or("value", |_| "norm");
            let apart = apart_text(relative(a, b));
            let [a, b] = [a, b].map(|value| significant(value, 9));
            lines.push(format!("{what} {a} in A, {b} in B: {apart}"));
        }
        if let Some(step) = self.same_until.filter(|step| step + 1 < self.step) {
            let same = match step {
                0 => "the initial weights are".into(),
                step => format!("step {step} is"),
            };
            let every = SettingName("log-every");
            lines.push(format!(
                "{same} the same; no step between them is in both logs ({every} 1 logs all)"
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
fn things(step: &LoggedStep, digests: bool) -> [(&'static str, Vec<ComparedValue>); 4] {
    let none = Digests::default();
    let digests = step.digests.as_ref().filter(|_| digests).unwrap_or(&none);
    let weights = match step.step {
        0 => "initial weights",
        _ => "update",
    };
    let bits = format!("{:?}", step.loss.map(f64::to_bits));
    let layer = |of: &LoggedLayer| (Some(of.0.clone()), of.1.clone(), of.2);
    // Backward goes from the output to the input.
    let gradients = digests.gradients.iter().rev().map(layer).collect();
    [
        ("batch", vec![(None, digests.batch.clone(), None)]),
        ("loss", vec![(None, bits, step.loss)]),
        ("gradient", gradients),
        (weights, digests.weights.iter().map(layer).collect()),
    ]
}

/// The first difference between two runs, in the steps that both logged.
pub(super) fn parting(a: &Steps, b: &Steps) -> Option<Parting> {
    let mut same_until = None;
    let mut parting = common(a, b)
        .find_map(|(own, other)| parting_in([own, other], same_until.replace(own.step)))?;
    let mut steps = common(a, b).filter(|(own, _)| own.step > 0);
    if let Some((own, other)) = steps.next().filter(|_| parting.step == 0) {
        let batch = |step: &LoggedStep| step.digests.as_ref().map(|of| of.batch.clone());
        parting.batch_too = (batch(own) != batch(other)).then_some(own.step);
    }
    Some(parting)
}

/// The first difference between two runs in the same step; `until` is the last one before it that
/// both logged.
pub(crate) fn parting_in([a, b]: [&LoggedStep; 2], until: Option<u64>) -> Option<Parting> {
    let both = a.digests.is_some() && b.digests.is_some();
    let mut pairs = things(a, both).into_iter().zip(things(b, both));
    pairs.find_map(|((thing, own), (_, other))| parting_of((until, a.step), thing, [&own, &other]))
}

/// The first difference between a thing that a step, after another, read or computed in one run and
/// in the other. Their models may have different layers.
fn parting_of(
    (same_until, step): (Option<u64>, u64),
    thing: &'static str,
    [a, b]: [&[ComparedValue]; 2],
) -> Option<Parting> {
    fn alike<'a>(of: &'a [ComparedValue], one: &ComparedValue) -> Option<&'a ComparedValue> {
        of.iter().find(|other| other.0 == one.0)
    }
    let differing = || a.iter().filter(|one| alike(b, one) != Some(one));
    let only_in = |of: &'_ [ComparedValue], other: &[ComparedValue]| -> Vec<ComparedValue> {
        let only = of.iter().filter(|one| alike(other, one).is_none());
        only.cloned().collect()
    };
    let (only_a, only_b) = (only_in(a, b), only_in(b, a));
    let first = differing().next().or(only_b.first())?;
    let layers = |of: &[ComparedValue]| of.iter().filter_map(|one| one.0.clone()).collect();
    Some(Parting {
        step,
        same_until,
        thing,
        layer: first.0.clone(),
        value: alike(a, first).and_then(|one| one.2),
        value_in_b: alike(b, first).and_then(|one| one.2),
        layers: differing().count() - only_a.len(),
        only_in_a: layers(&only_a),
        only_in_b: layers(&only_b),
        batch_too: None,
    })
}

/// The steps that both runs logged, in order.
pub(super) fn common<'a>(
    a: &'a Steps,
    b: &'a Steps,
) -> impl Iterator<Item = (&'a LoggedStep, &'a LoggedStep)> {
    let steps = a.values();
    steps.filter_map(|own| Some((own, b.get(&own.step)?)))
}
