//! Update rules: which method updates which parameter and with which numbers, what a method
//! implements, and groups of parameters with their own learning rate or weight decay, chosen by
//! name.

use std::ops::Range;

use ddp_kernels::ops::{AdamwConstants, SgdConstants, UpdateTensors};
use ddp_kernels::{Tensor, choices};
use glob::Pattern;

use crate::error::{Error, Result};
use crate::params::{ParamId, Parameter, Params};

choices! {
    /// What weight decay applies to.
    #[derive(Default)]
    pub enum Decayed {
        /// Matrices, but not biases and other vectors
        #[default]
        Matrices = "matrices",
        /// All parameters, as in PyTorch's optimizers
        All = "all",
    }
}

/// How one parameter is updated.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Method {
    AdamW(AdamwConstants),
    Sgd(SgdConstants),
    Muon(Muon),
}

/// Muon's constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Muon {
    /// The decay of the momentum, above 0.
    pub momentum: f64,
    /// Whether it is Nesterov's.
    pub nesterov: bool,
}

impl Method {
    pub(super) fn update(&self) -> &dyn Update {
        match self {
            Method::AdamW(constants) => constants,
            Method::Sgd(constants) => constants,
            Method::Muon(constants) => constants,
        }
    }
}

/// What an optimizer declares to the settings of a run.
#[derive(Debug)]
pub struct Declared {
    /// The settings that it has and their defaults: `lr`, `weight-decay` and its constants.
    pub defaults: &'static [(&'static str, f64)],
    /// Those of them that must not be 0, because it would then do nothing.
    pub above_zero: &'static [&'static str],
    /// Its rule with these settings, except weight decay.
    pub rule: fn(of: SettingOf<'_>) -> Rule,
}

/// The value of the setting of a name.
pub type SettingOf<'a> = &'a dyn Fn(&str) -> f64;

/// How a method updates parameters. An optimizer's file implements it for its constants.
pub(super) trait Update {
    /// Its name, for messages.
    fn name(&self) -> &'static str;

    /// The names of its moments, also in checkpoints: those in the state of PyTorch's optimizers.
    fn moments(&self) -> &'static [&'static str];

    /// Refuses invalid constants.
    fn check(&self) -> Result<()>;

    /// What `apply` reads in step number `step`, counted from 1.
    fn numbers(&self, step: u64, learning_rate: f64, weight_decay: f64) -> Result<[f64; 4]>;

    /// Updates the values of `part`. A method that needs whole matrices writes their directions
    /// over the gradients instead: `Matrices` makes steps of them, which plain SGD applies.
    fn apply(&self, part: &ArenaPart<'_>) -> Result<()>;
}

/// A part of the arenas, for one launch.
pub(super) struct ArenaPart<'a> {
    /// The copies are those that layers read; `scalars` (4) is `Update::numbers`, on the device.
    pub(super) tensors: UpdateTensors<'a>,
    /// The part's moment of a name.
    pub(super) moment: &'a dyn Fn(&str) -> Result<Tensor>,
}

/// An update rule and its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// How parameters are updated.
    pub method: Method,
    /// How the matrices of hidden layers are updated instead, each as a whole.
    pub hidden: Option<Method>,
    /// The learning rate of `method`, as a factor of that of `hidden`.
    pub rate: f64,
    /// The decay, which is multiplied by the learning rate; for SGD the part of each value that is
    /// added to its gradient.
    pub weight_decay: f64,
    /// What decays.
    pub decayed: Decayed,
}

impl Rule {
    /// This method for all parameters, without weight decay.
    pub fn of(method: Method) -> Rule {
        Rule {
            method,
            hidden: None,
            rate: 1.0,
            weight_decay: 0.0,
            decayed: Decayed::Matrices,
        }
    }

