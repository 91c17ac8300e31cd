//! What a model family implements: its settings, their checks, and its layers.

use std::fmt;
use std::str::FromStr;

use ddp_kernels::DType;
use ddp_kernels::choice::{self, Choice};

use crate::Sequential;
use crate::error::{Error, Result};

/// A model family, implemented by the struct of its settings. `Default` gives their defaults, and
/// serde reads and writes them under the names that `settings` lists.
pub trait Family {
    /// The settings, in the order of the help.
    fn settings() -> Vec<Setting<Self>>
    where
        Self: Sized;

    /// Whether help leaves the family out: for families of tests.
    fn is_hidden() -> bool
    where
        Self: Sized,
    {
        false
    }

    /// Names for settings that people use often, with what they stand for.
    fn presets() -> Vec<(&'static str, Self)>
    where
        Self: Sized,
    {
        Vec::new()
    }

    /// How many tokens the model sees at once, if it takes tokens.
    fn context(&self) -> Option<usize> {
        None
    }

    /// How many tokens the model has, if it says so.
    fn vocabulary(&self) -> Option<usize> {
        None
    }

    /// Checks the settings. The error names a setting in backquotes; see `refuse`.
    fn check(&self) -> Result<()>;

    /// Multiplications and additions of a row in training, if they are known.
    fn flop_of_a_row(&self, _data: &DataShape<'_>) -> Option<f64> {
        None
    }

    /// The layers for these data. A family that cannot use the data refuses them here.
    fn layers(&self, data: &DataShape<'_>) -> Result<Sequential>;

    /// The same model in PyTorch, on one line, for `inspect`.
    fn torch(&self, _row_shape: &[usize], _outputs: usize) -> Option<String> {
        None
    }
}

/// What a model is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataShape<'a> {
    /// The shape of one row of the inputs.
    pub row_shape: &'a [usize],
    /// The shape that a row has in its file, if the row is flat and that has several dimensions.
    pub image: &'a [usize],
    /// The dtype of the inputs.
    pub dtype: DType,
    /// How many numbers the model gives for each prediction: one for each class, or the targets.
    pub outputs: usize,
}

impl DataShape<'_> {
    /// Refuses inputs of another dtype. `family` is for the message.
    pub fn check_dtype(&self, expected: DType, family: &str) -> Result<()> {
        if self.dtype == expected {
            return Ok(());
        }
        Err(Error::Model {
            layer: format!("model {family}"),
            expected: format!("inputs of {expected}"),
            got: format!("{} {:?}", self.dtype, self.row_shape),
            help: match expected {
                DType::I64 => "give tokens, as of a text, or choose another model family",
                _ => "give other data, or choose another model family: gpt takes tokens",
            }
            .into(),
        })
    }
}

/// How the values of a setting are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `true` or `false`; a flag without a value means `true`.
    Switch,
    /// One value.
    One,
    /// Values separated by commas; `none` for no value.
    List,
}

/// A setting of a family.
pub struct Setting<F> {
    /// Its name in flags, files and checkpoints.
    pub name: &'static str,
    /// What help calls its value.
    pub value_name: &'static str,
    /// Its help, without the default.
    pub help: &'static str,
    /// How its values are written.
    pub form: Form,
    /// Its values and their help, if it takes one of a few names.
    pub choices: Vec<(&'static str, &'static str)>,
    /// Sets it from text. The error says what was expected.
    pub set: SetText<F>,
    /// Whether results depend on it; otherwise it may change when a run is resumed.
    pub changes_results: bool,
}

/// Sets a field of `F` from text. The error says what was expected.
pub type SetText<F> = Box<dyn Fn(&mut F, &str) -> Result<(), String> + Send + Sync>;

