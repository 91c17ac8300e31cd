//! Settings: their names in messages, in backquotes or as a program spells them; how their values
//! are written; and those that take one of a few names.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::OnceLock;

/// The name of a setting, as a message shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SettingName<'a>(pub &'a str);

/// How the program writes the name of a setting.
static SPELLING: OnceLock<fn(&str) -> String> = OnceLock::new();

/// Makes all messages of this process write the names of settings this way, for example as flags.
/// Only the first call has an effect.
pub fn spell_settings(spelling: fn(&str) -> String) {
    _ = SPELLING.set(spelling);
}

impl fmt::Display for SettingName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match SPELLING.get() {
            Some(spelling) => f.write_str(&spelling(self.0)),
            None => write!(f, "`{}`", self.0),
        }
    }
}

/// Declares constants for names: `setting_names! { LR "lr" }`.
#[macro_export]
macro_rules! setting_names {
    ($($constant:ident $name:literal)+) => {
        $(
            #[doc = concat!("The setting ", $name)]
            pub const $constant: $crate::setting::SettingName<'static> =
                $crate::setting::SettingName($name);
        )+
    };
}

/// A setting with a few named values.
pub trait Choice: Copy + 'static {
    /// Every value, its name and its help.
    const ALL: &'static [(Self, &'static str, &'static str)];

    /// Its name.
    fn name(self) -> &'static str
    where
        Self: PartialEq,
    {
        let entry = Self::ALL.iter().find(|(value, ..)| *value == self);
        entry.expect("ALL has every value").1
    }
}

/// The value with this name; the error is what was expected.
pub fn named<T: Choice>(name: &str) -> Result<T, String> {
    match T::ALL.iter().find(|(_, known, _)| *known == name) {
        Some((value, _, _)) => Ok(*value),
        None => {
            let known: Vec<_> = T::ALL.iter().map(|(_, name, _)| *name).collect();
            Err(format!("expected {}, got {name}", known.join(", ")))
        }
    }
}

/// Declares an enum that is a [`Choice`]: each value's doc comment is its help, and serde reads and
/// writes its name. The crate that uses it needs `serde`.
#[macro_export]
macro_rules! choices {
    ($(#[$meta:meta])* pub enum $kind:ident {
        $(#[doc = $help:literal] $(#[$default:ident])? $value:ident = $name:literal,)+
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, ::serde::Serialize, ::serde::Deserialize)]
        pub enum $kind {
            $(#[doc = $help] $(#[$default])? #[serde(rename = $name)] $value,)+
        }

        impl $crate::setting::Choice for $kind {
            const ALL: &'static [($kind, &'static str, &'static str)] =
                &[$(($kind::$value, $name, $help.trim_ascii())),+];
        }

        impl ::std::str::FromStr for $kind {
            type Err = String;

            fn from_str(name: &str) -> Result<$kind, String> {
                $crate::setting::named(name)
            }
        }
    };
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

/// A setting that is a number.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Number {
    Whole(u64),
    Real(f64),
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Number::Whole(number) => number.fmt(f),
            Number::Real(number) => number.fmt(f),
        }
    }
}

/// A type of settings.
pub trait SettingValue: Sized {
    /// How it is written.
    const FORM: Form = Form::One;

    /// Reads it from text. The error says what was expected.
    fn read(text: &str) -> Result<Self, String>;

    /// Its values and their help, if it is one of a few names.
    fn choices() -> Vec<(&'static str, &'static str)> {
        Vec::new()
    }

    /// Its value, if it is a number.
    fn number(&self) -> Option<Number> {
        None
    }
}

impl<T: Choice> SettingValue for T {
    fn read(text: &str) -> Result<T, String> {
        named(text)
    }

    fn choices() -> Vec<(&'static str, &'static str)> {
        let all = T::ALL.iter().map(|(_, name, help)| (*name, *help));
        all.collect()
    }
}

macro_rules! read_by_parsing {
    ($($kind:ty, $form:ident: $expected:literal $(, $number:expr)?;)+) => {$(
        impl SettingValue for $kind {
            const FORM: Form = Form::$form;

            fn read(text: &str) -> Result<$kind, String> {
                text.parse().map_err(|_| format!("expected {}", $expected))
            }
            $(
                fn number(&self) -> Option<Number> {
                    let number: fn($kind) -> Number = $number;
                    Some(number(*self))
                }
            )?
        }
    )+};
}

read_by_parsing! {
    u64, One: "a whole number that is not negative, as in 128", Number::Whole;
    usize, One: "a whole number, 1 or more, as in 4", |number| Number::Whole(number as u64);
    String, One: "text";
    PathBuf, One: "a path";
}

impl SettingValue for f64 {
    fn read(text: &str) -> Result<f64, String> {
        text.parse().map_err(|_| {
            let percent = text.strip_suffix('%').and_then(|it| it.parse::<f64>().ok());
            let meant = percent.map(|percent| format!(" ({text} is {})", percent / 100.0));
            "expected a number, as in 0.001 or 1e-3".to_string() + &meant.unwrap_or_default()
        })
    }

    fn number(&self) -> Option<Number> {
        Some(Number::Real(*self))
    }
}

impl SettingValue for bool {
    const FORM: Form = Form::Switch;

    fn read(text: &str) -> Result<bool, String> {
        text.parse().map_err(|_| "expected true or false".into())
    }

    fn choices() -> Vec<(&'static str, &'static str)> {
        vec![("true", ""), ("false", "")]
    }
}

impl<T: SettingValue> SettingValue for Option<T> {
    const FORM: Form = T::FORM;

    fn read(text: &str) -> Result<Option<T>, String> {
        T::read(text).map(Some)
    }

    fn choices() -> Vec<(&'static str, &'static str)> {
        T::choices()
    }

    fn number(&self) -> Option<Number> {
        self.as_ref().and_then(T::number)
    }
}

macro_rules! read_lists {
    ($($kind:ty: $values:literal;)+) => {$(
        impl SettingValue for Vec<$kind> {
            const FORM: Form = Form::List;

            fn read(text: &str) -> Result<Vec<$kind>, String> {
                let values: Result<List<$kind>, String> = text.parse();
                let failed = |error: String| error.replacen("values", $values, 1);
                values.map(|List(values)| values).map_err(failed)
            }
        }
    )+};
}

read_lists! {
    usize: "whole numbers";
    String: "values";
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