    /// The names of the methods of hidden matrices and of all else, if these differ.
    pub fn hidden_and_rest(&self) -> Option<[&'static str; 2]> {
        let hidden = self.hidden.as_ref()?;
        Some([hidden.update().name(), self.method.update().name()])
    }

    /// How it updates `parameter`.
    pub(super) fn method(&self, parameter: &Parameter) -> Method {
        let hidden = self.hidden.filter(|_| !parameter.matrices.is_empty());
        hidden.unwrap_or(self.method)
    }

    /// The names of the moments of `parameter`, also in checkpoints.
    pub fn moments_of(&self, parameter: &Parameter) -> &'static [&'static str] {
        self.method(parameter).update().moments()
    }

    /// The factor of the learning rate of the parameters that `method` updates.
    fn rate_of(&self, method: Method) -> f64 {
        if method == self.method {
            return self.rate;
        }
        1.0
    }

    /// Refuses invalid constants.
    pub(super) fn check(&self) -> Result<()> {
        let mut methods = [Some(self.method), self.hidden].into_iter().flatten();
        methods.try_for_each(|method| method.update().check())?;
        check_range("the factor of the learning rate", self.rate, f64::INFINITY)?;
        check_range("weight decay", self.weight_decay, f64::INFINITY)
    }
}

/// Refuses a number that is not at least 0 and below `end`.
pub(super) fn check_range(name: &str, value: f64, end: f64) -> Result<()> {
    if (0.0..end).contains(&value) {
        return Ok(());
    }
    let below = if end.is_finite() {
        format!(" and below {end}")
    } else {
        String::new()
    };
    Err(Error::Usage(format!(
        "{name}: expected 0 or more{below}, got {value}; help: give a number in that range"
    )))
}

/// Parameters whose names match a pattern, and what differs for them.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterGroup {
    /// Of names such as `blocks.0.mlp.up.weight`: `*` is any text, `?` any character.
    pattern: Pattern,
    /// The learning rate, as a factor of the rule's; None for the rule's own.
    pub rate: Option<f64>,
    /// The weight decay, of all parameters of the group; None for the rule's own.
    pub weight_decay: Option<f64>,
}

impl ParameterGroup {
    /// A group. The error says what is wrong with the pattern or a number.
    pub fn new(
        pattern: &str,
        rate: Option<f64>,
        weight_decay: Option<f64>,
    ) -> Result<ParameterGroup> {
        let numbers = [("learning rate", rate), ("weight decay", weight_decay)];
        for (name, value) in numbers {
            check_range(
                &format!("the group {pattern}: {name}"),
                value.unwrap_or(0.0),
                f64::INFINITY,
            )?;
        }
        Ok(ParameterGroup {
            pattern: Pattern::new(pattern).map_err(|error| {
                Error::Usage(format!(
                    "the group {pattern}: {error}; help: * is any text, ? any character"
                ))
            })?,
            rate,
            weight_decay,
        })
    }

    /// Whether the parameter `name` is of this group, unless an earlier one matches it, too.
    pub fn matches(&self, name: &str) -> bool {
        self.pattern.matches(name)
    }
}

/// The number of the first group that matches `name`.
fn group_of(groups: &[ParameterGroup], name: &str) -> Option<usize> {
    groups.iter().position(|group| group.matches(name))
}

/// Refuses a group that no trained parameter belongs to. `params` are the parts of the model.
pub fn check_groups<'a>(
    groups: &[ParameterGroup],
    params: impl Iterator<Item = &'a Params>,
) -> Result<()> {
    let all: Vec<_> = params.flat_map(Params::in_order).collect();
    let trained = all.iter().filter(|parameter| parameter.is_trained());
    let names: Vec<&str> = trained.map(|parameter| parameter.name.as_str()).collect();
    for (index, group) in groups.iter().enumerate() {
        if names
            .iter()
            .any(|name| group_of(groups, name) == Some(index))
        {
            continue;
        }
        let earlier = names.iter().find(|name| group.matches(name));
        let (expected, help) = match earlier {
            Some(name) => (
                "a parameter that no group before it matches",
                format!("put it first: an earlier group has {name}, and the first match counts"),
            ),
            None => (
                "a name or pattern of trained parameters",
                format!("the model trains {}", names.join(", ")),
            ),
        };
        let pattern = &group.pattern;
        return Err(Error::Usage(format!(
            "the group {pattern}: expected {expected}, got none; help: {help}"
        )));
    }
    Ok(())
}

