//! The weight of each class in the loss: as given, or so that all classes count the same.

use std::fmt;
use std::str::FromStr;

use ddp_data::Classes;
use ddp_nn::models::family::List;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::setting::CLASS_WEIGHTS;

/// How much each class counts in the loss.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "InFile", into = "InFile")]
pub enum ClassWeights {
    /// All rows count the same.
    #[default]
    Equal,
    /// All classes count the same, however many rows they have to train on.
    Balanced,
    /// A weight for each class, in their order.
    InOrder(Vec<f64>),
    /// Weights by name; other classes have the weight 1.
    Named(Vec<(String, f64)>),
}

/// As files have it.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum InFile {
    List(Vec<f64>),
    Text(String),
}

impl ClassWeights {
    /// The weights that are given as numbers.
    pub fn numbers(&self) -> Vec<f64> {
        match self {
            ClassWeights::Equal | ClassWeights::Balanced => Vec::new(),
            ClassWeights::InOrder(weights) => weights.clone(),
            ClassWeights::Named(weights) => weights.iter().map(|(_, weight)| *weight).collect(),
        }
    }

    /// The weight of each of these classes, which have this many rows to train on; None for equal
    /// weights. `data` is the name of the data.
    pub(super) fn of(
        &self,
        classes: &Classes,
        rows: Option<Vec<u64>>,
        data: &str,
    ) -> Result<Option<Vec<f64>>> {
        let refused = |expected: String, help: &str| {
            let text = format!("{CLASS_WEIGHTS} {self}: expected {expected}; help: {help}");
            Err(Error::Usage(text))
        };
        let count = classes.count();
        match self {
            ClassWeights::Equal => Ok(None),
            ClassWeights::InOrder(weights) if weights.len() == count => Ok(Some(weights.clone())),
            ClassWeights::InOrder(weights) => {
                let got = weights.len();
                let expected = format!("{count} weights, one for each class of {data}, got {got}");
                refused(
                    expected,
                    &format!("give as many, or leave {CLASS_WEIGHTS} out"),
                )
            }
            ClassWeights::Named(weights) => {
                let names = classes.names();
                let mut all = vec![None; count];
                for (name, weight) in weights {
                    let Some(class) = names.iter().position(|known| known == name) else {
                        let known: Vec<&str> = names.iter().take(20).map(String::as_str).collect();
                        let expected = format!("names of classes of {data}, got {name:?}");
                        let help = format!("the first classes are {}", known.join(", "));
                        return refused(expected, &help);
                    };
                    if all[class].replace(*weight).is_some() {
                        let help = "leave one of its weights out";
                        return refused(format!("each class once, got {name:?} twice"), help);
                    }
                }
                let all = all.iter().map(|weight| weight.unwrap_or(1.0));
                let all: Vec<f64> = all.collect();
                // Weights are used as f32.
                if all.iter().all(|&weight| weight as f32 <= 0.0) {
                    let help = "with weights of 0 nothing is learned";
                    return refused("a weight above 0".into(), help);
                }
                Ok(Some(all))
            }
            ClassWeights::Balanced => {
                let Some(rows) = rows else {
                    let expected = format!("classes that are counted before training, got {data}");
                    return refused(expected, "give a weight for each class");
                };
                if let Some(class) = rows.iter().position(|rows| *rows == 0) {
                    let name = classes.name(class);
                    let expected = format!("rows of every class to train on, got none of {name}");
                    return refused(expected, "give weights by name");
                }
                let mean = rows.iter().sum::<u64>() as f64 / count as f64;
                Ok(Some(rows.iter().map(|rows| mean / *rows as f64).collect()))
            }
        }
    }
}

impl fmt::Display for ClassWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text: Vec<String> = match self {
            ClassWeights::Equal => return f.write_str("none"),
            ClassWeights::Balanced => return f.write_str("balanced"),
            ClassWeights::InOrder(weights) => weights.iter().map(f64::to_string).collect(),
            ClassWeights::Named(weights) => {
                let one = |(name, weight): &(String, f64)| format!("{name}={weight}");
                weights.iter().map(one).collect()
            }
        };
        f.write_str(&text.join(","))
    }
}

