//! Files that are open, of the same kind and size on all ranks.

use ddp_kernels::mapped::Identity;
use ddp_kernels::{Device, memory};

use crate::error::{Error, Result};
use crate::files::Array;
use crate::labels::Labels;
use crate::opened::{self, Ask, Opened};
use crate::ranks::{Ranks, in_turn};
use crate::scan::LabelsFound;
use crate::stack::Stack;
use crate::task::{LabelName, TaskKind, TaskSpec};

/// Tells the files of these arrays from other ones. The number of a file system is left out, since
/// it differs between hosts that share it.
pub(super) fn identity_of<'a>(arrays: impl Iterator<Item = &'a Array>) -> String {
    let identities = arrays.map(|array| Identity {
        device: 0,
        ..array.mapped().identity()
    });
    identities.map(|identity| format!("{identity:?}")).collect()
}

/// Tells the system that files larger than memory are read in any order: reading ahead would be
/// wasted.
pub(super) fn read_in_any_order(arrays: &[Array]) {
    let bytes = arrays.iter().map(|array| array.mapped().len());
    if bytes.fold(0, u64::saturating_add) > memory::free_bytes(Device::Cpu) as u64 {
        let files = arrays.iter().map(Array::mapped);
        files.for_each(|file| file.random_order(true));
    }
}

/// Open files of features and labels.
pub(super) struct OpenFiles {
    /// The setting that names them.
    pub(super) setting: &'static str,
    pub(super) opened: Opened,
    pub(super) labels: Option<Labels>,
    /// The names of classes, if labels are texts or numbers that do not begin with 0.
    pub(super) names: Option<Vec<String>>,
}

impl OpenFiles {
    /// Opens and converts files, on one rank of a host first. `known` is the task that was learned
    /// from other rows.
    pub(super) fn open(
        ask: &Ask<'_>,
        task: Option<TaskKind>,
        known: Option<&TaskSpec>,
        ranks: &dyn Ranks,
    ) -> Result<OpenFiles> {
        let source = in_turn(ranks, || {
            let mut opened = opened::open(ask)?;
            opened.features.element()?;
            let (labels, names) = match (opened.labels.take(), known) {
                (None, _) => (None, None),
                (Some(files), Some(known)) => (Some(Labels::of_task(files, known)?), None),
                (Some(files), None) => {
                    let (mut labels, names) = Labels::new(files, task)?;
                    let names =
                        names.map_or_else(|| labels.name_numbers(), |names| Ok(Some(names)))?;
                    (Some(labels), names)
                }
            };
            let setting = ask.setting;
            Ok(OpenFiles {
                setting,
                opened,
                labels,
                names,
            })
        })?;
        source.check_alike(&ask.spec.path, ranks)?;
        Ok(source)
    }

    pub(super) fn features(&self) -> &Stack {
        &self.opened.features
    }

    /// An error on all ranks unless they have opened alike files. Ranks share the reading of rows
    /// from here on.
    fn check_alike(&self, path: &str, ranks: &dyn Ranks) -> Result<()> {
        let (features, opened) = (self.features(), &self.opened);
        let labels = match (&self.labels, &self.names) {
            (None, _) => "none".to_string(),
            (Some(_), Some(_)) => "texts".into(),
            (Some(labels), None) if labels.are_classes() => "classes".into(),
            (Some(labels), None) => format!("{} numbers a row", labels.width()),
        };
        let name = match &opened.label {
            Some(LabelName::Column(name) | LabelName::Array(name)) => name,
            None => "without a name",
        };
        let lines = |names: &Option<Vec<String>>| names.as_deref().unwrap_or_default().join("\n");
        let files: Vec<&str> = features.arrays().iter().map(Array::name).collect();
        let values = [
            ("the number of files", files.len().to_string()),
            ("the files", files.join("\n")),
            ("the number of rows", features.rows().to_string()),
            ("the number of features", features.width().to_string()),
            ("the type of features", features.element()?.to_string()),
            ("the columns", lines(&opened.columns)),
            ("the label", name.to_string()),
            ("the labels", labels),
            ("the classes", lines(&self.names)),
        ];
        let of_files = |what: &str| format!("{what} of `{}` {path}", self.setting);
        let values = values.map(|(what, value)| (of_files(what), value));
        ranks.must_match(
            &values,
            "compare the files on the hosts: all ranks need the same data",
        )
    }

    /// Tells the files of this rank from other ones: equal on ranks that have the same files open.
    pub(super) fn identity(&self) -> String {
        let labels = self
            .labels
            .iter()
            .flat_map(|labels| labels.stack().arrays());
        identity_of(self.features().arrays().iter().chain(labels))
    }

    /// What is to be learned from these labels.
    pub(super) fn task(&self, found: &LabelsFound) -> Result<TaskSpec> {
        let labels = self.labels.as_ref();
        let labels = labels.ok_or_else(|| Error::Internal("training without labels".into()))?;
        if !labels.are_classes() {
            let outputs = labels.width();
            if let Some((least, greatest)) = found.range
                && least == greatest
                && labels.rows() > 1
            {
                return Err(Error::Data(format!(
                    "{}: expected labels that differ, got {least:?} as f32 in all {} rows; help: give other `labels`, or if they \
                     differ by little for their size, subtract an offset before saving them",
                    labels.name(),
                    labels.rows()
                )));
            }
            return Ok(TaskSpec::Regression { outputs });
        }
        let classes = self.names.as_ref().map_or(found.counts.len(), Vec::len);
        if classes < 2 {
            let (place, rows) = (labels.name(), labels.rows());
            let or_else = match self.names {
                Some(_) => "",
                None => ", or set `task` to regression",
            };
            return Err(Error::Data(format!(
                "{place}: expected labels of at least 2 classes, got {classes} in {rows} rows; help: give other `labels`{or_else}"
            )));
        }
        Ok(match self.names.clone() {
            Some(names) => TaskSpec::named_classes(names),
            None => TaskSpec::numbered_classes(classes),
        })
    }
}