/// Parameters that one method updates with the same numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Variant {
    pub(super) method: Method,
    /// The factor of the learning rate.
    pub(super) rate: f64,
    pub(super) weight_decay: f64,
}

/// What the update of `parameter` takes, and whether weight decay applies.
pub(super) fn variant_of(
    rule: &Rule,
    groups: &[ParameterGroup],
    parameter: &Parameter,
) -> (Variant, bool) {
    let method = rule.method(parameter);
    let decays = rule.decayed == Decayed::All || parameter.decays;
    let group = group_of(groups, &parameter.name).map(|index| &groups[index]);
    let rate = group.and_then(|group| group.rate);
    let own_decay = group.and_then(|group| group.weight_decay);
    let variant = Variant {
        method,
        rate: rate.unwrap_or_else(|| rule.rate_of(method)),
        weight_decay: own_decay.unwrap_or(rule.weight_decay),
    };
    (variant, decays || own_decay.is_some())
}

/// The variants of all trained parameters.
pub(super) fn variants(rule: &Rule, groups: &[ParameterGroup], params: &Params) -> Vec<Variant> {
    let mut all = Vec::new();
    for parameter in params.list().iter().filter(|p| p.is_trained()) {
        let (variant, _) = variant_of(rule, groups, parameter);
        if !all.contains(&variant) {
            all.push(variant);
        }
    }
    all
}

/// The parts of a range of the gradients' arena that one method updates, with the padding.
pub(super) fn runs(
    rule: &Rule,
    params: &Params,
    range: &Range<usize>,
) -> Vec<(Method, Range<usize>)> {
    let mut runs: Vec<(Method, Range<usize>)> = Vec::new();
    let touches =
        |p: &&Parameter| p.is_trained() && p.range.start < range.end && range.start < p.range.end;
    for parameter in params.list().iter().filter(touches) {
        let method = rule.method(parameter);
        let start = parameter.range.start.max(range.start);
        match runs.last_mut() {
            Some((last, run)) if *last == method => run.end = range.end,
            Some((_, run)) => {
                run.end = start;
                runs.push((method, start..range.end));
            }
            None => runs.push((method, range.clone())),
        }
    }
    runs
}

/// Consecutive elements of a parameter that an optimizer updates, and where their moments are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The parameter.
    pub parameter: ParamId,
    /// The first element, in row-major order.
    pub start: usize,
    /// The number of elements.
    pub length: usize,
    /// The start of their moments in those of [`Optimizer::moments`](super::Optimizer::moments)
    /// that they have.
    pub at: usize,
    /// The names of these.
    pub moments: &'static [&'static str],
}

/// The parts of trained parameters in a range of the gradients' arena, whose moments start at `at`.
pub(super) fn pieces_of(
    params: &Params,
    range: &Range<usize>,
    at: usize,
    moments: &'static [&'static str],
) -> Vec<Piece> {
    let trained = params.list().iter().filter(|p| p.is_trained());
    let part = |p: &Parameter| p.range.start.max(range.start)..p.range.end.min(range.end);
    let cut = trained.map(|p| (p, part(p)));
    let piece = |(p, part): (&Parameter, Range<usize>)| Piece {
        parameter: p.id,
        start: part.start - p.range.start,
        length: part.len(),
        at: at + part.start - range.start,
        moments,
    };
    cut.filter(|(_, part)| !part.is_empty())
        .map(piece)
        .collect()
}