impl<F: 'static> Setting<F> {
    /// `true` or `false`.
    pub fn switch(
        name: &'static str,
        help: &'static str,
        field: fn(&mut F) -> &mut bool,
    ) -> Setting<F> {
        let read = |text: &str| parse(text, "true or false");
        Setting::new([name, "BOOL", help], Form::Switch, field, read)
    }

    /// A number, as in 0.001.
    pub fn number(
        name: &'static str,
        value_name: &'static str,
        help: &'static str,
        field: fn(&mut F) -> &mut f64,
    ) -> Setting<F> {
        let read = |text: &str| parse(text, "a number, as in 0.001 or 1e-3");
        Setting::new([name, value_name, help], Form::One, field, read)
    }

    /// A whole number, as in 4.
    pub fn count(
        name: &'static str,
        value_name: &'static str,
        help: &'static str,
        field: fn(&mut F) -> &mut usize,
    ) -> Setting<F> {
        let read = |text: &str| parse(text, "a whole number, 1 or more, as in 4");
        Setting::new([name, value_name, help], Form::One, field, read)
    }

    /// Whole numbers separated by commas, as in 256,128.
    pub fn list(
        name: &'static str,
        value_name: &'static str,
        help: &'static str,
        field: fn(&mut F) -> &mut Vec<usize>,
    ) -> Setting<F> {
        let read = |text: &str| {
            let values: Result<List<usize>, String> = text.parse();
            let failed = |error: String| error.replacen("values", "whole numbers", 1);
            values.map(|List(values)| values).map_err(failed)
        };
        Setting::new([name, value_name, help], Form::List, field, read)
    }

    /// Text, which the family checks.
    pub fn text(
        name: &'static str,
        value_name: &'static str,
        help: &'static str,
        field: fn(&mut F) -> &mut String,
    ) -> Setting<F> {
        let read = |text: &str| Ok(text.to_string());
        Setting::new([name, value_name, help], Form::One, field, read)
    }

    /// One of a few names.
    pub fn choice<T: Choice>(
        name: &'static str,
        value_name: &'static str,
        help: &'static str,
        field: fn(&mut F) -> &mut T,
    ) -> Setting<F> {
        let all = T::ALL.iter().map(|(_, name, help)| (*name, *help));
        let words = [name, value_name, help];
        Setting {
            choices: all.collect(),
            ..Setting::new(words, Form::One, field, choice::named)
        }
    }

    /// The same setting, on which no result depends.
    pub fn that_keeps_results(self) -> Setting<F> {
        Setting {
            changes_results: false,
            ..self
        }
    }

    /// The same setting of `W`, of which `inner` gives the part that has it.
    pub(super) fn inside<W: 'static>(self, inner: fn(&mut W) -> Option<&mut F>) -> Setting<W> {
        let name = self.name;
        let set = self.set;
        Setting {
            name,
            value_name: self.value_name,
            help: self.help,
            form: self.form,
            choices: self.choices,
            changes_results: self.changes_results,
            set: Box::new(move |whole, text| match inner(whole) {
                Some(part) => set(part, text),
                None => Err(format!("expected a model that has {name}")),
            }),
        }
    }

    fn new<T: 'static>(
        [name, value_name, help]: [&'static str; 3],
        form: Form,
        field: fn(&mut F) -> &mut T,
        read: fn(&str) -> Result<T, String>,
    ) -> Setting<F> {
        let set = move |family: &mut F, text: &str| {
            *field(family) = read(text)?;
            Ok(())
        };
        Setting {
            name,
            value_name,
            help,
            form,
            choices: Vec::new(),
            changes_results: true,
            set: Box::new(set),
        }
    }
}

impl<F> fmt::Debug for Setting<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "setting {}", self.name)
    }
}

fn parse<T: FromStr>(text: &str, expected: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("expected {expected}"))
}

/// The error of a setting with a wrong value.
pub fn refuse(setting: &str, got: impl fmt::Display, expected: &str, help: &str) -> Error {
    Error::Usage(format!(
        "`{setting}` {got}: expected {expected}; help: {help}"
    ))
}

/// Values separated by commas; `none` for no value.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct List<T>(pub Vec<T>);

impl<T: FromStr> FromStr for List<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<List<T>, String> {
        if text == "none" {
            return Ok(List(Vec::new()));
        }
        let value = |part: &str| {
            let failed = || format!("expected values separated by commas, got {part:?}");
            part.trim().parse().map_err(|_| failed())
        };
        let values: Result<Vec<T>, String> = text.split(',').map(value).collect();
        values.map(List)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_have_commas_between_their_values() {
        assert_eq!("1, 2,3".parse(), Ok(List(vec![1, 2, 3])));
        assert_eq!("none".parse(), Ok(List::<usize>(vec![])));
        for text in ["", "1,,2", "1;2", "1,x"] {
            assert!(text.parse::<List<usize>>().is_err(), "{text:?}");
        }
    }
}
