//! Marks of the texts that a template generates.

use std::ops::Range;

/// Begins and ends what a template marks by `{% generation %}`: texts with these are refused.
pub(crate) const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// The template with filters in place of `{% generation %}`.
#[cfg_attr(not(feature = "tokenizers"), expect(dead_code))]
pub(super) fn with_marks(source: &str) -> String {
    let (mut text, mut rest) = (String::new(), source);
    while let Some((start, length)) = rest
        .find("{%")
        .and_then(|start| Some((start, rest[start..].find("%}")?)))
    {
        let (before, tag) = (&rest[..start], &rest[start..start + length]);
        text += before;
        text += &match tag.trim_matches(|c: char| c.is_whitespace() || "{%-+".contains(c)) {
            word @ "generation" => tag.replace(word, "filter generation"),
            word @ "endgeneration" => tag.replace(word, "endfilter"),
            _ => tag.into(),
        };
        rest = &rest[start + length..];
    }
    text + rest
}

/// A text without marks, and the ranges between them.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Marked {
    pub(crate) text: String,
    pub(crate) ranges: Vec<Range<usize>>,
}

impl Marked {
    pub(super) fn of(marked: &str) -> Marked {
        let (mut text, mut ranges) = (String::new(), Vec::<Range<usize>>::new());
        for part in marked.split_inclusive(MARKS) {
            text += part.trim_end_matches(MARKS);
            if part.ends_with(MARKS[0]) {
                ranges.push(text.len()..text.len());
            } else if let (true, Some(range)) = (part.ends_with(MARKS[1]), ranges.last_mut()) {
                range.end = text.len();
            }
        }
        Marked { text, ranges }
    }
}
