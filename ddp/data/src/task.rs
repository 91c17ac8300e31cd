//! What a model learns from rows.

use std::fmt;

use ddp_kernels::{DType, Tensor};
use serde::{Deserialize, Serialize};

use crate::error::ensure;

/// The most tokens of a window, and of a vocabulary.
pub const TOKENS_MAX: u64 = 1 << 24;
/// The most classes of labels in files.
pub const CLASSES_MAX: usize = 1 << 16;

/// What a model learns from rows, as a checkpoint stores it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TaskSpec {
    /// A class for each row, or for each position of a row.
    Classification(Classes),
    /// Numbers for each row.
    Regression {
        /// How many numbers.
        outputs: usize,
    },
    /// At each position of a row, the token that follows.
    NextToken {
        /// The size of the vocabulary: every token is smaller.
        vocabulary: usize,
        /// Whether tokens are the bytes of texts.
        are_bytes: bool,
        /// The tokenizer of the texts, if the data name it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tokenizer: Option<TokenizerId>,
        /// Whether a row holds several documents: then its tokens say where theirs begins, and the
        /// model keeps documents apart.
        #[serde(default, skip_serializing_if = "is_false")]
        packed: bool,
    },
}

impl Default for TaskSpec {
    fn default() -> TaskSpec {
        TaskSpec::Regression { outputs: 1 }
    }
}

fn is_false(value: &bool) -> bool {
    !value
}

ddp_kernels::choices! {
    /// Which tokens of conversations are trained.
    #[derive(Default)]
    pub enum LossOn {
        /// What the assistant says, or what completes a prompt
        #[default]
        Assistant = "assistant",
        /// All of them
        All = "all",
    }
}

/// A tokenizer, as shards and checkpoints know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenizerId {
    /// The hash of its vocabulary.
    pub hash: String,
    /// The token after each document.
    pub end_of_text: Option<usize>,
}

impl TaskSpec {
    /// Classes called 0, 1, 2 …
    pub fn numbered_classes(count: usize) -> TaskSpec {
        TaskSpec::Classification(Classes::numbered(count))
    }

    /// Classes with these names.
    pub fn named_classes(names: Vec<String>) -> TaskSpec {
        TaskSpec::Classification(Classes::named(names))
    }

    /// The classes, if targets are classes.
    pub fn classes(&self) -> Option<&Classes> {
        match self {
            TaskSpec::Classification(classes) => Some(classes),
            TaskSpec::Regression { .. } | TaskSpec::NextToken { .. } => None,
        }
    }

    /// What labels are; None if there are none, since targets follow from inputs.
    pub fn kind(&self) -> Option<TaskKind> {
        match self {
            TaskSpec::Classification(_) => Some(TaskKind::Classification),
            TaskSpec::Regression { .. } => Some(TaskKind::Regression),
            TaskSpec::NextToken { .. } => None,
        }
    }

    /// The targets of a row with one label, or those of a position.
    pub fn targets(&self) -> TensorSpec {
        match self {
            TaskSpec::Classification(_) | TaskSpec::NextToken { .. } => {
                TensorSpec::new(DType::I64, &[])
            }
            TaskSpec::Regression { outputs } => TensorSpec::new(DType::F32, &[*outputs]),
        }
    }

    /// How many numbers a model gives for a target: one a class or token, or the outputs.
    pub fn outputs(&self) -> usize {
        match self {
            TaskSpec::Classification(classes) => classes.count,
            TaskSpec::Regression { outputs } => *outputs,
            TaskSpec::NextToken { vocabulary, .. } => *vocabulary,
        }
    }
}

impl fmt::Display for TaskSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TaskSpec::Classification(classes) => {
                write!(f, "classification into {} classes", classes.count)
            }
            TaskSpec::Regression { outputs: 1 } => f.write_str("regression of 1 number"),
            TaskSpec::Regression { outputs } => write!(f, "regression of {outputs} numbers"),
            TaskSpec::NextToken { vocabulary, .. } => write!(f, "the next of {vocabulary} tokens"),
        }
    }
}

/// How many classes there are, and their names unless these are 0, 1, 2 …
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "SavedClasses")]
pub struct Classes {
    #[serde(rename = "classes")]
    count: usize,
    names: Option<Vec<String>>,
}

/// The form in checkpoints. Older ones also name numbered classes.
#[derive(Deserialize)]
struct SavedClasses {
    classes: usize,
    names: Option<Vec<String>>,
}

impl TryFrom<SavedClasses> for Classes {
    type Error = String;

    fn try_from(saved: SavedClasses) -> Result<Classes, String> {
        let SavedClasses { classes, names } = saved;
        let got = names.as_ref().map_or(classes, Vec::len);
        ensure!(
            got == classes,
            "task: expected {classes} names of classes, got {got}"
        );
        Ok(names.map_or_else(|| Classes::numbered(classes), Classes::named))
    }
}

