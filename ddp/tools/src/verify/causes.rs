//! Possible causes of a difference.

use super::repeat::{Difference, Repeated};

/// What was found, for people: the step, the operation and the layer.
pub(super) fn found_text(difference: &Difference) -> String {
    match difference {
        Difference::Step(parting, _) => {
            let operation = match parting.thing {
                "loss" => " (forward)",
                "gradient" => " (backward)",
                "update" => " (the optimizer)",
                _ => "",
            };
            // A is the log.
            let details = parting.details().join(", ");
            let details = details
                .replace("in A", "in the log")
                .replace("in B", "here");
            let colon = if details.is_empty() { "" } else { ": " };
            format!("the first difference is in {parting}{operation}{colon}{details}")
        }
        Difference::Saved(step, others) => format!(
            "the checkpoint of step {step} differs first in {} (of {} that differ)",
            others[0],
            others.len()
        ),
    }
}

/// What may have caused it, the likely first. `others` is what is not as it was where it trained.
pub(super) fn causes(difference: &Difference, found: &Repeated, others: &[String]) -> Vec<String> {
    let unsteady = "this machine computed the same steps twice with different results: a fault";
    let unsteady = found.is_unsteady.then(|| unsteady.to_string());
    let known = unsteady.into_iter().chain(found.other_data.clone());
    let cause = match difference {
        Difference::Saved(..) => {
            "the checkpoint was changed together with the log, whose steps are right".into()
        }
        Difference::Step(_, [Some(claimed), Some(own)]) if claimed != own => {
            format!("the learning rate: {claimed} in the log, and {own} by the settings it names")
        }
        Difference::Step(parting, _) => match parting.thing {
            "initial weights" => "another seed, base or setting of the model",
            "batch" => "another seed or batch size, or other rows",
            "loss" => "other data or weights, or another setting of the model",
            "gradient" => "another setting of the loss or the model",
            _ => "another setting of the optimizer, such as the learning rate",
        }
        .into(),
    };
    let machine = "a line of the log that was changed, or a fault of the machine that trained";
    let machine = found.other_data.is_empty().then(|| machine.to_string());
    known
        .chain(others.iter().cloned())
        .chain([cause])
        .chain(machine)
        .collect()
}
