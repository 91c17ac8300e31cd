//! What was taken as label and as features, for people: said at the start of a run, by `inspect`
//! and in the record.

use super::look::Findings;
use super::source::OpenFiles;
use crate::files::listed_up_to;
use crate::task::{LabelName, TaskSpec};

/// Names that are shown.
const SHOWN: usize = 8;

/// The label, the task, and the features used and left out.
pub(super) fn text(source: &OpenFiles, task: &TaskSpec, findings: &Findings) -> String {
    let opened = &source.opened;
    let label = match (&opened.label, &source.labels) {
        (_, None) => String::new(),
        (Some(name @ LabelName::Column(_)), _) => match &*name.columns() {
            [one] => format!("label column \"{one}\", "),
            all => format!("label columns {}, ", listed_up_to(SHOWN, all)),
        },
        (Some(LabelName::Array(name)), _) => format!("label array \"{name}\", "),
        (None, Some(labels)) => format!("labels {}, ", labels.name()),
    };
    let names = task.classes().and_then(|classes| classes.texts());
    let learned = match (names, findings.labels.range) {
        (Some(names), _) => format!(" ({})", listed_up_to(SHOWN, names)),
        // Of several columns the units may differ.
        (None, Some((least, greatest))) if task.outputs() == 1 => {
            format!(" ({least:?} to {greatest:?})")
        }
        (None, _) => String::new(),
    };
    let width = match source.features().width() {
        1 => "1 feature".to_string(),
        width => format!("{width} features"),
    };
    let features = match &opened.columns {
        Some(columns) => format!("{width}: {}", listed_up_to(SHOWN, columns)),
        None => format!("{width} a row"),
    };
    let left_out = match opened.left_out.len() {
        0 => String::new(),
        count => format!(
            " ({count} left out: {})",
            listed_up_to(SHOWN, &opened.left_out)
        ),
    };
    format!("{label}{task}{learned}, {features}{left_out}")
}
