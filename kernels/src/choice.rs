//! Settings that take one of a few names, each with a line of help.

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

        impl $crate::choice::Choice for $kind {
            const ALL: &'static [($kind, &'static str, &'static str)] =
                &[$(($kind::$value, $name, $help.trim_ascii())),+];
        }

        impl ::std::str::FromStr for $kind {
            type Err = String;

            fn from_str(name: &str) -> Result<$kind, String> {
                $crate::choice::named(name)
            }
        }
    };
}