impl FromStr for ClassWeights {
    type Err = String;

    fn from_str(text: &str) -> Result<ClassWeights, String> {
        let named = |pair: &str| -> Option<(String, f64)> {
            let (name, weight) = pair.rsplit_once('=')?;
            Some((name.trim().to_string(), weight.trim().parse().ok()?))
        };
        match text {
            "balanced" => Ok(ClassWeights::Balanced),
            _ if text.contains('=') => {
                let pairs: Option<Vec<_>> = text.split(',').map(named).collect();
                let expected = "expected a name and a number for each class, as in stays=1,moves=4";
                Ok(ClassWeights::Named(pairs.ok_or(expected)?))
            }
            _ => {
                let expected =
                    "expected balanced, numbers as in 1,2.5, or names as in stays=1,moves=4";
                let List(weights) = text.parse().map_err(|_| expected.to_string())?;
                Ok(ClassWeights::from(weights))
            }
        }
    }
}

impl From<Vec<f64>> for ClassWeights {
    fn from(weights: Vec<f64>) -> ClassWeights {
        if weights.is_empty() {
            return ClassWeights::Equal;
        }
        ClassWeights::InOrder(weights)
    }
}

impl TryFrom<InFile> for ClassWeights {
    type Error = String;

    fn try_from(written: InFile) -> Result<ClassWeights, String> {
        match written {
            InFile::List(weights) => Ok(weights.into()),
            InFile::Text(text) => text.parse(),
        }
    }
}

impl From<ClassWeights> for InFile {
    fn from(weights: ClassWeights) -> InFile {
        match weights {
            ClassWeights::Equal | ClassWeights::InOrder(_) => InFile::List(weights.numbers()),
            ClassWeights::Balanced | ClassWeights::Named(_) => InFile::Text(weights.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classes() -> Classes {
        Classes::named(["stays", "moves"].map(String::from).into())
    }

    #[test]
    fn balanced_classes_count_the_same_and_names_find_their_class() {
        let of = |text: &str, rows| {
            let weights: ClassWeights = text.parse().unwrap();
            assert_eq!(weights.to_string(), text);
            let json = serde_json::to_value(&weights).unwrap();
            assert_eq!(
                serde_json::from_value::<ClassWeights>(json).unwrap(),
                weights
            );
            weights
                .of(&classes(), rows, "the data")
                .map_err(|error| error.to_string())
        };
        // 85 × 50/85 = 15 × 50/15, and the mean weight of a row is 1.
        let balanced = of("balanced", Some(vec![85, 15])).unwrap().unwrap();
        assert_eq!(balanced, [50.0 / 85.0, 50.0 / 15.0]);
        assert_eq!(of("moves=4", None), Ok(Some(vec![1.0, 4.0])));
        assert_eq!(of("moves=4,stays=0.5", None), Ok(Some(vec![0.5, 4.0])));
        assert_eq!(of("stays=0", None), Ok(Some(vec![0.0, 1.0])));
        assert_eq!(of("1,4", None), Ok(Some(vec![1.0, 4.0])));
        assert_eq!(of("none", None), Ok(None));
        for (text, rows, part) in [
            ("balanced", Some(vec![85, 0]), "got none of moves"),
            ("balanced", None, "counted before training"),
            (
                "goes=4",
                None,
                "got \"goes\"; help: the first classes are stays, moves",
            ),
            ("moves=4,moves=1", None, "got \"moves\" twice"),
            ("1,2,3", None, "expected 2 weights"),
            ("stays=0,moves=0", None, "expected a weight above 0"),
        ] {
            let error = of(text, rows).unwrap_err();
            assert!(
                error.contains(part) && error.contains("`class-weights`"),
                "{error}"
            );
        }
        for text in ["", "many", "a=b", "a=1,2"] {
            assert!(text.parse::<ClassWeights>().is_err(), "{text}");
        }
    }
}