impl Classes {
    /// Classes called 0, 1, 2 …
    pub fn numbered(count: usize) -> Classes {
        Classes { count, names: None }
    }

    /// Classes with these names, which may be 0, 1, 2 …
    pub fn named(names: Vec<String>) -> Classes {
        let count = names.len();
        let mut numbered = names.iter().enumerate();
        let are_numbers = numbered.all(|(class, name)| *name == class.to_string());
        let names = (!are_numbers).then_some(names);
        Classes { count, names }
    }

    /// How many classes.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The names, unless they are 0, 1, 2 …
    pub fn texts(&self) -> Option<&[String]> {
        self.names.as_deref()
    }

    /// The name of a class.
    pub fn name(&self, class: usize) -> String {
        match &self.names {
            Some(names) => names[class].clone(),
            None => class.to_string(),
        }
    }

    /// The names of all classes, in their order.
    pub fn names(&self) -> Vec<String> {
        (0..self.count).map(|class| self.name(class)).collect()
    }

    /// The names as numbers, if all are different whole numbers in their order.
    pub(crate) fn whole_names(&self) -> Option<Vec<i64>> {
        let whole = |name: &String| name.parse::<i64>().ok().filter(|n| n.to_string() == *name);
        let numbers = self.names.as_ref()?.iter().map(whole);
        let numbers: Vec<i64> = numbers.collect::<Option<_>>()?;
        numbers.is_sorted_by(|a, b| a < b).then_some(numbers)
    }

    /// The first class with this name.
    pub fn find(&self, name: &str) -> Option<usize> {
        match &self.names {
            Some(names) => names.iter().position(|other| other == name),
            None => {
                let class: usize = name.parse().ok()?;
                (class < self.count && name == class.to_string()).then_some(class)
            }
        }
    }
}

ddp_kernels::choices! {
    /// What labels are.
    pub enum TaskKind {
        /// Labels are classes
        Classification = "classification",
        /// Labels are numbers
        Regression = "regression",
    }
}

/// The name of labels. Labels of other files for the same model most likely have the same name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LabelName {
    /// The column of a table.
    Column(String),
    /// The array of a file with several.
    Array(String),
}

impl LabelName {
    /// The columns that it names: `a,b` is two.
    pub fn columns(&self) -> Vec<String> {
        match self {
            LabelName::Column(names) => names.split(',').map(|name| name.trim().into()).collect(),
            LabelName::Array(name) => vec![name.clone()],
        }
    }
}

/// The dtype and the shape of one row's inputs or targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// The type of the elements.
    pub dtype: DType,
    /// The shape for one row; empty for one element.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Elements of this dtype in this shape for each row.
    pub fn new(dtype: DType, shape: &[usize]) -> TensorSpec {
        TensorSpec {
            dtype,
            shape: shape.to_vec(),
        }
    }

    /// The number of elements of a row.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The bytes of a row.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.bytes()
    }

    /// The shape of `rows` rows.
    pub(crate) fn shape_of(&self, rows: usize) -> Vec<usize> {
        [&[rows], &self.shape[..]].concat()
    }

    /// Whether `tensor` holds `rows` such rows.
    pub(crate) fn fits(&self, tensor: &Tensor, rows: usize) -> bool {
        let dims = tensor.shape().dims();
        tensor.dtype() == self.dtype && dims.split_first() == Some((&rows, &self.shape[..]))
    }
}

impl fmt::Display for TensorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.shape)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbered_classes_need_no_names() {
        let numbered = TaskSpec::numbered_classes(3);
        let text = serde_json::to_value(&numbered).unwrap();
        assert_eq!(
            text,
            json!({"classification": {"classes": 3, "names": null}})
        );
        let read = |names| {
            let text = json!({"classification": {"classes": 3, "names": names}});
            serde_json::from_value::<TaskSpec>(text)
        };
        assert_eq!(read(json!(null)).unwrap(), numbered);
        // As versions up to 0.5 wrote it.
        assert_eq!(read(json!(["0", "1", "2"])).unwrap(), numbered);
        assert_ne!(read(json!(["0", "1", "02"])).unwrap(), numbered);
        let error = read(json!(["a"])).unwrap_err().to_string();
        assert_eq!(error, "task: expected 3 names of classes, got 1");
    }

    #[test]
    fn a_class_is_found_by_its_name() {
        let numbered = Classes::named(["0", "1", "2"].map(String::from).into());
        assert_eq!((numbered.texts(), numbered.count()), (None, 3));
        for (name, class) in [("2", Some(2)), ("3", None), ("02", None), ("-1", None)] {
            assert_eq!(numbered.find(name), class, "{name}");
        }
        let named = Classes::named(["b", "a", "a"].map(String::from).into());
        assert_eq!((named.find("a"), named.find("1")), (Some(1), None));
        assert_eq!(named.names(), ["b", "a", "a"]);
    }
}
