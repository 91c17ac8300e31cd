//! Groups of parameters with their own learning rate or weight decay, chosen by name.

use glob::Pattern;

use super::rule::check_range;
use crate::error::{Error, Result};
use crate::params::Params;

/// Parameters whose names match a pattern, and what differs for them.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Of names such as `blocks.0.mlp.up.weight`: `*` is any text, `?` any character.
    pattern: Pattern,
    /// The learning rate, as a factor of the rule's; None for the rule's own.
    pub rate: Option<f64>,
    /// The weight decay, of all parameters of the group; None for the rule's own.
    pub weight_decay: Option<f64>,
}

impl Group {
    /// A group. The error says what is wrong with the pattern or a number.
    pub fn new(pattern: &str, rate: Option<f64>, weight_decay: Option<f64>) -> Result<Group> {
        let numbers = [("learning rate", rate), ("weight decay", weight_decay)];
        for (name, value) in numbers {
            check_range(
                &format!("the group {pattern}: {name}"),
                value.unwrap_or(0.0),
                f64::INFINITY,
            )?;
        }
        Ok(Group {
            pattern: Pattern::new(pattern).map_err(|error| {
                Error::Usage(format!(
                    "the group {pattern}: {error}; help: * is any text, ? any character"
                ))
            })?,
            rate,
            weight_decay,
        })
    }

    fn matches(&self, name: &str) -> bool {
        self.pattern.matches(name)
    }
}

/// The number of the first group that matches `name`.
pub(super) fn group_of(groups: &[Group], name: &str) -> Option<usize> {
    groups.iter().position(|group| group.matches(name))
}

/// Refuses a group that no trained parameter belongs to. `params` are the parts of the model.
pub fn check_groups<'a>(groups: &[Group], params: impl Iterator<Item = &'a Params>) -> Result<()> {
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
