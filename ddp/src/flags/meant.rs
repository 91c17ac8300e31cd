//! Flags of other programs (PyTorch's scripts, torchrun, Hugging Face's trainer, Lightning) and
//! their names here.

use crate::config::find;

/// A line for each flag, value or command: its names in other programs, a bar, and what to write
/// here.
const OTHERS: &str = include_str!("meant.txt");

/// The names in other programs, and what to write here.
fn others() -> impl Iterator<Item = (&'static str, &'static str)> {
    OTHERS.lines().filter_map(|line| line.split_once(" | "))
}

/// What to write for `name`, which is misspelled or another program's: a flag, `flag=value` or
/// `command=name`.
pub(crate) fn meant(name: &str) -> Option<String> {
    // `-c` is no `--C`.
    if name.len() == 2 && name.starts_with('-') {
        return None;
    }
    let name = name
        .trim_start_matches('-')
        .replace('_', "-")
        .to_lowercase();
    let known = find(&name).map(|setting| format!("write --{}", setting.name()));
    let of_others = || others().find(|(names, _)| names.split(' ').any(|known| known == name));
    known.or_else(|| of_others().map(|(_, here)| here.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SETTINGS;

    #[test]
    fn no_name_of_ours_and_no_name_twice_is_among_those_of_others() {
        let mut names: Vec<&str> = others().flat_map(|(names, _)| names.split(' ')).collect();
        let count = names.len();
        assert!(count > 100 && others().count() == OTHERS.lines().count());
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        let is_ours = |name: &&&str| SETTINGS.iter().any(|setting| setting.name() == **name);
        assert_eq!(names.iter().find(is_ours), None);
    }

    #[test]
    fn every_flag_that_is_advised_exists() {
        let words = others().flat_map(|(_, here)| here.split([' ', ',', ';', ':']));
        for flag in words.filter_map(|word| word.strip_prefix("--")) {
            let is_setting = SETTINGS.iter().any(|setting| setting.name() == flag);
            let others = "checkpoint dry-run held-out hosts no-python prompt ranks";
            assert!(
                is_setting || others.split(' ').any(|it| it == flag),
                "--{flag}"
            );
        }
    }
}
