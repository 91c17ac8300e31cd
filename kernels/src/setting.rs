//! The names of settings in messages: in backquotes, or as a program spells them.

use std::fmt;
use std::sync::OnceLock;

/// The name of a setting, as a message shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SettingName<'a>(pub &'a str);

/// How the program writes the name of a setting.
static SPELLING: OnceLock<fn(&str) -> String> = OnceLock::new();

/// Makes all messages of this process write the names of settings so, as flags for example. The
/// first call counts.
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
