//! What may have caused that a run is not as it is claimed.

use super::repeat::{Difference, Repeated};

/// What was found, for people: the step, the operation and the layer.
pub(super) fn found_text(difference: &Difference) -> String {
    match difference {
        Difference::Step(parting, _) => {
            // A is the log.
            let side = |line: String| line.replace("in A", "in the log").replace("in B", "here");
            let details = parting.details().into_iter().map(side);
            let details: Vec<String> = details.collect();
            let operation = match parting.thing {
                "loss" => " (forward)",
                "gradient" => " (backward)",
                "update" => " (the optimizer)",
                _ => "",
            };
            let colon = if details.is_empty() { "" } else { ": " };
            let details = details.join(", ");
            format!("the first difference is in {parting}{operation}{colon}{details}")
        }
        Difference::Saved(step, others) => {
            let more = match others.len() {
                0 | 1 => String::new(),
                all => format!(" (and {} more)", all - 1),
            };
            format!(
                "the checkpoint of step {step} differs first in {}{more}",
                others[0]
            )
        }
    }
}

/// What may have caused it, the likely first.
pub(super) fn causes(
    difference: &Difference,
    found: &Repeated,
    other_machine: &[String],
) -> Vec<String> {
    let mut causes = Vec::new();
    if found.is_unsteady {
        causes.push(
            "this machine computed the same steps twice with different results: it has a fault"
                .to_string(),
        );
    }
    causes.extend(found.other_data.iter().cloned());
    causes.extend(other_machine.iter().cloned());
    match difference {
        Difference::Saved(..) => causes.push(
            "the checkpoint was changed together with the log, or is of other steps: the log of \
             these steps is right"
                .into(),
        ),
        Difference::Step(_, [Some(claimed), Some(own)]) if claimed != own => causes.push(format!(
            "the learning rate: {claimed} in the log, and {own} by the settings that it names"
        )),
        Difference::Step(parting, _) => causes.push(
            match parting.thing {
                "initial weights" => {
                    "other initial weights: the seed, the model's settings or the \
                                      base were others"
                }
                "batch" => {
                    "other rows, or in another order: the seed, the batch size or the data \
                            were others"
                }
                "loss" => "forward: the data, the model's settings or the weights were others",
                "gradient" => "backward: a setting of the loss or the model was another",
                _ => "the optimizer: its settings, as the learning rate, were others",
            }
            .into(),
        ),
    }
    if found.other_data.is_empty() {
        causes.push(
            "a line of the log that was changed, or a fault of the machine that trained".into(),
        );
    }
    causes
}
